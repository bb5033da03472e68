"""Filters prompt marks out of a terminal's output, and tracks the modes that programs set. Pure.

A mark is `ESC ] 133 ; LETTER [; ARGUMENT] ; NONCE BEL`, the convention of terminals with a secret of this terminal
appended. Only the shell that the server started has the secret; a sequence without it is a program's, and passes
unchanged. A flood costs two searches a read.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

#: The longest mark: more than this of an unfinished one is not held back.
MARK_BYTES: Final = 96
#: The longest mode sequence: an unfinished one is parsed again with the bytes that follow it.
_MODE_BYTES: Final = 32
_START: Final = b"\x1b]133;"
#: With any secret. A pattern with the secret of one terminal would fill Python's cache of patterns.
_MARK: Final = re.compile(
    rb"\x1b\]133;([A-Z])(?:;([^;\x07\x1b]{0,%d}))?;([^;\x07\x1b]{1,%d})\x07" % (MARK_BYTES, MARK_BYTES)
)
_ESCAPE: Final = 0x1B
_MODES: Final = re.compile(rb"\x1b\[\?([0-9;]+)([hl])")
_UNFINISHED_MODE: Final = re.compile(rb"\x1b(?:\[(?:\?[0-9;]*)?)?\Z")


class PromptMark(NamedTuple):
    """`letter` is A, B, C, D or P; `position` counts in the bytes without marks."""

    letter: str
    argument: str
    position: int


class MarkFilter:
    """Removes the marks from the output, however it is divided into reads."""

    __slots__ = ("_nonce", "held")

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce.encode()
        #: The end of the input, if a mark may begin there.
        self.held = b""

    def feed(self, data: bytes) -> tuple[bytes, list[PromptMark]]:
        """The output without marks, and the marks."""
        if self.held:
            data, self.held = self.held + data, b""
        start = data.rfind(b"\x1b", -MARK_BYTES)
        if start >= 0 and self._may_begin(data[start:]):
            data, self.held = data[:start], data[start:]
        if _START not in data:
            return data, []
        marks: list[PromptMark] = []
        pieces: list[bytes] = []
        size = end = 0
        for found in _MARK.finditer(data):
            if found[3] != self._nonce or found.end() - found.start() > MARK_BYTES:
                continue
            pieces.append(data[end : found.start()])
            size += found.start() - end
            end = found.end()
            marks.append(PromptMark(found[1].decode(), (found[2] or b"").decode("ascii", "replace"), size))
        pieces.append(data[end:])
        return b"".join(pieces), marks

    def release(self) -> bytes:
        """Return the bytes that are held back: no mark followed."""
        held, self.held = self.held, b""
        return held

    @staticmethod
    def _may_begin(tail: bytes) -> bool:
        if len(tail) <= len(_START):
            return _START.startswith(tail)
        return tail.startswith(_START) and b"\x07" not in tail


class TerminalModes:
    """The modes of the terminal that programs have set."""

    __slots__ = ("alternate_screen", "application_cursor", "bracketed_paste", "tail")

    def __init__(self) -> None:
        #: The end of the input, if a mode may begin there.
        self.tail = b""
        self.alternate_screen = False
        self.application_cursor = False
        self.bracketed_paste = False

    def feed(self, data: bytes) -> None:
        if self.tail:
            data = self.tail + data
        self.tail = b""
        if _ESCAPE in data[-_MODE_BYTES:]:
            unfinished = _UNFINISHED_MODE.search(data, max(0, len(data) - _MODE_BYTES))
            if unfinished is not None:
                self.tail = unfinished[0]
        if b"\x1b[?" not in data:
            return
        for found in _MODES.finditer(data):
            on = found[2] == b"h"
            for number in found[1].split(b";"):
                if number == b"1":
                    self.application_cursor = on
                elif number == b"2004":
                    self.bracketed_paste = on
                elif number in (b"47", b"1047", b"1049"):
                    self.alternate_screen = on
