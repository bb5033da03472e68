"""One reader of one process over a connection: its cursor, its buffer and its credit. Touches only the event loop.

Rules. The server has at most `window` bytes in flight without credit; credit is given for what the consumer took,
so a slow consumer stops only the output of its own process. After a reconnect the reader subscribes again after the
last event that arrived and keeps its buffer. A repeated event is dropped by its `seq`, and a jump of a stream's
offset becomes a gap.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.types import Closed, Exited, OutputChunk, OutputGap, ProcessEvent, Stream
from holdfast.wire.messages import ClosedParams, ExitedParams, OutputParams, SubscribeParams, SubscribeSpec

if TYPE_CHECKING:
    from holdfast.client.connection.connection import ClientConnection, PendingCall, Timer

#: Credit for less than half a window is given after this delay: soon for a process, and rarely for the wire.
LATE_CREDIT_SECONDS: Final = 0.02
#: Credit is also given when the consumer takes something this long after the last: a consumer that takes little at
#: a time must not count as stalled on the server (`reader_stall_seconds`).
SLOW_CREDIT_SECONDS: Final = 1.0
#: No credit for less than this part of a window: no process waits for so little.
LATE_CREDIT_FRACTION: Final = 1024


class Subscription:
    """`EventStream` over a connection. Ends after `Closed`; dropping it unsubscribes, as `aclose` does."""

    _opened = False

    def __init__(self, connection: ClientConnection, id: str, process_id: str, after_seq: int, window: int) -> None:
        self.id = id
        self.process_id = process_id
        self.window = window
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._events: deque[ProcessEvent] = deque()
        self._buffered = 0
        #: The `seq` of the last event that arrived, and of the last one that the consumer took.
        self._seq = after_seq
        self._taken_seq = after_seq
        #: The next offset of each stream: 0 from the start, otherwise known from its first chunk.
        self._next_offset: dict[Stream, int] = {} if after_seq else {"stdout": 0, "stderr": 0, "pty": 0}
        #: Bytes taken and not yet credited; and bytes held since before the last subscription, which get no credit.
        self._taken = 0
        self._credited_at = self._loop.time()
        self._not_due = 0
        #: The call that starts the process and opens this reader in the same round trip.
        self._starting: PendingCall[Any] | None = None
        self._deferred = False
        self._ended = False
        self._error: HoldfastError | None = None
        #: Channels since the last new event that ended with an undecodable message.
        self.undecodable = 0
        #: Seconds between polls, where nothing is pushed; None: the sandbox's default.
        self.poll_interval: float | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._late_credit: Timer | None = None

    # --- the consumer's side ---------------------------------------------------------------------------------

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> ProcessEvent:
        if self._waiter is not None:
            raise InvalidRequest(f"two readers wait on one event stream of process {self.process_id!r}")
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            if not self._opened:
                self._opened = True
                self._connection.attach(self)
                continue
            if self._taken > self.window // LATE_CREDIT_FRACTION and self._late_credit is None:
                # The process may be waiting for credit while this reader waits for output.
                self._late_credit = self._connection.clock.call_later(LATE_CREDIT_SECONDS, self._give_credit)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._events.popleft()
        if type(event) is OutputChunk:
            self._take(event)
        return event

    async def aclose(self) -> None:
        """Stop reading. The process continues, and another reader can begin where this one stopped."""
        if not self._ended:
            self._ended = True
            if self._opened:
                self._connection.detach(self.id)
        self._events.clear()
        self._wake()

    def __del__(self) -> None:
        # Dropped in the middle of an `async for`. The garbage collector may run in any thread.
        if self._opened and not self._ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._connection.detach, self.id)

    def _take(self, chunk: OutputChunk) -> None:
        count = len(chunk.data)
        self._buffered -= count
        self._taken_seq = chunk.seq
        not_due = min(self._not_due, count)
        self._not_due -= not_due
        self._taken += count - not_due
        if self._deferred:
            if self._buffered * 2 < self.window:
                self._subscribe()
        elif self._taken * 2 >= self.window or self._loop.time() - self._credited_at >= SLOW_CREDIT_SECONDS:
            self._give_credit()

    def _give_credit(self) -> None:
        self._late_credit = None
        if self._taken and not self._ended and not self._deferred:
            self._connection.credit(self.id, self._taken_seq, self._taken)
            self._taken = 0
            self._credited_at = self._loop.time()

    # --- the connection's side -------------------------------------------------------------------------------

    def spec(self) -> SubscribeSpec:
        """The part of a start that opens this reader, after the last event that has arrived."""
        return SubscribeSpec(self.id, self._seq, self.window, self._connection.polls)

    def arrived(self, stream: Stream) -> int:
        """How many bytes of a stream have arrived, for a reader from the first event on."""
        return self._next_offset[stream]

    def opened_by(self, call: PendingCall[Any]) -> None:
        """Note that `call` starts the process and opens this reader."""
        self._starting = call
        self._opened = True

    def connected(self) -> None:
        """Subscribe after the last event, because the connection is open (again)."""
        if self._starting is not None and not self._starting.future.done():
            # The repeated start opens the reader, from the first event on.
            self._begin_window()
            return
        if self._buffered * 2 < self.window:
            self._subscribe()
        else:
            # Another window on top of a full buffer, at every reconnect, would be unbounded.
            self._deferred = True

    def _subscribe(self) -> None:
        self._begin_window()
        params = SubscribeParams(self.process_id, self.id, self._seq, self.window)
        self._connection.subscribe(params, self._subscribed)

    def _begin_window(self) -> None:
        """Reset the credit: the server counts from 0 again, and gets none for the bytes that are held."""
        self._deferred = False
        self._taken = 0
        self._not_due = self._buffered

    def _subscribed(self, result: object, error: HoldfastError | None) -> None:
        if error is not None:
            self.fail(error)

    def finish(self) -> None:
        """End the reader without events, because the reply has all the output."""
        if not self._ended:
            self._ended = True
            self._connection.ended(self.id)
            self._wake()

    def fail(self, error: HoldfastError) -> None:
        """End the reader with an error; events that arrived before can still be read."""
        if not self._ended and self._error is None:
            self._error = error
            self._wake()

    # --- incoming events: each method returns whether the event was new ------------------------------------------

    def output(self, output: OutputParams) -> bool:
        data, offset, stream = output.chunk, output.offset, output.stream
        if self._ended:
            return False
        # An empty chunk has the number of a lost one: it reports a gap that no chunk follows.
        if output.seq < self._seq or (output.seq == self._seq and data):
            self._taken += len(data)
            # Nothing for the consumer, but a waiting one must give credit for it.
            self._wake()
            return False
        is_new = output.seq > self._seq
        self._seq = output.seq
        expected = self._next_offset.get(stream, offset)
        if offset > expected:
            self._events.append(OutputGap(stream, expected, offset - expected))
        elif offset < expected:
            # Joined with a chunk that had arrived before the connection broke.
            repeated = min(expected - offset, len(data))
            self._taken += repeated
            data, offset = data[repeated:], expected
        self._next_offset[stream] = offset + len(data)
        if data:
            self._buffered += len(data)
            self._events.append(OutputChunk(stream, offset, data, output.seq))
        self._wake()
        return is_new

    def exited(self, params: ExitedParams) -> bool:
        if params.seq <= self._seq or self._ended:
            return False
        self._seq = params.seq
        self._events.append(Exited(params.seq, params.status))
        self._wake()
        return True

    def closed(self, params: ClosedParams) -> bool:
        if params.seq <= self._seq or self._ended:
            return False
        self._seq = params.seq
        self._ended = True
        self._events.append(Closed(params.seq))
        self._connection.ended(self.id)
        self._wake()
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
