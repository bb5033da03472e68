"""Faults around a sandbox as its caller sees them: a pause, or one error that names the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import ExecRemoteProcess, OutputChunk, Sandbox, StdoutChunk
from holdfast.bridge import ModelRequest, sandbox_agent_bridge
from holdfast.errors import (
    CommandNotFound,
    ConnectionLost,
    HoldfastError,
    ResourceExhausted,
    SandboxError,
    SandboxGone,
    UnknownProcess,
)
from holdfast.sandboxes.containers import Container
from holdfast.sandboxes.ssh import SshHost
from tests.support.engines import ContainerEngine, SshServer
from tests.support.signalling import send_signal

#: Turns a hang into a failure.
PATIENCE = 60.0


@contextlib.contextmanager
def made(
    docker: ContainerEngine, *options: str, image: str = "hf-busybox", command: tuple[str, ...] = ()
) -> Iterator[str]:
    name = docker.container(image, *command, options=options)
    try:
        yield name
    finally:
        docker.remove(name)


@contextlib.asynccontextmanager
async def connected(name: str, **options: Any) -> AsyncIterator[Sandbox]:
    async with asyncio.timeout(PATIENCE), holdfast.connect(f"docker:{name}", **options) as box:
        yield box


def engine_connections() -> list[socket.socket]:
    """Copies of our connections to the engine, which carry our channels into its containers."""
    path = os.environ["DOCKER_HOST"].removeprefix("unix://")
    found: dict[int, socket.socket] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.stat(int(name))
            # The descriptor of the listing itself may be that of a copy by now.
            if stat.S_ISSOCK(about.st_mode) and about.st_ino not in found:
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family == socket.AF_UNIX and copy.getpeername() == path:
                        found[about.st_ino] = copy.dup()
    return list(found.values())


def cut(name: str, via: str) -> None:
    """Cut the only channel into this container."""
    if via == "client":
        (channel,) = channels(name)
        send_signal(channel, signal.SIGKILL)
        return
    assert not channels(name)
    (connection,) = engine_connections()
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()


#: The ways to a container of Docker.
both_ways = pytest.mark.parametrize("via", ["api", "client"])


def channels(name: str) -> list[int]:
    """The client programs that carry our channels into this container."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(FileNotFoundError):
                if name in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    found.append(int(pid))
    return found


async def read_on(process: ExecRemoteProcess) -> None:
    async for event in process:
        assert isinstance(event, StdoutChunk)


# --- the sandbox goes away ---------------------------------------------------------------------------------------


@both_ways
async def test_a_container_that_is_killed_in_mid_stream(docker: ContainerEngine, via: str) -> None:
    with made(docker) as name:
        await kill_in_mid_stream(docker, name, via)


async def kill_in_mid_stream(docker: ContainerEngine, container: str, via: str) -> None:
    async with connected(container, via=via) as box:
        process = box.exec_remote(["sh", "-c", "while :; do echo line; done"])
        assert isinstance(await anext(process), StdoutChunk)
        killed = asyncio.ensure_future(asyncio.to_thread(docker, "kill", container))
        with pytest.raises(SandboxGone, match=f"docker:{container}: the container does not run"):
            await read_on(process)
        await killed
        with pytest.raises(SandboxGone, match=container):
            await box.exec(["true"])


async def test_a_container_that_is_killed_under_a_bridge(docker: ContainerEngine) -> None:
    """The pending command fails as it does without a bridge, and no cancellation reaches the caller."""

    async def model(request: ModelRequest) -> str:
        return "hello"

    with made(docker) as name:
        async with connected(name) as box:
            waiting = await box.start(["sh", "-c", "mkfifo /begun; echo made; read line </begun; echo begun"])
            await waiting.wait_for_output("made")

            async def kill_once_begun() -> None:
                await waiting.wait_for_output("begun")
                await asyncio.to_thread(docker, "kill", name)

            async def work() -> None:
                async with sandbox_agent_bridge(box, model, port=0):
                    await box.exec(["sh", "-c", "echo line >/begun; exec sleep 1000"])

            killing = asyncio.ensure_future(kill_once_begun())
            with pytest.raises(SandboxGone, match=f"docker:{name}: the container does not run"):
                await work()
            await killing
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@both_ways
async def test_a_container_that_is_removed(docker: ContainerEngine, via: str) -> None:
    with made(docker) as name:
        async with connected(name, via=via) as box:
            process = await box.start(["sleep", "1000"])
            waiting = asyncio.ensure_future(process.wait())
            docker.remove(name)
            with pytest.raises(SandboxGone, match=f"docker:{name}: there is no such container"):
                await waiting
        docker.make(name, "hf-busybox")  # for `made` to remove


@both_ways
async def test_a_container_made_again_under_the_same_name(docker: ContainerEngine, via: str) -> None:
    """A new sandbox: the caller's next commands run in it, and its old processes are unknown there."""
    with made(docker) as name:
        async with connected(name, via=via) as box:
            process = await box.start(["sleep", "1000"])
            docker("exec", name, "touch", "/first")
            with contextlib.ExitStack() as stopped:
                # Frozen meanwhile, the channel neither ends nor dials before the new one is there. Without a
                # client program the channel is ours, and our loop is blocked meanwhile.
                for pid in channels(name):
                    send_signal(pid, signal.SIGSTOP)
                    stopped.callback(send_signal, pid, signal.SIGKILL)
                docker.remove(name)
                docker.make(name, "hf-busybox")
            assert (await box.exec(["ls", "/first"])).returncode != 0
            with pytest.raises(UnknownProcess):
                await process.wait()


@both_ways
async def test_no_such_container(docker: ContainerEngine, via: str) -> None:
    with pytest.raises(SandboxGone, match="docker:nobody: there is no such container"):
        async with connected("nobody", via=via):
            pass


@both_ways
async def test_a_container_that_has_ended(docker: ContainerEngine, via: str) -> None:
    with made(docker, command=("true",)) as name:
        docker("wait", name)
        with pytest.raises(SandboxGone, match=f"docker:{name}: the container does not run"):
            async with connected(name, via=via):
                pass


@both_ways
async def test_the_engine_does_not_run(monkeypatch: pytest.MonkeyPatch, docker: ContainerEngine, via: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(HoldfastError, match=r"docker:web: .*/nowhere/docker\.sock") as raised:
        async with connected("web", via=via):
            pass
    assert isinstance(raised.value, SandboxError | ConnectionLost)


async def test_the_engine_has_no_client_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CommandNotFound, match="podman"):
        async with holdfast.connect("podman:web"):
            pass


# --- the way to it breaks ----------------------------------------------------------------------------------------


@both_ways
async def test_a_channel_killed_twenty_times_loses_no_byte(container: str, via: str) -> None:
    blocks = 3200  # 200 MiB
    script = f'i=0; while [ $i -lt {blocks} ]; do i=$((i+1)); printf "%065536d" $i; done'
    expected = hashlib.sha256()
    for number in range(1, blocks + 1):
        expected.update(b"%065536d" % number)
    async with connected(container, via=via) as box:
        process = await box.start(["sh", "-c", script], overflow="block")
        received, count, cuts = hashlib.sha256(), 0, 0
        async for chunk in process.output():
            assert isinstance(chunk, OutputChunk)
            received.update(chunk.data)
            count += len(chunk.data)
            if cuts < 20 and count > (cuts + 1) * blocks * 65536 // 22:
                cut(container, via)
                cuts += 1
    assert (cuts, count, received.digest()) == (20, blocks * 65536, expected.digest())


@both_ways
async def test_a_pause_is_a_pause(docker: ContainerEngine, container: str, via: str) -> None:
    async with connected(container, via=via) as box:
        process = await box.start(["sh", "-c", "echo ready; read line; echo $line"], stdin="open")
        await process.wait_for_output("ready")
        docker("pause", container)
        answer = asyncio.ensure_future(box.exec(["echo", "after"]))
        writing = asyncio.ensure_future(process.write("back\n"))
        docker("unpause", container)
        assert (await answer).stdout == "after\n"
        await writing
        await process.wait_for_output("back")
        await process.wait()


@both_ways
async def test_a_channel_that_is_lost_during_a_pause(docker: ContainerEngine, container: str, via: str) -> None:
    async with connected(container, via=via) as box:
        docker("pause", container)
        cut(container, via)
        answer = asyncio.ensure_future(box.exec(["echo", "after"]))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(answer), 0.3)  # it dials, and the engine refuses
        docker("unpause", container)
        assert (await answer).stdout == "after\n"


@both_ways
async def test_an_engine_that_is_away_for_a_while(
    container: str, monkeypatch: pytest.MonkeyPatch, via: str
) -> None:
    async with connected(container, via=via) as box:
        await box.exec(["true"])
        with monkeypatch.context() as away:
            cut(container, via)
            away.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
            answer = asyncio.ensure_future(box.exec(["echo", "after"]))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(answer), 0.3)
        assert (await answer).stdout == "after\n"


@both_ways
async def test_an_engine_that_does_not_come_back(container: str, monkeypatch: pytest.MonkeyPatch, via: str) -> None:
    async with connected(container, reconnect_deadline=0.5, via=via) as box:
        cut(container, via)
        monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
        with pytest.raises(ConnectionLost, match=f"docker:{container}: .*not restored in 0.5 s: .*nowhere"):
            await box.exec(["true"])


@both_ways
async def test_the_servers_death_is_a_pause(docker: ContainerEngine, container: str, via: str) -> None:
    async with connected(container, via=via) as box:
        process = await box.start(["sh", "-c", "echo ready; read line; echo $line"], stdin="open")
        await process.wait_for_output("ready")
        docker("exec", container, "kill", "-KILL", str((await box.status()).pid))
        assert (await box.exec(["echo", "after"])).stdout == "after\n"
        await process.write("kept\n")
        await process.wait_for_output("kept")


# --- sandboxes that lack something -------------------------------------------------------------------------------


async def hello(name: str, **options: Any) -> None:
    async with connected(name, **options) as box:
        assert (await box.exec(["echo", "hello"])).stdout == "hello\n"
    async with connected(name, **options) as box:  # and it is found again
        assert (await box.exec(["cat"], input=b"again")).stdout == "again"


async def test_a_read_only_root(docker: ContainerEngine) -> None:
    with made(docker, "--read-only", "--tmpfs", "/tmp:exec") as name:
        await hello(name)


async def test_tmp_that_does_not_execute(docker: ContainerEngine) -> None:
    with made(docker, "--read-only", "--tmpfs", "/tmp:noexec", "--tmpfs", "/opt:exec") as name:
        await hello(name)


async def test_no_place_that_can_be_written_and_executes(docker: ContainerEngine) -> None:
    with (
        made(docker, "--read-only", "--tmpfs", "/tmp:noexec") as name,
        pytest.raises(SandboxError, match=f"docker:{name}: no directory can hold the server.*directory="),
    ):
        await hello(name)


async def test_no_room_for_the_server(docker: ContainerEngine) -> None:
    with (
        made(docker, "--read-only", "--tmpfs", "/tmp:exec,size=2m") as name,
        pytest.raises(ResourceExhausted, match=f"docker:{name}: the server does not fit into /tmp"),
    ):
        await hello(name)


async def test_a_disk_that_fills_up(docker: ContainerEngine) -> None:
    """Commands run, or are refused by a name, while there is no room for anything; then all is as before."""
    options = (
        "--read-only",
        "--tmpfs",
        "/tmp:exec,size=64m",
        "--shm-size",
        "1m",
        "--env",
        "HOLDFAST_READER_STALL_SECONDS=1",
    )
    with made(docker, *options) as name:
        async with connected(name) as box:
            filled = await box.exec(["sh", "-c", "dd if=/dev/zero of=/tmp/filler bs=65536"])
            assert filled.returncode == 1
            # A start that cannot be recorded may be refused, by a name.
            with contextlib.suppress(ResourceExhausted):
                assert (await box.exec(["sh", "-c", "exit 7"])).returncode == 7
            docker("exec", name, "rm", "/tmp/filler")
            printed = await box.exec(["sh", "-c", "dd if=/dev/zero bs=65536 count=64 2>/dev/null"])
            assert len(printed.stdout_bytes) == 64 * 65536


async def test_no_tmp(docker: ContainerEngine, busybox_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(busybox_root, root, symlinks=True, ignore=shutil.ignore_patterns("tmp", "root"))
    docker.image(root, "hf-no-tmp")
    with made(docker, "--env", "HOME=/", image="hf-no-tmp") as name:
        await hello(name)


async def test_a_user_without_a_home(docker: ContainerEngine, container: str) -> None:
    async with connected(container, user="nobody") as box:
        assert (await box.exec(["id", "-u"])).stdout == "65534\n"
    docker("exec", container, "test", "!", "-e", "/nonexistent")


@both_ways
async def test_an_unknown_user(container: str, via: str) -> None:
    with pytest.raises(HoldfastError, match=f"docker:{container}: there is no such user: .*stranger"):
        async with connected(container, user="stranger", via=via):
            pass


@both_ways
async def test_an_image_without_a_shell(docker: ContainerEngine, tmp_path: Path, via: str) -> None:
    """One static program and nothing else: the server comes in by the engine's own copy."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(shutil.which("busybox") or "/bin/busybox", root / "busybox")
    docker.image(root, "hf-scratch")
    with made(docker, image="hf-scratch", command=("/busybox", "sleep", "9999")) as name:
        for _ in range(2):
            async with connected(name, via=via) as box:
                assert (await box.exec(["/busybox", "echo", "hello"])).stdout == "hello\n"


async def test_the_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test must not set the machine's clock: our readings of it jump a day, both ways."""
    now, jumped = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: now() + jumped[-1])
    async with holdfast.connect("inprocess") as box:
        process = await box.start(["sh", "-c", "echo ready; read line; echo $line"], stdin="open")
        await process.wait_for_output("ready")
        for jump in (86_400.0, -86_400.0):
            jumped.append(jump)
            assert (await box.exec(["echo", "on time"], timeout=60)).stdout == "on time\n"
            with pytest.raises(holdfast.TimeoutError):
                await box.exec(["sleep", "1000"], timeout=0.1, timeout_retry=False)
        await process.write("there\n")
        await process.wait_for_output("there")
        assert (await process.wait(PATIENCE)).success


# --- hosts over ssh ----------------------------------------------------------------------------------------------


async def test_a_key_that_is_not_let_in(sshd: SshServer) -> None:
    location = SshHost(sshd.destination, port=sshd.port, options=sshd.options(key="other"))
    with pytest.raises(SandboxGone, match=r"ssh:root@127\.0\.0\.1: refused: .*Permission denied"):
        async with holdfast.connect(location):
            pass


async def test_a_host_whose_key_nobody_knows(sshd: SshServer) -> None:
    location = SshHost(sshd.destination, port=sshd.port, options=sshd.options(known_hosts="nobody"))
    with pytest.raises(SandboxGone, match=r"ssh:root@127\.0\.0\.1: refused: .*[Hh]ost key"):
        async with holdfast.connect(location):
            pass


async def test_a_host_that_does_not_exist(sshd: SshServer) -> None:
    with pytest.raises(SandboxGone, match=r"ssh:nowhere\.invalid: there is no such host"):
        async with holdfast.connect("ssh:nowhere.invalid"):
            pass


async def test_a_host_where_nobody_listens(sshd: SshServer) -> None:
    with pytest.raises(HoldfastError, match=r"ssh://root@127\.0\.0\.1:1: .*refused"):
        async with holdfast.connect("ssh://root@127.0.0.1:1", reconnect_deadline=1):
            pass


# --- podman, and the client of Kubernetes ------------------------------------------------------------------------


async def test_podmans_words_for_a_container_that_is_gone(podman: ContainerEngine) -> None:
    with pytest.raises(SandboxGone, match="podman:nobody: there is no such container"):
        async with holdfast.connect(Container("podman", "nobody")):
            pass
    name = podman.container("hf-busybox")
    podman("kill", name)
    with pytest.raises(SandboxGone, match=f"podman:{name}: the container does not run"):
        async with holdfast.connect(f"podman:{name}"):
            pass
    podman.remove(name)
