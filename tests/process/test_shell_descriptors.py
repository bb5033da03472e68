"""Shells of a process that has no descriptors left: what cannot be done is refused, and all is well afterwards."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import Sandbox
from holdfast.client.shell import Shell
from holdfast.errors import HoldfastError, ResourceExhausted, ShellClosed
from holdfast.runtime.local import LocalExec
from tests.contract.shell_ways import late_output
from tests.contract.ways import fifo
from tests.support.servers import is_alive

MakeExec = Callable[..., LocalExec]


@pytest.fixture
async def api(make_exec: MakeExec) -> LocalExec:
    return make_exec()


@pytest.fixture
async def sandbox(api: LocalExec) -> Sandbox:
    return Sandbox(api)


@pytest.fixture
async def sh(sandbox: Sandbox) -> Shell:
    return await sandbox.shell("bash", id="sh")


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open no more than so many."""
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for fd in taken[len(taken) - count :]:
            os.close(fd)
        del taken[len(taken) - count :]
        yield
    finally:
        for fd in taken:
            os.close(fd)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """A limit that is met soon."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.usefixtures("few_descriptors")
async def test_a_command_is_refused_when_there_are_no_descriptors_and_the_next_one_runs(
    api: LocalExec, sh: Shell, tmp_path: Path
) -> None:
    await sh.run("word=kept")
    refused = 0
    for count in range(6):
        # A shell with a child in the background needs new pipes.
        await sh.run("sleep 1000 &")
        before = open_descriptors()
        with descriptors_left(count):
            try:
                result = await sh.run(f"touch {tmp_path}/ran{count}; echo $word", input="in")
            except HoldfastError as error:
                refused += 1
                assert type(error).__name__ == "ResourceExhausted"  # noqa: PT017
                assert not (tmp_path / f"ran{count}").exists()
            else:
                # With no descriptor for its output that is lost, and the error reports it.
                assert (result.stdout, result.truncated) in (("kept\n", False), ("", True))
        assert open_descriptors() <= before + 4
        assert (await sh.run("echo $word", input="in")).stdout == "kept\n"
    assert refused > 0


@pytest.mark.usefixtures("few_descriptors")
async def test_what_a_grandchild_prints_is_the_shells_though_a_command_was_refused_in_between(
    sh: Shell, tmp_path: Path
) -> None:
    with fifo(str(tmp_path), "go") as (go, _), fifo(str(tmp_path), "done") as (done, _):
        await sh.run(f"sh -c '{{ read x < {go}; echo late; echo x > {done}; }} &'")
        with descriptors_left(0), pytest.raises(ResourceExhausted):
            await sh.run("true", input="in")
        result = await sh.run(f"echo own; echo x > {go}; read x < {done}; echo own again")
        assert result.stdout == "own\nown again\n"
        await late_output(sh, b"late\n")


@pytest.mark.usefixtures("few_descriptors")
async def test_a_shell_is_refused_when_there_are_no_descriptors(api: LocalExec, sandbox: Sandbox) -> None:
    await (await sandbox.shell("bash")).close()
    before = open_descriptors()
    for count in range(30):
        with descriptors_left(count):
            try:
                sh = await sandbox.shell("bash", id=f"with {count}")
            except HoldfastError as error:
                assert type(error).__name__ == "ResourceExhausted", error  # noqa: PT017
            else:
                break
        assert open_descriptors() == before
        assert (await api.list_shells())[1:] == ()
    else:
        raise AssertionError("it was never enough")
    assert count > 0
    assert (await sh.run("echo works")).stdout == "works\n"
    await sh.close()


@pytest.mark.usefixtures("few_descriptors")
async def test_a_shell_that_cannot_be_replaced_closes_and_its_jobs_end(sandbox: Sandbox) -> None:
    closed = 0
    for count in range(12):
        sh = await sandbox.shell("bash")
        here = sh.cwd
        job = int((await sh.run("setsid sleep 1000 & echo $!")).stdout)
        with descriptors_left(count), contextlib.suppress(ResourceExhausted):
            result = await sh.run("set -e; false")
            assert (result.exit_code, result.cwd) == (1, here)
            assert result.shell_restarted is (result.state == "idle")
        if sh.state == "closed":
            closed += 1
            with pytest.raises(ShellClosed, match=r"did not start again.*too many open files"):
                await sh.run("true")
        await sh.close(grace=0)
        assert not is_alive(job)
    assert closed > 0
