"""A real PostgreSQL for tests: one cluster for each process that runs tests, one database for each test.

The cluster runs as an unprivileged user, since PostgreSQL refuses to run as root, on a Unix socket in a temporary
directory, and never waits for a disk.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.service.store import Store

#: What a cluster with the databases of all tests here takes, generously.
MEMORY_BYTES = 1 << 30
#: Nothing of a test's database outlives the test, so nothing of it needs to be on a disk.
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "shared_buffers": "16MB",
    "autovacuum": "off",
}


class Cluster:
    """A PostgreSQL of our own."""

    def __init__(self, programs: Path, place: Path) -> None:
        self._programs = programs
        self._place = place
        self._count = itertools.count(1)
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            name = next(name for name in ("postgres", "nobody") if _has_user(name))
            entry = pwd.getpwnam(name)
            self._user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            os.chown(place, entry.pw_uid, entry.pw_gid)

    def start(self) -> None:
        data = str(self._place / "data")
        self._run("initdb", "-D", data, "-U", "holdfast", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self.resume()

    def resume(self) -> None:
        options = " ".join(f"-c {name}='{value}'" for name, value in SETTINGS.items())
        log = str(self._place / "log")
        self._control("start", "-l", log, "-o", f"{options} -k {self._place}")

    def stop(self, mode: str = "immediate") -> None:
        """`immediate` loses what was not yet on the disk, `fast` does not."""
        self._control("stop", "-m", mode)

    def new_database(self) -> str:
        name = f"test_{next(self._count)}"
        self._run("createdb", "-h", str(self._place), "-U", "holdfast", name)
        return f"postgresql://holdfast@/{name}?host={self._place}"

    def _control(self, *arguments: str) -> None:
        self._run("pg_ctl", "-D", str(self._place / "data"), "-w", "-s", *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        # Output to a file: a server that pg_ctl leaves behind would hold a pipe open.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [self._programs / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._place,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
                timeout=120,
                check=False,
                **self._user,
            )
            output.seek(0)
            assert done.returncode == 0, output.read().decode(errors="replace")


def memory() -> str | None:
    """Where files are in memory, if there is room: a database in each test is many files, and many flushes."""
    if not os.access("/dev/shm", os.W_OK) or shutil.disk_usage("/dev/shm").free < MEMORY_BYTES:
        return None
    return "/dev/shm"


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def postgres_programs() -> Path | None:
    """Where Debian, or whoever made this machine, has put them."""
    places = [*Path("/usr/lib/postgresql").glob("*/bin"), *Path("/usr").glob("pgsql-*/bin")]
    for place in sorted(
        places, key=lambda each: [int(part) for part in each.parts if part.isdigit()], reverse=True
    ):
        if (place / "initdb").exists():
            return place
    found = shutil.which("initdb")
    return None if found is None else Path(found).resolve().parent


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """The cluster of this process."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL: initdb is neither in /usr/lib/postgresql/*/bin nor in PATH")
    # Not pytest's directory: the path of a Unix socket has to be short.
    place = Path(tempfile.mkdtemp(prefix="hf-pg-", dir=memory()))
    cluster = Cluster(programs, place)
    try:
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres: Cluster) -> str:
    """An empty database of the test's own."""
    return postgres.new_database()


@pytest.fixture
def sqlite_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hf-db-", dir=memory()) as directory:
        yield f"sqlite:///{directory}/service.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """An empty database: once SQLite, once PostgreSQL."""
    url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    return url


OpenStore = Callable[..., Awaitable[Store]]


@pytest.fixture
async def open_store(store_url: str) -> AsyncIterator[OpenStore]:
    """Opens the test's database, as often as there are to be replicas; all are closed in the end."""
    opened: list[Store] = []

    async def open_one(**options: Any) -> Store:
        opened.append(await Store.open(store_url, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        await store.close()


@pytest.fixture
async def store(open_store: OpenStore) -> Store:
    return await open_store()
