"""Real agents as MCP clients: Claude Code and Codex, unmodified; their model is a function of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.bridge import (
    Bridge,
    Delta,
    ModelRequest,
    StopDelta,
    TextPart,
    Tool,
    ToolCallDelta,
    ToolResultPart,
    Usage,
    sandbox_agent_bridge,
)
from tests.sandbox.real_agents import ALL_CHECKS, NODE, require_agents
from tests.support.servers import RunningServer, running_server
from tests.support.signalling import kill_group

from .connections import TOKEN, http_server, variables

pytest.importorskip("h11", reason="the model proxy needs h11: install holdfast[bridge]")

#: A run takes some seconds; this only turns a hang into a failure.
PATIENCE_SECONDS = 120


class Script:
    """A model that calls tools of the MCP server one after the other, each with arguments from the last result."""

    def __init__(self, calls: list[tuple[str, dict[str, object]]]) -> None:
        self._calls = calls
        self.results: list[str] = []

    async def answer(self, request: ModelRequest) -> AsyncIterator[Delta | str]:
        parts = [part for turn in request.messages for part in turn.content if isinstance(part, ToolResultPart)]
        self.results = ["".join(text.text for text in part.content if isinstance(text, TextPart)) for part in parts]
        if len(parts) < len(self._calls):
            name, arguments = self._calls[len(parts)]
            found = [(tool, use) for tool in request.tools if (use := use_of(tool, name, arguments))]
            assert found, [tool.name for tool in request.tools]
            ((tool, use),) = found
            yield ToolCallDelta(0, f"call_{len(parts)}", tool.name, use, tool.kind, tool.namespace)
        else:
            yield "Done."
        yield StopDelta(usage=Usage(100, 20))


def use_of(tool: Tool, name: str, arguments: dict[str, object]) -> str | None:
    """The arguments with which a tool of the agent calls that of the MCP server, if it can."""
    if tool.name == f"mcp__holdfast__{name}":
        return json.dumps(arguments)
    if (tool.name, tool.kind) == ("exec", "custom"):
        return f"text(await tools.mcp__holdfast__{name}({json.dumps(arguments)}))"
    return None


@pytest.fixture
def agents() -> Path:
    return require_agents()


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(["unix"]) as server:
        yield server


def stdio_arguments() -> list[str]:
    return ["-m", "holdfast", "mcp", "--sandbox", "inprocess"]


def claude_code(agents: Path, directory: Path, bridge: Bridge, url: str) -> tuple[list[str], dict[str, str]]:
    over_stdio = {"command": sys.executable, "args": stdio_arguments(), "env": variables(directory)}
    over_http = {"type": "http", "url": url, "headers": {"Authorization": f"Bearer {TOKEN}"}}
    config = {"mcpServers": {"holdfast": over_http if url else over_stdio}}
    words = [
        "-p",
        "go",
        "--mcp-config",
        json.dumps(config),
        "--strict-mcp-config",
        "--allowedTools",
        "mcp__holdfast",
    ]
    env = {
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # The first turn waits for the server, however busy the machine is.
        "MCP_CONNECTION_NONBLOCKING": "0",
        "MCP_TIMEOUT": str(PATIENCE_SECONDS * 1_000),
        "MCP_CONNECT_TIMEOUT_MS": str(PATIENCE_SECONDS * 1_000),
    }
    return [NODE, str(agents / "@anthropic-ai/claude-code/cli-wrapper.cjs"), *words], env


def codex(agents: Path, directory: Path, bridge: Bridge, url: str) -> tuple[list[str], dict[str, str]]:
    env = ", ".join(f"{name} = {json.dumps(value)}" for name, value in variables(directory).items())
    over_stdio = {
        "command": json.dumps(sys.executable),
        "args": json.dumps(stdio_arguments()),
        "env": f"{{ {env} }}",
    }
    over_http = {"url": json.dumps(url), "bearer_token_env_var": '"HOLDFAST_MCP_TOKEN"'}
    settings = {f"mcp_servers.holdfast.{key}": value for key, value in (over_http if url else over_stdio).items()}
    # The first turn waits for the server, however busy the machine is.
    settings["mcp_servers.holdfast.required"] = "true"
    settings["mcp_servers.holdfast.startup_timeout_sec"] = str(PATIENCE_SECONDS)
    settings["openai_base_url"] = json.dumps(bridge.env["OPENAI_BASE_URL"])
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    program = [NODE, str(agents / "@openai/codex/bin/codex.js")]
    run = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "go"]
    return [*program, *words, *run], {"CODEX_HOME": str(directory), "HOLDFAST_MCP_TOKEN": TOKEN}


EACH = [(claude_code, "stdio"), (codex, "http")]
ALL = [*EACH, (claude_code, "http"), (codex, "stdio")]


@pytest.mark.parametrize(("agent", "transport"), ALL if ALL_CHECKS else EACH)
async def test_a_real_agent_uses_the_tools(
    agents: Path, server: RunningServer, tmp_path: Path, agent: type, transport: str
) -> None:
    script = Script(
        [
            ("exec_command", {"cmd": "echo from-the-$((40 + 2)) | tee made"}),
            ("edit_file", {"path": str(tmp_path / "made"), "old_text": "42", "new_text": "43"}),
            ("read_file", {"path": str(tmp_path / "made")}),
        ]
    )
    async with contextlib.AsyncExitStack() as stack:
        url = (
            ""
            if transport == "stdio"
            else await stack.enter_async_context(
                http_server(tmp_path, "--sandbox", "inprocess", "--workdir", str(tmp_path))
            )
        )
        box = await stack.enter_async_context(holdfast.connect(server.address("unix")))
        bridge = await stack.enter_async_context(sandbox_agent_bridge(box, script.answer, 0))
        argv, env = agent(agents, tmp_path, bridge, url)
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=tmp_path,
            env={**bridge.env, "PATH": os.environ["PATH"], "HOME": str(tmp_path), **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                printed, _ = await process.communicate()
        finally:
            kill_group(process.pid)
            await process.wait()
    assert process.returncode == 0, printed.decode()
    assert "Done." in printed.decode()
    ran, edited, read = script.results
    assert "from-the-42" in ran
    assert "made" in edited
    assert "from-the-43" in read
    assert (tmp_path / "made").read_text() == "from-the-43\n"
