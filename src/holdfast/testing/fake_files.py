"""`FileApi` in memory: a small file system with directories, links, modes and times, and no users or rights.

For tests of code that works on a sandbox's files: nothing of the operating system is touched. A test reads the
files with `content` and writes files with `put`.

    fake = FakeExec()
    fake.files.put("/etc/motd", b"hello")
    box = Sandbox(fake)
    assert await box.read_file("/etc/motd") == b"hello"
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import posixpath
from typing import Final

from holdfast.errors import UnknownWatch, file_error
from holdfast.types import (
    DIRECTORY_PAGE,
    FILE_PIECE_BYTES,
    WATCH_EVENTS,
    DirEntry,
    DirPage,
    FileAttributes,
    FileInfo,
    FilePiece,
    FileType,
    WatchEvent,
    WatchKind,
    WatchRead,
)

HOME: Final = "/fake"
MAX_LINKS: Final = 40
_NOTHING: Final = FileAttributes()


class FakeFile:
    """One file, directory or link."""

    def __init__(self, type: FileType, number: int, data: bytes = b"", target: str | None = None) -> None:
        self.type: FileType = type
        self.number = number
        self.data = data
        self.target = target
        self.mode = 0o755 if type == "directory" else 0o777 if type == "symlink" else 0o644
        self.mtime_ns = 0
        self.owner = 0

    def info(self) -> FileInfo:
        size = len(self.target or "") if self.type == "symlink" else len(self.data)
        return FileInfo(
            type=self.type,
            size=size,
            mode=self.mode,
            mtime_ns=self.mtime_ns,
            uid=self.owner,
            gid=self.owner,
            target=self.target,
        )

    def take(self, wanted: FileAttributes) -> None:
        self.mode = self.mode if wanted.mode is None else wanted.mode
        self.mtime_ns = self.mtime_ns if wanted.mtime_ns is None else wanted.mtime_ns


class FakeWatch:
    """A watched directory."""

    def __init__(self, root: str, *, recursive: bool) -> None:
        self._root = root
        self._recursive = recursive
        self.events: list[WatchEvent] = []
        self.ended = False
        self.changed = asyncio.Event()

    def note(self, kind: WatchKind, path: str, old_path: str | None, *, directory: bool) -> None:
        """Add an event, if the path or the earlier one is watched."""
        if kind == "removed" and path == self._root:
            self._add("root_removed", "", None, directory=True)
            self.ended = True
            return
        name, old_name = self._name(path), None if old_path is None else self._name(old_path)
        if name is not None:
            self._add(kind if old_path is None or old_name is not None else "created", name, old_name, directory)
        elif old_name is not None:
            self._add("removed", old_name, None, directory)

    def _name(self, path: str) -> str | None:
        within = _is_below(path, self._root) if self._recursive else _is_in(path, self._root)
        return path[len(self._root.rstrip("/")) + 1 :] if within else None

    def _add(self, kind: WatchKind, name: str, old_name: str | None, directory: bool) -> None:
        self.events.append(WatchEvent(len(self.events) + 1, kind, name, old_name, directory))
        self.changed.set()


class FakeFiles:
    """Files by absolute path. The parameter `user` has no effect."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._files: dict[str, FakeFile] = {}
        self._uploads: dict[str, bytearray] = {}
        self._watches: dict[str, FakeWatch] = {}
        for path in ("/", HOME):
            self._files[path] = FakeFile("directory", next(self._numbers))

    # --- for tests ---------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file and make its directories."""
        self._make_parents(_absolute(path))
        self._write(path, data, FileAttributes(mode=mode))

    def content(self, path: str) -> bytes:
        return self._find(path, "file").data

    @property
    def paths(self) -> list[str]:
        """The paths of all files, directories and links."""
        return sorted(self._files)

    # --- FileApi -----------------------------------------------------------------------------------------------

    async def read(
        self, path: str, *, offset: int = 0, size: int = FILE_PIECE_BYTES, user: str | None = None
    ) -> FilePiece:
        file = self._find(path, "file")
        data = file.data[offset : offset + size]
        eof = not data or offset + len(data) >= len(file.data)
        return FilePiece(size=len(file.data), eof=eof, file_id=str(file.number), data=data)

    async def write(
        self,
        path: str,
        data: bytes,
        *,
        attributes: FileAttributes | None = None,
        make_parents: bool = True,
        user: str | None = None,
    ) -> None:
        if make_parents:
            self._make_parents(_absolute(path))
        self._write(path, bytes(data), attributes or _NOTHING)

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
        if make_parents:
            self._make_parents(_absolute(path))
        upload = self._uploads.setdefault(upload_id, bytearray())
        upload.extend(bytes(max(0, offset - len(upload))))
        upload[offset : offset + len(data)] = data

    async def commit(
        self,
        path: str,
        *,
        upload_id: str,
        size: int,
        attributes: FileAttributes | None = None,
        user: str | None = None,
    ) -> FileInfo:
        data = bytes(self._uploads.pop(upload_id, b""))
        if len(data) != size:
            raise file_error(errno.EIO, f"{path}: {len(data)} of {size} bytes were received: write it again")
        return self._write(path, data, attributes or _NOTHING).info()

    async def abandon(self, path: str, *, upload_id: str, user: str | None = None) -> None:
        self._uploads.pop(upload_id, None)

    async def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> FileInfo:
        return self._at(path, self._resolve(path, follow=follow)).info()

    async def list(
        self, path: str, *, after: str = "", limit: int = DIRECTORY_PAGE, user: str | None = None
    ) -> DirPage:
        self._find(path, "directory")
        resolved = self._resolve(path)
        names = sorted(posixpath.basename(each) for each in self._files if _is_in(each, resolved))
        page = [name for name in names if name > after]
        entries = []
        for name in page[:limit]:
            info = self._files[posixpath.join(resolved, name)].info()
            fields = {field: getattr(info, field) for field in FileInfo.__struct_fields__}
            entries.append(DirEntry(name=name, **fields))
        return DirPage(tuple(entries), len(page) > limit)

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
        resolved = self._resolve(path)
        if parents:
            self._make_parents(resolved)
        known = self._files.get(resolved)
        if known is not None and (known.type != "directory" or not exist_ok):
            raise file_error(errno.EEXIST, f"{path}: file exists")
        if known is None:
            self._find(posixpath.dirname(resolved), "directory")
            known = self._files[resolved] = FakeFile("directory", next(self._numbers))
            known.take(FileAttributes(mode=mode))
            known.owner = owner or 0
            self._note("created", resolved)

    async def remove(
        self,
        path: str,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
        user: str | None = None,
        request_id: str | None = None,
    ) -> None:
        resolved = self._resolve(path, follow=False)
        if resolved not in self._files and missing_ok:
            return
        self._at(path, resolved)
        below = [each for each in self._files if _is_below(each, resolved)]
        if below and not recursive:
            raise file_error(errno.ENOTEMPTY, f"{path}: the directory is not empty")
        for each in [*sorted(below, reverse=True), resolved]:
            self._note("removed", each)
            del self._files[each]

    async def move(
        self, source: str, target: str, *, user: str | None = None, request_id: str | None = None
    ) -> None:
        old, new = self._resolve(source, follow=False), self._resolve(target, follow=False)
        self._at(source, old)
        self._find(posixpath.dirname(new), "directory")
        for each in [path for path in self._files if path == old or _is_below(path, old)]:
            self._files[new + each[len(old) :]] = self._files.pop(each)
        self._note("moved", new, old)

    async def copy(
        self,
        source: str,
        target: str,
        *,
        recursive: bool = False,
        user: str | None = None,
        request_id: str | None = None,
    ) -> None:
        old, new = self._resolve(source, follow=False), self._resolve(target, follow=False)
        if self._at(source, old).type == "directory" and not recursive:
            raise file_error(errno.EISDIR, f"{source}: is a directory")
        self._find(posixpath.dirname(new), "directory")
        for each in [path for path in self._files if path == old or _is_below(path, old)]:
            known = self._files[each]
            copied = FakeFile(known.type, next(self._numbers), known.data, known.target)
            copied.take(FileAttributes(known.mode, known.mtime_ns))
            self._files[new + each[len(old) :]] = copied
            self._note("created", new + each[len(old) :])

    async def make_link(self, path: str, target: str, *, user: str | None = None) -> None:
        resolved = self._resolve(path, follow=False)
        if resolved in self._files and self._files[resolved].type == "directory":
            raise file_error(errno.EISDIR, f"{path}: is a directory")
        self._find(posixpath.dirname(resolved), "directory")
        self._files[resolved] = FakeFile("symlink", next(self._numbers), target=target)
        self._note("created", resolved)

    async def set_attributes(self, path: str, attributes: FileAttributes, *, user: str | None = None) -> None:
        resolved = self._resolve(path)
        self._at(path, resolved).take(attributes)
        self._note("attributes", resolved)

    async def real_path(self, path: str, *, strict: bool = True, user: str | None = None) -> str:
        resolved = self._resolve(path)
        if strict:
            self._at(path, resolved)
        return resolved

    async def watch(self, path: str, *, watch_id: str, recursive: bool = False, user: str | None = None) -> None:
        self._find(path, "directory")
        self._watches.setdefault(watch_id, FakeWatch(self._resolve(path), recursive=recursive))

    async def read_watch(
        self, watch_id: str, *, after: int = 0, limit: int = WATCH_EVENTS, wait: float = 0.0
    ) -> WatchRead:
        watch = self._watches.get(watch_id)
        if watch is None:
            raise UnknownWatch(f"no directory is watched as {watch_id!r}: watch it again")
        if len(watch.events) <= after and not watch.ended and wait > 0:
            watch.changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await watch.changed.wait()
            except TimeoutError:
                return WatchRead(())
        return WatchRead(tuple(watch.events[after : after + limit]), watch.ended)

    async def unwatch(self, watch_id: str) -> None:
        self._watches.pop(watch_id, None)

    def _note(self, kind: WatchKind, path: str, old_path: str | None = None) -> None:
        directory = self._files[path].type == "directory"
        for watch in self._watches.values():
            watch.note(kind, path, old_path, directory=directory)

    # --- the tree ----------------------------------------------------------------------------------------------

    def _resolve(self, path: str, *, follow: bool = True) -> str:
        """Return the path without links; the last link is followed if `follow` is set."""
        links = 0
        done, todo = "/", [step for step in _absolute(path).split("/") if step]
        while todo:
            step = todo.pop(0)
            if step == "..":
                done = posixpath.dirname(done)
                continue
            resolved = posixpath.join(done, step)
            known = self._files.get(resolved)
            if known is None or known.target is None or (not todo and not follow):
                done = resolved
                continue
            links += 1
            if links > MAX_LINKS:
                raise file_error(errno.ELOOP, f"{path}: too many levels of symbolic links")
            todo = [each for each in known.target.split("/") if each not in ("", ".")] + todo
            done = "/" if known.target.startswith("/") else done
        return done

    def _at(self, path: str, resolved: str) -> FakeFile:
        known = self._files.get(resolved)
        if known is None:
            above = self._files.get(posixpath.dirname(resolved))
            number = errno.ENOTDIR if above is not None and above.type == "file" else errno.ENOENT
            raise file_error(number, f"{path}: {os.strerror(number).lower()}")
        return known

    def _find(self, path: str, wanted: FileType) -> FakeFile:
        known = self._at(path, self._resolve(path))
        if known.type != wanted:
            number = errno.ENOTDIR if wanted == "directory" else errno.EISDIR
            raise file_error(number, f"{path}: {os.strerror(number).lower()}")
        return known

    def _make_parents(self, path: str) -> None:
        above = posixpath.dirname(path)
        if above not in self._files:
            self._make_parents(above)
            self._files[above] = FakeFile("directory", next(self._numbers))
            self._note("created", above)

    def _write(self, path: str, data: bytes, wanted: FileAttributes) -> FakeFile:
        resolved = self._resolve(path)
        known = self._files.get(resolved)
        if known is not None and known.type == "directory":
            raise file_error(errno.EISDIR, f"{path}: is a directory")
        self._find(posixpath.dirname(resolved), "directory")
        file = self._files[resolved] = FakeFile("file", next(self._numbers), data)
        if known is not None:
            file.mode = known.mode
        file.take(wanted)
        self._note("created" if known is None else "modified", resolved)
        self._note("written", resolved)
        return file


def _absolute(path: str) -> str:
    return posixpath.join(HOME, path)


def _is_in(path: str, directory: str) -> bool:
    return path != directory and posixpath.dirname(path) == directory


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(f"{directory.rstrip('/')}/") and path != directory
