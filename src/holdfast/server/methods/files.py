"""The `file/*` methods: translates between the method table and the runtime's files; touches nothing else.

Paths and names are decoded from, and encoded to, the form that `wire.paths` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.types import FileAttributes, FileInfo, WatchRead
from holdfast.wire import file_messages as f
from holdfast.wire.paths import decode_path, encode_path, map_paths

if TYPE_CHECKING:
    from holdfast.server.connection import ServerConnection
    from holdfast.server.served_exec import ServedExec


class FileMethods:
    """The handlers, shared by all connections.

    A method that has no handler here is the method of `FileApi` of the same name, with the same parameters.
    """

    def __init__(self, exec_: ServedExec) -> None:
        self._files = exec_.files

    def __getattr__(self, name: str) -> Callable[[ServerConnection, msgspec.Struct], Coroutine[Any, Any, Any]]:
        perform = getattr(self._files, name)

        async def handle(connection: ServerConnection, params: msgspec.Struct) -> Any:
            result = await perform(**msgspec.structs.asdict(map_paths(params, decode_path)))
            return None if result is None else map_paths(result, encode_path)

        return handle

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

    async def set_attributes(self, connection: ServerConnection, params: f.FileSetAttributesParams) -> None:
        wanted = FileAttributes(params.mode, params.mtime_ns)
        await self._files.set_attributes(decode_path(params.path), wanted, user=params.user)

    async def real_path(self, connection: ServerConnection, params: f.FileRealPathParams) -> f.FileRealPathResult:
        found = await self._files.real_path(decode_path(params.path), strict=params.strict, user=params.user)
        return f.FileRealPathResult(encode_path(found))

    async def read_watch(self, connection: ServerConnection, params: f.FileReadWatchParams) -> WatchRead:
        read = await self._files.read_watch(
            params.watch_id, after=params.after, limit=params.limit, wait=params.wait_ms / 1000
        )
        return map_paths(read, encode_path)
