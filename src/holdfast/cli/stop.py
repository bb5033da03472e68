"""`holdfast stop`: end this machine's server and everything that runs in it, and wait until it is gone.

The server is asked over its socket. One that does not understand us, because it is of another version, gets TERM.
Its keeper, if it has one, ends with it, and is waited for.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
from typing import Annotated, Final

import typer

from holdfast.cli import stateless
from holdfast.cli.exit_codes import FAILED, NO_SERVER
from holdfast.cli.sandbox_option import JsonOption
from holdfast.cli.typed_verb import complain
from holdfast.local_server import connect_running, socket_path

#: What the server has for itself beyond the grace of its processes: closing connections, removing its spool.
_MARGIN_SECONDS: Final = 15.0
#: The longest grace that its settings are likely to give when we do not name one.
_SETTING_SECONDS: Final = 30.0


def command(
    grace: Annotated[
        float | None,
        typer.Option(metavar="S", min=0, help="Time between TERM and KILL (default: the server's setting)."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Stop this machine's server and everything that runs in it.

    Returns when it is gone; exit code 3 if none runs.
    """
    connection = connect_running()
    if connection is None:
        complain(f"no server runs at {socket_path()}")
        return NO_SERVER
    with connection:
        pid = _listener(connection)
        keeper = _keeper(connection)
        # Opened before the server is told, so that it is surely this server and not a later process with its pid.
        watch = os.pidfd_open(keeper or pid)
        try:
            if keeper is None or not _ask(connection, grace):
                signal.pidfd_send_signal(watch, signal.SIGTERM)
            gone = _wait(watch, _MARGIN_SECONDS + (_SETTING_SECONDS if grace is None else grace))
        finally:
            os.close(watch)
    if not gone:
        complain(f"the server, pid {pid}, was told to stop and still runs")
        return FAILED
    if as_json:
        print(json.dumps({"pid": pid, "stopped": True}))
    return 0


def _listener(connection: socket.socket) -> int:
    """The pid of the process that listens at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def _keeper(connection: socket.socket) -> int | None:
    """The pid of the server's keeper; 0 if it has none, None if it does not understand us."""
    try:
        reply = stateless.call(connection, "environment/status", {})
    except (ConnectionError, stateless.Refused):
        return None
    pid: int | None = reply.message.get("result", {}).get("keeperPid")
    return pid or 0


def _ask(connection: socket.socket, grace: float | None) -> bool:
    """Whether the server took the request; one that went down before it had answered took it."""
    try:
        params = {} if grace is None else {"graceMs": round(grace * 1000)}
        return not stateless.call(connection, "server/shutdown", params, greet=False).is_error
    except ConnectionError:
        return True
    except stateless.Refused:
        return False


def _wait(watch: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
