"""Transfers of files and trees between this machine and a sandbox: several files at a time, in bounded memory.

With a `progress` callback a tree is walked twice, first for its size. Touches local files, in threads.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, closing
from typing import Any, Final, TypeVar

from holdfast.client.files.files import (
    PIECES_IN_FLIGHT,
    Progress,
    entries_of,
    file_pieces,
    local_error,
    write_pieces,
)
from holdfast.client.files.in_flight import InFlight
from holdfast.client.files.local_tree import LocalFile, LocalTree, check_name, stays_inside
from holdfast.errors import FileError
from holdfast.exec_api import FileApi
from holdfast.types import FILE_PIECE_BYTES, DirEntry, FileAttributes, FileInfo, Struct

T = TypeVar("T")

#: Files in flight; their pieces share the slots of one file.
FILES_IN_FLIGHT: Final = 16
#: Skipped files that are listed by name.
SKIPPED_LISTED: Final = 1_000


class Skipped(Struct, frozen=True):
    """A skipped file, and why."""

    path: str
    reason: str


class Transferred(Struct, frozen=True, kw_only=True):
    """The result of an upload or a download."""

    files: int
    directories: int
    links: int
    bytes: int
    #: The first thousand skipped files, and their number.
    skipped: tuple[Skipped, ...]
    skipped_count: int


class TransferCount:
    """The progress of a transfer."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self.files = self.directories = self.links = self.bytes = 0
        self._skipped: list[Skipped] = []
        self._skipped_count = 0

    def moved(self, count: int) -> None:
        self.bytes += count
        if self._progress is not None:
            # A file may have grown since its size was taken.
            self._progress(self.bytes, max(self._total, self.bytes))

    def skip(self, path: str, reason: str) -> None:
        self._skipped_count += 1
        if len(self._skipped) < SKIPPED_LISTED:
            self._skipped.append(Skipped(path, reason))

    def result(self) -> Transferred:
        return Transferred(
            files=self.files,
            directories=self.directories,
            links=self.links,
            bytes=self.bytes,
            skipped=tuple(self._skipped),
            skipped_count=self._skipped_count,
        )


# --- to the sandbox ----------------------------------------------------------------------------------------------


async def upload(
    files: FileApi, local: str, remote: str, *, user: str | None, progress: Progress | None
) -> Transferred:
    """Copy a file or a tree to `remote`; a tree is merged into an existing directory."""
    found = await _local(local, os.stat, local)
    if not stat.S_ISDIR(found.st_mode):
        if not stat.S_ISREG(found.st_mode):
            raise FileError(f"local file {local}: neither a file nor a directory")
        count = TransferCount(progress, found.st_size)
        await _upload_file(files, local, remote, user, count, InFlight(PIECES_IN_FLIGHT))
        return count.result()
    total = await _local(local, _size_of_tree, local) if progress is not None else 0
    count = TransferCount(progress, total)
    flight = InFlight(PIECES_IN_FLIGHT)
    made: list[tuple[str, FileAttributes]] = []
    pending = [(local, remote, found)]
    async with InFlight(FILES_IN_FLIGHT).group() as group:
        while pending:
            here, there, status = pending.pop()
            mode = stat.S_IMODE(status.st_mode)
            # Writable until everything is in it.
            await files.make_dir(there, mode=mode | 0o700, user=user)
            made.append((there, FileAttributes(mode, status.st_mtime_ns)))
            count.directories += 1
            for name, inner in await _local(here, _entries, here):
                source, target = os.path.join(here, name), os.path.join(there, name)
                if stat.S_ISDIR(inner.st_mode):
                    pending.append((source, target, inner))
                elif stat.S_ISLNK(inner.st_mode):
                    await files.make_link(target, await _local(source, os.readlink, source), user=user)
                    count.links += 1
                elif stat.S_ISREG(inner.st_mode):
                    await group.start(_upload_file(files, source, target, user, count, flight))
                else:
                    count.skip(source, "neither a file nor a directory nor a link")
    for there, attributes in reversed(made):
        await files.set_attributes(there, attributes, user=user)
    return count.result()


async def _upload_file(
    files: FileApi, source: str, target: str, user: str | None, count: TransferCount, flight: InFlight
) -> None:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    fd = await _local(source, os.open, source, flags, undo=os.close)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"local file {source}: no longer a regular file")
        wanted = FileAttributes(stat.S_IMODE(status.st_mode), status.st_mtime_ns)
        pieces = _local_pieces(fd, source)
        await write_pieces(files, target, pieces, wanted, user=user, progress=count.moved, flight=flight)
        count.files += 1
    finally:
        os.close(fd)


async def _local_pieces(fd: int, path: str) -> AsyncGenerator[bytes, None]:
    while piece := await _local(path, os.read, fd, FILE_PIECE_BYTES):
        yield piece


def _entries(directory: str) -> list[tuple[str, os.stat_result]]:
    with os.scandir(directory) as entries:
        return sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)


def _size_of_tree(directory: str) -> int:
    total = 0
    for names_below, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(os.path.join(names_below, name))
            if stat.S_ISREG(status.st_mode):
                total += status.st_size
    return total


# --- from the sandbox --------------------------------------------------------------------------------------------


async def download(
    files: FileApi, remote: str, local: str, *, user: str | None, progress: Progress | None
) -> Transferred:
    """Copy a file or a tree to `local`; a tree is merged into an existing directory."""
    info = await files.stat(remote, user=user)
    flight = InFlight(PIECES_IN_FLIGHT)
    if info.type != "directory":
        if info.type != "file":
            raise FileError(f"{remote}: neither a file nor a directory, but {info.type}")
        count = TransferCount(progress, info.size)
        # Links in the caller's own path are followed; everything under it comes from the sandbox.
        directory, name = os.path.split(await _local(local, os.path.realpath, local))
        with closing(await _local(local, LocalTree, directory, undo=LocalTree.close)) as tree:
            await _download_file(files, remote, info, tree, (name,), user, count, flight)
        return count.result()
    total = await _size_of_remote(files, remote, user) if progress is not None else 0
    count = TransferCount(progress, total)
    with closing(await _local(local, LocalTree, local, undo=LocalTree.close)) as tree:
        await _download_tree(files, remote, info, tree, user, count, flight)
    return count.result()


async def _download_tree(
    files: FileApi,
    remote: str,
    info: FileInfo,
    tree: LocalTree,
    user: str | None,
    count: TransferCount,
    flight: InFlight,
) -> None:
    made: list[tuple[tuple[str, ...], FileInfo]] = []
    pending: list[tuple[tuple[str, ...], FileInfo]] = [((), info)]
    async with InFlight(FILES_IN_FLIGHT).group() as group:
        while pending:
            names_below, status = pending.pop()
            if names_below:
                await _local(tree.path(names_below), tree.make_directory, names_below)
            made.append((names_below, status))
            count.directories += 1
            async for entry in _entries_below(files, remote, names_below, user):
                names = (*names_below, entry.name)
                source = os.path.join(remote, *names)
                if entry.type == "directory":
                    pending.append((names, entry))
                elif entry.type == "file":
                    await group.start(_download_file(files, source, entry, tree, names, user, count, flight))
                elif entry.type != "symlink" or entry.target is None:
                    count.skip(source, f"neither a file nor a directory nor a link, but {entry.type}")
                elif not stays_inside(names, entry.target):
                    count.skip(source, f"a link that leads out of the tree, to {entry.target}")
                else:
                    await _local(tree.path(names), tree.make_link, names, entry.target)
                    count.links += 1
    for names_below, status in reversed(made):
        await _local(tree.path(names_below), tree.finish_directory, names_below, status.mode, status.mtime_ns)


async def _download_file(
    files: FileApi,
    source: str,
    info: FileInfo,
    tree: LocalTree,
    names: tuple[str, ...],
    user: str | None,
    count: TransferCount,
    flight: InFlight,
) -> None:
    path = tree.path(names)
    file = await _local(path, tree.begin_file, names, undo=LocalFile.discard)
    try:
        offset = 0
        async with aclosing(file_pieces(files, source, user=user, flight=flight)) as pieces:
            async for piece in pieces:
                await _local(path, file.write, piece.data, offset)
                offset += len(piece.data)
                count.moved(len(piece.data))
        await _local(path, file.finish, info.mode, info.mtime_ns)
        count.files += 1
    finally:
        file.discard()


async def _entries_below(
    files: FileApi, remote: str, names_below: tuple[str, ...], user: str | None
) -> AsyncIterator[DirEntry]:
    async for entry in entries_of(files, os.path.join(remote, *names_below), user):
        check_name(entry.name)
        yield entry


async def _size_of_remote(files: FileApi, remote: str, user: str | None) -> int:
    total = 0
    pending: list[tuple[str, ...]] = [()]
    while pending:
        names_below = pending.pop()
        async for entry in _entries_below(files, remote, names_below, user):
            if entry.type == "directory":
                pending.append((*names_below, entry.name))
            elif entry.type == "file":
                total += entry.size
    return total


async def _local(
    path: str, work: Callable[..., T], *arguments: Any, undo: Callable[[T], object] | None = None
) -> T:
    """Run a local file operation in a thread; its errors name the local file.

    A cancelled caller waits for the thread, which may use a descriptor that the caller is about to close.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if task.exception() is None and undo is not None:
            undo(task.result())
        raise
    except OSError as error:
        raise local_error(error, path) from None
    except OverflowError:
        raise FileError(f"local file {path}: the sandbox sent a time that is out of range") from None
