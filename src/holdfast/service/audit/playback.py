"""Renders rows of the audit as text, and parses times that users enter; pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo
from typing import Any, Final

import msgspec

from holdfast.service.audit.chain import ABOUT_STREAMS
from holdfast.service.problems import Invalid
from holdfast.service.types import AuditRow

#: Characters of one value in a line; --json has all of it.
VALUE_CHARS: Final = 200
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
#: The most informative fields of a body, which come first and without their name.
_FIRST: Final = ("type", "command", "text", "action", "verdict", "detail", "message")


def line(row: AuditRow, *, zone: tzinfo | None = None) -> str:
    """Return one row as one line: time, session and row, kind, command, and body."""
    when = datetime.fromtimestamp(row.at, UTC).astimezone(zone)
    where = f"{row.session_id or '-'}/{row.seq}"
    parts = [when.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3], where, row.agent_id or "-", row.kind]
    if row.command_id:
        parts.append(f"[{row.command_id}]")
    if row.body != "{}":
        parts.append(_body(row))
    return "  ".join(parts)


def fields(row: AuditRow) -> dict[str, Any]:
    """Return one row as an object for `--json`, with its body decoded."""
    return {
        "sessionId": row.session_id,
        "seq": row.seq,
        "at": row.at,
        "agentId": row.agent_id,
        "kind": row.kind,
        "commandId": row.command_id,
        "body": _decoded(row.body),
        "previous": row.previous,
        "hash": row.hash,
    }


def moment(text: str, now: float) -> float:
    """Parse a time: `90s`, `10m`, `2h`, `3d`, `1w` ago, a date, a date with a time, or `@SECONDS`."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text):
        return now - float(match[1]) * _UNITS[match[2]]
    try:
        if text.startswith("@"):
            return float(text[1:])
        # Without a zone it is in the machine's time zone.
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise Invalid(
            f"{text!r} is not a time: use 10m, 2h or 3d (ago), 2026-07-31, 2026-07-31T12:00:00+02:00 or @SECONDS",
            reason="BAD_TIME",
        ) from None


def _body(row: AuditRow) -> str:
    body = _decoded(row.body)
    if not isinstance(body, dict):
        return _shown(body)
    if row.kind in ABOUT_STREAMS:
        body = {name: value for name, value in body.items() if name in ("session_id", "seq", "reason")}
    first = [_shown(body[name]) for name in _FIRST if body.get(name) not in (None, "")]
    rest = [
        f"{name}={_shown(value)}" for name, value in body.items() if name not in _FIRST and value not in (None, "")
    ]
    return "  ".join([*first, *rest])


def _decoded(body: str) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body  # tampered row: shown as it is, `verify` reports it


def _shown(value: Any) -> str:
    """Return text on one line without control characters, whatever a command printed."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = text.rstrip("\n")
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return shown if len(shown) <= VALUE_CHARS else f"{shown[:VALUE_CHARS]}…"
