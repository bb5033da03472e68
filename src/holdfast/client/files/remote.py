"""`FileApi` over a connection: each call is one method of the wire. Touches only the connection."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from holdfast.client.connection.connection import ClientConnection
from holdfast.exec_api import FileApi
from holdfast.types import WATCH_EVENTS, FileAttributes, FileInfo, WatchRead
from holdfast.wire import file_messages as f, messages as m
from holdfast.wire.methods import WireMethod
from holdfast.wire.paths import decode_path, encode_path, map_paths

_NOTHING: Final = FileAttributes()
#: The rows of `file/*` by the names of their methods in `FileApi`.
METHODS: Final = {
    re.sub("([A-Z])", r"_\1", row.name.removeprefix("file/")).lower(): row
    for row in vars(f).values()
    if isinstance(row, WireMethod) and row.name.startswith("file/")
}


def remote_files(connection: ClientConnection) -> FileApi:
    """The files of the server behind `connection`."""
    return cast(FileApi, RemoteFiles(connection))


class RemoteFiles:
    """`FileApi`: a method that is not defined here sends its parameters in the Struct of its row."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        row = METHODS.get(name)
        if row is None:
            raise AttributeError(f"the wire has no method for {name!r} of a file")

        async def call(*args: Any, **options: Any) -> Any:
            if "request_id" in row.params.__struct_fields__:
                options["request_id"] = options.get("request_id") or uuid.uuid4().hex
            params = map_paths(row.params(*args, **options), encode_path)
            result = map_paths(await self._connection.call(row, params), decode_path)
            return None if row.result is m.Empty else result

        return call

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> bool:
        return await self._connection.clean_up(work)

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

    async def set_attributes(self, path: str, attributes: FileAttributes, *, user: str | None = None) -> None:
        params = f.FileSetAttributesParams(encode_path(path), attributes.mode, attributes.mtime_ns, user)
        await self._connection.call(f.FILE_SET_ATTRIBUTES, params)

    async def real_path(self, path: str, *, strict: bool = True, user: str | None = None) -> str:
        params = f.FileRealPathParams(encode_path(path), user, strict)
        return decode_path((await self._connection.call(f.FILE_REAL_PATH, params)).path)

    async def read_watch(
        self, watch_id: str, *, after: int = 0, limit: int = WATCH_EVENTS, wait: float = 0.0
    ) -> WatchRead:
        params = f.FileReadWatchParams(watch_id, after, limit, int(wait * 1000))
        return map_paths(await self._connection.call(f.FILE_READ_WATCH, params), decode_path)
