"""One command in a live shell: printed output and an end like a process, and the shell's word instead of a pid.

Touches nothing itself; the shell hands it its streams and tells it how it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.runtime.output.job import Job
from holdfast.runtime.output.poller import Poller
from holdfast.runtime.process.input import InputQueue
from holdfast.types import CommandEnded, CommandSpec, ExitStatus

if TYPE_CHECKING:
    from holdfast.config import ExecServerConfig
    from holdfast.runtime.durability.shell_recorder import CommandRecorder


class ShellCommand(Job):
    """From the moment it is queued until its result is forgotten."""

    __slots__ = (
        "_callbacks",
        "_on_end",
        "_timer",
        "began",
        "began_ticks",
        "ended",
        "error",
        "input",
        "recorder",
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
        on_end: Callable[[ShellCommand], None],
    ) -> None:
        super().__init__(
            spec.command_id, recorder, overflow="follow", poller=poller, config=config, on_growth=on_growth
        )
        self.spec = spec
        self.recorder = recorder
        #: What is written to its stdin, if that is open: also while the command waits for its turn.
        self.input: InputQueue | None = None
        if spec.pipe_stdin:
            self.input = recorder.new_input(-1, name=spec.command_id, owns_fd=True, awaits_reader=True)
        self.ended: CommandEnded | None = None
        #: Why it did not run.
        self.error: HoldfastError | None = None
        #: By the loop's clock, once the shell was told.
        self.began: float | None = None
        #: By the kernel's clock of process starts, from before the shell is told.
        self.began_ticks = 0
        #: The work of ending it, once somebody wants that.
        self.stop: asyncio.Task[None] | None = None
        self.timed_out = False
        self._timer: asyncio.TimerHandle | None = None
        self._on_end = on_end
        self._callbacks: list[Callable[[], None]] = []

    def begin(self, on_timeout: Callable[[ShellCommand], None]) -> None:
        self.began = self._loop.time()
        if self.spec.timeout is not None:
            self._timer = self._loop.call_later(self.spec.timeout, on_timeout, self)

    def begin_again(self, began: float, on_timeout: Callable[[ShellCommand], None]) -> None:
        """It began when the server was another."""
        self.began = began
        if self.spec.timeout is not None:
            self._timer = self._loop.call_at(began + self.spec.timeout, on_timeout, self)

    def finish(self, ended: CommandEnded, note: Callable[[], None] | None = None) -> None:
        """The shell has spoken, or ended: what was printed goes into the log, then the end is told."""
        self.ended = ended
        if self._timer is not None:
            self._timer.cancel()
        self.end_input()
        self.end(ExitStatus(ended.exit_code), note)

    def end_input(self) -> None:
        """It reads no more, and what it left behind is to read an end of file."""
        if self.input is not None:
            self.input.abandon()

    def refuse(self, error: HoldfastError) -> None:
        """It will not run."""
        self.end_input()
        self.recorder.refused()
        self.error = error
        self.status = ExitStatus(255)
        self._exit.set()
        self._add_close()
        self._call_back()

    @property
    def is_over(self) -> bool:
        return self._exit.is_set()

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call this once it has ended, or will not run: cheaper than a task that waits."""
        self._callbacks.append(callback)

    async def wait_ended(self) -> CommandEnded:
        await self._exit.wait()
        if self.error is not None:
            raise self.error
        assert self.ended is not None
        return self.ended

    def forget(self) -> None:
        """Nobody can ask for it any more."""
        self.end_input()
        self.recorder.forgotten()
        self.discard()

    def _exited(self) -> None:
        self.stop_blocking()  # all that it printed is in the log, and its streams go back to the shell
        # Who waits goes on while we tidy up.
        self._call_back()
        self._on_end(self)

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
