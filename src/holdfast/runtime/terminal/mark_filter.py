"""What a terminal's output says between the lines: our prompt marks, taken out, and modes, noticed. Pure.

A mark is `ESC ] 133 ; LETTER [; ARGUMENT] ; NONCE BEL`, the terminals' convention with a secret of this one behind
it. Only the shell that we started knows the secret; the same sequence without it is a program's, and passes as it
is. A flood costs two searches a read.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

#: No mark is longer: an unfinished one is held back no further.
MARK_BYTES: Final = 96
#: An unfinished mode sequence is looked at again with the bytes that follow it.
_MODE_BYTES: Final = 32
_START: Final = b"\x1b]133;"
_ESCAPE: Final = 0x1B
_MODES: Final = re.compile(rb"\x1b\[\?([0-9;]+)([hl])")
_UNFINISHED_MODE: Final = re.compile(rb"\x1b(?:\[(?:\?[0-9;]*)?)?\Z")


class PromptMark(NamedTuple):
    """`letter` is A, B, C, D or P; `position` counts in the bytes without marks."""

    letter: str
    argument: str
    position: int


class MarkFilter:
    """Takes the marks out of what is printed, however it is cut."""

    __slots__ = ("_pattern", "held")

    def __init__(self, nonce: str) -> None:
        around = len(_START) + len("A;;\x07") + len(nonce)
        argument = rb"[^;\x07\x1b]{0,%d}" % (MARK_BYTES - around)
        self._pattern = re.compile(rb"\x1b\]133;([A-Z])(?:;(" + argument + rb"))?;" + nonce.encode() + rb"\x07")
        #: The end of what was fed, if a mark may begin there.
        self.held = b""

    def feed(self, data: bytes) -> tuple[bytes, list[PromptMark]]:
        """The same without marks, and the marks."""
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
        for found in self._pattern.finditer(data):
            pieces.append(data[end : found.start()])
            size += found.start() - end
            end = found.end()
            marks.append(PromptMark(found[1].decode(), (found[2] or b"").decode("ascii", "replace"), size))
        pieces.append(data[end:])
        return b"".join(pieces), marks

    def release(self) -> bytes:
        """What is held back: no mark came of it."""
        held, self.held = self.held, b""
        return held

    @staticmethod
    def _may_begin(tail: bytes) -> bool:
        if len(tail) <= len(_START):
            return _START.startswith(tail)
        return tail.startswith(_START) and b"\x07" not in tail


class TerminalModes:
    """Which of the terminal's modes programs have switched on."""

    __slots__ = ("alternate_screen", "application_cursor", "bracketed_paste", "tail")

    def __init__(self) -> None:
        #: The end of what was fed, if a mode may begin there.
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
