"""The private directory of one live shell: the files it sources, the named pipes it writes to. Touches only those.

The shell only reads the files, so that its confinement may contain the directory read-only; it writes to pipes,
which are in a directory of their own below. Two pairs of pipes alternate. A process that still holds a pipe of an
earlier command keeps it open after the name was given to a new pipe. A user's command may remove the directory:
missing files are made again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from typing import Final

from holdfast.errors import ResourceExhausted
from holdfast.runtime.confine.paths import PIPES
from holdfast.runtime.output.output_log import NO_DESCRIPTORS
from holdfast.runtime.process.environment import Account
from holdfast.runtime.shell.dialect import SAVED, ShellDialect, ShellStep, quote
from holdfast.runtime.shell.saved_state import MAX_SAVED_BYTES

#: Larger files are not kept in memory to detect a change.
KEPT_CONTENT_BYTES: Final = 4096
_READ_PIPE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
#: Both ends: no end of file, no writer that blocks in open, no SIGPIPE.
_BOTH_ENDS: Final = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_HOLD_PIPE: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEEDS_NO_QUOTES: Final = re.compile(r"[A-Za-z0-9_/.,:+@-]+")


class ShellFiles:
    """The files of one shell. They belong to the user it runs as; the directories belong to the server's user, so
    that another user can put nothing into them."""

    def __init__(self, path: str, account: Account | None) -> None:
        self.path = path
        #: The directory of the pipes. An earlier version had them in the directory itself.
        self.pipes = path if os.path.isdir(path) and not _is_ours(f"{path}/{PIPES}") else f"{path}/{PIPES}"
        #: Quoted for a shell.
        self.quoted, self.quoted_pipes = _quoted(path), _quoted(self.pipes)
        self._account = account
        #: The step of a command without special parameters: the file `keep`.
        self.plain = ShellStep(self.quoted, self.quoted_pipes)
        self._constant: dict[str, bytes] = {}
        #: A constant file could not be written when the shell was resumed.
        self._lacks_constant = False
        #: Descriptors by name, closed by `remove` or by `close`.
        self._open: dict[str, int] = {}
        #: The contents of the small files.
        self._contents: dict[str, bytes] = {}
        self._make_directory()

    def prepare(self, dialect: ShellDialect) -> None:
        """Write the files that never change."""
        self._know_constant(dialect)
        self._write_constant()

    def resume(self, dialect: ShellDialect) -> None:
        """Open the constant files of an earlier server; equal ones are not rewritten, the shell may be reading.

        Without room for a missing one the shell is resumed all the same, and `write` refuses its next command.
        """
        self._know_constant(dialect)
        try:
            for name, content in self._constant.items():
                if self._has(name, content):
                    self._open[name] = os.open(f"{self.path}/{name}", _READ_FILE)
                    self._contents[name] = content
                else:
                    self.write(name, content)
        except ResourceExhausted:
            self._lacks_constant = True

    def _has(self, name: str, content: bytes) -> bool:
        """Whether a file has this content; a lack of descriptors is raised, since the file may have it."""
        try:
            return self._read(name) == content
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise
            return False

    def _know_constant(self, dialect: ShellDialect) -> None:
        texts = {"keep": dialect.step(self.plain), "at_exit": dialect.at_exit(self.quoted_pipes)}
        self._constant = {name: text.encode() for name, text in texts.items() if text}

    def _write_constant(self) -> None:
        for name, content in self._constant.items():
            self.write(name, content)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, unless it has this content."""
        fd = self._open.get(name)
        if fd is not None and os.fstat(fd).st_nlink == 0:
            # Removed by a command, and most likely with all the rest.
            self.close()
            self._write_constant()
            fd = self._open.get(name)
        elif fd is not None and self._contents.get(name) == content:
            return
        if self._lacks_constant:
            self._lacks_constant = False
            try:
                self._write_constant()
            except ResourceExhausted:
                self._lacks_constant = True
                raise
        try:
            if fd is None:
                fd = self._open[name] = self._create(name)
            written = os.pwrite(fd, content, 0)
            while written < len(content):
                written += os.pwrite(fd, content[written:], written)
            os.ftruncate(fd, written)
        except OSError as error:
            raise ResourceExhausted(f"{self.path}/{name} cannot be written: {error.strerror}") from None
        if len(content) <= KEPT_CONTENT_BYTES:
            self._contents[name] = content
        else:
            self._contents.pop(name, None)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it is missing, unreadable or too large."""
        try:
            return self._read(name)
        except OSError:
            return None

    def _read(self, name: str) -> bytes | None:
        """The content of a file; None if it is too large."""
        fd = os.open(f"{self.path}/{name}", _READ_FILE)
        with open(fd, "rb") as file:
            # An unconfined user may have put another file there: it must not fill the server's memory.
            return file.read() if os.fstat(fd).st_size <= MAX_SAVED_BYTES else None

    def existing(self, name: str) -> str | None:
        """The path of a file, if there is one."""
        path = f"{self.path}/{name}"
        return path if os.path.exists(path) else None

    def forget(self, name: str) -> None:
        """Remove a file."""
        self._contents.pop(name, None)
        if (fd := self._open.pop(name, None)) is not None:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.path}/{name}")

    def open_pipes(self, number: int, *, fresh: bool) -> dict[int, int]:
        """The read ends of a pair; `fresh` if a process may still hold the pipes that had its names."""
        opened: dict[int, int] = {}
        try:
            for kind, letter in ((0, "o"), (1, "e")):
                opened[kind] = self._open_pipe(f"{letter}{number}", fresh=fresh)
        except OSError as error:
            for fd in opened.values():
                os.close(fd)
            raise self._no_pipe(error) from None
        return opened

    def open_saved(self) -> int:
        """A descriptor for both ends of the pipe that the shell saves its variables and its state to."""
        try:
            return self._open_pipe(SAVED, fresh=False, flags=_BOTH_ENDS)
        except OSError as error:
            raise self._no_pipe(error) from None

    def open_stdin(self) -> int:
        """The write end of a new named pipe for a command's stdin. It has no reader until the shell opens it."""
        path, opened = f"{self.pipes}/stdin", -1
        try:
            opened = self._open_pipe("stdin", fresh=True)
            return os.open(path, _HOLD_PIPE)
        except OSError as error:
            raise self._no_pipe(error) from None
        finally:
            if opened >= 0:
                os.close(opened)

    def hold_pipes(self, number: int) -> list[int]:
        """Write ends of a pair that has a reader; without those that a command has removed."""
        held: list[int] = []
        for letter in "oe":
            with contextlib.suppress(OSError):
                held.append(os.open(f"{self.pipes}/{letter}{number}", _HOLD_PIPE))
        return held

    def _open_pipe(self, name: str, *, fresh: bool, flags: int = _READ_PIPE) -> int:
        path = f"{self.pipes}/{name}"
        if fresh:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            self._make_directory()
            os.mkfifo(path, 0o600)
            self._give(path)
            fd = os.open(path, flags)
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(0, f"{name} is not a pipe: a command has replaced it")
        return fd

    def _no_pipe(self, error: OSError) -> ResourceExhausted:
        return ResourceExhausted(f"no pipe can be made in {self.pipes}: {error.strerror}")

    def _make_directory(self) -> None:
        # For a shell of another user: the directory can be traversed, and neither listed nor changed.
        mode = 0o700 if self._account is None else 0o711
        try:
            if self._account is not None:
                os.chmod(os.path.dirname(self.path), mode)
            for path in dict.fromkeys((self.path, self.pipes)):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, mode)
        except OSError as error:
            raise ResourceExhausted(f"{self.path} cannot be made: {error.strerror}") from None

    def _create(self, name: str) -> int:
        path = f"{self.path}/{name}"
        # Never an existing file: the directory may belong to another user, and contain a link.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.forget(name)
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._make_directory()
            fd = os.open(path, flags, 0o600)
        try:
            self._give(path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _give(self, path: str) -> None:
        if self._account is not None and self._account.uid != os.geteuid():
            os.chown(path, self._account.uid, self._account.gid, follow_symlinks=False)

    def close(self) -> None:
        """Close every descriptor; the files stay."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        self._contents.clear()

    def remove(self) -> None:
        self.close()
        # Directories nested deeper than the recursion limit stay until the spool is removed.
        with contextlib.suppress(RecursionError):
            shutil.rmtree(self.path, ignore_errors=True)


def _quoted(path: str) -> str:
    return path if _NEEDS_NO_QUOTES.fullmatch(path) else quote(path)


def _is_ours(path: str) -> bool:
    """Whether it is a directory of the server's user, and not a file that a shell's user has put there."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
