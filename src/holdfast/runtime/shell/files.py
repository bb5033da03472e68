"""The private directory of one live shell: the files it sources, the named pipes it prints on. Touches only those.

The shell only reads the files, so that it may be given the directory read-only; what it writes goes to pipes, which
are in a directory of their own below. Two pairs of pipes take turns. A process that still holds a pipe of a command
that has ended keeps it open after its name was given to a new pipe. A user's command may remove the directory:
whatever is missing is made again.
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
from holdfast.runtime.process.environment import Account
from holdfast.runtime.shell.dialect import SAVED, ShellDialect, ShellStep, quote
from holdfast.runtime.shell.saved_state import MAX_SAVED_BYTES

#: A larger file is not worth keeping in memory too, to see whether it changes.
KEPT_CONTENT_BYTES: Final = 4096
_READ_PIPE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
#: Both ends: it has no end of file, and no writer waits for a reader or dies of none.
_BOTH_ENDS: Final = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_HOLD_PIPE: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK_AT: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEEDS_NO_QUOTES: Final = re.compile(r"[A-Za-z0-9_/.,:+@-]+")


class ShellFiles:
    """The files of one shell. They belong to the user it runs as; the directories belong to us, so that another
    user can put nothing into them."""

    def __init__(self, path: str, account: Account | None) -> None:
        self.path = path
        #: Where the pipes are. An earlier version had them in the directory itself.
        self.pipes = path if os.path.isdir(path) and not _is_ours(f"{path}/{PIPES}") else f"{path}/{PIPES}"
        #: As a shell reads them.
        self.quoted, self.quoted_pipes = _quoted(path), _quoted(self.pipes)
        self._account = account
        #: The step of a command that needs nothing special: the file `keep`.
        self.plain = ShellStep(self.quoted, self.quoted_pipes)
        self._constant: dict[str, bytes] = {}
        #: Descriptors by name, closed by `remove` or by `close`.
        self._open: dict[str, int] = {}
        #: What is in the small ones; of a large one it is not kept.
        self._contents: dict[str, bytes] = {}
        self._make_directory()

    def prepare(self, dialect: ShellDialect) -> None:
        """The files that stay as they are."""
        self._know_constant(dialect)
        self._write_constant()

    def resume(self, dialect: ShellDialect) -> None:
        """The same for files of an earlier server: the shell may be reading them, so they are left as they are."""
        self._know_constant(dialect)
        for name, content in self._constant.items():
            if self.read(name) == content:
                self._open[name] = os.open(f"{self.path}/{name}", _LOOK_AT)
                self._contents[name] = content
            else:
                self.write(name, content)

    def _know_constant(self, dialect: ShellDialect) -> None:
        texts = {"keep": dialect.step(self.plain), "at_exit": dialect.at_exit(self.quoted_pipes)}
        self._constant = {name: text.encode() for name, text in texts.items() if text}

    def _write_constant(self) -> None:
        for name, content in self._constant.items():
            self.write(name, content)

    def write(self, name: str, content: bytes) -> None:
        """Give a file this content, unless it has it."""
        fd = self._open.get(name)
        if fd is not None and os.fstat(fd).st_nlink == 0:
            # Removed by a command, and so is all the rest, most likely.
            self.close()
            self._write_constant()
            fd = self._open.get(name)
        elif fd is not None and self._contents.get(name) == content:
            return
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
        """The content of a file; None if there is none."""
        try:
            fd = os.open(f"{self.path}/{name}", _LOOK_AT)
        except OSError:
            return None
        with open(fd, "rb") as file:
            # The user of a shell that is not confined may have put another there: it must not fill our memory.
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
        """Our ends of a pair; `fresh` if somebody may still hold the pipes that had its names."""
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
        """Both ends of the pipe that the shell saves its variables and its state to."""
        try:
            return self._open_pipe(SAVED, fresh=False, flags=_BOTH_ENDS)
        except OSError as error:
            raise self._no_pipe(error) from None

    def open_stdin(self) -> int:
        """Our end of a new named pipe for a command's stdin. It has no reader until the shell opens it."""
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
        """The shell's ends of a pair, which has a reader; without those that a command has removed."""
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
            raise OSError(0, f"{name} is no pipe: a command has put something else there")
        return fd

    def _no_pipe(self, error: OSError) -> ResourceExhausted:
        return ResourceExhausted(f"no pipe can be made in {self.pipes}: {error.strerror}")

    def _make_directory(self) -> None:
        # Of another user, ours may be passed through by name, and neither be listed nor changed.
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
        # Never one that is there: the directory may belong to another user, who may have put a link in it.
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
        """Close every descriptor, and leave the files."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        self._contents.clear()

    def remove(self) -> None:
        self.close()
        # Directories may be nested deeper than Python goes: then they stay, until the spool is removed.
        with contextlib.suppress(RecursionError):
            shutil.rmtree(self.path, ignore_errors=True)


def _quoted(path: str) -> str:
    return path if _NEEDS_NO_QUOTES.fullmatch(path) else quote(path)


def _is_ours(path: str) -> bool:
    """Whether it is a directory that we made, and not what a shell's user has put there."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
