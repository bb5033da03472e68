"""What is asked of a model and what it answers, in words of no provider: the types of a function that is a model.

Pure. A dialect turns its own JSON into a `ModelRequest`, and a `ModelReply` or a run of deltas into its own JSON;
what has no word here stays in `raw`, `OtherPart` and `extra`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from holdfast.errors import InvalidParams

#: A JSON object that belongs to somebody else.
JsonObject = Mapping[str, Any]

DialectName = Literal["openai_chat", "openai_responses", "openai_completions", "anthropic", "google"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
#: A `custom` tool takes free text rather than JSON; a `builtin` one runs at the provider and has no schema here.
ToolKind = Literal["function", "custom", "builtin"]
StopReason = Literal["end", "length", "stop_sequence", "tool_use", "refusal", "pause"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Words. A refusal is words too: `refusal` is true where the model says why it will not answer."""

    text: str
    refusal: bool = False
    #: Google signs any part; it wants the signature back with the part.
    signature: str = ""


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """An image: by its bytes, by where it is, or by the provider's id of an upload."""

    data: bytes = b""
    media_type: str = ""
    url: str = ""
    file_id: str = ""
    detail: str = ""


class FilePart(msgspec.Struct, frozen=True, tag="file"):
    """A document, a sound, a film: given as an image is; a plain text by its bytes. `media_type` says which."""

    data: bytes = b""
    media_type: str = ""
    url: str = ""
    file_id: str = ""
    name: str = ""


class ThinkingPart(msgspec.Struct, frozen=True, tag="thinking"):
    """What the model thought. Signature and encrypted text are the provider's: they go back to it untouched."""

    text: str = ""
    signature: str = ""
    #: Anthropic's redacted thinking, OpenAI's encrypted reasoning.
    encrypted: str = ""
    id: str = ""


class ToolCallPart(msgspec.Struct, frozen=True, tag="tool_call"):
    """The model wants a tool run. `arguments` is the JSON as the model wrote it, or the text of a custom tool."""

    id: str
    name: str
    arguments: str = "{}"
    kind: ToolKind = "function"
    namespace: str = ""
    signature: str = ""

    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments as an object. A model may have written something that is none: InvalidParams says so."""
        try:
            value = msgspec.json.decode(self.arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidParams(f"the arguments of tool call {self.name!r} are not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidParams(f"the arguments of tool call {self.name!r} are not a JSON object")
        return value


class OtherPart(msgspec.Struct, frozen=True, tag="other"):
    """Something with no word here (a search result, a compaction), as it came. Rendered only in its own dialect."""

    dialect: DialectName
    kind: str
    raw: JsonObject


class ToolResultPart(msgspec.Struct, frozen=True, tag="tool_result"):
    """What a tool gave back."""

    call_id: str
    content: tuple[TextPart | ImagePart | FilePart | OtherPart, ...] = ()
    is_error: bool = False
    #: Google names the tool rather than the call.
    name: str = ""
    kind: ToolKind = "function"


Part = TextPart | ImagePart | FilePart | ThinkingPart | ToolCallPart | ToolResultPart | OtherPart


class Message(msgspec.Struct, frozen=True):
    """One turn. Results of tools are turns of role `tool` in every dialect; results in a row are one turn."""

    role: Role
    content: tuple[Part, ...] = ()
    name: str = ""

    @property
    def text(self) -> str:
        """All its words, without thoughts and refusals."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart) and not part.refusal)


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may call; `raw` is its definition as it came, with the settings of its dialect."""

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
    """What the words of the answer must be: any JSON, or JSON of this schema."""

    kind: Literal["json", "json_schema"]
    schema: JsonObject = {}
    name: str = ""


class Thinking(msgspec.Struct, frozen=True):
    """How much the model should think, as far as the caller says. `effort` is the dialect's own word."""

    enabled: bool = True
    budget: int | None = None
    effort: str = ""


class Params(msgspec.Struct, frozen=True):
    """How to sample. What the caller left out is None."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    #: How many answers. A function gives one.
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
    """One request, read. `system` has the instructions before the first turn; later ones are turns of their own."""

    model: str
    dialect: DialectName
    messages: tuple[Message, ...] = ()
    system: str = ""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    params: Params = Params()
    stream: bool = False
    #: The body as it came, whole: logprobs, metadata, cache marks, whatever is newer than this file.
    raw: JsonObject = {}
    #: Server-sent events, or Google's older JSON array, when it streams.
    sse: bool = True
    #: For answers that name no id and no time of their own.
    id: str = msgspec.field(default_factory=_new_id)
    created: int = msgspec.field(default_factory=_now)


class TokenUsage(msgspec.Struct, frozen=True):
    """Tokens. `input` includes the cached and the cache-written, `output` includes thinking, in every dialect."""

    input: int = 0
    output: int = 0
    cached: int = 0
    cache_write: int = 0
    thinking: int = 0

    @property
    def total(self) -> int:
        return self.input + self.output

    def merged(self, later: TokenUsage) -> TokenUsage:
        """Streams tell their counts in steps, each count growing: the largest of each is the true one."""
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
    """A whole answer. A stop reason left out is `tool_use` if it calls a tool and `end` otherwise."""

    content: tuple[Part, ...] = ()
    stop_reason: StopReason | None = None
    usage: TokenUsage = TokenUsage()
    #: The model's name; left out, the one that was asked for.
    model: str = ""
    id: str = ""
    stop_sequence: str = ""
    #: By dialect: fields to lay over the rendered body. `choice` (OpenAI) and `candidate` (Google) reach inside.
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
    """More words. `begins` starts a new part where the last one was words too."""

    text: str
    refusal: bool = False
    signature: str = ""
    begins: bool = False


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking"):
    """More thought; signature, encrypted text and id come with any piece, the last given counts."""

    text: str = ""
    signature: str = ""
    encrypted: str = ""
    id: str = ""
    begins: bool = False


class ToolCallDelta(msgspec.Struct, frozen=True, tag="tool_call"):
    """More of tool call `index`, which the answer counts from 0. Its first piece has id and name; a call's pieces
    come together, as models write them."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    kind: ToolKind = "function"
    namespace: str = ""
    signature: str = ""


class PartDelta(msgspec.Struct, frozen=True, tag="part"):
    """A part that comes whole: an image, something with no word here."""

    part: ImagePart | FilePart | OtherPart


class StopDelta(msgspec.Struct, frozen=True, tag="stop"):
    """The end, with what is only known then."""

    stop_reason: StopReason | None = None
    usage: TokenUsage = TokenUsage()
    stop_sequence: str = ""
    model: str = ""
    extra: Mapping[str, JsonObject] = {}


Delta = TextDelta | ThinkingDelta | ToolCallDelta | PartDelta | StopDelta
