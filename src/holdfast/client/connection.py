"""A connection that comes back by itself: calls and readers outlive the channel that carries them.

When the channel breaks, the connection dials again, presents its session, sends every unanswered call once more
(each may be repeated) and re-opens every reader behind its last event; callers see a pause. Touches the event loop
and whatever `dial` opens.
"""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, Generic, TypeVar

import holdfast
from holdfast.client.backoff import Backoff, Clock, Timer
from holdfast.client.clean_up import take_error
from holdfast.client.event_loops import check_loop
from holdfast.client.subscription import Subscription
from holdfast.errors import (
    CallerError,
    CommandNotFound,
    ConnectionLost,
    HandshakeFailed,
    HoldfastError,
    LimitReached,
    MessageTooLarge,
    MethodNotFound,
    error_from_wire,
)
from holdfast.transport.channel import Channel, Receiver
from holdfast.wire import messages as m, methods
from holdfast.wire.codec import Codec
from holdfast.wire.framing import Oversized
from holdfast.wire.methods import Method, Notification
from holdfast.wire.peer import Notice, OnReply, Peer

log = logging.getLogger(__name__)

P = TypeVar("P")
R = TypeVar("R")

#: Opens a channel for a receiver.
Dial = Callable[[Receiver], Awaitable[Channel]]

#: Bytes of one reader that may be on their way: a few frames of output, so that the wire never runs dry.
DEFAULT_WINDOW: Final = 4 * 1024 * 1024
#: The server's default limit; a larger message would be refused there without a name.
MAX_MESSAGE_BYTES: Final = 96 * 1024 * 1024
#: Channels that may end with a message that cannot be decoded while a call or a reader waits on them. The first may
#: be an accident of the channel; after the third the other side sends the same each time, and repeating is no use.
UNDECODABLE_CHANNELS: Final = 3
#: Silences after which a connection counts as broken.
MISSED_PINGS: Final = 2
#: How long a cancelled caller waits for what it had begun to be ended. A kill takes milliseconds; a server that
#: takes longer is stuck or half gone, and the work goes on without the caller.
CLEAN_UP_SECONDS: Final = 5.0
#: Such work that may be under way at a time. Over a connection that is down it waits for the connection; a program
#: that begins and cancels in a loop must not fill the memory meanwhile.
MAX_CLEAN_UPS: Final = 1_000
#: As a Python program names itself to a server, which lists its clients by it.
CLIENT_NAME: Final = "holdfast-python"


class Call(Generic[R]):
    """A request that waits for its reply, through as many channels as it takes."""

    __slots__ = ("future", "id", "method", "on_reply", "params", "renew", "sent", "size", "undecodable")

    def __init__(self, method: Method[Any, R], params: object, future: asyncio.Future[R]) -> None:
        #: Called before anybody who awaits the reply, in the same turn of the loop.
        self.on_reply: Callable[[R | None, HoldfastError | None], None] | None = None
        #: Gives the parameters for another channel, if they change with what has arrived.
        self.renew: Callable[[], object] | None = None
        self.id = 0
        self.method = method
        self.params = params
        self.future = future
        self.size = 0
        #: On how many channels: the reply of an earlier one may be lost, and what it asked for may be done.
        self.sent = 0
        #: On how many of them a message came that could not be decoded.
        self.undecodable = 0

    def replied(self, result: R, error: HoldfastError | None) -> None:
        if self.future.done():
            return
        if self.on_reply is not None:
            self.on_reply(result, error)
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class _Link:
    """One channel's life. A link that is no longer the connection's own is not listened to."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.channel: Channel | None = None
        self.opened_at = 0.0
        self.received = 0
        #: Whether a call was answered, or a reader got something new: more than the handshake.
        self.progressed = False
        #: Requests that need no repeating on another channel: pings, subscriptions.
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


class Connection:
    """Calls and readers over a channel. `open` it, then `call`; every call may be cancelled."""

    #: Whether readers poll, since nothing can be pushed.
    polls = False

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
        self.address = address
        self.session_id: str | None = None
        self.server: m.InitializeResult | None = None
        self._dial = dial
        self._client_name = client_name
        self._ping_interval = ping_interval
        self._handshake_timeout = handshake_timeout
        self._max_message_bytes = max_message_bytes
        self._encoding: m.Encoding = encoding
        self._loop = asyncio.get_running_loop()
        self.clock: Clock = clock or self._loop
        self._backoff = Backoff(self.clock, rng or random.Random(), reconnect_deadline)
        self._peer = Peer(name=address)
        self._calls: dict[int, Call[Any]] = {}
        self._readers: weakref.WeakValueDictionary[str, Subscription] = weakref.WeakValueDictionary()
        self._last_reader = 0
        self._link: _Link | None = None
        self._open = False
        self._handshake: asyncio.Future[None] | None = None
        self._failure: HoldfastError | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._keepalive: Timer | None = None
        self._cleaning: set[asyncio.Task[Any]] = set()

    # --- for callers -----------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the channel is up at this moment. Calls may be made either way."""
        return self._open

    async def open(self) -> None:
        """Connect for the first time. Unlike a reconnect this is tried once: a wrong address is told at once."""
        try:
            await self._establish()
        except HoldfastError:  # some are OSErrors, too
            raise
        except OSError as error:
            raise ConnectionLost(f"{self.address}: {error}") from error

    async def call(self, method: Method[P, R], params: P) -> R:
        """The reply to a request, however many channels it takes."""
        return await self.reply(self.begin(method, params))

    def begin(self, method: Method[P, R], params: P) -> Call[R]:
        """Send a request without waiting; await it with `reply`."""
        check_loop(self._loop)
        if self._failure is not None:
            raise self._failed()
        call = Call(method, params, self._loop.create_future())
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

    def _replied(self, call: Call[R], result: R, error: HoldfastError | None) -> None:
        if self._link is not None:
            self._link.progressed = True
        call.replied(result, error)

    async def reply(self, call: Call[R]) -> R:
        try:
            return await call.future
        except asyncio.CancelledError:
            self.give_up(call)
            raise
        finally:
            # A reply took the entry out of the peer; a cancelled caller leaves it behind.
            self._calls.pop(call.id, None)
            self._peer.give_up(call.id)

    def give_up(self, call: Call[R]) -> None:
        """Nobody waits for the reply any more. Else the server would go on until it has one."""
        self.notify(methods.REQUEST_CANCEL, m.CancelParams(call.id))
        self._calls.pop(call.id, None)
        self._peer.give_up(call.id)

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Run `work`, which calls through this connection, and return whether it has ended.

        It is waited for while the connection is up, for `CLEAN_UP_SECONDS` at most. Else, and if the caller is
        cancelled, it goes on in the background until the connection is closed or lost for good.
        """
        if len(self._cleaning) >= MAX_CLEAN_UPS:
            work.close()
            raise LimitReached(f"{self.address}: {MAX_CLEAN_UPS} commands and files wait to be cleaned up")
        task = self._loop.create_task(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaned)
        if self._may_answer:
            watched: set[asyncio.Future[Any]] = {task} if self._link is None else {task, self._link.dropped}
            await asyncio.wait(watched, timeout=CLEAN_UP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True

    @property
    def _may_answer(self) -> bool:
        """Whether a call that is made now may be answered soon."""
        return self._open

    def _cleaned(self, task: asyncio.Task[Any]) -> None:
        self._cleaning.discard(task)
        take_error(task)

    async def _end_clean_up(self) -> None:
        """After `_fail`, whose error their calls get: on return none of them is left."""
        for task in list(self._cleaning):
            task.cancel()
        if self._cleaning:
            await asyncio.wait(set(self._cleaning))

    def notify(self, notification: Notification[P], params: P) -> None:
        """Tell the server something, if the channel is up; what it must know it is told again on reconnect."""
        if self._open:
            self._channel().send(self._peer.codec.notification(notification.name, params))

    def reader(self, process_id: str, after_seq: int = 0, window: int | None = None) -> Subscription:
        """A reader of a process; it subscribes when it is first waited on."""
        check_loop(self._loop)
        self._last_reader += 1
        return Subscription(self, str(self._last_reader), process_id, after_seq, window or DEFAULT_WINDOW)

    async def aclose(self) -> None:
        """Close. Whoever still waits gets `ConnectionLost`. A command that carried us has ended on return."""
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait([self._reconnecting])
        if self._failure is None:
            self._fail(ConnectionLost(f"{self.address}: the connection was closed"))
        await self._end_clean_up()
        link = self._link
        if link is not None:
            self._drop_link(link)
        if link is not None and link.channel is not None:
            link.channel.close()
            await asyncio.wait([link.gone])

    # --- for readers -----------------------------------------------------------------------------------------

    def attach(self, reader: Subscription, start: Call[Any] | None = None) -> None:
        """From now on `reader` gets what arrives for it; `start` is the call that opens it, if one does."""
        if self._failure is not None:
            reader.fail(self._failed())
            return
        self._readers[reader.id] = reader
        if start is not None:
            reader.opened_by(start)
        elif self._open:
            reader.connected()

    def detach(self, id: str) -> None:
        """The reader wants no more."""
        self._readers.pop(id, None)
        self._pass(methods.PROCESS_UNSUBSCRIBE, m.UnsubscribeParams(id), _ignore)

    def ended(self, id: str) -> None:
        """The reader has had its last event; the server knows."""
        self._readers.pop(id, None)

    def subscribe(self, params: m.SubscribeParams, on_reply: OnReply) -> None:
        self._pass(methods.PROCESS_SUBSCRIBE, params, on_reply)

    def credit(self, id: str, seq: int, count: int) -> None:
        self.notify(methods.PROCESS_CREDIT, m.CreditParams(id, seq, count))

    def _pass(self, method: Method[P, R], params: P, on_reply: OnReply) -> None:
        """Send a request that is not repeated on another channel."""
        link = self._link
        if not self._open or link is None:
            return

        def replied(result: object, error: HoldfastError | None) -> None:
            link.passing.discard(id)
            on_reply(result, error)

        id, message = self._peer.call(method, params, replied)
        link.passing.add(id)
        self._channel().send(message)

    # --- connecting ------------------------------------------------------------------------------------------

    def _channel(self) -> Channel:
        assert self._link is not None
        assert self._link.channel is not None
        return self._link.channel

    async def _establish(self) -> None:
        """Dial and shake hands; on return the connection is open and everything unanswered is on its way."""
        link = _Link(self)
        self._handshake = handshake = self._loop.create_future()
        channel = await self._dial(link)
        link.channel = channel
        timer: Timer | None = None
        try:
            if link.gone.done():
                raise ConnectionLost(f"{self.address}: {link.error or 'closed before the handshake'}")
            self._link = link
            self._peer.codec = Codec("json")
            params = m.InitializeParams(self._client_name, self.session_id, self._encoding, holdfast.__version__)
            id, message = self._peer.call(methods.INITIALIZE, params, self._initialized)
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
        """The reply to `initialize`. Runs before the next message is looked at, which is in the new encoding."""
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
            # A session that nothing runs in is forgotten with its connection: no news, unless somebody reads.
            level = logging.WARNING if self._readers else logging.INFO
            log.log(level, "%s: the server no longer knows our session", self.address)
        self.session_id = result.session_id
        self.server = result
        if result.max_message_bytes is not None:
            self._max_message_bytes = min(self._max_message_bytes, result.max_message_bytes)
        self._open = True
        link.opened_at = self.clock.time()
        link.received = 0
        channel.send(self._peer.codec.notification(methods.INITIALIZED.name, m.Empty()))
        for call in list(self._calls.values()):
            if not call.future.done():
                call.sent += 1
                params = call.params if call.renew is None else call.renew()
                channel.send(self._peer.codec.request(call.id, call.method.name, params))
        for reader in list(self._readers.values()):
            reader.connected()
        self._arm_keepalive(link)
        handshake.set_result(None)

    # --- what arrives ----------------------------------------------------------------------------------------

    def take(self, link: _Link, message: bytes | memoryview | Oversized) -> None:
        """One message from a link."""
        if link is not self._link:
            return
        link.received += 1
        if isinstance(message, Oversized):
            self._too_large(
                f"{self.address}: a reply of {message.size} bytes is over our {message.limit}", all=True
            )
            return
        try:
            item = self._peer.receive(message)
            if item is None:
                return
            if isinstance(item, Notice):
                self._noticed(item)
            else:
                error = MethodNotFound(f"{item.method}: a client has no methods")
                self._channel().send(self._peer.codec.failure(item.id, error))
        except HoldfastError as error:
            text = f"{self.address}: what arrived makes no sense: {error}"
            self._count_undecodable(text)
            self._break(link, HandshakeFailed(text))

    def _noticed(self, notice: Notice) -> None:
        codec, name = self._peer.codec, notice.method
        if name == methods.PROCESS_OUTPUT.name:
            output = codec.decode_body(notice.params, m.OutputParams, name)
            if (reader := self._reader(output.subscription)) is not None:
                self._advanced(reader, reader.output(output))
        elif name == methods.PROCESS_EXITED.name:
            exited = codec.decode_body(notice.params, m.ExitedParams, name)
            if (reader := self._reader(exited.subscription)) is not None:
                self._advanced(reader, reader.exited(exited))
        elif name == methods.PROCESS_CLOSED.name:
            closed = codec.decode_body(notice.params, m.ClosedParams, name)
            if (reader := self._reader(closed.subscription)) is not None:
                self._advanced(reader, reader.closed(closed))

    def _advanced(self, reader: Subscription, is_new: bool) -> None:
        if is_new:
            reader.undecodable = 0
            if self._link is not None:
                self._link.progressed = True

    def _count_undecodable(self, text: str) -> None:
        """Fail the calls and readers for which one channel after another ended with such a message.

        Its id cannot be read, so it may belong to any of them.
        """
        for call in list(self._calls.values()):
            call.undecodable += 1
            if call.undecodable >= UNDECODABLE_CHANNELS:
                call.replied(None, HandshakeFailed(f"{text} ({call.method.name} was sent {call.sent} times)"))
        for reader in list(self._readers.values()):
            reader.undecodable += 1
            if reader.undecodable >= UNDECODABLE_CHANNELS:
                times = f"process {reader.process_id!r} was read {UNDECODABLE_CHANNELS} times"
                reader.fail(HandshakeFailed(f"{text} ({times})"))
                self._readers.pop(reader.id, None)

    def _reader(self, id: str | None) -> Subscription | None:
        return None if id is None else self._readers.get(id)

    def _too_large(self, text: str, *, all: bool = False) -> None:
        """A message was refused for its size, and its id with it: the largest request is the one."""
        waiting = sorted(self._calls.values(), key=lambda call: call.size)
        for call in waiting if all else waiting[-1:]:
            call.replied(None, MessageTooLarge(f"{call.method.name}: {text}"))

    # --- when it breaks --------------------------------------------------------------------------------------

    def link_lost(self, link: _Link, error: Exception | None) -> None:
        """The link's channel is gone."""
        if link is self._link:
            self._lost(link, error or ConnectionLost(f"{self.address}: the server closed the connection"))

    def _break(self, link: _Link, error: Exception) -> None:
        """Give a channel up that is of no more use."""
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
        if self._failure is None:
            self._reconnecting = self._loop.create_task(self._reconnect(error))

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
            self._fail(cause)
            return
        deadline = self._backoff.deadline
        waited = f" and did not come back in {deadline:g} s" if deadline > 0 else ""
        self._fail(ConnectionLost(f"{self.address}: the connection was lost{waited}: {cause}"))

    async def _sleep(self, delay: float) -> None:
        if delay > 0:
            waiter = self._loop.create_future()
            timer = self.clock.call_later(delay, _set, waiter)
            try:
                await waiter
            finally:
                timer.cancel()

    def _fail(self, error: HoldfastError) -> None:
        """No way back: everyone who waits is told."""
        self._failure = error
        for call in list(self._calls.values()):
            call.replied(None, self._failed())
        self._calls.clear()
        for reader in list(self._readers.values()):
            reader.fail(self._failed())
        self._readers.clear()

    def _failed(self) -> HoldfastError:
        """The failure, as a new object for each who raises it: they would share one traceback otherwise."""
        assert self._failure is not None
        return error_from_wire(self._failure.code, self._failure.message, self._failure.details)

    # --- keepalive -------------------------------------------------------------------------------------------

    def _arm_keepalive(self, link: _Link) -> None:
        if self._ping_interval > 0:
            self._keepalive = self.clock.call_later(self._ping_interval, self._tick, link)

    def _tick(self, link: _Link) -> None:
        """Once an interval: all is well if something came since; else ask, and give up after two silences."""
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
            self._pass(methods.PING, m.Empty(), _ignore)
        self._arm_keepalive(link)


def _is_final(error: Exception) -> bool:
    """Whether dialling again cannot help: we were refused, or there is nothing to dial."""
    if isinstance(error, MessageTooLarge):
        return False
    if isinstance(error, CallerError | CommandNotFound):
        return True
    return isinstance(error, HoldfastError) and bool(error.details.get("final"))


def _ignore(result: object, error: HoldfastError | None) -> None:
    """For requests whose reply changes nothing."""


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
