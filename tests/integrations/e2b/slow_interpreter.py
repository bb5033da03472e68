"""The code interpreter's SDK over bwrap, and an agent of smolagents. Kernels take seconds to start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from e2b import SandboxException
from e2b_code_interpreter import AsyncSandbox as AsyncInterpreter, Sandbox as Interpreter

from tests.integrations.e2b.server_process import E2BServer, e2b_server


@pytest.fixture(scope="module")
def server() -> Iterator[E2BServer]:
    with e2b_server() as made:
        yield made


def test_the_code_interpreter_keeps_state_in_contexts(server: E2BServer) -> None:
    box = Interpreter.create()
    printed: list[str] = []
    box.run_code("x = 20")
    done = box.run_code("print('out'); x + 1", on_stdout=lambda message: printed.append(message.line))
    assert (done.text, done.logs.stdout, done.error) == ("21", ["out\n"], None)
    assert printed == ["out\n"]
    assert done.execution_count == 2
    failed = box.run_code("raise ValueError('wrong')")
    assert failed.error is not None
    assert (failed.error.name, failed.error.value) == ("ValueError", "wrong")
    assert box.run_code("import os; os.environ['ONCE']", envs={"ONCE": "1"}).text == "'1'"
    assert box.run_code("os.environ.get('ONCE')").results == []
    html = box.run_code("from IPython.display import HTML, display; display(HTML('<b>x</b>'))")
    assert html.results[0].html == "<b>x</b>"

    other = box.create_code_context(cwd="/tmp")
    assert box.run_code("import os; os.getcwd()", context=other).text == "'/tmp'"
    unknown = box.run_code("x", context=other).error
    assert unknown is not None
    assert unknown.name == "NameError"
    assert {each.id for each in box.list_code_contexts()} == {"default", other.id}
    box.restart_code_context(other)
    box.remove_code_context(other)
    assert {each.id for each in box.list_code_contexts()} == {"default"}
    assert box.commands.list() == []

    server.kill()
    server.start()
    assert box.run_code("x").text == "20"
    box.kill()


async def test_the_asynchronous_code_interpreter_and_a_template_without_a_kernel(server: E2BServer) -> None:
    box = await AsyncInterpreter.create()
    one, two = await asyncio.gather(box.run_code("1 + 1"), box.run_code("2 + 2"))
    assert {one.text, two.text} == {"2", "4"}
    await box.kill()
    bare = await AsyncInterpreter.create("base")
    with pytest.raises(SandboxException, match="ipykernel"):
        await bare.run_code("1")
    await bare.kill()


def test_smolagents_runs_its_agent_in_a_sandbox(server: E2BServer) -> None:
    from smolagents import CodeAgent
    from smolagents.models import ChatMessage, Model

    class Scripted(Model):
        """A model that computes in the sandbox, then returns the result of the sandbox as the answer."""

        def __init__(self) -> None:
            super().__init__(model_id="scripted")
            self.replies = [
                "Thought: compute.\n<code>\nimport os\nvalue = 6 * 7\n"
                "print('inside', os.environ['E2B_SANDBOX'])\n</code>",
                "Thought: done.\n<code>\nfinal_answer(value)\n</code>",
            ]
            self.seen = ""

        def generate(self, messages: object, **_: object) -> ChatMessage:
            self.seen += str(messages)
            return ChatMessage(role="assistant", content=self.replies.pop(0))

    model = Scripted()
    with CodeAgent(tools=[], model=model, executor_type="e2b", verbosity_level=0) as agent:
        assert agent.run("What is six times seven?") == 42
    assert "inside true" in model.seen
