"""A real PostgreSQL for tests and benchmarks: a cluster of our own, started and thrown away.

It runs as an unprivileged user, since PostgreSQL refuses to run as root, on a Unix socket in a temporary directory,
and never waits for a disk.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

#: The size of a cluster with the databases of all tests here, generously.
MEMORY_BYTES: Final = 1 << 30
#: The first version with an option for how to copy.
STRATEGIES_SINCE: Final = 15
#: Databases that are made at once: starting the program that makes them takes longer than making several.
BATCH: Final = 12
#: Nothing of a test's database outlives the test, so nothing of it needs to be on a disk.
SETTINGS: Final = {
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

    def __init__(self, programs: Path, location: Path) -> None:
        self._programs = programs
        self._place = location
        self._count = itertools.count(1)
        self._spare: list[str] = []
        self._settings = dict(SETTINGS)
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            name = next(name for name in ("postgres", "nobody") if _has_user(name))
            entry = pwd.getpwnam(name)
            self._user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            os.chown(location, entry.pw_uid, entry.pw_gid)

    def start(self) -> None:
        data = str(self._place / "data")
        self._run("initdb", "-D", data, "-U", "holdfast", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self.resume()

    def resume(self) -> None:
        options = " ".join(f"-c {name}='{value}'" for name, value in self._settings.items())
        log = str(self._place / "log")
        self._control("start", "-l", log, "-o", f"{options} -k {self._place}")

    def listen_with_tls(self, certificate: Path, key: Path) -> int:
        """Start again with a port on loopback that takes connections with TLS alone; returns the port."""
        self.stop("fast")
        for name, path in (("server.crt", certificate), ("server.key", key)):
            copy = self._place / "data" / name
            copy.write_bytes(path.read_bytes())
            copy.chmod(0o600)
            if self._user:
                os.chown(copy, self._user["user"], self._user["group"])
        (self._place / "data" / "pg_hba.conf").write_text(
            "local all all trust\nhostssl all all 127.0.0.1/32 trust\n"
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        self._settings |= {"listen_addresses": "127.0.0.1", "port": str(port), "ssl": "on"}
        self.resume()
        return port

    def listen_on(self, address: str, client: str) -> int:
        """Start again with a port on an address of this machine, for one client; returns the port."""
        self.stop("fast")
        (self._place / "data" / "pg_hba.conf").write_text(f"local all all trust\nhost all all {client}/32 trust\n")
        with socket.create_server((address, 0)) as free:
            port: int = free.getsockname()[1]
        self._settings |= {"listen_addresses": address, "port": str(port)}
        self.resume()
        return port

    def stop(self, mode: str = "immediate") -> None:
        """`immediate` loses what was not yet on the disk, `fast` does not."""
        self._control("stop", "-m", mode)

    def new_database(self) -> str:
        """The URL of a database that is empty and was never used."""
        if not self._spare:
            names = [f"test_{next(self._count)}" for _ in range(BATCH)]
            # The template is small and constant: no reason to write the copy to the log, too.
            how = " STRATEGY file_copy" if self._version() >= STRATEGIES_SINCE else ""
            statements = itertools.chain.from_iterable(("-c", f"CREATE DATABASE {name}{how}") for name in names)
            location = ("-h", str(self._place), "-U", "holdfast", "-d", "postgres")
            self._run("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", *location, *statements)
            self._spare = names[::-1]
        return f"postgresql://holdfast@/{self._spare.pop()}?host={self._place}"

    def _version(self) -> int:
        return int((self._place / "data" / "PG_VERSION").read_text())

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
            if done.returncode != 0:
                raise AssertionError(output.read().decode(errors="replace"))


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
    """The directories where Debian and other distributions install them."""
    locations = [*Path("/usr/lib/postgresql").glob("*/bin"), *Path("/usr").glob("pgsql-*/bin")]
    for location in sorted(
        locations, key=lambda each: [int(part) for part in each.parts if part.isdigit()], reverse=True
    ):
        if (location / "initdb").exists():
            return location
    found = shutil.which("initdb")
    return None if found is None else Path(found).resolve().parent


@contextlib.contextmanager
def running_cluster(programs: Path) -> Iterator[Cluster]:
    """A cluster for the length of a `with` block."""
    # Not pytest's directory: the path of a Unix socket has to be short.
    location = Path(tempfile.mkdtemp(prefix="hf-pg-", dir=memory()))
    cluster = Cluster(programs, location)
    try:
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        shutil.rmtree(location, ignore_errors=True)
