"""The reach of a program that is root in a jail: descriptors, memory and variables of the jail's processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.fleet.fleet import create
from tests.support.parts import require

#: Prints pid and target of every descriptor that the caller can take from another process.
_DESCRIPTORS = """
import os
for pid in filter(str.isdecimal, os.listdir("/proc")):
    if int(pid) == os.getpid():
        continue
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            print(pid, os.readlink(f"/proc/{pid}/fd/{fd}"), os.path.isdir(f"/proc/{pid}/fd/{fd}"))
    except PermissionError:
        continue
"""
#: Prints the processes with capabilities, which are the server's, whose memory or variables can be read.
_READABLE = """
import os
for pid in filter(str.isdecimal, os.listdir("/proc")):
    if int(pid) in (1, 2, os.getpid()):
        continue
    for name in ("environ", "mem", "maps"):
        try:
            open(f"/proc/{pid}/{name}", "rb").close()
            print(pid, name)
        except PermissionError:
            continue
"""


@pytest.fixture(autouse=True)
def fleet_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    require("bwrap")
    directory = Path(tmp_path_factory.mktemp("f"))
    directory.chmod(0o711)
    monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", str(directory))
    yield directory
    assert list(directory.glob("bwrap/*")) == []


async def test_descriptors_in_a_jail_lead_to_nothing_of_the_host() -> None:
    async with create("bwrap") as box:
        shown = await box.exec(["python3", "-c", _DESCRIPTORS])
        assert shown.success, shown
        found = [line.split(" ", 1)[1].rsplit(" ", 1) for line in shown.stdout.splitlines()]
        assert found
        assert [target for target, is_directory in found if is_directory == "True"] == []
        names = {target.rsplit("/", 1)[-1] for target, _ in found}
        assert names <= {"null", "log", "lock", "hold", "anon_inode:[eventfd]"}


async def test_the_server_of_a_jail_is_closed_to_its_programs() -> None:
    async with create("bwrap") as box:
        assert (await box.exec(["python3", "-c", _READABLE])).stdout == ""


async def test_no_descriptor_in_a_jail_writes_to_a_file_of_the_host(fleet_directory: Path) -> None:
    script = _DESCRIPTORS.replace("print(pid, ", 'print(open(f"/proc/{pid}/fdinfo/{fd}").read().split()[3], ')
    async with create("bwrap") as box:
        found = [line.split() for line in (await box.exec(["python3", "-c", script])).stdout.splitlines()]
    assert found, "the processes of bubblewrap are readable"
    writable = [target for flags, target, _ in found if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY]
    assert [target for target in writable if target.startswith(str(fleet_directory))] == []


async def test_a_jail_with_the_network_of_the_host_is_in_its_namespace() -> None:
    async with create("bwrap", network="host") as box:
        shown = await box.exec(["readlink", "/proc/self/ns/net"])
    assert shown.stdout.strip() == os.readlink("/proc/self/ns/net")
