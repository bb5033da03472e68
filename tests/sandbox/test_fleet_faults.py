"""Nothing is left of sandboxes whose maker was killed, whose engine failed, or whose creation was cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import HoldfastError, ResourceExhausted, SandboxError
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.jails import engine as jails
from holdfast.fleet.jails.starter import Zygote
from holdfast.fleet.pool import Pool
from holdfast.fleet.template import Template
from tests.sandbox.conftest import longer
from tests.support.file_systems import small_file_system
from tests.support.parts import require

MAKER = Path(__file__).with_name("fleet_maker.py")
#: More than any engine has.
MAX_STEPS = 80
SETTLE_SECONDS = 30.0
BEFORE = "cgroups-before"


@pytest.fixture(autouse=True)
def fleet_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = Path(tmp_path_factory.mktemp("f"))
    directory.chmod(0o711)
    monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", str(directory))
    # Cgroups have no directory of ours in their names; those of other programs on this machine are not counted.
    (directory / BEFORE).write_text("\n".join(jail_cgroups()))
    return directory


def jail_cgroups() -> list[str]:
    # Unlike a glob, os.walk goes on when another program removes a cgroup meanwhile.
    found = []
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        if os.path.basename(directory) == "holdfast-jails":
            found += [os.path.join(directory, name) for name in names if name.startswith("holdfast-")]
    return found


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def left_behind(directory: Path) -> list[str]:
    """Directories, cgroups, mounts and processes of sandboxes below `directory`."""
    found = [str(path) for path in directory.glob("*/holdfast-*")]
    found += sorted(set(jail_cgroups()) - set((directory / BEFORE).read_text().splitlines()))
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [line for line in mounts if str(directory) in line]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(directory) in path.read_bytes().decode(errors="replace"):
                found.append(str(path))
    return found


@pytest.mark.parametrize(
    "engine", ["bwrap", pytest.param("docker", marks=longer), pytest.param("local", marks=longer)]
)
async def test_a_maker_that_is_killed_leaves_nothing(
    engine: str, fleet_directory: Path, request: pytest.FixtureRequest
) -> None:
    template = Template()
    if engine == "docker":
        request.getfixturevalue("docker")
        template = Template(image="hf-busybox")
    elif engine == "bwrap":
        require("bwrap")
    argv = [sys.executable, str(MAKER), engine, msgspec.json.encode(template).decode()]
    fleet = Fleet(engine)
    for step in range(MAX_STEPS):
        made = await asyncio.to_thread(run, [*argv, str(step)])
        deadline = time.monotonic() + SETTLE_SECONDS
        # A process that the maker had started may take a moment to appear.
        while True:
            await fleet.prune()
            left = [*left_behind(fleet_directory), *(ref.id for ref in await fleet.list())]
            if not left or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        assert left == [], f"killed before step {step}"
        if made.returncode == 0:
            assert int(made.stdout) <= step
            assert step > 3, "too few steps to mean anything"
            return
        assert made.returncode == -9, made.stderr
    pytest.fail(f"more than {MAX_STEPS} steps")


async def test_a_cancelled_creation_leaves_nothing(fleet_directory: Path) -> None:
    require("bwrap")
    fleet = Fleet("bwrap")
    for hundredths in (0, 1, 2, 5, 10, 20):
        creating = asyncio.create_task(fleet.create(setup=["sleep 5"]))
        await asyncio.sleep(hundredths / 100)
        creating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await creating
        assert left_behind(fleet_directory) == []
    await fleet.aclose()


async def test_many_creations_at_once_keep_to_the_limit(fleet_directory: Path) -> None:
    require("bwrap")
    fleet = Fleet("bwrap", max_creates=4)
    most = 0

    async def make() -> str:
        nonlocal most
        ref = await fleet.create()
        most = max(most, fleet.creating)
        return ref.id

    ids = await asyncio.gather(*(make() for _ in range(24)))
    assert len(set(ids)) == 24
    assert most <= 4
    await asyncio.gather(*(fleet.remove(id) for id in ids))
    assert left_behind(fleet_directory) == []


async def test_an_engine_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    require("docker")
    with pytest.raises(SandboxError, match="docker"):
        await Fleet("docker").create(image="hf-busybox", options={"pull": "never"})


async def test_the_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set forward expires what it should; one that is set back expires nothing."""
    fleet = Fleet("local")
    ref = await fleet.create(lifetime=600.0)
    try:
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 86_400)
        assert await fleet.prune() == []
        monkeypatch.setattr(time, "time", lambda: now + 601)
        assert [each.id for each in await fleet.prune()] == [ref.id]
        # The lease of a sandbox whose maker runs does not end with a jump.
        async with fleet.block() as box:
            monkeypatch.setattr(time, "time", lambda: now + 7 * 86_400)
            assert await fleet.prune() == []
            assert (await box.exec(["echo", "alive"])).stdout == "alive\n"
    finally:
        await fleet.remove(ref.id)


async def test_a_pool_waits_replaces_and_reports(fleet_directory: Path) -> None:
    template = Template(labels={"pool": "test"})
    async with Pool("local", template, warm=1, max=1, health_interval=0.2) as pool:
        await pool.ready()
        async with pool.take() as box:
            with pytest.raises(ResourceExhausted, match="1 of 1 are in use"):
                async with pool.take(timeout=0.1):
                    pass
            await box.exec(["true"])
        # A warm sandbox that dies is replaced.
        await pool.ready()
        (sick,) = await pool.fleet.list()
        await pool.fleet.remove(sick.id)
        async with asyncio.timeout(30):
            while pool.status.replaced_total == 0 or pool.status.warm == 0:  # noqa: ASYNC110 - a pool has no event
                await asyncio.sleep(0.05)
        async with pool.take() as box:
            assert box.ref.id != sick.id
    assert left_behind(fleet_directory) == []


async def test_a_restarted_pool_takes_over_what_was_not_used(fleet_directory: Path) -> None:
    program = """
import asyncio, os, signal, holdfast.fleet.pool as p
async def main():
    pool = p.Pool("local", warm=2, max=3, name="kept")
    await pool.__aenter__()
    await pool.ready()
    box = await pool.take().__aenter__()
    print(box.ref.id, *(each.ref.id for each in pool._warm), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    made = await asyncio.to_thread(run, [sys.executable, "-c", program])
    used, *warm = made.stdout.split()
    assert len(warm) == 1, made.stderr
    async with Pool("local", warm=1, max=3, name="kept") as pool:
        await pool.ready()
        async with pool.take() as box:
            assert box.ref.id == warm[0]
        assert used not in {ref.id for ref in await pool.fleet.list()}
    assert left_behind(fleet_directory) == []


async def test_a_pool_whose_engine_fails_says_why() -> None:
    template = Template(setup=["echo broken >&2; exit 1"])
    async with Pool("local", template, warm=0, max=1) as pool:
        with pytest.raises(ResourceExhausted, match="broken"):
            async with pool.take(timeout=3):
                pass
        assert pool.status.failed_total >= 1
    with pytest.raises(HoldfastError, match="not open"):
        async with pool.take():
            pass


async def test_two_hundred_creations_keep_to_a_limit_of_twenty(fleet_directory: Path) -> None:
    require("bwrap")
    fleet = Fleet("bwrap", max_creates=20)
    most = 0

    async def make() -> None:
        nonlocal most
        async with fleet.block():
            most = max(most, fleet.creating)

    await asyncio.gather(*(make() for _ in range(200)))
    assert 1 <= most <= 20
    await fleet.aclose()
    assert left_behind(fleet_directory) == []


@pytest.mark.parametrize("engine", ["bwrap", "local"])
async def test_a_full_disk_fails_the_creation_and_leaves_nothing(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "bwrap":
        require("bwrap")
    with small_file_system("size=256k,nr_inodes=60,mode=711") as directory:
        monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", directory)
        # A zygote sees the file systems that were mounted before it started.
        zygotes: list[Zygote] = []

        @functools.cache
        def zygote(tree: str) -> Zygote:
            zygotes.append(Zygote(tree))
            return zygotes[-1]

        monkeypatch.setattr(jails, "zygote", zygote)
        fleet = Fleet(engine)
        ref = await fleet.create()
        await fleet.remove(ref.id)
        await asyncio.to_thread(_fill, directory)
        for room in range(6):
            # A little more room each time: the creation fails at another step.
            with pytest.raises(SandboxError, match="No space left"):
                await fleet.create()
            assert await fleet.list() == []
            assert os.listdir(f"{directory}/{engine}") == [], f"with {room} inodes"
            os.unlink(f"{directory}/f{room}")
        for each in zygotes:
            each.close()


def _fill(directory: str) -> None:
    """Use up all inodes of a small file system, and all bytes."""
    number = 0
    with contextlib.suppress(OSError):
        while True:
            Path(directory, f"f{number}").touch()
            number += 1
    with contextlib.suppress(OSError), open(f"{directory}/f{number - 1}", "wb", 0) as filler:
        while True:
            filler.write(bytes(4096))


_HOSTILE = """
import os
for name in ("closed", "closed/inner"):
    os.mkdir(name)
open("closed/inner/file", "w").close()
os.chmod("closed/inner/file", 0)
os.chmod("closed/inner", 0)
os.chmod("closed", 0)
for _ in range(3000):
    os.mkdir("d" * 50)
    os.chdir("d" * 50)
"""


async def test_a_hostile_jail_is_removed_whole(fleet_directory: Path) -> None:
    """Its tree is deep and closed, its server and the holder of its namespaces are killed."""
    require("bwrap")
    fleet = Fleet("bwrap")
    ref = await fleet.create()
    async with await fleet.connect(ref.id) as box:
        assert (await box.exec(["python3", "-c", _HOSTILE])).success
        # A full FIFO does not block the holder; its end ends the jail, this command included.
        await box.start(
            ["sh", "-c", "dd if=/dev/zero of=/run/holdfast/hold bs=64k count=100; kill -9 -1; kill -9 2"]
        )
    await fleet.remove(ref.id)
    assert left_behind(fleet_directory) == []


async def test_a_paused_jail_is_removed(fleet_directory: Path) -> None:
    require("bwrap")
    fleet = Fleet("bwrap")
    ref = await fleet.create()
    await fleet.pause(ref.id)
    await fleet.remove(ref.id)
    assert left_behind(fleet_directory) == []
