"""The reach of a program that is root in a jail: descriptors, memory and variables of the jail's processes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import SandboxError
from holdfast.fleet.fleet import Fleet, create
from tests.support.keys import session_key
from tests.support.parts import require

ATTACKS = Path(__file__).with_name("jail_attacks.py")
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


async def test_a_link_in_a_forked_jail_does_not_lead_root_to_the_host(tmp_path: Path) -> None:
    """The files of a jail are copied and completed by root of the host."""
    os.chmod(tmp_path, 0o751)
    (tmp_path / "tmp").mkdir(mode=0o700)
    before = [os.stat(path) for path in (tmp_path, tmp_path / "tmp")]
    async with Fleet("bwrap") as fleet, fleet.block() as box:
        script = f"cd / && mv root r && mv var v && mv srv s && ln -s {tmp_path} root && ln -s {tmp_path} var"
        assert (await box.exec(["sh", "-c", script], cwd="/")).success
        with contextlib.suppress(SandboxError):  # the directory of its commands is a link to nowhere
            await fleet.remove((await fleet.fork(box.ref.id)).id)
        forked = await fleet.fork(box.ref.id, workdir="/")
        async with await fleet.connect(forked.id) as copy:
            shown = await copy.exec(["readlink", "/root", "/var"])
            assert shown.stdout.split() == [str(tmp_path)] * 2
        await fleet.remove(forked.id)
    after = [os.stat(path) for path in (tmp_path, tmp_path / "tmp")]
    assert [(found.st_uid, found.st_mode) for found in after] == [(found.st_uid, found.st_mode) for found in before]
    assert os.listdir(tmp_path) == ["tmp"]


@pytest.fixture
def keyring() -> Iterator[None]:
    """A key in the session keyring of this process, as a login with Kerberos has one."""
    with session_key():
        yield


@pytest.mark.parametrize("network", ["none"])
async def test_root_in_a_jail_does_not_reach_the_host(tmp_path: Path, keyring: None, network: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0hf-{tmp_path.name}")
        listener.listen()
        async with create("bwrap", files={"/root/attacks.py": ATTACKS.read_text()}, network=network) as box:
            tried = await box.exec(["python3", "/root/attacks.py", str(secret), f"hf-{tmp_path.name}"])
    assert tried.success, tried
    *succeeded, count = tried.stdout.splitlines()
    assert succeeded == []
    assert int(count) >= 20
