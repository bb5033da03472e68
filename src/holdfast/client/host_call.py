"""Host calls: functions that this program offers to programs in the sandbox, and the calls from inside.

`HostService` polls for calls, runs a handler for each and sends the answers; all its requests may be repeated, so a
call is handled once and answered once whatever happens to the channel. `call_host` is the caller's side: a call is
never repeated, because the host's work might be done twice. Touches only the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Final

from holdfast.client.connection.connection import ClientConnection, PendingCall
from holdfast.errors import HoldfastError, InternalError
from holdfast.wire import host_call_messages as h
from holdfast.wire.host_call_keys import PING, instance_of

log = logging.getLogger(__name__)

#: How long one poll waits. It is repeated at once, so this only bounds how long a dead server goes unnoticed.
POLL_MS: Final = 30_000
#: The largest piece of one message. A larger one is split, so that no message grows with an answer.
PIECE_BYTES: Final = 1024 * 1024
#: The most pieces in one message.
BATCH_PIECES: Final = 64
#: Messages of one answer, and their bytes, that may be in flight: a stream of tokens does not wait for a round trip
#: for each token, and memory stays bounded when the caller is slow.
WINDOW_MESSAGES: Final = 64
WINDOW_BYTES: Final = 1024 * 1024

Answer = bytes | AsyncIterator[bytes]
#: Called with the method and the body of a call; returns the answer, whole or in pieces. The caller gets its error.
Handler = Callable[[str, bytes], Awaitable[Answer]]


class HostService:
    """One service, from `start` (or the beginning of a `with` block) to `aclose`.

    Programs in the sandbox call it by `name` and `instance`. Without the instance they cannot call it, and they
    cannot answer in its place.
    """

    def __init__(self, connection: ClientConnection, name: str, handler: Handler) -> None:
        self.name = name
        self._key = secrets.token_urlsafe(32)
        self.instance = instance_of(name, self._key)
        self._connection = connection
        self._handler = handler
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._polling: asyncio.Task[None] | None = None
        #: Of the server, and the last event that was taken.
        self._epoch = ""
        self._seq = 0

    async def start(self) -> None:
        """Offer the service; on return it can be called."""
        first = await self._connection.call(h.HOST_OFFER, h.HostOfferParams(self.name, self._key))
        self._epoch = first.epoch
        self._polling = asyncio.create_task(self._poll())

    @property
    def failed(self) -> HoldfastError | None:
        """Why it takes no more calls, if something went wrong."""
        if self._polling is None or not self._polling.done() or self._polling.cancelled():
            return None
        error = self._polling.exception()
        return error if isinstance(error, HoldfastError) else None

    async def wait(self) -> None:
        """Wait until it takes no more calls: it was closed, or the connection was lost, which is raised."""
        assert self._polling is not None
        await asyncio.wait((self._polling,))
        if not self._polling.cancelled():
            self._polling.result()

    async def aclose(self) -> None:
        """Withdraw the service and cancel running calls."""
        tasks = [*self._calls.values(), *([] if self._polling is None else [self._polling])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        # A stopped server has no offer to withdraw, and an unreachable one drops it after a while.
        withdrawn = h.HostWithdrawParams(self.name, self._key)
        with contextlib.suppress(HoldfastError):
            await self._connection.clean_up(self._connection.call(h.HOST_WITHDRAW, withdrawn))

    async def __aenter__(self) -> HostService:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- calls -----------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            params = h.HostOfferParams(self.name, self._key, self._epoch, self._seq, POLL_MS)
            poll = self._connection.begin(h.HOST_OFFER, params)
            # A call begins in the turn of the event loop that reads it; this task continues in a later one.
            poll.on_reply = self._take
            await self._connection.reply(poll)

    def _take(self, result: h.HostOfferResult | None, error: HoldfastError | None) -> None:
        if result is None:
            return  # `_poll` raises the error
        if result.epoch != self._epoch:
            # The server was restarted, and the callers have failed.
            self._epoch, self._seq = result.epoch, 0
            for running in self._calls.values():
                running.cancel()
        for event in result.events:
            self._seq = event.seq
            if isinstance(event, h.HostCallBegun):
                self._begin(event)
            elif (task := self._calls.get(event.call_id)) is not None:
                task.cancel()

    def _begin(self, event: h.HostCallBegun) -> None:
        if event.call_id not in self._calls:
            task = asyncio.create_task(self._answer(event))
            self._calls[event.call_id] = task
            task.add_done_callback(lambda _: self._calls.pop(event.call_id, None))

    async def _answer(self, event: h.HostCallBegun) -> None:
        sending = _AnswerSender(self._connection, event.call_id, self._key)
        try:
            answer = b"" if event.method == PING else await self._handler(event.method, event.body)
            if isinstance(answer, bytes):
                await sending.send(answer, end=True)
            else:
                await sending.stream(answer)
        except HoldfastError as error:
            sending.fail(error)
        except Exception as error:
            log.error("service %s: %s failed", self.name, event.method, exc_info=error)
            sending.fail(InternalError(f"service {self.name!r}: {type(error).__name__}"))
        finally:
            sending.abandon()


class _AnswerSender:
    """Sends the pieces of one answer in order, several messages at a time.

    Pieces that are added in one turn of the event loop leave in one message, in that turn.
    """

    def __init__(self, connection: ClientConnection, call_id: str, key: str) -> None:
        self._connection = connection
        self._call_id = call_id
        self._key = key
        self._seq = 1
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._flushing: asyncio.Handle | None = None
        #: Messages without a reply, with their sizes.
        self._in_flight: dict[PendingCall[h.HostAnswerResult], int] = {}
        self._bytes = 0
        self._room: asyncio.Future[None] | None = None
        self._is_wanted = True
        #: Why a message could not be sent, or was refused; raised by the next `send`.
        self._error: HoldfastError | None = None

    async def send(self, data: bytes, *, end: bool = False) -> bool:
        """Send a piece and wait for room, except after the last; returns whether the caller reads on."""
        for at in range(0, len(data) or 1, PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            if len(self._batch) >= BATCH_PIECES or self._batch_bytes + len(piece) > PIECE_BYTES:
                self._flush()
                if not await self._settle():
                    return False
            self._batch.append(piece)
            self._batch_bytes += len(piece)
        if end:
            self._flush(end=True)
            if self._error is not None:
                raise self._error
            self._in_flight.clear()  # the connection repeats the messages until the server has them
            return self._is_wanted
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)
        return await self._settle()

    def _flush(self, *, end: bool = False, failure: h.HostCallFailure | None = None) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        first, *more = self._batch or [b""]
        params = h.HostAnswerParams(self._call_id, self._key, self._seq, first, tuple(more), end, failure)
        self._seq += 1 + len(more)
        self._batch.clear()
        self._batch_bytes = 0
        call: PendingCall[h.HostAnswerResult] | None = None

        def replied(result: h.HostAnswerResult | None, error: HoldfastError | None) -> None:
            if call is not None:
                self._replied(call, result, error)

        try:
            call = self._connection.send(h.HOST_ANSWER, params, replied)
        except HoldfastError as error:
            self._error = error
            return
        self._in_flight[call] = call.size
        self._bytes += call.size

    def _replied(
        self, call: PendingCall[h.HostAnswerResult], result: h.HostAnswerResult | None, error: HoldfastError | None
    ) -> None:
        self._bytes -= self._in_flight.pop(call, 0)
        self._error = self._error or error
        self._is_wanted = self._is_wanted and (result is None or result.wanted)
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def _settle(self) -> bool:
        """Wait for room; returns whether the caller reads on."""
        while self._error is None and self._is_wanted and self._is_full:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        if self._error is not None:
            raise self._error
        return self._is_wanted

    @property
    def _is_full(self) -> bool:
        return len(self._in_flight) >= WINDOW_MESSAGES or self._bytes >= WINDOW_BYTES

    async def stream(self, pieces: AsyncIterator[bytes]) -> None:
        try:
            async for piece in pieces:
                if not await self.send(piece):
                    return
            await self.send(b"", end=True)
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    def fail(self, error: HoldfastError) -> None:
        """Send the error after the pieces before it."""
        if self._batch:
            self._flush()
        self._flush(failure=h.HostCallFailure(error.code, error.message))
        self._in_flight.clear()

    def abandon(self) -> None:
        """Give up the missing replies of an answer without an end."""
        if self._flushing is not None:
            self._flushing.cancel()
        for call in tuple(self._in_flight):
            self._connection.give_up(call)
        self._in_flight.clear()


#: How long one request waits for pieces. It is repeated at once.
WAIT_MS: Final = 30_000


async def call_host(
    connection: ClientConnection, service: str, instance: str, method: str, body: bytes
) -> AsyncGenerator[bytes, None]:
    """Call a service of the host and yield the pieces of the answer; a slow consumer slows the host down.

    Open the connection with a `reconnect_deadline` of 0. Close the generator (`contextlib.aclosing`): leaving it
    before its end cancels the call.
    """
    # Chosen here, so that the call can be cancelled before the first reply.
    call_id = secrets.token_hex(16)
    is_over = False
    try:
        params = h.HostCallParams(service, instance, method, body, WAIT_MS, call_id)
        got = await connection.call(h.HOST_CALL, params)
        while True:
            for piece in got.pieces:
                yield piece
            if got.ended:
                is_over = True
                return
            further = h.HostReceiveParams(call_id, got.seq, WAIT_MS)
            got = await connection.call(h.HOST_RECEIVE, further)
    except HoldfastError:
        is_over = True
        raise
    finally:
        if not is_over:
            with contextlib.suppress(HoldfastError):  # a lost connection cancels it anyway
                await connection.call(h.HOST_CANCEL, h.HostCancelParams(call_id))


class CallbackCall:
    """`call_host` with callbacks: a task and its turns of the event loop would cost more than the relaying itself.

    `on_pieces` is called with the next pieces and whether they are the last; then call `receive` for more.
    `on_error` ends the call.
    """

    def __init__(
        self,
        connection: ClientConnection,
        on_pieces: Callable[[tuple[bytes, ...], bool], None],
        on_error: Callable[[HoldfastError], None],
    ) -> None:
        self._connection = connection
        self._on_pieces = on_pieces
        self._on_error = on_error
        # Chosen here, so that the call can be cancelled before the first reply.
        self._id = secrets.token_hex(16)
        self._seq = 0
        self._pending: PendingCall[h.HostAnswerPieces] | None = None
        self._is_over = False

    def start(self, service: str, instance: str, method: str, body: bytes) -> None:
        """Call the service; raises the error if the request cannot be sent."""
        params = h.HostCallParams(service, instance, method, body, WAIT_MS, self._id)
        self._pending = self._connection.send(h.HOST_CALL, params, self._replied)

    def receive(self) -> None:
        """Request further pieces, and acknowledge the last ones."""
        if self._is_over:
            return
        params = h.HostReceiveParams(self._id, self._seq, WAIT_MS)
        try:
            self._pending = self._connection.send(h.HOST_RECEIVE, params, self._replied)
        except HoldfastError as error:
            self._replied(None, error)

    def cancel(self) -> None:
        """Cancel the call, unless it has ended; no callback is called afterwards."""
        if self._is_over:
            return
        self._is_over = True
        if self._pending is not None:
            self._connection.give_up(self._pending)
        with contextlib.suppress(HoldfastError):  # a lost connection cancels the call anyway
            self._connection.send(h.HOST_CANCEL, h.HostCancelParams(self._id), _ignore)

    def _replied(self, got: h.HostAnswerPieces | None, error: HoldfastError | None) -> None:
        self._pending = None
        if got is None:
            self._is_over = True
            assert error is not None
            self._on_error(error)
            return
        self._seq = got.seq
        self._is_over = got.ended
        if got.pieces or got.ended:
            self._on_pieces(got.pieces, got.ended)
        else:
            self.receive()


def _ignore(result: object, error: HoldfastError | None) -> None:
    """The reply has no effect."""


#: An older name of `call_host`.
call_service = call_host
