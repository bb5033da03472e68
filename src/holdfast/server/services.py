"""Services that the host offers to programs inside: who offers, who calls, and what is on its way between them.

Both sides pull: the host's long poll brings it calls, a caller's brings it the pieces of its answer, and a reply that
waits is what slows a side that is too fast. So all of it survives a broken connection by being asked again. Memory
alone; a server that is restarted forgets the calls and is offered the services anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from typing import TYPE_CHECKING, Final

from holdfast.errors import (
    ConnectionLost,
    HoldfastError,
    InvalidRequest,
    LimitReached,
    UnknownService,
    error_from_wire,
)
from holdfast.wire import messages as m
from holdfast.wire.service_keys import check_instance, check_name, instance_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.config import ExecServerConfig
    from holdfast.server.connection import ServerConnection

#: The longest that one poll waits.
MAX_WAIT_MS: Final = 60_000
#: Bytes of one reply: many small pieces go in one message.
REPLY_BYTES: Final = 256 * 1024


class Call:
    """One call and what was answered to it so far. Its caller alone may read it, its service's host alone answer."""

    def __init__(self, service: Service, caller: ServerConnection, body_bytes: int) -> None:
        self.id = secrets.token_hex(16)
        self.service = service
        self.caller = caller
        #: Held for the host, until it has taken the call.
        self.body_bytes = body_bytes
        self.pieces: deque[bytes] = deque()
        #: The numbers of the first piece that is held and of the last that came.
        self.first_seq = 1
        self.last_seq = 0
        self.held_bytes = 0
        self.ended = False
        self.error: HoldfastError | None = None
        self.changed = asyncio.Event()

    def add(self, seq: int, data: bytes) -> None:
        if seq <= self.last_seq or self.ended:
            return  # sent again, since the reply to it was lost
        if seq != self.last_seq + 1:
            raise InvalidRequest(f"call {self.id}: piece {seq} after piece {self.last_seq}")
        self.last_seq = seq
        self.pieces.append(data)
        self.held_bytes += len(data)
        self.wake()

    def end(self, error: HoldfastError | None = None) -> None:
        if not self.ended:
            self.ended, self.error = True, error
            self.wake()

    def acknowledge(self, seq: int) -> None:
        while self.pieces and self.first_seq <= seq:
            self.held_bytes -= len(self.pieces.popleft())
            self.first_seq += 1
        self.wake()

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
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class Service:
    """One name and instance, from the first offer until its host has been gone for too long."""

    def __init__(self, name: str, instance: str) -> None:
        self.name = name
        self.instance = instance
        self.epoch = secrets.token_hex(8)
        self.calls: dict[str, Call] = {}
        self.events: deque[m.ServiceEvent] = deque()
        self.last_seq = 0
        self.changed = asyncio.Event()
        self.polls = 0
        self.expiry: asyncio.TimerHandle | None = None

    def tell(self, make: Callable[[int], m.ServiceEvent]) -> None:
        self.last_seq += 1
        self.events.append(make(self.last_seq))
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class ServiceMethods:
    """The handlers of `service/*`, shared by all connections."""

    def __init__(self, config: ExecServerConfig) -> None:
        self._config = config
        self._services: dict[str, Service] = {}
        self._calls: dict[str, Call] = {}
        self._by_caller: dict[ServerConnection, dict[str, Call]] = {}
        #: Bytes of calls that no host has taken.
        self._held_bytes = 0

    # --- the host's side -------------------------------------------------------------------------------------

    async def offer(self, connection: ServerConnection, params: m.ServiceOfferParams) -> m.ServiceOfferResult:
        instance = instance_of(params.service, params.key)
        service = self._services.get(instance)
        if service is None:
            service = self._services[instance] = Service(params.service, instance)
        if params.epoch == service.epoch:
            self._taken(service, params.after_seq)
        service.polls += 1
        if service.expiry is not None:
            service.expiry.cancel()
            service.expiry = None
        try:
            if not service.events:
                await _wait(service.changed, params.wait_ms)
        finally:
            service.polls -= 1
            if not service.polls:
                # Its host asks again at once; one that does not is gone.
                service.expiry = asyncio.get_running_loop().call_later(
                    self._config.detached_session_seconds, self._forget, service
                )
        return m.ServiceOfferResult(service.epoch, _some(service.events))

    def _taken(self, service: Service, seq: int) -> None:
        while service.events and service.events[0].seq <= seq:
            event = service.events.popleft()
            call = self._calls.get(event.call_id)
            if isinstance(event, m.ServiceCalled) and call is not None:
                self._let_go(call)

    async def answer(self, connection: ServerConnection, params: m.ServiceAnswerParams) -> m.ServiceAnswerResult:
        call = self._calls.get(params.call_id)
        if call is None:
            return m.ServiceAnswerResult(False)
        if instance_of(call.service.name, params.key) != call.service.instance:
            raise UnknownService(f"call {params.call_id}: is not one of yours")
        call.add(params.seq, params.data)
        if params.error is not None:
            call.end(error_from_wire(params.error.code, params.error.message))
        elif params.end:
            call.end()
        while call.held_bytes > self._config.service_answer_bytes and call.id in self._calls and not call.ended:
            await call.changed.wait()
        return m.ServiceAnswerResult(call.id in self._calls)

    def withdraw(self, connection: ServerConnection, params: m.ServiceWithdrawParams) -> m.Empty:
        service = self._services.get(instance_of(params.service, params.key))
        if service is not None:
            self._forget(service)
        return m.Empty()

    def _forget(self, service: Service) -> None:
        if service.expiry is not None:
            service.expiry.cancel()
        self._services.pop(service.instance, None)
        for call in list(service.calls.values()):
            self._let_go(call)
            call.end(ConnectionLost(f"the host that offered service {service.name!r} is gone"))

    # --- the caller's side -----------------------------------------------------------------------------------

    async def call(self, connection: ServerConnection, params: m.ServiceCallParams) -> m.ServicePieces:
        check_name(params.service)
        check_instance(params.instance)
        service = self._services.get(params.instance)
        if service is None or service.name != params.service:
            raise UnknownService(f"no host offers service {params.service!r} under this instance here")
        if len(service.calls) >= self._config.max_service_calls:
            raise LimitReached(
                f"{len(service.calls)} calls of service {service.name!r} wait: that is max_service_calls"
            )
        if self._held_bytes + len(params.body) > self._config.max_service_bytes:
            raise LimitReached(
                f"{self._held_bytes} bytes of calls wait for their host, and this one has {len(params.body)}: "
                f"max_service_bytes is {self._config.max_service_bytes}"
            )
        call = Call(service, connection, len(params.body))
        self._held_bytes += call.body_bytes
        self._calls[call.id] = service.calls[call.id] = call
        self._by_caller.setdefault(connection, {})[call.id] = call
        service.tell(lambda seq: m.ServiceCalled(seq, call.id, params.method, params.body))
        try:
            return await self._receive(call, params.wait_ms)
        except asyncio.CancelledError:
            self._cancel(call)
            raise

    async def receive(self, connection: ServerConnection, params: m.ServiceReceiveParams) -> m.ServicePieces:
        call = self._own(connection, params.call_id)
        call.acknowledge(params.after_seq)
        return await self._receive(call, params.wait_ms)

    async def _receive(self, call: Call, wait_ms: int) -> m.ServicePieces:
        if not call.pieces and not call.ended:
            await _wait(call.changed, wait_ms)
        try:
            pieces = call.take()
        except HoldfastError:
            self._drop(call)
            raise
        if pieces.ended:
            self._drop(call)
        return pieces

    def cancel(self, connection: ServerConnection, params: m.ServiceCancelParams) -> m.Empty:
        self._cancel(self._own(connection, params.call_id))
        return m.Empty()

    def connection_lost(self, connection: ServerConnection) -> None:
        """What it had called is called off: a caller inside is not cut off, it ends."""
        for call in list(self._by_caller.get(connection, {}).values()):
            self._cancel(call)

    def _own(self, connection: ServerConnection, call_id: str) -> Call:
        call = self._calls.get(call_id)
        if call is None or call.caller is not connection:
            raise UnknownService(f"call {call_id!r}: not one of yours, or it is over")
        return call

    def _cancel(self, call: Call) -> None:
        if self._calls.get(call.id) is call:
            self._drop(call)
            if not call.ended:
                call.service.tell(lambda seq: m.ServiceCancelled(seq, call.id))
                call.wake()  # the host may wait for room

    def _drop(self, call: Call) -> None:
        self._let_go(call)
        self._calls.pop(call.id, None)
        call.service.calls.pop(call.id, None)
        of_caller = self._by_caller.get(call.caller, {})
        of_caller.pop(call.id, None)
        if not of_caller:
            self._by_caller.pop(call.caller, None)

    def _let_go(self, call: Call) -> None:
        self._held_bytes -= call.body_bytes
        call.body_bytes = 0


def _some(events: deque[m.ServiceEvent]) -> tuple[m.ServiceEvent, ...]:
    """The first of them: one large body a message."""
    chosen: list[m.ServiceEvent] = []
    size = 0
    for event in events:
        size += len(event.body) if isinstance(event, m.ServiceCalled) else 0
        if chosen and size > REPLY_BYTES:
            break
        chosen.append(event)
    return tuple(chosen)


async def _wait(changed: asyncio.Event, wait_ms: int) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(wait_ms, MAX_WAIT_MS) / 1000):
            await changed.wait()
