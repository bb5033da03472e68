"""Tracks typed input at a prompt: the content of the shell's line editor, and the text that Enter would run; pure.

    typed letters, backspace, ^U, ^W, a paste  ->  known
    arrows, Tab, ^R, ^Y, Alt-. and the like    ->  lost: only the shell has the line now
    Enter                                      ->  a line to decide; one that is not complete goes on
    ^C, a new prompt                           ->  empty

A `LineBuffer` is a value: the caller keeps the new one if the input is allowed, and the old one if it is not.
"""

from __future__ import annotations

import posixpath
from typing import Final

from holdfast.service.policy.command_line import MAX_TEXT, CommandLine, read_command_line
from holdfast.service.policy.engine import Decision, decide_line
from holdfast.service.policy.profiles import Profile, strictest
from holdfast.service.types import ServiceStruct

_PASTE_BEGIN: Final = b"\x1b[200~"
_PASTE_END: Final = b"\x1b[201~"
_ENTER: Final = (0x0A, 0x0D)
_INTERRUPT: Final = 0x03
_BACKSPACE: Final = 0x7F
#: No effect at the end of a line in readline: delete, kill to the end, redraw.
_INERT: Final = (0x04, 0x0B, 0x0C)
#: Shells that use readline. In others an Esc or a ^H is an ordinary character, and the line becomes unknown.
_READLINE: Final = ("bash", "rbash")


class LineBuffer(ServiceStruct, frozen=True):
    """Text typed since the last prompt. Begin with an empty one whenever a prompt is shown."""

    line: bytes = b""
    #: Earlier lines that the shell executes together with it.
    before: str = ""
    #: The key after which the line is unknown.
    lost: str = ""
    pasting: bool = False
    #: Incomplete key sequence.
    escape: bytes = b""


class InputDecision(ServiceStruct, frozen=True):
    """Whether to type the input, and the buffer after it. `entered`: the text that the shell would execute."""

    decision: Decision
    buffer: LineBuffer
    entered: tuple[str, ...] = ()


def decide_input(
    profile: Profile, buffer: LineBuffer, data: bytes, cwd: str = "", *, shell: str = "bash"
) -> InputDecision:
    """Decide on keys at a prompt by their strictest line. Keys that cannot be followed are unknown commands."""
    rule = f"profiles.{profile.name}.commands.default"
    allowed = Decision("allow", "no command is refused", rule, profile.location("commands.default"))
    if not profile.guarded:
        return InputDecision(allowed, LineBuffer())
    editor = _Editor(buffer, shell)
    if len(data) > MAX_TEXT:
        editor.lose(f"more than {MAX_TEXT:,} letters")
    else:
        for byte in data:
            editor.press(byte)
    editor.settle()
    decisions = [decide_line(profile, line, cwd) for line in editor.read]
    if editor.lost:
        decisions.append(decide_line(profile, _lost_line(editor.lost), cwd))
    verdict = strictest({decision.verdict for decision in decisions})
    chosen = next((decision for decision in decisions if decision.verdict == verdict), allowed)
    return InputDecision(chosen, editor.buffer(), tuple(editor.entered))


def _lost_line(key: str) -> CommandLine:
    return CommandLine(unknown=(f"after {key} the content of the line is unknown",))


class _Editor:
    """A line editor with the cursor always at the end of its line."""

    def __init__(self, buffer: LineBuffer, shell: str) -> None:
        self._line = bytearray(buffer.line)
        self._before = buffer.before
        self.lost = buffer.lost
        self._pasting = buffer.pasting
        self._escape = buffer.escape
        self._shell = shell
        self._readline = posixpath.basename((shell.split() or ["bash"])[0]) in _READLINE
        self._new = False
        self.entered: list[str] = []
        self.read: list[CommandLine] = []

    def buffer(self) -> LineBuffer:
        return LineBuffer(bytes(self._line), self._before, self.lost, self._pasting, self._escape)

    def press(self, byte: int) -> None:
        if byte == _INTERRUPT:  # handled by the terminal, whatever the editor does
            self.settle()
            self._line.clear()
            self._before, self.lost, self._pasting, self._escape = "", "", False, b""
        elif self._escape:
            self._continue_escape(byte)
        elif byte == 0x1B and self._readline:
            self._escape = b"\x1b"
        elif self._pasting:
            # A shell without bracketed paste executes each line now. One with it executes all of them at Enter.
            self._new = self._new or byte in _ENTER
            self._line.append(0x0A if byte in _ENTER else byte)
        elif byte in _ENTER:
            self._enter()
        elif byte == _BACKSPACE or (byte == 0x08 and self._readline):
            self._backspace()
        elif byte == 0x15:
            self._line.clear()
        elif byte == 0x17:
            self._erase_word()
        elif byte >= 0x20:
            self._line.append(byte)
        elif byte not in _INERT or not self._readline or (byte == 0x04 and self._before):
            # ^D ends a continued line as it stands.
            self.lose("Tab" if byte == 0x09 else f"^{chr(byte + 64)}")
        if len(self._line) + len(self._before) > MAX_TEXT:
            self.lose(f"more than {MAX_TEXT:,} letters")
            self._line.clear()

    def _continue_escape(self, byte: int) -> None:
        sequence, self._escape = self._escape + bytes([byte]), b""
        whole = _PASTE_END if self._pasting else _PASTE_BEGIN
        if sequence == whole:
            self._pasting = not self._pasting
        elif whole.startswith(sequence):
            self._escape = sequence
        elif self._pasting:
            # In a paste an Esc is an ordinary character; the last byte may begin the real end.
            self._line += sequence[:-1]
            self.press(byte)
        else:
            self.lose("Esc or an arrow")
            if byte in _ENTER:
                self.press(byte)

    def lose(self, key: str) -> None:
        self.lost = self.lost or key

    def _backspace(self) -> None:
        while self._line:
            if self._line.pop() & 0xC0 != 0x80:  # the first byte of a character
                return

    def _erase_word(self) -> None:
        """Erase a word, which ends at a blank for readline and for the kernel, but not at a line end in a paste."""
        while self._line and self._line[-1] in b" \t":
            self._line.pop()
        while self._line and self._line[-1] not in b" \t":
            self._line.pop()

    def _enter(self) -> None:
        if self.lost:
            self.settle()
            self.read.append(_lost_line(self.lost))
            self._before, self.lost = "", ""
        else:
            self._before += self._line.decode(errors="surrogateescape") + "\n"
            self._new = True
        self._line.clear()

    def settle(self) -> None:
        """Parse all entered lines at once, since each is parsed with those before it."""
        if not self._new:
            return
        self._new = False
        pasted = self._line[: self._line.rfind(b"\n") + 1].decode(errors="surrogateescape")
        line = read_command_line(self._before + pasted, shell=self._shell, interactive=True)
        self.read.append(line)
        self.entered.append(self._before + pasted)
        self._before = self._before[line.taken :] if line.incomplete else ""
