"""MCP clients of the official SDK, connected to `holdfast mcp` over stdio or HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.client import ConnectMode
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult

from holdfast.integrations.mcp.approvals import Approvals
from holdfast.integrations.mcp.server import SandboxServer
from holdfast.integrations.mcp.sources import ExistingSandbox

TOKEN = "a-token-for-the-tests"


def variables(directory: Path) -> dict[str, str]:
    """The environment of a server whose sandboxes are below a directory of the test."""
    return {
        **{name: os.environ[name] for name in ("PATH", "XDG_CACHE_HOME") if name in os.environ},
        "HOME": str(directory),
        "HOLDFAST_DIRECTORY": str(directory / "server"),
        "HOLDFAST_FLEET_DIRECTORY": str(directory / "fleet"),
        "HOLDFAST_MCP_TOKEN": TOKEN,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


@contextlib.asynccontextmanager
async def in_process(directory: Path, rules: str | None = None, **options: Any) -> AsyncIterator[Client]:
    """A client of a server in this process, whose sandbox is this process."""
    approvals = None if rules is None else Approvals.of_file(rules)
    server = SandboxServer(ExistingSandbox("inprocess", str(directory)), approvals)
    async with Client(server, **options) as client:
        yield client


@contextlib.asynccontextmanager
async def over_stdio(directory: Path, *options: str, mode: ConnectMode = "legacy") -> AsyncIterator[Client]:
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "holdfast", "mcp", *options], env=variables(directory), cwd=directory
    )
    async with Client(server, mode=mode) as client:
        yield client


@contextlib.asynccontextmanager
async def http_server(directory: Path, *options: str) -> AsyncIterator[str]:
    """A server over HTTP at a free port; its URL."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast", "mcp", "--http", "127.0.0.1:0", *options),
        env=variables(directory),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert server.stdout is not None
        yield (await server.stdout.readline()).decode().strip()
    finally:
        server.terminate()
        await server.wait()


@contextlib.asynccontextmanager
async def over_http(url: str, token: str = TOKEN, mode: ConnectMode = "legacy") -> AsyncIterator[Client]:
    headers = {"authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """The structured result of a call that succeeds."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result
    assert isinstance(result.structured_content, dict)
    return result.structured_content


async def failed(client: Client, tool: str, **arguments: Any) -> str:
    """The text of a call that fails."""
    result = await client.call_tool(tool, arguments)
    assert isinstance(result, CallToolResult)
    assert result.is_error, result
    return " ".join(block.text for block in result.content if block.type == "text")
