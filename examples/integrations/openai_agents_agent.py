"""An agent of the OpenAI Agents SDK with a shell, terminals and files in a jail without network.

pip install 'holdfast[openai-agents]' && OPENAI_API_KEY=... python openai_agents_agent.py gpt-5
"""

import asyncio
import sys

from agents import RunConfig, Runner
from agents.models.interface import Model
from agents.sandbox import SandboxAgent, SandboxRunConfig

from holdfast.integrations.openai_agents import Client


async def main(model: str | Model) -> None:
    agent = SandboxAgent(name="worker", model=model, instructions="Use the shell to find out.")
    config = RunConfig(sandbox=SandboxRunConfig(client=Client("bwrap")), tracing_disabled=True)
    result = await Runner.run(agent, "Which operating system is this?", run_config=config)
    print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
