"""Tasks for `inspect eval`, with the answers of the model in place; `suite_eval.py` reads their logs."""

from __future__ import annotations

import json
import time

from inspect_ai import Task, task
from inspect_ai.agent import AgentState, sandbox_agent_bridge
from inspect_ai.dataset import Sample
from inspect_ai.model import Model, ModelOutput, ModelUsage, get_model
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import bash, bash_session, python, text_editor
from inspect_ai.util import ExecCompleted, ExecStdout, sandbox

from examples.integrations.inspect_task import count_lines

#: A request of a program in the sandbox to a model, by any client library.
REQUEST = """
import json, socket, time, urllib.request
for attempt in range(600):  # the proxy of the bridge may still be starting
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 13131)) == 0:
            break
    time.sleep(0.1)
body = {"model": "inspect", "messages": [{"role": "user", "content": "from inside"}]}
request = urllib.request.Request(
    "http://localhost:13131/v1/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer none"},
)
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
"""


def _model(*outputs: ModelOutput) -> Model:
    for output in outputs:
        # Without these, the model would count tokens, with a table that is fetched from the network.
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return get_model("mockllm/model", custom_outputs=list(outputs), memoize=False)


def _call(tool: str, **arguments: object) -> ModelOutput:
    return ModelOutput.for_tool_call("mockllm/model", tool, arguments)


def _done(text: str = "done") -> ModelOutput:
    return ModelOutput.from_content("mockllm/model", text)


@task
def tools() -> Task:
    """Every tool of Inspect that works in a sandbox, one call after another."""
    return Task(
        dataset=[Sample(input="go", files={"given.txt": "a file of the sample"})],
        solver=[use_tools(bash(timeout=60), python(timeout=60), bash_session(), text_editor()), generate()],
        model=_model(
            _call("bash", command="cat given.txt; echo; whoami"),
            _call("python", code="print(6 * 7)"),
            _call("bash_session", action="type_submit", input="cd /tmp && export KEPT=yes"),
            _call("bash_session", action="type_submit", input="echo $PWD:$KEPT"),
            _call("text_editor", command="create", path="/tmp/made.txt", file_text="made by the editor\n"),
            _call("text_editor", command="str_replace", path="/tmp/made.txt", old_str="made", new_str="changed"),
            _call("bash", command="cat /tmp/made.txt"),
            _done(),
        ),
        sandbox="holdfast",
    )


@task
def example() -> Task:
    """The task of examples/, with a model that counts."""
    made = count_lines()
    made.model = _model(_call("bash", command="wc -l < poem.txt"), _done("There are 3."))
    return made


@task
def remote() -> Task:
    return Task(dataset=[Sample(input="go")], solver=_remote(), model=_model(), sandbox="holdfast")


@solver
def _remote() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        box = sandbox()
        process = await box.exec_remote(["sh", "-c", "echo out; echo err >&2; exit 3"])
        events = [event async for event in process]
        text = "".join(event.data for event in events if isinstance(event, ExecStdout))
        ended = [event.exit_code for event in events if isinstance(event, ExecCompleted)]
        began = time.monotonic()
        whole = await box.exec_remote(["cat"], stream=False)
        seconds = time.monotonic() - began
        state.store.set("remote", json.dumps([text, ended, whole.returncode, round(seconds, 3)]))
        return state

    return solve


@task
def bridge() -> Task:
    answer = ModelOutput.from_content("mockllm/model", "an answer from outside")
    return Task(dataset=[Sample(input="go")], solver=_bridge(), model=_model(answer), sandbox="holdfast")


@solver
def _bridge() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        async with sandbox_agent_bridge(AgentState(messages=state.messages)):
            result = await sandbox().exec(["python3", "-c", REQUEST], timeout=120)
        state.store.set("bridge", result.stdout + result.stderr)
        return state

    return solve
