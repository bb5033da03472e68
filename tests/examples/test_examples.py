"""The programs of examples/ run: against a scripted model, a page, a service, and an evaluation that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.fleet.directories import DIRECTORY_VARIABLE
from holdfast.fleet.fleet import Fleet
from tests.service.running_service import new_home, running_service
from tests.support.servers import running_server

EXAMPLES = Path(__file__).parents[2] / "examples"


def chat(**message: Any) -> bytes:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None, **message}}
    reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "scripted", "choices": [choice]}
    return json.dumps(reply).encode()


class ScriptedModel:
    """An endpoint with Chat Completions: first a tool call, then the output of that call as the reply."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        request = json.loads(await reader.readexactly(length))
        self.requests.append(request)
        last = request["messages"][-1]
        if last["role"] == "tool":
            body = chat(content=f"The result is {json.loads(last['content'])['output']}")
        else:
            function = {"name": "exec_command", "arguments": json.dumps({"cmd": "echo $((6 * 7))"})}
            body = chat(tool_calls=[{"id": "c1", "type": "function", "function": function}])
        kind = "content-type: application/json\r\nconnection: close"
        writer.write(f"HTTP/1.1 200 OK\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()


@pytest.fixture
def fleet_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for the sandboxes of one test; its path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        monkeypatch.setenv(DIRECTORY_VARIABLE, directory)
        yield Path(directory)


def processes() -> list[str]:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return found


async def output_of(name: str, *args: str, **env: str) -> str:
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / name), *args, env=os.environ | env, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await asyncio.wait_for(program.communicate(), 120)
    assert program.returncode == 0
    return printed.decode()


async def test_the_coding_agent_calls_tools_until_it_replies() -> None:
    model = ScriptedModel()
    server = await asyncio.start_server(model.answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        printed = await output_of(
            "coding_agent.py", "inprocess", "scripted", "compute", OPENAI_API_KEY="none", OPENAI_BASE_URL=url
        )
    finally:
        server.close()
    assert printed == "The result is 42\n\n"
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["exec_command", "write_stdin"]


async def test_the_debugger_prints_variables() -> None:
    printed = await output_of("debugger.py", "inprocess")
    assert "(9, [1, 2, 6])" in printed


async def test_an_evaluation_that_was_killed_continues_and_leaves_nothing(
    tmp_path: Path, fleet_directory: Path
) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(EXAMPLES / "evaluation.py"), "local", str(results)]
    killed = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert killed.stdout is not None
    first = (await asyncio.wait_for(killed.stdout.readline(), 120)).decode().strip()
    killed.kill()
    await killed.wait()
    again = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await asyncio.wait_for(again.communicate(), 240)
    assert again.returncode == 0
    assert first not in printed.decode().split()
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted(each["task"] for each in found) == [f"task-{number:02}" for number in range(1, 21)]
    assert all(each["passed"] for each in found)
    async with Fleet("local") as fleet:
        assert not await fleet.list(labels={"run": str(results)})
    assert not [process for process in processes() if str(fleet_directory) in process]


async def test_the_dev_server_is_reachable_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>a page of the sandbox")
    with running_server() as server:
        command = [sys.executable, str(EXAMPLES / "dev_server.py"), server.address("unix"), str(tmp_path)]
        program = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert program.stdout is not None
        url = (await asyncio.wait_for(program.stdout.readline(), 120)).decode().strip()
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read())
        assert page == b"<p>a page of the sandbox"
        program.send_signal(signal.SIGINT)
        await asyncio.wait_for(program.communicate(), 60)
        assert program.returncode == 0
        assert not [each for each in processes() if "http.server" in each and server.mark in each]


async def test_an_approval_is_answered() -> None:
    with new_home() as location:
        rules = Path(location.directory) / "rules.toml"
        # The rules of the example itself.
        text = (EXAMPLES / "approval.py").read_text()
        rules.write_text("\n".join(line.strip() for line in text.partition("answers:\n")[2].splitlines()[1:4]))
        with running_service(location, "--rules", str(rules)) as service:
            url = f"http://{service.grpc}"
            printed = await output_of("approval.py", url, HOLDFAST_SERVICE_TOKEN=service.operator)
    assert printed.splitlines()[:2] == ["echo started: started", "touch report.txt && ls: report.txt"]
    assert printed.splitlines()[2].startswith("touch /tmp/elsewhere: refused: ")


@pytest.mark.parametrize("name", ["approval", "coding_agent", "debugger", "dev_server", "evaluation"])
def test_a_call_without_arguments_prints_the_usage(name: str) -> None:
    if name == "coding_agent":
        pytest.importorskip("openai")
    program = EXAMPLES / f"{name}.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"python examples/{name}.py " in done.stderr
    assert "Traceback" not in done.stderr
