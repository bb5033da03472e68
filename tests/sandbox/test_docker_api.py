"""Channels through the API of a real Docker engine: what runs on each side, and errors of the engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import ConnectionLost, SandboxGone
from holdfast.sandboxes.containers import Container
from holdfast.sandboxes.docker_api.exec_channel import ExecChannel
from holdfast.sandboxes.install.installation import MISSING
from holdfast.transport.stdio import CommandChannel
from tests.support.engines import ContainerEngine
from tests.unit.transport.test_stream import Recorder

PATIENCE = 60.0

#: Connects, prints a line, and then neither reads nor ends.
CONNECTS = """
import asyncio, sys
import holdfast
async def main():
    async with holdfast.connect(sys.argv[1]) as box:
        await box.exec(["true"])
        print("connected", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def connects(engine: ContainerEngine, name: str) -> list[str]:
    """The lines of `top` for each `holdfast connect` in a container."""
    lines = engine("top", name, "-ww", "-eo", "pid,args").splitlines()
    return [line for line in lines if line.endswith(" connect")]


def children() -> set[str]:
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        found.update(path.read_text().split())
    return found


async def test_a_channel_needs_no_process_of_ours(docker: ContainerEngine, container: str) -> None:
    before = children()
    async with asyncio.timeout(PATIENCE), holdfast.connect(f"docker:{container}") as box:
        assert (await box.exec(["echo", "hello"])).stdout == "hello\n"
        assert children() <= before
        assert len(connects(docker, container)) == 1
    # `aclose` waits for the end of the command.
    assert connects(docker, container) == []


async def test_a_first_connection_is_one_exec(docker: ContainerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is installed through the API, too: the client program is not needed."""
    name = docker.container("hf-busybox")
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        async with asyncio.timeout(PATIENCE), holdfast.connect(f"docker:{name}") as box:
            assert (await box.exec(["echo", "hello"])).stdout == "hello\n"
    docker.remove(name)


def test_a_killed_client_leaves_no_command_in_the_container(docker: ContainerEngine, container: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CONNECTS, f"docker:{container}"], stdout=subprocess.PIPE, env=os.environ
    ) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"connected\n"
            assert len(connects(docker, container)) == 1
        finally:
            client.kill()
    # The end of an exec is announced to its client alone, which is gone: repeat the query, each a process.
    deadline = time.monotonic() + PATIENCE
    while connects(docker, container):
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("program", "via", "kind"),
    [("docker", None, ExecChannel), ("docker", "client", CommandChannel), ("env docker", None, CommandChannel)],
)
async def test_the_choice_of_the_way(
    container: str, tmp_path: Path, program: str, via: str | None, kind: type[object]
) -> None:
    """Another client program may be a wrapper, which has its reasons."""
    target = Container("docker", container, via=via)  # type: ignore[arg-type]
    if program != "docker":
        wrapper = tmp_path / "wrapper"
        wrapper.write_text('#!/bin/sh\nexec docker "$@"\n')
        wrapper.chmod(0o755)
        target.program = str(wrapper)
    recorder = Recorder()
    async with asyncio.timeout(PATIENCE):
        channel = await target.start_channel(["sh", "-c", "echo report; exec cat"], recorder, b"report")
    assert isinstance(channel, kind)
    channel.send(b'{"a": 1}')
    await recorder.until_messages(1)
    channel.close()
    assert await recorder.until_lost() is None
    assert recorder.messages == [b'{"a": 1}']


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["/no/such/program"], 127, "/no/such/program"),
        (["/etc/passwd"], 126, "permission denied"),
        (["sh", "-c", "echo sorry >&2; exit 7"], 7, "sorry"),
        (["sh", "-c", f"exit {MISSING}"], MISSING, ""),
        (["sh", "-c", "kill -9 $$"], 137, ""),
    ],
)
@pytest.mark.parametrize("via", ["api", "client"])
async def test_the_end_of_a_command(container: str, argv: list[str], code: int, words: str, via: str) -> None:
    target = Container("docker", container, via=via)  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(ConnectionLost) as raised:
            await target.start_channel(argv, Recorder(), b"report")
    details = raised.value.details
    assert target.lacks_program(details["exit_code"], details["words"]) is (code in (126, 127))
    # Engines differ in the code of a program that they cannot execute.
    assert details["exit_code"] == code or {details["exit_code"], code} == {126, 127}
    assert words in details["words"]
    assert raised.value.message.startswith(f"docker:{container}: the command ended with exit code {code}"[:-1])


async def test_a_container_that_is_paused(docker: ContainerEngine, container: str) -> None:
    docker("pause", container)
    try:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(ConnectionLost, match=rf"docker:{container}: .*{container} is paused, unpause"):
                await Container("docker", container).start_channel(["true"], Recorder(), b"report")
    finally:
        docker("unpause", container)


async def test_a_container_that_is_killed_under_a_channel(docker: ContainerEngine) -> None:
    name = docker.container("hf-busybox")
    recorder = Recorder()
    async with asyncio.timeout(PATIENCE):
        channel = await Container("docker", name).start_channel(
            ["sh", "-c", "echo report; exec cat"], recorder, b"report"
        )
        docker("kill", name)
        lost = await recorder.until_lost()
        assert isinstance(lost, ConnectionLost)
        assert lost.details["exit_code"] in (137, -1)
        with pytest.raises(SandboxGone, match=f"docker:{name}: the container does not run"):
            await Container("docker", name).start_channel(["true"], recorder, b"report")
    channel.close()
    docker.remove(name)


async def test_a_cancelled_dial_leaves_no_command(docker: ContainerEngine, container: str) -> None:
    recorder = Recorder()
    dialling = asyncio.ensure_future(Container("docker", container).start_channel(["cat"], recorder, b"report"))

    def runs() -> bool:
        return "cat" in docker("top", container, "-eo", "pid,args").split()

    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(runs):
            assert not dialling.done()
    dialling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dialling
    assert await recorder.until_lost() is None
    assert not runs()
