"""`holdfast inspect`: prints the full status of processes, terminals and shells as JSON; changes nothing."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli.support.sandbox_option import LOCAL, SandboxOption, open_exec
from holdfast.cli.support.typed_verb import run_async
from holdfast.errors import UnknownProcess, UnknownShell, UnknownTerminal
from holdfast.exec_api import ExecApi


def command(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Processes, terminals and shells.")],
    sandbox: SandboxOption = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the array on one line.")] = False,
) -> int:
    """Print the full status of processes, terminals and shells as JSON.

    Prints one array with an object for each ID: "id", "kind" (process, terminal or shell), the status of each kind
    that the id has, and "usage", the resources of the program with everything that it started.
    """
    return run_async(_inspect(sandbox, ids, as_json))


async def _inspect(sandbox: str, ids: list[str], as_json: bool) -> int:
    async with open_exec(sandbox, ids=ids) as api:
        usages = {usage.process_id: usage for usage in (await api.usage(ids)).usages}
        found = [{**await describe(api, id), "usage": usages.get(id)} for id in ids]
    text = msgspec.json.encode(found)
    print((text if as_json else msgspec.json.format(text)).decode())
    return 0


async def describe(api: ExecApi, id: str) -> dict[str, Any]:
    """Return the kind of an id and its status: of a terminal also that of its process."""
    try:
        process = await api.describe(id)
    except UnknownProcess:
        try:
            return {"id": id, "kind": "shell", "shell": await api.describe_shell(id)}
        except UnknownShell:
            raise UnknownProcess(f"no process, terminal or shell {id!r}") from None
    try:
        terminal = await api.describe_terminal(id)
    except UnknownTerminal:
        return {"id": id, "kind": "process", "process": process}
    return {"id": id, "kind": "terminal", "process": process, "terminal": terminal}
