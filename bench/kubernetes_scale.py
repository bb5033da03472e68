"""Thousands of sandboxes on a real API server with nodes that run nothing: `python -m bench.kubernetes_scale`.

Makes and removes them through the engine, and counts what a sandbox costs: API requests, time, memory of this
process, and the time of a list. No command runs in them. Writes the curve to `docs/scale.svg` with --plot.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Final

from holdfast.fleet.fleet import Fleet
from holdfast.fleet.kubernetes.engine import KubernetesEngine
from holdfast.fleet.kubernetes.manifest import ID_LABEL
from holdfast.fleet.kubernetes.readiness import PodObject
from holdfast.fleet.record import SandboxRef, new_record
from holdfast.fleet.template import Template
from holdfast.sandboxes.kubernetes.api import acquire, release
from tests.support.engines import Missing
from tests.support.kubernetes.cluster import Cluster, cluster
from tests.support.kubernetes.fake_nodes import PODS, FakeKubelet, node

#: Sandboxes that are being made or removed at once.
AT_ONCE: Final = 50
LISTS: Final = 3


def resident_kilobytes() -> int:
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1])
    raise AssertionError("no Private_Dirty")


async def measure(count: int) -> list[tuple[float, int]]:
    curve: list[tuple[float, int]] = []
    template = Template(image="holdfast.test/none:1", network="none")
    engine = KubernetesEngine()
    async with Fleet(engine) as fleet:
        await fleet.list()
        locations = asyncio.Semaphore(AT_ONCE)
        refs: list[SandboxRef] = []
        memory, requests, began = resident_kilobytes(), engine.api.requests, perf_counter()

        def note(existing: int) -> None:
            if existing % max(1, count // 100) == 0:
                curve.append((perf_counter() - began, existing))

        async def make() -> None:
            async with locations:
                record = new_record(template, now=time.time(), lifetime=86_400)
                refs.append(await engine.create(template, record))
                note(len(refs))

        await asyncio.gather(*(make() for _ in range(count)))
        seconds, made = perf_counter() - began, engine.api.requests - requests
        print(
            f"made {count} in {seconds:.0f} s: {count / seconds:.0f}/s, {made / count:.2f} requests each",
            flush=True,
        )
        print(f"memory of this process: {(resident_kilobytes() - memory) / count:.1f} KB a sandbox", flush=True)
        times = []
        for _ in range(LISTS):
            requests, began_list = engine.api.requests, perf_counter()
            listed = await fleet.list()
            assert {ref.id for ref in listed} >= {ref.id for ref in refs}
            times.append(perf_counter() - began_list)
        del listed
        print(
            f"list of {count}: {sorted(times)[LISTS // 2]:.2f} s, {engine.api.requests - requests} requests",
            flush=True,
        )
        requests, began_remove = engine.api.requests, perf_counter()
        curve.append((began_remove - began, count))

        async def remove(id: str) -> None:
            async with locations:
                await fleet.remove(id)

        # A removed pod exists until its kubelet has confirmed it: the watch counts those that are really gone.
        leaving = asyncio.create_task(watch_removal(engine, note))
        await asyncio.gather(*(remove(ref.id) for ref in refs))
        gone = engine.api.requests - requests
        await leaving
        seconds = perf_counter() - began_remove
        print(f"removed in {seconds:.0f} s: {count / seconds:.0f}/s, {gone / count:.2f} requests each", flush=True)
        pods, _ = await engine.api.list(engine._path(), PodObject)
        assert pods == [], f"{len(pods)} pods are left"
        print("left: 0 pods", flush=True)
    return curve


async def watch_removal(engine: KubernetesEngine, note: Callable[[int], None]) -> None:
    """Until the cluster has no pod of a sandbox; `note` gets the number of those that exist."""
    pods, version = await engine.api.list(engine._path(), PodObject, labelSelector=ID_LABEL)
    existing = {pod.metadata.name for pod in pods}
    while existing:
        query = {"labelSelector": ID_LABEL, "resourceVersion": version}
        async for kind, pod in engine.api.watch(engine._path(), PodObject, **query):
            version = pod.metadata.resource_version
            if kind == "DELETED":
                existing.discard(pod.metadata.name)
                note(len(existing))
                if not existing:
                    return


async def run_nodes(count: int) -> None:
    """The other side, in a process of its own: nodes and their kubelet."""
    api = acquire()
    try:
        for number in range(count // PODS + 2):
            await api.post("/api/v1/nodes", node(f"fake-{number}"))
        print("ready", flush=True)
        await FakeKubelet(api).run()
    finally:
        await release(api)


def plot(curve: list[tuple[float, int]], path: Path) -> None:
    """The number of sandboxes over time as a line."""
    width, height, seconds, count = 640, 240, curve[-1][0], max(number for _, number in curve)
    points = " ".join(
        f"{60 + x / seconds * width:.1f},{20 + height - y / count * height:.1f}" for x, y in [(0.0, 0), *curve]
    )
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 100} {height + 60}" '
        f'font-family="sans-serif" font-size="12">'
        f'<rect x="60" y="20" width="{width}" height="{height}" fill="none" stroke="#888"/>'
        f'<polyline fill="none" stroke="#0a6" stroke-width="2" points="{points}"/>'
        f'<text x="54" y="28" text-anchor="end">{count}</text>'
        f'<text x="54" y="{height + 20}" text-anchor="end">0</text>'
        f'<text x="{width + 60}" y="{height + 38}" text-anchor="end">{seconds:.0f} s</text>'
        f'<text x="60" y="{height + 38}">sandboxes that exist: made, listed three times, removed</text></svg>\n'
    )


def run(made: Cluster, count: int, plotted: Path | None) -> None:
    os.environ["KUBECONFIG"] = str(made.kubeconfig)
    made.await_api()
    command = [sys.executable, "-m", "bench.kubernetes_scale", "--nodes-for", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as nodes:
        try:
            assert nodes.stdout is not None
            assert nodes.stdout.readline() == b"ready\n"
            curve = asyncio.run(measure(count))
        finally:
            nodes.kill()
    if plotted is not None:
        plot(curve, plotted)
    print(json.dumps({"count": count, "seconds": round(curve[-1][0], 1)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--nodes-for", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.nodes_for is not None:
        asyncio.run(run_nodes(options.nodes_for))
        return
    with tempfile.TemporaryDirectory(prefix="hfk-") as directory:
        try:
            with cluster(Path(directory), node=False) as made:
                run(made, options.count, options.plot)
        except Missing as missing:
            sys.exit(str(missing))


if __name__ == "__main__":
    main()
