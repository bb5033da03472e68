"""Tools in the formats of providers: the SDKs' own types accept definitions and results, and parse as calls."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from anthropic.types import ToolParam, ToolResultBlockParam, ToolUseBlock
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionToolMessageParam,
)
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall
from openai.types.responses.response_input_item_param import FunctionCallOutput
from pydantic import TypeAdapter

import holdfast
from holdfast.client.tools.tool_formats import FORMATS, ToolFormat
from holdfast.errors import InvalidParams

with warnings.catch_warnings():
    # A docstring of this module has an invalid escape sequence, which Python reports when it compiles the module.
    warnings.simplefilter("ignore", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    from google.genai import types as google

ARGUMENTS = {"cmd": "echo $((6 * 7)); exit 3"}
TEXT = json.dumps(ARGUMENTS)
CALLS: dict[ToolFormat, Any] = {
    "openai": ChatCompletionMessageFunctionToolCall.model_validate(
        {"id": "c1", "type": "function", "function": {"name": "exec_command", "arguments": TEXT}}
    ),
    "openai-responses": ResponseFunctionToolCall(
        call_id="c1", name="exec_command", arguments=TEXT, type="function_call"
    ),
    "anthropic": ToolUseBlock.model_validate(
        {"id": "c1", "name": "exec_command", "input": ARGUMENTS, "type": "tool_use"}
    ),
    "google": google.Part(function_call=google.FunctionCall(id="c1", name="exec_command", args=ARGUMENTS)),
    "json-schema": {"id": "c1", "name": "exec_command", "arguments": ARGUMENTS},
}
DEFINITIONS: dict[ToolFormat, Any] = {
    "openai": ChatCompletionFunctionToolParam,
    "openai-responses": FunctionToolParam,
    "anthropic": ToolParam,
    "google": google.Tool,
}
RESULTS: dict[ToolFormat, Any] = {
    "openai": ChatCompletionToolMessageParam,
    "openai-responses": FunctionCallOutput,
    "anthropic": ToolResultBlockParam,
    "google": google.Part,
}


def value_of(found: dict[str, Any]) -> Any:
    for key in ("content", "output"):
        if key in found:
            return json.loads(found[key])
    return found["result"] if "result" in found else found["functionResponse"]["response"]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_call_of_each_format_has_a_result_of_that_format(format: ToolFormat) -> None:
    async with holdfast.connect("inprocess") as box, holdfast.UnifiedExec(box) as tools:
        defined = tools.tools(format)
        found = await tools.call(CALLS[format], format)
    if format in DEFINITIONS:
        for each in defined:
            TypeAdapter(DEFINITIONS[format]).validate_python(each)
        TypeAdapter(RESULTS[format]).validate_python(found)
    assert "c1" in json.dumps(found)
    assert (value_of(found)["exit_code"], value_of(found)["output"]) == (3, "42\n")


async def test_errors_that_a_model_can_correct_are_results() -> None:
    async with holdfast.connect("inprocess") as box, holdfast.UnifiedExec(box) as tools:
        for name, arguments, problem in (
            ("exec_command", {}, "missing required field `cmd`"),
            ("exec_command", {"cmd": "true", "timeout": 3}, "unknown field `timeout`"),
            ("exec_command", "{", "truncated"),
            ("write_stdin", {"session_id": 9}, "no session 9"),
            ("other", {}, "no tool 'other'"),
        ):
            found = await tools.call({"id": "c", "name": name, "input": arguments}, "anthropic")
            assert found["is_error"] is True
            assert problem in json.loads(found["content"])["error"]
        with pytest.raises(InvalidParams, match="no tool call in the format 'openai'"):
            await tools.call({"name": "exec_command"}, "openai")
        with pytest.raises(InvalidParams, match="its id is missing"):
            await tools.call({"name": "exec_command", "input": {}}, "anthropic")
        with pytest.raises(InvalidParams, match="format 'x'"):
            tools.tools("x")  # type: ignore[arg-type]


async def test_a_session_is_continued_by_calls() -> None:
    async with holdfast.connect("inprocess") as box, holdfast.UnifiedExec(box) as tools:
        arguments = {"cmd": "read line; echo got $line", "tty": True, "yield_time_ms": 250}
        first = await tools.call({"name": "exec_command", "arguments": arguments})
        session_id = first["result"]["session_id"]
        typed = {"session_id": session_id, "chars": "it\n", "yield_time_ms": 30_000}
        last = await tools.call({"name": "write_stdin", "arguments": json.dumps(typed)})
        assert last["result"]["exit_code"] == 0
        assert "got it" in last["result"]["output"]
