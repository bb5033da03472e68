"""The cost of pods: a channel through the API, beside that of kubectl and beside one `kubectl exec` a call.

Starts a cluster of its own, for which Kubernetes must be built (`make kubernetes`): `python -m bench.kubernetes`.
Baseline and measured run in turns; each row has the median and the ratio of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Final

import holdfast
from holdfast import OutputChunk, Sandbox
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.pool import Pool
from holdfast.fleet.template import Template
from tests.support.engines import Missing
from tests.support.kubernetes import images
from tests.support.kubernetes.cluster import Cluster, cluster

ROUNDS: Final = 5
CALLS: Final = 60
STREAM_BYTES: Final = 200_000_000
CHANNELS: Final = 100
NEVER: Final = {"pull": "never"}


def report(name: str, measured: float, baseline: float, unit: str, against: str) -> None:
    print(
        f"{name:44} {measured:9.1f} {unit:5} {baseline:9.1f} {against:34} {measured / baseline:6.2f} x", flush=True
    )


async def exec_seconds(box: Sandbox) -> float:
    began = perf_counter()
    assert (await box.exec(["true"])).success
    return perf_counter() - began


def kubectl_seconds(made: Cluster, *arguments: str) -> float:
    began = perf_counter()
    subprocess.run([made.programs / "kubectl", *arguments], check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - began


async def calls(made: Cluster) -> None:
    """`true` over our channel, over kubectl's, and by one `kubectl exec` each."""
    ours: list[float] = []
    theirs: list[float] = []
    single: list[float] = []
    address = "kubernetes:default/bench"
    async with holdfast.connect(address) as box, holdfast.connect(f"{address}?via=kubectl") as other:
        for _ in range(ROUNDS):
            # Call by call in turns: on a busy machine the next second is another one.
            for _ in range(CALLS):
                ours.append(await exec_seconds(box))
                theirs.append(await exec_seconds(other))
            single += [
                await asyncio.to_thread(kubectl_seconds, made, "exec", "bench", "--", "true") for _ in range(3)
            ]
    own = 1000 * statistics.median(ours)
    report("exec true, p50", own, 1000 * statistics.median(theirs), "ms", "kubectl's channel")
    report("exec true, p50", own, 1000 * statistics.median(single), "ms", "one kubectl exec for each")


async def streams(made: Cluster) -> None:
    """200 MB out of a pod, against `kubectl exec cat`."""
    rates: dict[str, list[float]] = {"ours": [], "kubectl": []}
    command = ["head", "-c", str(STREAM_BYTES), "/dev/zero"]
    async with holdfast.connect("kubernetes:default/bench") as box:
        for _ in range(3):
            began, size = perf_counter(), 0
            process = await box.start(command)
            async for event in process.events():
                size += len(event.data) if isinstance(event, OutputChunk) else 0
            assert size == STREAM_BYTES
            rates["ours"].append(size / (perf_counter() - began) / 1e6)
            seconds = await asyncio.to_thread(kubectl_seconds, made, "exec", "bench", "--", *command)
            rates["kubectl"].append(STREAM_BYTES / seconds / 1e6)
    own, other = (statistics.median(each) for each in rates.values())
    report("200 MB from a pod", own, other, "MB/s", "kubectl exec")


def resident(pid: int | str = "self") -> float:
    """The memory of a process in MB that it does not share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Pss")


async def many_channels(made: Cluster) -> None:
    """100 open channels into one pod: memory and processor time of the host, against 100 kubectl."""
    async with holdfast.connect("kubernetes:default/bench"):
        before, used = resident(), process_time()
        async with contextlib.AsyncExitStack() as stack:
            opened = [
                stack.enter_async_context(holdfast.connect("kubernetes:default/bench")) for _ in range(CHANNELS)
            ]
            boxes = [await each for each in opened]
            memory, cpu = resident() - before, process_time() - used
            assert (await boxes[-1].exec(["true"])).success
    times = os.times()
    processes = [
        subprocess.Popen(  # noqa: ASYNC220 - nothing else runs meanwhile
            [made.programs / "kubectl", "exec", "-i", "bench", "--", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(CHANNELS)
    ]
    for process in processes:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        process.stdout.read(1)
    theirs = sum(resident(process.pid) for process in processes)
    for process in processes:
        process.communicate()
    later = os.times()
    report("100 channels: memory", memory, theirs, "MB", "100 kubectl")
    spent = later.children_user + later.children_system - times.children_user - times.children_system
    report("100 channels: processor time to open", cpu, spent, "s", "100 kubectl")


async def making(made: Cluster) -> None:
    """From nothing to an answer: `create` and `exec`, against `kubectl run`, `wait` and `exec`."""
    ours: dict[str, list[float]] = {"server through tar": [], "server from an image": []}
    theirs: list[float] = []
    async with Fleet("kubernetes") as fleet:
        for number in range(ROUNDS + 1):
            for way, options in zip(ours, (NEVER, {**NEVER, "server_image": images.SERVER}), strict=True):
                began = perf_counter()
                async with fleet.block(image=images.BUSYBOX, options=options) as box:
                    assert (await box.exec(["true"])).success
                    ours[way].append(perf_counter() - began)
            name, image = f"made-{number}", f"--image={images.BUSYBOX}"
            run = ["run", name, image, "--image-pull-policy=Never", "--", "sleep", "1000"]
            seconds = await asyncio.to_thread(kubectl_seconds, made, *run)
            wait = ["wait", "--for=condition=Ready", f"pod/{name}", "--timeout=60s"]
            seconds += await asyncio.to_thread(kubectl_seconds, made, *wait)
            seconds += await asyncio.to_thread(kubectl_seconds, made, "exec", name, "--", "true")
            theirs.append(seconds)
            await asyncio.to_thread(
                kubectl_seconds, made, "delete", "pod", name, "--grace-period=1", "--wait=false"
            )
    # The first of each checks the policy and fills caches.
    other = 1000 * statistics.median(theirs[1:])
    for way, times in ours.items():
        own = 1000 * statistics.median(times[1:])
        report(f"made until exec answered, {way}", own, other, "ms", "kubectl run, wait and exec")


async def warm() -> None:
    taken: list[float] = []
    async with Pool("kubernetes", Template(image=images.BUSYBOX, options=NEVER), warm=4, max=8) as pool:
        for _ in range(12):
            await pool.ready()
            began = perf_counter()
            async with pool.take() as box:
                taken.append(perf_counter() - began)
                assert (await box.exec(["true"])).success
    print(f"{'warm take, p50':44} {1000 * statistics.median(taken):9.3f} ms", flush=True)


async def measure(made: Cluster) -> None:
    pod = ["run", "bench", f"--image={images.BUSYBOX}", "--image-pull-policy=Never", "--", "sleep", "100000"]
    made.kubectl(*pod)
    made.kubectl("wait", "--for=condition=Ready", "pod/bench", "--timeout=60s")
    # First: memory that streams leave free would hide that of the channels.
    await many_channels(made)
    await calls(made)
    await streams(made)
    await making(made)
    await warm()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="hfk-") as directory:
        try:
            with cluster(Path(directory)) as made:
                os.environ["KUBECONFIG"] = str(made.kubeconfig)
                os.environ["PATH"] = f"{made.programs}:{os.environ['PATH']}"
                asyncio.run(measure(made))
        except Missing as missing:
            sys.exit(str(missing))


if __name__ == "__main__":
    main()
