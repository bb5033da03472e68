"""A session service with an approval: an agent runs commands, an operator decides about some of them.

    holdfast service --rules rules.toml
    HOLDFAST_SERVICE_TOKEN=TOKEN python examples/approval.py http://127.0.0.1:7400

The rules hold a command of the agent until an operator answers:

    [[profiles.default.commands.rules]]
    verdict = "ask"
    program = "touch"

Here one program is both, with the token of an operator. An operator in a shell uses `holdfast session approve`.
"""

from __future__ import annotations

import asyncio
import sys

import holdfast
from holdfast.service.problems import Denied

COMMANDS = ["echo started", "touch report.txt && ls", "touch /tmp/elsewhere"]
#: Between two polls of the operator. A console subscribes to `events` instead.
SECONDS = 0.2


async def agent(service: holdfast.ServiceClient, session_id: str) -> None:
    """Run every command; a call returns only after the answer of the operator."""
    for command in COMMANDS:
        try:
            result = await service.run_command(command, session_id)
        except Denied as refused:
            print(f"{command}: refused: {refused.message}", flush=True)
        else:
            print(f"{command}: {result.stdout.decode().strip()}", flush=True)


async def operator(service: holdfast.ServiceClient, session_id: str) -> None:
    """Allow files in the workspace, and nothing outside."""
    while True:
        for waiting in await service.list_approvals(session_id):
            inside = "/tmp" not in waiting.command
            comment = "inside the workspace" if inside else "only files of the workspace"
            await service.answer_approval(waiting.approval_id, approve=inside, comment=comment)
        await asyncio.sleep(SECONDS)


async def main(address: str) -> None:
    async with holdfast.ServiceClient(address) as service:
        session = await service.create_session(kind="shell", labels={"example": "approval"})
        answering = asyncio.create_task(operator(service, session.session_id))
        try:
            await agent(service, session.session_id)
        finally:
            answering.cancel()
            await service.close_session(session.session_id)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    asyncio.run(main(sys.argv[1]))
