"""A screen by libghostty-vt, through pyghostty: correct and fast, where there is a wheel of it."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from holdfast.client.screen.emulation import (
    FLOOD,
    HISTORY,
    ORIGIN,
    SIDE_MARGINS,
    check_size,
    mode_bytes,
    title_bytes,
    without_floods,
)
from holdfast.client.screen.screen import Screen
from holdfast.errors import InvalidRequest


class GhosttyEmulator:
    """An emulator over libghostty-vt; functions that pyghostty does not wrap are called through its C interface."""

    def __init__(self, rows: int, cols: int, *, scrollback: int = 0) -> None:
        core = import_module("pyghostty.core")
        self._core: Any = core
        self._lib: Any = core.lib
        self._ffi: Any = core.ffi
        # History is bounded by bytes (16 a cell), not lines: libghostty drops bytes in whole pages, but lines one
        # at a time, which is five times as slow. `restore` draws at most `scrollback` lines.
        self._terminal: Any = core.Terminal(cols, rows, scrollback=2**31)
        self._scrollback = scrollback
        self._set("SCROLLBACK_MAX_BYTES", max(10_000, 16 * cols * scrollback))
        # Needed to copy a terminal that is in the middle of a sequence.
        self._set("CONTINUATION_MAX_BYTES", 64 * 1024)

    def feed(self, data: bytes) -> None:
        terminal = self._open()
        if len(data) < FLOOD:
            terminal.feed(data)
            return
        rest = terminal.feed_until_ground(data)
        if rest is None:
            return
        lines = 2 * terminal.get("rows") + max(self._scrollback, HISTORY)
        for piece in without_floods(data[rest:], lines, self._scrolls_whole):
            terminal.feed(piece)

    def resize(self, rows: int, cols: int) -> None:
        check_size(rows, cols)
        self._open().resize(cols, rows)
        self._set("SCROLLBACK_MAX_BYTES", max(10_000, 16 * cols * self._scrollback))

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
        parts = [b"\x1b[0m\x1b[H", title_bytes(self._title())]
        if self._alternate():
            parts += [self._under_alternate(), b"\x1b[?1049h\x1b[0m\x1b[H"]
        if terminal.mode(SIDE_MARGINS):
            parts.append(b"\x1b[?69h")
        drawn = self._drawn(terminal, with_region=True)
        parts += [drawn, mode_bytes(terminal.mode, lambda number: bool(terminal.mode(number, ansi=True)))]
        if terminal.mode(ORIGIN):
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

    def _scrolls_whole(self) -> bool:
        if not self._terminal.get("vt_ground", "bool"):
            return False
        # Only the formatter exposes the margins; it writes no other sequences that end in `r` or `s`.
        return not re.search(rb"\x1b\[\d+;\d+[rs]", self._drawn(self._terminal, with_region=True))

    def _under_alternate(self) -> bytes:
        """Draw the primary screen as the full-screen program will leave it, from a copy that leaves it now.

        Empty where libghostty refuses the copy, as it does when a resize has cut a wide character in two and the
        program has not drawn again yet. The screen under the alternate one is then blank.
        """
        lib, ffi = self._lib, self._ffi
        data, size = ffi.new("uint8_t**"), ffi.new("size_t*")
        if lib.ghostty_snapshot_encode_alloc(self._terminal._t[0], ffi.NULL, data, size):
            return b""
        decoder, decoded = ffi.new("GhosttySnapshotDecoder*"), ffi.new("GhosttyTerminal*")
        try:
            if lib.ghostty_snapshot_decoder_new_buf(ffi.NULL, decoder, data[0], size[0]):
                return b""
            try:
                if lib.ghostty_snapshot_decoder_decode(decoder[0], decoded):
                    return b""
            finally:
                lib.ghostty_snapshot_decoder_free(decoder[0])
        finally:
            lib.ghostty_free(ffi.NULL, data[0], size[0])
        # The copy takes the place of a terminal of pyghostty's, so that its methods work on it.
        with self._core.Terminal(1, 1) as copy:
            own, copy._t = copy._t, decoded
            try:
                copy.feed(b"\x18\x1b[?1049l")
                return self._drawn(copy, with_region=False)
            finally:
                lib.ghostty_terminal_free(decoded[0])
                copy._t = own

    def _drawn(self, terminal: Any, *, with_region: bool) -> bytes:
        """Contents, cursor and colours of the active screen, with up to `scrollback` lines of history above it.

        The formatter leaves out blank lines at the end, and then the cursor would be below its line. So the history
        is drawn by itself and scrolled away, and the screen is drawn from its first row.
        """
        cols, rows = terminal.size
        total = terminal.get("total_rows", "size_t")
        above = min(terminal.get("scrollback_rows", "size_t"), self._scrollback)
        screen = self._formatted(terminal, (0, total - rows), (cols - 1, total - 1), with_region=with_region)
        if not above:
            return screen
        last = total - rows - 1
        history = self._formatted(terminal, (0, last - above + 1), (cols - 1, last))
        blank = 0
        while blank < above - 1 and not self._formatted(terminal, (0, last - blank), (cols - 1, last - blank)):
            blank += 1
        return b"".join((history, b"\x1b[0m", b"\r\n" * (blank + rows), b"\x1b[H", screen))

    def _formatted(
        self, terminal: Any, start: tuple[int, int], end: tuple[int, int], *, with_region: bool | None = None
    ) -> bytes:
        """Return lines with their colours, and with the cursor unless `with_region` is None."""
        selection = self._core.init_sized("GhosttySelection")
        selection.start = terminal.ref(*start, "screen")[0]
        selection.end = terminal.ref(*end, "screen")[0]
        options = self._core.init_sized("GhosttyFormatterTerminalOptions")
        options.emit = self._lib.GHOSTTY_FORMATTER_FORMAT_VT
        options.trim = True
        options.selection = selection
        if with_region is not None:
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
