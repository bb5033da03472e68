"""One call of a service of the host and what was answered to it, and one service and what its host is to be told.

State alone, in memory: who may do what with it is decided in `services`. A reply that waits for a call to change is
a `Reply`, which costs no task.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.server.deferred_reply import Later
from holdfast.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.server.connection import ServerConnection

#: Bytes of one reply: many small pieces go in one message.
REPLY_BYTES: Final = 256 * 1024


class Call:
    """One call and what was answered to it so far; for its caller to read, and for its service's host to answer."""

    def __init__(self, id: str, service: Service, caller: ServerConnection, body_bytes: int) -> None:
        self.id = id
        self.service = service
        self.caller = caller
        #: Held for the host, until it has taken the call.
        self.body_bytes = body_bytes
        #: The number of the event that tells the host of it.
        self.called_seq = 0
        self.pieces: deque[bytes] = deque()
        #: The numbers of the first piece that is held and of the last that came.
        self.first_seq = 1
        self.last_seq = 0
        self.held_bytes = 0
        self.ended = False
        self.error: HoldfastError | None = None
        #: Who is to look again when something changed.
        self.watchers: dict[Reply, None] = {}

    def add(self, seq: int, pieces: tuple[bytes, ...], *, end: bool, error: HoldfastError | None) -> int:
        """The next pieces, and whether they are the last; returns the bytes that are held more. Then `wake`."""
        if seq <= self.last_seq or self.ended:
            return 0  # sent again, since the reply to it was lost
        if seq != self.last_seq + 1:
            raise InvalidRequest(f"call {self.id}: piece {seq} after piece {self.last_seq}")
        self.last_seq = seq + len(pieces) - 1
        self.ended, self.error = end, error
        if end and not pieces[-1]:
            pieces = pieces[:-1]  # it says only that this is the end
        added = sum(map(len, pieces))
        self.pieces.extend(pieces)
        self.held_bytes += added
        return added

    def end(self, error: HoldfastError | None = None) -> None:
        if not self.ended:
            self.ended, self.error = True, error
            self.wake()

    def acknowledge(self, seq: int) -> int:
        """Its caller has the pieces up to `seq`; returns the bytes that are not held any more."""
        before = self.held_bytes
        while self.pieces and self.first_seq <= seq:
            self.held_bytes -= len(self.pieces.popleft())
            self.first_seq += 1
        if self.held_bytes < before:
            self.wake()
        return before - self.held_bytes

    def take(self) -> m.ServicePieces:
        """What is held, as much of it as one message should have."""
        taken: list[bytes] = []
        size = 0
        for piece in self.pieces:
            if taken and size + len(piece) > REPLY_BYTES:
                break
            taken.append(piece)
            size += len(piece)
        ended = self.ended and len(taken) == len(self.pieces)
        if ended and self.error is not None and not taken:
            raise self.error
        return m.ServicePieces(self.id, self.first_seq - 1 + len(taken), tuple(taken), ended and self.error is None)

    def wake(self) -> None:
        for watcher in tuple(self.watchers):
            watcher.look()


class Reply(Later):
    """The reply to a request about a call, once `is_ready` or when its time is up."""

    def __init__(
        self,
        call: Call,
        is_ready: Callable[[], bool],
        result: Callable[[], object],
        *,
        seconds: float | None = None,
        cancelled: Callable[[], None] | None = None,
    ) -> None:
        self._call = call
        self._is_ready = is_ready
        self._result = result
        self._seconds = seconds
        self._cancelled = cancelled
        self._timer: asyncio.TimerHandle | None = None

    def start(self, reply: Callable[[Any], None]) -> None:
        self._reply = reply
        if self._is_ready() or self._seconds == 0:
            self._finish()
            return
        self._call.watchers[self] = None
        if self._seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._finish)

    def look(self) -> None:
        if self._is_ready():
            self._finish()

    def cancel(self, reason: str = "") -> None:
        self._stop_watching()
        if self._cancelled is not None:
            self._cancelled()

    def _finish(self) -> None:
        self._stop_watching()
        try:
            result = self._result()
        except HoldfastError as error:
            result = error
        self._reply(result)

    def _stop_watching(self) -> None:
        self._call.watchers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()


class Service:
    """One name and instance, from the first offer until its host has been gone for too long."""

    def __init__(self, name: str, instance: str) -> None:
        self.name = name
        self.instance = instance
        self.epoch = secrets.token_hex(8)
        self.calls: dict[str, Call] = {}
        #: What the host has not acknowledged, by number.
        self.events: dict[int, m.ServiceEvent] = {}
        self.last_seq = 0
        #: The last that was put into a reply; whether that reply arrived is known when the host asks again.
        self.told_seq = 0
        self.changed = asyncio.Event()
        #: Polls that wait, and the connection of the last one; None once that is gone.
        self.polls = 0
        self.host: ServerConnection | None = None
        self.expiry: asyncio.TimerHandle | None = None

    def tell(self, make: Callable[[int], m.ServiceEvent]) -> int:
        self.last_seq += 1
        self.events[self.last_seq] = make(self.last_seq)
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
        return self.last_seq

    def take(self) -> m.ServiceOfferResult:
        """The first events: one large body a message."""
        chosen: list[m.ServiceEvent] = []
        size = 0
        for event in self.events.values():
            size += len(event.body) if isinstance(event, m.ServiceCalled) else 0
            if chosen and size > REPLY_BYTES:
                break
            chosen.append(event)
        if chosen:
            self.told_seq = max(self.told_seq, chosen[-1].seq)
        return m.ServiceOfferResult(self.epoch, tuple(chosen))
