"""A coding agent: a model with the two tools of `UnifiedExec`, in a loop, over any sandbox.

    OPENAI_API_KEY=... python examples/coding_agent.py local MODEL "make the tests in /srv/app pass"

OPENAI_BASE_URL names another endpoint with Chat Completions. The number of turns is bounded.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai

import holdfast

MAX_TURNS = 30
INSTRUCTIONS = "You work in a sandbox. Use the tools to reach the goal of the user, then reply with a summary."


async def work(box: holdfast.Sandbox, model: openai.AsyncOpenAI, name: str, goal: str) -> str:
    """Run the agent until it replies without a tool call; returns that reply."""
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": goal}]
    async with holdfast.UnifiedExec(box) as tools:
        definitions: Any = tools.tools("openai")
        for _ in range(MAX_TURNS):
            reply = await model.chat.completions.create(model=name, messages=messages, tools=definitions)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = await tools.call(call, "openai")
                print(f"{call.to_json(indent=None)}\n  {result['content']}", file=sys.stderr)
                messages.append(result)
    raise SystemExit(f"not done after {MAX_TURNS} turns")


async def main(address: str, name: str, goal: str) -> None:
    async with holdfast.connect(address) as box, openai.AsyncOpenAI() as model:
        print(await work(box, model, name, goal))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    asyncio.run(main(*sys.argv[1:4]))
