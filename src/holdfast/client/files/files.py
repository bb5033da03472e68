"""The file methods of `Sandbox`: they move pieces between `FileApi` and the caller; `client.files.trees` has trees.

Touches local files only where the caller passes one.
"""

from __future__ import annotations

import asyncio
import io
import os
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from typing import IO, Final

import msgspec

from holdfast.client.connection.clean_up import clean_up
from holdfast.client.defaults import Defaults, Path, path_text
from holdfast.client.files.edits import Edits, PatchedFile
from holdfast.client.files.in_flight import InFlight
from holdfast.client.files.watch import DirectoryEvents
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

#: The default limit of `read_file`, which holds the whole content in memory.
READ_LIMIT_BYTES: Final = 100 * 1024 * 1024
#: Pieces of one file in flight: the wire never runs dry, and 8 MiB are held.
PIECES_IN_FLIGHT: Final = 8

#: Content to write: bytes, text as UTF-8, an open file, a local file by its path, or an async iterable of bytes.
Content = bytes | bytearray | memoryview | str | IO[bytes] | os.PathLike[str] | AsyncIterable[bytes]
#: Called with the bytes that were moved so far and the total.
Progress = Callable[[int, int], object]


class SandboxFiles:
    """The file methods of a sandbox. With `user`, a method has the rights of that user of the sandbox.

    A relative path begins at the connection's `cwd`, or at the server's working directory.
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
        content = io.BytesIO()
        if size is not None and size > max_bytes:
            raise _too_large(name, size, max_bytes)
        async with aclosing(file_pieces(self._api.files, name, offset, size, user)) as pieces:
            async for piece in pieces:
                content.write(piece.data)
                whole = 0 if size is not None else piece.size - offset
                if max(whole, content.tell()) > max_bytes:
                    raise _too_large(name, max(whole, content.tell()), max_bytes)
        return content.getvalue()

    async def read_text(self, path: Path, *, encoding: str = "utf-8", user: str | None = None) -> str:
        """The content of a file as text; `UnicodeDecodeError` if it cannot be decoded."""
        return (await self.read_file(path, user=user)).decode(encoding)

    async def open_read(
        self, path: Path, *, offset: int = 0, size: int | None = None, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The content of a file piece by piece, from `offset` on. A few pieces are fetched ahead."""
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
        """Write a file atomically: a reader sees the old content or the new.

        A replaced file keeps its owner, and its mode unless `mode` is given. A symbolic link is written through.
        Missing directories are created.
        """
        name, wanted = self._defaults.path(path), FileAttributes(mode=mode)
        user = self._defaults.user(user)
        await write_pieces(
            self._api.files, name, content_pieces(data), wanted, make_parents=make_parents, user=user
        )

    async def edit(
        self, path: Path, old: str | bytes, new: str | bytes, count: int = 1, *, user: str | None = None
    ) -> None:
        """Replace the text `old` by `new`, byte for byte; the file must contain it exactly `count` times.

        `EditConflict` if it occurs more or less often, or if another program changes the file meanwhile.
        """
        user = self._defaults.user(user)
        await self._edits(user).edit(self._defaults.path(path), old, new, count)

    async def apply_patch(
        self, patch: str | bytes, *, cwd: Path | None = None, strip: int | None = None, user: str | None = None
    ) -> tuple[PatchedFile, ...]:
        """Apply a unified diff to the files below `cwd`: all of them, or none. Returns the changed files.

        Every old line of a hunk must be present, byte for byte; the line numbers may be wrong if there is only one
        such place. `EditConflict` names the file and the hunk. `strip` is the number of leading directories to
        remove from names, by default the `a/` and `b/` of git.
        """
        top = "" if cwd is None else path_text(cwd, "cwd")
        edits = self._edits(self._defaults.user(user))
        return await edits.apply(patch, strip, lambda name: self._defaults.path(os.path.join(top, name)))

    def _edits(self, user: str | None) -> Edits:
        return Edits(self._api.files, lambda path: self.read_file(path, user=user), user)

    async def list_dir(
        self, path: Path = ".", *, recursive: bool = False, user: str | None = None
    ) -> list[DirEntry]:
        """The entries of a directory in the order of their names.

        With `recursive` also those of its subdirectories, each after its directory, with names such as
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
        """The attributes of a file; for a symbolic link those of its target, or of the link with `follow=False`."""
        user = self._defaults.user(user)
        return await self._api.files.stat(self._defaults.path(path), follow=follow, user=user)

    async def real_path(self, path: Path, *, strict: bool = False, user: str | None = None) -> str:
        """The absolute path without symbolic links. Missing parts stay as they are, or, `strict`, are an error."""
        user = self._defaults.user(user)
        return await self._api.files.real_path(self._defaults.path(path), strict=strict, user=user)

    async def exists(self, path: Path, *, user: str | None = None) -> bool:
        """Whether a file exists; false for a dangling symbolic link."""
        try:
            await self.stat(path, user=user)
        except (FileNotFound, NotADirectory):
            return False
        return True

    async def remove(
        self, path: Path, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Remove a file, a symbolic link itself, or a directory, which must be empty without `recursive`."""
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
        """Create a directory, and with `parents` those above it."""
        name, user = self._defaults.path(path), self._defaults.user(user)
        await self._api.files.make_dir(name, parents=parents, exist_ok=exist_ok, mode=mode, user=user)

    async def move(self, source: Path, target: Path, *, user: str | None = None) -> None:
        """Rename a file or a directory; an existing file of the new name is replaced."""
        ends = self._defaults.path(source), self._defaults.path(target)
        await self._api.files.move(*ends, user=self._defaults.user(user))

    async def copy(self, source: Path, target: Path, *, recursive: bool = False, user: str | None = None) -> None:
        """Copy within the sandbox: a file, or with `recursive` a directory; symbolic links as links."""
        ends = self._defaults.path(source), self._defaults.path(target)
        await self._api.files.copy(*ends, recursive=recursive, user=self._defaults.user(user))

    def watch(self, path: Path = ".", *, recursive: bool = False, user: str | None = None) -> DirectoryEvents:
        """The changes in a directory, and with `recursive` in all below it, for an `async with` block.

        It iterates over `WatchEvent`s. Only the server's own user can watch; another `user` is refused.
        """
        name, user = self._defaults.path(path), self._defaults.user(user)
        return DirectoryEvents(self._api.files, name, recursive=recursive, user=user)


def local_error(error: OSError, path: str) -> HoldfastError:
    """The error of a file operation on the caller's side, which its message states."""
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
        # A page may be empty though more follow, if everything on it was removed meanwhile.
        more = page.more and bool(page.entries)


async def file_pieces(
    files: FileApi,
    path: str,
    offset: int = 0,
    size: int | None = None,
    user: str | None = None,
    flight: InFlight | None = None,
) -> AsyncGenerator[FilePiece, None]:
    """The pieces of a file in order; the next ones are fetched ahead, as many as `flight` has slots for."""
    flight = flight or InFlight(PIECES_IN_FLIGHT)
    end = None if size is None else offset + size
    ahead: deque[tuple[int, asyncio.Task[FilePiece]]] = deque()
    known = offset  # the known size
    file_id = ""

    async def fetch(length: int) -> None:
        await flight.slots.acquire()
        read = files.read(path, offset=at, size=length, user=user)
        ahead.append((length, asyncio.get_running_loop().create_task(read)))

    async def forget() -> None:
        for _, task in ahead:
            task.cancel()
            flight.slots.release()
        await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)
        ahead.clear()

    at = start = offset
    try:
        while True:
            # Beyond the known size, one piece at a time: a file may grow while it is read.
            while not ahead or (at < known and not flight.slots.locked()):
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
                raise FileError(f"{path}: replaced while it was read: read it again")
            known, file_id = piece.size, piece.file_id
            yield piece
            ahead.popleft()
            flight.slots.release()
            if piece.eof:
                return
            offset += len(piece.data)
            if len(piece.data) < length:
                # Fewer bytes than requested, and not the end: the pieces in flight would leave a hole.
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
    """Write a file from pieces and return its size; a file of one piece takes one round trip."""
    async with aclosing(pieces):
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
                # The first alone: it creates the file, or fails at once.
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
    """Remove an upload, also for a cancelled caller; otherwise the server removes it after a while."""
    try:
        await clean_up(files, files.abandon(path, upload_id=upload_id, user=user))
    except HoldfastError:
        return  # the caller gets the earlier error; the server removes the upload in time


async def content_pieces(data: Content) -> AsyncGenerator[bytes, None]:
    """The content in pieces of `FILE_PIECE_BYTES`, the last one shorter."""
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
    """The content of an open file in whole pieces; a pipe returns less at a time."""
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
