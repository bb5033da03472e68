"""What every streamed answer does alike: deltas become steps, steps become bytes, the end closes all; pure."""

from __future__ import annotations

import abc

from holdfast.bridge.deltas import Gathering, Step
from holdfast.bridge.normal import Delta, ModelReply, ModelRequest
from holdfast.bridge.sse import CONTENT_TYPE


class AnswerStream(abc.ABC):
    """One answer on its way: `begin`, `delta` for each, then `end`, or `error` when it breaks.

    Each gives the bytes to send.
    """

    #: What the head of the answer says.
    content_type = CONTENT_TYPE
    #: Names tool calls that come without an id.
    call_prefix = "call"

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self._gathering = Gathering(f"{self.call_prefix}_{request.id}")

    @abc.abstractmethod
    def begin(self) -> list[bytes]:
        """What can be said before the first delta, so that the caller sees the answer has begun."""

    def delta(self, delta: Delta) -> list[bytes]:
        return self.written(self._gathering.feed(delta))

    def end(self) -> list[bytes]:
        """The end, whether or not a StopDelta came before."""
        return [*self.written(self._gathering.close()), *self.finish(self.reply())]

    @abc.abstractmethod
    def error(self, status: int, kind: str, message: str) -> list[bytes]:
        """The end of an answer that broke: its status has been sent, so the error goes where the answer would."""

    def reply(self) -> ModelReply:
        """All that was given so far: after the end, the whole answer."""
        return self._gathering.reply()

    @abc.abstractmethod
    def written(self, steps: list[Step]) -> list[bytes]:
        """The steps in this dialect."""

    @abc.abstractmethod
    def finish(self, reply: ModelReply) -> list[bytes]:
        """What follows the last part."""
