"""Who serves at a Unix socket: the pid that the kernel tells, and the version that the server tells.

For verbs that refuse to get in its way, or end it. Standard library only; touches one connection.
"""

from __future__ import annotations

import socket
import struct

from holdfast.cli import stateless

#: A server that is stopped, or being started again, is named by its pid alone.
_ANSWER_SECONDS = 1.0


def who_serves(path: str) -> str | None:
    """Its pid and its version, for people; None if nobody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(path)
        except OSError:
            return None  # whoever wants to listen there is told what is wrong
        pid = listener_of(connection)
        try:
            status = stateless.call(connection, "environment/status", {}).message.get("result", {})
        except (OSError, stateless.Refused):
            return f"pid {pid}, of unknown version"
    return f"pid {status.get('pid', pid)}, version {status.get('version', 'unknown')}"


def listener_of(connection: socket.socket) -> int:
    """The pid of the process that listens at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
