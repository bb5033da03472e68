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
from holdfast.cli.verbs.process.process_listing import HEADER, Filters, Listing
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids, one a line.")] = False,
    filter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Only these: id=GLOB, state=STATE, exit=CODE, command=TEXT, user=NAME, kind=process or terminal.",
        ),
    ] = None,
    no_trunc: Annotated[
        bool, typer.Option("--no-trunc", help="Print whole commands, in plain columns, also on a terminal.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """List processes.

    STATE is running, closing (the process ended, one that it started still holds its output) or ended; of a
    terminal that reports its prompts, idle or busy. Proxies that Holdfast runs for a bridge or for a session's
    network are listed with --all and in JSON, there with "internal": true. --json prints one array; with --watch
    one array a line. A process is listed if it matches one --filter of each key; state=ended and exit=CODE also
    list ended processes.
    """
    try:
        filters = Filters(filter or ())
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None
    view = _View(all=all, quiet=quiet, whole=no_trunc, as_json=as_json, filters=filters)
    if sandbox == LOCAL and not watch and not is_running():
        # Without a server there are no processes; listing must not start one.
        view.show(Listing())
        return 0
    return run_async(_ps(sandbox, watch, view))


class _View:
    """How a listing is printed."""

    def __init__(self, *, all: bool, quiet: bool, whole: bool, as_json: bool, filters: Filters) -> None:
        self.all = all
        self.filters = filters
        self._quiet = quiet
        self._whole = whole
        self._as_json = as_json

    @property
    def is_table(self) -> bool:
        """Whether the listing is a table that fits the terminal."""
        return on_terminal() and not (self._as_json or self._quiet or self._whole)

    def show(self, listing: Listing) -> None:
        if self._as_json:
            found = listing.ids(all=self.all) if self._quiet else listing.objects(all=self.all)
            print(msgspec.json.encode(found).decode(), flush=True)
        elif self._quiet:
            print("".join(f"{id}\n" for id in listing.ids(all=self.all)), end="", flush=True)
        else:
            show_table(HEADER, listing.rows(all=self.all, now=time.time()), plain=self._whole)


async def _ps(sandbox: str, watch: bool, view: _View) -> int:
    async with open_exec(sandbox) as api:
        if watch and view.is_table:
            await _live(api, view)
        else:
            view.show(await _listing(api, view.filters))
            while watch:
                await asyncio.sleep(_REFRESH_SECONDS)
                view.show(await _listing(api, view.filters))
    return 0


async def _live(api: ExecApi, view: _View) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            table = (await _listing(api, view.filters)).rows(all=view.all, now=time.time())
            live.update(rich_table(HEADER, table, live.console.width), refresh=True)
            await asyncio.sleep(_REFRESH_SECONDS)


async def _listing(api: ExecApi, filters: Filters) -> Listing:
    processes, terminals = await asyncio.gather(api.list(), api.list_terminals())
    # Requested only if it matters: the server examines its machine for the reply.
    holdfast = (await api.info()).holdfast if any(may_be_helper(info.argv) for info in processes) else ()
    return Listing(msgspec.to_builtins(processes), msgspec.to_builtins(terminals), holdfast, filters)
