"""Resumes the work of a dead server from its ledger, its spool, and the descriptors in the keeper.

`Recovery` drives it: first the ledger is replayed, in memory alone; then `process_recovery` and `shell_recovery`
resume each process and each shell. A resumed process differs from a new one only in its parent, the keeper.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from holdfast import __version__
from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.abandoned_spool import AbandonedSpool, find_abandoned
from holdfast.runtime.durability.durability import LEDGER_NAME, READS_NAME, KeeperDurability
from holdfast.runtime.durability.keeper_link import HeldDescriptors, KeeperLink
from holdfast.runtime.durability.ledger import RESERVE_BYTES, Ledger, boot_id, read_ledger
from holdfast.runtime.durability.process_recovery import ProcessRecovery
from holdfast.runtime.durability.replay import NoExtension, Replay, ReplayExtension
from holdfast.runtime.durability.shell_recovery import ShellRecovery
from holdfast.runtime.output.output_log import Spool

if TYPE_CHECKING:
    from holdfast.config import ExecServerConfig
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
        extension: type[ReplayExtension] = NoExtension,
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
                self.durability = KeeperDurability(link, self.ledger, spool, config)
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
        processes = ProcessRecovery(self.durability, self.replay, self.take, exec_)
        if self._abandoned is not None:
            processes.detach(self._abandoned.head.keeper)
        processes.find_unnamed(any_parent=self._abandoned is not None)
        self._remove_stale_files()
        exec_.terminals.remember_runs(self.replay.runs)
        self.durability.link.lead(each.pid for each in replayed.values() if each.ended is None)
        ShellRecovery(self.replay, self.held, processes.adopt_program).resume(exec_.shells)
        closed: list[ManagedProcess] = []
        for each in replayed.values():
            if not each.begun.internal and (process := processes.resume(each)).closed_at is not None:
                closed.append(process)
        for process in sorted(closed, key=lambda each: each.closed_at or 0.0):
            exec_.keep_ended(process)

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


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
