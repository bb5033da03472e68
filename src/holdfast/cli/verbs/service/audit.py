"""`holdfast audit`: shows the audit log of the session service, and verifies it.

Reads the service's database directly, so that no service need run; it changes nothing there.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from holdfast.cli.support.exit_codes import FAILED
from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async, service_extra
from holdfast.errors import InvalidParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from holdfast.service.api import AuditFilter
    from holdfast.service.store import Store
    from holdfast.service.types import AuditRow

#: Rows of one read; bounds the memory.
_PAGE: Final = 1_000

StoreOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The service's database: sqlite:///PATH or postgresql://…"),
]
ConfigOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="The service's settings, which name the database and the key.")
]
KeyOption = Annotated[str | None, typer.Option(metavar="FILE", help="The key of the audit, if it has one.")]


def command(
    session: Annotated[
        str | None, typer.Option(metavar="ID", help="Of this session; '' is the service itself.")
    ] = None,
    agent: Annotated[str, typer.Option(metavar="ID", help="Of this agent.")] = "",
    kind: Annotated[list[str] | None, typer.Option(metavar="KIND", help="Of this kind; may be repeated.")] = None,
    command_id: Annotated[str, typer.Option(metavar="ID", help="Of this command.")] = "",
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Not before: 10m, 2h, 3d, a date, @SECONDS.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before.")] = None,
    contains: Annotated[str, typer.Option(metavar="TEXT", help="With this text.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print further rows as they are written.")] = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show the audit log of the session service: a line for each row, oldest first.

    The database is that of the service's settings on this machine, or that of --store. With --json a JSON object a
    line.
    """
    from holdfast.service.api import AuditFilter
    from holdfast.service.audit.playback import moment

    now = time.time()
    which = AuditFilter(
        session_id=session,
        agent_id=agent,
        kinds=tuple(kind or ()),
        command_id=command_id,
        since=None if since is None else moment(since, now),
        until=None if until is None else moment(until, now),
        contains=contains,
    )
    return run_async(_show(which, follow, as_json, store, config))


def verify(
    session: Annotated[str | None, typer.Option(metavar="ID", help="This session alone.")] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="SEQ:HASH", help="The head of an earlier verification, which must still exist."),
    ] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
) -> int:
    """Verify the audit log; exit code 1, with each row that was changed, if it was changed.

    Prints the head of the service's own stream. Stored where the database's owner cannot change it and given with
    --head, it later proves that no row was cut off since.
    """
    return run_async(_verify(session, _head(head), as_json, store, config, key_file))


SUB_VERBS: Final = {"verify": verify}


async def _show(which: AuditFilter, follow: bool, as_json: bool, store: str | None, config: str | None) -> int:
    async with _opened(store, config, None) as opened:
        if not follow:
            count = 0
            async for row in _stored_rows(opened, which):
                _print(row, as_json)
                count += 1
            if not count and not as_json:
                complain("no row matches")
            return 0
        # Following begins first, so that rows written during the read are not lost.
        async with opened.follow(which) as rows:
            shown: dict[str, int] = {}
            async for row in _stored_rows(opened, which):
                shown[row.session_id] = max(row.seq, shown.get(row.session_id, 0))
                _print(row, as_json)
            async for row in rows:
                if row.seq > shown.get(row.session_id, 0):
                    _print(row, as_json)
    return 0


async def _stored_rows(store: Store, which: AuditFilter) -> AsyncIterator[AuditRow]:
    from holdfast.service.store import Page

    token = ""
    while True:
        rows, token = await store.rows(which, Page(_PAGE, token))
        for row in rows:
            yield row
        if not token:
            return


def _print(row: AuditRow, as_json: bool) -> None:
    from holdfast.service.audit import playback

    text = json.dumps(playback.fields(row), ensure_ascii=False) if as_json else playback.line(row)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def _verify(
    session: str | None,
    head: tuple[int, str] | None,
    as_json: bool,
    store: str | None,
    config: str | None,
    key_file: str | None,
) -> int:
    async with _opened(store, config, key_file) as opened:
        found = await opened.verify(session, head=head)
    if as_json:
        shown = {
            "holds": found.holds,
            "rows": found.rows,
            "sessions": found.sessions,
            "removed": found.removed,
            "breaks": [
                {"sessionId": each.session_id, "seq": each.seq, "fault": each.fault, "detail": each.detail}
                for each in found.breaks
            ],
            "further": found.further,
            "head": f"{found.head_seq}:{found.head_hash}",
        }
        sys.stdout.write(json.dumps(shown) + "\n")
    elif found.holds:
        gone = f"; {found.removed} more were removed by retention" if found.removed else ""
        sys.stdout.write(f"the audit holds: {found.rows} rows of {found.sessions} sessions{gone}\n")
        sys.stdout.write(f"head {found.head_seq}:{found.head_hash}\n")
    else:
        for each in found.breaks:
            sys.stdout.write(f"{each}\n")
        if found.further:
            sys.stdout.write(f"and {found.further} more\n")
        sys.stdout.write("the audit does not hold\n")
    return 0 if found.holds else FAILED


def _head(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    seq, _, hash = text.partition(":")
    if not seq.isdigit() or not hash:
        raise InvalidParams(f"--head {text!r}: give SEQ:HASH, as `holdfast audit verify` printed it")
    return int(seq), hash


@asynccontextmanager
async def _opened(store: str | None, config: str | None, key_file: str | None) -> AsyncIterator[Store]:
    """Open the service's database for reading."""
    from holdfast.service.settings import load_settings

    settings = load_settings(config, store=store, audit_key_file=key_file)
    # SQLAlchemy and a database driver: imported late, so that --help needs neither.
    with service_extra():
        from holdfast.service.store import open_store

    async with await open_store(settings, read_only=True) as opened:
        yield opened
