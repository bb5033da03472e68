"""The E2B Python SDK through `holdfast e2b`, beside Holdfast's own client; prints the samples as one line of JSON.

Runs in the environment of `make integrations ONLY=e2b`, with the server as a process of its own, over bwrap:
`python -m bench.e2b_sdk` runs it there.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from e2b import AsyncSandbox, Sandbox

from bench.measure import interleave_samples, one
from holdfast.fleet.fleet import Fleet, FleetSandbox
from tests.integrations.e2b.server_process import e2b_server

ROUNDS: Final = 5
#: Samples in a round.
TURNS: Final = {"exec": 20, "true": 20, "write": 1, "read": 1, "sandboxes": 1}
BLOCK: Final = bytes(range(256)) * 4_096
FILE_MB: Final = 100
SANDBOXES: Final = 100
#: Sandboxes that are made at a time; `Fleet` has the same limit.
AT_ONCE: Final = 20


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def measure(fleet: Fleet, box: FleetSandbox, sandbox: Sandbox) -> dict[str, dict[str, list[list[float]]]]:
    data = BLOCK * (FILE_MB * 1_000_000 // len(BLOCK) + 1)
    data = data[: FILE_MB * 1_000_000]

    async def rate(work: Callable[[], Awaitable[Any]]) -> float:
        return FILE_MB / await timed(work)

    async def called(work: Callable[[], Any]) -> Any:
        # The SDK's client without an event loop, as most programs use it; in a thread it would be slower.
        return work()

    contenders: dict[str, dict[str, Callable[[], Awaitable[float]]]] = {
        "true": {
            "baseline": lambda: timed(lambda: box.exec(["true"])),
            "holdfast": lambda: timed(lambda: called(lambda: sandbox.commands.run("true"))),
        },
        "exec": {
            "baseline": lambda: timed(lambda: box.exec(["/bin/bash", "-l", "-c", "true"])),
            "holdfast": lambda: timed(lambda: called(lambda: sandbox.commands.run("true"))),
        },
        "write": {
            "baseline": lambda: rate(lambda: box.write_file("/tmp/bench", data)),
            "holdfast": lambda: rate(
                lambda: called(lambda: sandbox.files.write("/tmp/bench", data, use_octet_stream=True))
            ),
        },
        "read": {
            "baseline": lambda: rate(lambda: box.read_file("/tmp/bench")),
            "holdfast": lambda: rate(lambda: called(lambda: sandbox.files.read("/tmp/bench", format="bytes"))),
        },
        "sandboxes": {"baseline": lambda: timed(lambda: many_direct(fleet)), "holdfast": lambda: timed(many)},
    }
    samples = {}
    for name in sys.argv[1:] or contenders:
        rounds = 1 if name == "sandboxes" else ROUNDS
        both = {each: one(run) for each, run in contenders[name].items()}
        samples[name] = await interleave_samples(rounds, TURNS[name], both)
    return samples


async def many() -> None:
    """A hundred sandboxes of one server that exist at the same time, each with a command that ended."""
    locations = asyncio.Semaphore(AT_ONCE)

    async def make() -> AsyncSandbox:
        async with locations:
            made = await AsyncSandbox.create()
        assert (await made.commands.run("echo ready")).stdout == "ready\n"
        return made

    made = await asyncio.gather(*(make() for _ in range(SANDBOXES)))
    await asyncio.gather(*(each.kill() for each in made))


async def many_direct(fleet: Fleet) -> None:
    async def make() -> FleetSandbox:
        box = await fleet.connect((await fleet.create()).id)
        assert (await box.exec(["/bin/bash", "-l", "-c", "echo ready"])).stdout == "ready\n"
        return box

    made = await asyncio.gather(*(make() for _ in range(SANDBOXES)))
    for box in made:
        await box.aclose()
        await fleet.remove(box.ref.id)


async def main() -> None:
    with e2b_server() as _:
        sandbox = Sandbox.create(timeout=3_600)
        async with Fleet("bwrap") as fleet, fleet.block() as box:
            samples = await measure(fleet, box, sandbox)
        sandbox.kill()
    print(json.dumps(samples))


if __name__ == "__main__":
    asyncio.run(main())
