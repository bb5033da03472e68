"""Ports of a session that may have previews: `8000` or `9000-9100`; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_RANGE: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def parse_ports(given: int | str) -> tuple[int, int]:
    """Return the first and the last port; ValueError for anything else than a port or a range."""
    match = None if isinstance(given, bool) else _RANGE.fullmatch(str(given))
    if match is None:
        raise ValueError(f"{given!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= 65_535:
        raise ValueError(f"{given!r}")
    return first, last


def show_ports(given: int | str) -> str:
    """Return the usual text of a port or a range."""
    first, last = parse_ports(given)
    return str(first) if first == last else f"{first}-{last}"


def covers(allowed: Iterable[str], ports: int | str) -> bool:
    """Return whether one entry of `allowed` has all of these ports."""
    first, last = parse_ports(ports)
    return any(low <= first and last <= high for low, high in map(parse_ports, allowed))
