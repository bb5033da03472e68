"""An agent of DeepAgents works in a jail, blocking and async, and the backend follows deepagents 0.7."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage

import holdfast
import holdfast.sync
from holdfast.errors import InvalidRequest
from holdfast.integrations.deepagents import Backend

EXAMPLES = Path(__file__).parents[3] / "examples" / "integrations"


class ScriptedModel(GenericFakeChatModel):
    """A model whose replies are given; it accepts any tools."""

    def bind_tools(self, tools: Any, **_: Any) -> ScriptedModel:
        return self


def scripted(*calls: tuple[str, dict[str, Any]]) -> ScriptedModel:
    turns = [
        AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{number}"}])
        for number, (name, arguments) in enumerate(calls)
    ]
    return ScriptedModel(messages=iter([*turns, AIMessage("done")]))


CALLS = (
    ("write_file", {"file_path": "/tmp/work/count.sh", "content": "seq 3 | tac"}),
    ("execute", {"command": "sh /tmp/work/count.sh; exit 4"}),
    ("ls", {"path": "/tmp/work"}),
    ("glob", {"pattern": "*.sh", "path": "/tmp/work"}),
)


def tool_results(state: dict[str, Any]) -> list[str]:
    return [str(message.content) for message in state["messages"] if isinstance(message, ToolMessage)]


def check_results(state: dict[str, Any]) -> None:
    written, printed, listed, found = tool_results(state)
    assert "/tmp/work/count.sh" in written
    assert printed.startswith("3\n2\n1")
    assert "4" in printed.removeprefix("3\n2\n1")
    assert "/tmp/work/count.sh" in listed
    assert "count.sh" in found


@pytest.fixture
def box() -> Iterator[holdfast.sync.Sandbox]:
    with holdfast.sync.create("bwrap") as box:
        yield box


def test_a_blocking_agent(box: holdfast.sync.Sandbox) -> None:
    agent = create_deep_agent(model=scripted(*CALLS), backend=Backend(box))

    check_results(agent.invoke({"messages": [("user", "count")]}))


async def test_an_async_agent() -> None:
    async with holdfast.create("bwrap") as box:
        agent = create_deep_agent(model=scripted(*CALLS), backend=Backend(box))

        check_results(await agent.ainvoke({"messages": [("user", "count")]}))


async def test_an_async_agent_over_a_blocking_sandbox(box: holdfast.sync.Sandbox) -> None:
    agent = create_deep_agent(model=scripted(*CALLS), backend=Backend(box))

    check_results(await agent.ainvoke({"messages": [("user", "count")]}))


async def test_a_blocking_call_in_the_loop_of_the_sandbox_is_refused() -> None:
    async with holdfast.create("local", network="host") as box:
        with pytest.raises(InvalidRequest, match="its own event loop"):
            Backend(box).execute("true")


async def test_a_cancelled_call_kills_the_command(box: holdfast.sync.Sandbox) -> None:
    waiting = asyncio.ensure_future(Backend(box).aexecute("echo $$ > /tmp/pid; exec sleep 1000"))
    while not box.exists("/tmp/pid") or not box.read_text("/tmp/pid").strip():
        await asyncio.to_thread(box.exec, ["true"])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    box.exec(["sh", "-c", "while kill -0 $(cat /tmp/pid) 2>/dev/null; do :; done"], timeout=60, check=True)


def test_the_contract_of_deepagents_0_7(box: holdfast.sync.Sandbox) -> None:
    backend = Backend(box, contract="0.7")
    backend.write("/tmp/t/one.txt", "first")
    assert backend.write("/tmp/t/one.txt", "second").error is None
    assert box.read_text("/tmp/t/one.txt") == "second"
    box.make_dir("/tmp/t/directory.txt")

    assert [match["path"] for match in backend.glob("*.txt", path="/tmp/t").matches] == ["/tmp/t/one.txt"]
    assert backend.delete("/tmp/t/one.txt").error is None
    assert "not found" in backend.delete("/tmp/t/one.txt").error


def test_a_command_that_times_out(box: holdfast.sync.Sandbox) -> None:
    result = Backend(box).execute("echo begun; sleep 1000", timeout=1)

    assert (result.exit_code, result.output.partition("\n")[0]) == (124, "begun")


def test_a_kill_for_memory_is_in_the_output() -> None:
    with holdfast.sync.create("bwrap", memory="128M") as box:
        hog = "held = [bytearray(b'x' * (8 << 20)) for _ in range(64)]"
        result = Backend(box).execute(f'exec python3 -c "{hog}"')

    assert result.exit_code == 137
    assert result.output.endswith("Killed: out of memory\n")


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = scripted(("execute", {"command": "uname -s"}))
    monkeypatch.setattr("langchain.chat_models.init_chat_model", lambda *_, **__: model)
    runpy.run_path(str(EXAMPLES / "deepagents_agent.py"), run_name="__main__")

    assert capsys.readouterr().out == "done\n"
