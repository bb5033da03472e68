"""The PTY stub: a terminal with a script of the test as its program. In memory; touches nothing of the machine.

Everything above the PTY is the real code: the stub's output goes through the server's own filter of marks,
state machine and timeline. So prompts, gaps, positions and replay are those of a real sandbox, every time.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable
from typing import Final, cast

from holdfast.errors import TerminalClosed
from holdfast.runtime.terminal.run import run_typed
from holdfast.testing.fake_process import FakeProcess, Program
from holdfast.testing.fake_pty import EVERYTHING, NONCE, MemoryLog, ScriptedTerminal
from holdfast.types import (
    CloseMode,
    ExitStatus,
    JobsAtClose,
    ProcessSpec,
    Stream,
    TerminalCommandEnded,
    TerminalRead,
    TerminalSize,
    TerminalSpec,
    TerminalStatus,
    TerminalWait,
)

#: A program in a fake terminal: it is given its terminal and returns its exit code.
TerminalProgram = Callable[["FakeTerminal"], Awaitable[int]]

_LINE_END: Final = re.compile(rb"\r\n?|\n")


async def by_hand(terminal: FakeTerminal) -> int:
    """A program that does nothing: the test drives the terminal, and ends it."""
    await asyncio.get_running_loop().create_future()
    return 0


class FakeTerminal(FakeProcess):
    """A fake terminal: the output and input of its program, and the state that a test may inspect.

    A fake terminal is a fake process, too. `FakeExec.open_terminal` makes one, or `PtyStub()` in a running loop.
    """

    def __init__(
        self,
        spec: TerminalSpec | None = None,
        pid: int = 1000,
        *,
        retained_bytes: int = EVERYTHING,
        retained_events: int = 16_384,
        clock: Callable[[], float] | None = None,
    ) -> None:
        spec = TerminalSpec("stub") if spec is None else spec
        argv = spec.argv or ("/bin/bash",)
        process = ProcessSpec(
            spec.terminal_id,
            argv,
            cwd=spec.cwd,
            env=spec.env,
            tty=True,
            size=spec.size,
            user=spec.user,
            start_id=spec.start_id,
        )
        super().__init__(process, pid, retained_bytes)
        self.requested = spec
        #: The bytes that each call typed, in order; `input` has all of them joined.
        self.typed: list[bytes] = []
        #: Directory and variables of the shell, for programs that have them.
        self.cwd = spec.cwd or "/fake"
        self.variables: dict[str, str] = dict(spec.env or {})
        self.foreground: str | None = argv[0].rpartition("/")[2]
        self.echo = True
        self.canonical = True
        #: Bytes sent that the terminal has not taken: set it to make the queue busy.
        self.input_queued = 0
        #: Called with each typed line, without its end.
        self.on_line: Callable[[bytes], None] | None = None
        #: Called with the name of each signal to the foreground; the default ends the program.
        self.on_signal: Callable[[str], None] | None = None
        self.pty_log = MemoryLog(retained_bytes)
        self._reading = False
        self._line = b""
        self._now = asyncio.get_running_loop().time if clock is None else clock
        self.started_at = self._now()
        self.live = ScriptedTerminal(self, argv, retained_events)
        self._write_ids: set[str] = set()

    # --- for scripts: what the program does --------------------------------------------------------------------

    def prints(self, data: bytes | str) -> None:
        """Print these bytes as one read of the PTY returns them. They may hold marks, whole or cut."""
        raw = data.encode() if isinstance(data, str) else data
        self._show(self.live.printed(raw))
        self.notify()

    def mark(self, letter: str, argument: str | int | None = None) -> bytes:
        """The bytes of one mark of this terminal's shell (`A`, `B`, `C`, `D` with a status, `P`)."""
        middle = "" if argument is None else f";{argument}"
        return f"\x1b]133;{letter}{middle};{NONCE}\x07".encode()

    def shows_prompt(self, prompt: str = "$ ", *, exit_code: int = 0) -> None:
        """End the running command, if any, with this status, and show the prompt; the shell waits for input."""
        self.echo = self.canonical = False  # a line editor does both itself
        self.prints(self.mark("D", exit_code) + self.mark("A") + prompt.encode() + self.mark("B"))
        self.reads()

    def starts_command(self, typed: bytes | str = b"") -> None:
        """The shell echoes the line, leaves its line editor and runs the command."""
        raw = typed.encode() if isinstance(typed, str) else typed
        self.stops_reading()
        self.echo = self.canonical = True
        self.prints(raw + b"\r\n" + self.mark("C"))

    def shows_continuation(self, prompt: str = "> ") -> None:
        """The shell shows its continuation prompt."""
        self.prints(prompt.encode() + self.mark("P"))
        self.reads()

    def reads(self, *, echo: bool | None = None, canonical: bool | None = None) -> None:
        """The program waits for input, until something is typed. A password prompt: `reads(echo=False)`."""
        self.echo = self.echo if echo is None else echo
        self.canonical = self.canonical if canonical is None else canonical
        self._reading = True
        self._looked()

    def stops_reading(self) -> None:
        """The program no longer waits for input."""
        self._reading = False
        self._looked()

    def exits(self, code: int = 0) -> None:
        """End the program with an exit code."""
        self._stop_program()
        self.end(ExitStatus(code))

    def crashes(self, signal: str = "KILL") -> None:
        """Kill the program by a signal."""
        self.kill(signal.upper().removeprefix("SIG"))

    async def read(self) -> bytes:
        """Wait for typed bytes that are not read yet, and return them."""
        while not self.has_unread:
            self.reads()
            await self._changed.wait()
        self.stops_reading()
        return self.take()

    @property
    def has_unread(self) -> bool:
        """Whether typed bytes are unread."""
        return len(self.input) > self._taken

    def take(self) -> bytes:
        """Return the typed bytes that are not read yet, perhaps none."""
        data, self._taken = self.input[self._taken :], len(self.input)
        return data

    async def read_line(self) -> bytes:
        """Wait for one typed line and return it without its end."""
        while (end := _LINE_END.search(self.input, self._taken)) is None:
            self.reads()
            await self._changed.wait()
        self.stops_reading()
        line, self._taken = self.input[self._taken : end.start()], end.end()
        return line

    # --- for FakeExec ------------------------------------------------------------------------------------------

    def open(self, program: TerminalProgram) -> None:
        self.run(cast(Program, program))

    def type(self, data: bytes, write_id: str | None = None) -> None:
        """Receive typed bytes."""
        if self.status is not None:
            raise TerminalClosed(f"terminal {self.spec.process_id!r} is closed: {self.live.reason}")
        if write_id is not None:
            if write_id in self._write_ids:
                return
            self._write_ids.add(write_id)
        self.live.typed_in(data)
        self.input += data
        self.typed.append(data)
        self._line += data
        self.stops_reading()
        while self.on_line is not None and (end := _LINE_END.search(self._line)) is not None:
            line, self._line = self._line[: end.start()], self._line[end.end() :]
            self.on_line(line)

    def has_typed(self, write_id: str) -> bool:
        """Whether this write was typed already."""
        return write_id in self._write_ids

    def resized(self, size: TerminalSize) -> None:
        self.size = size
        self.live.resized(size)

    def signalled(self, name: str) -> None:
        """Signal the foreground program."""
        self.signals.append(name)
        self.live.signalled(signal.Signals[f"SIG{name}"])
        if self.on_signal is not None:
            self.on_signal(name)
        elif name in ("HUP", "INT", "QUIT", "KILL", "TERM") and (name == "KILL" or name not in self.ignores):
            self.kill(name)
        self.notify()

    def describe(self) -> TerminalStatus:
        return self.live.status()

    def read_after(self, since: int, max_bytes: int, *, timing: bool = False, marks: bool = False) -> TerminalRead:
        return self.live.read(since, max_bytes, timing=timing, marks=marks)

    async def wait_until(self, until: TerminalWait, timeout: float | None, changes: int = 0) -> bool:
        return await self.live.wait(until, timeout, changes)

    async def run_command(
        self, command: str, timeout: float | None, max_bytes: int, run_id: str = ""
    ) -> TerminalCommandEnded:
        return await run_typed(self.live, command, timeout=timeout, max_bytes=max_bytes, run_id=run_id)

    async def close(self, mode: CloseMode = "graceful", jobs: JobsAtClose = "kill", grace: float = 5.0) -> None:
        await self.live.close(mode, jobs, grace)
        if jobs == "kill":
            self.kill_children()
            await self.until(lambda: not self.has_children)

    def press(self, keys: tuple[str, ...], write_id: str | None) -> None:
        self.live.press(keys, write_id)

    def end(self, status: ExitStatus) -> None:
        if self.status is None:
            self._reading = False
            self._show(self.live.printing_ended())
            super().end(status)
            self.live.ended(self.live.process)
            self.notify()

    def _stop_program(self) -> None:
        # A program that ended itself goes on to its return: there is nothing to stop.
        if self._main is not None and self._main is not asyncio.current_task():
            self._main.cancel()

    def _show(self, data: bytes) -> None:
        if data:
            self.pty_log.append(data)
            super()._print("pty", data)

    def _print(self, stream: Stream, data: bytes | str) -> None:
        """The `stdout` and `stderr` methods of programs written for a fake process."""
        raw = data.encode() if isinstance(data, str) else data
        self.prints(raw.replace(b"\n", b"\r\n"))

    def _looked(self) -> None:
        self.live.update_input()
        self.notify()

    @property
    def is_awaited(self) -> bool:
        return self._reading and self.status is None

    @property
    def now(self) -> float:
        return self._now()


#: The name of `FakeTerminal` in the design of terminals.
PtyStub = FakeTerminal
