"""`holdfast wait`: waits for a process, unless it has ended, and exits with its code."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from holdfast.cli.support.exit_codes import TIMED_OUT
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async


def command(
    process_id: Annotated[str, typer.Argument(metavar="ID")],
    sandbox: SandboxOption = LOCAL,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Stop waiting after S seconds; exit code 124.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Wait for a process and exit with its code.

    128+n after signal n, 124 after the timeout (the process keeps running), 125 if holdfast failed.
    """
    return run_async(_wait(sandbox, process_id, timeout, as_json))


async def _wait(sandbox: str, process_id: str, timeout: float | None, as_json: bool) -> int:
    async with open_exec(sandbox, ids=[process_id]) as api:
        status = await api.wait(process_id, timeout=timeout)
    if as_json:
        ended = {} if status is None else {"exitCode": status.exit_code, "signal": status.signal}
        print(json.dumps({"processId": process_id, "running": status is None, **ended}))
    if status is None:
        complain(f"{process_id} still runs after {timeout or 0:g} s")
        return TIMED_OUT
    return status.exit_code
