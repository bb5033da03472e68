"""Reads the pid and the version of the server at a Unix socket, and identifies Holdfast's own processes.

For the verbs that start a server, list its processes, or end it. Standard library only; touches one connection.
"""

from __future__ import annotations

import socket
import struct

from holdfast.cli.support import stateless

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

#: For the reply with the version. A server that is stopped or restarting is described by its pid alone.
_ANSWER_SECONDS = 1.0
#: Verbs that the bridge and the session service start in a sandbox.
_HELPERS = ("model_proxy", "egress")


def describe_server(path: str) -> str | None:
    """Return pid and version of the server at `path` as a text; None if no process listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(path)
        except OSError:
            return None  # listening there fails with a better error
        pid = listener_of(connection)
        try:
            status = stateless.call(connection, "environment/status", {}).message.get("result", {})
        except OSError:
            return f"pid {pid}, of unknown version"
    return f"pid {status.get('pid', pid)}, version {status.get('version', 'unknown')}"


def is_helper(argv: Sequence[str], holdfast: Sequence[str]) -> bool:
    """Whether Holdfast runs a process for itself: the proxy of a bridge or of a session's network.

    `holdfast` is the server's own command for the verbs (`EnvironmentInfo.holdfast`).
    """
    length = len(holdfast)
    if not length or len(argv) <= length:
        return False
    return tuple(argv[:length]) == tuple(holdfast) and argv[length] in _HELPERS


def may_be_helper(argv: Sequence[str]) -> bool:
    """Whether `is_helper` can be true of a process, whatever the server's command is."""
    return any(verb in argv for verb in _HELPERS)


def listener_of(connection: socket.socket) -> int:
    """Return the pid of the process that listens at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
