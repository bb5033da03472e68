"""Services that the host offers to programs inside: who offers, who calls, and what is on its way between them.

Both sides pull: the host's long poll brings it calls, a caller's brings it the pieces of its answer, and a reply
that waits is what slows a side that is too fast. So the host's side survives a broken connection by being asked
again, while a caller that is gone has called off what it asked. Memory alone; a server that is restarted forgets
the calls and is offered the services anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Final

from holdfast.errors import (
    ConnectionLost,
    HoldfastError,
    InvalidParams,
    LimitReached,
    UnknownService,
    error_from_wire,
)
from holdfast.server.host_call import REPLY_BYTES, Call, Reply, Service
from holdfast.wire import messages as m
from holdfast.wire.service_keys import check_call_id, check_instance, check_name, instance_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.config import ExecServerConfig
    from holdfast.server.connection import ServerConnection
    from holdfast.server.deferred_reply import Later

#: The longest that one poll waits.
MAX_WAIT_MS: Final = 60_000
#: Services that may be on offer at a time: one or two a bridge is usual.
MAX_SERVICES: Final = 1_024


class ServiceMethods:
    """The handlers of `service/*`, shared by all connections."""

    def __init__(self, config: ExecServerConfig) -> None:
        self._config = config
        self._services: dict[str, Service] = {}
        self._calls: dict[str, Call] = {}
        self._by_caller: dict[ServerConnection, dict[str, Call]] = {}
        #: Bytes of calls that no host has taken.
        self._held_bytes = 0
        #: Bytes of answers that no caller has taken.
        self._answer_bytes = 0

    # --- the host's side -------------------------------------------------------------------------------------

    async def offer(self, connection: ServerConnection, params: m.ServiceOfferParams) -> m.ServiceOfferResult:
        instance = instance_of(params.service, params.key)
        service = self._services.get(instance)
        if service is None:
            if len(self._services) >= MAX_SERVICES:
                raise LimitReached(f"{MAX_SERVICES} services are on offer here: withdraw one")
            service = self._services[instance] = Service(params.service, instance)
        if params.epoch == service.epoch:
            self._taken(service, params.after_seq)
        service.polls += 1
        service.host = connection
        if service.expiry is not None:
            service.expiry.cancel()
            service.expiry = None
        try:
            # A host that knows another epoch is to learn of this one at once: it works for callers who are gone.
            if not service.events and params.epoch in ("", service.epoch):
                await _wait(service.changed, params.wait_ms)
        finally:
            service.polls -= 1
            if not service.polls and self._services.get(instance) is service:
                self._expire(service)
        return service.take()

    def _expire(self, service: Service) -> None:
        """Its host asks again at once; one that does not is gone, sooner if its connection is."""
        seconds = self._config.detached_session_seconds
        if service.host is not None:
            seconds = max(seconds, MAX_WAIT_MS / 1000)
        if service.expiry is not None:
            service.expiry.cancel()
        service.expiry = asyncio.get_running_loop().call_later(seconds, self._forget, service)

    def _taken(self, service: Service, seq: int) -> None:
        while service.events and (first := next(iter(service.events))) <= seq:
            event = service.events.pop(first)
            call = self._calls.get(event.call_id)
            if isinstance(event, m.ServiceCalled) and call is not None:
                self._let_go(call)

    def answer(self, connection: ServerConnection, params: m.ServiceAnswerParams) -> m.ServiceAnswerResult | Later:
        call = self._calls.get(params.call_id)
        if call is None:
            return m.ServiceAnswerResult(False)
        if instance_of(call.service.name, params.key) != call.service.instance:
            raise UnknownService(f"call {params.call_id}: is not one of yours")
        error = None if params.error is None else error_from_wire(params.error.code, params.error.message)
        last = params.end or error is not None
        self._answer_bytes += call.add(params.seq, (params.data, *params.more), end=last, error=error)
        call.wake()
        if not self._is_full(call):
            return m.ServiceAnswerResult(True)
        return Reply(
            call,
            lambda: not self._is_full(call),
            lambda: m.ServiceAnswerResult(self._calls.get(call.id) is call),
        )

    def _is_full(self, call: Call) -> bool:
        """Whether the host has to wait. When many answers together are too much, each may hold only a little."""
        crowded = self._answer_bytes > self._config.max_service_bytes
        room = min(REPLY_BYTES, self._config.service_answer_bytes) if crowded else self._config.service_answer_bytes
        return call.held_bytes > room and not call.ended

    def withdraw(self, connection: ServerConnection, params: m.ServiceWithdrawParams) -> m.Empty:
        service = self._services.get(instance_of(params.service, params.key))
        if service is not None:
            self._forget(service)
        return m.Empty()

    def _forget(self, service: Service) -> None:
        if service.expiry is not None:
            service.expiry.cancel()
            service.expiry = None
        self._services.pop(service.instance, None)
        service.events.clear()
        for call in list(service.calls.values()):
            self._let_go(call)
            call.end(ConnectionLost(f"the host that offered service {service.name!r} is gone"))

    # --- the caller's side -----------------------------------------------------------------------------------

    def call(self, connection: ServerConnection, params: m.ServiceCallParams) -> Later:
        """Begun before this returns: what its connection asks next, to call it off say, finds it there."""
        check_name(params.service)
        check_instance(params.instance)
        if params.call_id is not None:
            check_call_id(params.call_id)
            if params.call_id in self._calls:
                raise InvalidParams(
                    f"call {params.call_id!r}: there is one already; choose ids that nobody can guess"
                )
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
        call = Call(params.call_id or secrets.token_hex(16), service, connection, len(params.body))
        self._held_bytes += call.body_bytes
        self._calls[call.id] = service.calls[call.id] = call
        self._by_caller.setdefault(connection, {})[call.id] = call
        call.called_seq = service.tell(lambda seq: m.ServiceCalled(seq, call.id, params.method, params.body))
        return self._pieces(call, params.wait_ms, cancelled=lambda: self._cancel(call))

    def receive(self, connection: ServerConnection, params: m.ServiceReceiveParams) -> Later:
        call = self._own(connection, params.call_id)
        self._answer_bytes -= call.acknowledge(params.after_seq)
        return self._pieces(call, params.wait_ms)

    def _pieces(self, call: Call, wait_ms: int, cancelled: Callable[[], None] | None = None) -> Later:
        return Reply(
            call,
            lambda: bool(call.pieces) or call.ended,
            lambda: self._receive(call),
            seconds=_seconds(wait_ms),
            cancelled=cancelled,
        )

    def _receive(self, call: Call) -> m.ServicePieces:
        try:
            pieces = call.take()
        except HoldfastError:
            self._drop(call)
            raise
        if pieces.ended:
            self._drop(call)
        return pieces

    def cancel(self, connection: ServerConnection, params: m.ServiceCancelParams) -> m.Empty:
        """Of a call that is over, or another's, there is nothing to call off."""
        call = self._calls.get(params.call_id)
        if call is not None and call.caller is connection:
            self._cancel(call)
        return m.Empty()

    def connection_lost(self, connection: ServerConnection) -> None:
        """What it had called is called off: a caller inside is not cut off, it ends. A host may come back."""
        for call in list(self._by_caller.get(connection, {}).values()):
            self._cancel(call)
        for service in self._services.values():
            if service.host is connection:
                service.host = None
                if not service.polls:
                    self._expire(service)

    def _own(self, connection: ServerConnection, call_id: str) -> Call:
        call = self._calls.get(call_id)
        if call is None or call.caller is not connection:
            raise UnknownService(f"call {call_id!r}: not one of yours, or it is over")
        return call

    def _cancel(self, call: Call) -> None:
        if self._calls.get(call.id) is not call:
            return
        was_over = call.ended
        self._drop(call)
        call.end(UnknownService(f"call {call.id!r}: it was called off"))  # for whoever still waits for its pieces
        service = call.service
        # Its body is not kept for a host that is away: callers that come and go meanwhile would fill us.
        service.events.pop(call.called_seq, None)
        if not was_over and call.called_seq <= service.told_seq:
            service.tell(lambda seq: m.ServiceCancelled(seq, call.id))

    def _drop(self, call: Call) -> None:
        self._let_go(call)
        self._answer_bytes -= call.held_bytes
        call.held_bytes = 0
        call.pieces.clear()
        self._calls.pop(call.id, None)
        call.service.calls.pop(call.id, None)
        of_caller = self._by_caller.get(call.caller, {})
        of_caller.pop(call.id, None)
        if not of_caller:
            self._by_caller.pop(call.caller, None)

    def _let_go(self, call: Call) -> None:
        self._held_bytes -= call.body_bytes
        call.body_bytes = 0


def _seconds(wait_ms: int) -> float:
    return max(0, min(wait_ms, MAX_WAIT_MS)) / 1000


async def _wait(changed: asyncio.Event, wait_ms: int) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_seconds(wait_ms)):
            await changed.wait()
