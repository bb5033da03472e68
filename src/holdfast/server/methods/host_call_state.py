"""The state of host calls: one call with its answer so far, and one offer with the events for its host.

In memory; `host_calls` checks permissions and limits. A request that waits for a change of a call or an offer gets
a `WatchingReply`, which costs no task.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.server.deferred_reply import DeferredReply
from holdfast.wire import host_call_messages as h

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.server.connection import ServerConnection

#: Bytes of one reply: many small pieces go in one message.
REPLY_BYTES: Final = 256 * 1024


class Watched:
    """An object with a state that replies wait for."""

    def __init__(self) -> None:
        self.watchers: dict[WatchingReply, None] = {}

    def wake(self) -> None:
        """Send the replies that wait for the present state."""
        for watcher in tuple(self.watchers):
            watcher.check()


class HostCall(Watched):
    """One call and the answer so far: the host appends pieces, the caller takes them."""

    def __init__(self, id: str, offer: HostOffer, caller: ServerConnection, body_bytes: int) -> None:
        super().__init__()
        self.id = id
        self.offer = offer
        self.caller = caller
        #: Bytes of the body, which is held until the host has taken the call.
        self.body_bytes = body_bytes
        #: The `seq` of the event that announces the call to the host.
        self.called_seq = 0
        self.pieces: deque[bytes] = deque()
        #: The numbers of the first held piece and of the last piece that arrived.
        self.first_seq = 1
        self.last_seq = 0
        self.held_bytes = 0
        self.ended = False
        self.error: HoldfastError | None = None

    def add(self, seq: int, pieces: tuple[bytes, ...], *, end: bool, error: HoldfastError | None) -> int:
        """Append pieces of the answer; returns the bytes by which `held_bytes` grew. Call `wake` afterwards."""
        if seq <= self.last_seq or self.ended:
            return 0  # a repetition, because the reply to the first request was lost
        if seq != self.last_seq + 1:
            raise InvalidRequest(f"call {self.id}: piece {seq} after piece {self.last_seq}")
        self.last_seq = seq + len(pieces) - 1
        self.ended, self.error = end, error
        if end and not pieces[-1]:
            pieces = pieces[:-1]  # an empty piece that only marks the end
        added = sum(map(len, pieces))
        self.pieces.extend(pieces)
        self.held_bytes += added
        return added

    def end(self, error: HoldfastError | None = None) -> None:
        if not self.ended:
            self.ended, self.error = True, error
            self.wake()

    def acknowledge(self, seq: int) -> int:
        """Drop the pieces up to `seq`, which the caller has received; returns the bytes that were freed."""
        before = self.held_bytes
        while self.pieces and self.first_seq <= seq:
            self.held_bytes -= len(self.pieces.popleft())
            self.first_seq += 1
        if self.held_bytes < before:
            self.wake()
        return before - self.held_bytes

    def take(self) -> h.HostAnswerPieces:
        """The held pieces, up to `REPLY_BYTES`; raises the error of a failed call after its last piece."""
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
        return h.HostAnswerPieces(
            self.id, self.first_seq - 1 + len(taken), tuple(taken), ended and self.error is None
        )


class WatchingReply(DeferredReply):
    """The reply to a request about a call or an offer: sent once `is_ready`, or after `seconds`."""

    def __init__(
        self,
        watched: Watched,
        is_ready: Callable[[], bool],
        result: Callable[[], object],
        *,
        seconds: float | None = None,
        cancelled: Callable[[], None] | None = None,
    ) -> None:
        self._watched = watched
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
        self._watched.watchers[self] = None
        if self._seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._finish)

    def check(self) -> None:
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
        self._watched.watchers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()


class HostOffer(Watched):
    """One name and instance that a host offers, from the first poll until the host stops polling."""

    def __init__(self, name: str, instance: str) -> None:
        super().__init__()
        self.name = name
        self.instance = instance
        self.epoch = secrets.token_hex(8)
        self.calls: dict[str, HostCall] = {}
        #: Events that the host has not acknowledged, by `seq`.
        self.events: dict[int, h.HostCallEvent] = {}
        self.last_seq = 0
        #: The last event that was put into a reply; the next poll acknowledges it.
        self.sent_seq = 0
        #: The number of waiting polls, and the connection of the last poll; None once that is lost.
        self.polls = 0
        self.host: ServerConnection | None = None
        #: When an offer without polls is withdrawn, and the timer, which may be due before.
        self.expires_at: float | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self._waking: asyncio.Handle | None = None

    def add_event(self, make: Callable[[int], h.HostCallEvent]) -> int:
        """Append an event; returns its `seq`. The events of one turn of the event loop leave in one message."""
        self.last_seq += 1
        self.events[self.last_seq] = make(self.last_seq)
        if self._waking is None:
            self._waking = asyncio.get_running_loop().call_soon(self.wake)
        return self.last_seq

    def wake(self) -> None:
        self._waking = None
        super().wake()

    def take(self) -> h.HostOfferResult:
        """The first unacknowledged events: at most one large body in a message."""
        chosen: list[h.HostCallEvent] = []
        size = 0
        for event in self.events.values():
            size += len(event.body) if isinstance(event, h.HostCallBegun) else 0
            if chosen and size > REPLY_BYTES:
                break
            chosen.append(event)
        if chosen:
            self.sent_seq = max(self.sent_seq, chosen[-1].seq)
        return h.HostOfferResult(self.epoch, tuple(chosen))
