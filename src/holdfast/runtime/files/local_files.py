"""`FileApi` for the files of this machine, in threads, so that a slow disk never blocks the loop.

The number of threads is small: an operation that hangs on a dead network disk delays other files and nothing else.
Results of requests that change something are kept for a while, so that a repeated request is performed once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from holdfast.config import ExecServerConfig
from holdfast.errors import (
    HoldfastError,
    InvalidParams,
    LimitReached,
    ShuttingDown,
    file_error,
)
from holdfast.runtime.files.operations import FileOperations
from holdfast.runtime.files.user_helpers import UserHelpers
from holdfast.runtime.files.watches import Watches
from holdfast.runtime.process.environment import MAX_ID, resolve_cwd, resolve_user
from holdfast.types import (
    DIRECTORY_PAGE,
    FILE_PIECE_BYTES,
    WATCH_EVENTS,
    DirEntry,
    DirPage,
    FileAttributes,
    FileInfo,
    FilePiece,
    WatchRead,
)

T = TypeVar("T")

#: Reads and writes of the page cache keep no more than two threads busy; the others are for a slow disk.
THREADS: Final = 4
#: The largest piece, for clients with larger pieces than ours.
MAX_PIECE_BYTES: Final = 8 * 1024 * 1024
#: Results that are kept: far more than a client has requests without a reply when its connection breaks.
KEPT_REQUESTS: Final = 4_096

#: Texts in place of the system's.
_ADVICE: Final = {
    errno.ENOTEMPTY: "the directory is not empty; remove it with everything in it (recursive)",
    errno.EISDIR: "is a directory",
    errno.ENOSPC: "no room is left on the disk",
}
_NOTHING: Final = FileAttributes()


class LocalFiles:
    """`FileApi` on this machine. Create it inside a running event loop."""

    def __init__(self, config: ExecServerConfig) -> None:
        self._config = config
        self._operations = FileOperations(config.max_uploads)
        self._helpers = UserHelpers(config.max_uploads)
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._requests: dict[str, asyncio.Task[Any]] = {}
        #: The time of the last piece of each upload that is under way, the oldest first.
        self._uploads: dict[tuple[str, str, str | None], float] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._sweeping: set[asyncio.Task[None]] = set()
        self._watches = Watches(config, self._in_thread)
        self._closed = False

    # --- FileApi ---------------------------------------------------------------------------------------------

    async def read(
        self, path: str, *, offset: int = 0, size: int = FILE_PIECE_BYTES, user: str | None = None
    ) -> FilePiece:
        if offset < 0 or size < 0:
            raise InvalidParams(f"{path}: offset and size must not be negative")
        size = min(size, MAX_PIECE_BYTES)
        whole, eof, file_id, data = await self._do("read", path, user, offset=offset, size=size)
        return FilePiece(size=whole, eof=eof, file_id=file_id, data=data)

    async def write(
        self,
        path: str,
        data: bytes,
        *,
        attributes: FileAttributes | None = None,
        make_parents: bool = True,
        user: str | None = None,
    ) -> None:
        wanted = _checked(path, attributes)
        await self._do(
            "write",
            path,
            user,
            data=bytes(data),
            mode=wanted.mode,
            mtime_ns=wanted.mtime_ns,
            make_parents=make_parents,
            upload_id=secrets.token_hex(8),
        )

    async def write_at(self, path: str, data: bytes, *, offset: int, file_id: str) -> None:
        """Write into an existing file at an offset; `FileNotFound` if it is another file than `file_id`."""
        await self._do("write_at", path, None, offset=offset, data=bytes(data), file_id=file_id)

    async def write_piece(
        self,
        path: str,
        data: bytes,
        *,
        upload_id: str,
        offset: int,
        make_parents: bool = True,
        user: str | None = None,
    ) -> None:
        if offset < 0:
            raise InvalidParams(f"{path}: offset must not be negative")
        _check_id(upload_id)
        self._touch((path, upload_id, user))
        await self._do(
            "write_piece",
            path,
            user,
            data=bytes(data),
            upload_id=upload_id,
            offset=offset,
            make_parents=make_parents,
        )

    async def commit(
        self,
        path: str,
        *,
        upload_id: str,
        size: int,
        attributes: FileAttributes | None = None,
        user: str | None = None,
    ) -> FileInfo:
        wanted = _checked(path, attributes)
        _check_id(upload_id)
        self._uploads.pop((path, upload_id, user), None)
        found = await self._once(
            f"commit {upload_id}",
            lambda: self._do(
                "commit", path, user, upload_id=upload_id, size=size, mode=wanted.mode, mtime_ns=wanted.mtime_ns
            ),
        )
        return _info(found)

    async def abandon(self, path: str, *, upload_id: str, user: str | None = None) -> None:
        _check_id(upload_id)
        self._uploads.pop((path, upload_id, user), None)
        await self._do("abandon", path, user, upload_id=upload_id)

    async def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> FileInfo:
        return _info(await self._do("stat", path, user, follow=follow))

    async def list(
        self, path: str, *, after: str = "", limit: int = DIRECTORY_PAGE, user: str | None = None
    ) -> DirPage:
        limit = max(1, min(limit, DIRECTORY_PAGE))
        found, more = await self._do("list", path, user, after=after, limit=limit)
        entries = tuple(
            DirEntry(name=name, type=kind, size=size, mode=mode, mtime_ns=mtime_ns, uid=uid, gid=gid, target=target)
            for name, (kind, size, mode, mtime_ns, uid, gid, target) in found
        )
        return DirPage(entries, more)

    async def make_dir(
        self,
        path: str,
        *,
        parents: bool = True,
        exist_ok: bool = True,
        mode: int | None = None,
        user: str | None = None,
        owner: int | None = None,
        request_id: str | None = None,
    ) -> None:
        mode = _checked(path, FileAttributes(mode=mode)).mode
        if owner is not None and not 0 <= owner <= MAX_ID:
            raise InvalidParams(f"owner {owner}: not from 0 to {MAX_ID}")
        await self._once(
            request_id,
            lambda: self._do("make_dir", path, user, parents=parents, exist_ok=exist_ok, mode=mode, owner=owner),
        )

    async def remove(
        self,
        path: str,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
        user: str | None = None,
        request_id: str | None = None,
    ) -> None:
        await self._once(
            request_id, lambda: self._do("remove", path, user, recursive=recursive, missing_ok=missing_ok)
        )

    async def move(
        self, source: str, target: str, *, user: str | None = None, request_id: str | None = None
    ) -> None:
        _check_path(target)
        await self._once(request_id, lambda: self._do("move", source, user, "source", target=target))

    async def copy(
        self,
        source: str,
        target: str,
        *,
        recursive: bool = False,
        user: str | None = None,
        request_id: str | None = None,
    ) -> None:
        _check_path(target)
        await self._once(
            request_id, lambda: self._do("copy", source, user, "source", target=target, recursive=recursive)
        )

    async def make_link(self, path: str, target: str, *, user: str | None = None) -> None:
        _check_path(target)
        await self._do("make_link", path, user, target=target)

    async def set_attributes(self, path: str, attributes: FileAttributes, *, user: str | None = None) -> None:
        wanted = _checked(path, attributes)
        await self._do("set_attributes", path, user, mode=wanted.mode, mtime_ns=wanted.mtime_ns)

    async def real_path(self, path: str, *, strict: bool = True, user: str | None = None) -> str:
        found: str = await self._do("real_path", path, user, strict=strict)
        return found

    async def watch(self, path: str, *, watch_id: str, recursive: bool = False, user: str | None = None) -> None:
        _check_path(path)
        self._check_open()
        try:
            await self._watches.watch(path, watch_id, recursive=recursive, user=user)
        except HoldfastError:
            raise
        except OSError as error:
            raise translated(error, path) from None

    async def read_watch(
        self, watch_id: str, *, after: int = 0, limit: int = WATCH_EVENTS, wait: float = 0.0
    ) -> WatchRead:
        return await self._watches.read(watch_id, after, limit, wait)

    async def unwatch(self, watch_id: str) -> None:
        self._watches.unwatch(watch_id)

    # --- threads and repeated requests -----------------------------------------------------------------------

    async def _do(self, operation: str, path: str, user: str | None, named: str = "path", **more: Any) -> Any:
        """Perform an operation in a thread, as `user`; an `OSError` becomes an error that names the path."""
        _check_path(path)
        self._check_open()
        arguments = {named: path, **more}
        try:
            return await self._in_thread(partial(self._perform, operation, arguments, user))
        except HoldfastError:
            raise
        except OSError as error:
            raise translated(error, path) from None

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDown("the server is shutting down: it performs no file operations")

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool(), work)

    def _perform(self, operation: str, arguments: dict[str, Any], user: str | None) -> Any:
        account = None if user is None else resolve_user(user)
        if account is None or (account.uid, account.gid) == (os.geteuid(), os.getegid()):
            return self._operations.perform(operation, arguments)
        # The helper has a working directory of its own; the target of a link stays as it is.
        for name in ("path", "source") if operation == "make_link" else ("path", "source", "target"):
            if name in arguments and not os.path.isabs(arguments[name]):
                arguments[name] = os.path.join(resolve_cwd(None), arguments[name])
        return self._helpers.perform(account, operation, arguments)

    def _pool(self) -> concurrent.futures.ThreadPoolExecutor:
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "holdfast-files")
        return self._threads

    async def _once(self, request_id: str | None, work: Callable[[], Any]) -> Any:
        """Perform a request once; the same id again returns the first result."""
        if request_id is None:
            return await work()
        known = self._requests.get(request_id)
        if known is None:
            known = self._requests[request_id] = asyncio.ensure_future(work())
            known.add_done_callback(_take_error)
            while len(self._requests) > KEPT_REQUESTS:
                del self._requests[next(iter(self._requests))]
        # The request is performed even if its caller is cancelled; a repeated request gets the result.
        return await asyncio.shield(known)

    # --- abandoned uploads -----------------------------------------------------------------------------------

    def _touch(self, upload: tuple[str, str, str | None]) -> None:
        self._uploads.pop(upload, None)
        self._uploads[upload] = time.monotonic()
        if self._sweep is None:
            self._wait_for_sweep(self._config.abandoned_upload_seconds)

    def _wait_for_sweep(self, seconds: float) -> None:
        self._sweep = asyncio.get_running_loop().call_later(seconds, self._begin_sweep)

    def _begin_sweep(self) -> None:
        self._sweep = None
        task = asyncio.get_running_loop().create_task(self._remove_abandoned())
        self._sweeping.add(task)
        task.add_done_callback(self._sweeping.discard)

    async def _remove_abandoned(self) -> None:
        limit = self._config.abandoned_upload_seconds
        for (path, upload_id, user), last in list(self._uploads.items()):
            left = last + limit - time.monotonic()
            if left > 0:
                self._wait_for_sweep(left)
                return
            try:
                await self.abandon(path, upload_id=upload_id, user=user)
            except HoldfastError:
                continue  # its directory was removed, or permission is missing

    def drop_threads(self) -> None:
        """Let the threads end once they are idle."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def aclose(self) -> None:
        """Remove unfinished uploads, end the helpers and the threads."""
        if self._closed:
            return
        self._watches.close()
        for path, upload_id, user in list(self._uploads):
            try:
                await self.abandon(path, upload_id=upload_id, user=user)
            except HoldfastError:
                continue
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        if self._threads is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._helpers.close)
            self.drop_threads()


def translated(error: OSError, path: str) -> HoldfastError:
    """The `HoldfastError` for an `OSError`. Its text names the requested path, and the file if that differs."""
    number = error.errno or 0
    if number == errno.EUSERS:
        return LimitReached(f"{path}: too many files are under way already: that is max_uploads")
    text = _ADVICE.get(number) or _lower(error.strerror or str(error))
    named = error.filename
    if isinstance(named, bytes):
        named = os.fsdecode(named)
    shown = f"{path}: {text}" if named in (None, path) else f"{path}: {named}: {text}"
    return file_error(number, shown)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _info(found: tuple[Any, ...]) -> FileInfo:
    kind, size, mode, mtime_ns, uid, gid, target = found
    return FileInfo(type=kind, size=size, mode=mode, mtime_ns=mtime_ns, uid=uid, gid=gid, target=target)


def _check_path(path: str) -> None:
    if not path:
        raise InvalidParams("path is empty")
    if "\0" in path:
        raise InvalidParams(f"path {path!r} holds a NUL character")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise InvalidParams(f"path {path!r} holds half of a surrogate pair, which is no character") from None


def _checked(path: str, attributes: FileAttributes | None) -> FileAttributes:
    wanted = attributes or _NOTHING
    if wanted.mode is not None and not 0 <= wanted.mode <= 0o7777:
        raise InvalidParams(f"{path}: mode {wanted.mode:o}: must be 0 to 7777 (octal)")
    if wanted.mtime_ns is not None and abs(wanted.mtime_ns) >= 2**62:
        raise InvalidParams(f"{path}: mtime_ns {wanted.mtime_ns}: out of range")
    return wanted


def _check_id(upload_id: str) -> None:
    """Check an upload id, which becomes a part of a file name."""
    if not (upload_id.isascii() and upload_id.isalnum() and len(upload_id) <= 64):
        raise InvalidParams(f"uploadId {upload_id!r}: must be 1 to 64 letters and digits")


def _take_error(task: asyncio.Task[Any]) -> None:
    """Take the exception of a request: its caller may be gone."""
    if not task.cancelled():
        task.exception()
