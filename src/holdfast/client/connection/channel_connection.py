"""A connection over a channel that reconnects by itself: calls and readers outlive the channel.

When the channel breaks, the connection dials again, presents its session id, repeats every unanswered call and
subscribes every reader after its last event; callers see a pause. Touches the event loop and what `dial` opens.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

import holdfast
from holdfast.client.connection.connection import CLIENT_NAME, ClientConnection, Clock, PendingCall, Timer
from holdfast.client.connection.subscription import Subscription
from holdfast.errors import (
    CallerError,
    CommandNotFound,
    ConnectionLost,
    HandshakeFailed,
    HoldfastError,
    MessageTooLarge,
    MethodNotFound,
)
from holdfast.transport.channel import Channel, Receiver
from holdfast.transport.multiplexer import StreamMultiplexer
from holdfast.transport.stream import StreamChannel
from holdfast.types import MAX_MESSAGE_BYTES
from holdfast.wire import messages as m
from holdfast.wire.codec import Codec
from holdfast.wire.framing import Oversized
from holdfast.wire.methods import Notification, WireMethod
from holdfast.wire.peer import IncomingNotification, OnReply, Peer

log = logging.getLogger(__name__)

P = TypeVar("P")
R = TypeVar("R")

#: Opens a channel for a receiver.
Dial = Callable[[Receiver], Awaitable[Channel]]

#: Channels that may end with an undecodable message while a call or a reader waits on them. The first may be an
#: accident of the channel; after the third the server evidently sends the same each time.
UNDECODABLE_CHANNELS: Final = 3
#: Unanswered pings after which a channel counts as broken.
MISSED_PINGS: Final = 2
#: Waits between attempts double from the first to the last of these.
FIRST_SECONDS: Final = 0.05
LAST_SECONDS: Final = 5.0
#: A channel that was open this long counts as useful, even if nothing arrived on it.
STEADY_SECONDS: Final = 5.0
#: A channel that made progress and broke resets the waits; at most so many times at once, then once in so many
#: seconds. A flapping network costs no waits, and a server that answers and closes costs a few dials a second.
RESETS: Final = 100
SECONDS_A_RESET: Final = 0.5
#: Without a reset the next wait is that of this attempt: 0.8 s to 1.6 s.
ATTEMPT_WITHOUT_RESET: Final = 6


class Backoff:
    """The waits between dials since the last useful channel, and the deadline.

    A channel without progress beyond the handshake counts as a failed attempt. Otherwise a server that accepts and
    closes, or sends undecodable messages, would be dialled in an endless loop without waits.
    """

    def __init__(self, clock: Clock, rng: random.Random, deadline: float) -> None:
        self._clock = clock
        self._random = rng
        self.deadline = deadline
        self._attempts = 0
        self._down_since: float | None = None
        self._resets = float(RESETS)
        self._reset_at = clock.time()

    def broke(self, *, opened_at: float, progressed: bool) -> None:
        """Count a broken channel that was open since `opened_at`. Progress: an answered call, or an event."""
        now = self._clock.time()
        if not (progressed or now - opened_at >= STEADY_SECONDS or self._down_since is None):
            return
        self._down_since = now
        self._resets = min(RESETS, self._resets + (now - self._reset_at) / SECONDS_A_RESET)
        self._reset_at = now
        if self._resets >= 1:
            self._resets -= 1
            self._attempts = 0
        else:
            self._attempts = max(self._attempts, ATTEMPT_WITHOUT_RESET)

    def next_wait(self) -> float | None:
        """Seconds to wait before the next attempt; None if that would be after the deadline.

        No wait before the first, then doubling; in part random, so that the clients of one server spread out.
        """
        wait = 0.0
        if self._attempts:
            longest = min(LAST_SECONDS, FIRST_SECONDS * 2.0 ** min(self._attempts - 1, 16))
            wait = longest * (0.5 + self._random.random() / 2)
        self._attempts += 1
        if self._down_since is None or self.deadline <= 0:
            return None
        return wait if self._clock.time() + wait <= self._down_since + self.deadline else None


class _Link:
    """The state of one channel. Messages of a link that the connection has dropped are ignored."""

    def __init__(self, connection: ChannelConnection) -> None:
        self._connection = connection
        self.channel: Channel | None = None
        #: Set after the handshake.
        self.streams: StreamMultiplexer | None = None
        self.opened_at = 0.0
        self.received = 0
        #: Whether a call was answered or a reader got a new event, beyond the handshake.
        self.progressed = False
        #: Ids of requests that are not repeated on another channel: pings, subscriptions.
        self.passing: set[int] = set()
        self.missed_pings = 0
        self.received_at_tick = 0
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None
        #: Done when the connection no longer uses this link, which may be before its channel has closed.
        self.dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def message_received(self, message: bytes | memoryview | Oversized) -> None:
        self._connection.take(self, message)

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error
        self.gone.set_result(None)
        self._connection.link_lost(self, error)


class ChannelConnection(ClientConnection):
    """Calls and readers over a channel; output is pushed."""

    def __init__(
        self,
        dial: Dial,
        *,
        address: str,
        client_name: str = CLIENT_NAME,
        reconnect_deadline: float = 60.0,
        ping_interval: float = 15.0,
        handshake_timeout: float = 10.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        encoding: m.Encoding = "msgpack",
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(address, clock)
        self.session_id: str | None = None
        self.server: m.InitializeResult | None = None
        self._dial = dial
        self._client_name = client_name
        self._ping_interval = ping_interval
        self._handshake_timeout = handshake_timeout
        self._max_message_bytes = max_message_bytes
        self._encoding: m.Encoding = encoding
        self._backoff = Backoff(self.clock, rng or random.Random(), reconnect_deadline)
        self._peer = Peer(name=address)
        self._calls: dict[int, PendingCall[Any]] = {}
        self._link: _Link | None = None
        self._open = False
        self._handshake: asyncio.Future[None] | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._keepalive: Timer | None = None

    # --- for callers -----------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._open

    async def open(self) -> None:
        try:
            await self._establish()
        except HoldfastError:  # some are also OSErrors
            raise
        except OSError as error:
            raise ConnectionLost(f"{self.address}: {error}") from error

    def begin(self, method: WireMethod[P, R], params: P) -> PendingCall[R]:
        call = self.new_call(method, params)
        call.id, message = self._peer.call(method, params, partial(self._replied, call))
        call.size = len(message)
        if call.size > self._max_message_bytes:
            self._peer.give_up(call.id)
            raise MessageTooLarge(
                f"{method.name}: a message of {call.size} bytes is over the limit of {self._max_message_bytes}"
            )
        self._calls[call.id] = call
        if self._open:
            call.sent += 1
            self._channel().send(message)
        return call

    def _replied(self, call: PendingCall[R], result: R, error: HoldfastError | None) -> None:
        if self._link is not None:
            self._link.progressed = True
        call.replied(result, None if error is None else self._explained(call.method, error))

    def _explained(self, method: WireMethod[Any, Any], error: HoldfastError | None) -> HoldfastError | None:
        """Replace the error of a server that lacks a method of this client: the server is an earlier version."""
        # A function of the host that is called through the server may raise the same class.
        missing = f"no method {method.name!r}"
        if not isinstance(error, MethodNotFound) or error.message != missing or self.server is None:
            return error
        return MethodNotFound(
            f"{self.address}: {missing} in its server, holdfast {self.server.server_version}, which is older than "
            "this client: see `holdfast upgrade`"
        )

    def give_up(self, call: PendingCall[Any]) -> None:
        self.notify(m.REQUEST_CANCEL, m.CancelParams(call.id))
        self.forget(call)

    def forget(self, call: PendingCall[Any]) -> None:
        super().forget(call)
        self._calls.pop(call.id, None)
        self._peer.give_up(call.id)

    def broken(self) -> tuple[asyncio.Future[Any], ...]:
        return () if self._link is None else (self._link.dropped,)

    def notify(self, notification: Notification[P], params: P) -> None:
        if self._open:
            self._channel().send(self._peer.codec.notification(notification.name, params))

    async def aclose(self) -> None:
        """Close. A command that carried the channel has ended on return."""
        await self.finish_clean_up()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait([self._reconnecting])
        self.fail()
        await self.end_clean_up()
        link = self._link
        if link is not None:
            self._drop_link(link)
        if link is not None and link.channel is not None:
            link.channel.close()
            await asyncio.wait([link.gone])

    # --- for readers -----------------------------------------------------------------------------------------

    def attach(self, reader: Subscription, start: PendingCall[Any] | None = None) -> None:
        if self.failure is not None:
            reader.fail(self.new_failure())
            return
        self.readers[reader.id] = reader
        if start is not None:
            reader.opened_by(start)
        elif self._open:
            reader.connected()

    def detach(self, id: str) -> None:
        self.readers.pop(id, None)
        self._pass(m.PROCESS_UNSUBSCRIBE, m.UnsubscribeParams(id), _ignore)

    def subscribe(self, params: m.SubscribeParams, on_reply: OnReply) -> None:
        self._pass(m.PROCESS_SUBSCRIBE, params, on_reply)

    def credit(self, id: str, seq: int, count: int) -> None:
        self.notify(m.PROCESS_CREDIT, m.CreditParams(id, seq, count))

    def _pass(self, method: WireMethod[P, R], params: P, on_reply: OnReply) -> None:
        """Send a request that is not repeated on another channel."""
        link = self._link
        if not self._open or link is None:
            return

        def replied(result: object, error: HoldfastError | None) -> None:
            link.passing.discard(id)
            on_reply(result, self._explained(method, error))

        id, message = self._peer.call(method, params, replied)
        link.passing.add(id)
        self._channel().send(message)

    # --- for streams -----------------------------------------------------------------------------------------

    @property
    def streams(self) -> StreamMultiplexer:
        link = self._link
        if not self._open or link is None or link.streams is None:
            raise self.new_failure() if self.failure else ConnectionLost(f"{self.address}: not connected now")
        return link.streams

    @property
    def unix_path(self) -> str | None:
        channel = None if self._link is None else self._link.channel
        return channel.path if isinstance(channel, StreamChannel) else None

    def call_once(self, method: WireMethod[P, R], params: P, on_reply: OnReply) -> None:
        self._pass(method, params, on_reply)

    # --- connecting ------------------------------------------------------------------------------------------

    def _channel(self) -> Channel:
        assert self._link is not None
        assert self._link.channel is not None
        return self._link.channel

    async def _establish(self) -> None:
        """Dial and shake hands; on return the connection is open and every unanswered call is sent."""
        link = _Link(self)
        self._handshake = handshake = self.loop.create_future()
        channel = await self._dial(link)
        link.channel = channel
        timer: Timer | None = None
        try:
            if link.gone.done():
                raise ConnectionLost(f"{self.address}: {link.error or 'closed before the handshake'}")
            self._link = link
            self._peer.codec = Codec("json")
            params = m.InitializeParams(self._client_name, self.session_id, self._encoding, holdfast.__version__)
            id, message = self._peer.call(m.INITIALIZE, params, self._initialized)
            link.passing.add(id)
            timer = self.clock.call_later(self._handshake_timeout, self._handshake_late, handshake)
            channel.send(message)
            await handshake
        except BaseException:
            if self._link is link:
                self._drop_link(link)
            channel.close()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _handshake_late(self, handshake: asyncio.Future[None]) -> None:
        if not handshake.done():
            text = f"{self.address}: no answer to initialize in {self._handshake_timeout:g} s"
            handshake.set_exception(HandshakeFailed(text))

    def _initialized(self, result: m.InitializeResult, error: HoldfastError | None) -> None:
        """Handle the reply to `initialize`, before the next message is decoded, which is in the new encoding."""
        handshake, link = self._handshake, self._link
        if handshake is None or handshake.done() or link is None:
            return
        if error is not None:
            handshake.set_exception(error)
            return
        channel = self._channel()
        self._peer.codec.encoding = result.encoding
        if result.encoding == "msgpack":
            channel.use_lengths()
        if self.session_id is not None and not result.resumed:
            # The server forgets a client without processes at once, so this matters only to readers.
            level = logging.WARNING if self.readers else logging.INFO
            log.log(level, "%s: the server no longer has this session", self.address)
        self.session_id = result.session_id
        self.server = result
        if result.max_message_bytes is not None:
            self._max_message_bytes = min(self._max_message_bytes, result.max_message_bytes)
        self._open = True
        link.opened_at = self.clock.time()
        link.received = 0
        channel.send(self._peer.codec.notification(m.INITIALIZED.name, m.Empty()))
        for call in list(self._calls.values()):
            if not call.future.done():
                call.sent += 1
                params = call.params if call.renew is None else call.renew()
                channel.send(self._peer.codec.request(call.id, call.method.name, params))
        for reader in list(self.readers.values()):
            reader.connected()
        link.streams = StreamMultiplexer(channel, self._peer.codec)
        channel.set_source(link.streams)
        for connected in list(self.on_connected):
            connected()
        self._arm_keepalive(link)
        handshake.set_result(None)

    # --- incoming messages -----------------------------------------------------------------------------------

    def take(self, link: _Link, message: bytes | memoryview | Oversized) -> None:
        """Handle one message from a link."""
        if link is not self._link:
            return
        link.received += 1
        if isinstance(message, Oversized):
            self._too_large(
                f"{self.address}: a reply of {message.size} bytes is over the limit of {message.limit}", all=True
            )
            return
        try:
            item = self._peer.receive(message)
            if item is None:
                return
            if isinstance(item, IncomingNotification):
                self._noticed(item)
            else:
                error = MethodNotFound(f"{item.method}: a client has no methods")
                self._channel().send(self._peer.codec.failure(item.id, error))
        except HoldfastError as error:
            text = f"{self.address}: received a message that is not valid: {error}"
            self._count_undecodable(text)
            self._break(link, HandshakeFailed(text))

    def _noticed(self, notice: IncomingNotification) -> None:
        codec, name = self._peer.codec, notice.method
        if name == m.PROCESS_OUTPUT.name:
            output = codec.decode_body(notice.params, m.OutputParams, name)
            if (reader := self.reader_of(output.subscription)) is not None:
                self._advanced(reader, reader.output(output))
        elif name == m.PROCESS_EXITED.name:
            exited = codec.decode_body(notice.params, m.ExitedParams, name)
            if (reader := self.reader_of(exited.subscription)) is not None:
                self._advanced(reader, reader.exited(exited))
        elif name == m.PROCESS_CLOSED.name:
            closed = codec.decode_body(notice.params, m.ClosedParams, name)
            if (reader := self.reader_of(closed.subscription)) is not None:
                self._advanced(reader, reader.closed(closed))
        elif (link := self._link) is not None and link.streams is not None:
            link.progressed = link.streams.receive(notice) or link.progressed

    def _advanced(self, reader: Subscription, is_new: bool) -> None:
        if is_new:
            reader.undecodable = 0
            if self._link is not None:
                self._link.progressed = True

    def _count_undecodable(self, text: str) -> None:
        """Fail the calls and readers that met an undecodable message on `UNDECODABLE_CHANNELS` channels.

        Its id cannot be read, so the message may belong to any of them.
        """
        for call in list(self._calls.values()):
            call.undecodable += 1
            if call.undecodable >= UNDECODABLE_CHANNELS:
                call.replied(None, HandshakeFailed(f"{text} ({call.method.name} was sent {call.sent} times)"))
        for reader in list(self.readers.values()):
            reader.undecodable += 1
            if reader.undecodable >= UNDECODABLE_CHANNELS:
                times = f"process {reader.process_id!r} was read {UNDECODABLE_CHANNELS} times"
                reader.fail(HandshakeFailed(f"{text} ({times})"))
                self.readers.pop(reader.id, None)

    def _too_large(self, text: str, *, all: bool = False) -> None:
        """Fail the largest pending call, or all: a message was refused for its size, and its id is not known."""
        waiting = sorted(self._calls.values(), key=lambda call: call.size)
        for call in waiting if all else waiting[-1:]:
            call.replied(None, MessageTooLarge(f"{call.method.name}: {text}"))

    # --- reconnecting ----------------------------------------------------------------------------------------

    def link_lost(self, link: _Link, error: Exception | None) -> None:
        """Handle the loss of a link's channel."""
        if link is self._link:
            self._lost(link, error or ConnectionLost(f"{self.address}: the server closed the connection"))

    def _break(self, link: _Link, error: Exception) -> None:
        """Close a channel that is no longer usable."""
        if link is self._link:
            channel = self._channel()
            self._lost(link, error)
            channel.close()

    def _lost(self, link: _Link, error: Exception) -> None:
        was_open = self._open
        self._drop_link(link)
        if isinstance(error, MessageTooLarge):
            self._too_large(str(error))
        elif isinstance(error, ConnectionLost) and error.details.get("oversized"):
            self._too_large(str(error), all=True)
        if not was_open:
            if self._handshake is not None and not self._handshake.done():
                self._handshake.set_exception(error)
            return
        self._backoff.broke(opened_at=link.opened_at, progressed=link.progressed)
        if self.failure is None:
            self._reconnecting = self.loop.create_task(self._reconnect(error))

    def _drop_link(self, link: _Link) -> None:
        self._link = None
        self._open = False
        if not link.dropped.done():
            link.dropped.set_result(None)
        if self._keepalive is not None:
            self._keepalive.cancel()
            self._keepalive = None
        for id in link.passing:
            self._peer.give_up(id)
        if link.streams is not None:
            link.streams.close()

    async def _reconnect(self, cause: Exception) -> None:
        while not _is_final(cause):
            wait = self._backoff.next_wait()
            if wait is None:
                break
            await self._sleep(wait)
            try:
                await self._establish()
                return
            except (HoldfastError, OSError) as error:
                cause = error
        if isinstance(cause, HoldfastError) and _is_final(cause):
            self.fail(cause)
            return
        deadline = self._backoff.deadline
        waited = f" and not restored in {deadline:g} s" if deadline > 0 else ""
        self.fail(ConnectionLost(f"{self.address}: the connection was lost{waited}: {cause}"))

    async def _sleep(self, delay: float) -> None:
        if delay > 0:
            waiter = self.loop.create_future()
            timer = self.clock.call_later(delay, _set, waiter)
            try:
                await waiter
            finally:
                timer.cancel()

    def fail(self, error: HoldfastError | None = None) -> None:
        super().fail(error)
        for call in list(self._calls.values()):
            call.replied(None, self.new_failure())
        self._calls.clear()

    # --- keepalive -------------------------------------------------------------------------------------------

    def _arm_keepalive(self, link: _Link) -> None:
        if self._ping_interval > 0:
            self._keepalive = self.clock.call_later(self._ping_interval, self._tick, link)

    def _tick(self, link: _Link) -> None:
        """Send a ping if nothing arrived in the last interval; give the channel up after `MISSED_PINGS`."""
        if link is not self._link or not self._open:
            return
        if link.received != link.received_at_tick:
            link.received_at_tick = link.received
            link.missed_pings = 0
        elif link.missed_pings >= MISSED_PINGS:
            self._break(link, ConnectionLost(f"{self.address}: no answer to {MISSED_PINGS} pings"))
            return
        else:
            link.missed_pings += 1
            self._pass(m.PING, m.Empty(), _ignore)
        self._arm_keepalive(link)


def _is_final(error: Exception) -> bool:
    """Whether dialling again cannot help: the client was refused, or there is nothing to dial."""
    if isinstance(error, MessageTooLarge):
        return False
    if isinstance(error, CallerError | CommandNotFound):
        return True
    return isinstance(error, HoldfastError) and bool(error.details.get("final"))


def _ignore(result: object, error: HoldfastError | None) -> None:
    """The `on_reply` of requests without an effect of the reply."""


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
