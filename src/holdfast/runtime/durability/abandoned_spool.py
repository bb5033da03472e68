"""What a keeper and its server left that were both killed: a spool whose lock is free, and processes that run on.

A kept server looks for it before it makes a spool of its own. What was to be ended (`orphaned_jobs` of those who
died) is found by mark and by cgroup, and killed; what was to be kept at our address we go on with, although its
streams are gone. Touches the spools of our user, /proc and the cgroups.
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
from holdfast.runtime.durability.ledger import boot_id, read_headed
from holdfast.runtime.durability.process_log import LEDGER_NAME
from holdfast.runtime.output.output_log import SPOOL_PREFIX
from holdfast.runtime.output.spool import candidates
from holdfast.runtime.tree.cgroup import former_cgroups, remove_former
from holdfast.runtime.tree.process_table import Entry, ProcessTable, read_mark
from holdfast.runtime.tree.process_tree import end_all

if TYPE_CHECKING:
    from holdfast.runtime.durability.replay import Memory

log = logging.getLogger(__name__)


class Remains(NamedTuple):
    """A spool of the dead, which is ours as long as we hold its lock."""

    path: str
    lock: int
    head: r.Head
    memory: Memory

    def running(self) -> dict[int, Entry]:
        """The living processes that were started there, by their marks, and what is in their cgroups."""
        marks = {each.begun.mark for each in self.memory.processes.values()}
        table = ProcessTable.read()
        inside = {pid for cgroup in former_cgroups(self.head.keeper) for pid in cgroup.pids()}
        return table.descendants(pid for pid in table.entries if pid in inside or read_mark(pid) in marks)

    async def end(self) -> str:
        """Kill what runs on and remove the spool; returns what was lost, for people."""

        async def find() -> dict[int, Entry]:
            return self.running()

        lost = 0
        for each in self.memory.processes.values():
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


class Found(NamedTuple):
    """`ours` is to be gone on with, `doomed` to be ended."""

    ours: Remains | None
    doomed: list[Remains]


def find_remains(directory: str, home: str, new_memory: Callable[[], Memory]) -> Found:
    """Look through the spools at this place; an empty one stands for the places that a server may choose."""
    ours: Remains | None = None
    doomed: list[Remains] = []
    places = {directory} if directory else set(candidates())
    for path in [path for place in places for path in _spools(place)]:
        remains = _open(path, new_memory())
        if remains is None:
            continue
        head = remains.head
        if head.boot != boot_id():
            log.warning("the spool %s is of an earlier boot: removed, for nothing of it can run", remains.path)
            remains.remove()
        elif head.orphaned_jobs == "kill":
            doomed.append(remains)
        elif head.home == home and ours is None:
            ours = remains
        elif remains.running():
            os.close(remains.lock)  # of another server, which may come back for them
        else:
            remains.remove()
    return Found(ours, doomed)


def _spools(place: str) -> Iterator[str]:
    try:
        names = os.listdir(place)
    except OSError:
        return
    for name in names:
        path = f"{place}/{name}"
        if name.startswith(SPOOL_PREFIX) and os.path.exists(f"{path}/{LEDGER_NAME}"):
            yield path


def _open(path: str, memory: Memory) -> Remains | None:
    """Take its lock and read its ledger; None if somebody lives there, or we cannot tell."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # another user's, or gone by now
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            head, records = read_headed(f"{path}/{LEDGER_NAME}")
            if head is not None:
                memory.replay(records)
                return Remains(path, lock, head, memory)
    except BlockingIOError:
        pass  # its server or its keeper lives
    except (OSError, SandboxError) as error:
        log.warning("the spool %s of a killed server is left as it is: %s", path, error)
    os.close(lock)
    return None
