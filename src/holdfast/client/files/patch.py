"""Unified diffs: parsing, and applying them to contents in memory. Pure: bytes in, changes out.

A hunk applies only where all its old lines are present, byte for byte. The line number in its header may be wrong
if the old lines occur exactly once after the previous hunk; with several places the hunk is refused.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NoReturn

from holdfast.errors import EditConflict, InvalidParams
from holdfast.types import Struct

#: Text of one patch: far more than a model writes, and little enough to hold several times in memory.
MAX_PATCH_BYTES: Final = 16 * 1024 * 1024
_HUNK: Final = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_NOTHING: Final = b"/dev/null"
_NO_NEWLINE: Final = b"\\ "
#: Lines of git between `diff --git` and the first hunk that name no change of their own.
_IGNORED_HEADERS: Final = (b"index ", b"similarity index ", b"dissimilarity index ")
_REGULAR: Final = 0o100000
_ESCAPES: Final = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


class Hunk(Struct, frozen=True):
    """One hunk: its lines, each with its newline unless the file ends without one."""

    #: Its number within the file, from 1, for messages.
    number: int
    #: The line of the old file in the header, from 1; with no old lines, the line before.
    line: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


class FilePatch(Struct, frozen=True):
    """The changes of one file. `old` is None for a new file, `new` for a removed one; both differ for a rename."""

    old: str | None
    new: str | None
    hunks: tuple[Hunk, ...]
    mode: int | None = None

    @property
    def name(self) -> str:
        return self.new or self.old or ""

    @property
    def creates(self) -> bool:
        """Whether the old file may be missing: `diff -N` gives it a name, and the header of its hunk line 0."""
        return self.old is None or [(hunk.line, hunk.old) for hunk in self.hunks] == [(0, ())]


class FileState(Struct, frozen=True):
    """A file before or after a patch. `content` is None if it does not exist; `mode` None leaves the mode."""

    content: bytes | None
    mode: int | None = None


def parse_patch(patch: str | bytes, strip: int | None = None) -> tuple[FilePatch, ...]:
    """The file patches of a unified diff, as `diff -u` and `git diff` write it; `InvalidParams` if it is malformed.

    `strip` is the number of leading directories to remove from names; None removes `a/` and `b/` of git.
    """
    text = patch.encode(errors="surrogateescape") if isinstance(patch, str) else bytes(patch)
    if len(text) > MAX_PATCH_BYTES:
        raise InvalidParams(f"patch: {len(text)} bytes are more than {MAX_PATCH_BYTES}; split it")
    if strip is not None and strip < 0:
        raise InvalidParams(f"strip: 0 or more, not {strip}")
    found = tuple(_Parser(text, strip).files())
    if not found:
        raise InvalidParams("patch: no file in it; each file needs lines '--- OLD' and '+++ NEW', then '@@' hunks")
    return found


def apply_patches(patches: Sequence[FilePatch], before: Mapping[str, FileState]) -> dict[str, FileState]:
    """The states of the changed files, from the states `before` of all files that the patches name.

    `EditConflict` names the file and the hunk that does not apply. A file that several patches change is changed in
    their order.
    """
    after: dict[str, FileState] = {}

    def state(path: str | None) -> FileState:
        return FileState(None) if path is None else after.get(path, before[path])

    for patch in patches:
        old = state(patch.old).content
        if patch.new is not None and patch.new != patch.old and state(patch.new).content is not None:
            raise EditConflict(f"{patch.new}: the patch creates it, and it exists already", path=patch.new)
        if old is None and not patch.creates:
            raise EditConflict(f"{patch.old}: the patch changes it, and it does not exist", path=patch.old)
        new = _with_hunks(patch, old or b"")
        if patch.new is None and new:
            raise EditConflict(
                f"{patch.old}: the patch removes it, and leaves a part of its content", path=patch.old
            )
        if patch.new is not None:
            mode = patch.mode
            if mode is None and patch.old != patch.new:
                mode = state(patch.old).mode  # a renamed file keeps its mode
            elif mode is None and patch.new in after:
                mode = after[patch.new].mode
            after[patch.new] = FileState(new, mode)
        if patch.old is not None and patch.old != patch.new:
            after[patch.old] = FileState(None)
    return after


def _with_hunks(patch: FilePatch, content: bytes) -> bytes:
    # Not `splitlines`, which also ends a line at CR.
    lines = [line for line in re.split(rb"(?<=\n)", content) if line]
    done: list[bytes] = []
    at = 0  # the first line that no hunk has passed
    for hunk in patch.hunks:
        start = _position(patch.name, hunk, lines, at)
        done += lines[at:start]
        done += hunk.new
        at = start + len(hunk.old)
    return b"".join([*done, *lines[at:]])


def _position(name: str, hunk: Hunk, lines: list[bytes], first: int) -> int:
    """The index of the line where the hunk applies, at or after `first`."""
    shown = f"{name}: hunk {hunk.number} (line {hunk.line})"
    details = {"path": name, "hunk": hunk.number}
    if not hunk.old:
        if not first <= hunk.line <= len(lines):
            raise EditConflict(f"{shown}: the file has {len(lines)} lines; give lines of context", **details)
        return hunk.line
    size, wanted = len(hunk.old), hunk.line - 1
    old = list(hunk.old)
    if wanted >= first and lines[wanted : wanted + size] == old:
        return wanted
    positions = [
        i for i in range(first, len(lines) - size + 1) if lines[i] == old[0] and lines[i : i + size] == old
    ]
    if len(positions) == 1:
        return positions[0]
    if positions:
        listed = ", ".join(str(place + 1) for place in positions[:5]) + (", ..." if len(positions) > 5 else "")
        raise EditConflict(f"{shown}: its old lines occur at lines {listed}; give more context", **details)
    raise EditConflict(f"{shown}: its old lines are not in the file{_difference(old, lines, wanted)}", **details)


def _difference(old: list[bytes], lines: list[bytes], wanted: int) -> str:
    """The first difference at the line that the header names, for the message."""
    for i, line in enumerate(old, start=max(wanted, 0)):
        present = lines[i] if i < len(lines) else None
        if present != line:
            shown = "the end of the file" if present is None else _shown(present)
            return f"; line {i + 1}: expected {_shown(line)}, found {shown}"
    return ""


def _shown(line: bytes) -> str:
    text = repr(line.decode(errors="replace"))
    return text if len(text) <= 120 else text[:120] + "..."


class _Parser:
    """One pass over the lines of a patch."""

    def __init__(self, text: bytes, strip: int | None) -> None:
        self._lines = text.split(b"\n")
        if self._lines[-1] == b"":
            del self._lines[-1]
        self._at = 0
        self._strip = strip

    def files(self) -> Iterator[FilePatch]:
        while (line := self._peek()) is not None:
            if line.startswith(b"diff --git "):
                yield self._git_file()
            elif line.startswith(b"--- ") and (self._peek(1) or b"").startswith(b"+++ "):
                old, new = self._names()
                yield self._checked(FilePatch(old, new, tuple(self._hunks(new or old or ""))))
            elif line.startswith(b"@@ -"):
                self._fail("a hunk without a file; '--- OLD' and '+++ NEW' come before it")
            else:
                self._at += 1  # text around the patch: a commit message, `Index:`, `diff -u`

    def _git_file(self) -> FilePatch:
        self._at += 1
        renamed: dict[bytes, str] = {}
        mode: int | None = None
        created = removed = False
        while (line := self._peek()) is not None and not line.startswith((b"--- ", b"diff --git ", b"@@ -")):
            if line.startswith((b"rename from ", b"rename to ")):
                kind, name = line.split(b" ", 2)[1:]
                renamed[kind] = self._name(name, keep=True)
            elif line.startswith((b"new file mode ", b"new mode ")):
                mode, created = self._mode(line), created or line.startswith(b"new file")
            elif line.startswith((b"deleted file mode ", b"old mode ")):
                self._mode(line)
                removed = removed or line.startswith(b"deleted")
            elif line.startswith((b"copy from ", b"GIT binary patch", b"Binary files ")):
                self._fail(f"{line[:40].decode(errors='replace')!r} is not supported; write the file instead")
            elif not line.startswith(_IGNORED_HEADERS):
                break
            self._at += 1
        if (self._peek() or b"").startswith(b"--- "):
            old, new = self._names()
        else:
            old, new = self._git_names(renamed)
        old, new = (None if created else old), (None if removed else new)
        return self._checked(FilePatch(old, new, tuple(self._hunks(new or old or "")), mode))

    def _git_names(self, renamed: dict[bytes, str]) -> tuple[str | None, str | None]:
        """The names of a file without hunks: a rename, a mode, or an empty file."""
        if renamed:
            if set(renamed) != {b"from", b"to"}:
                self._fail("a rename needs 'rename from' and 'rename to'")
            return renamed[b"from"], renamed[b"to"]
        # Both names of the `diff --git` line are equal here, so the line is cut in its middle.
        index = max(i for i in range(self._at) if self._lines[i].startswith(b"diff --git "))
        names = self._lines[index].removeprefix(b"diff --git ")
        middle = len(names) // 2
        old, new = self._name(names[:middle]), self._name(names[middle + 1 :])
        if old != new:
            self._fail("a file without hunks and without a rename")
        return old, new

    def _names(self) -> tuple[str | None, str | None]:
        old, new = self._lines[self._at][4:], (self._peek(1) or b"")
        if not new.startswith(b"+++ "):
            self._at += 1
            self._fail("'+++ NEW' is missing after '--- OLD'")
        names = (self._optional_name(old), self._optional_name(new[4:]))
        self._at += 2
        return names

    def _optional_name(self, text: bytes) -> str | None:
        name = text.rstrip(b"\r") if text.startswith(b'"') else text.partition(b"\t")[0].rstrip(b"\r")
        return None if name == _NOTHING else self._name(name)

    def _name(self, text: bytes, *, keep: bool = False) -> str:
        raw = _unquoted(text.strip()) if text.strip().startswith(b'"') else text
        name = os.fsdecode(raw)
        if self._strip is None:
            name = name[2:] if not keep and name[:2] in ("a/", "b/") else name
        elif not keep:
            parts = name.split("/")
            if len(parts) <= self._strip:
                self._fail(f"{name!r} has fewer than {self._strip} leading directories (strip)")
            name = "/".join(parts[self._strip :])
        if not name or "\0" in name or name.endswith("/"):
            self._fail(f"{name!r} is not the name of a file")
        name = posixpath.normpath(name)
        if name.startswith(("/", "../")) or name == "..":
            self._fail(f"{name!r} is outside of the directory of the patch; set the directory with cwd")
        return name

    def _mode(self, line: bytes) -> int:
        digits = line.rpartition(b" ")[2].strip()
        try:
            mode = int(digits, 8)
        except ValueError:
            mode = 0
        if mode & ~0o777 != _REGULAR:
            self._fail(
                f"mode {digits.decode(errors='replace')!r}: only regular files (100644, 100755) are supported"
            )
        return mode & 0o777

    def _hunks(self, name: str) -> Iterator[Hunk]:
        number = 0
        while (line := self._peek()) is not None and line.startswith(b"@@"):
            number += 1
            yield self._hunk(name, number, line)
        if line is not None and line[:1] in (b" ", b"+", b"-") and not line.startswith((b"--- ", b"-- ")):
            self._fail(f"{name}: hunk {number}: more lines than its header counts" if number else "no '@@' line")

    def _hunk(self, name: str, number: int, header: bytes) -> Hunk:
        match = _HUNK.match(header)
        if match is None:
            self._fail(f"{name}: hunk {number}: its header is not '@@ -LINE,COUNT +LINE,COUNT @@'")
        self._at += 1
        line, old_left, _, new_left = (1 if part is None else int(part) for part in match.groups())
        counted = f"{old_left} old and {new_left} new lines"
        old: list[bytes] = []
        new: list[bytes] = []
        while old_left or new_left:
            text = self._peek()
            # An editor may have removed the space of an empty line of context.
            kind, body = (b" ", b"") if text == b"" else ((text or b"")[:1], (text or b"")[1:])
            if kind == b" ":
                sides, old_left, new_left = [old, new], old_left - 1, new_left - 1
            elif kind == b"-":
                sides, old_left = [old], old_left - 1
            elif kind == b"+":
                sides, new_left = [new], new_left - 1
            else:
                self._fail(f"{name}: hunk {number}: it ends before the {counted} of its header")
            if old_left < 0 or new_left < 0:
                self._fail(f"{name}: hunk {number}: other lines than the {counted} of its header")
            self._at += 1
            ending = b"\n"
            if (self._peek() or b"").startswith(_NO_NEWLINE):
                self._at += 1
                ending = b""
            for side in sides:
                side.append(body + ending)
        for side in (old, new):
            if any(not each.endswith(b"\n") for each in side[:-1]):
                self._fail(f"{name}: hunk {number}: a line without newline before the last line")
        return Hunk(number, line, tuple(old), tuple(new))

    def _checked(self, patch: FilePatch) -> FilePatch:
        if patch.old is None and patch.new is None:
            self._fail("both names of a file are /dev/null")
        if not patch.hunks and patch.old == patch.new and patch.mode is None:
            self._fail(f"{patch.name}: no hunk, no rename and no mode")
        return patch

    def _peek(self, ahead: int = 0) -> bytes | None:
        at = self._at + ahead
        return self._lines[at] if at < len(self._lines) else None

    def _fail(self, problem: str) -> NoReturn:
        raise InvalidParams(f"patch, line {min(self._at, len(self._lines) - 1) + 1}: {problem}")


def _unquoted(text: bytes) -> bytes:
    """A name in the quotes that git writes around unusual characters."""

    def replaced(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        return bytes([int(escape, 8) & 0xFF]) if escape.isdigit() else _ESCAPES.get(escape, escape)

    return re.sub(rb"\\([0-7]{1,3}|.)", replaced, text[1:].removesuffix(b'"'))
