"""Children that work on files as other users: one a user, started when needed, and a bounded number of them.

Only a process of that user has that user's rights and no others. A thread that changes its file-system ids would
still be us to /proc: it could open what we have open. Touches processes, pipes and threads' locks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from typing import Any, Final

from holdfast.errors import HelperFailed, HoldfastError, ResourceExhausted, ShuttingDown
from holdfast.launch import self_exec
from holdfast.runtime.files.operations import read_message, write_message
from holdfast.runtime.process.environment import Account

#: Users at a time; a further one takes the place of the one that was asked last the longest ago.
MAX_CHILDREN: Final = 16

_PROGRAM: Final = self_exec.script(__file__, "operations")
#: Of the stderr of a child that failed: what a pipe holds. A traceback ends with the reason and is shorter.
_COMPLAINT_BYTES: Final = 64 * 1024
#: The machine has no more of something; a later try may succeed.
_EXHAUSTED: Final = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class _HelperClosed(Exception):
    """The request was not sent: the child has ended."""


class UserHelper:
    """One child. Requests go one after the other; each is a message there and a message back."""

    def __init__(self, account: Account, max_uploads: int) -> None:
        self.name = account.name
        self._lock = threading.Lock()
        self._closed = False
        opened: list[int] = []
        try:
            # Opened here: `Popen` leaks a pipe of its own if the next one cannot be opened. The third carries
            # errors; a file in its place could be read and written by the user through /proc/self/fd.
            for _ in range(3):
                opened += os.pipe2(os.O_CLOEXEC)
            stdin, to, back, stdout, self._complaint, stderr = opened
            os.set_blocking(self._complaint, False)
            os.set_blocking(stderr, False)
            self._process = subprocess.Popen(
                [*self_exec.command(), "-I", "-S", _PROGRAM],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd="/",
                env={"LC_ALL": "C.UTF-8"},
            )
        except OSError as error:
            for fd in opened:
                os.close(fd)
            raise _not_started(error, account.name) from None
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        self._to, self._from = os.fdopen(to, "wb"), os.fdopen(back, "rb")
        self._send((account.uid, account.gid, list(account.groups), max_uploads))
        #: Unfinished in it. A child that has some is not ended for another.
        self.uploads: set[str] = set()

    def perform(self, operation: str, arguments: dict[str, Any]) -> Any:
        with self._lock:
            if self._closed or self._process.returncode is not None:
                raise _HelperClosed
            if operation == "write_piece":
                self.uploads.add(arguments["upload_id"])
            elif operation in ("commit", "abandon"):
                self.uploads.discard(arguments["upload_id"])
            self._send((operation, arguments))
            try:
                failure, result = read_message(self._from)
            except EOFError:
                raise self._ended_early() from None
        if failure is not None:
            number, text, path = failure
            raise OSError(number, text, path)
        return result

    def _send(self, message: object) -> None:
        # A child that has ended shows when its reply is read, with the reason.
        with contextlib.suppress(BrokenPipeError):
            write_message(self._to, message)

    def _ended_early(self) -> HelperFailed:
        """The error for a child that has closed its end without a reply."""
        status = self._process.wait()
        printed = b""
        with contextlib.suppress(BlockingIOError):  # empty, and a child of another thread has not executed yet
            printed = os.read(self._complaint, _COMPLAINT_BYTES)
        lines = printed.decode(errors="replace").split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if not reason:
            reason = f"killed by signal {-status}" if status < 0 else f"it ended with exit status {status}"
        return HelperFailed(f"the helper process for files as {self.name!r} failed: {reason}")

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it, and wait for its end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self._to.close()
            self._from.read()
            self._from.close()
            self._process.wait()
            os.close(self._complaint)


class UserHelpers:
    """The children by user. Used from threads."""

    def __init__(self, max_uploads: int) -> None:
        self._max_uploads = max_uploads
        self._lock = threading.Lock()
        self._children: dict[tuple[int, int, tuple[int, ...]], UserHelper] = {}
        self._closed = False

    def perform(self, account: Account, operation: str, arguments: dict[str, Any]) -> Any:
        while True:
            child = self._child(account)
            try:
                return child.perform(operation, arguments)
            except _HelperClosed:
                continue  # another thread has closed it, or has seen its end
            except HelperFailed:
                self._drop(child)
                raise

    def _child(self, account: Account) -> UserHelper:
        key = (account.uid, account.gid, account.groups)
        surplus: UserHelper | None = None
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is shutting down: it works on no files any more")
            child = self._children.pop(key, None)
            if child is not None and child.ended:
                # Killed between two requests: what it had begun lies in files, and the next one goes on with it.
                child.close()
                child = None
            if child is None:
                surplus = self._make_room()
                child = UserHelper(account, self._max_uploads)
            self._children[key] = child  # last in the order of use
        if surplus is not None:
            surplus.close()
        return child

    def _make_room(self) -> UserHelper | None:
        """The child that has to go for the next one, if one has to."""
        if len(self._children) < MAX_CHILDREN:
            return None
        idle = next((key for key, child in self._children.items() if not child.uploads), None)
        if idle is None:
            raise OSError(errno.EUSERS, "every child has uploads under way")
        return self._children.pop(idle)

    def _drop(self, child: UserHelper) -> None:
        """Forget a child that has failed, so that the next request starts another."""
        with self._lock:
            self._children = {key: each for key, each in self._children.items() if each is not child}
        child.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            children, self._children = list(self._children.values()), {}
        for child in children:
            child.close()


def _not_started(error: OSError, name: str) -> HoldfastError:
    text = f"the helper process for files as {name!r} cannot be started: {error.strerror or error}"
    if error.errno in _EXHAUSTED:
        return ResourceExhausted(text)
    # The interpreter or its loader, not the file that the caller named.
    return HelperFailed(text if error.filename is None else f"{text}: {os.fsdecode(error.filename)}")
