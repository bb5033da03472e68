"""Servers of several versions for the tests of upgrades and of a keeper's death: copies of the package, one place.

A copy differs from the package as a test requires. It touches a directory of the test and the processes in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

import holdfast
from tests.support.parts import require
from tests.support.servers import MARK_VARIABLE, conversation, marked_processes, server_environment
from tests.support.signalling import send_signal

PATIENCE_SECONDS = 60.0


def copy_package(target: Path, *changes: tuple[str, str, str]) -> Path:
    """The package with these changes (a file, a text in it, what is there instead), to be put on PYTHONPATH."""
    source = Path(holdfast.__file__).parent
    shutil.copytree(source, target / "holdfast", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text, other in changes:
        path = target / "holdfast" / name
        before = path.read_text()
        assert before.count(text) == 1, f"{name}: {text!r}"
        path.write_text(before.replace(text, other))
    return target


#: The commit before the modules were grouped in folders: its server and keeper run in installations of that time.
EARLIER: Final = "8390db2e2e1a5fd3ef44b36a70a468086d2642a1"


def earlier_package(target: Path) -> Path:
    """The package of the commit `EARLIER`, from the history of this repository; skips the test without one."""
    require("git")
    root = Path(__file__).parents[2]
    archive = subprocess.run(["git", "-C", str(root), "archive", EARLIER, "src/holdfast"], capture_output=True)
    if archive.returncode:
        pytest.skip(f"no history: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        # Python 3.11.2, which Debian 12 has, lacks filters.
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(target)
    return target / "src"


def package_with_earlier_keeper(target: Path) -> Path:
    """This package with the keeper of `EARLIER`, recorded by `git show EARLIER:…/keeper.py`."""
    package = copy_package(target)
    recorded = Path(__file__).parent / "data" / f"keeper-{EARLIER[:7]}.py.gz"
    (keeper,) = package.rglob("keeper.py")
    keeper.write_bytes(gzip.decompress(recorded.read_bytes()))
    return package


def variation(target: Path, code: str) -> str:
    """The package as it is, but for what this code does to it when a Python with this PYTHONPATH starts."""
    target.mkdir()
    (target / "sitecustomize.py").write_text(code)
    return f"{target}{os.pathsep}{Path(holdfast.__file__).parents[1]}"


class ServerHome:
    """Where one server after another listens at one socket. At the end nothing may be left."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spool = directory / "spool"
        self.socket = directory / "server.sock"
        self.mark = secrets.token_hex(8)
        self.log = directory / "log"
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def environment(self, package: Path | str | None = None, **more: str) -> dict[str, str]:
        mine = {"HOLDFAST_DIRECTORY": str(self.directory), MARK_VARIABLE: self.mark, **more}
        own = {} if package is None else {"PYTHONPATH": str(package)}
        return {**server_environment(**mine), "HOLDFAST_SPOOL_DIRECTORY": str(self.spool), **own}

    async def leave(self) -> None:
        """The server leaves what it runs to its keeper, as by `holdfast stop --keep`."""
        async with conversation(self.address) as talk:
            await talk.initialize()
            watch = os.pidfd_open((await talk.result("environment/status"))["pid"])
            await talk.result("server/shutdown", keep=True)
        await asyncio.to_thread(select.select, [watch], [], [])
        os.close(watch)

    def stop(self, keeper: subprocess.Popen[bytes]) -> None:
        """In order."""
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(PATIENCE_SECONDS) == 0, self.log.read_text()
        for process in self._started:  # the senders of a command get a message
            process.wait(PATIENCE_SECONDS)

    def serve(
        self, package: Path | str | None = None, settings: Mapping[str, str] | None = None
    ) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        """`holdfast serve` of this version, and its ready line; empty, if it ended before."""
        ready, tell = os.pipe()
        command = [sys.executable, "-m", "holdfast", "serve", "--listen", self.address, "--ready-fd", str(tell)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(package, **(settings or {})),
                pass_fds=(tell,),
            )
        self._started.append(process)
        os.close(tell)
        reported = b""
        with open(ready, "rb", buffering=0) as file:
            while not reported.endswith(b"\n"):
                assert select.select([file], [], [], PATIENCE_SECONDS)[0], self.log.read_text()
                data = file.read(65_536)
                if not data:
                    return process, {}
                reported += data
        message: dict[str, Any] = json.loads(reported)
        return process, message

    def holdfast(self, *arguments: str, package: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end."""
        command = [sys.executable, "-m", "holdfast", *arguments]
        return subprocess.run(
            command, env=self.environment(package), capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )

    def close(self) -> None:
        """End whatever a failed test left; wait for what we started."""
        for pid in marked_processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                send_signal(pid, signal.SIGKILL)
        for process in self._started:
            process.wait(PATIENCE_SECONDS)

    def leftovers(self) -> list[str]:
        found = [f"process {pid}" for pid in marked_processes(self.mark)]
        found += [str(path) for path in self.directory.glob("server.sock*")]
        return found + ([str(path) for path in self.spool.iterdir()] if self.spool.exists() else [])


@contextlib.contextmanager
def home(directory: Path) -> Iterator[ServerHome]:
    directory.mkdir(mode=0o700, exist_ok=True)
    made = ServerHome(directory)
    try:
        yield made
        assert made.leftovers() == [], made.log.read_text()
    finally:
        made.close()
