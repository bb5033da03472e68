"""Parts that both screen emulators use: the modes worth restoring, and the shortening of floods of lines. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from holdfast.errors import InvalidParams
from holdfast.types import MAX_SCREEN_SIDE

#: DEC private modes that change the input of a program or the behaviour of the terminal, all off at the start:
#: application cursor keys and keypad, mouse reports in their kinds and encodings, focus reports, bracketed paste.
DEC_MODES: Final = (1, 66, 9, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 2004)
ORIGIN, AUTOWRAP, CURSOR_VISIBLE, SIDE_MARGINS = 6, 7, 25, 69
INSERT, NEWLINE = 4, 20
#: Lines that the tail of a flood keeps for the emulator's history, from which a screen that grows is filled.
HISTORY: Final = 1000
#: From this size on it is cheaper to search the bytes for lines that scroll away than to draw them.
FLOOD: Final = 64 * 1024
FLOOD_BLOCK: Final = 1024 * 1024
#: The beginning of a block is checked first: the output of full-screen programs has other sequences near its start.
_SAMPLE: Final = 4096

_DIGITS: Final = b"0123456789;:"
_SGR: Final = re.compile(rb"\x1b\[[0-9;:]*m")


def check_size(rows: int, cols: int) -> None:
    if not (1 <= rows <= MAX_SCREEN_SIDE and 1 <= cols <= MAX_SCREEN_SIDE):
        raise InvalidParams(
            f"a screen has 1 to {MAX_SCREEN_SIDE} rows and columns, got {rows}x{cols}", rows=rows, cols=cols
        )


def _scrolls_away(data: bytes) -> bool:
    """Whether these bytes are lines of text, colours (SGR) and erasures within a line (EL), and nothing else.

    Such bytes change no mode, no margin and no title, so lines scrolled off the screen leave no trace but the
    colours. Counting does without a regular expression: every ESC must start a CSI, and with the
    parameters deleted every CSI must read `ESC [ m` or `ESC [ K`.
    """
    if b"\x0e" in data or b"\x0f" in data:
        return False
    if len(data) > _SAMPLE and not _scrolls_away(data[: data.rfind(b"\n", 0, _SAMPLE) + 1 or _SAMPLE]):
        return False
    escapes = data.count(b"\x1b")
    if not escapes:
        return True
    if data.count(b"\x1b[") != escapes:
        return False
    bare = data.translate(None, _DIGITS)
    return bare.count(b"\x1b[m") + bare.count(b"\x1b[K") == escapes


def _last_lines(data: bytes, lines: int) -> bytes:
    """Return bytes that leave the same screen as `data`, of which `_scrolls_away` is true, on an unmargined screen.

    `lines` must be at least twice the screen's rows: as many to push out the old rows, as many to fill it again.
    The cut is behind CR LF, where the column is 0 whatever came before.
    """
    cut = len(data)
    for _ in range(lines + 1):
        cut = data.rfind(b"\r\n", 0, cut)
        if cut < 0:
            return data
    cut += 2
    reset = max(data.rfind(b"\x1b[0m", 0, cut), data.rfind(b"\x1b[m", 0, cut), 0)
    return b"".join(_SGR.findall(data, reset, cut)) + data[cut:]


def without_floods(data: bytes, lines: int, ready: Callable[[], bool]) -> Iterator[bytes]:
    """Yield `data` in pieces, each to be drawn before the next is taken; floods are cut to their last `lines`.

    `ready` returns True outside every sequence while the whole screen scrolls. The output of full-screen
    programs is not cut: it sets modes and margins, and no position is known from which everything is drawn anew.
    """
    held, start = b"", 0
    while start < len(data):
        # A block ends with a line where it can, so that no escape sequence is cut in two.
        end = data.rfind(b"\n", start, start + FLOOD_BLOCK) + 1 or min(start + FLOOD_BLOCK, len(data))
        block, start = data[start:end], end
        if _scrolls_away(block) and (held or ready()):
            held = _last_lines(held + block, lines)
            if len(held) <= 4 * FLOOD_BLOCK:
                continue
            block = b""  # a line without an end, which cannot be cut
        yield held
        yield block
        held = b""
    yield held


def title_bytes(title: str) -> bytes:
    printable = "".join(char for char in title if char.isprintable())
    return b"\x1b]2;%s\x07" % printable.encode(errors="replace") if printable else b""


def mode_bytes(dec: Callable[[int], bool], ansi: Callable[[int], bool]) -> bytes:
    """Return sequences for every mode that is not as at the start; send them after the contents."""
    parts = [b"\x1b[?%dh" % number for number in DEC_MODES if dec(number)]
    parts += [b"\x1b[?%dl" % number for number in (AUTOWRAP, CURSOR_VISIBLE) if not dec(number)]
    parts += [b"\x1b[%dh" % number for number in (INSERT, NEWLINE) if ansi(number)]
    return b"".join(parts)
