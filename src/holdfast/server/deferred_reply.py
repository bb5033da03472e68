"""A reply that comes by a call: a task for each request that waits would cost too much. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

#: The reason that a request is cancelled with if its caller gave up, and not its connection broke.
CANCELLED_BY_CALLER: Final = "request/cancel"


class Later(ABC):
    """What a handler returns in place of a result or a coroutine."""

    @abstractmethod
    def start(self, reply: Callable[[Any], None]) -> None:
        """Give `reply` the result, or a `HoldfastError`, now or later; once."""

    @abstractmethod
    def cancel(self, reason: str = "") -> None:
        """Nobody waits for it any more."""
