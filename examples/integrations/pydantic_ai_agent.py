"""A pydantic-ai agent with one tool, a shell, in a jail without network.

pip install 'holdfast[pydantic-ai]' 'pydantic-ai-slim[anthropic]'
ANTHROPIC_API_KEY=... python pydantic_ai_agent.py anthropic:claude-sonnet-4-5
"""

import asyncio
import sys

from pydantic_ai import Agent, RunContext
from pydantic_ai.models import Model

import holdfast
from holdfast.integrations.pydantic_ai import Workspace

agent = Agent(instructions="Use the shell to find out. Answer in one sentence.")


@agent.tool
async def shell(ctx: RunContext, command: str) -> str:
    """Run a command and return its output."""
    result = await ctx.workspace.run(command, shell=True, timeout=60)
    return f"{result.stdout}{result.stderr}[exit code {result.exit_code}]"


async def main(model: str | Model) -> None:
    async with holdfast.create("bwrap") as box:
        result = await agent.run("Which operating system is this?", model=model, workspace=Workspace(box))
        print(result.output)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
