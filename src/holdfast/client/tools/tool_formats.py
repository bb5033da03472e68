"""The tools of `UnifiedExec` in the formats of model providers: definitions, calls and results. Pure.

A call may be the dict of the provider's JSON or the object of its SDK. Arguments that a model got wrong become a
result with an error, which the model can correct; a call without a name is an error of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from holdfast.errors import InvalidParams

#: `openai` is Chat Completions, which compatible servers also have; `openai-responses` is the Responses API.
ToolFormat = Literal["openai", "openai-responses", "anthropic", "google", "json-schema"]
FORMATS: Final = ("openai", "openai-responses", "anthropic", "google", "json-schema")

_YieldTime = Annotated[int, Meta(description="Milliseconds to wait for output before the call returns.")]
_MaxOutput = Annotated[int, Meta(ge=2, description="Bytes of output to return at most.")]


class ExecCommandArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Run a shell command. Returns its output, and its exit_code if it ended, or a session_id if it still runs."""

    cmd: Annotated[str, Meta(description="The command, for the shell of the sandbox.")]
    workdir: Annotated[str, Meta(description="The working directory; empty for the default.")] = ""
    tty: Annotated[bool, Meta(description="Run on a terminal, so that write_stdin can type to it.")] = False
    login: Annotated[bool, Meta(description="Run the user's profile before it; false starts faster.")] = True
    yield_time_ms: _YieldTime = 10_000
    max_output_bytes: _MaxOutput = 40_000


class WriteStdinArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Type characters to a running session, or only read its output. Returns the output since the last call."""

    session_id: Annotated[int, Meta(description="The session_id that exec_command returned.")]
    chars: Annotated[str, Meta(description="The characters to type; empty to only read.")] = ""
    yield_time_ms: _YieldTime = 250
    max_output_bytes: _MaxOutput = 40_000


Arguments = ExecCommandArguments | WriteStdinArguments
TOOLS: Final[Mapping[str, type[ExecCommandArguments] | type[WriteStdinArguments]]] = {
    "exec_command": ExecCommandArguments,
    "write_stdin": WriteStdinArguments,
}


class ToolCall(msgspec.Struct, frozen=True):
    """A call, independent of its format."""

    id: str | None
    name: str
    arguments: object


def check_format(format: str) -> None:
    if format not in FORMATS:
        raise InvalidParams(f"format {format!r}: one of {', '.join(FORMATS)}")


def definitions(format: ToolFormat) -> list[dict[str, Any]]:
    """The value of `tools` in a request of the provider."""
    check_format(format)
    plain = [_definition(name, arguments) for name, arguments in TOOLS.items()]
    if format == "openai":
        return [{"type": "function", "function": each} for each in plain]
    if format == "openai-responses":
        # Strict mode requires every parameter, and these have defaults.
        return [{"type": "function", **each, "strict": False} for each in plain]
    if format == "anthropic":
        return [_renamed(each, "input_schema") for each in plain]
    if format == "google":
        return [{"functionDeclarations": [_renamed(each, "parametersJsonSchema") for each in plain]}]
    return plain


def parse_call(call: object, format: ToolFormat) -> ToolCall:
    """The call in a reply of the provider; `InvalidParams` if it is none of this format."""
    check_format(format)
    found = _as_mapping(call)
    if format == "openai":
        function = _as_mapping(found.get("function", {}))
        parts = found.get("id"), function.get("name"), function.get("arguments")
    elif format == "openai-responses":
        parts = found.get("call_id"), found.get("name"), found.get("arguments")
    elif format == "anthropic":
        parts = found.get("id"), found.get("name"), found.get("input")
    elif format == "google":
        inner = found.get("functionCall") or found.get("function_call") or found
        function = _as_mapping(inner)
        parts = function.get("id"), function.get("name"), function.get("args")
    else:
        parts = found.get("id"), found.get("name"), found.get("arguments")
    id, name, arguments = parts
    if not isinstance(name, str) or not name:
        raise InvalidParams(f"call: no tool call in the format {format!r}: {str(call)[:200]}")
    if not isinstance(id, str) and (id is not None or format in ("openai", "openai-responses", "anthropic")):
        raise InvalidParams(f"call of {name!r}: its id is missing, which a result in the format {format!r} needs")
    return ToolCall(id, name, arguments)


def parse_arguments(call: ToolCall) -> Arguments:
    """The arguments of a call; `InvalidParams` names the tool and the argument that is wrong."""
    kind = TOOLS.get(call.name)
    if kind is None:
        raise InvalidParams(f"no tool {call.name!r}; the tools are {', '.join(TOOLS)}")
    given = call.arguments
    try:
        if isinstance(given, str):
            return msgspec.json.decode(given or "{}", type=kind)
        return msgspec.convert({} if given is None else given, kind)
    except msgspec.MsgspecError as error:
        raise InvalidParams(f"{call.name}: {error}") from None


def result(call: ToolCall, format: ToolFormat, value: dict[str, Any], *, failed: bool) -> dict[str, Any]:
    """The result for the next request to the provider."""
    text = json.dumps(value, ensure_ascii=False)
    if format == "openai":
        return {"role": "tool", "tool_call_id": call.id, "content": text}
    if format == "openai-responses":
        return {"type": "function_call_output", "call_id": call.id, "output": text}
    if format == "anthropic":
        return {"type": "tool_result", "tool_use_id": call.id, "content": text, "is_error": failed}
    named = ({} if call.id is None else {"id": call.id}) | {"name": call.name}
    return {"functionResponse": {**named, "response": value}} if format == "google" else {**named, "result": value}


def _definition(name: str, arguments: type[Any]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components((arguments,))
    schema = {key: value for key, value in components[arguments.__name__].items() if key != "title"}
    return {"name": name, "description": schema.pop("description"), "parameters": schema}


def _renamed(definition: dict[str, Any], parameters: str) -> dict[str, Any]:
    return {(parameters if key == "parameters" else key): value for key, value in definition.items()}


def _as_mapping(value: object) -> Mapping[str, Any]:
    """A dict, or the fields of an SDK's object."""
    dump = getattr(value, "model_dump", None)
    found = dump() if callable(dump) else value
    if not isinstance(found, Mapping):
        raise InvalidParams(f"call: a tool call, not {str(value)[:200]}")
    return found
