"""The `service/*` methods: calls from programs in the sandbox to functions that the host offers.

Both sides poll: the host for calls, a caller for the pieces of its answer; delaying a reply is the back-pressure.
A host survives a broken connection because its poll is repeated; a lost caller cancels its calls. State is in
memory: after a restart of the server the calls are lost and the hosts offer again.
"""

from __future__ import annotations

import asyncio
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
from holdfast.server.methods.host_call_state import REPLY_BYTES, HostCall, HostOffer, WatchingReply
from holdfast.wire import host_call_messages as h
from holdfast.wire.host_call_keys import check_call_id, check_instance, check_name, instance_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.config import ExecServerConfig
    from holdfast.server.connection import ServerConnection
    from holdfast.server.deferred_reply import DeferredReply

#: The longest wait of one poll.
MAX_WAIT_MS: Final = 60_000
#: Offers at a time; a bridge has one or two.
MAX_SERVICES: Final = 1_024


class HostCallMethods:
    """The handlers of `service/*`, shared by all connections."""

    def __init__(self, config: ExecServerConfig) -> None:
        self._config = config
        self._offers: dict[str, HostOffer] = {}
        self._calls: dict[str, HostCall] = {}
        self._by_caller: dict[ServerConnection, dict[str, HostCall]] = {}
        #: Bytes of call bodies that no host has taken.
        self._held_bytes = 0
        #: Bytes of answers that no caller has taken.
        self._answer_bytes = 0

    # --- the host's side -------------------------------------------------------------------------------------

    def offer(self, connection: ServerConnection, params: h.HostOfferParams) -> DeferredReply:
        instance = instance_of(params.service, params.key)
        offer = self._offers.get(instance)
        if offer is None:
            if len(self._offers) >= MAX_SERVICES:
                raise LimitReached(f"{MAX_SERVICES} services are already offered here: withdraw one")
            offer = self._offers[instance] = HostOffer(params.service, instance)
        if params.epoch == offer.epoch:
            self._taken(offer, params.after_seq)
        offer.polls += 1
        offer.host = connection
        offer.expires_at = None
        # A host with another epoch gets the new one at once: the callers that it serves are gone.
        is_current = params.epoch in ("", offer.epoch)
        return WatchingReply(
            offer,
            lambda: bool(offer.events) or not is_current,
            lambda: self._take_events(offer),
            seconds=_seconds(params.wait_ms),
            cancelled=lambda: self._end_poll(offer),
        )

    def _take_events(self, offer: HostOffer) -> h.HostOfferResult:
        self._end_poll(offer)
        return offer.take()

    def _end_poll(self, offer: HostOffer) -> None:
        offer.polls -= 1
        if not offer.polls and self._offers.get(offer.instance) is offer:
            self._expire(offer)

    def _expire(self, offer: HostOffer) -> None:
        """Start the time after which an offer without polls is withdrawn; shorter if its connection is lost."""
        seconds = self._config.detached_session_seconds
        if offer.host is not None:
            seconds = max(seconds, MAX_WAIT_MS / 1000)
        loop = asyncio.get_running_loop()
        offer.expires_at = loop.time() + seconds
        # A timer that is due before sets itself again: each call ends a poll, and the next poll follows at once.
        if offer.expiry is None or offer.expiry.when() > offer.expires_at:
            self._stop_expiry(offer)
            offer.expiry = loop.call_at(offer.expires_at, self._check_expiry, offer)

    def _check_expiry(self, offer: HostOffer) -> None:
        offer.expiry = None
        if offer.expires_at is None:
            return  # the end of the poll starts the time again
        loop = asyncio.get_running_loop()
        if loop.time() < offer.expires_at:
            offer.expiry = loop.call_at(offer.expires_at, self._check_expiry, offer)
        else:
            self._forget(offer)

    def _stop_expiry(self, offer: HostOffer) -> None:
        if offer.expiry is not None:
            offer.expiry.cancel()
            offer.expiry = None

    def _taken(self, offer: HostOffer, seq: int) -> None:
        while offer.events and (first := next(iter(offer.events))) <= seq:
            event = offer.events.pop(first)
            call = self._calls.get(event.call_id)
            if isinstance(event, h.HostCallBegun) and call is not None:
                self._release_body(call)

    def answer(
        self, connection: ServerConnection, params: h.HostAnswerParams
    ) -> h.HostAnswerResult | DeferredReply:
        call = self._calls.get(params.call_id)
        if call is None:
            return h.HostAnswerResult(False)
        if instance_of(call.offer.name, params.key) != call.offer.instance:
            raise UnknownService(f"call {params.call_id}: belongs to another host")
        error = None if params.error is None else error_from_wire(params.error.code, params.error.message)
        last = params.end or error is not None
        self._answer_bytes += call.add(params.seq, (params.data, *params.more), end=last, error=error)
        call.wake()
        if not self._is_full(call):
            return h.HostAnswerResult(True)
        return WatchingReply(
            call,
            lambda: not self._is_full(call),
            lambda: h.HostAnswerResult(self._calls.get(call.id) is call),
        )

    def _is_full(self, call: HostCall) -> bool:
        """Whether the host has to wait. When all answers together exceed the limit, each may hold only a little."""
        crowded = self._answer_bytes > self._config.max_service_bytes
        room = min(REPLY_BYTES, self._config.service_answer_bytes) if crowded else self._config.service_answer_bytes
        return call.held_bytes > room and not call.ended

    def withdraw(self, connection: ServerConnection, params: h.HostWithdrawParams) -> None:
        offer = self._offers.get(instance_of(params.service, params.key))
        if offer is not None:
            self._forget(offer)

    def _forget(self, offer: HostOffer) -> None:
        self._stop_expiry(offer)
        self._offers.pop(offer.instance, None)
        offer.events.clear()
        for call in list(offer.calls.values()):
            self._release_body(call)
            call.end(ConnectionLost(f"the host that offered service {offer.name!r} is gone"))

    # --- the caller's side -----------------------------------------------------------------------------------

    def call(self, connection: ServerConnection, params: h.HostCallParams) -> DeferredReply:
        """Begin a call before this returns, so that a later request of its connection, such as cancel, finds it."""
        check_name(params.service)
        check_instance(params.instance)
        if params.call_id is not None:
            check_call_id(params.call_id)
            if params.call_id in self._calls:
                raise InvalidParams(f"call {params.call_id!r}: the id is taken; choose ids that cannot be guessed")
        offer = self._offers.get(params.instance)
        if offer is None or offer.name != params.service:
            raise UnknownService(f"no host offers service {params.service!r} under this instance here")
        if len(offer.calls) >= self._config.max_service_calls:
            raise LimitReached(
                f"{len(offer.calls)} calls of service {offer.name!r} wait: that is max_service_calls"
            )
        if self._held_bytes + len(params.body) > self._config.max_service_bytes:
            raise LimitReached(
                f"{self._held_bytes} bytes of calls wait for their host, and this call has {len(params.body)}: "
                f"max_service_bytes is {self._config.max_service_bytes}"
            )
        call = HostCall(params.call_id or secrets.token_hex(16), offer, connection, len(params.body))
        self._held_bytes += call.body_bytes
        self._calls[call.id] = offer.calls[call.id] = call
        self._by_caller.setdefault(connection, {})[call.id] = call
        call.called_seq = offer.add_event(lambda seq: h.HostCallBegun(seq, call.id, params.method, params.body))
        return self._pieces(call, params.wait_ms, cancelled=lambda: self._cancel(call))

    def receive(self, connection: ServerConnection, params: h.HostReceiveParams) -> DeferredReply:
        call = self._own(connection, params.call_id)
        self._answer_bytes -= call.acknowledge(params.after_seq)
        return self._pieces(call, params.wait_ms)

    def _pieces(self, call: HostCall, wait_ms: int, cancelled: Callable[[], None] | None = None) -> DeferredReply:
        return WatchingReply(
            call,
            lambda: bool(call.pieces) or call.ended,
            lambda: self._receive(call),
            seconds=_seconds(wait_ms),
            cancelled=cancelled,
        )

    def _receive(self, call: HostCall) -> h.HostAnswerPieces:
        try:
            pieces = call.take()
        except HoldfastError:
            self._drop(call)
            raise
        if pieces.ended:
            self._drop(call)
        return pieces

    def cancel(self, connection: ServerConnection, params: h.HostCancelParams) -> None:
        """Cancel a call of this connection; any other id has no effect."""
        call = self._calls.get(params.call_id)
        if call is not None and call.caller is connection:
            self._cancel(call)

    def connection_lost(self, connection: ServerConnection) -> None:
        """Cancel the calls of a lost caller, which does not reconnect; wait for a lost host, which may."""
        for call in list(self._by_caller.get(connection, {}).values()):
            self._cancel(call)
        for offer in self._offers.values():
            if offer.host is connection:
                offer.host = None
                if not offer.polls:
                    self._expire(offer)

    def _own(self, connection: ServerConnection, call_id: str) -> HostCall:
        call = self._calls.get(call_id)
        if call is None or call.caller is not connection:
            raise UnknownService(f"call {call_id!r}: belongs to another caller, or has ended")
        return call

    def _cancel(self, call: HostCall) -> None:
        if self._calls.get(call.id) is not call:
            return
        was_over = call.ended
        self._drop(call)
        call.end(UnknownService(f"call {call.id!r}: cancelled"))  # for replies that still wait for pieces
        offer = call.offer
        # The body is not kept for a disconnected host: a series of short-lived callers would fill the memory.
        offer.events.pop(call.called_seq, None)
        if not was_over and call.called_seq <= offer.sent_seq:
            offer.add_event(lambda seq: h.HostCallCancelled(seq, call.id))

    def _drop(self, call: HostCall) -> None:
        self._release_body(call)
        self._answer_bytes -= call.held_bytes
        call.held_bytes = 0
        call.pieces.clear()
        self._calls.pop(call.id, None)
        call.offer.calls.pop(call.id, None)
        of_caller = self._by_caller.get(call.caller, {})
        of_caller.pop(call.id, None)
        if not of_caller:
            self._by_caller.pop(call.caller, None)

    def _release_body(self, call: HostCall) -> None:
        self._held_bytes -= call.body_bytes
        call.body_bytes = 0


def _seconds(wait_ms: int) -> float:
    return max(0, min(wait_ms, MAX_WAIT_MS)) / 1000
