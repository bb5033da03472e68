"""What a person would see on a terminal: the bytes that it printed, fed to an emulator, give a `Screen`.

Two backends stand behind one interface: pyghostty, which is right and fast, and pyte in pure Python, which is slow.
Either is imported when an emulator is made. Nothing here reads a terminal or a log.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from holdfast.errors import InvalidParams, InvalidRequest
from holdfast.model import Struct

if TYPE_CHECKING:
    import pyte

Backend = Literal["auto", "ghostty", "pyte"]

#: DEC private modes that change what a program gets to read or what the terminal does, all off in a fresh terminal:
#: application cursor keys and keypad, mouse reports in their kinds and encodings, focus reports, bracketed paste.
_DEC_MODES: Final = (1, 66, 9, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 2004)
_ORIGIN, _AUTOWRAP, _CURSOR_VISIBLE, _SIDE_MARGINS = 6, 7, 25, 69
_INSERT, _NEWLINE = 4, 20
#: The largest side of a screen: both backends take more, but a cell costs memory and the size comes from a caller.
_LARGEST: Final = 4096
#: Lines that the tail of a flood keeps for the emulator's history, from which a screen that grows is filled.
_HISTORY: Final = 1000
#: From this size on it is cheaper to look through the bytes for lines that scroll away than to draw them.
_FLOOD: Final = 64 * 1024
_FLOOD_BLOCK: Final = 1024 * 1024


class Screen(Struct, frozen=True):
    """One moment of a terminal: exactly `rows` lines without trailing blanks, and the cursor, counted from 0."""

    rows: int
    cols: int
    lines: tuple[str, ...]
    cursor_row: int
    cursor_col: int
    cursor_visible: bool = True
    title: str = ""
    #: The alternate screen is shown, as full-screen programs do.
    alternate: bool = False

    @property
    def text(self) -> str:
        """The lines down to the last one that is not empty."""
        return "\n".join(self.lines).rstrip("\n")

    @property
    def cursor(self) -> tuple[int, int]:
        return (self.cursor_row, self.cursor_col)

    def __str__(self) -> str:
        return self.text


class Emulator(Protocol):
    """A terminal without a window. Bytes may be cut anywhere between two calls of `feed`."""

    def feed(self, data: bytes) -> None: ...

    def resize(self, rows: int, cols: int) -> None: ...

    def screen(self) -> Screen: ...

    def restore(self) -> bytes:
        """Bytes that draw this screen on a terminal of the same size that was just cleared.

        Contents with colours, the screen under an alternate one, cursor, title, scroll region and modes.
        """
        ...

    def close(self) -> None: ...


def emulator(rows: int, cols: int, *, scrollback: int = 0, backend: Backend = "auto") -> Emulator:
    """An emulator of this size; `auto` takes pyghostty if it is there and pyte otherwise.

    `scrollback` is the number of lines above the screen that `restore` draws as well; pyte keeps none.
    """
    _check_size(rows, cols)
    if scrollback < 0:
        raise InvalidParams(f"scrollback must not be negative, got {scrollback}", scrollback=scrollback)
    failures: list[ImportError | OSError] = []
    for name, make in (
        ("ghostty", lambda: GhosttyEmulator(rows, cols, scrollback=scrollback)),
        ("pyte", lambda: PyteEmulator(rows, cols)),
    ):
        if backend in ("auto", name):
            try:
                return make()
            except (ImportError, OSError) as error:  # OSError: the shared library in the wheel does not load here
                failures.append(error)
    if not failures:
        raise InvalidParams(f"no screen backend {backend!r}; there are auto, ghostty and pyte", backend=backend)
    wanted = "pyte" if backend == "pyte" else "pyghostty"
    reasons = "; ".join(str(error) for error in failures)
    raise InvalidRequest(f"a screen needs an emulator: pip install {wanted} ({reasons})") from failures[0]


def _check_size(rows: int, cols: int) -> None:
    if not (1 <= rows <= _LARGEST and 1 <= cols <= _LARGEST):
        raise InvalidParams(
            f"a screen has 1 to {_LARGEST} rows and columns, got {rows}x{cols}", rows=rows, cols=cols
        )


# Floods ---------------------------------------------------------------------------------------------------------

_DIGITS: Final = b"0123456789;:"
_SGR: Final = re.compile(rb"\x1b\[[0-9;:]*m")


def _scrolls_away(data: bytes) -> bool:
    """Whether these bytes are lines of text, colours (SGR) and erasures within a line (EL), and nothing else.

    Such bytes change no mode, no margin and no title, so what has left the screen at the top left no trace but the
    colours. Counting is ten times as fast as a regular expression: every ESC must start a CSI, and with the
    parameters deleted every CSI must read `ESC [ m` or `ESC [ K`.
    """
    if b"\x0e" in data or b"\x0f" in data:
        return False
    escapes = data.count(b"\x1b")
    if not escapes:
        return True
    if data.count(b"\x1b[") != escapes:
        return False
    bare = data.translate(None, _DIGITS)
    return bare.count(b"\x1b[m") + bare.count(b"\x1b[K") == escapes


def _last_lines(data: bytes, lines: int) -> bytes:
    """Bytes that leave the same screen as `data`, of which `_scrolls_away` is true, on an unmargined screen.

    `lines` must be at least twice the screen's rows: as many to push out what was there, as many to fill it again.
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


def _without_floods(data: bytes, lines: int) -> Iterator[bytes]:
    """`data` in pieces, where long runs of plain lines are cut down to their last `lines`.

    The first byte of `data` must not lie inside an escape sequence. Full-screen output is passed on whole: it sets
    modes and margins all the time, and no place in it can be told from which everything is drawn anew.
    """
    held, start = b"", 0
    while start < len(data):
        # A block ends with a line where it can, so that no escape sequence is cut in two.
        end = data.rfind(b"\n", start, start + _FLOOD_BLOCK) + 1 or min(start + _FLOOD_BLOCK, len(data))
        block, start = data[start:end], end
        if _scrolls_away(block):
            held = _last_lines(held + block, lines)
        else:
            yield held
            yield block
            held = b""
    yield held


# pyghostty ------------------------------------------------------------------------------------------------------


class GhosttyEmulator:
    """An emulator over libghostty-vt. What pyghostty does not wrap is asked of the C interface under it."""

    def __init__(self, rows: int, cols: int, *, scrollback: int = 0) -> None:
        core = import_module("pyghostty.core")
        self._core: Any = core
        self._lib: Any = core.lib
        self._ffi: Any = core.ffi
        # History is bounded by bytes (8 a cell), not by lines: libghostty drops bytes in whole pages, but lines one
        # at a time, which is five times as slow. `restore` takes no more lines than asked for.
        self._terminal: Any = core.Terminal(cols, rows, scrollback=2**31)
        self._scrollback = scrollback
        self._set("SCROLLBACK_MAX_BYTES", max(10_000, 8 * cols * scrollback))
        # Needed to copy a terminal that is in the middle of a sequence.
        self._set("CONTINUATION_MAX_BYTES", 64 * 1024)

    def feed(self, data: bytes) -> None:
        terminal = self._open()
        if len(data) < _FLOOD:
            terminal.feed(data)
            return
        rest = terminal.feed_until_ground(data)
        if rest is None:
            return
        if self._has_margins():
            terminal.feed(data[rest:])
            return
        for piece in _without_floods(data[rest:], 2 * terminal.get("rows") + max(self._scrollback, _HISTORY)):
            terminal.feed(piece)

    def resize(self, rows: int, cols: int) -> None:
        _check_size(rows, cols)
        self._open().resize(cols, rows)
        self._set("SCROLLBACK_MAX_BYTES", max(10_000, 8 * cols * self._scrollback))

    def screen(self) -> Screen:
        terminal = self._open()
        cols, rows = terminal.size
        col, row = terminal.cursor
        lines = [line.rstrip(" ") for line in terminal.text().split("\n")]
        return Screen(
            rows=rows,
            cols=cols,
            lines=(*lines, *[""] * (rows - len(lines))),
            cursor_row=row,
            cursor_col=col,
            cursor_visible=terminal.get("cursor_visible", "bool"),
            title=self._title(),
            alternate=self._alternate(),
        )

    def restore(self) -> bytes:
        terminal = self._open()
        parts = [b"\x1b[0m\x1b[H", _title_bytes(self._title())]
        if self._alternate():
            parts += [self._under_alternate(), b"\x1b[?1049h\x1b[0m\x1b[H"]
        if terminal.mode(_SIDE_MARGINS):
            parts.append(b"\x1b[?69h")
        drawn = self._drawn(terminal, with_region=True)
        parts += [drawn, _mode_bytes(terminal.mode, lambda number: bool(terminal.mode(number, ansi=True)))]
        if terminal.mode(_ORIGIN):
            # Setting it homes the cursor, and rows then count from the region's top.
            region = re.search(rb"\x1b\[(\d+);\d+r", drawn)
            col, row = terminal.cursor
            parts.append(b"\x1b[?6h\x1b[%d;%dH" % (row + 2 - (int(region[1]) if region else 1), col + 1))
        return b"".join(parts)

    def close(self) -> None:
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def _open(self) -> Any:
        if self._terminal is None:
            raise InvalidRequest("this screen emulator is closed")
        return self._terminal

    def _set(self, option: str, value: int) -> None:
        key = getattr(self._lib, f"GHOSTTY_TERMINAL_OPT_{option}")
        pointer = self._ffi.new("size_t*", value)
        self._core.check(self._lib.ghostty_terminal_set(self._terminal._t[0], key, pointer), option)

    def _title(self) -> str:
        title = self._terminal.get("title", "GhosttyString")
        return bytes(self._ffi.buffer(title.ptr, title.len)).decode(errors="replace") if title.len else ""

    def _alternate(self) -> bool:
        shown = self._terminal.get("active_screen", "GhosttyTerminalScreen")
        return bool(shown == self._lib.GHOSTTY_TERMINAL_SCREEN_ALTERNATE)

    def _has_margins(self) -> bool:
        # Nothing tells the margins but the formatter; beside them only SGR has a final byte in what it draws.
        return bool(re.search(rb"\x1b\[\d+;\d+[rs]", self._drawn(self._terminal, with_region=True)))

    def _under_alternate(self) -> bytes:
        """The primary screen as the full-screen program will leave it, drawn from a copy that leaves now."""
        lib, ffi, check = self._lib, self._ffi, self._core.check
        data, size = ffi.new("uint8_t**"), ffi.new("size_t*")
        check(lib.ghostty_snapshot_encode_alloc(self._terminal._t[0], ffi.NULL, data, size), "snapshot")
        decoder = ffi.new("GhosttySnapshotDecoder*")
        try:
            check(lib.ghostty_snapshot_decoder_new_buf(ffi.NULL, decoder, data[0], size[0]), "snapshot decoder")
            # Decoded into the handle of a terminal of pyghostty's, so that its methods work on the copy.
            with self._core.Terminal(1, 1) as copy:
                decoded = ffi.new("GhosttyTerminal*")
                check(lib.ghostty_snapshot_decoder_decode(decoder[0], decoded), "snapshot decode")
                own, copy._t = copy._t, decoded
                try:
                    copy.feed(b"\x18\x1b[?1049l")
                    return self._drawn(copy, with_region=False)
                finally:
                    lib.ghostty_terminal_free(decoded[0])
                    copy._t = own
        finally:
            lib.ghostty_snapshot_decoder_free(decoder[0])
            lib.ghostty_free(ffi.NULL, data[0], size[0])

    def _drawn(self, terminal: Any, *, with_region: bool) -> bytes:
        """Contents, cursor and colours of the active screen, from its first line of history that was asked for."""
        cols, rows = terminal.size
        above = min(terminal.get("scrollback_rows", "size_t"), self._scrollback)
        selection = self._core.init_sized("GhosttySelection")
        selection.start = terminal.ref(0, terminal.get("total_rows", "size_t") - rows - above, "screen")[0]
        selection.end = terminal.ref(cols - 1, rows - 1)[0]
        options = self._core.init_sized("GhosttyFormatterTerminalOptions")
        options.emit = self._lib.GHOSTTY_FORMATTER_FORMAT_VT
        options.trim = True
        options.selection = selection
        options.extra.scrolling_region = options.extra.keyboard = with_region
        extra = options.extra.screen
        extra.cursor = extra.style = extra.hyperlink = extra.charsets = True
        extra.kitty_keyboard = with_region
        formatter = self._ffi.new("GhosttyFormatter*")
        new = self._lib.ghostty_formatter_terminal_new
        self._core.check(new(self._ffi.NULL, formatter, terminal._t[0], options[0]), "formatter")
        try:
            text: str = self._core.read_buf(
                lambda buffer, size, written: self._lib.ghostty_formatter_format_buf(
                    formatter[0], buffer, size, written
                )
            )
            return text.encode()
        finally:
            self._lib.ghostty_formatter_free(formatter[0])


def _title_bytes(title: str) -> bytes:
    printable = "".join(char for char in title if char.isprintable())
    return b"\x1b]2;%s\x07" % printable.encode(errors="replace") if printable else b""


def _mode_bytes(dec: Callable[[int], bool], ansi: Callable[[int], bool]) -> bytes:
    """Sequences for every mode that is not as in a fresh terminal; after the contents, which they might change."""
    parts = [b"\x1b[?%dh" % number for number in _DEC_MODES if dec(number)]
    parts += [b"\x1b[?%dl" % number for number in (_AUTOWRAP, _CURSOR_VISIBLE) if not dec(number)]
    parts += [b"\x1b[%dh" % number for number in (_INSERT, _NEWLINE) if ansi(number)]
    return b"".join(parts)


# pyte -----------------------------------------------------------------------------------------------------------

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
    when the width changes, keeps no history, and leaves half of a wide character when the other is overwritten.
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
        #: The primary screen while the alternate one is shown.
        self._under: pyte.Screen | None = None
        self._saved: dict[bool, _SavedCursor] = {}
        self._title = ""
        self._last = ""

    def feed(self, data: bytes) -> None:
        self._check_open()
        if len(data) >= _FLOOD and not self._held and self._shown.margins is None:
            for piece in _without_floods(data, 2 * self._shown.lines):
                self._parse(self._decoder.decode(piece))
        else:
            self._parse(self._decoder.decode(data))

    def resize(self, rows: int, cols: int) -> None:
        _check_size(rows, cols)
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
        parts = [b"\x1b[0m\x1b[H", _title_bytes(self._title)]
        if self._under is not None:
            saved = self._saved.get(False, _SavedCursor())
            parts += [self._drawn(self._under), b"\x1b[%d;%dH" % (saved.y + 1, saved.x + 1)]
            parts.append(b"\x1b[?1049h\x1b[0m\x1b[H")
        shown = self._shown
        parts.append(self._drawn(shown))
        top = 0
        if shown.margins is not None:
            top = shown.margins.top if self._dec(_ORIGIN) else 0
            parts.append(b"\x1b[%d;%dr" % (shown.margins.top + 1, shown.margins.bottom + 1))
        parts.append(_mode_bytes(self._dec, lambda number: number in shown.mode))
        parts.append(b"\x1b[?6h" if self._dec(_ORIGIN) else b"")
        parts.append(b"\x1b[%d;%dH" % (shown.cursor.y - top + 1, min(shown.cursor.x, shown.columns - 1) + 1))
        if shown.cursor.x == shown.columns and shown.columns - 1 in (line := shown.buffer[shown.cursor.y]):
            # The cursor waits behind the last column: only a character printed there brings it to that state.
            last = line[shown.columns - 1]
            parts.append(self._style(last) + last.data.encode(errors="replace"))
        parts.append(self._style(shown.cursor.attrs))
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
            shown.draw(text)
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
                if shown.cursor.x + width > shown.columns and self._dec(_AUTOWRAP):
                    shown.cursor.x = 0
                    self._index()
                shown.draw(char)

    def _control(self, char: str) -> None:
        shown = self._shown
        if char in "\n\v\f":
            self._index()
            if _NEWLINE in shown.mode:
                shown.cursor.x = 0
        elif char == "\r":
            shown.carriage_return()
        elif char == "\b":
            shown.backspace()
        elif char == "\t":
            self._settle()
            shown.tab()
        elif char in "\x0e\x0f":
            shown.charset = int(char == "\x0e")

    def _escape(self, body: str) -> None:
        shown = self._shown
        if body[0] in "()" and len(body) == 2:
            shown.define_charset(body[1], mode=body[0])
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
        if final not in "mnct":
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
                shown.cursor_position(count, (numbers[1] if len(numbers) > 1 else 0) or 1)
            case "d":
                shown.cursor_position(count, cursor.x + 1)
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
            case "I":
                for _ in range(min(count, shown.columns)):
                    shown.tab()
            case "Z":
                stops = sorted(stop for stop in shown.tabstops if stop < cursor.x)
                cursor.x = stops[-count] if count <= len(stops) else 0
            case "b" if self._last:
                self._draw(self._last * min(count, shown.lines * shown.columns))
            case "g":
                shown.clear_tab_stop(first)
            case "h" | "l":
                for number in {_INSERT, _NEWLINE} & set(numbers):
                    (shown.mode.add if final == "h" else shown.mode.discard)(number)
            case "r":
                last = (numbers[1] if len(numbers) > 1 else 0) or shown.lines
                if count < last <= shown.lines:
                    whole = (count, last) == (1, shown.lines)
                    shown.margins = None if whole else self._pyte.screens.Margins(count - 1, last - 1)
                    shown.cursor_position()
            case "s":
                self._save()
            case "u":
                self._restore_saved()

    # State that pyte has not, or has differently

    def _settle(self) -> None:
        """pyte's cursor behind the last column: it is on the last column for everything but the next character."""
        self._shown.cursor.x = min(self._shown.cursor.x, self._shown.columns - 1)

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
            self._dec(_ORIGIN),
        )

    def _restore_saved(self) -> None:
        shown, saved = self._shown, self._saved.get(self._under is not None, _SavedCursor())
        shown.cursor.x, shown.cursor.y = min(saved.x, shown.columns - 1), min(saved.y, shown.lines - 1)
        shown.cursor.attrs = saved.attrs or shown.default_char
        if saved.charsets is not None:
            shown.g0_charset, shown.g1_charset, shown.charset = saved.charsets
        (shown.mode.add if saved.origin else shown.mode.discard)(_ORIGIN << 5)

    def _soft_reset(self) -> None:
        shown = self._shown
        shown.mode -= {_INSERT, _ORIGIN << 5, 1 << 5, 66 << 5}
        shown.mode.add(_AUTOWRAP << 5)
        shown.margins = None
        shown.cursor.hidden = False
        shown.charset = 0
        shown.select_graphic_rendition(0)
        self._saved.pop(self._under is not None, None)

    def _dec(self, number: int) -> bool:
        # pyte tells private modes from ANSI modes by shifting their numbers.
        if number == _CURSOR_VISIBLE:
            return not self._shown.cursor.hidden
        return number << 5 in self._shown.mode

    def _set_dec(self, number: int, on: bool) -> None:
        shown = self._shown
        if number in (47, 1047, 1049):
            self._show_alternate(on, keep_cursor=number == 1049)
        elif number == 1048:
            (self._save if on else self._restore_saved)()
        elif number == _CURSOR_VISIBLE:
            shown.cursor.hidden = not on
        elif number not in (3, 5):  # 132 columns and reverse video: pyte would resize and repaint
            (shown.mode.add if on else shown.mode.discard)(number << 5)
            if number == _ORIGIN:
                shown.cursor_position()

    def _show_alternate(self, on: bool, *, keep_cursor: bool) -> None:
        left = self._shown
        if on == (self._under is not None):
            if keep_cursor and not on:
                self._restore_saved()  # as in xterm: leaving restores the cursor even where nothing was entered
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
