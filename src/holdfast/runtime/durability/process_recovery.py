"""Resumes the processes of a dead server: opens their logs, records bytes that no reader has seen, watches streams.

The part of `recovery` for processes, and for the programs in which shells run. Touches the ledger, the spool,
/proc.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.input_log import DurableInput
from holdfast.runtime.durability.recorder import ProcessRecorder
from holdfast.runtime.process.start import StartedProcess
from holdfast.runtime.tree.process_table import ProcessTable, read_entry, read_mark
from holdfast.types import ExitStatus, TerminalSize

if TYPE_CHECKING:
    from holdfast.runtime.durability.durability import KeeperDurability
    from holdfast.runtime.durability.job_replay import ProcessState
    from holdfast.runtime.durability.keeper_link import HeldDescriptors
    from holdfast.runtime.durability.replay import Replay
    from holdfast.runtime.durability.terminal_reads import UnstoredRead
    from holdfast.runtime.local import LocalExec
    from holdfast.runtime.process.process import ManagedProcess

log = logging.getLogger(__name__)


class ProcessRecovery:
    """Turns replayed states into managed processes."""

    def __init__(
        self,
        durability: KeeperDurability,
        replay: Replay,
        take: Callable[[str], HeldDescriptors | None],
        exec_: LocalExec,
    ) -> None:
        """`take` returns the descriptors that the keeper holds under a key."""
        self._durability = durability
        self._states = replay.processes
        self._take = take
        self._exec = exec_

    def resume(self, state: ProcessState) -> ManagedProcess:
        begun = state.begun
        recorder = ProcessRecorder(self._durability, begun, adopted=True)
        self._check_end(state, recorder)
        # A closed process may have died with its server before the keeper dropped the streams: they are released.
        streams = self._take(recorder.output_key) if state.closed is None else None
        if streams is None and state.closed is None and state.detached is None:
            log.error("process %r: its streams are lost", begun.spec.process_id)
        outputs = {} if streams is None else dict(zip(recorder.logs, streams.fds, strict=False))
        stdin = self._take(recorder.input_key)
        stdin_fd = outputs.get(2, -1) if begun.spec.tty else (-1 if stdin is None else stdin.fds[0])
        unstored = self._unstored(state)
        recorder.restore(state, self._terminal_end(state, unstored))
        started = StartedProcess(state.pid, begun.mark, os.fsdecode(begun.cwd), outputs, stdin_fd, recorder)
        process = self._take_over(state, started)
        if state.detached is not None:
            process.failure = state.detached.reason
        for signal_id in state.signals:
            process.remember_signal(signal_id)
        if state.resized is not None:
            process.size = TerminalSize(state.resized.rows, state.resized.cols)
        self._restore_input(state, process, self._take(recorder.input_file) if stdin_fd >= 0 else None)
        if unstored is not None:
            process.print_again(unstored)
        if not outputs:
            process.streams_are_over()
        return process

    def adopt_program(
        self, state: ProcessState, on_exit: Callable[[ManagedProcess], None]
    ) -> tuple[ManagedProcess, dict[int, int]]:
        """Resume the program of a shell; returns the server's ends of its streams too, which the shell owns."""
        begun = state.begun
        recorder = ProcessRecorder(self._durability, begun, adopted=True)
        self._check_end(state, recorder)
        started = StartedProcess(state.pid, begun.mark, os.fsdecode(begun.cwd), {}, -1, recorder)
        streams = self._take(recorder.output_key)
        process = self._exec.take_over(begun.spec, started, state.past, on_exit)
        process.streams_are_over()
        return process, {} if streams is None else dict(enumerate(streams.fds))

    def _take_over(self, state: ProcessState, started: StartedProcess) -> ManagedProcess:
        spec, history = state.begun.spec, state.terminal
        if history is None:
            return self._exec.take_over(spec, started, state.past)
        terminals = self._exec.terminals
        terminal = terminals.recover(history.opening)
        terminal.timeline.skip(history.dropped.count, history.dropped.horizon)
        records: list[r.TerminalOutputStored | r.TerminalEventRecord] = [*state.times, *history.events]
        # By time; the sort is stable, so an event follows the output that contained it.
        for record in sorted(records, key=lambda each: each.at):
            if isinstance(record, r.TerminalOutputStored):
                terminal.timeline.note_output(record.offset, record.at)
            else:
                terminal.timeline.replay(record)
        process = self._exec.take_over(spec, started, state.past, terminal.ended)
        terminal.attach_again(process, history.checkpoint)
        terminals.resume_runs(terminal)
        return process

    def _check_end(self, state: ProcessState, recorder: ProcessRecorder) -> None:
        """Record an unknown exit status for a process that ended without its keeper."""
        if state.ended is None and not self._is_running(state):
            if state.detached is None:  # else `detach` has logged it
                log.error("process %r, pid %d: exit status lost", state.begun.spec.process_id, state.pid)
            ended = r.JobEnded.of(state.key, ExitStatus(255), time.time())
            recorder.write(ended)
            state.apply(ended)

    def _terminal_end(self, state: ProcessState, unstored: UnstoredRead | None) -> int:
        """Return where to cut the log: bytes after it are printed again, or are still held back."""
        stored = 0 if state.stored is None else state.stored.end
        return max(state.printed_end(2), stored) if unstored is None else unstored.offset

    def _restore_input(self, state: ProcessState, process: ManagedProcess, file: HeldDescriptors | None) -> None:
        assert isinstance(process.input, DurableInput)
        state.input.restore(process.input, None if file is None else file.fds[0])
        if state.ended is not None:
            process.input.abandon()
        elif state.input.closed:
            process.input.close()

    def _unstored(self, state: ProcessState) -> UnstoredRead | None:
        """Return the read that may be in the log but was not recorded: its bytes are printed again."""
        unstored = self._durability.reads.unstored
        stored = 0 if state.stored is None else state.stored.number
        if unstored is None or unstored.key != state.key or unstored.number <= stored:
            return None
        return unstored

    def _is_running(self, state: ProcessState) -> bool:
        """Return whether the pid still belongs to the process.

        A pid is reused only after its process was reaped, and until then the keeper is the parent. If the keeper
        was killed, the mark identifies the process.
        """
        entry = read_entry(state.pid) if state.pid else None
        if entry is not None and state.detached is not None:
            return not entry.dead and read_mark(state.pid) == state.begun.mark
        return entry is not None and entry.parent == self._durability.link.pid

    def detach(self, keeper: int) -> None:
        """Record for every process of a killed keeper that its streams are lost; logs and journals are intact."""
        self._exec.inherit_cgroups(keeper)
        reason = f"its keeper, pid {keeper}, and its server were killed: what it printed after that is lost"
        running = lost = 0
        for key, each in self._states.items():
            if each.closed is not None or each.begun.internal:
                continue
            each.detached = r.ProcessDetached(key, f"{reason}, and how it ended" if each.ended is None else reason)
            self._durability.ledger.write(each.detached)
            if each.ended is None:
                lives = self._is_running(each)
                running, lost = running + lives, lost + (not lives)
                how = "runs on, without its streams" if lives else "is gone"
                log.error(
                    "process %r, pid %d, %s: its keeper was killed", each.begun.spec.process_id, each.pid, how
                )
        self._durability.lost = (
            f"the keeper, pid {keeper}, was killed: {lost} processes are gone,"
            f" {running} run on without their streams"
        )
        log.error("%s", self._durability.lost)

    def find_unnamed(self, *, any_parent: bool) -> None:
        """Find by mark the pids of starts that were under way when the server died.

        `any_parent` if the keeper was killed: then the new parent of its children is unknown.
        """
        by_mark = {each.begun.mark: each for each in self._states.values() if not each.pid}
        if not by_mark:
            return
        for entry in ProcessTable.read().entries.values():
            # A leader leads its session; the processes that it started do not.
            if (any_parent or entry.parent == self._durability.link.pid) and entry.session == entry.pid:
                found = by_mark.pop(read_mark(entry.pid) or 0, None)
                if found is not None:
                    found.started = r.ProcessStarted(found.key, entry.pid, time.time())
                    self._durability.ledger.write(found.started)
        for missing in by_mark.values():
            # The start did not happen, and no reply reported one.
            self._durability.ledger.write(r.JobForgotten(missing.key))
            del self._states[missing.key]
