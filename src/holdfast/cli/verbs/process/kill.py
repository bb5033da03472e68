"""`holdfast kill`: ends processes with everything they started, or sends them a signal."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from holdfast.cli.support.exit_codes import FAILED, describe
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec, with_suggestion
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.errors import CallerError
from holdfast.exec_api import ExecApi


def command(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...")] = None,
    sandbox: SandboxOption = LOCAL,
    force: Annotated[bool, typer.Option("--force", "-f", help="KILL at once instead of TERM first.")] = False,
    grace: Annotated[float, typer.Option(metavar="S", min=0, help="Time between TERM and KILL.")] = 5.0,
    signal: Annotated[
        str | None,
        typer.Option("--signal", "-s", metavar="NAME", help="Send this signal instead, and do not wait."),
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Every process that runs.")] = False,
    as_json: JsonOption = False,
) -> int:
    """End processes and everything they started, or send a signal.

    Returns when all of them have ended, and prints the id of each that was running. A process that has already
    ended is no error; an unknown id is.
    """
    if bool(ids) == all:
        raise typer.BadParameter("name the processes, or pass --all.")
    if signal is not None and force:
        raise typer.BadParameter("--signal and --force exclude each other.")
    return run_async(_kill(sandbox, ids or [], force, grace, signal, as_json))


async def _kill(sandbox: str, ids: list[str], force: bool, grace: float, signal: str | None, as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        chosen = ids or [info.process_id for info in await api.list() if info.running]
        outcomes = await asyncio.gather(
            *(_kill_one(api, process_id, force, grace, signal) for process_id in chosen), return_exceptions=True
        )
        code = 0
        for process_id, outcome in zip(chosen, outcomes, strict=True):
            if isinstance(outcome, CallerError):
                complain(describe(await with_suggestion(api, outcome, (process_id,))))
                code = FAILED
            elif isinstance(outcome, BaseException):
                raise outcome
            elif as_json:
                print(json.dumps({"processId": process_id, "wasRunning": outcome}))
            elif outcome:
                print(process_id)
    return code


async def _kill_one(api: ExecApi, process_id: str, force: bool, grace: float, signal: str | None) -> bool:
    """Kill one process; whether it was running."""
    if signal is not None:
        await api.signal(process_id, signal)
        return True
    if await api.terminate(process_id, grace=grace, force=force):
        return True
    # The reply is the same for an unknown id, for which `describe` raises an error.
    await api.describe(process_id)
    return False
