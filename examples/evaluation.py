"""An evaluation: 20 tasks, each in a sandbox of its own, 5 at a time, that survives kill -9.

    python examples/evaluation.py docker results.jsonl image=debian:12
    python examples/evaluation.py bwrap results.jsonl

Each result is one line of the file. A program that is killed and started again skips the tasks with a result, and
removes the sandboxes that it had made: they have the label `run`, which is the path of the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from holdfast.fleet.fleet import Fleet
from holdfast.fleet.template import Template

TASKS = [f"task-{number:02}" for number in range(1, 21)]
CONCURRENT = 5


def finished(path: str) -> set[str]:
    """The tasks with a result. The last line may be cut off by a kill, and is then removed from the file."""
    with open(path, "a+b") as file:
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        file.truncate(whole)
    return {json.loads(line)["task"] for line in content[:whole].splitlines()}


async def evaluate(fleet: Fleet, template: Template, task: str) -> dict[str, Any]:
    """Run one task in a new sandbox, which is removed in any case."""
    ref = await fleet.create(template)
    try:
        async with await fleet.connect(ref.id) as box:
            result = await box.exec(["sh", "-c", 'echo "$1" | rev', "sh", task], timeout=600)
            return {"task": task, "passed": result.stdout.strip() == task[::-1]}
    finally:
        await fleet.remove(ref.id)


async def main(engine: str, path: str, **fields: Any) -> None:
    run = os.path.abspath(path)
    template = Template(labels={"run": run}, lifetime=3600, **fields)
    async with Fleet(engine) as fleet:
        for ref in await fleet.list(labels={"run": run}):
            await fleet.remove(ref.id)  # of a program that was killed
        places = asyncio.Semaphore(CONCURRENT)
        done = finished(path)
        with open(path, "a") as results:

            async def one(task: str) -> None:
                async with places:
                    result = await evaluate(fleet, template, task)
                results.write(json.dumps(result) + "\n")
                results.flush()
                print(task, flush=True)

            async with asyncio.TaskGroup() as group:
                for task in TASKS:
                    if task not in done:
                        group.create_task(one(task))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    asyncio.run(main(*sys.argv[1:3], **dict(option.split("=", 1) for option in sys.argv[3:])))
