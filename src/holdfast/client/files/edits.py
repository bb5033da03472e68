"""Edits of files in a sandbox: replacing an exact text, and applying a unified diff, all through `FileApi`.

The new content is computed on the client from the whole old content. A file that another program changes meanwhile
is not overwritten: its size and time are compared before it is replaced.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Literal

from holdfast.client.connection.clean_up import clean_up
from holdfast.client.files.patch import FileState, apply_patches, parse_patch
from holdfast.errors import (
    EditConflict,
    FileNotFound,
    HoldfastError,
    InvalidParams,
    LimitReached,
    NotADirectory,
)
from holdfast.exec_api import FileApi
from holdfast.types import FILE_PIECE_BYTES, FileAttributes, FileInfo, Struct

#: Files of one patch. All are staged as uploads at the same time, and a server has 256 (`max_uploads`).
MAX_PATCHED_FILES: Final = 128
#: Content of all files of one patch, before and after, which the client holds in memory.
MAX_PATCHED_BYTES: Final = 100 * 1024 * 1024

#: Reads the whole content of a file.
ReadWhole = Callable[[str], Awaitable[bytes]]
Change = Literal["created", "changed", "removed"]


class PatchedFile(Struct, frozen=True):
    """A file that `apply_patch` changed, named as in the patch. A rename is one removed and one created file."""

    path: str
    change: Change


class _Before(Struct, frozen=True):
    """A file before the edit: None and None if it does not exist."""

    content: bytes | None
    info: FileInfo | None


def replaced_text(path: str, content: bytes, old: str | bytes, new: str | bytes, count: int) -> bytes:
    """The content with `old` replaced by `new`; `EditConflict` unless it occurs exactly `count` times."""
    before = old.encode(errors="surrogateescape") if isinstance(old, str) else old
    after = new.encode(errors="surrogateescape") if isinstance(new, str) else new
    if not before:
        raise InvalidParams("old: an empty text occurs everywhere; use write_file for a new file")
    if count < 1:
        raise InvalidParams(f"count: 1 or more, not {count}")
    found = content.count(before)
    if found == count:
        return content.replace(before, after)
    if not found:
        raise EditConflict(f"{path}: the text to replace does not occur in it", path=path, found=0)
    lines = ", ".join(str(line) for line in _lines_of(content, before))
    raise EditConflict(
        f"{path}: the text to replace occurs {found} times (lines {lines}{', ...' if found > 5 else ''}), "
        f"not {count}; give more of its surroundings, or the count",
        path=path,
        found=found,
    )


def _lines_of(content: bytes, text: bytes) -> list[int]:
    """The lines of the first five occurrences."""
    lines: list[int] = []
    at = -len(text)
    while len(lines) < 5 and (at := content.find(text, at + len(text))) >= 0:
        lines.append(content.count(b"\n", 0, at) + 1)
    return lines


class Edits:
    """Edits of one call: reads with their times, checks for changes by others, and replaces."""

    def __init__(self, files: FileApi, read: ReadWhole, user: str | None) -> None:
        self._files = files
        self._read = read
        self._user = user

    async def edit(self, path: str, old: str | bytes, new: str | bytes, count: int) -> None:
        info = await self._files.stat(path, user=self._user)
        content = await self._read(path)
        edited = FileState(replaced_text(path, content, old, new, count))
        await self._replace({path: _Before(content, info)}, {path: edited}, {path: path})

    async def apply(
        self, patch: str | bytes, strip: int | None, resolve: Callable[[str], str]
    ) -> tuple[PatchedFile, ...]:
        """Apply a patch. `resolve` makes the path of a file from its name in the patch."""
        patches = parse_patch(patch, strip)
        names = list(dict.fromkeys(name for each in patches for name in (each.old, each.new) if name is not None))
        if len(names) > MAX_PATCHED_FILES:
            raise LimitReached(
                f"patch: {len(names)} files are more than {MAX_PATCHED_FILES} (MAX_PATCHED_FILES); split it"
            )
        before: dict[str, _Before] = {}
        size = 0
        for name in names:
            before[name] = await self._before(resolve(name))
            size = _bounded(size + len(before[name].content or b""))
        states = {
            name: FileState(each.content, None if each.info is None else each.info.mode)
            for name, each in before.items()
        }
        after = apply_patches(patches, states)
        # A file that is created and removed by the same patch is no change.
        after = {name: state for name, state in after.items() if {state.content, before[name].content} != {None}}
        _bounded(size + sum(len(state.content or b"") for state in after.values()))
        await self._replace(before, after, {name: resolve(name) for name in after})
        return tuple(PatchedFile(name, _change(before[name], state)) for name, state in after.items())

    async def _before(self, path: str) -> _Before:
        try:
            info = await self._files.stat(path, user=self._user)
        except (FileNotFound, NotADirectory):
            return _Before(None, None)
        return _Before(await self._read(path), info)

    async def _replace(
        self, before: Mapping[str, _Before], after: Mapping[str, FileState], paths: Mapping[str, str]
    ) -> None:
        """Stage every new content beside its file, then rename all; an error before the last restores the first.

        Staging meets the errors that are likely: permissions, a full disk. A rename needs neither.
        """
        uploads = {name: secrets.token_hex(16) for name, state in after.items() if state.content is not None}
        touched: list[str] = []
        try:
            for name, upload_id in uploads.items():
                await self._stage(paths[name], after[name].content or b"", upload_id)
            for name in after:
                await self._check_unchanged(paths[name], before[name], after[name])
            for name, upload_id in uploads.items():
                touched.append(name)
                size, wanted = len(after[name].content or b""), FileAttributes(mode=after[name].mode)
                await self._files.commit(
                    paths[name], upload_id=upload_id, size=size, attributes=wanted, user=self._user
                )
            for name in after.keys() - uploads.keys():
                touched.append(name)
                await self._files.remove(paths[name], user=self._user)
        except BaseException as error:
            await _clean_up(self._files, self._undo(before, after, paths, uploads, touched), error)
            raise

    async def _stage(self, path: str, content: bytes, upload_id: str) -> None:
        for offset in range(0, max(len(content), 1), FILE_PIECE_BYTES):
            piece = content[offset : offset + FILE_PIECE_BYTES]
            await self._files.write_piece(path, piece, upload_id=upload_id, offset=offset, user=self._user)

    async def _check_unchanged(self, path: str, before: _Before, after: FileState) -> None:
        try:
            info = await self._files.stat(path, user=self._user)
        except (FileNotFound, NotADirectory):
            info = None
        if _version(info) != _version(before.info) and not await self._is_staged_in_place(path, before, after):
            raise EditConflict(
                f"{path}: another program changed it meanwhile; read it and edit it again", path=path
            )

    async def _is_staged_in_place(self, path: str, before: _Before, after: FileState) -> bool:
        """Whether the server had to stage in the file itself, as for a file of another owner."""
        if before.content is None or after.content is None:
            return False
        now = await self._before(path)
        return now.content == after.content + before.content[len(after.content) :]

    async def _undo(
        self,
        before: Mapping[str, _Before],
        after: Mapping[str, FileState],
        paths: Mapping[str, str],
        uploads: Mapping[str, str],
        touched: Sequence[str],
    ) -> None:
        for name, upload_id in uploads.items():
            await self._files.abandon(paths[name], upload_id=upload_id, user=self._user)
        for name, path in paths.items():
            if name in touched or await self._is_staged_in_place(path, before[name], after[name]):
                await self._restore(path, before[name])

    async def _restore(self, path: str, before: _Before) -> None:
        if before.content is None or before.info is None:
            await self._files.remove(path, missing_ok=True, user=self._user)
            return
        now = await self._before(path)
        if now.content != before.content:
            upload_id = secrets.token_hex(16)
            await self._stage(path, before.content, upload_id)
            wanted = FileAttributes(mode=before.info.mode)
            size = len(before.content)
            await self._files.commit(path, upload_id=upload_id, size=size, attributes=wanted, user=self._user)


async def _clean_up(files: FileApi, undo: Coroutine[Any, Any, None], error: BaseException) -> None:
    """Undo a failed edit, also for a cancelled caller. A failure of the undoing becomes a note of the error."""
    try:
        await clean_up(files, undo)
    except HoldfastError as failed:
        error.add_note(f"restoring the files failed, too: {failed}")


def _bounded(size: int) -> int:
    if size > MAX_PATCHED_BYTES:
        raise LimitReached(
            f"patch: its files have more than {MAX_PATCHED_BYTES} bytes, before and after (MAX_PATCHED_BYTES); "
            "split it"
        )
    return size


def _version(info: FileInfo | None) -> tuple[int, int] | None:
    return None if info is None else (info.size, info.mtime_ns)


def _change(before: _Before, state: FileState) -> Change:
    if state.content is None:
        return "removed"
    return "created" if before.content is None else "changed"
