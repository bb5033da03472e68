"""A stub in place of a process on a PTY, and the real terminal implementation on top of it.

Only calls to the operating system are replaced: input waits, signals, the working directory, the time. In
memory; touches nothing.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

import msgspec

from holdfast.config import ExecServerConfig
from holdfast.runtime.terminal.input_wait import InputState
from holdfast.runtime.terminal.live import LiveTerminal
from holdfast.runtime.terminal.shell_integration import integrate
from holdfast.types import ExitStatus, TerminalSize, TerminalStatus

if TYPE_CHECKING:
    from holdfast.runtime.process.process import ManagedProcess
    from holdfast.testing.fake_terminal import FakeTerminal

#: The nonce of every fake terminal's marks: a test that forges a mark must not use it.
NONCE: Final = "0123456789abcdef" * 2
EVERYTHING: Final = 1 << 62


def marking_shell(path: str) -> str:
    """Return the name of the shell at `path` if it can mark its prompts in a sandbox, else an empty string."""
    shell = integrate(path, (path,), directory="/", nonce=NONCE, login=False, environment={})
    return shell.kind if shell else ""


class MemoryLog:
    """An output log in memory: over `retained_bytes`, the first half and the last half are kept."""

    def __init__(self, retained_bytes: int = EVERYTHING) -> None:
        self._head = retained_bytes // 2
        self._tail = retained_bytes - self._head
        self._first = b""
        self._last = b""
        self.end = 0
        self.lost_start = 0
        self.lost_end = 0

    def append(self, data: bytes) -> None:
        self.end += len(data)
        room = self._head - len(self._first)
        self._first += data[:room]
        self._last += data[max(0, room) :]
        surplus = len(self._last) - self._tail
        if surplus > 0:
            self._last = self._last[surplus:]
            self.lost_start, self.lost_end = len(self._first), self.end - len(self._last)

    def read(self, offset: int, length: int) -> bytes:
        """As in the real log: up to the start of a lost range, and nothing from inside of it."""
        if length <= 0 or self.lost_start <= offset < self.lost_end:
            return b""
        if offset < len(self._first):
            near = self._first[offset : offset + length]
            if len(near) == length or self.lost_start < self.lost_end:
                return near
            return near + self._last[: length - len(near)]
        start = offset - (self.end - len(self._last))
        return self._last[start : start + length]

    def tail(self, start: int, end: int, max_bytes: int) -> tuple[bytes, bool]:
        """The latest `max_bytes` of a range, as far as they are kept, and whether the range is cut."""
        wanted = end - start
        start = max(start, end - max_bytes)
        data = self.read(start, end - start)
        if self.lost_start < end and start < self.lost_end:
            data += self.read(self.lost_end, end - self.lost_end)
        return data, len(data) < wanted


class _Input:
    """The writer through which `LiveTerminal` types."""

    def __init__(self, terminal: FakeTerminal) -> None:
        self._terminal = terminal
        #: Not called: the stub reports all input itself.
        self.on_put: Callable[[bytes], None] | None = None

    @property
    def queued_bytes(self) -> int:
        return self._terminal.input_queued

    def has_taken(self, write_id: str) -> bool:
        return self._terminal.has_typed(write_id)

    def put(self, data: bytes, write_id: str | None = None) -> None:
        self._terminal.type(data, write_id)


class _Recorder:
    """Records nothing."""

    key: Final = 0
    printed_at = 0.0

    def terminal_event(self, event: object) -> None:
        """Ignore an event."""

    def terminal_checkpoint(self, state: object, *, delay: bool = False) -> None:
        """Ignore a state."""


class _Pty:
    """The process interface that `LiveTerminal` needs."""

    terminal: Final = -1
    watcher: object = None

    def __init__(self, stub: FakeTerminal) -> None:
        self._stub = stub
        self.logs = {2: stub.pty_log}
        self.input = _Input(stub)
        self.pid = stub.pid
        self.cwd = stub.cwd
        self.started_at = stub.started_at
        self.recorder = _Recorder()

    @property
    def size(self) -> TerminalSize:
        return self._stub.size

    @property
    def status(self) -> ExitStatus | None:
        return self._stub.status

    @property
    def running(self) -> bool:
        return self._stub.status is None

    @property
    def closed(self) -> bool:
        return self._stub.closed

    def foreground_group(self) -> int:
        return 0

    def take_what_is_there(self) -> None:
        """The stub appends output to the log at once."""

    def print_late(self, data: bytes) -> None:
        self._stub._show(data)
        self._stub.notify()

    def wake_waiters(self) -> None:
        self._stub.notify()

    async def changed(self) -> None:
        await self._stub._changed.wait()

    def signal_leader(self, number: int) -> None:
        self._stub.kill(signals.Signals(number).name.removeprefix("SIG"))

    async def wait_exit(self) -> None:
        await self._stub.until(lambda: self._stub.status is not None)


class ScriptedTerminal(LiveTerminal):
    """The real terminal over a stub: only calls to the operating system are replaced."""

    def __init__(self, stub: FakeTerminal, argv: tuple[str, ...], retained_events: int) -> None:
        self._stub = stub

        async def end_process(process: ManagedProcess, grace: float) -> None:
            stub._stop_program()
            if stub.status is None:
                stub.kill("KILL")

        super().__init__(
            stub.requested,
            argv,
            integration=marking_shell(argv[0]) if stub.requested.integration else "",
            nonce=NONCE,
            config=ExecServerConfig(retained_terminal_events=retained_events),
            end_process=end_process,
            on_first_prompt=lambda: None,
            now=lambda: stub.now,
        )
        self.attach(cast("ManagedProcess", _Pty(stub)))

    def status(self, *, look: bool = True) -> TerminalStatus:
        return msgspec.structs.replace(
            super().status(look=look), foreground=self._stub.foreground, foreground_pid=self._stub.pid
        )

    def update_input(self) -> None:
        self._query_input()
        self._notify()

    def typed_in(self, data: bytes) -> None:
        self._on_typed(data)

    @property
    def cwd(self) -> str:
        return self._stub.cwd

    def _probe_input(self) -> InputState:
        stub = self._stub
        pid = stub.pid if stub.status is None else None
        return InputState(stub.is_awaited, pid, stub.echo, stub.canonical)

    def _is_secret(self) -> bool:
        return self._stub.canonical and not self._stub.echo

    def runs_program(self) -> bool:
        return True  # no interrupt is disregarded

    def signal_foreground(self, number: signals.Signals) -> None:
        self._stub.signalled(number.name.removeprefix("SIG"))

    def _hang_up(self) -> None:
        """Also the shell, and not only its foreground command."""
        self._stub.signalled("HUP")
        if not self.is_over and "HUP" not in self._stub.ignores:
            self._stub.kill("HUP")
