"""`holdfast stop`: end a server and everything that runs in it, and wait until it is gone.

What is ended, and when that is refused, is in `stopping`. This module reaches the server and prints the report.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Final

import msgspec
import typer

from holdfast.cli.support.exit_codes import FAILED, NO_SERVER
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption
from holdfast.cli.support.server_at import called, is_websocket, run_inside, socket_at
from holdfast.cli.support.stopping import Contents, Stopped, patience, stop_at
from holdfast.cli.support.text import complain, show_table
from holdfast.cli.support.typed_verb import run_async
from holdfast.errors import InvalidParams, SandboxError, TransportError
from holdfast.wire import messages as m, methods

HEADER: Final = ("KIND", "ID", "COMMAND")
#: Between two looks whether a server at a WebSocket is gone.
_LOOK_SECONDS: Final = 0.1


def command(
    sandbox: SandboxOption = LOCAL,
    grace: Annotated[
        float | None,
        typer.Option(metavar="S", min=0, help="Time between TERM and KILL (default: the server's setting)."),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Stop the server alone: what runs stays with its keeper, for the next server."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Stop it though other clients are connected to it.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Stop a server and everything that runs in it: this machine's, or that of --sandbox.

    Prints what ended, and returns when the server is gone; exit code 3 if none runs. Refused, with exit code 1,
    while other clients are connected, a session service among them, unless --force is given.
    """
    path = socket_at(sandbox)
    if path is not None:
        done = stop_at(path, grace=grace, keep=keep, force=force)
    elif is_websocket(sandbox):
        if keep:
            raise InvalidParams(f"--keep: not for {sandbox}; say it on the server's machine")
        done = run_async(_stop_called(sandbox, grace, force))
    else:
        done = run_async(_stop_inside(sandbox, grace, keep, force))
    return _tell(done, as_json)


def _tell(done: Stopped, as_json: bool) -> int:
    if as_json:
        if done.report:
            print(json.dumps(done.report))
    elif ends := done.report.get("ended") or done.report.get("ends"):
        show_table(HEADER, [(each["kind"], each["id"], each["command"]) for each in ends])
    if done.complaint:
        complain(done.complaint)
    return done.code


async def _stop_inside(sandbox: str, grace: float | None, keep: bool, force: bool) -> Stopped:
    options = [*(["--keep"] if keep else []), *(["--force"] if force else [])]
    options += [] if grace is None else ["--grace", str(grace)]
    # The verb inside has its own patience, which goes first.
    done = await run_inside(sandbox, ["stop", "--json", *options], seconds=2 * patience(grace))
    if done is None:
        return Stopped(NO_SERVER, {}, f"no server runs in {sandbox}")
    try:
        report: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
    except ValueError:
        raise SandboxError(f"{sandbox}: stop printed {done.stdout!r} inside: {done.summary}") from None
    return Stopped(done.exit_code, report, done.stderr.strip().removeprefix("holdfast: "))


async def _stop_called(sandbox: str, grace: float | None, force: bool) -> Stopped:
    async with called(sandbox) as api:
        status, processes, shells, terminals, info = await asyncio.gather(
            api.status(), api.list(), api.list_shells(), api.list_terminals(), api.info()
        )
        contents = Contents(
            msgspec.to_builtins(status),
            msgspec.to_builtins(processes),
            msgspec.to_builtins(shells),
            msgspec.to_builtins(terminals),
            info.holdfast,
        )
        if not force and (refused := contents.refusal(status.pid)) is not None:
            return refused
        params = m.ShutdownParams(None if grace is None else round(grace * 1000))
        await api.connection.call(methods.SERVER_SHUTDOWN, params)
        try:
            async with asyncio.timeout(patience(grace)):
                while True:
                    await api.connection.call(methods.PING, m.Empty())
                    await asyncio.sleep(_LOOK_SECONDS)
        except TransportError:
            return Stopped(0, contents.report(status.pid, stopped=True))
        except TimeoutError:
            return Stopped(FAILED, {}, f"the server, pid {status.pid}, was told to stop and still runs")
