"""Provider-neutral requests and replies: the types of a function that is a model; pure.

A dialect converts its JSON to a `ModelRequest`, and a `ModelReply` or deltas to its JSON; fields without a neutral
form stay in `raw`, `OtherPart` and `extra`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from holdfast.errors import InvalidParams

#: A JSON object of a provider or client.
JsonObject = Mapping[str, Any]

DialectName = Literal["openai_chat", "openai_responses", "openai_completions", "anthropic", "google"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
#: A `custom` tool takes free text instead of JSON; a `builtin` one runs at the provider and has no schema here.
ToolKind = Literal["function", "custom", "builtin"]
StopReason = Literal["end", "length", "stop_sequence", "tool_use", "refusal", "pause"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Text. `refusal` is true where the model explains why it does not answer."""

    text: str
    refusal: bool = False
    #: Google signs any part, and requires the signature back with the part.
    signature: str = ""


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """An image: by its bytes, by URL, or by the provider's id of an upload."""

    data: bytes = b""
    media_type: str = ""
    url: str = ""
    file_id: str = ""
    detail: str = ""


class FilePart(msgspec.Struct, frozen=True, tag="file"):
    """A document, audio or video, given like an image; plain text is given by its bytes."""

    data: bytes = b""
    media_type: str = ""
    url: str = ""
    file_id: str = ""
    name: str = ""


class ThinkingPart(msgspec.Struct, frozen=True, tag="thinking"):
    """Reasoning of the model. Signature and encrypted text go back to the provider unchanged."""

    text: str = ""
    signature: str = ""
    #: Anthropic's redacted thinking, OpenAI's encrypted reasoning.
    encrypted: str = ""
    id: str = ""


class ToolCallPart(msgspec.Struct, frozen=True, tag="tool_call"):
    """A tool call by the model. `arguments` is the JSON as the model wrote it, or the text of a custom tool."""

    id: str
    name: str
    arguments: str = "{}"
    kind: ToolKind = "function"
    namespace: str = ""
    signature: str = ""

    def parsed_arguments(self) -> dict[str, Any]:
        """Return the arguments as an object; raise InvalidParams if the model wrote anything else."""
        try:
            value = msgspec.json.decode(self.arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidParams(f"the arguments of tool call {self.name!r} are not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidParams(f"the arguments of tool call {self.name!r} are not a JSON object")
        return value


class OtherPart(msgspec.Struct, frozen=True, tag="other"):
    """A part without a neutral form (a search result, a compaction), unparsed. Rendered only in its own dialect."""

    dialect: DialectName
    kind: str
    raw: JsonObject


class ToolResultPart(msgspec.Struct, frozen=True, tag="tool_result"):
    """Result of a tool call."""

    call_id: str
    content: tuple[TextPart | ImagePart | FilePart | OtherPart, ...] = ()
    is_error: bool = False
    #: Google refers to the tool instead of the call.
    name: str = ""
    kind: ToolKind = "function"


Part = TextPart | ImagePart | FilePart | ThinkingPart | ToolCallPart | ToolResultPart | OtherPart


class Message(msgspec.Struct, frozen=True):
    """One turn. Tool results have role `tool` in every dialect; consecutive results are one turn."""

    role: Role
    content: tuple[Part, ...] = ()
    name: str = ""

    @property
    def text(self) -> str:
        """All text, without reasoning and refusals."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart) and not part.refusal)


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may call; `raw` is its unparsed definition with the settings of its dialect."""

    name: str
    description: str = ""
    schema: JsonObject = {}
    kind: ToolKind = "function"
    namespace: str = ""
    raw: JsonObject = {}


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether tools are called. `names` narrows the choice; one name with `required` forces that tool."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


class Format(msgspec.Struct, frozen=True):
    """Required format of the text: any JSON, or JSON of this schema."""

    kind: Literal["json", "json_schema"]
    schema: JsonObject = {}
    name: str = ""


class Thinking(msgspec.Struct, frozen=True):
    """Requested amount of reasoning. `effort` is the dialect's own value."""

    enabled: bool = True
    budget: int | None = None
    effort: str = ""


class Params(msgspec.Struct, frozen=True):
    """Sampling parameters. None: not given."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    #: Number of replies. A function gives one.
    n: int = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    format: Format | None = None
    thinking: Thinking | None = None


def _new_id() -> str:
    return secrets.token_hex(12)


def _now() -> int:
    return int(time.time())


class ModelRequest(msgspec.Struct, frozen=True):
    """One parsed request. `system` has the instructions before the first turn; later ones are turns."""

    model: str
    dialect: DialectName
    messages: tuple[Message, ...] = ()
    system: str = ""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    params: Params = Params()
    stream: bool = False
    #: The whole body: logprobs, metadata, cache marks, fields newer than this module.
    raw: JsonObject = {}
    #: Streams as server-sent events, or as Google's older JSON array.
    sse: bool = True
    #: For replies without an id and a time of their own.
    id: str = msgspec.field(default_factory=_new_id)
    created: int = msgspec.field(default_factory=_now)


class TokenUsage(msgspec.Struct, frozen=True):
    """Token counts. In every dialect `input` includes cached tokens and `output` includes reasoning."""

    input: int = 0
    output: int = 0
    cached: int = 0
    cache_write: int = 0
    thinking: int = 0

    @property
    def total(self) -> int:
        return self.input + self.output

    def merged(self, later: TokenUsage) -> TokenUsage:
        """Return the larger of each count: streams report growing counts."""
        return TokenUsage(
            max(self.input, later.input),
            max(self.output, later.output),
            max(self.cached, later.cached),
            max(self.cache_write, later.cache_write),
            max(self.thinking, later.thinking),
        )


#: The public name in `holdfast.bridge`.
Usage = TokenUsage


class ModelReply(msgspec.Struct, frozen=True):
    """A whole reply. A missing stop reason is `tool_use` if it calls a tool and `end` otherwise."""

    content: tuple[Part, ...] = ()
    stop_reason: StopReason | None = None
    usage: TokenUsage = TokenUsage()
    #: Name of the model; by default the requested one.
    model: str = ""
    id: str = ""
    stop_sequence: str = ""
    #: By dialect: fields to merge into the rendered body. `choice` (OpenAI) and `candidate` (Google) are nested.
    extra: Mapping[str, JsonObject] = {}

    @property
    def reason(self) -> StopReason:
        if self.stop_reason is not None:
            return self.stop_reason
        return "tool_use" if any(isinstance(part, ToolCallPart) for part in self.content) else "end"

    @property
    def text(self) -> str:
        return Message("assistant", self.content).text


class TextDelta(msgspec.Struct, frozen=True, tag="text"):
    """More text. `begins` starts a new part after a text part."""

    text: str
    refusal: bool = False
    signature: str = ""
    begins: bool = False


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking"):
    """More reasoning; signature, encrypted text and id may come with any piece, the last value counts."""

    text: str = ""
    signature: str = ""
    encrypted: str = ""
    id: str = ""
    begins: bool = False


class ToolCallDelta(msgspec.Struct, frozen=True, tag="tool_call"):
    """More of tool call `index`, counted from 0 within the reply.

    The first piece has id and name; the pieces of one call are consecutive.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    kind: ToolKind = "function"
    namespace: str = ""
    signature: str = ""


class PartDelta(msgspec.Struct, frozen=True, tag="part"):
    """A part that arrives whole: an image, or a part without a neutral form."""

    part: ImagePart | FilePart | OtherPart


class StopDelta(msgspec.Struct, frozen=True, tag="stop"):
    """The end, with facts that are known only then."""

    stop_reason: StopReason | None = None
    usage: TokenUsage = TokenUsage()
    stop_sequence: str = ""
    model: str = ""
    extra: Mapping[str, JsonObject] = {}


Delta = TextDelta | ThinkingDelta | ToolCallDelta | PartDelta | StopDelta
