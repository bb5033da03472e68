"""Helper processes that perform file operations as other users: one a user, started when needed, a bounded number.

Only a process of that user has exactly that user's rights. A thread that changes its file-system ids would still be
the server to /proc: it could open the server's descriptors. Touches processes, pipes and threads' locks.
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

#: Users at a time; a further one replaces the least recently used.
MAX_HELPERS: Final = 16

_PROGRAM: Final = self_exec.script(__file__, "operations")
#: How much is read of the stderr of a helper that failed: the size of a pipe. A traceback is shorter.
_ERROR_BYTES: Final = 64 * 1024
#: A resource of the machine is exhausted; a later attempt may succeed.
_EXHAUSTED: Final = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class _HelperClosed(Exception):
    """The request was not sent: the helper has exited."""


class UserHelper:
    """One helper. It takes one request at a time; each is a message in and a message out."""

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
            stdin, to, back, stdout, self._errors, stderr = opened
            os.set_blocking(self._errors, False)
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
        #: Unfinished uploads. A helper that has some is not replaced.
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
        # The exit of a helper is noticed when its reply is read, with the reason.
        with contextlib.suppress(BrokenPipeError):
            write_message(self._to, message)

    def _ended_early(self) -> HelperFailed:
        """The error for a helper that has closed its end without a reply."""
        status = self._process.wait()
        printed = b""
        with contextlib.suppress(BlockingIOError):  # empty, and a fork of another thread has not executed yet
            printed = os.read(self._errors, _ERROR_BYTES)
        lines = printed.decode(errors="replace").split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if not reason:
            reason = f"killed by signal {-status}" if status < 0 else f"it ended with exit status {status}"
        return HelperFailed(f"the helper process for files as {self.name!r} failed: {reason}")

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it, and wait for its exit."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(BrokenPipeError):  # it has exited already
                self._to.close()
            self._from.read()
            self._from.close()
            self._process.wait()
            os.close(self._errors)


class UserHelpers:
    """The helpers by user. Used from threads."""

    def __init__(self, max_uploads: int) -> None:
        self._max_uploads = max_uploads
        self._lock = threading.Lock()
        self._helpers: dict[tuple[int, int, tuple[int, ...]], UserHelper] = {}
        self._closed = False

    def perform(self, account: Account, operation: str, arguments: dict[str, Any]) -> Any:
        while True:
            helper = self._helper(account)
            try:
                return helper.perform(operation, arguments)
            except _HelperClosed:
                continue  # another thread has closed it, or has noticed its exit
            except HelperFailed:
                self._drop(helper)
                raise

    def _helper(self, account: Account) -> UserHelper:
        key = (account.uid, account.gid, account.groups)
        surplus: UserHelper | None = None
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is shutting down: it performs no file operations")
            helper = self._helpers.pop(key, None)
            if helper is not None and helper.ended:
                # Killed between two requests: its unfinished uploads are files, and the next helper resumes them.
                helper.close()
                helper = None
            if helper is None:
                surplus = self._make_room()
                helper = UserHelper(account, self._max_uploads)
            self._helpers[key] = helper  # last in the order of use
        if surplus is not None:
            surplus.close()
        return helper

    def _make_room(self) -> UserHelper | None:
        """The helper that is replaced by the next one, if the number is reached."""
        if len(self._helpers) < MAX_HELPERS:
            return None
        idle = next((key for key, helper in self._helpers.items() if not helper.uploads), None)
        if idle is None:
            raise OSError(errno.EUSERS, "every helper has uploads under way")
        return self._helpers.pop(idle)

    def _drop(self, helper: UserHelper) -> None:
        """Remove a helper that has failed, so that the next request starts another."""
        with self._lock:
            self._helpers = {key: each for key, each in self._helpers.items() if each is not helper}
        helper.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            helpers, self._helpers = list(self._helpers.values()), {}
        for helper in helpers:
            helper.close()


def _not_started(error: OSError, name: str) -> HoldfastError:
    text = f"the helper process for files as {name!r} cannot be started: {error.strerror or error}"
    if error.errno in _EXHAUSTED:
        return ResourceExhausted(text)
    # The interpreter or its loader, not the file that the caller named.
    return HelperFailed(text if error.filename is None else f"{text}: {os.fsdecode(error.filename)}")
