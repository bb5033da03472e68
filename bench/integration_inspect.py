"""Inspect's `local` provider beside ours, in Inspect's environment; prints the samples as one line of JSON.

`local` is Inspect's fastest provider: it isolates nothing. Its tools are installed on this machine for the length
of the run, as Inspect does for every `local` sandbox.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

from inspect_ai.util import ExecStdout, SandboxEnvironment
from inspect_ai.util._sandbox._cli import SANDBOX_TOOLS_DIR
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

from bench.measure import interleave_samples, one
from holdfast.integrations.inspect_ai import Config, HoldfastSandbox

PROVIDERS: Final[dict[str, type[SandboxEnvironment]]] = {
    "baseline": LocalSandboxEnvironment,
    "holdfast": HoldfastSandbox,
}
CONFIG: Final = Config(engine="bwrap")
ROUNDS: Final = 3
#: Samples in a round, fewer where Inspect's own takes seconds.
TURNS: Final = {"exec": 20, "exec_remote": 3, "line": 2, "output": 3, "start": 5}
OUTPUT_BYTES: Final = 10_000_000

Action = Callable[[SandboxEnvironment], Awaitable[float]]


async def make(provider: type[SandboxEnvironment]) -> dict[str, SandboxEnvironment]:
    made: dict[str, SandboxEnvironment] = await provider.sample_init("bench", CONFIG, {})
    return made


async def remove(provider: type[SandboxEnvironment], made: dict[str, SandboxEnvironment]) -> None:
    await provider.sample_cleanup("bench", CONFIG, made, False)


async def run_true(box: SandboxEnvironment) -> float:
    began = time.perf_counter()
    assert (await box.exec(["true"])).success
    return time.perf_counter() - began


async def run_true_remotely(box: SandboxEnvironment) -> float:
    began = time.perf_counter()
    assert (await box.exec_remote(["true"], stream=False)).success
    return time.perf_counter() - began


async def line_to_event(box: SandboxEnvironment) -> float:
    """The program prints the time at which it prints, some time after its start, and then waits."""
    process = await box.exec_remote(["sh", "-c", "sleep 0.5; date +%s.%N; sleep 60"])
    try:
        async for event in process:
            if isinstance(event, ExecStdout):
                return time.time() - float(event.data)
    finally:
        await process.kill()
    raise AssertionError("the line did not arrive")


async def much_output(box: SandboxEnvironment) -> float:
    began = time.perf_counter()
    result = await box.exec(["sh", "-c", f"yes 0123456789abcde | head -c {OUTPUT_BYTES}"])
    assert len(result.stdout) == OUTPUT_BYTES
    return time.perf_counter() - began


async def start(provider: type[SandboxEnvironment]) -> float:
    began = time.perf_counter()
    made = await make(provider)
    assert (await made["default"].exec(["true"])).success
    seconds = time.perf_counter() - began
    await remove(provider, made)
    return seconds


async def main() -> None:
    actions: dict[str, Action] = {
        "exec": run_true,
        "exec_remote": run_true_remotely,
        "line": line_to_event,
        "output": much_output,
    }
    made = {name: await make(provider) for name, provider in PROVIDERS.items()}
    samples: dict[str, dict[str, list[list[float]]]] = {}
    try:
        boxes = {name: SandboxEnvironmentProxy(each["default"]) for name, each in made.items()}
        for key, action in actions.items():
            sys.stderr.write(f"{key} ...\n")
            contenders = {name: one(partial(action, box)) for name, box in boxes.items()}
            samples[key] = await interleave_samples(ROUNDS, TURNS[key], contenders)
    finally:
        for name, provider in PROVIDERS.items():
            await remove(provider, made[name])
    starters = {name: one(partial(start, provider)) for name, provider in PROVIDERS.items()}
    samples["start"] = await interleave_samples(ROUNDS, TURNS["start"], starters)
    print(json.dumps(samples))


if __name__ == "__main__":
    installed = Path(SANDBOX_TOOLS_DIR).exists()
    try:
        asyncio.run(main())
    finally:
        if not installed:
            shutil.rmtree(SANDBOX_TOOLS_DIR, ignore_errors=True)
