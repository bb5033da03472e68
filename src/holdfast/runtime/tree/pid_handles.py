"""Signals to processes by pidfd, and a wait for their exits. Opens a descriptor for each process."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Container, Iterable

from holdfast.errors import ResourceExhausted
from holdfast.runtime.tree.process_table import Entry, read_entry


class PidHandles:
    """pidfds of some processes: signals cannot hit a reused pid, and an exit is an event.

    If there are not enough descriptors for all, the others are `left_out` for the next search.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._fds: dict[int, int] = {}
        self.left_out: set[int] = set()
        for entry in entries:
            if self.left_out:
                self.left_out.add(entry.pid)
                continue
            try:
                self._open(entry)
            except ProcessLookupError:
                continue
            except OSError as error:
                self.left_out.add(entry.pid)
                if error.errno in (errno.EMFILE, errno.ENFILE) and len(self._fds) > 1:
                    # A read of the process table needs a descriptor meanwhile.
                    pid, fd = self._fds.popitem()
                    self.left_out.add(pid)
                    os.close(fd)
                    continue
                self.__exit__()
                raise ResourceExhausted(f"process {entry.pid} cannot be signalled: {error.strerror}") from None

    def _open(self, entry: Entry) -> None:
        fd = os.pidfd_open(entry.pid)
        try:
            now = read_entry(entry.pid)
        except OSError:
            os.close(fd)
            raise
        if now is not None and now.started == entry.started:
            self._fds[entry.pid] = fd
        else:
            os.close(fd)

    def __enter__(self) -> PidHandles:
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def send(self, number: signal.Signals, except_for: Container[int] = ()) -> None:
        for pid, fd in self._fds.items():
            if pid in except_for:
                continue
            try:
                signal.pidfd_send_signal(fd, number)
            except (ProcessLookupError, PermissionError):
                continue  # ended, or a setuid program: `end_all` raises if it remains

    async def wait_gone(self, timeout: float) -> None:
        """Wait until all have ended, or `timeout` seconds."""
        loop = asyncio.get_running_loop()
        left = set(self._fds.values())
        done = asyncio.Event()

        def gone(fd: int) -> None:
            loop.remove_reader(fd)
            left.discard(fd)
            if not left:
                done.set()

        for fd in tuple(left):
            loop.add_reader(fd, gone, fd)
        try:
            if left:
                async with asyncio.timeout(max(0.0, timeout)):
                    await done.wait()
        except TimeoutError:
            pass
        finally:
            for fd in left:
                loop.remove_reader(fd)
