"""The methods of `Sandbox` that are about files. They move pieces between `FileApi` and the caller; trees of files
are in `client.files.trees`. Touches local files only where the caller hands one over.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from typing import IO, Final

import msgspec

from holdfast.client.clean_up import clean_up
from holdfast.client.defaults import Defaults, Path
from holdfast.client.files.in_flight import InFlight
from holdfast.errors import (
    FileError,
    FileNotFound,
    HoldfastError,
    InvalidParams,
    LimitReached,
    NotADirectory,
    file_error,
)
from holdfast.exec_api import ExecApi, FileApi
from holdfast.types import FILE_PIECE_BYTES, DirEntry, FileAttributes, FileInfo, FilePiece

#: What `read_file` returns at most, unless the caller says how much: it is all held in memory.
READ_LIMIT_BYTES: Final = 100 * 1024 * 1024
#: Pieces of one file that are on their way at a time: the wire never runs dry, and 8 MiB are held.
PIECES_IN_FLIGHT: Final = 8

#: What can be written: bytes, text as UTF-8, a file that is open, a local file by its path, or bytes as they come.
Content = bytes | bytearray | memoryview | str | IO[bytes] | os.PathLike[str] | AsyncIterable[bytes]
#: Called with the bytes that were moved so far and the bytes there are in all.
Progress = Callable[[int, int], object]


class SandboxFiles:
    """What a sandbox can do with its files. With `user`, all of it as that user of the sandbox.

    A relative path begins at the connection's `cwd`, and without one at the server's working directory.
    """

    _defaults: Defaults

    @property
    def _api(self) -> ExecApi:
        raise NotImplementedError

    async def read_file(
        self,
        path: Path,
        *,
        offset: int = 0,
        size: int | None = None,
        user: str | None = None,
        max_bytes: int = READ_LIMIT_BYTES,
    ) -> bytes:
        """The content of a file, or `size` bytes of it from `offset` on.

        More than `max_bytes` (100 MiB) is `LimitReached`: read such a file piece by piece with `open_read`, or
        `download` it.
        """
        name, user = self._defaults.path(path), self._defaults.user(user)
        content = bytearray()
        if size is not None and size > max_bytes:
            raise _too_large(name, size, max_bytes)
        async with aclosing(file_pieces(self._api.files, name, offset, size, user)) as pieces:
            async for piece in pieces:
                content += piece.data
                whole = 0 if size is not None else piece.size - offset
                if max(whole, len(content)) > max_bytes:
                    raise _too_large(name, max(whole, len(content)), max_bytes)
        return bytes(content)

    async def read_text(self, path: Path, *, encoding: str = "utf-8", user: str | None = None) -> str:
        """The content of a file as text. `UnicodeDecodeError` if it is none."""
        return (await self.read_file(path, user=user)).decode(encoding)

    async def open_read(
        self, path: Path, *, offset: int = 0, size: int | None = None, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The content of a file piece by piece, from `offset` on. A few pieces are fetched ahead, and no more."""
        name, user = self._defaults.path(path), self._defaults.user(user)
        async with aclosing(file_pieces(self._api.files, name, offset, size, user)) as pieces:
            async for piece in pieces:
                if piece.data:
                    yield piece.data

    async def write_file(
        self,
        path: Path,
        data: Content,
        *,
        mode: int | None = None,
        make_parents: bool = True,
        user: str | None = None,
    ) -> None:
        """Write a file, all of it or nothing: whoever opens it sees the old content or the new.

        A file that is replaced keeps its mode and its owner unless `mode` says otherwise. A symbolic link is
        written through. Directories that are missing are made.
        """
        name, wanted = self._defaults.path(path), FileAttributes(mode=mode)
        user = self._defaults.user(user)
        await write_pieces(
            self._api.files, name, content_pieces(data), wanted, make_parents=make_parents, user=user
        )

    async def list_dir(
        self, path: Path = ".", *, recursive: bool = False, user: str | None = None
    ) -> list[DirEntry]:
        """The entries of a directory in the order of their names.

        With `recursive` those of the directories in it, too, each behind its directory, with names such as
        `src/main.c`; symbolic links are not followed.
        """
        top, user = self._defaults.path(path), self._defaults.user(user)
        found: list[DirEntry] = []
        pending = [""]
        while pending:
            prefix = pending.pop()
            entries = [entry async for entry in entries_of(self._api.files, os.path.join(top, prefix), user)]
            for entry in entries:
                name = os.path.join(prefix, entry.name)
                found.append(msgspec.structs.replace(entry, name=name) if prefix else entry)
                if recursive and entry.type == "directory":
                    pending.append(name)
        return sorted(found, key=lambda entry: entry.name.split("/")) if recursive else found

    async def stat(self, path: Path, *, follow: bool = True, user: str | None = None) -> FileInfo:
        """What a file is; of a symbolic link what it leads to, or with `follow=False` the link itself."""
        user = self._defaults.user(user)
        return await self._api.files.stat(self._defaults.path(path), follow=follow, user=user)

    async def exists(self, path: Path, *, user: str | None = None) -> bool:
        """Whether there is something; a symbolic link that leads nowhere counts as nothing."""
        try:
            await self.stat(path, user=user)
        except (FileNotFound, NotADirectory):
            return False
        return True

    async def remove(
        self, path: Path, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Remove a file, a symbolic link itself, or a directory: an empty one, or with `recursive` any."""
        name, user = self._defaults.path(path), self._defaults.user(user)
        await self._api.files.remove(name, recursive=recursive, missing_ok=missing_ok, user=user)

    async def make_dir(
        self,
        path: Path,
        *,
        parents: bool = True,
        exist_ok: bool = True,
        mode: int | None = None,
        user: str | None = None,
    ) -> None:
        """Make a directory, and with `parents` those above it."""
        name, user = self._defaults.path(path), self._defaults.user(user)
        await self._api.files.make_dir(name, parents=parents, exist_ok=exist_ok, mode=mode, user=user)

    async def move(self, source: Path, target: Path, *, user: str | None = None) -> None:
        """Rename a file or a directory; a file that has the new name is replaced."""
        ends = self._defaults.path(source), self._defaults.path(target)
        await self._api.files.move(*ends, user=self._defaults.user(user))

    async def copy(self, source: Path, target: Path, *, recursive: bool = False, user: str | None = None) -> None:
        """Copy within the sandbox: a file, or with `recursive` a directory; symbolic links as links."""
        ends = self._defaults.path(source), self._defaults.path(target)
        await self._api.files.copy(*ends, recursive=recursive, user=self._defaults.user(user))


def local_error(error: OSError, path: str) -> HoldfastError:
    """What went wrong with a file on the caller's side, which the text says."""
    if isinstance(error, HoldfastError):
        return error
    return file_error(error.errno or 0, f"local file {path}: {(error.strerror or str(error)).lower()}")


async def entries_of(files: FileApi, path: str, user: str | None) -> AsyncIterator[DirEntry]:
    """The entries of a directory, a page at a time."""
    after, more = "", True
    while more:
        page = await files.list(path, after=after, user=user)
        for entry in page.entries:
            yield entry
            if entry.name.encode(errors="surrogateescape") <= after.encode(errors="surrogateescape"):
                raise FileError(f"{path}: the sandbox lists {entry.name!r} after {after!r}")
            after = entry.name
        # A page may be empty though more follow: everything on it was removed meanwhile.
        more = page.more and bool(page.entries)


async def file_pieces(
    files: FileApi,
    path: str,
    offset: int = 0,
    size: int | None = None,
    user: str | None = None,
    flight: InFlight | None = None,
) -> AsyncGenerator[FilePiece, None]:
    """A file in order, with the next pieces under way while one is used; as many as `flight` has places for."""
    flight = flight or InFlight(PIECES_IN_FLIGHT)
    end = None if size is None else offset + size
    ahead: deque[tuple[int, asyncio.Task[FilePiece]]] = deque()
    known = offset  # how far it is known to go
    file_id = ""

    async def fetch(length: int) -> None:
        await flight.places.acquire()
        read = files.read(path, offset=at, size=length, user=user)
        ahead.append((length, asyncio.get_running_loop().create_task(read)))

    async def forget() -> None:
        for _, task in ahead:
            task.cancel()
            flight.places.release()
        await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)
        ahead.clear()

    at = start = offset
    try:
        while True:
            # Beyond what it had, one piece at a time: a file may grow while it is read.
            while not ahead or (at < known and not flight.places.locked()):
                length = FILE_PIECE_BYTES if end is None else min(FILE_PIECE_BYTES, end - at)
                if length <= 0 and at > start:
                    break
                await fetch(length)
                at += length
            if not ahead:
                return
            length, task = ahead[0]
            piece = await task
            if file_id not in ("", piece.file_id):
                raise FileError(f"{path}: was replaced while it was read: read it again")
            known, file_id = piece.size, piece.file_id
            yield piece
            ahead.popleft()
            flight.places.release()
            if piece.eof:
                return
            offset += len(piece.data)
            if len(piece.data) < length:
                # Less than was asked for, and not the end: what is under way would leave a hole.
                await forget()
                at = offset
    finally:
        await forget()


def _too_large(path: str, size: int, limit: int) -> LimitReached:
    return LimitReached(
        f"{path}: {size} bytes are more than read_file returns (max_bytes={limit}): "
        "read it piece by piece with open_read, or download it"
    )


async def write_pieces(
    files: FileApi,
    path: str,
    pieces: AsyncGenerator[bytes, None],
    wanted: FileAttributes,
    *,
    make_parents: bool = True,
    user: str | None = None,
    progress: Callable[[int], object] | None = None,
    flight: InFlight | None = None,
) -> int:
    """Write a file from pieces; one that fits a piece takes one round trip. Returns its size."""
    async with aclosing(pieces):
        return await _write_pieces(files, path, pieces, wanted, make_parents, user, progress, flight)


async def _write_pieces(
    files: FileApi,
    path: str,
    pieces: AsyncGenerator[bytes, None],
    wanted: FileAttributes,
    make_parents: bool,
    user: str | None,
    progress: Callable[[int], object] | None,
    flight: InFlight | None,
) -> int:
    first = await anext(pieces, b"")
    second = await anext(pieces, None)
    if second is None:
        await files.write(path, first, attributes=wanted, make_parents=make_parents, user=user)
        if progress is not None:
            progress(len(first))
        return len(first)
    upload_id = secrets.token_hex(16)
    own = flight or InFlight(PIECES_IN_FLIGHT)

    async def send(data: bytes, offset: int) -> None:
        await files.write_piece(
            path, data, upload_id=upload_id, offset=offset, make_parents=make_parents, user=user
        )
        if progress is not None:
            progress(len(data))

    try:
        size = 0
        async with own.group() as group:
            # The first alone: it makes the file, and tells at once if that cannot be.
            await send(first, 0)
            size = len(first)
            piece: bytes | None = second
            while piece is not None:
                await group.start(send(piece, size))
                size += len(piece)
                piece = await anext(pieces, None)
        await files.commit(path, upload_id=upload_id, size=size, attributes=wanted, user=user)
        return size
    except BaseException:
        await _abandon(files, path, upload_id, user)
        raise


async def _abandon(files: FileApi, path: str, upload_id: str, user: str | None) -> None:
    """Also for a cancelled caller: else the hidden file stays until the server removes what is abandoned."""
    try:
        await clean_up(files, files.abandon(path, upload_id=upload_id, user=user))
    except HoldfastError:
        return  # what went wrong before is what the caller should hear of; the server removes it in time


async def content_pieces(data: Content) -> AsyncGenerator[bytes, None]:
    """What is to be written, in pieces of `FILE_PIECE_BYTES`, the last one shorter."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        for start in range(0, len(view), FILE_PIECE_BYTES):
            yield bytes(view[start : start + FILE_PIECE_BYTES])
    elif isinstance(data, os.PathLike):
        try:
            file = await asyncio.to_thread(open, data, "rb", 0)
        except OSError as error:
            raise local_error(error, os.fspath(data)) from None
        with file:
            async for piece in _open_pieces(file):
                yield piece
    elif isinstance(data, AsyncIterable):
        rest = bytearray()
        async for part in data:
            rest += part
            while len(rest) >= FILE_PIECE_BYTES:
                yield bytes(rest[:FILE_PIECE_BYTES])
                del rest[:FILE_PIECE_BYTES]
        if rest:
            yield bytes(rest)
    elif hasattr(data, "read"):
        async for piece in _open_pieces(data):
            yield piece
    else:
        raise InvalidParams(f"data: cannot write a {type(data).__name__}")


async def _open_pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    """A file that is open, in whole pieces: a pipe gives less at a time."""
    while True:
        piece = await asyncio.to_thread(_read_full, file)
        if piece:
            yield piece
        if len(piece) < FILE_PIECE_BYTES:
            return


def _read_full(file: IO[bytes]) -> bytes:
    data = file.read(FILE_PIECE_BYTES)
    if isinstance(data, str):
        raise InvalidParams("data: the file is open as text; open it as binary")
    while data and len(data) < FILE_PIECE_BYTES and (more := file.read(FILE_PIECE_BYTES - len(data))):
        data += more
    return data
