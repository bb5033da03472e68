"""`python -m bench.integration_agents NAME`: a framework's own provider beside ours, run by `bench.integrations`.

Prints the samples as one line of JSON, for each measurement the rounds of both, taken in turns. The local providers
isolate nothing: they run a child process. Ours runs the same command in a jail. The providers of Docker use the
daemon of DOCKER_HOST and the image `IMAGE`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

from bench.measure import interleave_samples, one

#: A shell command, and the number of characters that it printed.
Execute = Callable[[str], Awaitable[int]]
#: A new sandbox of a provider, for the length of a block.
Provider = Callable[[], AbstractAsyncContextManager[Execute]]

IMAGE: Final = "holdfast-bench"
ROUNDS: Final = 5
#: Samples in a round. Docker's own client needs ten seconds to stop a container.
TURNS: Final = {"exec": 20, "output": 4, "start": 4}
DOCKER_ROUNDS: Final = 3
DOCKER_TURNS: Final = {"exec": 10, "output": 2, "start": 1}
QUICK_TURNS: Final = dict.fromkeys(TURNS, 1)
#: Below the limit of every provider.
OUTPUT_BYTES: Final = 10_000_000
MUCH: Final = f"yes 0123456789abcde | head -c {OUTPUT_BYTES}"


@asynccontextmanager
async def deepagents_local() -> AsyncIterator[Execute]:
    from deepagents.backends.local_shell import LocalShellBackend

    with tempfile.TemporaryDirectory() as directory:
        backend = LocalShellBackend(root_dir=directory, inherit_env=True, max_output_bytes=2 * OUTPUT_BYTES)

        async def execute(command: str) -> int:
            return len((await backend.aexecute(command)).output)

        yield execute


@asynccontextmanager
async def deepagents_ours() -> AsyncIterator[Execute]:
    import holdfast
    from holdfast.integrations.deepagents import Backend

    async with holdfast.create("bwrap") as box:
        backend = Backend(box)

        async def execute(command: str) -> int:
            return len((await backend.aexecute(command)).output)

        yield execute


@asynccontextmanager
async def openai_agents_local() -> AsyncIterator[Execute]:
    from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient

    async with openai_agents_session(UnixLocalSandboxClient()) as execute:
        yield execute


@asynccontextmanager
async def openai_agents_ours() -> AsyncIterator[Execute]:
    from holdfast.integrations.openai_agents import Client

    async with openai_agents_session(Client("bwrap")) as execute:
        yield execute


@asynccontextmanager
async def openai_agents_docker() -> AsyncIterator[Execute]:
    import docker
    from agents.sandbox.sandboxes.docker import DockerSandboxClient, DockerSandboxClientOptions

    client = DockerSandboxClient(docker.from_env())
    options = DockerSandboxClientOptions(IMAGE, network_mode="none")
    async with openai_agents_session(client, options) as execute:
        yield execute


@asynccontextmanager
async def openai_agents_docker_ours() -> AsyncIterator[Execute]:
    from holdfast.integrations.openai_agents import Client

    async with openai_agents_session(Client("docker", image=IMAGE)) as execute:
        yield execute


@asynccontextmanager
async def openai_agents_session(client: Any, options: Any = None) -> AsyncIterator[Execute]:
    session = await client.create(options=options)
    try:
        await session.start()

        async def execute(command: str) -> int:
            return len((await session.exec(command, shell=["sh", "-c"])).stdout)

        yield execute
    finally:
        await client.delete(session)


@asynccontextmanager
async def pydantic_ai_local() -> AsyncIterator[Execute]:
    from pydantic_ai.workspaces import LocalWorkspaceBackend

    with tempfile.TemporaryDirectory() as directory:
        workspace = LocalWorkspaceBackend(directory)

        async def execute(command: str) -> int:
            return len((await workspace.run(command, shell=True)).stdout)

        yield execute


@asynccontextmanager
async def pydantic_ai_ours() -> AsyncIterator[Execute]:
    import holdfast
    from holdfast.integrations.pydantic_ai import Workspace

    async with holdfast.create("bwrap") as box:
        workspace = Workspace(box)

        async def execute(command: str) -> int:
            return len((await workspace.run(command, shell=True)).stdout)

        yield execute


@asynccontextmanager
async def mini_swe_agent(environment: Any) -> AsyncIterator[Execute]:
    async def execute(command: str) -> int:
        # A call blocks, as the agent's loop does.
        return len(environment.execute({"command": command})["output"])

    try:
        yield execute
    finally:
        if hasattr(environment, "cleanup"):
            environment.cleanup()


@asynccontextmanager
async def mini_swe_agent_local() -> AsyncIterator[Execute]:
    from minisweagent.environments.local import LocalEnvironment

    async with mini_swe_agent(LocalEnvironment()) as execute:
        yield execute


@asynccontextmanager
async def mini_swe_agent_ours() -> AsyncIterator[Execute]:
    from holdfast.integrations.mini_swe_agent import Environment

    async with mini_swe_agent(Environment(engine="bwrap")) as execute:
        yield execute


@asynccontextmanager
async def mini_swe_agent_docker() -> AsyncIterator[Execute]:
    from minisweagent.environments.docker import DockerEnvironment

    environment = DockerEnvironment(image=IMAGE, run_args=["--rm", "--network", "none"])
    async with mini_swe_agent(environment) as execute:
        yield execute


@asynccontextmanager
async def mini_swe_agent_docker_ours() -> AsyncIterator[Execute]:
    from holdfast.integrations.mini_swe_agent import Environment

    async with mini_swe_agent(Environment(engine="docker", image=IMAGE)) as execute:
        yield execute


PROVIDERS: Final[dict[str, dict[str, Provider]]] = {
    "deepagents": {"baseline": deepagents_local, "holdfast": deepagents_ours},
    "mini-swe-agent": {"baseline": mini_swe_agent_local, "holdfast": mini_swe_agent_ours},
    "mini-swe-agent-docker": {"baseline": mini_swe_agent_docker, "holdfast": mini_swe_agent_docker_ours},
    "openai-agents": {"baseline": openai_agents_local, "holdfast": openai_agents_ours},
    "openai-agents-docker": {"baseline": openai_agents_docker, "holdfast": openai_agents_docker_ours},
    "pydantic-ai": {"baseline": pydantic_ai_local, "holdfast": pydantic_ai_ours},
}


async def timed(execute: Execute, command: str, printed: int) -> float:
    began = time.perf_counter()
    # `LocalShellBackend` has a text of its own for no output.
    assert await execute(command) >= printed
    return time.perf_counter() - began


async def started(provider: Provider) -> float:
    began = time.perf_counter()
    async with provider() as execute:
        await execute("true")
        return time.perf_counter() - began


async def main(name: str, *, quick: bool) -> None:
    rounds, turns = (DOCKER_ROUNDS, DOCKER_TURNS) if name.endswith("-docker") else (ROUNDS, TURNS)
    if quick:
        rounds, turns = 1, QUICK_TURNS
    samples: dict[str, dict[str, list[list[float]]]] = {}
    async with AsyncExitStack() as stack:
        made = {key: await stack.enter_async_context(each()) for key, each in PROVIDERS[name].items()}
        for key, command, printed in (("exec", "true", 0), ("output", MUCH, OUTPUT_BYTES)):
            contenders = {each: one(partial(timed, run, command, printed)) for each, run in made.items()}
            samples[key] = await interleave_samples(rounds, turns[key], contenders)
    starters = {key: one(partial(started, each)) for key, each in PROVIDERS[name].items()}
    samples["start"] = await interleave_samples(rounds, turns["start"], starters)
    print(json.dumps(samples))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], quick="--quick" in sys.argv))
