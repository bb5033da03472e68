"""The `fs/*` methods, which the Codex CLI calls to work on files; translates to the runtime's files.

A request may carry a policy (`sandbox`). File operations run in the server process, unconfined, so a policy that
restricts files is refused: a restriction that is not enforced must not look enforced.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import FileExists, FileNotFound, Forbidden, InvalidParams, LimitReached
from holdfast.server.sandbox_policy import read_policy
from holdfast.types import DirEntry
from holdfast.wire import file_messages as f
from holdfast.wire.paths import decode_path, encode_path, encode_uri

if TYPE_CHECKING:
    from holdfast.server.connection import ServerConnection
    from holdfast.server.served_exec import ServedExec

#: Files that one connection may hold open by `fs/open`. A handle is a path and a file identity, not a descriptor.
MAX_HANDLES: Final = 1_024


class FsMethods:
    """The handlers, shared by all connections."""

    def __init__(self, exec_: ServedExec) -> None:
        self._files = exec_.files
        self._limit = exec_.config.max_file_read_bytes
        #: Handles of each connection: the path and the file id at the time of `fs/open`.
        self._handles: weakref.WeakKeyDictionary[ServerConnection, dict[str, tuple[str, str]]] = (
            weakref.WeakKeyDictionary()
        )

    async def read_file(self, connection: ServerConnection, params: f.FsPathParams) -> f.FsReadFileResult:
        path = _path(params.path, params.sandbox, params.follow_symlinks)
        content = bytearray()
        while True:
            piece = await self._files.read(path, offset=len(content))
            content += piece.data
            if max(len(content), piece.size) > self._limit:
                raise LimitReached(
                    f"{path}: {piece.size} bytes are over max_file_read_bytes ({self._limit}): "
                    "read it in pieces (fs/open and fs/readBlock, or file/read)"
                )
            if piece.eof:
                return f.FsReadFileResult(bytes(content))

    async def write_file(self, connection: ServerConnection, params: f.FsWriteFileParams) -> None:
        await self._files.write(
            _path(params.path, params.sandbox, params.follow_symlinks), params.data, make_parents=False
        )

    async def create_directory(self, connection: ServerConnection, params: f.FsCreateDirectoryParams) -> None:
        recursive = params.recursive is None or params.recursive
        path = _path(params.path, params.sandbox, params.follow_symlinks)
        await self._files.make_dir(path, parents=recursive, exist_ok=recursive)

    async def get_metadata(self, connection: ServerConnection, params: f.FsPathParams) -> f.FsMetadata:
        path = _path(params.path, params.sandbox, params.follow_symlinks)
        link = await self._files.stat(path, follow=False)
        info = link
        if link.type == "symlink":
            info = await self._files.stat(path)
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
        found = await self._files.real_path(_path(params.path, params.sandbox, params.follow_symlinks))
        return f.FileRealPathResult(encode_uri(found))

    async def read_directory(self, connection: ServerConnection, params: f.FsPathParams) -> f.FsReadDirectoryResult:
        path = _path(params.path, params.sandbox, params.follow_symlinks)
        found: list[DirEntry] = []
        more = True
        while more:
            page = await self._files.list(path, after=found[-1].name if found else "")
            found += page.entries
            more = page.more
        return f.FsReadDirectoryResult(tuple([await self._entry(path, entry) for entry in found]))

    async def _entry(self, path: str, entry: DirEntry) -> f.FsEntry:
        kind = entry.type
        if kind == "symlink":
            try:
                kind = (await self._files.stat(f"{path}/{entry.name}")).type
            except FileNotFound:
                kind = "other"  # a dangling link
        return f.FsEntry(encode_path(entry.name), kind == "directory", kind == "file")

    async def remove(self, connection: ServerConnection, params: f.FsRemoveParams) -> None:
        # The Codex client leaves these out for true.
        recursive = params.recursive is None or params.recursive
        force = params.force is None or params.force
        path = _path(params.path, params.sandbox, params.follow_symlinks)
        await self._files.remove(path, recursive=recursive, missing_ok=force)

    async def copy(self, connection: ServerConnection, params: f.FsCopyParams) -> None:
        source = _path(params.source_path, params.sandbox)
        target = _path(params.destination_path, params.sandbox)
        await self._files.copy(source, target, recursive=params.recursive)

    async def open(self, connection: ServerConnection, params: f.FsOpenParams) -> f.FsHandle:
        handles = self._handles.setdefault(connection, {})
        if not params.handle_id:
            raise InvalidParams("handleId is empty")
        if params.handle_id in handles:
            raise FileExists(f"handle {params.handle_id!r} is already open")
        if len(handles) >= MAX_HANDLES:
            raise LimitReached(f"{len(handles)} files are open on this connection: close some")
        path = _path(params.path, params.sandbox)
        piece = await self._files.read(path, size=0)
        handles[params.handle_id] = (path, piece.file_id)
        return f.FsHandle(params.handle_id)

    async def read_block(self, connection: ServerConnection, params: f.FsReadBlockParams) -> f.FsBlock:
        handle = self._handles.get(connection, {}).get(params.handle_id)
        if handle is None:
            raise FileNotFound(f"no file is open as {params.handle_id!r}")
        path, file_id = handle
        piece = await self._files.read(path, offset=params.offset, size=params.len)
        if piece.file_id != file_id:
            raise FileNotFound(f"{path}: replaced since it was opened")
        return f.FsBlock(piece.data, piece.eof)

    def close(self, connection: ServerConnection, params: f.FsHandle) -> None:
        self._handles.get(connection, {}).pop(params.handle_id, None)


def _path(text: str, sandbox: Any, follow_symlinks: bool | None = None) -> str:
    if read_policy(sandbox).rights is not None:
        raise Forbidden(
            "fs: this server enforces no policy on files: send no `sandbox`, or one that does not restrict files"
        )
    if follow_symlinks is False:
        raise Forbidden("fs: this server follows symbolic links: leave `followSymlinks` out, or send true")
    return decode_path(text)
