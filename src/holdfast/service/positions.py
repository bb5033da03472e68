"""Positions in a session's output as opaque strings, and back; pure.

A token has a fixed width, so that a later position is the greater string, and ends with a check over the session's
id: one of another session, or one that somebody made up, is told apart from a position.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from holdfast.service.problems import BadToken

_WIDTHS: Final = (10, 12, 8, 12)
_DIGITS: Final = "".join(f"%0{width}x" for width in _WIDTHS)
_CHECK_WIDTH: Final = 8
_HEXADECIMAL: Final = frozenset("0123456789abcdef")
#: Stands for "all of this command, its end included": more numbers than any command has chunks.
FINISHED: Final = 16 ** _WIDTHS[1] - 1


class Position(NamedTuple):
    """How far a reader has come. Of a terminal `command` is 0.

    Positions of a session are ordered as the tuples are.
    """

    #: A shell's command: the number of its row in the audit log. 0 is before the first.
    command: int = 0
    #: Of a terminal: its own position. Of a command: the last record that was read whole, or `FINISHED`.
    seq: int = 0
    #: Bytes that were read of the record after it. Of a terminal: 1 once it is known that a program asks there.
    part: int = 0
    #: Bytes printed before this position, of the terminal or of the command: says how long a gap is.
    printed: int = 0


def write_token(session_id: str, position: Position) -> str:
    digits = _DIGITS % position
    return digits + _check(session_id, digits)


def read_token(session_id: str, token: str) -> Position:
    """The position; the beginning if the token is empty. `BadToken` for what is none of this session."""
    if not token:
        return Position()
    digits, check = token[:-_CHECK_WIDTH], token[-_CHECK_WIDTH:]
    # The check is no secret: whatever `int` takes beside these digits would be a second way to write a position.
    if len(digits) != sum(_WIDTHS) or not set(digits) <= _HEXADECIMAL or check != _check(session_id, digits):
        raise BadToken("since: this is no token of this session", reason="BAD_TOKEN", session_id=session_id)
    numbers = []
    for width in _WIDTHS:
        numbers.append(int(digits[:width], 16))
        digits = digits[width:]
    return Position(*numbers)


def _check(session_id: str, digits: str) -> str:
    return hashlib.blake2b(f"{session_id}:{digits}".encode(), digest_size=_CHECK_WIDTH // 2).hexdigest()
