"""From what a dead server left (its ledger, its spool, descriptors in the keeper) to one that goes on.

First the ledger is replayed, in memory alone; then each process is taken over: its logs are opened, bytes that
nobody was told of are noted, its streams are watched again. Afterwards nothing tells it from one of our own, except
that the keeper is its parent.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from holdfast import __version__
from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.abandoned_spool import Remains, find_remains
from holdfast.runtime.durability.input_log import KeptInput
from holdfast.runtime.durability.keeper_link import Held, KeeperLink
from holdfast.runtime.durability.ledger import RESERVE_BYTES, Ledger, boot_id, read_ledger
from holdfast.runtime.durability.process_log import LEDGER_NAME, READS_NAME, Keeping, KeptLog, Notes
from holdfast.runtime.durability.replay import Memory, RememberedProcess
from holdfast.runtime.durability.shell_recovery import Adopt, ShellRemains
from holdfast.runtime.durability.terminal_reads import Unused
from holdfast.runtime.output.output_log import Spool
from holdfast.runtime.process.start import Started
from holdfast.runtime.tree.process_table import ProcessTable, read_entry, read_mark
from holdfast.types import TerminalSize

if TYPE_CHECKING:
    from holdfast.config import ExecServerConfig
    from holdfast.runtime.local import LocalExec
    from holdfast.runtime.process.process import ManagedProcess

log = logging.getLogger(__name__)

SPOOL_KEY: Final = "spool"
#: What the keeper must understand. It may be of an earlier version, and stays when the server changes.
NEEDED_PROTOCOL: Final = 1


class Recovery:
    """What the keeper held for us: nothing, if we are the first server."""

    def __init__(self, keeper_fd: int, config: ExecServerConfig, home: str = "") -> None:
        """`home` is the address that tells us from other servers of this machine."""
        link = KeeperLink(keeper_fd)
        self._held = link.take()
        if link.protocol < NEEDED_PROTOCOL:
            raise SandboxError(
                f"the keeper, pid {link.pid}, speaks version {link.protocol}, and this server needs"
                f" {NEEDED_PROTOCOL}: serve with an earlier version, or end everything by `holdfast stop`"
            )
        self._config = config
        found = self._held.pop(SPOOL_KEY, None)
        taken = None if found is None else (found.path, found.fds[0])
        #: What a keeper before ours left that was killed with its server: to be gone on with, and to be ended.
        self._remains: Remains | None = None
        self._doomed: list[Remains] = []
        if found is None:
            self._remains, self._doomed = find_remains(config.spool_directory, home, self._new_memory)
            if self._remains is not None:
                taken = (self._remains.path, self._remains.lock)
        self.is_first = taken is None
        spool = Spool(config.spool_directory, wanted_bytes=config.spool_minimum_bytes, taken=taken)
        if found is None:
            link.keep(SPOOL_KEY, [spool.lock], spool.path)
        path = f"{spool.path}/{LEDGER_NAME}"
        self.memory = self._new_memory()
        head = r.Head(r.LEDGER_VERSION, __version__, link.pid, boot_id(), config.orphaned_jobs, home)
        try:
            if os.path.exists(path):
                self.memory.replay(read_ledger(path))
            ledger = Ledger(path, self._compacted, head, min(RESERVE_BYTES, spool.size // 16))
            try:
                self.keeping = Keeping(link, ledger, spool, config)
                if self.is_first:
                    ledger.require_room()
            except BaseException:
                ledger.close()
                raise
        except (OSError, ResourceExhausted) as error:
            if self.is_first:
                spool.remove()
            why = error.strerror if isinstance(error, OSError) else error
            raise ResourceExhausted(f"the spool {spool.path} cannot be used: {why}") from None
        self.keeping.last_key = self.memory.last_key

    def _new_memory(self) -> Memory:
        config = self._config
        return Memory(max_chunks=config.retained_chunks_per_process, max_events=config.retained_terminal_events)

    def _compacted(self, records: Iterable[r.AnyRecord]) -> Iterable[r.AnyRecord]:
        memory = self._new_memory()
        memory.replay(records)
        return memory.records()

    async def end_doomed(self) -> None:
        """End what is left of keepers that were killed, where it was not to be kept."""
        for remains in self._doomed:
            self.keeping.lost = await remains.end()
            log.error("%s", self.keeping.lost)
        self._doomed.clear()

    def held(self, key: str) -> Held | None:
        """What the keeper holds under a key; from now on it is the caller's."""
        return self._held.pop(key, None)

    def release(self) -> None:
        """The keeper need not hold what nobody has asked for."""
        for key, held in self._held.items():
            for fd in held.fds:
                os.close(fd)
            self.keeping.link.drop(key)
            if held.path:
                _remove(held.path)  # the socket of an address that we do not listen on any more
        self._held.clear()

    def take_over(self, exec_: LocalExec) -> None:
        """Go on with every process."""
        remembered = self.memory.processes
        if self._remains is not None:
            self._detach(self._remains, exec_)
        self._find_unnamed([each for each in remembered.values() if not each.pid])
        self._remove_stale_files()
        exec_.terminals.remember_runs(self.memory.runs)
        self.keeping.link.lead(each.pid for each in remembered.values() if each.ended is None)
        self._recover_shells(exec_)
        closed: list[ManagedProcess] = []
        for each in remembered.values():
            if each.begun.internal:
                continue
            process = self._take_over(exec_, each, Notes(self.keeping, each.begun, adopted=True))
            if process.closed_at is not None:
                closed.append(process)
        for process in sorted(closed, key=lambda each: each.closed_at or 0.0):
            exec_.retention.keep(process)

    def _take_over(self, exec_: LocalExec, remembered: RememberedProcess, notes: Notes) -> ManagedProcess:
        begun = remembered.begun
        self._check_end(remembered, notes)
        # One that is noted as closed may have died before it let go of its streams: they are released.
        streams = self.held(notes.output_key) if remembered.closed is None else None
        if streams is None and remembered.closed is None and remembered.detached is None:
            log.error("process %r: its streams are lost", begun.spec.process_id)
        outputs = {} if streams is None else dict(zip(notes.logs, streams.fds, strict=False))
        stdin = self.held(notes.input_key)
        stdin_fd = outputs.get(2, -1) if begun.spec.tty else (-1 if stdin is None else stdin.fds[0])
        unused = self._unused(remembered)
        self._reopen(remembered, notes, unused)
        started = Started(remembered.pid, begun.mark, os.fsdecode(begun.cwd), outputs, stdin_fd, notes)
        process = self._go_on(exec_, remembered, started)
        if remembered.detached is not None:
            process.failure = remembered.detached.reason
        for signal_id in remembered.signals:
            process.remember_signal(signal_id)
        if remembered.resized is not None:
            process.size = TerminalSize(remembered.resized.rows, remembered.resized.cols)
        self._restore_input(remembered, process, self.held(notes.input_file) if stdin_fd >= 0 else None)
        if unused is not None:
            process.print_again(unused)
        if not outputs:
            process.streams_are_over()
        return process

    def _check_end(self, remembered: RememberedProcess, notes: Notes) -> None:
        if remembered.ended is None and not self._is_ours(remembered):
            if remembered.detached is None:  # else it was told
                process_id = remembered.begun.spec.process_id
                log.error("process %r, pid %d: how it ended is lost", process_id, remembered.pid)
            ended = r.Ended(remembered.begun.key, 255, None, time.time())
            notes.write(ended)
            remembered.replay(ended, 0)

    # --- shells ----------------------------------------------------------------------------------------------

    def _recover_shells(self, exec_: LocalExec) -> None:
        shells = self.memory.shells
        programs: dict[int, dict[int, Adopt]] = {}
        for each in self.memory.processes.values():
            if not each.begun.internal:
                continue
            shell_id, _, number = each.begun.spec.process_id.rpartition(":")
            # Keys are given in order: an id that is used again has the later programs.
            keys = (shell.key for shell in shells.shells.values() if shell.opening.spec.shell_id == shell_id)
            key = max((key for key in keys if key < each.begun.key), default=0)
            if key:
                programs.setdefault(key, {})[int(number)] = functools.partial(self._adopt_program, exec_, each)
            else:
                # Of one that is forgotten; its jobs may be wanted still, and what they print is not.
                _, streams = self._adopt_program(exec_, each, _ignore)
                for fd in streams.values():
                    os.close(fd)
        for shell in shells.shells.values():
            latest = 0 if shell.program is None else shell.program.number
            pipes = sorted(
                (key for key in self._held if key.startswith(f"{shell.key}.p")),
                key=lambda key: int(key.split(".")[1][1:]),
            )
            inputs = (shell.current, *shell.queue)
            exec_.shells.recover(
                ShellRemains(
                    shell,
                    shells.commands,
                    control=self.held(f"{shell.key}.c{latest}"),
                    pipes=[(key, self._held.pop(key)) for key in pipes],
                    programs=programs.get(shell.key, {}),
                    stdin=self.held(f"{shell.current}.stdin"),
                    saved=self.held(f"{shell.key}.saved"),
                    inputs={key: held for key in inputs if (held := self.held(f"{key}.input")) is not None},
                )
            )

    def _adopt_program(
        self, exec_: LocalExec, remembered: RememberedProcess, on_exit: Callable[[ManagedProcess], None]
    ) -> tuple[ManagedProcess, dict[int, int]]:
        """Go on with the program of a shell. What it prints is the shell's."""
        notes = Notes(self.keeping, remembered.begun, adopted=True)
        self._check_end(remembered, notes)
        begun = remembered.begun
        started = Started(remembered.pid, begun.mark, os.fsdecode(begun.cwd), {}, -1, notes)
        streams = self.held(notes.output_key)
        process = exec_.take_over(begun.spec, started, remembered.past, on_exit)
        process.streams_are_over()
        return process, {} if streams is None else dict(enumerate(streams.fds))

    # --- processes -------------------------------------------------------------------------------------------

    def _reopen(self, remembered: RememberedProcess, notes: Notes, unused: Unused | None) -> None:
        """Its journal and its logs, as they were."""
        notes.journal.restore(remembered.journal.state())
        for kind, each in notes.logs.items():
            assert isinstance(each, KeptLog)
            printed, end = remembered.printed_end(kind), None
            if kind == 2:
                # What is behind this was read and is printed again, or was held back and still is.
                taken = 0 if remembered.taken is None else remembered.taken.end
                end = max(printed, taken) if unused is None else unused.offset
            lost = remembered.lost.get(kind)
            each.reopen(printed, (0, 0) if lost is None else (lost.start, lost.end), end)

    def _go_on(self, exec_: LocalExec, remembered: RememberedProcess, started: Started) -> ManagedProcess:
        spec, known = remembered.begun.spec, remembered.terminal
        if known is None:
            return exec_.take_over(spec, started, remembered.past)
        terminal = exec_.terminals.recover(known.opening)
        terminal.timeline.skip(known.dropped.count, known.dropped.horizon)
        told: list[r.Taken | r.Happened] = [*remembered.times, *known.events]
        # In the order of their times, and a mark after the output that it came with.
        for past in sorted(told, key=lambda record: record.at):
            if isinstance(past, r.Taken):
                terminal.timeline.note_output(past.offset, past.at)
            else:
                terminal.timeline.replay(past)
        process = exec_.take_over(spec, started, remembered.past, terminal.ended)
        terminal.attach_again(process, known.memory)
        exec_.terminals.resume_runs(terminal)
        return process

    def _restore_input(self, remembered: RememberedProcess, process: ManagedProcess, file: Held | None) -> None:
        assert isinstance(process.input, KeptInput)
        remembered.input.restore(process.input, None if file is None else file.fds[0])
        if remembered.ended is not None:
            process.input.abandon()
        elif remembered.input.closed:
            process.input.close()

    def _unused(self, remembered: RememberedProcess) -> Unused | None:
        """What was read from its terminal and may be in the log already, but was not noted: it is printed again."""
        unused = self.keeping.reads.unused
        taken = 0 if remembered.taken is None else remembered.taken.number
        if unused is None or unused.key != remembered.begun.key or unused.number <= taken:
            return None
        return unused

    def _is_ours(self, remembered: RememberedProcess) -> bool:
        """Whether this is still the process that was started: its pid is free for others only once it was reaped,
        and until then the keeper is its parent. Of one whose keeper was killed the mark tells."""
        pid = remembered.pid
        entry = read_entry(pid) if pid else None
        if entry is not None and remembered.detached is not None:
            return not entry.dead and read_mark(pid) == remembered.begun.mark
        return entry is not None and entry.parent == self.keeping.link.pid

    def _detach(self, remains: Remains, exec_: LocalExec) -> None:
        """Note of every process that its streams were lost; logs, and what was told, are as they were."""
        keeper = remains.head.keeper
        exec_.inherit_cgroups(keeper)
        reason = f"its keeper, pid {keeper}, and its server were killed: what it printed after that is lost"
        running = lost = 0
        for key, each in self.memory.processes.items():
            if each.closed is not None or each.begun.internal:
                continue
            each.detached = r.Detached(key, f"{reason}, and how it ended" if each.ended is None else reason)
            self.keeping.ledger.write(each.detached)
            if each.ended is None:
                lives = self._is_ours(each)
                running, lost = running + lives, lost + (not lives)
                how = "runs on, without its streams" if lives else "is gone"
                log.error(
                    "process %r, pid %d, %s: its keeper was killed", each.begun.spec.process_id, each.pid, how
                )
        self.keeping.lost = (
            f"the keeper, pid {keeper}, was killed: {lost} processes are gone,"
            f" {running} run on without their streams"
        )
        log.error("%s", self.keeping.lost)

    def _find_unnamed(self, unnamed: Sequence[RememberedProcess]) -> None:
        """Pids of processes whose start was under way when the server died: their mark tells who they are."""
        if not unnamed:
            return
        by_mark = {each.begun.mark: each for each in unnamed}
        # Who inherits the children of a keeper that was killed is not known.
        keeper = self.keeping.link.pid if self._remains is None else None
        for entry in ProcessTable.read().entries.values():
            # The first of its kind leads its session; what it started does not.
            if keeper in (entry.parent, None) and entry.session == entry.pid:
                found = by_mark.pop(read_mark(entry.pid) or 0, None)
                if found is not None:
                    found.started = r.Started(found.begun.key, entry.pid, time.time())
                    self.keeping.ledger.write(found.started)
        for missing in by_mark.values():
            # It came to no start, and nobody was told of one.
            self.keeping.ledger.write(r.Forgotten(missing.begun.key))
            del self.memory.processes[missing.begun.key]

    def _remove_stale_files(self) -> None:
        """Files of what is not recovered: logs of what was being forgotten."""
        spool = self.keeping.spool.path
        # A compaction may be under way, in the ledger that this server has just opened.
        known = {LEDGER_NAME, f"{LEDGER_NAME}.new", READS_NAME}
        for key, each in self.memory.processes.items():
            known |= {f"{key}.{name}" for name in (0, 1, 2, "input")}
            terminal = each.terminal
            if terminal is not None and (terminal.memory is None or not terminal.memory.prompts):
                known.add(os.path.basename(terminal.opening.directory))  # its shell may still read them
        shells = self.memory.shells
        for key in (*shells.shells, *shells.commands):
            known |= {f"{key}.{name}" for name in (0, 1, "input")}
        known |= {os.path.basename(each.opening.directory) for each in shells.shells.values()}
        for name in os.listdir(spool):
            if name not in known:
                _remove(f"{spool}/{name}")


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _ignore(process: ManagedProcess) -> None:
    """Nobody waits for its end."""
