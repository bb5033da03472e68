"""Rollouts on a Ray cluster of several nodes; one is killed in the middle: none is lost, none runs twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

import holdfast.sync
from holdfast.ray import SandboxPool

EPISODES = 60


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}, connect=False
    )
    for _ in range(2):
        started.add_node(num_cpus=2)
    ray.init(address=started.address, log_to_driver=False, configure_logging=False)
    started.wait_for_nodes()
    yield started
    ray.shutdown()
    started.shutdown()


@ray.remote
def episode(pool: SandboxPool, number: int, ran: Path) -> tuple[int, str]:
    """Append the number to the file when the episode begins; returns the result and the node."""
    with pool.take() as box:
        with ran.open("a") as file:
            file.write(f"{number}\n")
        result = box.exec(["sh", "-c", f"cat /root/base; echo {number} >>/root/n; cat /root/n"])
        assert result.stdout == f"base\n{number}\n"
        return number, ray.get_runtime_context().get_node_id()


def play(pool: SandboxPool, cluster: Cluster, ran: Path, retries: int) -> tuple[dict[int, str], int]:
    """Run all episodes and kill a node after a few; returns the node of each result, and the number of failures."""
    task = episode.options(**pool.options(retries=retries))
    left = [task.remote(pool, number, ran) for number in range(EPISODES)]
    results: dict[int, str] = {}
    failed, killed = 0, False
    while left:
        done, left = ray.wait(left)
        for reference in done:
            try:
                number, node = ray.get(reference)
                results[number] = node
            except RayError:
                failed += 1
        if len(results) >= EPISODES // 4 and not killed:
            killed = True
            lost = next(each for each in cluster.worker_nodes if each.node_id in results.values())
            cluster.remove_node(lost, allow_graceful=False)
            cluster.add_node(num_cpus=2)
    return results, failed


def test_without_retries_each_episode_ends_or_fails_and_runs_once(cluster: Cluster, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with SandboxPool("bwrap", fork=True, max=2, setup=["echo base >/root/base"]) as pool:
        results, failed = play(pool, cluster, ran, retries=0)
    assert len(results) + failed == EPISODES
    assert set(Counter(ran.read_text().split()).values()) == {1}
    assert len(set(results.values())) >= 2
    check_nothing_left()


def test_with_retries_every_episode_ends(cluster: Cluster, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with SandboxPool("bwrap", fork=True, max=2, setup=["echo base >/root/base"]) as pool:
        results, failed = play(pool, cluster, ran, retries=3)
    assert sorted(results) == list(range(EPISODES))
    assert failed == 0
    check_nothing_left()


def check_nothing_left() -> None:
    """The sandboxes of the lost node belong to processes that have ended, so any fleet removes them."""
    with holdfast.sync.Fleet("bwrap") as fleet:
        fleet.prune()
        assert fleet.list() == []
