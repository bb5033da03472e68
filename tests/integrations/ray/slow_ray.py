"""`holdfast.ray.SandboxPool` on a Ray of one node: leases, forks, and what a task sees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayError

import holdfast.sync
from holdfast.errors import InvalidParams, ResourceExhausted
from holdfast.ray import SandboxPool


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@ray.remote
def write_and_read(pool: SandboxPool, number: int) -> str:
    with pool.take() as box:
        return box.exec(["sh", "-c", f"cat /root/base 2>/dev/null; echo {number} >>/tmp/n; cat /tmp/n"]).stdout


@ray.remote
def take_and_report(pool: SandboxPool) -> int:
    with pool.take() as box:
        box.exec(["true"], check=True)
    return os.getpid()


@ray.remote
def take_and_die(pool: SandboxPool) -> None:
    with pool.take():
        os._exit(1)


@ray.remote
def fail_to_take(pool: SandboxPool) -> str:
    with pool.take() as box:
        try:
            with pool.take(timeout=0.1):
                return "a second sandbox"
        except ResourceExhausted as error:
            return f"{box.exec(['echo', 'first']).stdout}{error}"


@ray.remote
def take_without_a_thread(pool: SandboxPool) -> str:
    import asyncio

    async def run() -> str:
        async with pool.take_async() as box:
            return (await box.exec(["echo", "async"])).stdout

    return asyncio.run(run())


def sandboxes() -> int:
    with holdfast.sync.Fleet("bwrap") as fleet:
        return len(fleet.list())


def test_each_task_has_a_sandbox_of_its_own() -> None:
    with SandboxPool("bwrap", warm=2, max=3) as pool:
        pool.ready()
        assert sum(status.warm for status in pool.status().values()) == 2
        tasks = [write_and_read.options(**pool.options()).remote(pool, number) for number in range(8)]
        assert ray.get(tasks) == [f"{number}\n" for number in range(8)]
        assert ray.get(take_without_a_thread.options(**pool.options()).remote(pool)) == "async\n"
    assert sandboxes() == 0


def test_each_task_has_a_fork_of_a_base_that_was_set_up_once() -> None:
    with SandboxPool("bwrap", fork=True, max=3, setup=["echo base >>/root/base"]) as pool:
        tasks = [write_and_read.options(**pool.options()).remote(pool, number) for number in range(8)]
        assert ray.get(tasks) == [f"base\n{number}\n" for number in range(8)]
    assert sandboxes() == 0


def test_a_lease_ends_with_the_process_of_its_task() -> None:
    with SandboxPool("bwrap", warm=0, max=1) as pool:
        with pytest.raises(RayError):
            ray.get(take_and_die.options(**pool.options()).remote(pool))
        # The only place is free again.
        assert ray.get(write_and_read.options(**pool.options()).remote(pool, 1)) == "1\n"
    assert sandboxes() == 0


def test_a_task_that_finds_no_place() -> None:
    with SandboxPool("bwrap", fork=True, max=1) as pool:
        assert ray.get(fail_to_take.options(**pool.options()).remote(pool)) == (
            "first\nno sandbox within 0.1 s; 1 of 1 are in use"
        )


def test_a_task_declares_the_limits_of_its_sandbox() -> None:
    with SandboxPool("bwrap", warm=0, max=2, cpus=2, memory="256MiB") as pool:
        options = pool.options(retries=1)
        assert options == {
            "scheduling_strategy": "SPREAD",
            "max_retries": 1,
            "num_cpus": 2,
            "memory": 256 * 1024 * 1024,
        }


def test_tasks_that_wait_for_a_sandbox_keep_their_cpu() -> None:
    """Otherwise Ray would start a worker for each of them."""
    with SandboxPool("bwrap", fork=True, max=1) as pool:
        pids = ray.get([take_and_report.options(**pool.options()).remote(pool) for _ in range(16)])
    assert len(set(pids)) <= 6, pids


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidParams, match="warm is 3 and max is 2"):
        SandboxPool("local", warm=3, max=2)
    with pytest.raises(InvalidParams, match="forks are made when they are taken"):
        SandboxPool("local", warm=1, fork=True)


def test_the_example_plays_every_episode() -> None:
    example = Path(__file__).parents[3] / "examples" / "integrations" / "rollouts.py"
    done = subprocess.run([sys.executable, example, "12"], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.startswith("12 episodes, "), done.stderr
