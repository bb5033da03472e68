"""An agent of pydantic-ai works in a jail, and a later run continues in it by the reference in its messages."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, WorkspaceRef
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.workspaces import WorkspaceOutputLimitError, WorkspaceUnavailableError

import holdfast
from holdfast.errors import InvalidParams
from holdfast.integrations.pydantic_ai import Workspace

pytestmark = pytest.mark.anyio
EXAMPLES = Path(__file__).parents[3] / "examples" / "integrations"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def scripted(command: str) -> FunctionModel:
    """A model that calls the tool `shell` once, and then repeats its result."""

    def reply(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        part = messages[-1].parts[-1]
        if part.part_kind == "tool-return":
            return ModelResponse(parts=[TextPart(str(part.content))])
        return ModelResponse(parts=[ToolCallPart("shell", {"command": command})])

    return FunctionModel(reply)


agent = Agent()


@agent.tool
async def shell(ctx: RunContext, command: str) -> str:
    return (await ctx.workspace.run(command, shell=True)).stdout


async def test_a_second_run_continues_in_the_sandbox_of_the_first() -> None:
    first = Workspace("bwrap")
    try:
        wrote = await agent.run("go", model=scripted("echo kept | tee /tmp/file"), workspace=first)
        assert wrote.output == "kept\n"
        ref = next(message.workspace_ref for message in wrote.new_messages() if message.kind == "response")
        assert ref == first.ref
        await first.aclose()

        async with Workspace(ref) as second:
            read = await agent.run("go", model=scripted("cat /tmp/file"), workspace=second)
        assert read.output == "kept\n"
    finally:
        await first.destroy()


async def test_a_destroyed_sandbox_is_unavailable_and_not_made_again() -> None:
    workspace = Workspace("bwrap")
    assert await workspace.working_dir() == "/root"
    await workspace.destroy()

    with pytest.raises(WorkspaceUnavailableError):
        await workspace.run(["true"])


async def test_output_over_the_limit_is_an_error() -> None:
    async with holdfast.create("bwrap") as box:
        with pytest.raises(WorkspaceOutputLimitError):
            await Workspace(box).run("head -c 11000000 /dev/zero", shell=True)


async def test_a_kill_for_memory_is_in_the_result() -> None:
    async with holdfast.create("bwrap", memory="128M") as box:
        hog = "held = [bytearray(b'x' * (8 << 20)) for _ in range(64)]"
        result = await Workspace(box).run(["python3", "-c", hog])
    assert result.exit_code == 137
    assert result.stderr.endswith("Killed: out of memory\n")


async def test_the_caller_owns_a_sandbox_that_is_given() -> None:
    async with holdfast.create("bwrap") as box:
        with pytest.raises(InvalidParams, match="the caller owns"):
            await Workspace(box).destroy()
        with pytest.raises(InvalidParams, match="exists already"):
            Workspace(box, user="nobody")
        assert Workspace(box).ref == WorkspaceRef(provider="holdfast", id=f"bwrap:{box.ref.id}")


async def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "pydantic_ai_agent.py"), run_name="example")
    await example["main"](scripted("uname -s"))

    assert capsys.readouterr().out == "Linux\n[exit code 0]\n"
