"""The watched directories of a server, by the id that the caller chose. Touches the event loop.

A watch belongs to no connection, because a client without a channel has a new one for each call. A watch that is
not read for `abandoned_watch_seconds` is removed.
"""

from __future__ import annotations

import asyncio
import errno
import os

from holdfast.config import ExecServerConfig
from holdfast.errors import InvalidParams, LimitReached, NotADirectory, UnknownWatch
from holdfast.runtime.files.directory_watch import DirectoryWatch, InThread
from holdfast.runtime.process.environment import resolve_user
from holdfast.types import WATCH_EVENTS, WatchRead


class _Watch:
    """A watch that starts or has started, and its readers."""

    def __init__(self, watch: DirectoryWatch, starting: asyncio.Task[None], now: float) -> None:
        self.watch = watch
        self.starting = starting
        self.readers = 0
        self.read_at = now


class Watches:
    """All watches; `run` runs a function in a thread."""

    def __init__(self, config: ExecServerConfig, run: InThread) -> None:
        self._config = config
        self._run = run
        self._watches: dict[str, _Watch] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def watch(self, path: str, watch_id: str, *, recursive: bool, user: str | None) -> None:
        """Begin a watch; raises `OSError` for the path."""
        if not 0 < len(watch_id) <= 64:
            raise InvalidParams(f"watchId {watch_id!r}: must be 1 to 64 characters")
        known = self._watches.get(watch_id)
        if known is None:
            root = await self._run(lambda: _checked(path, user))
            known = self._watches.get(watch_id) or self._begin(root, watch_id, recursive=recursive)
        # The watch starts even if its caller is cancelled: the caller may repeat the request.
        await asyncio.shield(known.starting)

    def _begin(self, root: str, watch_id: str, *, recursive: bool) -> _Watch:
        config, loop = self._config, asyncio.get_running_loop()
        if len(self._watches) >= config.max_watches:
            raise LimitReached(f"{root}: {len(self._watches)} directories are watched already: that is max_watches")
        limit = config.max_watched_directories
        watch = DirectoryWatch(root, recursive=recursive, run=self._run, room=self._room, limit=limit)
        made = _Watch(watch, loop.create_task(self._start(watch, watch_id, root)), loop.time())
        self._watches[watch_id] = made
        if self._sweep is None:
            self._sweep = loop.call_later(config.abandoned_watch_seconds, self._remove_abandoned)
        return made

    async def _start(self, watch: DirectoryWatch, watch_id: str, root: str) -> None:
        try:
            await watch.start()
        except BaseException as error:
            self._watches.pop(watch_id, None)
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                text = "no inotify instance is left (fs.inotify.max_user_instances, or open files)"
                raise LimitReached(f"{root}: {text}") from None
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise LimitReached(f"{root}: {error.strerror}") from None
            raise

    def _room(self) -> int:
        used = sum(each.watch.directories for each in self._watches.values())
        return self._config.max_watched_directories - used

    async def read(self, watch_id: str, after: int, limit: int, wait: float) -> WatchRead:
        known = self._watches.get(watch_id)
        if known is None:
            raise UnknownWatch(f"no directory is watched as {watch_id!r}: watch it again")
        known.readers += 1
        try:
            return await known.watch.read(after, min(limit, WATCH_EVENTS), wait)
        finally:
            known.readers -= 1
            known.read_at = asyncio.get_running_loop().time()

    def unwatch(self, watch_id: str) -> None:
        known = self._watches.pop(watch_id, None)
        if known is not None:
            known.starting.cancel()
            known.watch.close()

    def _remove_abandoned(self) -> None:
        self._sweep = None
        loop, limit = asyncio.get_running_loop(), self._config.abandoned_watch_seconds
        for watch_id, known in list(self._watches.items()):
            if not known.readers and loop.time() - known.read_at >= limit:
                self.unwatch(watch_id)
        if self._watches:
            # Early enough: an abandoned watch lasts at most a quarter longer.
            self._sweep = loop.call_later(limit / 4, self._remove_abandoned)

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for watch_id in list(self._watches):
            self.unwatch(watch_id)


def _checked(path: str, user: str | None) -> str:
    """The directory without links; refuses another user than the server's own."""
    if user is not None:
        account = resolve_user(user)
        if (account.uid, account.gid) != (os.geteuid(), os.getegid()):
            raise InvalidParams(f"watch: user {user!r}: directories are watched only with the server's own rights")
    root = os.path.realpath(path, strict=True)
    if not os.path.isdir(root):
        raise NotADirectory(f"{path}: not a directory", errno=errno.ENOTDIR)
    return root
