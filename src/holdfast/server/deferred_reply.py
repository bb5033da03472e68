"""A reply that is sent by a callback, because a task for each waiting request would cost too much. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

#: The reason of a cancellation by the caller, in contrast to one by a broken connection.
CANCELLED_BY_CALLER: Final = "request/cancel"


class DeferredReply:
    """Returned by a handler in place of a result or a coroutine.

    Not an ABC: every answer is tested for this class, and `isinstance` takes several times as long with an ABC.
    """

    def start(self, reply: Callable[[Any], None]) -> None:
        """Call `reply` once with the result or a `HoldfastError`, now or later."""
        raise NotImplementedError

    def cancel(self, reason: str = "") -> None:
        """Drop the reply: no caller waits for it any more."""
        raise NotImplementedError
