"""The real Codex CLI as a client: its commands run in our server, under the policies that it sends.

It finds the server by `environments.toml` in its home; its model is a function of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import holdfast
from holdfast.bridge import (
    Delta,
    ModelRequest,
    StopDelta,
    TextPart,
    ToolCallDelta,
    ToolResultPart,
    Usage,
    sandbox_agent_bridge,
)
from tests.support.parts import needs
from tests.support.servers import RunningServer, running_server, server_environment
from tests.support.signalling import kill_group

from .real_agents import NODE, require_agents

pytest.importorskip("h11", reason="the model proxy needs h11: install holdfast[bridge]")

pytestmark = needs("bwrap")
#: Of the app-server, a line each.
MESSAGE_BYTES = 16 * 1024 * 1024
#: A run takes some seconds; this only turns a hang into a failure.
PATIENCE_SECONDS = 120


class Ran(NamedTuple):
    """The result of one command as the model got it."""

    exit_code: int
    output: str


class Script:
    """A model that calls one tool after the other, each a line of JavaScript for Codex's `exec`."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.results: list[str] = []

    async def answer(self, request: ModelRequest) -> AsyncIterator[Delta | str]:
        parts = [part for turn in request.messages for part in turn.content if isinstance(part, ToolResultPart)]
        self.results = ["".join(text.text for text in part.content if isinstance(text, TextPart)) for part in parts]
        if len(parts) < len(self.calls):
            tool = next(tool for tool in request.tools if (tool.name, tool.kind) == ("exec", "custom"))
            call = self.calls[len(parts)]
            yield ToolCallDelta(0, f"call_{len(parts)}", tool.name, call, tool.kind, tool.namespace)
        else:
            yield "Done."
        yield StopDelta(usage=Usage(100, 20))

    def ran(self, printed: str) -> list[Ran]:
        """The result of each call as the model got it; `printed` explains a failure."""
        assert len(self.results) == len(self.calls), printed
        found = [json.loads(result.partition("Output:\n")[2]) for result in self.results]
        return [Ran(each["exit_code"], each["output"]) for each in found]


def command(text: str, **more: Any) -> str:
    return f"text(await tools.exec_command({json.dumps({'cmd': text, 'login': False, **more})}))"


@pytest.fixture
def codex() -> list[str]:
    return [NODE, str(require_agents() / "@openai/codex/bin/codex.js")]


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(["ws", "unix"]) as server:
        yield server


@pytest.fixture
def workspace() -> Iterator[Path]:
    """Not below /tmp, which workspace-write gives in any case."""
    with tempfile.TemporaryDirectory(prefix="hf-workspace-", dir="/var/tmp") as directory:
        yield Path(directory).resolve()


def over_websocket(server: RunningServer, directory: Path) -> str:
    return f"url = {json.dumps(server.address('ws'))}"


def over_stdio(server: RunningServer, directory: Path) -> str:
    own = {"HOLDFAST_DIRECTORY": str(directory), "PYTHONPATH": server_environment()["PYTHONPATH"]}
    env = ", ".join(f"{name} = {json.dumps(value)}" for name, value in own.items())
    args = ["-m", "holdfast", "serve", "--listen", "stdio", "--spool-directory", str(directory)]
    return f"program = {json.dumps(sys.executable)}\nargs = {json.dumps(args)}\nenv = {{ {env} }}"


@pytest.fixture(params=[over_websocket, over_stdio])
def home(request: pytest.FixtureRequest, server: RunningServer, tmp_path: Path) -> Path:
    """A home of Codex in which the server is the only environment."""
    home, directory = tmp_path / "codex", tmp_path / "server"
    home.mkdir()
    directory.mkdir()
    where = request.param(server, directory)
    text = f'default = "box"\ninclude_local = false\n[[environments]]\nid = "box"\n{where}\n'
    (home / "environments.toml").write_text(text)
    return home


@contextlib.asynccontextmanager
async def program(
    codex: list[str], server: RunningServer, home: Path, script: Script, *words: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Codex, with the script for a model; it has the rest of the time that a test has."""
    async with (
        holdfast.connect(server.address("unix")) as box,
        sandbox_agent_bridge(box, script.answer, 0) as bridge,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        process = await asyncio.create_subprocess_exec(
            *codex,
            "-c",
            f"openai_base_url={bridge.env['OPENAI_BASE_URL']}",
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MESSAGE_BYTES,
            start_new_session=True,
            env={**bridge.env, "PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)},
        )
        try:
            yield process
        finally:
            # The program is a child of its launcher, and has the launcher's pipes open.
            kill_group(process.pid)
            await process.communicate()


async def run_codex(
    codex: list[str], server: RunningServer, home: Path, workspace: Path, policy: str, calls: list[str]
) -> list[Ran]:
    """The result of each call as the model got it."""
    script = Script(calls)
    words = ["exec", "--skip-git-repo-check", "-s", policy, "-C", str(workspace), "go"]
    async with program(codex, server, home, script, *words) as process:
        printed, _ = await process.communicate(b"")
    assert process.returncode == 0, printed.decode()
    return script.ran(printed.decode())


class AppServer:
    """A client of `codex app-server`: requests and notifications, each a line of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._last_id = 0
        #: Its output, for a test that fails.
        self.printed: list[str] = []

    async def call(self, method: str, params: dict[str, Any]) -> Any:
        self._last_id += 1
        self._send({"id": self._last_id, "method": method, "params": params})
        reply = await self.until(lambda message: message.get("id") == self._last_id and "method" not in message)
        assert "result" in reply, reply
        return reply["result"]

    def notify(self, method: str) -> None:
        self._send({"method": method})

    async def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first message that is wanted; a request of the app-server would stand for an approval."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.printed.append(line.decode())
            if line.startswith(b"{"):
                message: dict[str, Any] = json.loads(line)
                if wanted(message):
                    return message
                assert not ("id" in message and "method" in message), message
        raise AssertionError("".join(self.printed))

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")


async def test_read_only(codex: list[str], server: RunningServer, home: Path, workspace: Path) -> None:
    (workspace / "given").write_text("read me\n")
    calls = [
        command("cat given"),
        command("echo x > file"),
        command("echo x > /tmp/hf-denied-$$; ls /tmp/hf-denied-$$"),
        command("echo x > file", tty=True),
        command("echo $BASH_VERSION", shell="bash"),
        command("exit 7"),
    ]
    ran = await run_codex(codex, server, home, workspace, "read-only", calls)
    assert ran[0] == (0, "read me\n")
    for denied in ran[1:4]:
        assert (denied.exit_code != 0, "Read-only file system" in denied.output) == (True, True), denied
    assert (ran[4].exit_code, ran[4].output.strip() != "") == (0, True)
    assert ran[5].exit_code == 7
    assert os.listdir(workspace) == ["given"]


async def test_workspace_write(codex: list[str], server: RunningServer, home: Path, workspace: Path) -> None:
    (workspace / ".git").mkdir()
    calls = [
        command("echo made > file && cat file"),
        command("touch /etc/hf-denied"),
        command("touch .git/denied"),
        command("grep -c : /proc/net/dev"),
    ]
    ran = await run_codex(codex, server, home, workspace, "workspace-write", calls)
    assert ran[0] == (0, "made\n")
    assert (workspace / "file").read_text() == "made\n"
    for denied in ran[1:3]:
        assert (denied.exit_code, "Read-only file system" in denied.output) == (1, True), denied
    assert not (workspace / ".git/denied").exists()
    # The loopback alone.
    assert ran[3] == (0, "1\n")


@pytest.mark.parametrize(("policy", "allowed"), [("read-only", False), ("workspace-write", True)])
async def test_the_app_server(
    codex: list[str], server: RunningServer, home: Path, workspace: Path, policy: str, allowed: bool
) -> None:
    script = Script([command("echo made > file && cat file"), command("touch /etc/hf-denied"), command("exit 7")])
    async with program(codex, server, home, script, "app-server") as process:
        client = AppServer(process)
        await client.call("initialize", {"clientInfo": {"name": "test", "version": "1"}})
        client.notify("initialized")
        settings = {"cwd": str(workspace), "sandbox": policy, "approvalPolicy": "never"}
        thread = (await client.call("thread/start", settings))["thread"]["id"]
        await client.call("turn/start", {"threadId": thread, "input": [{"type": "text", "text": "go"}]})
        done = await client.until(lambda message: message.get("method") == "turn/completed")
    assert done["params"]["turn"]["status"] == "completed", client.printed
    made, denied, failed = script.ran("".join(client.printed))
    assert (made.exit_code == 0, (workspace / "file").exists()) == (allowed, allowed), made
    assert (denied.exit_code, "Read-only file system" in denied.output) == (1, True), denied
    assert failed.exit_code == 7
