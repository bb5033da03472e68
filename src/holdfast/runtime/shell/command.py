"""One command in a live shell: its output and its end are recorded like those of a process; it has no pid.

Touches nothing itself. `LiveShell` gives it its streams and its result; it reports when the result is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.runtime.output.job import Job
from holdfast.runtime.output.poller import Poller
from holdfast.runtime.output.silence import SilenceTimer
from holdfast.runtime.process.input import InputQueue
from holdfast.types import CommandEnded, CommandSpec, ExitStatus

if TYPE_CHECKING:
    from holdfast.config import ExecServerConfig
    from holdfast.runtime.durability.shell_recorder import CommandRecorder


class ShellCommand(Job):
    """A command from the moment it is queued until its result is forgotten."""

    __slots__ = (
        "_callbacks",
        "_on_recorded",
        "_silence",
        "_timer",
        "began",
        "began_ticks",
        "ended",
        "error",
        "input",
        "oom_kills",
        "recorder",
        "silent",
        "spec",
        "stop",
        "timed_out",
    )

    def __init__(
        self,
        spec: CommandSpec,
        recorder: CommandRecorder,
        *,
        poller: Poller,
        config: ExecServerConfig,
        on_growth: Callable[[], None],
        on_recorded: Callable[[ShellCommand], None],
    ) -> None:
        super().__init__(
            spec.command_id, recorder, overflow="follow", poller=poller, config=config, on_growth=on_growth
        )
        self.spec = spec
        self.recorder = recorder
        #: The queue of its stdin, if that is open: also while the command is queued.
        self.input: InputQueue | None = None
        if spec.pipe_stdin:
            self.input = recorder.new_input(-1, name=spec.command_id, owns_fd=True, awaits_reader=True)
        self.ended: CommandEnded | None = None
        #: Why it did not run.
        self.error: HoldfastError | None = None
        #: By the loop's clock, once the shell has its line.
        self.began: float | None = None
        #: By the kernel's clock of process starts, before the line is sent.
        self.began_ticks = 0
        #: The task that stops it, after a timeout or an interrupt.
        self.stop: asyncio.Task[None] | None = None
        self.timed_out = False
        #: It printed nothing for its `silence`.
        self.silent = False
        #: The kills for memory before it began.
        self.oom_kills = 0
        self._silence: SilenceTimer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._on_recorded = on_recorded
        self._callbacks: list[Callable[[], None]] = []

    def begin(self, on_timeout: Callable[[ShellCommand], None]) -> None:
        self.began = self._loop.time()
        if self.spec.timeout is not None:
            self._timer = self._loop.call_later(self.spec.timeout, on_timeout, self)
        self._begin_silence(on_timeout)

    def _begin_silence(self, on_timeout: Callable[[ShellCommand], None]) -> None:
        if self.spec.silence is None:
            return

        def was_silent() -> None:
            self.silent = True
            on_timeout(self)

        self._silence = SilenceTimer(self.spec.silence, self.last_output, was_silent)

    def begin_again(self, began: float, on_timeout: Callable[[ShellCommand], None]) -> None:
        """Continue a command that began under an earlier server."""
        self.began = began
        if self.spec.timeout is not None:
            self._timer = self._loop.call_at(began + self.spec.timeout, on_timeout, self)
        self._begin_silence(on_timeout)

    def record_end(self, ended: CommandEnded, note: Callable[[], None] | None = None) -> None:
        """Record the result: the output goes into the log, then the end into the journal."""
        self.ended = ended
        for timer in (self._timer, self._silence):
            if timer is not None:
                timer.cancel()
        self.end_input()
        self.end(ExitStatus(ended.exit_code), note)

    def end_input(self) -> None:
        """Close its stdin: processes that it left behind read an end of file."""
        if self.input is not None:
            self.input.abandon()

    def refuse(self, error: HoldfastError) -> None:
        """Record that it will not run, and why."""
        self.end_input()
        self.recorder.refused()
        self.error = error
        self.status = ExitStatus(255)
        self._wake_exit_waiters()
        self._add_close()
        self._call_back()

    @property
    def is_done(self) -> bool:
        return self.status is not None

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it has ended or was refused: cheaper than a task that waits."""
        self._callbacks.append(callback)

    async def wait_ended(self) -> CommandEnded:
        await self.wait_exit()
        if self.error is not None:
            raise self.error
        assert self.ended is not None
        return self.ended

    def forget(self) -> None:
        """Discard its output and its records."""
        self.end_input()
        self.recorder.forgotten()
        self.discard()

    def _exited(self) -> None:
        self.stop_blocking()  # all its output is in the log, and its streams go back to the shell
        # First the waiters, which need nothing of the rest.
        self._call_back()
        self._on_recorded(self)

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
