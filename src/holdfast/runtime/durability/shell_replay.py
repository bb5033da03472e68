"""The replayed state of live shells and their commands. Pure memory; see `replay`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.job_replay import JobState
from holdfast.runtime.output.job import JobHistory
from holdfast.runtime.output.journal import CLOSE, EXIT
from holdfast.types import CommandSpec, ExitStatus

#: Command ids that are retained, so that no command runs twice.
KNOWN_COMMANDS: Final = 256
#: Interrupts that a client may repeat after a broken connection.
KEPT_INTERRUPTS: Final = 4
#: Pids of background jobs that are retained; older jobs are recognized by their age.
KNOWN_JOBS: Final = 256


class CommandState(JobState):
    """One command."""

    def __init__(self, key: int, shell: int, max_chunks: int) -> None:
        super().__init__(key, max_chunks)
        self.shell = shell
        self.queued: r.CommandQueued | None = None
        self.began: r.CommandBegan | None = None
        self.stopping: r.CommandStopping | None = None
        self.end: r.CommandEndRecord | None = None
        self.is_over = False

    @property
    def spec(self) -> CommandSpec | None:
        if self.began is not None:
            return self.began.spec
        return None if self.queued is None else self.queued.spec

    @property
    def past(self) -> JobHistory:
        """The history without its times, which no reader can query."""
        status = ExitStatus(self.end.exit_code) if self.end is not None and self.is_over else None
        return JobHistory(0.0, status, None if status is None else 0.0, None if status is None else 0.0)

    def records(self, kept: int) -> Iterator[r.LedgerRecord]:
        if self.began is None:
            if self.queued is not None:
                yield self.queued
                yield from self.input.records(self.key)
            return
        yield self.began
        yield from self.input.records(self.key)
        if self.stopping is not None:
            yield self.stopping
        if self.end is not None:
            yield r.CommandOver(self.key, self.end, kept) if self.is_over else r.CommandAnswered(self.key, self.end)
        yield from self.output_records()


class ShellState(JobState):
    """One shell, with the keys of its commands."""

    def __init__(self, opening: r.ShellOpening, max_chunks: int) -> None:
        super().__init__(opening.key, max_chunks)
        self.opening = opening
        self.program: r.ProgramBegins | None = None
        self.ready: r.ProgramReady | None = None
        #: The end of the last command in this program.
        self.last: r.CommandEndRecord | None = None
        self.queue: list[int] = []
        self.current = 0
        self.finished: deque[int] = deque()
        self.known: deque[str] = deque(maxlen=KNOWN_COMMANDS)
        self.jobs: deque[int] = deque(maxlen=KNOWN_JOBS)
        self.interrupts: dict[str, r.InterruptRequested] = {}
        self.commands_run = 0
        self.part = b""
        self.given_up: r.ProgramGivenUp | None = None
        self.closing: r.ShellClosing | None = None
        self.end: r.ShellEnded | None = None
        #: As of the last command in this program.
        self.pipes = 0
        self.line_end = -1
        self._job = ""

    def ended_command(self, end: r.CommandEndRecord) -> None:
        """Apply the shell's answer to a command."""
        self.part = b""
        if end.answer.job != self._job and end.answer.job.isdecimal():
            self.jobs.append(int(end.answer.job))
        self._job = end.answer.job
        self.last = end

    def apply(self, record: r.JobRecord) -> None:
        match record:
            case r.ProgramBegins():
                self.program, self.ready, self.given_up, self.part = record, None, None, b""
                self.pipes, self.line_end = 0, -1
                self.jobs.clear()
                self._job = ""
            case r.ProgramReady():
                self.ready, self.last, self.part = record, None, b""
                self._job = record.answer.job
            case r.InterruptRequested():
                self.interrupts[record.interrupt_id] = record
                if len(self.interrupts) > KEPT_INTERRUPTS:
                    del self.interrupts[next(iter(self.interrupts))]
            case r.AnswerPart():
                self.part += record.data
            case r.ProgramGivenUp():
                self.given_up = record
            case r.ShellClosing():
                self.closing = record
            case r.ShellEnded():
                self.end = record
            case r.ShellCheckpoint():
                self.commands_run = record.commands_run
                self.known = deque(record.known, maxlen=KNOWN_COMMANDS)
                self.jobs = deque(record.jobs, maxlen=KNOWN_JOBS)
                self.last, self.pipes, self.line_end = record.last, record.pipes, record.line_end
                if record.last is not None:
                    self._job = record.last.answer.job
            case _:
                super().apply(record)

    def records(self, commands: dict[int, CommandState]) -> Iterator[r.LedgerRecord]:
        yield self.opening
        yield from (record for record in (self.program, self.ready) if record is not None)
        for key in (*self.finished, self.current, *self.queue):
            if key in commands:
                yield from commands[key].records(len(self.finished))
        known, jobs = tuple(self.known), tuple(self.jobs)
        yield r.ShellCheckpoint(self.key, self.commands_run, known, jobs, self.last, self.pipes, self.line_end)
        yield from self.interrupts.values()
        if self.part:
            yield r.AnswerPart(self.key, self.part)
        yield from (record for record in (self.given_up, self.closing, self.end) if record is not None)
        yield from self.output_records()


class ShellReplay:
    """The shells of a ledger, and their commands."""

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self.shells: dict[int, ShellState] = {}
        self.commands: dict[int, CommandState] = {}

    def apply(self, record: r.JobRecord) -> None:
        match record:
            case r.ShellOpening():
                self.shells[record.key] = ShellState(record, self._max_chunks)
            case r.ShellGone():
                self._forget(record.key)
            case r.CommandQueued():
                self._new_command(record.key, record.shell, record.spec.command_id).queued = record
                if record.shell in self.shells:
                    self.shells[record.shell].queue.append(record.key)
            case r.CommandBegan():
                self._begin(record)
            case r.CommandStopping() if record.key in self.commands:
                self.commands[record.key].stopping = record
            case r.CommandAnswered() if record.key in self.commands:
                self.commands[record.key].end = record.ended
                self._shell_of(record.key).ended_command(record.ended)
            case r.CommandOver() if record.key in self.commands:
                self._over(record)
            case r.CommandRefused() if record.key in self.commands:
                shell = self._shell_of(record.key)
                shell.queue = [key for key in shell.queue if key != record.key]
                if shell.current == record.key:
                    shell.current = 0
                command = self.commands.pop(record.key)
                if shell.end is not None and (spec := command.spec) is not None:
                    shell.known = deque((id for id in shell.known if id != spec.command_id), KNOWN_COMMANDS)
            case r.ShellRecord():
                if record.key in self.shells:
                    self.shells[record.key].apply(record)
            case _ if (job := self.commands.get(record.key) or self.shells.get(record.key)) is not None:
                job.apply(record)

    def _shell_of(self, command: int) -> ShellState:
        return self.shells[self.commands[command].shell]

    def _new_command(self, key: int, shell: int, command_id: str) -> CommandState:
        command = self.commands[key] = CommandState(key, shell, self._max_chunks)
        if shell in self.shells:
            self.shells[shell].known.append(command_id)
        return command

    def _begin(self, began: r.CommandBegan) -> None:
        command = self.commands.get(began.key)
        if command is None:
            if began.spec is None:
                return
            command = self._new_command(began.key, began.shell, began.spec.command_id)
        elif began.spec is None and command.queued is not None:
            # The input is in a file of the shell.
            spec = msgspec.structs.replace(command.queued.spec, input=None)
            began = msgspec.structs.replace(began, spec=spec)
        command.queued, command.began = None, began
        shell = self._shell_of(began.key)
        shell.queue = [key for key in shell.queue if key != began.key]
        shell.current, shell.part = began.key, b""
        shell.pipes, shell.line_end = began.pipes, began.line_end

    def _over(self, record: r.CommandOver) -> None:
        command, shell = self.commands[record.key], self._shell_of(record.key)
        shell.ended_command(record.ended)
        command.end, command.is_over = record.ended, True
        command.journal.add_event(EXIT)
        command.journal.add_event(CLOSE)
        shell.current = 0
        shell.commands_run += 1
        shell.finished.append(record.key)
        while len(shell.finished) > record.kept:
            self.commands.pop(shell.finished.popleft(), None)

    def _forget(self, key: int) -> None:
        self.shells.pop(key, None)
        for command in [each.key for each in self.commands.values() if each.shell == key]:
            del self.commands[command]

    def open_ids(self) -> set[str]:
        return {each.opening.spec.shell_id for each in self.shells.values() if each.end is None}

    def records(self) -> Iterator[r.LedgerRecord]:
        for shell in self.shells.values():
            yield from shell.records(self.commands)
