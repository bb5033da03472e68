"""The spool of a keeper and a server that were both killed: its lock is free, and its processes may run on.

A server with a keeper searches for such spools before it makes one of its own. Processes that were to end
(`orphaned_jobs`) are found by mark and by cgroup, and killed; a spool of the server's own address is resumed,
although the streams are gone. Touches the spools of this user, /proc and the cgroups.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import SandboxError
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.durability import LEDGER_NAME
from holdfast.runtime.durability.ledger import boot_id, read_ledger
from holdfast.runtime.output.output_log import SPOOL_PREFIX
from holdfast.runtime.output.spool import candidates
from holdfast.runtime.tree.cgroup import former_cgroups, remove_former
from holdfast.runtime.tree.process_table import Entry, ProcessTable, read_mark
from holdfast.runtime.tree.process_tree import end_all

if TYPE_CHECKING:
    from holdfast.runtime.durability.replay import Replay

log = logging.getLogger(__name__)


class AbandonedSpool(NamedTuple):
    """A spool without a server; this server owns it while it holds the lock."""

    path: str
    lock: int
    head: r.LedgerHead
    replay: Replay

    def running(self) -> dict[int, Entry]:
        """Return the living processes of the spool, found by mark and by cgroup."""
        marks = {each.begun.mark for each in self.replay.processes.values()}
        table = ProcessTable.read()
        inside = {pid for cgroup in former_cgroups(self.head.keeper) for pid in cgroup.pids()}
        return table.descendants(pid for pid in table.entries if pid in inside or read_mark(pid) in marks)

    async def end(self) -> str:
        """Kill the processes that run on and remove the spool; returns a message about the loss."""

        async def find() -> dict[int, Entry]:
            return self.running()

        lost = 0
        for each in self.replay.processes.values():
            if each.ended is None and not each.begun.internal:
                lost += 1
                log.error(
                    "process %r, pid %d, is lost: its keeper, pid %d, and its server were killed",
                    each.begun.spec.process_id,
                    each.pid,
                    self.head.keeper,
                )
        try:
            await end_all(find, 0.0)
        except SandboxError as error:
            log.error("%s", error)
        remove_former(self.head.keeper)
        self.remove()
        return f"the keeper, pid {self.head.keeper}, was killed: {lost} processes were ended"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def find_abandoned(
    directory: str, home: str, new_replay: Callable[[], Replay]
) -> tuple[AbandonedSpool | None, list[AbandonedSpool]]:
    """Return the spool to resume, and the spools with processes to end, of a directory or of all `candidates`."""
    resumed: AbandonedSpool | None = None
    doomed: list[AbandonedSpool] = []
    directories = {directory} if directory else set(candidates())
    for path in [path for each in directories for path in _spools(each)]:
        spool = _open(path, new_replay())
        if spool is None:
            continue
        head = spool.head
        if head.boot != boot_id():
            log.warning("the spool %s is of an earlier boot, so none of its processes runs: removed", spool.path)
            spool.remove()
        elif head.orphaned_jobs == "kill":
            doomed.append(spool)
        elif head.home == home and resumed is None:
            resumed = spool
        elif spool.running():
            os.close(spool.lock)  # of another server, which may resume it
        else:
            spool.remove()
    return resumed, doomed


def _spools(directory: str) -> Iterator[str]:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        path = f"{directory}/{name}"
        if name.startswith(SPOOL_PREFIX) and os.path.exists(f"{path}/{LEDGER_NAME}"):
            yield path


def _open(path: str, replay: Replay) -> AbandonedSpool | None:
    """Lock the spool and read its ledger; None if its server or keeper lives, or if that cannot be determined."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # of another user, or removed
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            head, records = read_ledger(f"{path}/{LEDGER_NAME}", replay.extension.KINDS)
            if head is not None:
                replay.apply(records)
                return AbandonedSpool(path, lock, head, replay)
    except BlockingIOError:
        pass  # the server or the keeper lives
    except (OSError, SandboxError) as error:
        log.warning("cannot read the spool %s of a killed server; it is not removed: %s", path, error)
    os.close(lock)
    return None
