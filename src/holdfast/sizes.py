"""Sizes in bytes as people write them, for the rules of the service and the command line alike; pure."""

from __future__ import annotations

import re
from typing import Final

#: Of 1024, with or without `i` and `B`: `300M`, `300MB` and `300MiB` are the same, as for `docker run --memory`.
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([KMGT]?)(i?B)?", re.IGNORECASE | re.ASCII)
#: The description of a valid size in error messages.
EXPECTED: Final = 'a number of bytes, also as "512M", "512MiB" or "1.5G"'


def parse_size(text: str) -> int:
    """Return the bytes that `512M`, `512MiB`, `1.5 GiB` or `4096` stand for; ValueError for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] in ("iB", "ib", "IB", "Ib") and not match[2]):
        raise ValueError(f"{text!r} is not {EXPECTED}")
    factor = 1024 ** _POWERS[match[2].upper()]
    # Whole numbers stay exact: a float has 53 bits.
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
