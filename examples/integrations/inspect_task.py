"""An Inspect task whose samples run in jails without network, each with half a gigabyte of memory.

pip install 'holdfast[inspect]' anthropic
ANTHROPIC_API_KEY=... inspect eval inspect_task.py --model anthropic/claude-sonnet-4-5
"""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec

from holdfast.integrations.inspect_ai import Config


@task
def count_lines() -> Task:
    return Task(
        dataset=[Sample(input="How many lines has poem.txt?", target="3", files={"poem.txt": "one\ntwo\nthree\n"})],
        solver=[use_tools(bash(timeout=60)), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("holdfast", Config(engine="bwrap", memory="512MiB")),
    )
