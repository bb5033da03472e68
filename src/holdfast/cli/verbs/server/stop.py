"""`holdfast stop`: stops a server with all of its processes, and waits until it has ended.

`stopping` lists the processes and refuses the stop; this module reaches the server and prints the report.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Final

import msgspec
import typer

from holdfast.cli.support.exit_codes import FAILED, NO_SERVER
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption
from holdfast.cli.support.text import complain, show_table
from holdfast.cli.support.typed_verb import run_async
from holdfast.cli.verbs.inside.stopping import ServerContents, StopResult, patience, stop_at
from holdfast.cli.verbs.server.server_at import connected, is_websocket, run_inside, socket_at
from holdfast.errors import InvalidParams, SandboxError, TransportError
from holdfast.wire import messages as m

HEADER: Final = ("KIND", "ID", "COMMAND")
#: Between two pings of a server at a WebSocket, to detect its end.
_PING_SECONDS: Final = 0.1


def command(
    sandbox: SandboxOption = LOCAL,
    grace: Annotated[
        float | None,
        typer.Option(metavar="S", min=0, help="Time between TERM and KILL (default: the server's setting)."),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="Stop the server alone: its processes stay with the keeper, for the next server."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Stop it even if other clients are connected.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Stop a server and everything that runs in it: this machine's, or that of --sandbox.

    Prints what ended, and returns when the server has ended; exit code 3 if none runs. Refused, with exit code 1,
    while other clients are connected, such as a session service, unless --force is given.
    """
    path = socket_at(sandbox)
    if path is not None:
        done = stop_at(path, grace=grace, keep=keep, force=force)
    elif is_websocket(sandbox):
        if keep:
            raise InvalidParams(f"--keep: not for {sandbox}; use it on the server's machine")
        done = run_async(_stop_by_call(sandbox, grace, force))
    else:
        done = run_async(_stop_inside(sandbox, grace, keep, force))
    return _report(done, as_json)


def _report(done: StopResult, as_json: bool) -> int:
    if as_json:
        if done.report:
            print(json.dumps(done.report))
    elif ends := done.report.get("ended") or done.report.get("ends"):
        show_table(HEADER, [(each["kind"], each["id"], each["command"]) for each in ends])
    if done.complaint:
        complain(done.complaint)
    return done.code


async def _stop_inside(sandbox: str, grace: float | None, keep: bool, force: bool) -> StopResult:
    options = [*(["--keep"] if keep else []), *(["--force"] if force else [])]
    options += [] if grace is None else ["--grace", str(grace)]
    # The verb inside has a limit of its own, which ends first.
    done = await run_inside(sandbox, ["stop", "--json", *options], seconds=2 * patience(grace))
    if done is None:
        return StopResult(NO_SERVER, {}, f"no server runs in {sandbox}")
    try:
        report: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
    except ValueError:
        raise SandboxError(f"{sandbox}: stop printed {done.stdout!r} inside: {done.summary}") from None
    return StopResult(done.exit_code, report, done.stderr.strip().removeprefix("holdfast: "))


async def _stop_by_call(sandbox: str, grace: float | None, force: bool) -> StopResult:
    async with connected(sandbox) as api:
        status, processes, shells, terminals, info = await asyncio.gather(
            api.status(), api.list(), api.list_shells(), api.list_terminals(), api.info()
        )
        contents = ServerContents(
            msgspec.to_builtins(status),
            msgspec.to_builtins(processes),
            msgspec.to_builtins(shells),
            msgspec.to_builtins(terminals),
            info.holdfast,
        )
        if not force and (refused := contents.refusal(status.pid)) is not None:
            return refused
        params = m.ShutdownParams(None if grace is None else round(grace * 1000))
        await api.connection.call(m.SERVER_SHUTDOWN, params)
        try:
            async with asyncio.timeout(patience(grace)):
                while True:
                    await api.connection.call(m.PING, m.Empty())
                    await asyncio.sleep(_PING_SECONDS)
        except TransportError:
            return StopResult(0, contents.report(status.pid, stopped=True))
        except TimeoutError:
            return StopResult(FAILED, {}, f"the server, pid {status.pid}, did not stop in time")
