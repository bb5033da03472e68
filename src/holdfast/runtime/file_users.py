"""Children that work on files as other users: one a user, started when needed, and a bounded number of them.

Only a process of that user has that user's rights and no others. A thread that changes its file-system ids would
still be us to /proc: it could open what we have open. Touches processes, pipes and threads' locks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from typing import Any, Final

from holdfast.runtime.environment import Account
from holdfast.runtime.file_work import read_message, write_message

#: Users at a time; a further one takes the place of the one that was asked last the longest ago.
MAX_CHILDREN: Final = 16

_PROGRAM: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "file_work.py")


class UserChild:
    """One child. Requests go one after the other; each is a message there and a message back."""

    def __init__(self, account: Account, max_uploads: int) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"LC_ALL": "C.UTF-8"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        write_message(self._to, (account.uid, account.gid, list(account.groups), max_uploads))
        self.name = account.name
        #: Unfinished in it. A child that has some is not ended for another.
        self.uploads: set[str] = set()

    def perform(self, operation: str, arguments: dict[str, Any]) -> Any:
        with self._lock:
            if operation == "write_piece":
                self.uploads.add(arguments["upload_id"])
            elif operation in ("commit", "abandon"):
                self.uploads.discard(arguments["upload_id"])
            try:
                write_message(self._to, (operation, arguments))
                failure, result = read_message(self._from)
            except (EOFError, BrokenPipeError):
                raise PermissionError(
                    errno.EPERM, f"the child that works as {self.name!r} has ended, or could not become that user"
                ) from None
        if failure is not None:
            number, text, path = failure
            raise OSError(number, text, path)
        return result

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it, and wait for its end."""
        with self._lock:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self._to.close()
            self._from.read()
            self._from.close()
            self._process.wait()


class UserChildren:
    """The children by user. Used from threads."""

    def __init__(self, max_uploads: int) -> None:
        self._max_uploads = max_uploads
        self._lock = threading.Lock()
        self._children: dict[tuple[int, int, tuple[int, ...]], UserChild] = {}

    def perform(self, account: Account, operation: str, arguments: dict[str, Any]) -> Any:
        key = (account.uid, account.gid, account.groups)
        surplus: UserChild | None = None
        with self._lock:
            child = self._children.pop(key, None)
            if child is not None and child.ended:
                # Killed between two requests: what it had begun lies in files, and the next one goes on with it.
                child.close()
                child = None
            if child is None:
                surplus = self._make_room()
                child = UserChild(account, self._max_uploads)
            self._children[key] = child  # last in the order of use
        if surplus is not None:
            surplus.close()
        try:
            return child.perform(operation, arguments)
        except PermissionError as error:
            if error.errno == errno.EPERM:
                self._drop(key, child)
            raise

    def _make_room(self) -> UserChild | None:
        """The child that has to go for the next one, if one has to."""
        if len(self._children) < MAX_CHILDREN:
            return None
        idle = next((key for key, child in self._children.items() if not child.uploads), None)
        if idle is None:
            raise OSError(errno.EUSERS, "every child has uploads under way")
        return self._children.pop(idle)

    def _drop(self, key: tuple[int, int, tuple[int, ...]], child: UserChild) -> None:
        """A child that is gone is not asked again."""
        if child.ended:
            with self._lock:
                if self._children.get(key) is child:
                    del self._children[key]
            child.close()

    def close(self) -> None:
        with self._lock:
            children, self._children = list(self._children.values()), {}
        for child in children:
            child.close()
