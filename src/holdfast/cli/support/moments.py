"""Parses and prints times of the command line: `10m` ago, a date, `@SECONDS`; pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from holdfast.errors import InvalidParams

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
#: The last second of the year 9999, the largest time that a date can have.
_LATEST: Final = 253_402_300_799.0


def moment(option: str, text: str, now: float) -> float:
    """Return the time that an option names in seconds since 1970; `now` is the current time."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text, re.ASCII):
        return now - float(match[1]) * _UNITS[match[2]]
    try:
        # A date without a zone is in the machine's time zone.
        found = float(text[1:]) if text[:1] == "@" else datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        found = -1.0
    # Not a number fails the comparison too.
    if not 0 <= found <= _LATEST:
        raise InvalidParams(
            f"{option} {text!r} is not a time: use 10m, 2h or 3d (ago), 2026-07-31, 2026-07-31T12:00:00+02:00 "
            "or @SECONDS"
        )
    return found


def stamp(at: float) -> str:
    """Return a time as `2026-07-31T12:00:00.000Z`."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
