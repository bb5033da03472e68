"""A session whose work in the sandbox is a span of the call that asked for it.

What followers read is nobody's call and has none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from holdfast.service.observability.tracing import ShellWork, Tracer
from holdfast.service.sessions.backend.terminal import Live
from holdfast.service.types import SessionRecord

#: What callers have done in a sandbox; `open` is named after the kind.
_WORK: Final[dict[str, ShellWork]] = {
    "send": "send",
    "type_command": "send",
    "run": "run",
    "read": "read",
    "close": "close",
}


def traced(live: Live, tracer: Tracer, record: SessionRecord) -> Live:
    """The same object: both kinds of it have these methods, and others look at which kind it is."""
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
