"""A reply that is sent by a callback, because a task for each waiting request would cost too much. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

#: The reason of a cancellation by the caller, in contrast to one by a broken connection.
CANCELLED_BY_CALLER: Final = "request/cancel"


class DeferredReply(ABC):
    """Returned by a handler in place of a result or a coroutine."""

    @abstractmethod
    def start(self, reply: Callable[[Any], None]) -> None:
        """Call `reply` once with the result or a `HoldfastError`, now or later."""

    @abstractmethod
    def cancel(self, reason: str = "") -> None:
        """Drop the reply: no caller waits for it any more."""
