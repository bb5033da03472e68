"""What every call passes in both front ends: who calls, how often, what is told when it fails, what is counted.

A call that a bug of ours ends is answered with an id and nothing else; the log has the same id with the rest.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal, Protocol

from holdfast.service.access.rates import Rates
from holdfast.service.access.tokens import Access
from holdfast.service.fronts.handler import RpcMethod
from holdfast.service.problems import Bug, Problem, Unavailable
from holdfast.service.types import Caller

FrontName = Literal["grpc", "http"]
#: A client that is sent away by a service that stops finds another replica, or this one again, after about this.
_COME_BACK_SECONDS: Final = 1.0

_log = logging.getLogger("holdfast.service.calls")


class CallObservation(Protocol):
    """Metrics, traces and log lines of one call. All of it is called in the call's own task."""

    def identified(self, caller: Caller) -> None:
        """It is this caller's."""
        ...

    def concerns(self, session_id: str, command_id: str) -> None:
        """It is about these, as far as it is known by now; what is empty is not."""
        ...

    def end(self, status: str) -> None:
        """With a status's name, `OK` and `CANCELLED` among them."""
        ...


class CallObserver(Protocol):
    """Who wants to see calls."""

    def begin(self, front: FrontName, method: str, headers: Mapping[str, str]) -> CallObservation: ...


class AdmittedCall:
    """One call that was let in. `end` must be called once."""

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
        """Once the request is read: what it asks for may have a limit of its own."""
        if self.method.makes_session(request):
            self._rates.create(self.caller.agent_id)
        self._concerns(request)

    def answered(self, reply: Any) -> Any:
        """The reply, which may name what the request did not."""
        self._concerns(reply)
        return reply

    def _concerns(self, message: Any) -> None:
        if self._observed is not None:
            self._observed.concerns(getattr(message, "session_id", ""), getattr(message, "command_id", ""))

    def interrupt(self) -> None:
        """End it now: the service stops."""
        if self._task is not None and not self._interrupted:
            self._interrupted = True
            self._task.cancel()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Inside it, whatever goes wrong leaves as a Problem. A call whose client went away stays cancelled."""
        try:
            yield
        except Problem as problem:
            self.status = problem.status
            raise
        except asyncio.CancelledError:
            if not self._interrupted:
                self.status = "CANCELLED"
                raise
            self.status = "UNAVAILABLE"
            if self._task is not None:
                self._task.uncancel()
            raise stopping() from None
        except Exception as error:
            self.status = "INTERNAL"
            raise bug(error, self.method.name) from error

    def end(self) -> None:
        self._calls.discard(self)
        self._rates.end(self.caller.agent_id, stream=self.method.stream)
        if self._observed is not None:
            self._observed.end(self.status)


class Admission:
    """The door that both front ends share."""

    def __init__(self, access: Access, rates: Rates, observer: CallObserver | None = None) -> None:
        self.access = access
        self._rates = rates
        self._observer = observer
        self._stopping = False
        self._calls: set[AdmittedCall] = set()

    async def begin(
        self, front: FrontName, method: RpcMethod, headers: Mapping[str, str], peer: str
    ) -> AdmittedCall:
        """Let a call in, or say why not. `headers` have lower-case names."""
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
        """Let nobody in any more, and end the calls that only wait: their clients go on from their tokens."""
        self._stopping = True
        for call in list(self._calls):
            if call.method.waits:
                call.interrupt()

    @property
    def under_way(self) -> int:
        return len(self._calls)


def stopping() -> Unavailable:
    return Unavailable(
        "this replica is stopping; the same call may be made again, from the last token that came",
        reason="SHUTTING_DOWN",
        retry_after=_COME_BACK_SECONDS,
    )


def bug(error: Exception, method: str) -> Bug:
    """What outsiders hear of an error that nobody expected. The rest is logged under the same id."""
    error_id = secrets.token_hex(8)
    _log.error("%s failed with a bug of ours, error_id=%s", method, error_id, exc_info=error)
    return Bug(
        f"the service failed in a way that it should not; its log has more under error_id {error_id}",
        reason="INTERNAL",
        error_id=error_id,
    )
