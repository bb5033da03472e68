"""The stream of `/v1/responses`: named, numbered events announce, fill and finish each item; pure."""

from __future__ import annotations

from typing import Any

from holdfast.bridge.dialects.fields import json_text
from holdfast.bridge.dialects.openai_responses import finished, item, response, text_content
from holdfast.bridge.dialects.streaming import AnswerStream, PartClosed, PartEvent, PartGrew, PartOpened
from holdfast.bridge.sse import sse
from holdfast.bridge.types import ModelReply, ModelRequest, Part, TextPart, ThinkingPart, ToolCallPart

#: Codes of a failed response; clients depend on them.
_FAILURES = {429: "rate_limit_exceeded"}


def stream(request: ModelRequest) -> ResponseStream:
    return ResponseStream(request)


class ResponseStream(AnswerStream):
    """One response as events. The last event contains it whole."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._number = -1
        self._items: list[dict[str, Any]] = []
        # State of the open item.
        self._id = ""
        self._summary_open = False

    def begin(self) -> list[bytes]:
        started = response(self.request, "in_progress", [])
        return [
            self._event("response.created", response=started),
            self._event("response.in_progress", response=started),
        ]

    def written(self, steps: list[PartEvent]) -> list[bytes]:
        events: list[bytes] = []
        for step in steps:
            match step:
                case PartOpened(index=index, part=part):
                    events.extend(self._open(index, part))
                case PartGrew(part=part, text=text):
                    events.extend(self._grow(part, text))
                case PartClosed(index=index, part=part):
                    events.extend(self._close(index, part))
        return events

    def finish(self, reply: ModelReply) -> list[bytes]:
        whole = finished(reply, self.request, self._items)
        # The first event carried the id, so it cannot change.
        whole["id"] = f"resp_{self.request.id}"
        name = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return [self._event(name, response=whole)]

    def error(self, status: int, kind: str, message: str) -> list[bytes]:
        failure = {"code": kind or _FAILURES.get(status, "server_error"), "message": message}
        failed = response(self.request, "failed", self._items, error=failure)
        return [self._event("response.failed", response=failed)]

    def _open(self, index: int, part: Part) -> list[bytes]:
        begun = item(part, self.request, index, "in_progress")
        if begun is None:
            return []
        self._id = begun.get("id", "")
        self._summary_open = False
        if isinstance(part, TextPart):
            begun["content"] = []
        if begun["type"] == "function_call":
            begun["arguments"] = ""
        added = self._item_event("response.output_item.added", item=begun)
        if not isinstance(part, TextPart):
            return [added]
        return [added, self._content_event("response.content_part.added", part=text_content(part))]

    def _grow(self, part: Part, text: str) -> list[bytes]:
        match part:
            case TextPart(refusal=True):
                return [self._content_event("response.refusal.delta", delta=text)]
            case TextPart():
                return [self._content_event("response.output_text.delta", delta=text, logprobs=[])]
            case ThinkingPart():
                begun = self._summary_begun()
                return [*begun, self._summary_event("response.reasoning_summary_text.delta", delta=text)]
            case ToolCallPart(kind="custom"):
                return [self._input_event("response.custom_tool_call_input.delta", delta=text)]
            case ToolCallPart():
                return [self._input_event("response.function_call_arguments.delta", delta=text)]
            case _:
                return []

    def _summary_begun(self) -> list[bytes]:
        if self._summary_open:
            return []
        self._summary_open = True
        empty = {"type": "summary_text", "text": ""}
        return [self._summary_event("response.reasoning_summary_part.added", part=empty)]

    def _close(self, index: int, part: Part) -> list[bytes]:
        done = item(part, self.request, index)
        if done is None:
            return []
        if self._id:
            # A reasoning part may get the provider's id after it was announced under ours.
            done["id"] = self._id
        events = [*self._filled(part), self._item_event("response.output_item.done", item=done)]
        self._items.append(done)
        return events

    def _filled(self, part: Part) -> list[bytes]:
        match part:
            case TextPart():
                fields = {"refusal": part.text} if part.refusal else {"text": part.text, "logprobs": []}
                name = "response.refusal.done" if part.refusal else "response.output_text.done"
                whole = self._content_event(name, **fields)
                return [whole, self._content_event("response.content_part.done", part=text_content(part))]
            case ThinkingPart() if self._summary_open:
                summary = {"type": "summary_text", "text": part.text}
                whole = self._summary_event("response.reasoning_summary_text.done", text=part.text)
                return [whole, self._summary_event("response.reasoning_summary_part.done", part=summary)]
            case ToolCallPart(kind="custom"):
                return [self._input_event("response.custom_tool_call_input.done", input=part.arguments)]
            case ToolCallPart():
                name = "response.function_call_arguments.done"
                return [self._input_event(name, name=part.name, arguments=part.arguments)]
            case _:
                return []

    def _item_event(self, event: str, /, **fields: Any) -> bytes:
        return self._event(event, output_index=len(self._items), **fields)

    def _content_event(self, event: str, /, **fields: Any) -> bytes:
        return self._item_event(event, item_id=self._id, content_index=0, **fields)

    def _summary_event(self, event: str, /, **fields: Any) -> bytes:
        return self._item_event(event, item_id=self._id, summary_index=0, **fields)

    def _input_event(self, event: str, /, **fields: Any) -> bytes:
        return self._item_event(event, item_id=self._id, **fields)

    def _event(self, event: str, /, **fields: Any) -> bytes:
        self._number += 1
        # The event repeats the request's settings, which may be any JSON.
        return sse(json_text({"type": event, "sequence_number": self._number, **fields}).encode(), event)
