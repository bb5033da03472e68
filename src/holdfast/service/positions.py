"""Positions in a session's output as opaque strings, and back; pure.

A token has a fixed width, so that a later position is the greater string. It ends with a checksum over the session
id, which rejects tokens of other sessions and invented ones.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from holdfast.service.problems import BadToken

_WIDTHS: Final = (10, 12, 8, 12)
_DIGITS: Final = "".join(f"%0{width}x" for width in _WIDTHS)
_CHECK_WIDTH: Final = 8
_HEXADECIMAL: Final = frozenset("0123456789abcdef")
#: The position after a command and its exit: a number above the chunks of any command.
FINISHED: Final = 16 ** _WIDTHS[1] - 1


class Position(NamedTuple):
    """The position of a reader, ordered as a tuple. `command` is 0 for a terminal."""

    #: For a shell, the audit row of the command; 0 is before the first command.
    command: int = 0
    #: For a terminal, its position; for a command, the last record that was read whole, or `FINISHED`.
    seq: int = 0
    #: Bytes read of the next record; for a terminal, 1 once a prompt of a program was reported here.
    part: int = 0
    #: Bytes printed before this position by the terminal or the command; the length of a gap is computed from it.
    printed: int = 0


def write_token(session_id: str, position: Position) -> str:
    digits = _DIGITS % position
    return digits + _check(session_id, digits)


def read_token(session_id: str, token: str) -> Position:
    """Return the position; the first one for an empty token. `BadToken` for a token of another session."""
    if not token:
        return Position()
    digits, check = token[:-_CHECK_WIDTH], token[-_CHECK_WIDTH:]
    # Only these digits: `int` accepts other spellings, which would be a second token of the same position.
    if len(digits) != sum(_WIDTHS) or not set(digits) <= _HEXADECIMAL or check != _check(session_id, digits):
        raise BadToken("since: not a token of this session", reason="BAD_TOKEN", session_id=session_id)
    numbers = []
    for width in _WIDTHS:
        numbers.append(int(digits[:width], 16))
        digits = digits[width:]
    return Position(*numbers)


def _check(session_id: str, digits: str) -> str:
    return hashlib.blake2b(f"{session_id}:{digits}".encode(), digest_size=_CHECK_WIDTH // 2).hexdigest()
