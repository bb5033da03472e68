"""`FileApi` over a connection: each call is one method of the wire. Touches only the connection."""

from __future__ import annotations

import uuid
from collections.abc import Coroutine
from typing import Any

from holdfast.client.connection.connection import ClientConnection
from holdfast.types import (
    DIRECTORY_PAGE,
    FILE_PIECE_BYTES,
    WATCH_EVENTS,
    DirPage,
    FileAttributes,
    FileInfo,
    FilePiece,
    WatchRead,
)
from holdfast.wire import file_messages as f
from holdfast.wire.paths import decode_path, encode_path, map_event_paths, map_paths

_NOTHING = FileAttributes()


class RemoteFiles:
    """The files of the server behind `connection`."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> bool:
        return await self._connection.clean_up(work)

    async def read(
        self, path: str, *, offset: int = 0, size: int = FILE_PIECE_BYTES, user: str | None = None
    ) -> FilePiece:
        params = f.FileReadParams(encode_path(path), offset, size, user)
        return await self._connection.call(f.FILE_READ, params)

    async def write(
        self,
        path: str,
        data: bytes,
        *,
        attributes: FileAttributes | None = None,
        make_parents: bool = True,
        user: str | None = None,
    ) -> None:
        wanted = attributes or _NOTHING
        params = f.FileWriteParams(
            encode_path(path),
            data,
            mode=wanted.mode,
            mtime_ns=wanted.mtime_ns,
            make_parents=make_parents,
            user=user,
        )
        await self._connection.call(f.FILE_WRITE, params)

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
        params = f.FileWriteParams(encode_path(path), data, upload_id, offset, make_parents=make_parents, user=user)
        await self._connection.call(f.FILE_WRITE, params)

    async def commit(
        self,
        path: str,
        *,
        upload_id: str,
        size: int,
        attributes: FileAttributes | None = None,
        user: str | None = None,
    ) -> FileInfo:
        wanted = attributes or _NOTHING
        params = f.FileCommitParams(encode_path(path), upload_id, size, wanted.mode, wanted.mtime_ns, user)
        return map_paths(await self._connection.call(f.FILE_COMMIT, params), decode_path)

    async def abandon(self, path: str, *, upload_id: str, user: str | None = None) -> None:
        params = f.FileAbandonParams(encode_path(path), upload_id, user)
        await self._connection.call(f.FILE_ABANDON, params)

    async def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> FileInfo:
        params = f.FileStatParams(encode_path(path), follow, user)
        return map_paths(await self._connection.call(f.FILE_STAT, params), decode_path)

    async def list(
        self, path: str, *, after: str = "", limit: int = DIRECTORY_PAGE, user: str | None = None
    ) -> DirPage:
        params = f.FileListParams(encode_path(path), encode_path(after), limit, user)
        result = await self._connection.call(f.FILE_LIST, params)
        return DirPage(tuple(map_paths(entry, decode_path) for entry in result.entries), result.more)

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
        name, number = encode_path(path), request_id or _new_id()
        params = f.FileMakeDirParams(name, parents, exist_ok, mode, user, number, owner)
        await self._connection.call(f.FILE_MAKE_DIR, params)

    async def remove(
        self,
        path: str,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
        user: str | None = None,
        request_id: str | None = None,
    ) -> None:
        params = f.FileRemoveParams(encode_path(path), recursive, missing_ok, user, request_id or _new_id())
        await self._connection.call(f.FILE_REMOVE, params)

    async def move(
        self, source: str, target: str, *, user: str | None = None, request_id: str | None = None
    ) -> None:
        params = f.FileMoveParams(encode_path(source), encode_path(target), user, request_id or _new_id())
        await self._connection.call(f.FILE_MOVE, params)

    async def copy(
        self,
        source: str,
        target: str,
        *,
        recursive: bool = False,
        user: str | None = None,
        request_id: str | None = None,
    ) -> None:
        ends = encode_path(source), encode_path(target)
        params = f.FileCopyParams(*ends, recursive, user, request_id or _new_id())
        await self._connection.call(f.FILE_COPY, params)

    async def make_link(self, path: str, target: str, *, user: str | None = None) -> None:
        params = f.FileMakeLinkParams(encode_path(path), encode_path(target), user)
        await self._connection.call(f.FILE_MAKE_LINK, params)

    async def set_attributes(self, path: str, attributes: FileAttributes, *, user: str | None = None) -> None:
        params = f.FileSetAttributesParams(encode_path(path), attributes.mode, attributes.mtime_ns, user)
        await self._connection.call(f.FILE_SET_ATTRIBUTES, params)

    async def real_path(self, path: str, *, strict: bool = True, user: str | None = None) -> str:
        params = f.FileRealPathParams(encode_path(path), user, strict)
        return decode_path((await self._connection.call(f.FILE_REAL_PATH, params)).path)

    async def watch(self, path: str, *, watch_id: str, recursive: bool = False, user: str | None = None) -> None:
        params = f.FileWatchParams(encode_path(path), watch_id, recursive, user)
        await self._connection.call(f.FILE_WATCH, params)

    async def read_watch(
        self, watch_id: str, *, after: int = 0, limit: int = WATCH_EVENTS, wait: float = 0.0
    ) -> WatchRead:
        params = f.FileReadWatchParams(watch_id, after, limit, int(wait * 1000))
        return map_event_paths(await self._connection.call(f.FILE_READ_WATCH, params), decode_path)

    async def unwatch(self, watch_id: str) -> None:
        await self._connection.call(f.FILE_UNWATCH, f.FileUnwatchParams(watch_id))


def _new_id() -> str:
    return uuid.uuid4().hex
