"""The uids of sessions on a server that runs as root: a range, of which each agent keeps one.

Reads the user databases of the machine to check that the range is free.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.errors import InvalidParams
from holdfast.service.types import ServiceStruct

#: Lower uids belong to the accounts of the machine.
LOWEST: Final = 1_000
#: 2**32 - 1 is not a uid, and programs with signed uids fail above 2**31 - 1.
HIGHEST: Final = 2**31 - 1
#: The overflow uid, to which the kernel maps uids without a mapping in a namespace; and the 16-bit "no uid".
_NOT_FOR_USE: Final = (65_534, 65_535)
#: Files of `NAME:FIRST:COUNT` lines: ranges that user namespaces of containers have.
_SUBORDINATE: Final = ("/etc/subuid", "/etc/subgid")
_ACCOUNTS: Final = ("/etc/passwd", "/etc/group")


class UidRange(ServiceStruct, frozen=True):
    """The first and the last uid; group ids are the same numbers."""

    first: int
    last: int

    def overlap(self, first: int, last: int) -> bool:
        return first <= self.last and self.first <= last


def parse_uids(text: str) -> UidRange:
    """Return the range of a setting `FIRST-LAST`."""
    match = re.fullmatch(r"(\d{1,10})-(\d{1,10})", text)
    if match is None:
        raise InvalidParams(f"settings: session_uids is {text!r}: give FIRST-LAST, as in 1900000000-1900065535")
    uids = UidRange(int(match[1]), int(match[2]))
    if not LOWEST <= uids.first <= uids.last <= HIGHEST:
        raise InvalidParams(f"settings: session_uids is {text!r}: from {LOWEST} to {HIGHEST}, the lower one first")
    if any(uids.overlap(uid, uid) for uid in _NOT_FOR_USE):
        raise InvalidParams(f"settings: session_uids is {text!r}: 65534 and 65535 are reserved")
    return uids


def check_free(uids: UidRange, etc: str = "/etc") -> None:
    """Raise `InvalidParams` if an account of this machine, or a range of its containers, has a uid of the range."""
    for path in (*_SUBORDINATE, *_ACCOUNTS):
        for line in _lines(path.replace("/etc", etc, 1)):
            fields = line.split(":")
            # NAME:FIRST:COUNT, and NAME:PASSWORD:ID of the others.
            numbers = fields[1:3] if path in _SUBORDINATE else fields[2:3]
            if not numbers or not all(number.isdecimal() for number in numbers):
                continue
            first = int(numbers[0])
            last = first + int(numbers[1]) - 1 if len(numbers) == 2 else first
            if uids.overlap(first, last):
                raise InvalidParams(
                    f"settings: session_uids {uids.first}-{uids.last} overlaps {first}-{last} of {fields[0]!r} in "
                    f"{path}: choose a range that is free"
                )


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidParams(f"settings: session_uids: cannot read {path}: {error.strerror}") from None
