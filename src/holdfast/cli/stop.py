"""`holdfast stop`: end this machine's server and everything that runs in it, and wait until it is gone."""

from __future__ import annotations

import json
import os
import select
from typing import Annotated, Final

import typer

from holdfast.cli import stateless
from holdfast.cli.exit_codes import FAILED, NO_SERVER
from holdfast.cli.sandbox_option import JsonOption
from holdfast.cli.status import ask
from holdfast.cli.typed_verb import complain
from holdfast.errors import HandshakeFailed, error_from_wire
from holdfast.local_server import connect_running

#: What the server has for itself beyond the grace of its processes: closing connections, removing its spool.
_MARGIN_SECONDS: Final = 15.0


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
    status = ask()
    if status is None:
        complain("no server runs")
        return NO_SERVER
    gone = _shut_down(status.pid, grace)
    if not gone:
        complain(f"the server, pid {status.pid}, was told to stop and still runs")
        return FAILED
    if as_json:
        print(json.dumps({"pid": status.pid, "stopped": True}))
    return 0


def _shut_down(pid: int, grace: float | None) -> bool:
    """Whether the server is gone."""
    connection = connect_running()
    if connection is None:
        return True
    try:
        # Opened before the server is told, so that it is surely this server's pid and not a later one's.
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        connection.close()
        return True
    try:
        with connection:
            try:
                params = {} if grace is None else {"graceMs": round(grace * 1000)}
                reply = stateless.call(connection, "server/shutdown", params)
            except ConnectionError:
                # It went down before it had answered: its end, not its answer, is what we wait for.
                reply = None
            except stateless.Refused as error:
                raise HandshakeFailed(f"the server refused: {error}") from None
        if reply is not None and reply.is_error:
            failure = reply.message["error"]
            raise error_from_wire(failure["code"], failure["message"], failure.get("data"))
        poller = select.poll()
        poller.register(watch, select.POLLIN)
        patience = _MARGIN_SECONDS + (grace if grace is not None else 30.0)
        return bool(poller.poll(patience * 1000))
    finally:
        os.close(watch)
