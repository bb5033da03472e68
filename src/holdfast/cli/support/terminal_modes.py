"""Tracks the modes that a program sets in a terminal, and returns the bytes that reset them; pure.

After detaching from a full-screen program the user's terminal must be as before: on its primary screen, with a
cursor, and without special reports of keys and mouse.
"""

from __future__ import annotations

import re
from typing import Final

#: Modes that are on in a new terminal: wrapping at the last column, and the cursor.
_ON_AT_FIRST: Final = frozenset((7, 25))
#: Other modes that change keys, mouse and output: cursor keys, reverse video, origin, keypad, side margins,
#: mouse reports and their encodings, focus reports, wheel as arrows, bracketed paste, held updates.
_OFF_AT_FIRST: Final = frozenset(
    (1, 5, 6, 66, 69, 9, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 1015, 1016, 2004, 2026)
)
_ALTERNATE: Final = (47, 1047, 1049)
#: Insert mode, and a line feed that returns.
_ANSI_MODES: Final = (b"4", b"20")

_SEQUENCE: Final = re.compile(
    rb"\x1b(?:\[(?P<marker>[<=>?]?)(?P<numbers>[0-9;:]*)(?P<between>[ -/!]*)(?P<final>[@-~])"
    rb"|[\]PX^_][^\x07\x18\x1a\x1b]*"
    rb"|(?P<escape>[ -/]*[0-OQ-WYZ`-~]))"
)
#: The beginning of a sequence, at the end of the data. A string (OSC, DCS) sets no mode, so its end does not
#: matter.
_UNFINISHED: Final = re.compile(rb"\x1b(?:\[[<=>?]?[0-9;:]*[ -/!]*|[ -/]*)?")
_LONGEST: Final = 256


class ShownModes:
    """The modes of a terminal by the bytes written to it, however these are split."""

    def __init__(self) -> None:
        self._held = b""
        self._in_string = False
        self._forget()

    def _forget(self) -> None:
        #: DEC modes that differ from a new terminal.
        self._changed: set[int] = set()
        #: The mode that switched to the alternate screen.
        self._alternate = 0
        self._ansi: set[bytes] = set()
        self._keypad = False
        self._coloured = False
        self._region = False
        self._charset = False
        self._shifted = False
        self._cursor_style = False
        #: Keys with modifiers as xterm and as kitty send them.
        self._other_keys = False
        self._key_levels = 0
        self._key_flags = False

    def feed(self, data: bytes) -> None:
        """Note bytes that were written to the terminal."""
        data = self._held + data
        self._held = b""
        last = data.rfind(b"\x1b")
        if last >= 0:
            tail = data[last:]
            self._in_string = False
            if len(tail) < _LONGEST and _UNFINISHED.fullmatch(tail):
                data, self._held = data[:last], tail
            else:
                string = _SEQUENCE.match(tail)
                # No terminator has come yet.
                self._in_string = string is not None and tail[1:2] in b"]PX^_" and string.end() == len(tail)
        elif self._in_string:
            self._in_string = re.search(rb"[\x07\x18\x1a]", data) is None
        out, back = data.rfind(b"\x0e"), data.rfind(b"\x0f")
        if out != back:
            self._shifted = out > back
        for sequence in _SEQUENCE.finditer(data):
            if sequence["final"]:
                self._control(sequence["marker"], sequence["numbers"], sequence["between"], sequence["final"])
            elif sequence["escape"]:
                self._escape(sequence["escape"])

    def _escape(self, body: bytes) -> None:
        if body == b"c":
            self._forget()
        elif body in b"=>":
            self._keypad = body == b"="
        elif body[:1] in b"()" and len(body) == 2:
            self._charset = body[1:] != b"B"

    def _control(self, marker: bytes, numbers: bytes, between: bytes, final: bytes) -> None:
        if final in b"hl" and not between:
            if marker == b"?":
                for number in filter(bytes.isdigit, numbers.split(b";")):
                    self._private(int(number[:6]), on=final == b"h")
            elif not marker:
                for number in {*_ANSI_MODES} & {*numbers.split(b";")}:
                    (self._ansi.add if final == b"h" else self._ansi.discard)(number)
        elif final == b"m" and not between:
            if not marker:
                self._coloured = numbers not in (b"", b"0")
            elif marker == b">" and numbers.split(b";")[0] in (b"", b"4"):
                self._other_keys = numbers.split(b";")[1:] not in ([], [b""], [b"0"])
        elif final == b"r" and not marker and not between:
            self._region = bool(numbers)
        elif final == b"q" and between == b" ":
            self._cursor_style = numbers not in (b"", b"0")
        elif final == b"u" and not between:
            self._keys(marker, numbers)
        elif final == b"p" and between == b"!":
            self._changed -= {1, 6, 7, 25, 66}
            self._ansi.discard(b"4")
            self._keypad = self._coloured = self._region = self._charset = self._shifted = False

    def _keys(self, marker: bytes, numbers: bytes) -> None:
        if marker == b">":
            self._key_levels += 1
        elif marker == b"<":
            self._key_levels = max(0, self._key_levels - int(numbers[:4] if numbers.isdigit() else 1))
        elif marker == b"=":
            self._key_flags = numbers.split(b";")[0] not in (b"", b"0")

    def _private(self, number: int, *, on: bool) -> None:
        if number in _ALTERNATE:
            self._alternate = number if on else 0
        elif number in _ON_AT_FIRST | _OFF_AT_FIRST:
            changed = on != (number in _ON_AT_FIRST)
            (self._changed.add if changed else self._changed.discard)(number)

    @property
    def unfinished(self) -> bool:
        """Whether the last sequence is incomplete: bytes written now would belong to it."""
        return bool(self._held) or self._in_string

    def reset(self) -> bytes:
        """Forget the modes and return the bytes that reset them, if any. Contents and cursor position stay."""
        parts = [b"\x18"] if self.unfinished else []
        if 2026 in self._changed:
            parts.append(b"\x1b[?2026l")
        if self._key_levels:
            parts.append(b"\x1b[<%du" % self._key_levels)
        if self._key_flags:
            parts.append(b"\x1b[=0;1u")
        if self._alternate:
            parts.append(b"\x1b[?%dl" % self._alternate)
        if self._changed & {6, 69}:
            # Resetting these modes moves the cursor home, and its position was relative to another origin.
            parts.append(b"\x1b[?6l\x1b[?69l\x1b[r\x1b[999;1H")
        elif self._region:
            parts.append(b"\x1b7\x1b[r\x1b8")
        for number in sorted(self._changed - {6, 69, 2026}):
            parts.append(b"\x1b[?%d%s" % (number, b"h" if number in _ON_AT_FIRST else b"l"))
        parts += [b"\x1b[%sl" % number for number in sorted(self._ansi)]
        if self._keypad:
            parts.append(b"\x1b>")
        if self._other_keys:
            parts.append(b"\x1b[>4;0m")
        if self._cursor_style:
            parts.append(b"\x1b[0 q")
        if self._charset or self._shifted:
            parts.append(b"\x1b(B\x0f")
        if self._coloured or self._alternate:
            # Leaving the alternate screen restores the colours from before it.
            parts.append(b"\x1b[0m")
        self._held, self._in_string = b"", False
        self._forget()
        return b"".join(parts)
