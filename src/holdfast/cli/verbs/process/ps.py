"""`holdfast ps`: lists the running processes, or all retained ones, once or repeatedly."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Final

import msgspec
import typer

from holdfast.cli.support.running_server import may_be_helper
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.support.text import on_terminal, rich_table, show_table
from holdfast.cli.support.typed_verb import run_async
from holdfast.cli.verbs.process.process_listing import HEADER, Listing
from holdfast.exec_api import ExecApi
from holdfast.launch.local_server import is_running

#: Ages are shown in seconds, so the table is refreshed every second.
_REFRESH_SECONDS: Final = 1.0


def command(
    sandbox: SandboxOption = LOCAL,
    all: Annotated[
        bool, typer.Option("--all", "-a", help="Also those that ended and are retained, and Holdfast's own.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh the list until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> int:
    """List processes.

    STATE is running, closing (the process ended, one that it started still holds its output) or ended; of a
    terminal that reports its prompts, idle or busy. Proxies that Holdfast runs for a bridge or for a session's
    network are listed with --all and in JSON, there with "internal": true. --json prints one array; with --watch
    one array a line.
    """
    if sandbox == LOCAL and not watch and not is_running():
        # Without a server there are no processes; listing must not start one.
        _show(Listing(), all, as_json)
        return 0
    return run_async(_ps(sandbox, all, watch, as_json))


async def _ps(sandbox: str, all: bool, watch: bool, as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        if watch and on_terminal() and not as_json:
            await _live(api, all)
        else:
            _show(await _listing(api), all, as_json)
            while watch:
                await asyncio.sleep(_REFRESH_SECONDS)
                _show(await _listing(api), all, as_json)
    return 0


async def _live(api: ExecApi, all: bool) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            table = (await _listing(api)).rows(all=all, now=time.time())
            live.update(rich_table(HEADER, table, live.console.width), refresh=True)
            await asyncio.sleep(_REFRESH_SECONDS)


async def _listing(api: ExecApi) -> Listing:
    processes, terminals = await asyncio.gather(api.list(), api.list_terminals())
    # Requested only if it matters: the server examines its machine for the reply.
    holdfast = (await api.info()).holdfast if any(may_be_helper(info.argv) for info in processes) else ()
    return Listing(msgspec.to_builtins(processes), msgspec.to_builtins(terminals), holdfast)


def _show(listing: Listing, all: bool, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(listing.objects(all=all)).decode(), flush=True)
    else:
        show_table(HEADER, listing.rows(all=all, now=time.time()))
