"""The `fs/*` methods, which the Codex CLI calls to work on files; translates to the runtime's files.

A request may carry a policy (`sandbox`). One that restricts files is enforced by a jail, which is made for the
request (`runtime.files.confined_files`); a request that a jail cannot serve is refused, because a restriction that
is not enforced must not look enforced.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from holdfast.errors import (
    FileError,
    FileExists,
    FileNotFound,
    Forbidden,
    HoldfastError,
    InvalidParams,
    LimitReached,
    NotADirectory,
)
from holdfast.runtime.confine.rights import confinement_for
from holdfast.server.sandbox_policy import read_policy
from holdfast.types import DirEntry
from holdfast.wire import file_messages as f
from holdfast.wire.paths import decode_path, encode_path, encode_uri

if TYPE_CHECKING:
    from holdfast.exec_api import FileApi
    from holdfast.server.connection import ServerConnection
    from holdfast.server.served_exec import ServedExec

#: Files that one connection may hold open by `fs/open`. A handle is a path and a file identity, not a descriptor.
MAX_HANDLES: Final = 1_024
#: Of `fs/walk` and `fs/writeBlock`, as the Codex client knows them.
MAX_WALK_DEPTH: Final = 64
MAX_WALK_DIRECTORIES: Final = 10_000
MAX_WALK_ENTRIES: Final = 50_000
MAX_BLOCK_BYTES: Final = 1024 * 1024


class _Handle(NamedTuple):
    path: str
    #: Of the file that was opened to read.
    file_id: str
    writable: bool = False


class FsMethods:
    """The handlers, shared by all connections."""

    def __init__(self, exec_: ServedExec) -> None:
        self._exec = exec_
        self._limit = exec_.config.max_file_read_bytes
        #: Open handles of each connection.
        self._handles: weakref.WeakKeyDictionary[ServerConnection, dict[str, _Handle]] = weakref.WeakKeyDictionary()

    @asynccontextmanager
    async def _files(self, sandbox: Any) -> AsyncIterator[FileApi]:
        """The files with the rights of a policy."""
        policy = read_policy(sandbox, os.environ.get("TMPDIR"))
        if policy.rights is None:
            yield self._exec.files
            return
        confinement = confinement_for(policy.rights, network=False)
        assert confinement is not None
        async with self._exec.confined_files(confinement) as files:
            yield files

    async def read_file(self, connection: ServerConnection, params: f.FsPathParams) -> f.FsReadFileResult:
        path = _path(params.path, params.follow_symlinks)
        content = bytearray()
        async with self._files(params.sandbox) as files:
            while True:
                piece = await files.read(path, offset=len(content))
                content += piece.data
                if max(len(content), piece.size) > self._limit:
                    raise LimitReached(
                        f"{path}: {piece.size} bytes are over max_file_read_bytes ({self._limit}): "
                        "read it in pieces (fs/open and fs/readBlock, or file/read)"
                    )
                if piece.eof:
                    return f.FsReadFileResult(bytes(content))

    async def write_file(self, connection: ServerConnection, params: f.FsWriteFileParams) -> None:
        path = _path(params.path, params.follow_symlinks)
        async with self._files(params.sandbox) as files:
            await files.write(path, params.data, make_parents=False)

    async def create_directory(self, connection: ServerConnection, params: f.FsCreateDirectoryParams) -> None:
        recursive = params.recursive is None or params.recursive
        path = _path(params.path, params.follow_symlinks)
        async with self._files(params.sandbox) as files:
            await files.make_dir(path, parents=recursive, exist_ok=recursive)

    async def get_metadata(self, connection: ServerConnection, params: f.FsPathParams) -> f.FsMetadata:
        path = decode_path(params.path)
        async with self._files(params.sandbox) as files:
            link = await files.stat(path, follow=False)
            info = link
            if link.type == "symlink" and params.follow_symlinks is not False:
                info = await files.stat(path)
        return f.FsMetadata(
            is_directory=info.type == "directory",
            is_file=info.type == "file",
            is_symlink=link.type == "symlink",
            size=info.size,
            # Linux does not report it by stat(2); 0 means "unknown" to the Codex client.
            created_at_ms=0,
            modified_at_ms=info.mtime_ns // 1_000_000,
        )

    async def canonicalize(self, connection: ServerConnection, params: f.FsPathParams) -> f.FileRealPathResult:
        path = _path(params.path, params.follow_symlinks)
        async with self._files(params.sandbox) as files:
            return f.FileRealPathResult(encode_uri(await files.real_path(path)))

    async def read_directory(self, connection: ServerConnection, params: f.FsPathParams) -> f.FsReadDirectoryResult:
        path = _path(params.path, params.follow_symlinks)
        async with self._files(params.sandbox) as files:
            found = [
                f.FsEntry(encode_path(entry.name), kind == "directory", kind == "file")
                for entry, kind in [
                    (entry, await _kind(files, path, entry)) for entry in await _entries(files, path, None)
                ]
            ]
        return f.FsReadDirectoryResult(tuple(found))

    async def walk(self, connection: ServerConnection, params: f.FsWalkParams) -> f.FsWalkResult:
        options = params.options
        given = (options.max_depth, options.max_directories, options.max_entries)
        limits = (MAX_WALK_DEPTH, MAX_WALK_DIRECTORIES, MAX_WALK_ENTRIES)
        if any(not 0 <= each <= limit for each, limit in zip(given, limits, strict=True)):
            raise InvalidParams("fs/walk: maxDepth, maxDirectories, maxEntries: at most {}, {}, {}".format(*limits))
        async with self._files(params.sandbox) as files:
            return await _Walk(files, options).run(_path(params.path))

    async def remove(self, connection: ServerConnection, params: f.FsRemoveParams) -> None:
        # The Codex client leaves these out for true.
        recursive = params.recursive is None or params.recursive
        force = params.force is None or params.force
        path = _path(params.path, params.follow_symlinks)
        async with self._files(params.sandbox) as files:
            await files.remove(path, recursive=recursive, missing_ok=force)

    async def copy(self, connection: ServerConnection, params: f.FsCopyParams) -> None:
        source, target = _path(params.source_path), _path(params.destination_path)
        async with self._files(params.sandbox) as files:
            await files.copy(source, target, recursive=params.recursive)

    # --- open files ------------------------------------------------------------------------------------------

    async def open(self, connection: ServerConnection, params: f.FsOpenParams) -> f.FsHandle:
        handles = self._handles.setdefault(connection, {})
        if not params.handle_id:
            raise InvalidParams("handleId is empty")
        if params.handle_id in handles:
            raise FileExists(f"handle {params.handle_id!r} is already open")
        if len(handles) >= MAX_HANDLES:
            raise LimitReached(f"{len(handles)} files are open on this connection: close some")
        if read_policy(params.sandbox).rights is not None:
            raise Forbidden(
                "fs/open: no policy is enforced on open files: use fs/readFile (sandboxedFileStreaming)"
            )
        path = _path(params.path)
        files = self._exec.files
        writable = params.mode == "replace"
        if writable:
            await files.write(path, b"", make_parents=False)
        piece = await files.read(path, size=0)
        handles[params.handle_id] = _Handle(path, piece.file_id, writable)
        return f.FsHandle(params.handle_id)

    async def read_block(self, connection: ServerConnection, params: f.FsReadBlockParams) -> f.FsBlock:
        handle = self._handle(connection, params.handle_id, writable=False)
        piece = await self._exec.files.read(handle.path, offset=params.offset, size=params.len)
        if piece.file_id != handle.file_id:
            raise FileNotFound(f"{handle.path}: replaced since it was opened")
        return f.FsBlock(piece.data, piece.eof)

    async def write_block(self, connection: ServerConnection, params: f.FsWriteBlockParams) -> None:
        handle = self._handle(connection, params.handle_id, writable=True)
        if not 0 < len(params.chunk) <= MAX_BLOCK_BYTES:
            raise InvalidParams(f"chunk: 1 to {MAX_BLOCK_BYTES} bytes, not {len(params.chunk)}")
        if params.offset < 0:
            raise InvalidParams("offset: it is negative")
        await self._exec.write_in_place(handle.path, handle.file_id, params.offset, params.chunk)

    def close(self, connection: ServerConnection, params: f.FsHandle) -> None:
        self._handles.get(connection, {}).pop(params.handle_id, None)

    def _handle(self, connection: ServerConnection, handle_id: str, *, writable: bool) -> _Handle:
        handle = self._handles.get(connection, {}).get(handle_id)
        if handle is None:
            raise FileNotFound(f"no file is open as {handle_id!r}")
        if handle.writable != writable:
            raise InvalidParams(f"handle {handle_id!r} was opened with mode {'read' if writable else 'replace'!r}")
        return handle

    def watch_missing(self, connection: ServerConnection, params: f.FsWatchMissingParams) -> f.FsWatchMissingResult:
        """Reply that nothing is watched (`fsWatchMissing` is false): the client then checks the paths itself."""
        return f.FsWatchMissingResult(watching=False)


class _Walk:
    """The directories and files below a directory, level by level, within the limits of the options."""

    def __init__(self, files: FileApi, options: f.FsWalkOptions) -> None:
        self._files = files
        self._options = options
        self._entries: list[f.FsWalkEntry] = []
        self._errors: list[f.FsWalkError] = []
        self._left = options.max_entries
        self._directories = 0
        self._truncated = False
        #: Real paths of entered directories, so that a link into a parent does not lead round in circles.
        self._seen: set[str] = set()

    async def run(self, top: str) -> f.FsWalkResult:
        pending = deque([(top, 0)])
        while pending and not self._truncated:
            path, depth = pending.popleft()
            if self._directories >= self._options.max_directories:
                self._truncated = True
                break
            try:
                below = await self._enter(path)
            except FileError as error:
                if path == top and not isinstance(error, NotADirectory):
                    raise
                if path != top:
                    self._errors.append(f.FsWalkError(encode_uri(path), error.message))
                continue
            if depth < self._options.max_depth:
                pending.extend((each, depth + 1) for each in below)
        return f.FsWalkResult(tuple(self._entries), tuple(self._errors), self._truncated)

    async def _enter(self, path: str) -> list[str]:
        """Add the entries of a directory; returns its subdirectories."""
        real = await self._files.real_path(path)
        if real in self._seen:
            return []
        found = await _entries(self._files, path, self._left + 1)
        self._seen.add(real)
        self._directories += 1
        below: list[str] = []
        for entry in found:
            if self._left == 0:
                self._truncated = True
                break
            self._left -= 1
            kind = await self._shown(path, entry)
            if kind is None:
                continue
            child = os.path.join(path, entry.name)
            self._entries.append(f.FsWalkEntry(encode_uri(child), kind))
            if kind == "directory":
                below.append(child)
        return below

    async def _shown(self, path: str, entry: DirEntry) -> Literal["directory", "file"] | None:
        if entry.type == "directory":
            return "directory"
        if entry.type == "file":
            return "file"
        if entry.type == "symlink" and self._options.follow_directory_symlinks:
            return "directory" if await _kind(self._files, path, entry) == "directory" else None
        return None


async def _entries(files: FileApi, path: str, limit: int | None) -> list[DirEntry]:
    """The entries of a directory, at least `limit` of them if there are as many."""
    found: list[DirEntry] = []
    more = True
    while more and (limit is None or len(found) < limit):
        page = await files.list(path, after=found[-1].name if found else "")
        found += page.entries
        more = page.more
    return found


async def _kind(files: FileApi, path: str, entry: DirEntry) -> str:
    """The type of an entry, for a link that of its target."""
    if entry.type != "symlink":
        return entry.type
    try:
        return (await files.stat(f"{path}/{entry.name}")).type
    except HoldfastError:
        return "other"  # a dangling link, or one that cannot be followed


def _path(text: str, follow_symlinks: bool | None = None) -> str:
    if follow_symlinks is False:
        raise Forbidden("fs: this server follows symbolic links: leave `followSymlinks` out, or send true")
    return decode_path(text)
