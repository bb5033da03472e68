"""A screen in pure Python, by pyte: slow, and there everywhere. Parsed here, drawn by pyte."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.client.screen.emulation import (
    AUTOWRAP,
    CURSOR_VISIBLE,
    FLOOD,
    INSERT,
    NEWLINE,
    ORIGIN,
    check_size,
    mode_bytes,
    title_bytes,
    without_floods,
)
from holdfast.client.screen.screen import Screen
from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    import pyte

#: C0 controls that a terminal executes even inside a control sequence; CAN, SUB and ESC end it.
_C0: Final = r"\x00-\x17\x19\x1c-\x1f"
_TOKEN: Final = re.compile(
    r"(?P<text>[^\x00-\x1f\x7f-\x9f]+)"
    rf"|\x1b\[(?P<csi>[0-?{_C0}]*[ -/{_C0}]*[@-~])"
    # A string ends with ST; an OSC also with BEL; both also when another sequence begins or CAN or SUB comes.
    r"|\x1b\](?P<osc>[^\x07\x18\x1a\x1b]*)(?:\x07|\x1b\\|[\x18\x1a]|(?=\x1b[^\\]))"
    r"|\x1b[PX^_][^\x18\x1a\x1b]*(?:\x1b\\|[\x18\x1a]|(?=\x1b[^\\]))"
    r"|\x1b(?P<esc>[ -/]+[0-~]|[0-OQ-WYZ\\`-~])"
    r"|(?P<control>[\x00-\x1a\x1c-\x1f])"
)
_UNFINISHED: Final = re.compile(rf"\x1b(?:\[[0-?{_C0}]*[ -/{_C0}]*|[\]PX^_][^\x07\x18\x1a\x1b]*\x1b?|[ -/]*)")
_CSI: Final = re.compile(r"([<=>?]?)([0-9;:]*)([ -/]*)([@-~])")
_LONGEST_HELD: Final = 64 * 1024


class _SavedCursor(NamedTuple):
    x: int = 0
    y: int = 0
    attrs: pyte.screens.Char | None = None
    charsets: tuple[str, str, int] | None = None
    origin: bool = False


class PyteEmulator:
    """An emulator over pyte's screen, for places where no shared library can be loaded.

    pyte's own parser prints parts of sequences that it does not know, stops drawing at a zero-width character and
    has no alternate screen, so the bytes are parsed here and only the drawing is pyte's. It does not reflow lines
    when the width changes, keeps no history, and leaves half of a wide character when the other half is erased.
    """

    def __init__(self, rows: int, cols: int) -> None:
        self._pyte: Any = import_module("pyte")
        self._width: Callable[[str], int] = import_module("wcwidth").wcwidth
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._closed = False
        self._reset(rows, cols)

    def _reset(self, rows: int, cols: int) -> None:
        self._shown: pyte.Screen = self._pyte.Screen(cols, rows)
        self._shown.g1_charset = self._charset("B")
        #: The primary screen while the alternate one is shown.
        self._under: pyte.Screen | None = None
        self._saved: dict[bool, _SavedCursor] = {}
        self._title = ""
        self._last = ""

    def feed(self, data: bytes) -> None:
        self._check_open()
        if len(data) < FLOOD:
            self._parse(self._decoder.decode(data))
            return
        lines = 2 * self._shown.lines
        for piece in without_floods(data, lines, lambda: not self._held and self._shown.margins is None):
            self._parse(self._decoder.decode(piece))

    def resize(self, rows: int, cols: int) -> None:
        check_size(rows, cols)
        self._check_open()
        for screen in (self._shown, self._under):
            if screen is None:
                continue
            # Blank lines below the cursor go first, then lines at the top, as in other terminals.
            gone = max(0, screen.cursor.y - rows + 1)
            kept = {y - gone: line for y, line in screen.buffer.items() if 0 <= y - gone < rows}
            screen.buffer.clear()
            screen.buffer.update(kept)
            for line in kept.values():
                for x in [x for x in line if x >= cols]:
                    del line[x]
            screen.tabstops |= set(range(-(-screen.columns // 8) * 8, cols, 8))
            screen.lines, screen.columns, screen.margins = rows, cols, None
            screen.cursor.y -= gone
            screen.cursor.x = min(screen.cursor.x, cols - 1)

    def screen(self) -> Screen:
        self._check_open()
        shown = self._shown
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
            title=self._title,
            alternate=self._under is not None,
        )

    def restore(self) -> bytes:
        self._check_open()
        parts = [b"\x1b[0m\x1b[H", title_bytes(self._title)]
        if self._under is not None:
            saved = self._saved.get(False, _SavedCursor())
            parts += [self._drawn(self._under), b"\x1b[%d;%dH" % (saved.y + 1, saved.x + 1)]
            parts.append(b"\x1b[?1049h\x1b[0m\x1b[H")
        shown = self._shown
        parts.append(self._drawn(shown))
        top = 0
        if shown.margins is not None:
            top = shown.margins.top if self._dec(ORIGIN) else 0
            parts.append(b"\x1b[%d;%dr" % (shown.margins.top + 1, shown.margins.bottom + 1))
        parts.append(mode_bytes(self._dec, lambda number: number in shown.mode))
        parts.append(b"\x1b[?6h" if self._dec(ORIGIN) else b"")
        parts.append(b"\x1b[%d;%dH" % (shown.cursor.y - top + 1, min(shown.cursor.x, shown.columns - 1) + 1))
        if shown.cursor.x == shown.columns and shown.columns - 1 in (line := shown.buffer[shown.cursor.y]):
            # The cursor waits behind the last column: only a character printed there brings it to that state.
            last = line[shown.columns - 1]
            parts.append(self._style(last) + last.data.encode(errors="replace"))
        parts.append(self._style(shown.cursor.attrs))
        drawing = self._charset("0")
        parts.append(b"\x1b(0" if shown.g0_charset == drawing else b"")
        parts.append(b"\x1b)0" if shown.g1_charset == drawing else b"")
        parts.append(b"\x0e" if shown.charset else b"")
        return b"".join(parts)

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this screen emulator is closed")

    # Parsing

    def _parse(self, text: str) -> None:
        data, at = self._held + text, 0
        self._held = ""
        while at < len(data):
            match = _TOKEN.match(data, at)
            if match is not None:
                at = match.end()
                self._token(match.lastgroup, match[match.lastgroup] if match.lastgroup else "")
            elif (unfinished := _UNFINISHED.match(data, at)) is None:
                at += 1  # DEL, or a C1 control, which UTF-8 terminals do not obey
            elif unfinished.end() < len(data):
                at = unfinished.end()
            else:
                self._held = unfinished[0]
                if len(self._held) > _LONGEST_HELD:
                    # What a string of this length says is not for the screen; its end must still be found.
                    self._held = self._held[:2] + ("\x1b" if self._held.endswith("\x1b") else "")
                return

    def _token(self, kind: str | None, body: str) -> None:
        if kind == "text":
            self._draw(body)
        elif kind == "control":
            self._control(body)
        elif kind == "csi":
            for char in body:
                if char < " ":
                    self._control(char)
            if match := _CSI.fullmatch("".join(char for char in body if char >= " ")):
                self._sequence(*match.groups())
        elif kind == "osc":
            number, _, value = body.partition(";")
            if number in ("0", "2"):
                self._title = value
        elif kind == "esc":
            self._escape(body)

    def _draw(self, text: str) -> None:
        shown = self._shown
        self._last = text[-1]
        if text.isascii():
            while text:
                if shown.cursor.x == shown.columns and self._dec(AUTOWRAP):
                    shown.cursor.x = 0
                    self._index()
                room = shown.columns - shown.cursor.x if self._dec(AUTOWRAP) else len(text)
                self._draw_whole(text[:room])
                text = text[room:]
            return
        for char in text:
            width = self._width(char)
            if width == 0:
                line, x = shown.buffer[shown.cursor.y], shown.cursor.x - 1
                while x > 0 and line[x].data == "":
                    x -= 1
                if x >= 0:
                    line[x] = line[x]._replace(data=line[x].data + char)
            elif width > 0:
                if shown.cursor.x + width > shown.columns and self._dec(AUTOWRAP):
                    shown.cursor.x = 0
                    self._index()
                elif width == 2 and shown.cursor.x + width > shown.columns:
                    continue
                self._draw_whole(char)

    def _draw_whole(self, text: str) -> None:
        """Drawn by pyte, and where that overwrites one half of a wide character, the other half becomes blank."""
        shown = self._shown
        line, x = shown.buffer[shown.cursor.y], shown.cursor.x
        if 0 < x < shown.columns and line[x].data == "":
            line[x - 1] = line[x - 1]._replace(data=" ")
        shown.draw(text)
        line, x = shown.buffer[shown.cursor.y], shown.cursor.x
        if x < shown.columns and line[x].data == "":
            line[x] = line[x]._replace(data=" ")

    def _charset(self, code: str) -> str:
        """pyte's map, but of line drawing only what a VT100 has: pyte maps digits and signs too, as Linux does."""
        maps = self._pyte.charsets
        ascii_map: str = maps.LAT1_MAP
        return ascii_map[:0x5F] + maps.VT100_MAP[0x5F:0x7F] + ascii_map[0x7F:] if code == "0" else ascii_map

    def _control(self, char: str) -> None:
        shown = self._shown
        if char in "\n\v\f":
            self._index()
            if NEWLINE in shown.mode:
                shown.cursor.x = 0
        elif char == "\r":
            shown.carriage_return()
        elif char == "\b":
            shown.backspace()
        elif char == "\t":
            if shown.cursor.x < shown.columns:  # behind the last column a tab leaves the wrap pending
                shown.tab()
        elif char in "\x0e\x0f":
            shown.charset = int(char == "\x0e")

    def _escape(self, body: str) -> None:
        shown = self._shown
        if body[0] == "(" and len(body) == 2:
            shown.g0_charset = self._charset(body[1])
        elif body[0] == ")" and len(body) == 2:
            shown.g1_charset = self._charset(body[1])
        elif body in ("D", "E"):
            self._index()
            shown.cursor.x = 0 if body == "E" else shown.cursor.x
        elif body == "M":
            self._reverse_index()
        elif body == "H":
            shown.set_tab_stop()
        elif body == "7":
            self._save()
        elif body == "8":
            self._restore_saved()
        elif body == "c":
            self._reset(shown.lines, shown.columns)
        elif body in "=>":
            self._set_dec(66, body == "=")
        elif body == "#8":
            shown.alignment_display()

    def _sequence(self, marker: str, raw: str, between: str, final: str) -> None:
        shown = self._shown
        if between or marker in ("<", "=", ">"):
            if between == "!" and final == "p":
                self._soft_reset()
            return
        if final == "m" and not marker:
            shown.select_graphic_rendition(*_sgr_numbers(raw))
            return
        if ":" in raw:
            return
        numbers = [_number(digits) for digits in raw.split(";")]
        if final in "hl" and marker:
            for number in numbers:
                self._set_dec(number, final == "h")
            return
        if marker and final not in "JK":
            return
        first, count = numbers[0], numbers[0] or 1
        top, bottom = shown.margins or (0, shown.lines - 1)
        cursor = shown.cursor
        if final not in "ctIZ":  # reports and tabs leave a wrap pending
            self._settle()
        match final:
            case "A" | "F" | "k":
                cursor.y = max(cursor.y - count, top if cursor.y >= top else 0)
                cursor.x = 0 if final == "F" else cursor.x
            case "B" | "E" | "e":
                cursor.y = min(cursor.y + count, bottom if cursor.y <= bottom else shown.lines - 1)
                cursor.x = 0 if final == "E" else cursor.x
            case "C" | "a":
                shown.cursor_forward(count)
            case "D" | "j":
                shown.cursor_back(count)
            case "G" | "`":
                shown.cursor_to_column(count)
            case "H" | "f":
                self._move_to(count, (numbers[1] if len(numbers) > 1 else 0) or 1)
            case "d":
                self._move_to(count, cursor.x + 1)
            case "J" if first in (0, 1, 2):
                shown.erase_in_display(first)
            case "K" if first in (0, 1, 2):
                shown.erase_in_line(first)
            case "L" | "M":
                for y in range(shown.lines):
                    shown.buffer[y]  # pyte does not move lines that it has not made yet
                (shown.insert_lines if final == "L" else shown.delete_lines)(count)
            case "@":
                shown.insert_characters(count)
            case "P":
                shown.delete_characters(count)
            case "X":
                shown.erase_characters(count)
            case "S" | "T" if len(numbers) == 1:
                x, y = cursor.x, cursor.y
                cursor.y = bottom if final == "S" else top
                for _ in range(min(count, shown.lines)):
                    (self._index if final == "S" else self._reverse_index)()
                cursor.x, cursor.y = x, y
            case "I" if cursor.x < shown.columns:
                for _ in range(min(count, shown.columns)):
                    shown.tab()
            case "Z" if cursor.x < shown.columns:
                stops = sorted(stop for stop in shown.tabstops if stop < cursor.x)
                cursor.x = stops[-count] if count <= len(stops) else 0
            case "b" if self._last:
                self._draw(self._last * min(count, shown.lines * shown.columns))
            case "g":
                shown.clear_tab_stop(first)
            case "h" | "l":
                for number in {INSERT, NEWLINE} & set(numbers):
                    (shown.mode.add if final == "h" else shown.mode.discard)(number)
            case "r":
                last = (numbers[1] if len(numbers) > 1 else 0) or shown.lines
                if count < last <= shown.lines:
                    whole = (count, last) == (1, shown.lines)
                    shown.margins = None if whole else self._pyte.screens.Margins(count - 1, last - 1)
                    self._move_to(1, 1)
            case "s":
                self._save()
            case "u":
                self._restore_saved()

    # State that pyte has not, or has differently

    def _settle(self) -> None:
        """pyte's cursor behind the last column: it is on the last column for everything but the next character."""
        self._shown.cursor.x = min(self._shown.cursor.x, self._shown.columns - 1)

    def _move_to(self, row: int, col: int) -> None:
        """Counted from 1; in origin mode from the region's top, and not beyond it, where pyte does not move."""
        shown = self._shown
        top, bottom = (shown.margins if self._dec(ORIGIN) else None) or (0, shown.lines - 1)
        shown.cursor.y = min(top + row - 1, bottom)
        shown.cursor.x = min(col - 1, shown.columns - 1)

    def _index(self) -> None:
        # Not pyte's alone: from below the region it moves the cursor up into it.
        shown = self._shown
        self._settle()
        if shown.cursor.y == (shown.margins.bottom if shown.margins else shown.lines - 1):
            shown.index()
        elif shown.cursor.y < shown.lines - 1:
            shown.cursor.y += 1

    def _reverse_index(self) -> None:
        shown = self._shown
        if shown.cursor.y == (shown.margins.top if shown.margins else 0):
            shown.reverse_index()
        elif shown.cursor.y > 0:
            shown.cursor.y -= 1

    def _save(self) -> None:
        shown = self._shown
        self._saved[self._under is not None] = _SavedCursor(
            min(shown.cursor.x, shown.columns - 1),
            shown.cursor.y,
            shown.cursor.attrs,
            (shown.g0_charset, shown.g1_charset, shown.charset),
            self._dec(ORIGIN),
        )

    def _restore_saved(self) -> None:
        shown, saved = self._shown, self._saved.get(self._under is not None, _SavedCursor())
        shown.cursor.x, shown.cursor.y = min(saved.x, shown.columns - 1), min(saved.y, shown.lines - 1)
        shown.cursor.attrs = saved.attrs or shown.default_char
        plain = self._charset("B")
        shown.g0_charset, shown.g1_charset, shown.charset = saved.charsets or (plain, plain, 0)
        (shown.mode.add if saved.origin else shown.mode.discard)(ORIGIN << 5)

    def _soft_reset(self) -> None:
        shown = self._shown
        shown.mode -= {INSERT, ORIGIN << 5, 1 << 5, 66 << 5}
        shown.mode.add(AUTOWRAP << 5)
        shown.margins = None
        shown.cursor.hidden = False
        shown.charset = 0
        shown.select_graphic_rendition(0)
        self._saved.pop(self._under is not None, None)

    def _dec(self, number: int) -> bool:
        # pyte tells private modes from ANSI modes by shifting their numbers.
        if number == CURSOR_VISIBLE:
            return not self._shown.cursor.hidden
        return number << 5 in self._shown.mode

    def _set_dec(self, number: int, on: bool) -> None:
        shown = self._shown
        if number in (47, 1047, 1049):
            self._show_alternate(on, keep_cursor=number == 1049)
        elif number == 1048:
            (self._save if on else self._restore_saved)()
        elif number == CURSOR_VISIBLE:
            shown.cursor.hidden = not on
        elif number not in (3, 5):  # 132 columns and reverse video: pyte would resize and repaint
            (shown.mode.add if on else shown.mode.discard)(number << 5)
            if number == ORIGIN:
                self._move_to(1, 1)

    def _show_alternate(self, on: bool, *, keep_cursor: bool) -> None:
        left = self._shown
        if on == (self._under is not None):
            # As in xterm: what comes with the switch is done even where there is nothing to switch.
            if keep_cursor and on:
                self._save()
                left.buffer.clear()
            elif keep_cursor:
                self._restore_saved()
            return
        if on:
            if keep_cursor:
                self._save()
            self._under, self._shown = left, self._pyte.Screen(left.columns, left.lines)
        elif self._under is not None:
            self._shown, self._under = self._under, None
        shown = self._shown
        # A terminal has one set of these for both screens.
        shown.mode, shown.margins, shown.tabstops = left.mode, left.margins, left.tabstops
        shown.g0_charset, shown.g1_charset, shown.charset = left.g0_charset, left.g1_charset, left.charset
        shown.cursor.x, shown.cursor.y = left.cursor.x, left.cursor.y
        shown.cursor.attrs, shown.cursor.hidden = left.cursor.attrs, left.cursor.hidden
        if not on and keep_cursor:
            self._restore_saved()

    # Drawing for `restore`

    def _drawn(self, screen: pyte.Screen) -> bytes:
        rows = []
        for y in range(screen.lines):
            line, parts, style = screen.buffer[y], [], b"\x1b[0m"
            end = max(
                (x + 1 for x, char in line.items() if x < screen.columns and char != screen.default_char), default=0
            )
            for x in range(end):
                if (wanted := self._style(line[x])) != style:
                    parts.append(wanted)
                    style = wanted
                parts.append(line[x].data.encode(errors="replace"))
            rows.append(b"".join(parts) + (b"" if style == b"\x1b[0m" else b"\x1b[0m"))
        return b"\r\n".join(rows).rstrip(b"\r\n")

    def _style(self, char: pyte.screens.Char) -> bytes:
        flags = (char.bold, char.italics, char.underscore, char.blink, char.reverse, char.strikethrough)
        codes = ["0", *(code for code, on in zip("134579", flags, strict=True) if on)]
        graphics = self._pyte.graphics
        for colour, named, base in (
            (char.fg, {**graphics.FG_ANSI, **graphics.FG_AIXTERM}, 38),
            (char.bg, {**graphics.BG_ANSI, **graphics.BG_AIXTERM}, 48),
        ):
            if colour == "default":
                continue
            number = next((code for code, name in named.items() if name == colour), None)
            if number is None:  # six hexadecimal digits: 256 colours become true colours
                number = f"{base};2;{';'.join(str(byte) for byte in bytes.fromhex(colour))}"
            codes.append(str(number))
        return f"\x1b[{';'.join(codes)}m".encode()


def _number(digits: str) -> int:
    # Cut before it is converted: Python refuses to convert thousands of digits.
    return min(int(digits.lstrip("0")[:5] or 0), 9999)


def _sgr_numbers(raw: str) -> list[int]:
    """The parameters of an SGR as pyte reads them: with semicolons alone, and without colours of underlines."""
    numbers: list[int] = []
    for part in raw.split(";"):
        sub = [_number(digits) for digits in part.split(":")]
        if len(sub) == 1:
            numbers.append(sub[0])
        elif sub[0] == 4:
            numbers.append(4 if sub[1] else 24)
        elif sub[0] in (38, 48) and sub[1] == 5 and len(sub) > 2:
            numbers += sub[:3]
        elif sub[0] in (38, 48) and sub[1] == 2 and len(sub) > 4:
            numbers += [sub[0], 2, *sub[-3:]]
    result: list[int] = []
    while numbers:
        # A colour takes the two or four numbers behind it with it; 58 is the underline's, which pyte would misread.
        size = {5: 3, 2: 5}.get(numbers[1] if len(numbers) > 1 else 0, 2) if numbers[0] in (38, 48, 58) else 1
        taken, numbers = numbers[:size], numbers[size:]
        if taken[0] != 58 and all(number < 256 for number in taken):
            result += taken
    return result or [0]
