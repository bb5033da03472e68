"""Inspect's `local` or `docker` provider beside ours, in Inspect's environment; prints the samples as JSON.

`local` is Inspect's fastest provider: it isolates nothing. Its tools are installed on this machine for the length
of the run, as Inspect does for every `local` sandbox. `inspect-docker` has both on Docker, with the image `IMAGE`;
Inspect's provider needs the compose plugin and Docker 24.0.6; without them there are no samples.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.util import ExecStdout, SandboxEnvironment
from inspect_ai.util._sandbox._cli import SANDBOX_TOOLS_DIR
from inspect_ai.util._sandbox.docker.docker import DockerSandboxEnvironment
from inspect_ai.util._sandbox.environment import SandboxEnvironmentConfigType
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

from bench.integration_agents import IMAGE
from bench.measure import interleave_samples, one
from holdfast.integrations.inspect_ai import Config, HoldfastSandbox

ROUNDS: Final = 3
#: Samples in a round, fewer where Inspect's own takes seconds.
TURNS: Final = {"exec": 20, "remote": 3, "line": 2, "output": 3, "start": 5}
QUICK_TURNS: Final = dict.fromkeys(TURNS, 1)
OUTPUT_BYTES: Final = 10_000_000
COMPOSE: Final = f"""services:
  default:
    image: {IMAGE}
    command: tail -f /dev/null
    network_mode: none
    init: true
"""

Action = Callable[[SandboxEnvironment], Awaitable[float]]


class Provider(msgspec.Struct, frozen=True):
    """A provider with the configuration of its samples."""

    kind: type[SandboxEnvironment]
    config: SandboxEnvironmentConfigType | None

    async def make(self) -> dict[str, SandboxEnvironment]:
        made: dict[str, SandboxEnvironment] = await self.kind.sample_init("bench", self.config, {})
        return made

    async def remove(self, made: dict[str, SandboxEnvironment]) -> None:
        await self.kind.sample_cleanup("bench", self.config, made, False)


def providers(name: str, directory: str) -> dict[str, Provider]:
    """Both contenders; `directory` is for the files of Inspect's configuration."""
    if name == "inspect":
        ours = Provider(HoldfastSandbox, Config(engine="bwrap"))
        return {"baseline": Provider(LocalSandboxEnvironment, None), "holdfast": ours}
    compose = Path(directory, "compose.yaml")
    compose.write_text(COMPOSE)
    ours = Provider(HoldfastSandbox, Config(engine="docker", image=IMAGE))
    return {"baseline": Provider(DockerSandboxEnvironment, str(compose)), "holdfast": ours}


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


async def start(provider: Provider) -> float:
    began = time.perf_counter()
    made = await provider.make()
    assert (await made["default"].exec(["true"])).success
    seconds = time.perf_counter() - began
    await provider.remove(made)
    return seconds


async def main(contenders: dict[str, Provider], *, quick: bool) -> None:
    rounds, turns = (1, QUICK_TURNS) if quick else (ROUNDS, TURNS)
    actions: dict[str, Action] = {
        "exec": run_true,
        "remote": run_true_remotely,
        "line": line_to_event,
        "output": much_output,
    }
    samples: dict[str, dict[str, list[list[float]]]] = {}
    for provider in contenders.values():
        try:
            await provider.kind.task_init("bench", provider.config)
        except PrerequisiteError as error:
            sys.stderr.write(f"{provider.kind.__name__}: {error}\n")
            print("{}")
            return
    made = {name: await provider.make() for name, provider in contenders.items()}
    try:
        boxes = {name: SandboxEnvironmentProxy(each["default"]) for name, each in made.items()}
        for key, action in actions.items():
            runs = {name: one(partial(action, box)) for name, box in boxes.items()}
            samples[key] = await interleave_samples(rounds, turns[key], runs)
    finally:
        for name, provider in contenders.items():
            await provider.remove(made[name])
    starters = {name: one(partial(start, provider)) for name, provider in contenders.items()}
    samples["start"] = await interleave_samples(rounds, turns["start"], starters)
    for provider in contenders.values():
        await provider.kind.task_cleanup("bench", provider.config, True)
    print(json.dumps(samples))


if __name__ == "__main__":
    name, quick = sys.argv[1], "--quick" in sys.argv
    installed = Path(SANDBOX_TOOLS_DIR).exists()
    try:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(main(providers(name, directory), quick=quick))
    finally:
        if not installed:
            shutil.rmtree(SANDBOX_TOOLS_DIR, ignore_errors=True)
