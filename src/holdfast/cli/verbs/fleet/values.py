"""Values of options that several sub-verbs of `holdfast sandbox` have; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from holdfast.errors import InvalidParams

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([smhd]?)", re.ASCII)


def seconds(option: str, text: str) -> float:
    """The seconds that `600`, `90m`, `2h` or `3d` stand for; infinite for `never`."""
    if text == "never":
        return math.inf
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidParams(f"{option} {text!r}: write seconds, or 90m, 2h, 3d, or never")
    return float(match[1]) * _UNITS[match[2]]


def assignments(option: str, texts: Sequence[str]) -> dict[str, str]:
    """The values of a repeated option `NAME=VALUE`, by their names."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidParams(f"{option} {text!r}: write NAME=VALUE")
        values[name] = value
    return values
