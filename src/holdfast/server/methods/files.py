"""The `file/*` methods: translates between the method table and the runtime's files; touches nothing else.

Paths and names are decoded from, and encoded to, the form that `wire.paths` defines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.types import DirPage, FileAttributes, FileInfo, FilePiece, WatchRead
from holdfast.wire import file_messages as f
from holdfast.wire.paths import decode_path, encode_path, map_event_paths, map_paths

if TYPE_CHECKING:
    from holdfast.server.connection import ServerConnection
    from holdfast.server.served_exec import ServedExec


class FileMethods:
    """The handlers, shared by all connections."""

    def __init__(self, exec_: ServedExec) -> None:
        self._files = exec_.files

    async def read(self, connection: ServerConnection, params: f.FileReadParams) -> FilePiece:
        path = decode_path(params.path)
        return await self._files.read(path, offset=params.offset, size=params.size, user=params.user)

    async def write(self, connection: ServerConnection, params: f.FileWriteParams) -> f.FileWriteResult:
        path = decode_path(params.path)
        if params.upload_id is None:
            await self._files.write(
                path,
                params.chunk,
                attributes=FileAttributes(params.mode, params.mtime_ns),
                make_parents=params.make_parents,
                user=params.user,
            )
        else:
            await self._files.write_piece(
                path,
                params.chunk,
                upload_id=params.upload_id,
                offset=params.offset,
                make_parents=params.make_parents,
                user=params.user,
            )
        return f.FileWriteResult(len(params.chunk))

    async def commit(self, connection: ServerConnection, params: f.FileCommitParams) -> FileInfo:
        info = await self._files.commit(
            decode_path(params.path),
            upload_id=params.upload_id,
            size=params.size,
            attributes=FileAttributes(params.mode, params.mtime_ns),
            user=params.user,
        )
        return map_paths(info, encode_path)

    async def abandon(self, connection: ServerConnection, params: f.FileAbandonParams) -> None:
        await self._files.abandon(decode_path(params.path), upload_id=params.upload_id, user=params.user)

    async def stat(self, connection: ServerConnection, params: f.FileStatParams) -> FileInfo:
        info = await self._files.stat(decode_path(params.path), follow=params.follow, user=params.user)
        return map_paths(info, encode_path)

    async def list(self, connection: ServerConnection, params: f.FileListParams) -> DirPage:
        page = await self._files.list(
            decode_path(params.path), after=decode_path(params.after), limit=params.limit, user=params.user
        )
        return DirPage(tuple(map_paths(entry, encode_path) for entry in page.entries), page.more)

    async def make_dir(self, connection: ServerConnection, params: f.FileMakeDirParams) -> None:
        await self._files.make_dir(
            decode_path(params.path),
            parents=params.parents,
            exist_ok=params.exist_ok,
            mode=params.mode,
            user=params.user,
            owner=params.owner,
            request_id=params.request_id,
        )

    async def remove(self, connection: ServerConnection, params: f.FileRemoveParams) -> None:
        await self._files.remove(
            decode_path(params.path),
            recursive=params.recursive,
            missing_ok=params.missing_ok,
            user=params.user,
            request_id=params.request_id,
        )

    async def move(self, connection: ServerConnection, params: f.FileMoveParams) -> None:
        source, target = decode_path(params.source), decode_path(params.target)
        await self._files.move(source, target, user=params.user, request_id=params.request_id)

    async def copy(self, connection: ServerConnection, params: f.FileCopyParams) -> None:
        await self._files.copy(
            decode_path(params.source),
            decode_path(params.target),
            recursive=params.recursive,
            user=params.user,
            request_id=params.request_id,
        )

    async def make_link(self, connection: ServerConnection, params: f.FileMakeLinkParams) -> None:
        await self._files.make_link(decode_path(params.path), decode_path(params.target), user=params.user)

    async def set_attributes(self, connection: ServerConnection, params: f.FileSetAttributesParams) -> None:
        wanted = FileAttributes(params.mode, params.mtime_ns)
        await self._files.set_attributes(decode_path(params.path), wanted, user=params.user)

    async def real_path(self, connection: ServerConnection, params: f.FileRealPathParams) -> f.FileRealPathResult:
        found = await self._files.real_path(decode_path(params.path), strict=params.strict, user=params.user)
        return f.FileRealPathResult(encode_path(found))

    async def watch(self, connection: ServerConnection, params: f.FileWatchParams) -> None:
        path = decode_path(params.path)
        await self._files.watch(path, watch_id=params.watch_id, recursive=params.recursive, user=params.user)

    async def read_watch(self, connection: ServerConnection, params: f.FileReadWatchParams) -> WatchRead:
        read = await self._files.read_watch(
            params.watch_id, after=params.after, limit=params.limit, wait=params.wait_ms / 1000
        )
        return map_event_paths(read, encode_path)

    async def unwatch(self, connection: ServerConnection, params: f.FileUnwatchParams) -> None:
        await self._files.unwatch(params.watch_id)
