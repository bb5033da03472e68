"""A row of the method table: a method or notification with the types of its parameters and result; pure.

The rows are at the end of the modules with their messages, and `wire.table` has all of them.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

P = TypeVar("P")
R = TypeVar("R")

#: Incremented when a change breaks older peers; part of the reply to `initialize`.
PROTOCOL_VERSION: Final = 1


class WireMethod(Generic[P, R]):
    """One request: its name on the wire and the types of its parameters and result."""

    __slots__ = ("name", "params", "result")

    def __init__(self, name: str, params: type[P], result: type[R]) -> None:
        self.name = name
        self.params = params
        self.result = result


class Notification(Generic[P]):
    """One message without a reply."""

    __slots__ = ("name", "params", "sender")

    def __init__(self, name: str, params: type[P], sender: str) -> None:
        self.name = name
        self.params = params
        self.sender = sender
