"""Resumes the work of a dead server from its ledger, its spool, and the descriptors in the keeper.

`Recovery` drives it: first the ledger is replayed, in memory alone; then `ProcessRecovery` resumes each process and
`shell_recovery` each shell. A resumed process differs from a new one only in its parent, the keeper. Touches the
ledger, the spool and /proc.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from holdfast import __version__
from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.abandoned_spool import AbandonedSpool, find_abandoned
from holdfast.runtime.durability.durability import LEDGER_NAME, READS_NAME, Durability
from holdfast.runtime.durability.input_log import DurableInput
from holdfast.runtime.durability.keeper_link import HeldDescriptors, KeeperLink
from holdfast.runtime.durability.ledger import RESERVE_BYTES, Ledger, boot_id, read_ledger
from holdfast.runtime.durability.recorder import ProcessRecorder, restore_output
from holdfast.runtime.durability.replay import Replay, ReplayExtension
from holdfast.runtime.durability.shell_recovery import resume_shells
from holdfast.runtime.output.output_log import Spool
from holdfast.runtime.process.start import StartedProcess
from holdfast.runtime.tree.process_table import ProcessTable, read_entry, read_mark
from holdfast.types import ExitStatus, TerminalSize

if TYPE_CHECKING:
    from holdfast.config import ExecServerConfig
    from holdfast.runtime.durability.job_replay import ProcessState
    from holdfast.runtime.durability.terminal_reads import UnstoredRead
    from holdfast.runtime.local import LocalExec
    from holdfast.runtime.process.process import ManagedProcess

log = logging.getLogger(__name__)

SPOOL_KEY: Final = "spool"
#: The keeper's protocol that this server needs. The keeper may be older: it stays when the server is replaced.
NEEDED_PROTOCOL: Final = 1


class Recovery:
    """The state that the keeper holds for this server; empty for the first server."""

    def __init__(
        self,
        keeper_fd: int,
        config: ExecServerConfig,
        home: str = "",
        extension: type[ReplayExtension] = ReplayExtension,
    ) -> None:
        """`home` is the address that distinguishes this server from others of this machine."""
        link = KeeperLink(keeper_fd)
        self.held = link.take()
        if link.protocol < NEEDED_PROTOCOL:
            raise SandboxError(
                f"the keeper, pid {link.pid}, has protocol version {link.protocol}, and this server needs"
                f" {NEEDED_PROTOCOL}: serve with an earlier version, or end everything by `holdfast stop`"
            )
        self._config = config
        self._extension = extension
        found = self.held.pop(SPOOL_KEY, None)
        taken = None if found is None else (found.path, found.fds[0])
        #: Spools of other keepers that were killed with their servers: one to resume, and those to end.
        self._abandoned: AbandonedSpool | None = None
        self._doomed: list[AbandonedSpool] = []
        if found is None:
            self._abandoned, self._doomed = find_abandoned(config.spool_directory, home, self._new_replay)
            if self._abandoned is not None:
                taken = (self._abandoned.path, self._abandoned.lock)
        self.is_first = taken is None
        spool = Spool(config.spool_directory, wanted_bytes=config.spool_minimum_bytes, taken=taken)
        if found is None:
            link.keep(SPOOL_KEY, [spool.lock], spool.path)
        self.replay = self._new_replay()
        head = r.LedgerHead(r.LEDGER_VERSION, __version__, link.pid, boot_id(), config.orphaned_jobs, home)
        try:
            self.ledger = self._open_ledger(spool, head)
            try:
                self.durability = Durability(link, self.ledger, spool, config)
                if self.is_first:
                    self.ledger.require_room()
            except BaseException:
                self.ledger.close()
                raise
        except (OSError, ResourceExhausted) as error:
            if self.is_first:
                spool.remove()
            why = error.strerror if isinstance(error, OSError) else error
            raise ResourceExhausted(f"the spool {spool.path} cannot be used: {why}") from None
        self.durability.last_key = self.replay.last_key

    def _open_ledger(self, spool: Spool, head: r.LedgerHead) -> Ledger:
        path, kinds = f"{spool.path}/{LEDGER_NAME}", self._extension.KINDS
        if os.path.exists(path):
            self.replay.apply(read_ledger(path, kinds)[1])
        return Ledger(path, self._compacted, head, min(RESERVE_BYTES, spool.size // 16), kinds)

    def _new_replay(self) -> Replay:
        config = self._config
        return Replay(
            max_chunks=config.retained_chunks_per_process,
            max_events=config.retained_terminal_events,
            extension=self._extension,
        )

    def _compacted(self, records: Iterable[r.LedgerRecord]) -> Iterable[r.LedgerRecord]:
        replay = self._new_replay()
        replay.apply(records)
        return replay.records()

    async def end_doomed(self) -> None:
        """End the processes of killed keepers that were not to survive."""
        for spool in self._doomed:
            self.durability.lost = await spool.end()
            log.error("%s", self.durability.lost)
        self._doomed.clear()

    def take(self, key: str) -> HeldDescriptors | None:
        """Return the descriptors that the keeper holds under a key; the caller owns them from now on."""
        return self.held.pop(key, None)

    def release(self) -> None:
        """Have the keeper drop the descriptors that were not taken."""
        for key, held in self.held.items():
            for fd in held.fds:
                os.close(fd)
            self.durability.link.drop(key)
            if held.path:
                _remove(held.path)  # the socket of an address on which this server does not listen
        self.held.clear()

    def take_over(self, exec_: LocalExec) -> None:
        """Resume every process and every shell."""
        replayed = self.replay.processes
        processes = ProcessRecovery(self, exec_)
        if self._abandoned is not None:
            processes.detach(self._abandoned.head.keeper)
        processes.find_unnamed(any_parent=self._abandoned is not None)
        self._remove_stale_files()
        exec_.terminals.remember_runs(self.replay.runs)
        self.durability.link.lead(each.pid for each in replayed.values() if each.ended is None)
        resume_shells(self.replay, self.held, processes.adopt_program, exec_.shells)
        closed: list[ManagedProcess] = []
        for each in replayed.values():
            if not each.begun.internal and (process := processes.resume(each)).closed_at is not None:
                closed.append(process)
        for process in sorted(closed, key=lambda each: each.closed_at or 0.0):
            exec_.processes.retention.keep(process)

    def _remove_stale_files(self) -> None:
        """Remove the files of jobs that are not recovered, such as logs of a process that was being forgotten."""
        spool = self.durability.spool.path
        # The ledger that this server has just opened may be under compaction.
        known = {LEDGER_NAME, f"{LEDGER_NAME}.new", READS_NAME}
        for key, each in self.replay.processes.items():
            known |= {f"{key}.{name}" for name in (0, 1, 2, "input")}
            terminal = each.terminal
            if terminal is not None and (terminal.checkpoint is None or not terminal.checkpoint.prompts):
                known.add(os.path.basename(terminal.opening.directory))  # the shell may not have read its files
        shells = self.replay.shells
        for key in (*shells.shells, *shells.commands):
            known |= {f"{key}.{name}" for name in (0, 1, "input")}
        known |= {os.path.basename(each.opening.directory) for each in shells.shells.values()}
        for name in os.listdir(spool):
            if name not in known:
                _remove(f"{spool}/{name}")


class ProcessRecovery:
    """Turns replayed states into managed processes."""

    def __init__(self, recovery: Recovery, exec_: LocalExec) -> None:
        self._durability = recovery.durability
        self._states = recovery.replay.processes
        self._take = recovery.take
        self._exec = exec_

    def resume(self, state: ProcessState) -> ManagedProcess:
        begun = state.begun
        recorder = ProcessRecorder(self._durability, begun.key, begun.spec, internal=begun.internal, adopted=True)
        self._check_end(state, recorder)
        # A closed process may have died with its server before the keeper dropped the streams: they are released.
        streams = self._take(recorder.output_key) if state.closed is None else None
        if streams is None and state.closed is None and state.detached is None:
            log.error("process %r: its streams are lost", begun.spec.process_id)
        outputs = {} if streams is None else dict(zip(recorder.logs, streams.fds, strict=False))
        stdin = self._take(recorder.input_key)
        stdin_fd = outputs.get(2, -1) if begun.spec.tty else (-1 if stdin is None else stdin.fds[0])
        unstored = self._unstored(state)
        restore_output(recorder, state, self._terminal_end(state, unstored))
        started = StartedProcess(state.pid, begun.mark, os.fsdecode(begun.cwd), outputs, stdin_fd, recorder)
        process = self._take_over(state, started)
        if state.detached is not None:
            process.failure = state.detached.reason
        for signal_id in state.signals:
            process.remember_signal(signal_id)
        if state.resized is not None:
            process.size = TerminalSize(state.resized.rows, state.resized.cols)
        self._restore_input(state, process, self._take(recorder.input_file) if stdin_fd >= 0 else None)
        self._exec.terminals.resume_runs(begun.spec.process_id)
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
        recorder = ProcessRecorder(self._durability, begun.key, begun.spec, internal=begun.internal, adopted=True)
        self._check_end(state, recorder)
        started = StartedProcess(state.pid, begun.mark, os.fsdecode(begun.cwd), {}, -1, recorder)
        streams = self._take(recorder.output_key)
        process = self._exec.processes.take_over(begun.spec, started, state.past, on_exit)
        process.streams_are_over()
        return process, {} if streams is None else dict(enumerate(streams.fds))

    def _take_over(self, state: ProcessState, started: StartedProcess) -> ManagedProcess:
        spec, history = state.begun.spec, state.terminal
        if history is None:
            return self._exec.processes.take_over(spec, started, state.past)
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
        process = self._exec.processes.take_over(spec, started, state.past, terminal.ended)
        terminal.attach_again(process, history.checkpoint)
        return process

    def _check_end(self, state: ProcessState, recorder: ProcessRecorder) -> None:
        """Record an unknown exit status for a process that ended without its keeper."""
        if state.ended is None and not self._is_running(state):
            if state.detached is None:  # else `detach` has logged it
                log.error("process %r, pid %d: exit status lost", state.begun.spec.process_id, state.pid)
            ended = r.JobEnded.of(state.key, ExitStatus(255), time.time())
            self._durability.ledger.write(ended)
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
        reads = self._durability.reads
        unstored = None if reads is None else reads.unstored
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
        self._exec.processes.inherit_cgroups(keeper)
        reason = f"its keeper, pid {keeper}, and its server were killed: its later output is lost"
        running = lost = 0
        for key, each in self._states.items():
            if each.closed is not None or each.begun.internal:
                continue
            more = ", and its exit status" if each.ended is None else ""
            each.detached = r.ProcessDetached(key, reason + more)
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


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
