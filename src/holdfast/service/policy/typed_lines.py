"""Lines at a prompt that come in pieces: what the shell's line editor holds, and what Enter would run; pure.

    typed letters, backspace, ^U, ^W, a paste  ->  known
    arrows, Tab, ^R, ^Y, Alt-. and the like    ->  lost: only the shell knows what its line is now
    Enter                                      ->  a line to decide; one that is not complete goes on
    ^C, a new prompt                           ->  empty

A `LineBuffer` is a value: whoever types keeps the new one if the input is allowed, and the old one if it is not.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.service.model import Struct
from holdfast.service.policy.command_line import MAX_TEXT, CommandLine, read_command_line
from holdfast.service.policy.engine import Decision, decide_line
from holdfast.service.policy.profiles import Profile, strictest

_PASTE_BEGIN: Final = b"\x1b[200~"
_PASTE_END: Final = b"\x1b[201~"
_KEYS: Final = {
    0x01: "^A", 0x02: "^B", 0x05: "^E", 0x06: "^F", 0x07: "^G", 0x09: "Tab", 0x0E: "^N", 0x0F: "^O", 0x10: "^P",
    0x12: "^R", 0x13: "^S", 0x14: "^T", 0x16: "^V", 0x18: "^X", 0x19: "^Y", 0x1B: "Esc", 0x1F: "^_",
}  # fmt: skip
#: At the end of a line these do nothing: delete and list, kill to the end, redraw, suspend.
_INERT: Final = frozenset([0x04, 0x0B, 0x0C, 0x11, 0x1A, 0x1C])


class LineBuffer(Struct, frozen=True):
    """What was typed since the prompt came. `edits` is False for a shell without a line editor."""

    line: bytes = b""
    #: Lines before it that a shell takes together with it.
    before: str = ""
    #: The key after which nobody knows the line.
    lost: str = ""
    pasting: bool = False
    #: The beginning of a key's sequence, whose rest is still to come.
    escape: bytes = b""
    edits: bool = True


class TypedLine(Struct, frozen=True):
    """A line that Enter ends, with those before it; or, with `lost`, one that cannot be known."""

    text: str
    lost: str = ""
    #: It stands in a paste: most shells take it later, at Enter.
    pasted: bool = False


class InputDecision(Struct, frozen=True):
    """Whether to type it, and the buffer after it was typed."""

    decision: Decision
    buffer: LineBuffer
    lines: tuple[str, ...] = ()


def decide_input(
    profile: Profile, buffer: LineBuffer, data: bytes, cwd: str = "", *, shell: str = "bash"
) -> InputDecision:
    """Keys at a prompt. The strictest of their lines decides; keys that nobody can follow are as unknown commands."""
    allowed = Decision("allow", "nothing is run by it", "commands.default", profile.place("commands.default"))
    if not profile.guarded:
        return InputDecision(allowed, LineBuffer(edits=buffer.edits))
    editor = _Editor(buffer, shell)
    for byte in data:
        editor.press(byte)
    decisions = [_decide(profile, typed, line, cwd) for typed, line in editor.lines]
    after = editor.buffer()
    if after.lost:
        decisions.append(_decide(profile, TypedLine("", after.lost), CommandLine(), cwd))
    verdict = strictest({decision.verdict for decision in decisions})
    chosen = next((decision for decision in decisions if decision.verdict == verdict), allowed)
    return InputDecision(chosen, after, tuple(typed.text for typed, _ in editor.lines if not typed.lost))


def _decide(profile: Profile, typed: TypedLine, line: CommandLine, cwd: str) -> Decision:
    if typed.lost:
        reason = f"after {typed.lost} only the shell knows what its line is"
        line = CommandLine(unknown=(reason,))
    return decide_line(profile, line, cwd)


class _Editor:
    """A line editor that only ever stands at the end of its line."""

    def __init__(self, buffer: LineBuffer, shell: str) -> None:
        self._line = bytearray(buffer.line)
        self._before = buffer.before
        self._lost = buffer.lost
        self._pasting = buffer.pasting
        self._escape = buffer.escape
        self._edits = buffer.edits
        self._shell = shell
        self.lines: list[tuple[TypedLine, CommandLine]] = []

    def buffer(self) -> LineBuffer:
        return LineBuffer(bytes(self._line), self._before, self._lost, self._pasting, self._escape, self._edits)

    def press(self, byte: int) -> None:
        if self._escape:
            self._continue_escape(byte)
        elif byte == 0x1B and self._edits:
            self._escape = b"\x1b"
        elif self._pasting and byte not in (0x0A, 0x0D, 0x03):
            self._line.append(byte)
        elif byte in (0x0A, 0x0D):
            self._enter()
        elif byte == 0x03:
            self._line.clear()
            self._before, self._lost, self._pasting = "", "", False
        elif byte == 0x7F or (byte == 0x08 and self._edits):
            self._backspace()
        elif byte == 0x15:
            self._line.clear()
        elif byte == 0x17:
            # What whitespace ends, as readline and the kernel's line discipline count words.
            kept = re.sub(rb"[^ \t]*[ \t]*\Z", b"", bytes(self._line))
            self._line[:] = kept
        elif byte >= 0x20:
            self._line.append(byte)
        elif byte not in _INERT:
            self._lose(_KEYS.get(byte, f"the key {byte:#04x}"))
        if len(self._line) + len(self._before) > MAX_TEXT:
            self._lose(f"{MAX_TEXT:,} letters")
            self._line.clear()
            self._before = ""

    def _continue_escape(self, byte: int) -> None:
        sequence = self._escape + bytes([byte])
        self._escape = b""
        whole = _PASTE_END if self._pasting else _PASTE_BEGIN
        if whole.startswith(sequence) and sequence != whole:
            self._escape = sequence
        elif sequence == whole:
            self._pasting = not self._pasting
        elif self._pasting:
            # In a paste an Esc is a letter like others, and what followed it too, which may begin the real end.
            self._line += self._escape_letters(sequence[:-1])
            self.press(byte)
        else:
            self._lose("Esc or an arrow")
            # Enter ends a sequence that is none.
            if byte in (0x0A, 0x0D, 0x03):
                self.press(byte)

    def _escape_letters(self, sequence: bytes) -> bytes:
        return sequence

    def _lose(self, key: str) -> None:
        self._lost = self._lost or key

    def _backspace(self) -> None:
        while self._line:
            last = self._line.pop()
            if last & 0xC0 != 0x80:  # the first byte of a letter
                return

    def _enter(self) -> None:
        text = self._before + self._line.decode(errors="surrogateescape")
        if self._lost:
            self.lines.append((TypedLine("", self._lost), CommandLine()))
            if not self._pasting:
                self._line.clear()
                self._before, self._lost = "", ""
            return
        line = read_command_line(text, shell=self._shell, interactive=True)
        self.lines.append((TypedLine(text, pasted=self._pasting), line))
        self._line.clear()
        self._before = text + "\n" if line.incomplete or self._pasting else ""
