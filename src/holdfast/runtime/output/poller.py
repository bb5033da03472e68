"""One epoll for all descriptors of all processes, registered as one descriptor of the event loop.

asyncio holds a key, a handle and a context for each descriptor and each event, more than the rest of a short
command costs. Here a descriptor is an entry in a dictionary, and all ready descriptors are handled in one call.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Final

#: Events in one turn of the loop, so that requests are served between the events of a thousand processes.
EVENTS_A_TURN: Final = 64


class Poller:
    """Calls back when a descriptor is readable, or its other end is closed. Level-triggered, as asyncio is."""

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
        """Stop watching a descriptor, before it is closed; ignores one that is not watched."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._callbacks.clear()

    def _ready(self) -> None:
        ready = [(fd, self._callbacks[fd]) for fd, _ in self._epoll.poll(0, EVENTS_A_TURN)]
        for fd, callback in ready:
            # An earlier callback may have closed the descriptor, and its number may be reused.
            if self._callbacks.get(fd) is not callback:
                continue
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - an error of one process must not affect the others
                self._loop.call_exception_handler(
                    {"message": "watching a process failed", "exception": error, "callback": callback}
                )
