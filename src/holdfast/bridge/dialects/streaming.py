"""Converts deltas to part events and back, assembles whole replies, and has the base class of streamed replies.

Pure, and the only place with these rules, so that every dialect streams the same parts. A part is open until a
delta arrives that does not belong to it; a closed part stays closed.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator

import msgspec

from holdfast.bridge.sse import CONTENT_TYPE
from holdfast.bridge.types import (
    Delta,
    FilePart,
    ImagePart,
    ModelReply,
    ModelRequest,
    OtherPart,
    Part,
    PartDelta,
    StopDelta,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    ToolCallDelta,
    ToolCallPart,
    ToolResultPart,
)
from holdfast.errors import InvalidParams


class PartOpened(msgspec.Struct, frozen=True):
    """Part `index` begins; `part` has the constant fields (kind, id, name) and nothing that grows."""

    index: int
    part: Part


class PartGrew(msgspec.Struct, frozen=True):
    """Text, reasoning or arguments were added to the open part."""

    index: int
    part: Part
    text: str


class PartClosed(msgspec.Struct, frozen=True):
    """Part `index` is complete."""

    index: int
    part: Part


PartEvent = PartOpened | PartGrew | PartClosed


class ReplyBuilder:
    """Converts deltas to part events and collects the parts. `prefix` names calls without an id."""

    def __init__(self, prefix: str = "call") -> None:
        self._prefix = prefix
        self._parts: list[Part] = []
        # Pieces of the open part are joined once, when it closes: a long reply is not copied at each token.
        self._open: Part | None = None
        self._pieces: list[str] = []
        self._call = -1
        self._stop = StopDelta()

    def feed(self, delta: Delta) -> list[PartEvent]:
        match delta:
            case TextDelta():
                return self._text(delta)
            case ThinkingDelta():
                return self._thinking(delta)
            case ToolCallDelta():
                return self._tool_call(delta)
            case PartDelta():
                steps = [*self.close(), *self._begin(delta.part)]
                return [*steps, *self.close()]
            case StopDelta():
                self._stop = delta
                return self.close()

    def close(self) -> list[PartEvent]:
        """Close the open part, if any."""
        if self._open is None:
            return []
        steps: list[PartEvent] = []
        if isinstance(self._open, ToolCallPart) and self._open.kind == "function" and not self._pieces:
            # A call without arguments: clients decode the arguments, and an empty text is not JSON.
            steps = self._grow("{}")
        whole = _with_text(self._open, "".join(self._pieces))
        self._parts.append(whole)
        self._open = None
        self._pieces = []
        return [*steps, PartClosed(len(self._parts) - 1, whole)]

    def reply(self, model: str = "", id: str = "") -> ModelReply:
        """Return everything so far as a whole reply, without closing the open part."""
        stop = self._stop
        unfinished = () if self._open is None else (_with_text(self._open, "".join(self._pieces)),)
        return ModelReply(
            (*self._parts, *unfinished),
            stop.stop_reason,
            stop.usage,
            stop.model or model,
            id,
            stop.stop_sequence,
            stop.extra,
        )

    def _begin(self, part: Part) -> list[PartEvent]:
        self._open = part
        return [PartOpened(len(self._parts), part)]

    def _grow(self, text: str) -> list[PartEvent]:
        if not text or self._open is None:
            return []
        self._pieces.append(text)
        return [PartGrew(len(self._parts), self._open, text)]

    def _text(self, delta: TextDelta) -> list[PartEvent]:
        steps: list[PartEvent] = []
        current = self._open
        if delta.begins or not isinstance(current, TextPart) or current.refusal != delta.refusal:
            steps = [*self.close(), *self._begin(TextPart("", delta.refusal))]
        if delta.signature:
            self._open = TextPart("", delta.refusal, delta.signature)
        return [*steps, *self._grow(delta.text)]

    def _thinking(self, delta: ThinkingDelta) -> list[PartEvent]:
        steps: list[PartEvent] = []
        current = self._open
        if delta.begins or not isinstance(current, ThinkingPart):
            current = ThinkingPart("", delta.signature, delta.encrypted, delta.id)
            steps = [*self.close(), *self._begin(current)]
        self._open = ThinkingPart(
            "", delta.signature or current.signature, delta.encrypted or current.encrypted, current.id or delta.id
        )
        return [*steps, *self._grow(delta.text)]

    def _tool_call(self, delta: ToolCallDelta) -> list[PartEvent]:
        current = self._open
        if isinstance(current, ToolCallPart) and delta.index == self._call:
            if delta.signature:
                self._open = msgspec.structs.replace(current, signature=delta.signature)
            return self._grow(delta.arguments)
        if delta.index <= self._call:
            raise InvalidParams(
                f"tool call {delta.index}: a piece came after the call had ended; send its pieces consecutively"
            )
        if not delta.name:
            raise InvalidParams(f"tool call {delta.index}: its first piece has no name")
        self._call = delta.index
        id_ = delta.id or f"{self._prefix}_{delta.index}"
        part = ToolCallPart(id_, delta.name, "", delta.kind, delta.namespace, delta.signature)
        return [*self.close(), *self._begin(part), *self._grow(delta.arguments)]


def _with_text(part: Part, text: str) -> Part:
    match part:
        case TextPart() | ThinkingPart():
            return msgspec.structs.replace(part, text=text)
        case ToolCallPart():
            return msgspec.structs.replace(part, arguments=text)
        case _:
            return part


def deltas_of(reply: ModelReply) -> Iterator[Delta]:
    """Yield a whole reply as deltas, for a caller that requested a stream."""
    calls = 0
    for part in reply.content:
        match part:
            case TextPart():
                yield TextDelta(part.text, part.refusal, part.signature, begins=True)
            case ThinkingPart():
                yield ThinkingDelta(part.text, part.signature, part.encrypted, part.id, begins=True)
            case ToolCallPart():
                yield ToolCallDelta(
                    calls, part.id, part.name, part.arguments, part.kind, part.namespace, part.signature
                )
                calls += 1
            case ImagePart() | FilePart() | OtherPart():
                yield PartDelta(part)
            case ToolResultPart():
                raise InvalidParams("a reply holds a tool result: only callers send those")
    yield StopDelta(reply.stop_reason, reply.usage, reply.stop_sequence, reply.model, reply.extra)


class AnswerStream(abc.ABC):
    """One streamed reply: `begin`, `delta` for each, then `end`, or `error` when it fails.

    Each method returns the bytes to send.
    """

    #: Content type of the response.
    content_type = CONTENT_TYPE
    #: Prefix of ids for tool calls that have none.
    call_prefix = "call"

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self._builder = ReplyBuilder(f"{self.call_prefix}_{request.id}")

    @abc.abstractmethod
    def begin(self) -> list[bytes]:
        """Return the bytes before the first delta, so that the caller sees the reply begin."""

    def delta(self, delta: Delta) -> list[bytes]:
        return self.written(self._builder.feed(delta))

    def end(self) -> list[bytes]:
        """Return the end, with or without a preceding StopDelta."""
        return [*self.written(self._builder.close()), *self.finish(self.reply())]

    @abc.abstractmethod
    def error(self, status: int, kind: str, message: str) -> list[bytes]:
        """Return the end of a failed reply. The status was already sent, so the error goes into the body."""

    def reply(self) -> ModelReply:
        """Return everything so far: after the end, the whole reply."""
        return self._builder.reply()

    @abc.abstractmethod
    def written(self, steps: list[PartEvent]) -> list[bytes]:
        """Render part events in this dialect."""

    @abc.abstractmethod
    def finish(self, reply: ModelReply) -> list[bytes]:
        """Return the bytes after the last part."""
