"""The interface of a connection to a server: calls, readers of processes, and clean-up for cancelled callers.

`ChannelConnection` carries them over a channel, `sandboxes.polling.PolledConnection` over single commands. Both
repeat unanswered calls (each may be repeated) and deliver events to readers. Touches only the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, Protocol, TypeVar

from holdfast.client.connection.clean_up import take_error
from holdfast.client.connection.subscription import Subscription
from holdfast.errors import (
    ConnectionLost,
    HoldfastError,
    InvalidParams,
    InvalidRequest,
    LimitReached,
    error_from_wire,
)
from holdfast.transport.multiplexer import StreamMultiplexer
from holdfast.wire import messages as m
from holdfast.wire.methods import Notification, WireMethod
from holdfast.wire.peer import OnReply

log = logging.getLogger(__name__)

P = TypeVar("P")
R = TypeVar("R")

#: The `client_name` of Python programs, under which a server lists them.
CLIENT_NAME: Final = "holdfast-python"
#: Bytes of one reader that may be in flight: a few frames of output, so that the wire never runs dry.
DEFAULT_WINDOW: Final = 4 * 1024 * 1024
#: How long a cancelled caller waits for its clean-up. A kill takes milliseconds; a slower server is stuck or
#: half-open, and the clean-up continues without the caller.
CLEAN_UP_SECONDS: Final = 5.0
#: Clean-ups at a time. While the connection is down they wait for it, and a program that starts and cancels
#: commands in a loop must not fill the memory.
MAX_CLEAN_UPS: Final = 1_000


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """The time functions that a connection needs: an event loop, or `holdfast.testing.FakeClock`."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer: ...


class PendingCall(Generic[R]):
    """A request that waits for its reply, over as many channels as that takes."""

    __slots__ = ("future", "id", "method", "on_reply", "params", "renew", "sent", "size", "undecodable")

    def __init__(self, method: WireMethod[Any, R], params: object, future: asyncio.Future[R]) -> None:
        #: Called before the tasks that await the reply, in the same turn of the loop.
        self.on_reply: Callable[[R | None, HoldfastError | None], None] | None = None
        #: Returns the parameters for another channel, if they change with the received output.
        self.renew: Callable[[], object] | None = None
        self.id = 0
        self.method = method
        self.params = params
        self.future = future
        self.size = 0
        #: Number of channels it was sent on. If more than one, the request may have been executed before.
        self.sent = 0
        #: Number of those channels on which a message could not be decoded.
        self.undecodable = 0

    def replied(self, result: R, error: HoldfastError | None) -> None:
        if self.future.done():
            return
        if self.on_reply is not None:
            self.on_reply(result, error)
            if self.future.done():
                return  # of a call by `send`
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class ClientConnection(ABC):
    """Calls and readers. `open` it, then `call`; every call may be cancelled.

    A subclass sends calls (`begin`, `give_up`), feeds the readers in `readers`, and calls `fail` when it is closed
    or lost for good.
    """

    polls = False  #: Whether readers poll, because nothing can be pushed.

    def __init__(self, address: str, clock: Clock | None = None) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.clock: Clock = clock or self.loop
        #: The attached readers by id. Weak, so that dropping a reader unsubscribes it.
        self.readers: weakref.WeakValueDictionary[str, Subscription] = weakref.WeakValueDictionary()
        #: Make the readers whose output may be pushed and of which no event has arrived, by id.
        self.expected: dict[str, Callable[[], Subscription]] = {}
        #: Why the connection is lost for good.
        self.failure: HoldfastError | None = None
        self._failed = asyncio.Event()
        #: Called after each handshake, for state that does not survive a broken channel.
        self.on_connected: set[Callable[[], None]] = set()
        self._last_reader = 0
        self._cleaning: set[asyncio.Task[Any]] = set()

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether a channel is up, on which the server sees cancelled requests. Calls may be made either way."""

    @property
    def may_answer(self) -> bool:
        """Whether a call that is made now may be answered soon."""
        return self.connected

    @abstractmethod
    async def open(self) -> None:
        """Connect. Unlike a reconnect this is tried once, so that a wrong address is reported at once."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close. Pending calls and readers get `ConnectionLost`."""

    # --- calls -----------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, method: WireMethod[P, R], params: P) -> PendingCall[R]:
        """Send a request without waiting; await it with `reply`."""

    @abstractmethod
    def give_up(self, call: PendingCall[Any]) -> None:
        """Drop a call that no caller awaits, and cancel it on the server."""

    def forget(self, call: PendingCall[Any]) -> None:
        """Release the state of a call after its reply."""
        call.on_reply = call.renew = None

    @abstractmethod
    def notify(self, notification: Notification[P], params: P) -> None:
        """Send a notification if a channel is up. It is not repeated after a reconnect."""

    def send(
        self, method: WireMethod[P, R], params: P, on_reply: Callable[[R | None, HoldfastError | None], None]
    ) -> PendingCall[R]:
        """Send a request and pass its reply to `on_reply` alone, in the turn of the loop that reads it.

        Repeated like every call. Not to be awaited; `give_up` cancels it.
        """
        call = self.begin(method, params)

        def replied(result: R | None, error: HoldfastError | None) -> None:
            call.future.cancel()  # an error that no task retrieves would be logged
            self.forget(call)
            on_reply(result, error)

        call.on_reply = replied
        return call

    async def call(self, method: WireMethod[P, R], params: P) -> R:
        """The reply to a request, over as many channels as that takes."""
        return await self.reply(self.begin(method, params))

    async def reply(self, call: PendingCall[R]) -> R:
        """Wait for the reply to a call; a cancelled caller gives the call up."""
        try:
            return await call.future
        except asyncio.CancelledError:
            self.give_up(call)
            raise
        finally:
            self.forget(call)

    def new_call(self, method: WireMethod[P, R], params: P) -> PendingCall[R]:
        """A call that was not sent yet; raises if this connection cannot be used."""
        check_loop(self.loop)
        if self.failure is not None:
            raise self.new_failure()
        return PendingCall(method, params, self.loop.create_future())

    # --- readers ---------------------------------------------------------------------------------------------

    def reader(self, process_id: str, after_seq: int = 0, window: int | None = None) -> Subscription:
        """A reader of a process; it subscribes when it is first awaited."""
        check_loop(self.loop)
        return Subscription(self, self.new_reader_id(), process_id, after_seq, window or DEFAULT_WINDOW)

    def new_reader_id(self) -> str:
        self._last_reader += 1
        return str(self._last_reader)

    @abstractmethod
    def attach(self, reader: Subscription, start: PendingCall[Any] | None = None) -> None:
        """Deliver events to `reader` from now on; `start` is the call that opens it, if one does."""

    @abstractmethod
    def detach(self, id: str) -> None:
        """Unsubscribe a reader before its end."""

    def reader_of(self, id: str | None) -> Subscription | None:
        """The reader that gets an event, made now if it was expected."""
        if id is None:
            return None
        make = self.expected.get(id)
        return self.readers.get(id) if make is None else make()

    def ended(self, id: str) -> None:
        """Remove a reader after its last event, which the server has sent."""
        self.readers.pop(id, None)

    @abstractmethod
    def subscribe(self, params: m.SubscribeParams, on_reply: OnReply) -> None: ...

    @abstractmethod
    def credit(self, id: str, seq: int, count: int) -> None: ...

    # --- streams ---------------------------------------------------------------------------------------------

    @property
    def streams(self) -> StreamMultiplexer:
        """The streams of the current channel; `ConnectionLost` while there is none."""
        raise InvalidParams(f"{self.address}: ports cannot be forwarded, because this sandbox has no open channel")

    @property
    def unix_path(self) -> str | None:
        """The Unix socket of the server, if the connection is one on this machine."""
        return None

    def call_once(self, method: WireMethod[P, R], params: P, on_reply: OnReply) -> None:
        """Send a request on the current channel only; `on_reply` is not called if the channel breaks."""
        raise InvalidParams(f"{self.address}: {method.name} needs an open channel")

    # --- the end ---------------------------------------------------------------------------------------------

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Run `work`, which calls through this connection, and return whether it has ended.

        Waits while the connection is up, for `CLEAN_UP_SECONDS` at most. Otherwise, and if the caller is cancelled,
        the work continues in the background until the connection is lost for good, or closed: a close waits for
        it, for `CLEAN_UP_SECONDS` again.
        """
        if len(self._cleaning) >= MAX_CLEAN_UPS:
            work.close()
            raise LimitReached(f"{self.address}: {MAX_CLEAN_UPS} commands and files wait to be cleaned up")
        task = self.loop.create_task(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaned)
        if self.may_answer:
            await asyncio.wait({task, *self.broken()}, timeout=CLEAN_UP_SECONDS, return_when="FIRST_COMPLETED")
        if not task.done():
            return False
        task.result()
        return True

    def broken(self) -> tuple[asyncio.Future[Any], ...]:
        """A future that is done once the current channel is no longer used, if there is a channel."""
        return ()

    def _cleaned(self, task: asyncio.Task[Any]) -> None:
        self._cleaning.discard(task)
        take_error(task)

    async def finish_clean_up(self) -> None:
        """Wait for the clean-ups under way, for `CLEAN_UP_SECONDS` at most: a broken connection may come back."""
        if self._cleaning and self.failure is None:
            await asyncio.wait({*self._cleaning}, timeout=CLEAN_UP_SECONDS)

    async def end_clean_up(self) -> None:
        """Cancel all clean-ups and wait for their end."""
        if self._cleaning:
            log.warning(
                "%s: closed without an answer to %d clean-ups of cancelled calls: their commands may still run",
                self.address,
                len(self._cleaning),
            )
        for task in list(self._cleaning):
            task.cancel()
        if self._cleaning:
            await asyncio.wait(set(self._cleaning))

    def fail(self, error: HoldfastError | None = None) -> None:
        """Refuse further calls and end all readers, with `error` or because the connection was closed."""
        if self.failure is None:
            self.failure = error or ConnectionLost(f"{self.address}: the connection was closed")
        self._failed.set()
        for reader in list(self.readers.values()):
            reader.fail(self.new_failure())
        self.readers.clear()
        self.expected.clear()

    async def wait_failed(self) -> HoldfastError:
        """Wait until the connection is closed or lost for good; returns the reason."""
        await self._failed.wait()
        return self.new_failure()

    def new_failure(self) -> HoldfastError:
        """A copy of `failure`, because callers that raise one object would share its traceback."""
        assert self.failure is not None
        return error_from_wire(self.failure.code, self.failure.message, self.failure.details)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def check_loop(owner: asyncio.AbstractEventLoop | None) -> None:
    """Refuse a call from another event loop than `owner`: its reply would never reach the caller."""
    if owner is None or (running := running_loop()) is owner:
        return
    raise InvalidRequest(
        f"this Sandbox belongs to another event loop: it was connected in {owner!r} and is used "
        f"{'without one' if running is None else f'in {running!r}'}; connect in the loop that uses it, "
        "or use holdfast.sync"
    )
