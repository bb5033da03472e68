"""Adds spans to a session's work in the sandbox, as children of the requesting call.

Reads by followers belong to no call and have no span.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from holdfast.service.observability.tracing import ShellWork, Tracer
from holdfast.service.sessions.backend.terminal import Live
from holdfast.service.types import SessionRecord

#: Methods with a span; `open` is named after the kind.
_WORK: Final[dict[str, ShellWork]] = {
    "send": "send",
    "type_command": "send",
    "run": "run",
    "read": "read",
    "close": "close",
}


def traced(live: Live, tracer: Tracer, record: SessionRecord) -> Live:
    """Wrap the methods of the session object in place: callers check its type."""
    opening: ShellWork = "open_terminal" if record.kind == "terminal" else "open_shell"
    for name, work in {"open": opening, **_WORK}.items():
        setattr(live, name, _in_span(getattr(live, name), tracer, work, record.session_id))
    return live


def _in_span(
    method: Callable[..., Awaitable[Any]], tracer: Tracer, work: ShellWork, session_id: str
) -> Callable[..., Awaitable[Any]]:
    async def spanned(*args: Any, **kwargs: Any) -> Any:
        with tracer.work(work, session_id=session_id):
            return await method(*args, **kwargs)

    return spanned
