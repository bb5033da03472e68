"""One watched directory: the changes below it as numbered events, by inotify(7). Touches its inotify descriptor.

inotify watches single directories, so a recursive watch adds every new subdirectory and then lists it, because
files may have been created there before. One task handles the records in their order and pauses while the events
are unread; the kernel then queues records until its own limit, and reports an overflow.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol, TypeVar

from holdfast.errors import LimitReached
from holdfast.runtime import libc
from holdfast.runtime.files import inotify
from holdfast.types import WatchEvent, WatchKind, WatchRead

log = logging.getLogger(__name__)

T = TypeVar("T")

_PLAIN: Final[tuple[tuple[int, WatchKind], ...]] = (
    (inotify.MODIFY, "modified"),
    (inotify.CLOSE_WRITE, "written"),
    (inotify.ATTRIB, "attributes"),
)

#: Unread events, about 200 bytes each. More wait in the kernel, which queues 16,384 records by default.
MAX_UNREAD: Final = 8_192
#: The kernel queues both records of a rename one after the other, but not at once.
PAIR_SECONDS: Final = 0.05
#: Records between them that are searched: those of other processors.
PAIR_RECORDS: Final = 64
#: Directories that are added and listed in one turn of a thread.
DIRECTORIES_A_TURN: Final = 64
#: Errors of a directory that was removed or replaced before it was watched; its removal is a record of its own.
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class InThread(Protocol):
    """Runs a function in a thread, because a slow disk must not block the loop."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class DirectoryWatch:
    """A watched directory. `room` returns the number of directories that it may add."""

    def __init__(
        self,
        root: str,
        *,
        recursive: bool,
        run: InThread,
        room: Callable[[], int],
        limit: int,
    ) -> None:
        self._root = root
        self._recursive = recursive
        self._run = run
        self._room = room
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._identity = (0, 0)
        #: The name of each watched directory, by the number of its watch.
        self._names: dict[int, str] = {}
        self._parent: int | None = None
        self._records: deque[inotify.InotifyRecord] = deque()
        #: Entries that the listing of a new directory has reported; their own records may still be queued.
        self._listed: set[tuple[int, str]] = set()
        self._events: deque[WatchEvent] = deque()
        self._seq = 0
        #: The last event that a reader got, which may read it again.
        self._sent = 0
        self._ended = False
        self._changed = asyncio.Event()
        self._unread = asyncio.Event()
        self._unread.set()
        self._following: asyncio.Task[None] | None = None
        self._in_thread: asyncio.Future[None] | None = None

    @property
    def directories(self) -> int:
        return len(self._names)

    # --- for the registry ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Watch the directory, and all below it if the watch is recursive. Raises `OSError` or `LimitReached`."""
        try:
            for lost in await self._begin():
                await self._emit("overflow", lost.name, directory=True, reason=_text(lost.error))
        except BaseException:
            self.close()
            raise
        self._following = self._loop.create_task(self._follow())

    async def read(self, after: int, limit: int, wait: float) -> WatchRead:
        """Events after the number `after`; those up to it are dropped."""
        while self._events and self._events[0].seq <= after:
            self._events.popleft()
        self._unread.set()
        if not self._events and not self._ended and wait > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                pass
        events = tuple(event for _, event in zip(range(max(limit, 0)), self._events, strict=False))
        if events:
            self._sent = max(self._sent, events[-1].seq)
        return WatchRead(events, self._ended and len(events) == len(self._events))

    def close(self) -> None:
        """Stop. A reader that waits gets no more events."""
        if self._following is not None:
            self._following.cancel()
        self._end()

    # --- events --------------------------------------------------------------------------------------------------

    async def _emit(
        self,
        kind: WatchKind,
        name: str,
        old_name: str | None = None,
        *,
        directory: bool = False,
        reason: str = "",
    ) -> None:
        last = self._events[-1] if self._events and self._seq > self._sent else None
        if kind == "modified" and last is not None and (last.kind, last.name) == (kind, name):
            return
        while len(self._events) >= MAX_UNREAD and kind not in ("overflow", "root_removed"):
            self._unread.clear()
            await self._unread.wait()
        self._seq += 1
        self._events.append(WatchEvent(self._seq, kind, name, old_name, directory, reason))
        self._changed.set()

    def _end(self) -> None:
        self._ended = True
        self._changed.set()
        self._close_descriptor()
        self._names.clear()

    def _close_descriptor(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        self._loop.remove_reader(fd)
        if self._in_thread is not None and not self._in_thread.done():
            # The thread uses the number, which the next descriptor of this process would get.
            self._in_thread.add_done_callback(lambda _: os.close(fd))
        else:
            os.close(fd)

    # --- records -------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            while not self._ended:
                if not self._records:
                    await self._read_records(None)
                while self._records and not self._ended:
                    await self._handle(self._records.popleft())
        except Exception as error:
            log.exception("%s: the watch has failed", self._root)
            await self._emit("overflow", "", directory=True, reason=f"the watch has failed: {error}")
            self._end()

    async def _read_records(self, deadline: float | None) -> bool:
        """Read the queued records, or wait for some until the loop's time is `deadline`; whether there are any."""
        while True:
            try:
                data = os.read(self._fd, inotify.READ_BYTES)
            except BlockingIOError:
                if not self._records:
                    # Every record of an entry that a listing has found is handled.
                    self._listed.clear()
                if not await self._wait_readable(deadline):
                    return False
                continue
            self._records += inotify.parse(data, self._loop.time())
            return True

    async def _wait_readable(self, deadline: float | None) -> bool:
        readable, fd = asyncio.Event(), self._fd
        self._loop.add_reader(fd, readable.set)
        try:
            async with asyncio.timeout_at(deadline):
                await readable.wait()
        except TimeoutError:
            return False
        finally:
            if self._fd == fd:
                self._loop.remove_reader(fd)
        return True

    async def _handle(self, record: inotify.InotifyRecord) -> None:
        watch, mask = record.watch, record.mask
        if mask & inotify.Q_OVERFLOW:
            await self._begin_again()
            return
        if watch == self._parent:
            if record.name == os.path.basename(self._root) and not await self._run(self._is_in_place):
                await self._emit("root_removed", "", directory=True)
                self._end()
            return
        above = self._names.get(watch)
        if above is None:
            return
        if not record.name:
            if mask & inotify.IGNORED:
                del self._names[watch]
            if above == "" and mask & inotify.ENDS_ROOT:
                await self._emit("root_removed", "", directory=True)
                self._end()
            return
        name, directory = _join(above, record.name), bool(mask & inotify.ISDIR)
        entry = (watch, record.name)
        if mask & (inotify.CREATE | inotify.MOVED_TO):
            if entry in self._listed:
                self._listed.discard(entry)
                return
            await self._emit("created", name, directory=directory)
            if directory and self._recursive:
                await self._add_new(name)
        elif mask & inotify.DELETE:
            self._listed.discard(entry)
            self._drop(name)
            await self._emit("removed", name, directory=directory)
        elif mask & inotify.MOVED_FROM:
            self._listed.discard(entry)
            await self._moved(record, name, directory=directory)
        else:
            for bit, kind in _PLAIN:
                if mask & bit:
                    await self._emit(kind, name, directory=directory)

    async def _moved(self, record: inotify.InotifyRecord, name: str, *, directory: bool) -> None:
        arrived = await self._arrived(record)
        above = None if arrived is None else self._names.get(arrived.watch)
        if arrived is None or above is None:
            # To a place that is not watched.
            self._drop(name)
            await self._emit("removed", name, directory=directory)
            return
        new = _join(above, arrived.name)
        self._listed.discard((arrived.watch, arrived.name))
        self._drop(new)
        self._names = {watch: _renamed(each, name, new) for watch, each in self._names.items()}
        await self._emit("moved", new, name, directory=directory)
        if directory and self._recursive and new not in self._names.values():
            # It was moved before it could be added.
            await self._add_new(new)

    async def _arrived(self, left: inotify.InotifyRecord) -> inotify.InotifyRecord | None:
        """The second record of a rename; None if the file was moved to a directory that is not watched."""
        while True:
            for at, record in enumerate(self._records):
                if at >= PAIR_RECORDS:
                    return None
                if record.mask & inotify.MOVED_TO and record.cookie == left.cookie:
                    del self._records[at]
                    return record
            if not await self._read_records(left.at + PAIR_SECONDS):
                return None

    def _drop(self, name: str) -> None:
        """Stop watching a directory that was removed or moved away, and all below it."""
        for watch in [watch for watch, each in self._names.items() if each == name or each.startswith(f"{name}/")]:
            del self._names[watch]
            try:
                libc.remove_inotify_watch(self._fd, watch)
            except OSError:
                continue  # the kernel has removed it with its directory

    # --- adding directories --------------------------------------------------------------------------------------

    async def _begin(self) -> list[inotify.Added]:
        """Watch the whole tree with a new descriptor; returns the directories that cannot be watched."""
        self._fd = libc.open_inotify()
        fd, root = self._fd, self._root

        def add_root() -> tuple[inotify.Added, int | None, tuple[int, int]]:
            added = inotify.add(fd, root, "", inotify.ROOT_MASK)
            if added.error is not None:
                raise added.error
            info = os.stat(root)
            above = os.path.dirname(root)
            try:
                parent = libc.add_inotify_watch(fd, above, inotify.PARENT_MASK) if above != root else None
            except OSError:
                parent = None  # without permission for the parent, the directory itself reports most removals
            return added, parent, (info.st_dev, info.st_ino)

        added, self._parent, self._identity = await self._threaded(add_root)
        return await self._add_below([added], announce=False, root=True)

    async def _begin_again(self) -> None:
        """Start over, because records are lost: new directories among them, and renamed ones."""
        self._close_descriptor()
        self._records.clear()
        self._listed.clear()
        self._names.clear()
        try:
            lost = await self._begin()
        except (OSError, LimitReached) as error:
            await self._emit("overflow", "", directory=True, reason=f"cannot watch again: {error}")
            await self._emit("root_removed", "", directory=True)
            self._end()
            return
        await self._emit("overflow", "", directory=True, reason="the kernel's queue of events was full")
        for each in lost:
            await self._emit("overflow", each.name, directory=True, reason=_text(each.error))

    async def _add_new(self, name: str) -> None:
        """Add a directory that appeared, and report all that is in it already."""
        fd, path = self._fd, os.path.join(self._root, name)
        if self._room() <= 0:
            await self._emit("overflow", name, directory=True, reason=self._limit_text())
            return
        added = await self._threaded(lambda: inotify.add(fd, path, name, inotify.MASK))
        for lost in await self._add_below([added], announce=True):
            await self._emit("overflow", lost.name, directory=True, reason=_text(lost.error))

    async def _add_below(
        self, found: list[inotify.Added], *, announce: bool, root: bool = False
    ) -> list[inotify.Added]:
        """Register added directories and add those below; returns the ones that cannot be watched."""
        lost: list[inotify.Added] = []
        while found:
            pending: list[str] = []
            for each in found:
                if each.watch is None:
                    assert each.error is not None
                    if each.error.errno not in _GONE:
                        lost.append(each)
                    continue
                if each.watch in self._names:
                    continue  # a directory that is mounted twice, or a rename that is still queued
                self._names[each.watch] = each.name
                for entry, directory in each.entries:
                    name = _join(each.name, entry)
                    if announce:
                        self._listed.add((each.watch, entry))
                        await self._emit("created", name, directory=directory)
                    if directory and self._recursive:
                        pending.append(name)
            found = []
            for start in range(0, len(pending), DIRECTORIES_A_TURN):
                turn = pending[start : start + DIRECTORIES_A_TURN]
                room = self._room() - len(found)
                if len(turn) > room:
                    if root:
                        raise LimitReached(f"{self._root}: {self._limit_text()}")
                    full = OSError(0, self._limit_text())
                    lost += [inotify.Added(name, None, error=full) for name in turn[max(room, 0) :]]
                    turn = turn[: max(room, 0)]
                found += await self._threaded(partial(self._add_all, self._fd, turn))
        return lost

    def _add_all(self, fd: int, names: list[str]) -> list[inotify.Added]:
        return [inotify.add(fd, os.path.join(self._root, name), name, inotify.MASK) for name in names]

    def _limit_text(self) -> str:
        return f"more than {self._limit} directories: max_watched_directories is the limit of all watches"

    def _is_in_place(self) -> bool:
        try:
            info = os.stat(self._root, follow_symlinks=False)
        except OSError:
            return False
        return (info.st_dev, info.st_ino) == self._identity

    async def _threaded(self, work: Callable[[], T]) -> T:
        self._in_thread = done = self._loop.create_future()
        running = asyncio.ensure_future(self._run(work))
        running.add_done_callback(lambda _: done.set_result(None))
        return await asyncio.shield(running)


def _join(above: str, name: str) -> str:
    return f"{above}/{name}" if above else name


def _renamed(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name == old or name.startswith(f"{old}/") else name


def _text(error: OSError | None) -> str:
    return "" if error is None else f"not watched: {error.strerror or error}"
