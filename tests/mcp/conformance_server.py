"""The server of `holdfast mcp` with the fixtures that the conformance suite calls; prints its URL.

The fixtures are in this file alone. Assembly and transport are those of `holdfast mcp`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any, Literal

from mcp.server.mcpserver import Audio, Context, Image, UserMessage
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import (
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    EmbeddedResource,
    ImageContent,
    SamplingMessage,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel, Field

from holdfast.integrations.mcp.http import serving_http
from holdfast.integrations.mcp.server import SandboxServer
from holdfast.integrations.mcp.sources import ExistingSandbox


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


#: One red pixel.
PNG = (
    b"\x89PNG\r\n\x1a\n"
    + _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    + _chunk(b"IDAT", zlib.compress(b"\0\xff\0\0"))
    + _chunk(b"IEND", b"")
)
#: No samples.
WAV = (
    b"RIFF"
    + struct.pack("<I", 36)
    + b"WAVEfmt "
    + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8)
    + b"data\0\0\0\0"
)


class Answer(BaseModel):
    username: str = Field(description="User's response")
    email: str = Field(description="User's email address")


class Defaults(BaseModel):
    name: str = "John Doe"
    age: int = 30
    score: float = 95.5
    status: Literal["active", "inactive", "pending"] = "active"
    verified: bool = True


_TITLED: Any = [{"const": "value1", "title": "First Option"}, {"const": "value2", "title": "Second Option"}]


class Enums(BaseModel):
    untitled_single: Literal["option1", "option2", "option3"] = Field(alias="untitledSingle")
    titled_single: str = Field(alias="titledSingle", json_schema_extra={"type": "string", "oneOf": _TITLED})
    legacy_enum: Literal["opt1", "opt2", "opt3"] = Field(
        alias="legacyEnum", json_schema_extra={"enumNames": ["Option One", "Option Two", "Option Three"]}
    )
    untitled_multi: list[Literal["option1", "option2", "option3"]] = Field(alias="untitledMulti")
    titled_multi: list[str] = Field(alias="titledMulti", json_schema_extra={"items": {"anyOf": _TITLED}})


def add_tools(server: SandboxServer) -> None:
    def test_simple_text() -> str:
        return "This is a simple text response for testing."

    def test_image_content() -> Image:
        return Image(data=PNG, format="png")

    def test_audio_content() -> Audio:
        return Audio(data=WAV, format="wav")

    def test_embedded_resource() -> EmbeddedResource:
        text = "This is an embedded resource content."
        contents = TextResourceContents(uri="test://embedded-resource", mime_type="text/plain", text=text)
        return EmbeddedResource(type="resource", resource=contents)

    def test_multiple_content_types() -> list[Any]:
        text = json.dumps({"test": "data", "value": 123})
        uri = "test://mixed-content-resource"
        contents = TextResourceContents(uri=uri, mime_type="application/json", text=text)
        return [
            TextContent(type="text", text="Multiple content types test:"),
            Image(data=PNG, format="png"),
            EmbeddedResource(type="resource", resource=contents),
        ]

    def test_error_handling() -> str:
        raise ToolError("This tool intentionally returns an error for testing")

    async def test_tool_with_progress(ctx: Context[Any, Any]) -> str:
        for progress in (0, 50, 100):
            await ctx.report_progress(progress, 100)
            await asyncio.sleep(0.05)
        return "done"

    async def test_sampling(ctx: Context[Any, Any], prompt: str) -> str:
        content = TextContent(type="text", text=prompt)
        requested = CreateMessageRequestParams(
            messages=[SamplingMessage(role="user", content=content)], max_tokens=100
        )
        # On the stream of this call: the client may not have opened the stream of the session yet.
        answer = await ctx.session.send_request(
            CreateMessageRequest(params=requested),
            CreateMessageResult,
            metadata=ServerMessageMetadata(related_request_id=ctx.request_id),
        )
        return f"LLM response: {answer.content}"

    async def test_elicitation(ctx: Context[Any, Any], message: str) -> str:
        answer = await ctx.elicit(message, Answer)
        return f"User response: {answer}"

    async def test_elicitation_sep1034_defaults(ctx: Context[Any, Any]) -> str:
        answer = await ctx.elicit("Review the defaults", Defaults)
        return f"Elicitation completed: action={answer.action}, content={answer}"

    async def test_elicitation_sep1330_enums(ctx: Context[Any, Any]) -> str:
        answer = await ctx.elicit("Choose", Enums)
        return f"Elicitation completed: action={answer.action}, content={answer}"

    async def test_reconnection(ctx: Context[Any, Any]) -> str:
        await ctx.close_sse_stream()
        await asyncio.sleep(0.1)
        return "Reconnection test completed successfully"

    def json_schema_2020_12_tool(name: str = "", address: Any = None) -> str:
        return name

    tools: list[Callable[..., Any]] = [
        *(test_simple_text, test_error_handling, test_tool_with_progress, test_sampling, test_elicitation),
        *(test_image_content, test_audio_content, test_embedded_resource, test_multiple_content_types),
        *(test_elicitation_sep1034_defaults, test_elicitation_sep1330_enums, test_reconnection),
    ]
    for each in tools:
        server.add_tool(each, description=f"Fixture {each.__name__}", structured_output=False)
    server.add_tool(json_schema_2020_12_tool, description="A schema", structured_output=False)
    tool = server._tool_manager.get_tool("json_schema_2020_12_tool")
    assert tool is not None
    address = {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}
    tool.parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {"address": address},
        "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
        "additionalProperties": False,
    }


def add_resources(server: SandboxServer) -> None:
    @server.resource("test://static-text", mime_type="text/plain", description="Text")
    def text() -> str:
        return "This is the content of the static text resource."

    @server.resource("test://static-binary", mime_type="image/png", description="An image")
    def binary() -> bytes:
        return PNG

    @server.resource("test://template/{id}/data", mime_type="application/json", description="By id")
    def template(id: str) -> str:
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


def add_prompts(server: SandboxServer) -> None:
    @server.prompt(description="Without arguments")
    def test_simple_prompt() -> str:
        return "This is a simple prompt for testing."

    @server.prompt(description="With arguments")
    def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
        return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"

    @server.prompt(description="With a resource")
    def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:  # noqa: N803 - the suite's name
        text = "Embedded resource content for testing."
        contents = TextResourceContents(uri=resourceUri, mime_type="text/plain", text=text)
        resource = EmbeddedResource(type="resource", resource=contents)
        return [UserMessage(resource), UserMessage("Please process the embedded resource above.")]

    @server.prompt(description="With an image")
    def test_prompt_with_image() -> list[UserMessage]:
        data = base64.b64encode(PNG).decode()
        image = ImageContent(type="image", data=data, mime_type="image/png")
        return [UserMessage(image), UserMessage("Please analyze the image above.")]


async def main() -> None:
    server = SandboxServer(ExistingSandbox("inprocess"))
    add_tools(server)
    add_resources(server)
    add_prompts(server)
    # The suite sends no token; on loopback the assembly permits that.
    async with serving_http(server, "127.0.0.1:0", None) as url:
        print(url, flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main())
