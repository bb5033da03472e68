"""The commands of a session as the audit log has them, newest first.

A SHELL has a row for each command and one for its end. A TERMINAL has rows for input and for the start and end of
commands: the text of a command is the input that was typed since the command before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from holdfast.service.api import AuditFilter
from holdfast.service.sessions.ports import SessionStore, body_of, first_row
from holdfast.service.store.types import Page
from holdfast.service.types import AuditRow, SessionRecord
from holdfast.service.view_api import SessionCommand

_KINDS: Final = ("command", "input", "command_started", "command_ended")
#: Rows that are read for one page: several for each command, more where a person types key by key.
_ROWS: Final = 1_000
#: Escape sequences of keys, and other control characters.
_KEYS: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)|[\x00-\x08\x0b\x0c\x0e-\x14\x16-\x1f]")


async def list_commands(
    store: SessionStore, record: SessionRecord, page_token: str
) -> tuple[list[SessionCommand], str]:
    """Return a page of commands, newest first, and the token of the next page."""
    which = AuditFilter(session_id=record.session_id, kinds=_KINDS, newest_first=True)
    rows, token = await store.rows(which, Page(_ROWS, page_token))
    commands = commands_of(record, rows)
    if page_token and commands and commands[0].ended_at is None:
        # The end of the newest command of a page may be on the page before.
        newest = commands[0]
        end = await first_row(
            store, session_id=record.session_id, command_id=newest.command_id, kinds=("command_ended",)
        )
        body = {"text": newest.text, "by": newest.by, "start": newest.start}
        commands[0] = _command(newest.command_id, newest.number, body, newest.started_at, end)
    return commands, token


def commands_of(record: SessionRecord, rows: Iterable[AuditRow]) -> list[SessionCommand]:
    """Return the commands that these rows are of, newest first; the rows are in the same order."""
    ordered = sorted(rows, key=lambda row: row.seq)
    made = _of_shell(ordered) if record.kind == "shell" else _of_terminal(ordered)
    return made[::-1]


def _of_shell(rows: Sequence[AuditRow]) -> list[SessionCommand]:
    ends = {row.command_id: row for row in rows if row.kind == "command_ended"}
    return [
        _command(row.command_id, number, body_of(row), row.at, ends.get(row.command_id))
        for number, row in enumerate((row for row in rows if row.kind == "command"), start=1)
    ]


def _of_terminal(rows: Sequence[AuditRow]) -> list[SessionCommand]:
    ends = {body_of(row)["start"]: row for row in rows if row.kind == "command_ended"}
    typed = [(row, body_of(row)) for row in rows if row.kind in ("input", "command")]
    # The row of a start can follow that of later input, so the id finds the input that the command is of.
    numbers = {row.command_id: number for number, (row, _) in enumerate(typed)}
    made, used = [], 0
    for row in rows:
        if row.kind != "command_started":
            continue
        body = body_of(row)
        last = numbers.get(row.command_id, -1)
        own = [] if last < 0 else [typed[last]]
        if own and own[0][0].kind == "input":
            own = typed[min(used, last) : last + 1]
        used = max(used, last + 1)
        text = "".join(str(each.get("text", "")) for _, each in own)
        if not own or own[0][0].kind == "input":
            text = typed_line(text)
        by = own[-1][1].get("by", "") if own else ""
        fields = {"text": text, "by": by, "start": body["start"]}
        made.append(_command(row.command_id, body["number"], fields, row.at, ends.get(body["start"])))
    return made


def _command(command_id: str, number: int, body: dict[str, Any], at: float, end: AuditRow | None) -> SessionCommand:
    ended = {} if end is None else body_of(end)
    return SessionCommand(
        command_id=command_id,
        number=int(ended.get("number") or number),
        text=str(body.get("text", "")),
        by=str(body.get("by", "")),
        started_at=at,
        ended_at=None if end is None else end.at,
        exit_code=ended.get("exit_code"),
        duration_seconds=float(ended.get("duration") or 0.0),
        output_bytes=int(ended.get("output_bytes") or 0),
        excerpt=str(ended.get("output", "")),
        start=str(body.get("start", "")),
    )


def typed_line(text: str) -> str:
    """Return the last line of typed text with deletions applied, as a line editor shows it without its history."""
    line: list[str] = []
    last = ""
    for char in _KEYS.sub("", text):
        if char in "\r\n":
            last, line = "".join(line) or last, []
        elif char == "\x7f":
            del line[-1:]
        elif char == "\x15":
            line.clear()
        else:
            line.append(char)
    return (last or "".join(line)).strip()
