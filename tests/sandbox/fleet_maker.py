"""A maker of sandboxes that is killed at one step: `python fleet_maker.py ENGINE TEMPLATE_JSON STEP`.

Every call that changes something outside of this process is a step. The process kills itself with SIGKILL before
step number STEP, and prints the number of steps if it reaches the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.fleet import directories
from holdfast.fleet.containers import engine as containers
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.jails import engine as jails, starter as jail_starter
from holdfast.fleet.template import Template

step = 0
last = int(sys.argv[3])


def counted(call: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*arguments: Any, **options: Any) -> Any:
        global step
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        step += 1
        return call(*arguments, **options)

    return counting


def instrument() -> None:
    for module, name in (
        (os, "mkdir"),
        (os, "rename"),
        (asyncio, "create_subprocess_exec"),
        (containers, "run_host_command"),
        (jails, "run_host_command"),
    ):
        setattr(module, name, counted(getattr(module, name)))
    write = directories.SandboxDirectory.write
    directories.SandboxDirectory.write = counted(write)  # type: ignore[method-assign]
    jail_starter.Zygote.start = counted(jail_starter.Zygote.start)  # type: ignore[method-assign]


async def main(engine: str, template: Template) -> None:
    async with Fleet(engine) as fleet:
        # The crash points are those of `create`, not of what the first prune finds.
        await fleet.prune()
        instrument()
        async with fleet.block(template):
            pass
    print(step)


asyncio.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Template)))
