"""`holdfast stop`: end this machine's server and everything that runs in it, and wait until it is gone.

The server is asked over its socket. One that does not understand us, because it is of another version, gets TERM.
Its keeper, if it has one, ends with it, and is waited for; with `--keep` it stays, and everything that runs.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from typing import Annotated, Final, NamedTuple

import typer

from holdfast.cli import stateless
from holdfast.cli.exit_codes import FAILED, NO_SERVER
from holdfast.cli.running_server import listener_of
from holdfast.cli.sandbox_option import JsonOption
from holdfast.cli.typed_verb import complain
from holdfast.errors import SandboxError, error_from_wire
from holdfast.local_server import connect_running, socket_path
from holdfast.waiting_keeper import find

#: What the server has for itself beyond the grace of its processes: closing connections, removing its spool.
_MARGIN_SECONDS: Final = 15.0
#: The longest grace that its settings are likely to give when we do not name one.
_SETTING_SECONDS: Final = 30.0


def command(
    grace: Annotated[
        float | None,
        typer.Option(metavar="S", min=0, help="Time between TERM and KILL (default: the server's setting)."),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Stop the server alone: what runs stays with its keeper, for the next server."),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Stop this machine's server and everything that runs in it.

    Returns when it is gone; exit code 3 if none runs.
    """
    connection = connect_running()
    if connection is None:
        return _stop_keeper(keep, as_json)
    if keep:
        with connection:
            left = leave(connection)
        if as_json:
            print(json.dumps({"pid": left.pid, "stopped": True, "keeperPid": left.keeper}))
        return 0
    with connection:
        pid = listener_of(connection)
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


class Left(NamedTuple):
    """A server that left what it ran to its keeper."""

    pid: int
    version: str
    keeper: int


def leave(connection: socket.socket) -> Left:
    """Have the server leave what it runs to its keeper, and wait until it has; an error if it cannot."""
    pid = listener_of(connection)
    watch = os.pidfd_open(pid)
    try:
        status = stateless.call(connection, "environment/status", {}).message.get("result", {})
        if not status.get("keeperPid"):
            raise SandboxError(
                f"the server, pid {pid}, has no keeper, and what runs would end with it: nothing was stopped"
            )
        try:
            reply = stateless.call(connection, "server/shutdown", {"keep": True}, greet=False)
        except ConnectionError:
            pass  # it went before it had answered
        else:
            if reply.is_error:
                failure = reply.message["error"]
                raise error_from_wire(failure["code"], failure["message"], failure.get("data"))
        if not _wait(watch, _MARGIN_SECONDS):
            raise SandboxError(f"the server, pid {pid}, was told to leave and still runs")
    except stateless.Refused as error:
        raise SandboxError(f"the server, pid {pid}, refused: {error}") from None
    finally:
        os.close(watch)
    return Left(pid, status["version"], status["keeperPid"])


def _stop_keeper(keep: bool, as_json: bool) -> int:
    """No server runs. If a keeper waits for one, it ends with all that it holds, unless that is to be kept."""
    waiting = find(socket_path())
    if waiting is None:
        complain(f"no server runs at {socket_path()}")
        return NO_SERVER
    watch = os.pidfd_open(waiting.pid)
    try:
        waiting.close()
        if not keep:
            signal.pidfd_send_signal(watch, signal.SIGTERM)
            if not _wait(watch, _MARGIN_SECONDS + _SETTING_SECONDS):
                complain(f"the keeper, pid {waiting.pid}, was told to stop and still runs")
                return FAILED
    finally:
        os.close(watch)
    if as_json:
        print(json.dumps({"pid": None, "stopped": not keep, "keeperPid": waiting.pid}))
    elif keep:
        complain(f"no server runs at {socket_path()}; a keeper, pid {waiting.pid}, waits for one already")
    return NO_SERVER if keep else 0


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
