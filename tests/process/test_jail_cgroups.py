"""The freezer of a jail: processes that fork all the time, and zombies."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.fleet.directories import SandboxDirectory
from holdfast.fleet.jails.cgroups import PARENT, JailGroups, _freezer_base
from holdfast.runtime.tree.process_table import stat_fields
from tests.support.parts import needs

#: Born in the cgroup of its first argument, if it is there.
BORN_INSIDE = '[ ! -e "$0" ] || echo $$ >"$0"; echo up; exec sleep 1000'


class Jail:
    """A directory of a jail, and processes that stand for the jail's."""

    def __init__(self, path: Path) -> None:
        self.directory = SandboxDirectory(str(path))
        self.procs = f"{_freezer_base()}/{PARENT}/{self.directory.id}/cgroup.procs"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> int:
        process = subprocess.Popen(["sh", "-c", BORN_INSIDE, self.procs], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        self.processes.append(process)
        return process.pid

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def frozen(self) -> set[int]:
        with open(self.procs) as file:
            return {int(line) for line in file}

    def end(self) -> None:
        JailGroups.thaw(self.directory)
        for process in self.processes:
            process.kill()
            process.communicate()
        JailGroups.remove(self.directory)


@pytest.fixture
def jail(tmp_path: Path) -> Iterator[Jail]:
    base = _freezer_base()
    if base is None or not os.access(base, os.W_OK):
        pytest.skip("needs a cgroup that can be written")
    path = tmp_path / f"test-{secrets.token_hex(4)}"
    path.mkdir()
    made = Jail(path)
    yield made
    made.end()


def growing(jail: Jail) -> Callable[[], list[int]]:
    """The members of a jail that has another process each time that they are read."""

    def members() -> list[int]:
        jail.start()
        return jail.pids()

    return members


def test_a_jail_whose_processes_fork_all_the_time_is_frozen(jail: Jail) -> None:
    """A child of a moved process is born inside, after the members or the cgroup were read."""
    jail.start()
    assert JailGroups.freeze(jail.directory, growing(jail))
    assert jail.frozen() == set(jail.pids())


def test_a_zombie_does_not_keep_a_jail_from_being_frozen(jail: Jail) -> None:
    ended, alive = jail.start(), jail.start()
    jail.processes[0].kill()
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    assert JailGroups.freeze(jail.directory, jail.pids)
    assert jail.frozen() == {alive}


@needs("dash")
def test_processes_that_vfork_all_the_time_are_frozen(jail: Jail) -> None:
    """dash vforks: its child can be stopped before it executes a program, and then dash cannot be stopped."""
    loop = "echo up; n=0; while [ $n -lt 100000 ]; do /bin/true; n=$((n+1)); done"
    process = subprocess.Popen(["dash", "-c", loop], stdout=subprocess.PIPE)
    jail.processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    for _ in range(50):
        assert JailGroups.freeze(jail.directory, lambda: [process.pid])
        states = {pid: stat_fields(Path(f"/proc/{pid}/stat").read_bytes())[0] for pid in jail.frozen()}
        assert process.pid in states
        assert set(states.values()) <= {b"D", b"Z"}, states
        JailGroups.thaw(jail.directory)
