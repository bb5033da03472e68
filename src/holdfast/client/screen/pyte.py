"""A screen by pyte, in pure Python, for machines without a wheel of pyghostty.

pyte parses and draws. This module adds an alternate screen and five sequences through pyte's own extension points,
and removes the sequences that pyte would print as text. docs/terminals.md lists the remaining differences.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from unicodedata import combining

import pyte
from pyte import graphics
from pyte.screens import Char
from wcwidth import wcwidth

from holdfast.client.screen.emulation import (
    CURSOR_VISIBLE,
    FLOOD,
    ORIGIN,
    check_size,
    mode_bytes,
    title_bytes,
    without_floods,
)
from holdfast.client.screen.screen import Screen
from holdfast.errors import InvalidRequest

#: Sequences that pyte would print in part (strings other than OSC, control sequences with `!`, `:`, `<` or `=`) or
#: refuse (numbers of thousands of digits).
_UNSUPPORTED: Final = re.compile(
    rb"\x1b[PX^_][^\x18\x1a\x1b]*(?:\x1b\\|[\x18\x1a]|(?=\x1b[^\\]))|\x1b\[[0-?]*(?:[!-/:<=]|[0-9]{6})[ -?]*[@-~]"
)
_UNFINISHED: Final = re.compile(rb"\x1b(?:\[[ -?]*|\][^\x07\x1b]*\x1b?|[PX^_][^\x18\x1a\x1b]*\x1b?|[ -/]*)\Z")
#: An unfinished sequence over this length is dropped; no sequence that draws is nearly this long.
_MAX_HELD_BYTES: Final = 64 * 1024
#: pyte raises these for sequences with parameters that it does not expect.
_REFUSALS: Final = (AssertionError, TypeError, UnboundLocalError, ValueError)
_ALTERNATE: Final = {47, 1047, 1049}


class PyteEmulator:
    """An emulator over pyte. Lines are cut rather than reflowed when the width changes, and no history is kept."""

    def __init__(self, rows: int, cols: int) -> None:
        self._screen = _PyteScreen(cols, rows)
        self._stream = _PyteStream(_Listener(self._screen), strict=False)
        self._held = b""
        self._closed = False

    def feed(self, data: bytes) -> None:
        self._check_open()
        if len(data) < FLOOD:
            self._draw(data)
            return
        lines = 2 * self._screen.lines
        for piece in without_floods(data, lines, lambda: not self._held and self._screen.margins is None):
            self._draw(piece)

    def _draw(self, data: bytes) -> None:
        data = self._held + data
        # An ESC at the very end may be the first half of the terminator of the string before it.
        start = data.rfind(b"\x1b", 0, len(data) - 1)
        unfinished = _UNFINISHED.match(data, start) if start >= 0 else None
        self._held = unfinished[0] if unfinished else data[-1:] if data.endswith(b"\x1b") else b""
        data = data[: len(data) - len(self._held)]
        if len(self._held) > _MAX_HELD_BYTES:
            self._held = self._held[:2]
        for line in _UNSUPPORTED.sub(b"", data).splitlines(keepends=True):
            with suppress(ValueError):  # pyte takes digits of any script for a number
                self._stream.feed(line)

    def resize(self, rows: int, cols: int) -> None:
        check_size(rows, cols)
        self._check_open()
        self._screen.resize(rows, cols)

    def screen(self) -> Screen:
        self._check_open()
        shown = self._screen
        return Screen(
            rows=shown.lines,
            cols=shown.columns,
            lines=tuple(
                "".join(shown.buffer[y][x].data for x in range(shown.columns)).rstrip(" ")
                for y in range(shown.lines)
            ),
            cursor_row=shown.cursor.y,
            cursor_col=min(shown.cursor.x, shown.columns - 1),
            cursor_visible=not shown.cursor.hidden,
            title=shown.title,
            alternate=shown.primary is not None,
        )

    def restore(self) -> bytes:
        self._check_open()
        shown = self._screen
        parts = [b"\x1b[0m\x1b[H", title_bytes(shown.title)]
        if shown.primary is not None:
            rows, (x, y) = shown.primary
            parts += [_drawn(shown, rows), b"\x1b[%d;%dH\x1b[?1049h\x1b[0m\x1b[H" % (y + 1, x + 1)]
        parts.append(_drawn(shown, shown.buffer))
        top = 0
        if shown.margins is not None:
            top = shown.margins.top if self._dec(ORIGIN) else 0
            parts.append(b"\x1b[%d;%dr" % (shown.margins.top + 1, shown.margins.bottom + 1))
        parts.append(mode_bytes(self._dec, lambda number: number in shown.mode))
        parts.append(b"\x1b[?6h" if self._dec(ORIGIN) else b"")
        parts.append(b"\x1b[%d;%dH" % (shown.cursor.y - top + 1, min(shown.cursor.x, shown.columns - 1) + 1))
        parts.append(_style(shown.cursor.attrs))
        return b"".join(parts)

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this screen emulator is closed")

    def _dec(self, number: int) -> bool:
        # pyte shifts the numbers of private modes to keep them apart from ANSI modes.
        if number == CURSOR_VISIBLE:
            return not self._screen.cursor.hidden
        return number << 5 in self._screen.mode


_Rows = dict[int, Any]


class _PyteScreen(pyte.Screen):
    """pyte's screen with an alternate screen, and without the losses that ordinary output runs into."""

    #: Rows and cursor of the primary screen while the alternate one is shown.
    primary: tuple[_Rows, tuple[int, int]] | None = None
    _last = ""

    def reset(self) -> None:
        self.primary = None
        super().reset()

    def draw(self, data: str) -> None:
        # pyte drops the rest of a text at the first zero-width character that does not combine, a joiner of emoji.
        text = "".join(char for char in data if wcwidth(char) > 0 or combining(char))
        self._last = text[-1:] or self._last
        super().draw(text)

    def set_mode(self, *modes: int, **kwargs: Any) -> None:
        if kwargs.get("private"):
            if _ALTERNATE & set(modes) and self.primary is None:
                self.primary = dict(self.buffer), (self.cursor.x, self.cursor.y)
                self.buffer.clear()
            modes = tuple(mode for mode in modes if mode not in (3, 5))  # 132 columns, reverse video
        super().set_mode(*modes, **kwargs)

    def reset_mode(self, *modes: int, **kwargs: Any) -> None:
        if kwargs.get("private"):
            if _ALTERNATE & set(modes) and self.primary is not None:
                rows, (self.cursor.x, self.cursor.y) = self.primary
                self.primary = None
                self.buffer.clear()
                self.buffer.update(rows)
                self.ensure_hbounds()
                self.ensure_vbounds()
            modes = tuple(mode for mode in modes if mode not in (3, 5))
        super().reset_mode(*modes, **kwargs)

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        rows, columns = lines or self.lines, columns or self.columns
        # Blank rows below the cursor go first, as in other terminals; pyte removes rows at the top.
        self.lines -= max(0, min(self.lines - rows, self.lines - 1 - self.cursor.y))
        for y in [y for y in self.buffer if y >= self.lines]:
            del self.buffer[y]
        gone = max(0, self.lines - rows)
        self.tabstops |= set(range(-(-self.columns // 8) * 8, columns, 8))
        super().resize(rows, columns)
        self.cursor.y -= gone
        self.ensure_hbounds()
        self.ensure_vbounds()

    def save_cursor(self, *_: int) -> None:
        super().save_cursor()
        del self.savepoints[:-8]  # a flood of saves must not fill the memory

    def restore_cursor(self, *_: int) -> None:
        super().restore_cursor()

    def insert_lines(self, count: int | None = None) -> None:
        self._make_rows()
        super().insert_lines(count)

    def delete_lines(self, count: int | None = None) -> None:
        self._make_rows()
        super().delete_lines(count)

    def _make_rows(self) -> None:
        """Make every row: pyte moves only rows that exist and leaves the old contents in place of the others."""
        for y in range(self.lines):
            self.buffer[y]

    def scroll_up(self, count: int = 1) -> None:
        self._scroll(count, self.delete_lines)

    def scroll_down(self, count: int = 1) -> None:
        self._scroll(count, self.insert_lines)

    def _scroll(self, count: int, move: Callable[[int], None]) -> None:
        x, y = self.cursor.x, self.cursor.y
        self.cursor.y = self.margins.top if self.margins else 0
        move(count)
        self.cursor.x, self.cursor.y = x, y

    def repeat(self, count: int = 1) -> None:
        self.draw(self._last * min(count or 1, self.lines * self.columns))


class _PyteStream(pyte.ByteStream):
    """pyte's parser with scrolling (SU, SD), repetition (REP) and the cursor saved by CSI."""

    csi = {  # noqa: RUF012
        **pyte.ByteStream.csi,
        "S": "scroll_up",
        "T": "scroll_down",
        "b": "repeat",
        "s": "save_cursor",
        "u": "restore_cursor",
    }


class _Listener:
    """Passes the parser's events to the screen and drops those that pyte's screen refuses."""

    def __init__(self, screen: _PyteScreen) -> None:
        self._screen = screen

    def __getattr__(self, event: str) -> Callable[..., None]:
        handler = getattr(self._screen, event)

        def handle(*args: Any, **kwargs: Any) -> None:
            with suppress(*_REFUSALS):
                handler(*args, **kwargs)

        return handle


def _drawn(screen: pyte.Screen, rows: _Rows) -> bytes:
    drawn = []
    for y in range(screen.lines):
        line, parts, style = rows.get(y, {}), [], b"\x1b[0m"
        end = max(
            (x + 1 for x, char in line.items() if x < screen.columns and char != screen.default_char), default=0
        )
        for x in range(end):
            if (wanted := _style(line[x])) != style:
                parts.append(wanted)
                style = wanted
            parts.append(line[x].data.encode(errors="replace"))
        drawn.append(b"".join(parts) + (b"" if style == b"\x1b[0m" else b"\x1b[0m"))
    return b"\r\n".join(drawn).rstrip(b"\r\n")


def _style(char: Char) -> bytes:
    """The SGR sequence for the attributes of a character; 256 colours become true colours."""
    flags = (char.bold, char.italics, char.underscore, char.blink, char.reverse, char.strikethrough)
    codes = ["0", *(code for code, on in zip("134579", flags, strict=True) if on)]
    for colour, named, base in (
        (char.fg, {**graphics.FG_ANSI, **graphics.FG_AIXTERM}, 38),
        (char.bg, {**graphics.BG_ANSI, **graphics.BG_AIXTERM}, 48),
    ):
        if colour != "default":
            number = next((code for code, name in named.items() if name == colour), None)
            codes.append(str(number or f"{base};2;{';'.join(str(byte) for byte in bytes.fromhex(colour))}"))
    return f"\x1b[{';'.join(codes)}m".encode()
