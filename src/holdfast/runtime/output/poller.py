"""One epoll for all descriptors of all processes, itself one descriptor of the event loop. Touches nothing else.

asyncio keeps a key, a handle and a context for each descriptor and each event, which is more than a short command
costs otherwise. Here a descriptor is an entry in a dictionary, and all that is ready is handled in one go.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Final

#: Handled in one turn of the loop, so that requests get their turn between the events of a thousand processes.
EVENTS_A_TURN: Final = 64


class Poller:
    """Calls back when a descriptor is readable, or its other end is gone. Level-triggered, as asyncio is."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        try:
            self._loop.add_reader(self._epoll.fileno(), self._ready)
        except OSError:
            self._epoll.close()
            raise

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        self._callbacks[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Before the descriptor is closed. One that is not watched is left alone."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._callbacks.clear()

    def _ready(self) -> None:
        ready = [(fd, self._callbacks[fd]) for fd, _ in self._epoll.poll(0, EVENTS_A_TURN)]
        for fd, callback in ready:
            # A callback before this one may have closed the descriptor, and its number may be another's by now.
            if self._callbacks.get(fd) is not callback:
                continue
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - one process's trouble is not that of the others
                self._loop.call_exception_handler(
                    {"message": "watching a process failed", "exception": error, "callback": callback}
                )
