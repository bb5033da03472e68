"""A thread with a descriptor table of its own, in which a server with many descriptors spawns processes.

A spawn copies the descriptor table of the calling thread, and the child closes the copies: 0.1 µs for each
descriptor of the server. The table of this thread has only the descriptors of one child. The children are children
of the server as any other. Touches its thread, one socket, and the descriptors of the spawn under way.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.runtime.libc import unshare_descriptors

if TYPE_CHECKING:
    Spawn = Callable[[Sequence[int]], int]


#: The standard descriptors, and the input of a program that reads its script from stdin.
_MAX_DESCRIPTORS: Final = 4


class Spawner:
    """The thread. Raises `OSError` where the kernel gives a thread no table of its own (before Linux 5.9)."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        #: The call under way, and its result or its error.
        self._spawn: Spawn | None = None
        self._pid = 0
        self._error: Exception | None = None
        # A daemon, so that a server that fails to close it can exit. It blocks in a read between two calls.
        self._thread = threading.Thread(
            target=self._run, args=(theirs.fileno(),), name="holdfast-spawner", daemon=True
        )
        try:
            self._thread.start()
            self._wait()
        except BaseException:
            self._ours.close()
            raise
        finally:
            theirs.close()

    def call(self, fds: Sequence[int], spawn: Spawn) -> int:
        """Call `spawn` in the thread with copies of these descriptors; returns the pid that it returns."""
        self._spawn = spawn
        socket.send_fds(self._ours, [b"."], list(fds))
        self._wait()
        return self._pid

    def close(self) -> None:
        """End the thread."""
        self._ours.close()
        self._thread.join()

    def _wait(self) -> None:
        """Wait for the reply of the thread, and raise its error."""
        if not self._ours.recv(1):
            raise OSError(errno.ECHILD, "the thread that spawns processes has ended")
        self._spawn = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self, control: int) -> None:
        # A handler of Python in this thread would write to the wake-up descriptor of another table.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # In the table of the server `control` is closed once this thread has its own.
        try:
            unshare_descriptors(control)
        except OSError as error:
            self._error = error
            os.write(control, b".")
            return
        link = socket.socket(fileno=control)
        link.send(b".")
        while True:
            word, fds, _, _ = socket.recv_fds(link, 1, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            if not word:
                link.close()
                return
            try:
                assert self._spawn is not None
                self._pid = self._spawn(fds)
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                self._error = error
            finally:
                for fd in fds:
                    os.close(fd)
            link.send(b".")
