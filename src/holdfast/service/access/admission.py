"""Admission of calls in both front ends: authentication, rate limits, errors, observation.

The reply to a call that fails by a bug has only an id; the log has the traceback under the same id.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from functools import cache
from types import TracebackType
from typing import Any, Final, Literal, Protocol

from holdfast.service.access.rates import Rates
from holdfast.service.access.tokens import Access
from holdfast.service.fronts.handler import RpcMethod
from holdfast.service.problems import Bug, Problem, Unavailable
from holdfast.service.types import Caller

FrontName = Literal["grpc", "http"]
#: After this time, a refused client finds another replica, or this one after its restart.
_COME_BACK_SECONDS: Final = 1.0

_log = logging.getLogger("holdfast.service.calls")


class CallObservation(Protocol):
    """Metrics, traces and log lines of one call. The methods are called in the task of the call."""

    def identified(self, caller: Caller) -> None:
        """The caller is authenticated."""
        ...

    def concerns(self, session_id: str = "", command_id: str = "") -> None:
        """The call concerns this session and command; an empty id is not known yet."""
        ...

    def end(self, status: str) -> None:
        """The call ended with this status, such as `OK` or `CANCELLED`."""
        ...


class CallObserver(Protocol):
    """Creates the observation of each call."""

    def begin(self, front: FrontName, method: str, headers: Mapping[str, str]) -> CallObservation: ...


class AdmittedCall:
    """One admitted call. `end` must be called once."""

    def __init__(
        self,
        caller: Caller,
        method: RpcMethod,
        rates: Rates,
        observed: CallObservation | None,
        calls: set[AdmittedCall],
    ) -> None:
        self.caller = caller
        self.method = method
        self.status = "OK"
        self._rates = rates
        self._observed = observed
        self._calls = calls
        self._task = asyncio.current_task()
        self._interrupted = False

    def check(self, request: Any) -> None:
        """Apply the limits that depend on the request."""
        if self.method.makes_session(request):
            self._rates.create(self.caller.agent_id)
        self._concerns(request)

    def answered(self, reply: Any) -> Any:
        """Return the reply, and observe its ids, which the request may not have had."""
        self._concerns(reply)
        return reply

    def _concerns(self, message: Any) -> None:
        if self._observed is not None and (names := _ids_of(message.DESCRIPTOR)):
            self._observed.concerns(**{name: getattr(message, name) for name in names})

    def interrupt(self) -> None:
        """End the call because the service stops."""
        if self._task is not None and not self._interrupted:
            self._interrupted = True
            self._task.cancel()

    def explained(self) -> _Explained:
        """Convert exceptions inside the block to Problems. The call of a disconnected client stays cancelled."""
        return _Explained(self)

    def problem_of(self, error: BaseException) -> Problem | None:
        """Set the status of a call that failed; return the Problem for its caller, None for `error` itself."""
        if isinstance(error, Problem):
            self.status = error.status
            return None
        if isinstance(error, asyncio.CancelledError):
            if not self._interrupted:
                self.status = "CANCELLED"
                return None
            self.status = "UNAVAILABLE"
            if self._task is not None:
                self._task.uncancel()
            return stopping()
        if not isinstance(error, Exception):
            return None
        self.status = "INTERNAL"
        return bug(error, self.method.name)

    def end(self) -> None:
        self._calls.discard(self)
        self._rates.end(self.caller.agent_id, stream=self.method.stream)
        if self._observed is not None:
            self._observed.end(self.status)


class _Explained:
    """The context of `explained`; a class, because a generator costs more, and every call has one."""

    def __init__(self, call: AdmittedCall) -> None:
        self._call = call

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (problem := self._call.problem_of(error)) is not None:
            # A cancellation that the stop of the service has caused is no reason for the caller.
            raise problem from (error if isinstance(error, Exception) else None)


class Admission:
    """Admits the calls of both front ends."""

    def __init__(self, access: Access, rates: Rates, observer: CallObserver | None = None) -> None:
        self.access = access
        self._rates = rates
        self._observer = observer
        self._stopping = False
        self._calls: set[AdmittedCall] = set()

    async def begin(
        self, front: FrontName, method: RpcMethod, headers: Mapping[str, str], peer: str
    ) -> AdmittedCall:
        """Admit a call, or raise a Problem. `headers` have lower-case names."""
        observed = self._observer.begin(front, method.name, headers) if self._observer is not None else None
        try:
            if self._stopping:
                raise stopping()
            caller = await self.access.authenticate(headers.get("authorization"), peer)
            if observed is not None:
                observed.identified(caller)
            self._rates.begin(caller.agent_id, stream=method.stream)
            call = AdmittedCall(caller, method, self._rates, observed, self._calls)
        except Problem as problem:
            if observed is not None:
                observed.end(problem.status)
            raise
        except asyncio.CancelledError:
            if observed is not None:
                observed.end("CANCELLED")
            raise
        except Exception as error:
            if observed is not None:
                observed.end("INTERNAL")
            raise bug(error, method.name) from error
        self._calls.add(call)
        return call

    def stop(self) -> None:
        """Refuse new calls, and end the calls that only wait: their clients resume from their tokens."""
        self._stopping = True
        for call in list(self._calls):
            if call.method.waits:
                call.interrupt()

    @property
    def under_way(self) -> int:
        return len(self._calls)


@cache
def _ids_of(descriptor: Any) -> tuple[str, ...]:
    """Return the ids that a message with this descriptor has."""
    return tuple(name for name in ("session_id", "command_id") if name in descriptor.fields_by_name)


def stopping() -> Unavailable:
    return Unavailable(
        "this replica is stopping; repeat the call, with the last token received",
        reason="SHUTTING_DOWN",
        retry_after=_COME_BACK_SECONDS,
    )


def bug(error: Exception, method: str) -> Bug:
    """Log an unexpected error under a new id; return the Problem with this id for the caller."""
    error_id = secrets.token_hex(8)
    _log.error("%s failed by a bug, error_id=%s", method, error_id, exc_info=error)
    return Bug(
        f"internal error of the service; its log has the traceback under error_id {error_id}",
        reason="INTERNAL",
        error_id=error_id,
    )
