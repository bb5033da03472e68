"""The default program of a fake terminal: a shell's prompt, with commands that are coroutines.

A command is found as in a fake shell (`fake_shell`). It prints to the terminal, and bytes typed while it runs are
its input. In memory; touches nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Final

from holdfast.testing.fake_shell import CommandProgram, FakeCommand, words
from holdfast.testing.fake_terminal import FakeTerminal, TerminalProgram
from holdfast.types import CommandSpec, ExitStatus, ProcessSpec, Stream

_INTERRUPT: Final = 0x03
_END_OF_INPUT: Final = 0x04
#: Stands for an interrupted line: no typed command is a lone newline.
_INTERRUPTED: Final = b"\n"
_CLEAR_LINE: Final = 0x15
_QUOTE: Final = 0x16
_BACKSPACE: Final = (0x08, 0x7F)
_ENTER: Final = (0x0A, 0x0D)
_EXIT: Final = re.compile(r"exit(?:\s+(\d+))?\s*\Z")
_ENDING_SIGNALS: Final = ("HUP", "INT", "QUIT", "KILL", "TERM")


class TypedCommand(FakeCommand):
    """A command typed at the prompt of a fake terminal: the terminal is its output and its input."""

    def __init__(self, terminal: FakeTerminal, text: str) -> None:
        requested = CommandSpec(f"{terminal.spec.process_id}-{len(terminal.input)}", text)
        spec = ProcessSpec(requested.command_id, words(text), cwd=terminal.cwd, pipe_stdin=True)
        super().__init__(requested, spec, terminal.pid, 1 << 62)
        self.terminal = terminal
        self.variables = terminal.variables

    async def read(self) -> bytes:
        await self._block_until(lambda: len(self.input) > self._taken)
        return await super().read()

    async def read_line(self) -> bytes:
        await self._block_until(lambda: b"\n" in self.input[self._taken :])
        return await super().read_line()

    async def _block_until(self, there: Callable[[], bool]) -> None:
        while not there() and self.stdin_open:
            self.terminal.reads()
            await self._changed.wait()
        self.terminal.stops_reading()

    def take(self, typed: bytes) -> None:
        """Input while a command runs: signal keys become signals, and lines end as a program reads them."""
        for byte in typed:
            if byte == _INTERRUPT:
                self.terminal.prints("^C")
                self.get_signal("INT")
            elif byte == _END_OF_INPUT:
                self.stdin_open = False
            else:
                self.input += b"\n" if byte in _ENTER else bytes([byte])
        if self.terminal.echo:
            self.terminal.prints(_shown(typed))
        self.notify()

    def get_signal(self, name: str) -> None:
        self.signals.append(name)
        if name in _ENDING_SIGNALS and (name == "KILL" or name not in self.ignores):
            self.kill(name)

    def end(self, status: ExitStatus) -> None:
        super().end(status)
        self.terminal.notify()

    def _print(self, stream: Stream, data: bytes | str) -> None:
        raw = data.encode() if isinstance(data, str) else data
        self.terminal.prints(raw.replace(b"\n", b"\r\n"))


class FakePrompt:
    """A shell at its prompt. Edits a line, runs it, and shows the prompt again."""

    def __init__(self, terminal: FakeTerminal, find: Callable[[str], CommandProgram], prompt: str) -> None:
        self._terminal = terminal
        self._find = find
        self._prompt = prompt
        self._line = b""
        self._quoted = False
        self._unread = b""

    async def run(self) -> int:
        code = 0
        while True:
            self._terminal.on_signal = self._get_signal
            self._terminal.shows_prompt(self._prompt, exit_code=code)
            line = await self._read_command()
            if line is None:
                return code
            text = line.decode("utf-8", "replace")
            if not text.strip():
                code = 130 if line == _INTERRUPTED else code
                continue
            self._terminal.starts_command()
            given = _EXIT.match(text.strip())
            if given is not None:
                return int(given[1] or code)
            command = await self._run_command(text)
            assert command.status is not None
            code = command.status.exit_code
            self._terminal.cwd = command.cwd
            if command.exits:
                return code

    async def _run_command(self, text: str) -> TypedCommand:
        terminal = self._terminal
        command = TypedCommand(terminal, text)
        program = self._find(text)
        terminal.on_signal = command.get_signal
        shell, terminal.foreground = terminal.foreground, "".join(command.spec.argv[:1])
        command.run(lambda _: program(command))
        command.take(self._unread)
        self._unread = b""
        while command.status is None:
            await terminal.until(lambda: terminal.has_unread or command.status is not None)
            if command.status is None:
                command.take(terminal.take())
        terminal.stops_reading()
        terminal.foreground = shell
        return command

    async def _read_command(self) -> bytes | None:
        """Return a whole command; None at the end of input, and `_INTERRUPTED` after Ctrl-C."""
        self._line = b""
        while True:
            typed, self._unread = self._unread or await self._terminal.read(), b""
            for at, byte in enumerate(typed):
                if self._quoted or (byte >= 0x20 and byte not in _BACKSPACE) or byte == 0x09:
                    self._quoted = False
                    self._line += bytes([byte])
                    self._terminal.prints(_shown(bytes([byte])))
                elif byte == _QUOTE:
                    self._quoted = True
                elif byte == _CLEAR_LINE:
                    self._line = b""
                elif byte in _BACKSPACE:
                    self._line = self._line[:-1]
                elif byte == _END_OF_INPUT and not self._line:
                    return None
                elif byte == _INTERRUPT:
                    self._unread = typed[at + 1 :]
                    self._terminal.prints("^C\r\n")
                    return _INTERRUPTED
                elif byte in _ENTER:
                    self._unread = typed[at + 1 :]
                    if _is_complete(self._line):
                        return self._line
                    self._line += b"\n"
                    self._terminal.prints("\r\n")
                    self._terminal.shows_continuation()
                    break

    def _get_signal(self, name: str) -> None:
        """An interactive shell ends by a hang-up, and by force; an interrupt gives up its line."""
        if name in ("HUP", "KILL"):
            self._terminal.kill(name)
        elif name == "INT":
            self._terminal.type(bytes([_INTERRUPT]))


def prompting(find: Callable[[str], CommandProgram], prompt: str = "$ ") -> TerminalProgram:
    """Return a shell program that finds the coroutine of a command by its text with `find`."""

    async def program(terminal: FakeTerminal) -> int:
        return await FakePrompt(terminal, find, prompt).run()

    return program


def _is_complete(line: bytes) -> bool:
    try:
        shlex.split(line.decode("utf-8", "replace"))
    except ValueError:
        return False
    return True


def _shown(typed: bytes) -> bytes:
    """The text that a terminal echoes for a line."""
    return b"".join(
        b"\r\n" if byte in _ENTER else b"" if byte < 0x20 and byte != 0x09 else bytes([byte]) for byte in typed
    )
