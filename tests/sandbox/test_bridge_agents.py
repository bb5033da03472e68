"""Agents in a jail without network, where holdfast runs from the bundle: a few lines of Python, and two real ones.

The real ones are foreign programs, unmodified; their model is a function of the test.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.bridge import (
    Bridge,
    Delta,
    ModelRequest,
    StopDelta,
    Tool,
    ToolCallDelta,
    ToolResultPart,
    Usage,
    sandbox_agent_bridge,
)
from holdfast.sandboxes.install.bundle import Bundle

from .real_agents import AGENTS, NODE, require_agents

#: Not that of a virtual environment, which is not in the jail.
PYTHON = os.path.realpath(sys.executable)
AGENT = """
import json, os, urllib.request
with open("/proc/net/dev") as file:
    print([line.split(":")[0].strip() for line in file if ":" in line])
body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode())
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@pytest.fixture(autouse=True)
def _cache(bwrap: str, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(bundle.path.parents[2]))


async def test_an_agent_without_network_has_a_model(tmp_path: Path) -> None:
    async def model(request: ModelRequest) -> str:
        return f"you said {request.messages[-1].text}"

    async with (
        holdfast.connect(f"bwrap:{tmp_path}", read_only=[sys.base_prefix]) as box,
        sandbox_agent_bridge(box, model) as bridge,
    ):
        assert bridge.url == "http://127.0.0.1:13131"
        result = await box.exec([PYTHON, "-c", AGENT], env=bridge.env, timeout=60)
        assert result.stderr == ""
        interfaces, answer = result.stdout.splitlines()
        assert interfaces == "['lo']"
        assert json.loads(answer)["content"] == [{"type": "text", "text": "you said hello"}]


# --- real ones ---------------------------------------------------------------------------------------------------


@pytest.fixture
def agents() -> Path:
    """Where they are installed."""
    return require_agents()


def claude_code(installed: Path, bridge: Bridge) -> tuple[list[str], dict[str, str]]:
    words = ["-p", "say it", "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash"]
    env = {**bridge.env, "IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return [NODE, str(installed / "@anthropic-ai/claude-code/cli-wrapper.cjs"), *words], env


def codex(installed: Path, bridge: Bridge) -> tuple[list[str], dict[str, str]]:
    where = f"openai_base_url={bridge.env['OPENAI_BASE_URL']}"
    words = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--json", "-c", where, "say it"]
    return [NODE, str(installed / "@openai/codex/bin/codex.js"), *words], bridge.env


def use_of(tool: Tool, command: str) -> str | None:
    """The arguments with which a tool runs the command, if it can."""
    if tool.name == "Bash":
        return json.dumps({"command": command, "description": "say it"})
    if (tool.name, tool.kind) == ("exec", "custom"):
        return f"text(await tools.exec_command({{cmd: {json.dumps(command)}}}))"
    return None


@pytest.mark.parametrize(("agent", "dialect"), [(claude_code, "anthropic"), (codex, "openai_responses")])
async def test_a_real_agent_without_network_uses_its_tool(
    agents: Path,
    tmp_path: Path,
    agent: Callable[[Path, Bridge], tuple[list[str], dict[str, str]]],
    dialect: str,
) -> None:
    results: list[str] = []

    async def model(request: ModelRequest) -> AsyncIterator[Delta | str]:
        assert request.dialect == dialect
        reported = [part for turn in request.messages for part in turn.content if isinstance(part, ToolResultPart)]
        if reported:
            results.append(str(reported[0].content))
            yield "It is "
            yield "written down."
        else:
            command = "echo from-the-$((40 + 2)) | tee made"
            tool, use = next((tool, use) for tool in request.tools if (use := use_of(tool, command)))
            yield ToolCallDelta(0, "call_1", tool.name, use[:9], tool.kind, tool.namespace)
            yield ToolCallDelta(0, arguments=use[9:], kind=tool.kind)
        yield StopDelta(usage=Usage(100, 20))

    async with (
        holdfast.connect(f"bwrap:{tmp_path}", read_only=[str(AGENTS), os.path.dirname(NODE)]) as box,
        sandbox_agent_bridge(box, model) as bridge,
    ):
        argv, env = agent(agents, bridge)
        result = await box.exec(argv, env=env, timeout=60, timeout_retry=False)
        assert result.returncode == 0, (result.stdout, result.stderr)
        assert "It is written down." in result.stdout
    assert (tmp_path / "made").read_text() == "from-the-42\n"
    assert len(results) == 1
    assert "from-the-42" in results[0]
    requested = [(call.method, call.status) for call in bridge.calls if call.method == "POST"]
    assert requested == [("POST", 200)] * 2
