"""`holdfast rm`: drops ended processes and terminals with their output, before their retention ends."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from holdfast.cli.support.exit_codes import FAILED, describe
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec, with_suggestion
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.errors import CallerError, InvalidRequest, UnknownProcess, UnknownShell
from holdfast.exec_api import ExecApi


def command(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...")] = None,
    sandbox: SandboxOption = LOCAL,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="End a running one first, with everything it started.")
    ] = False,
    grace: Annotated[
        float, typer.Option(metavar="S", min=0, help="With --force: time between TERM and KILL.")
    ] = 5.0,
    all: Annotated[bool, typer.Option("--all", help="Every process that has ended.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Drop ended processes and terminals with their output, and print the id of each.

    A running process is an error, unless --force ends it. --force also closes a live shell; the server keeps the
    status of the last closed shells.
    """
    if bool(ids) == all:
        raise typer.BadParameter("name the processes, or pass --all.")
    if all and force:
        raise typer.BadParameter("--all drops ended processes only; `holdfast kill --all` ends the others.")
    return run_async(_rm(sandbox, ids or [], force, grace, as_json))


async def _rm(sandbox: str, ids: list[str], force: bool, grace: float, as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        # A process that is closing still has output of a child.
        chosen = ids or [info.process_id for info in await api.list() if info.closed]
        outcomes = await asyncio.gather(
            *(_drop(api, id, force, grace) for id in dict.fromkeys(chosen)), return_exceptions=True
        )
        code = 0
        for id, outcome in zip(dict.fromkeys(chosen), outcomes, strict=True):
            if isinstance(outcome, CallerError):
                complain(describe(await with_suggestion(api, outcome, (id,))))
                code = FAILED
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                print(json.dumps({"id": id, "wasRunning": outcome}) if as_json else id)
    return code


async def _drop(api: ExecApi, id: str, force: bool, grace: float) -> bool:
    """Drop one process, or close a shell; whether it was running."""
    try:
        info = await api.describe(id)
    except UnknownProcess:
        return await _close_shell(api, id, force, grace)
    if info.running and not force:
        raise InvalidRequest(f"{id!r} still runs: end it with `holdfast kill {id}`, or pass --force")
    if force:
        # Also the children of an ended process: their output has no place afterwards.
        await api.terminate(id, grace=grace)
    await api.forget(id)
    return info.running


async def _close_shell(api: ExecApi, id: str, force: bool, grace: float) -> bool:
    try:
        status = await api.describe_shell(id)
    except UnknownShell:
        raise UnknownProcess(f"no process, terminal or shell {id!r}") from None
    if status.state == "closed":
        raise InvalidRequest(f"shell {id!r} is closed already; the server drops its status by itself")
    if not force:
        raise InvalidRequest(f"shell {id!r} is open: close it with `holdfast shell close {id}`, or pass --force")
    await api.close_shell(id, grace=grace)
    return True
