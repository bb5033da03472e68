"""Confined programs of a root server that run as another user: their ids, and that all else works as before.

The user is a number that no list of users has. The limits of such a program are in
tests/service/test_session_users.py.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import holdfast
from holdfast.client.sandbox import Sandbox
from holdfast.errors import PermissionRefused
from holdfast.runtime.confine import launch_plan
from holdfast.runtime.confine.features import detect_features
from holdfast.types import Confinement
from tests.support.parts import needs
from tests.support.servers import RunningServer, is_alive, running_server
from tests.support.signalling import send_signal

#: Another one in each process that runs tests: what is left of it is counted.
UID: Final = 1_900_100_000 + os.getpid()
USER: Final = f"{UID}:{UID}"
OFFERED = {feature.word.partition(":")[0]: feature.missing for feature in detect_features()}
pytestmark = pytest.mark.skipif(bool(OFFERED["users"]), reason=f"no other users: {OFFERED['users']}")


@pytest.fixture(params=["bubblewrap", "landlock", "none"])
def confinement(request: pytest.FixtureRequest, work: Path) -> Confinement:
    if request.param != "none" and OFFERED[request.param]:
        pytest.skip(f"no {request.param} here: {OFFERED[request.param]}")
    if request.param == "none":
        return Confinement(mode="none", network="none")
    # /proc of itself, which Landlock keeps back by default.
    return Confinement(mode=request.param, writable=(str(work),), network="none", hide_processes=False)


@pytest.fixture
def work() -> Iterator[Path]:
    # Not below pytest's directory: that is closed to other users.
    directory = Path(tempfile.mkdtemp(prefix="hf-user-"))
    directory.chmod(0o755)
    work = directory / "work"
    work.mkdir(0o700)
    os.chown(work, UID, UID)
    yield work
    shutil.rmtree(directory)


async def test_the_program_is_another_user_without_any_rights(work: Path, confinement: Confinement) -> None:
    async with holdfast.connect("inprocess") as box:
        script = "cat /proc/self/status; touch made; echo LD=$LD_BIND_NOW"
        environment = {"LD_BIND_NOW": "1", "PATH": os.defpath}
        process = await box.start(
            ["sh", "-c", script], user=USER, cwd=str(work), confinement=confinement, env=environment
        )
        out = (await process.communicate())[0].decode()
    assert f"Uid:\t{UID}\t{UID}\t{UID}\t{UID}" in out
    assert f"Gid:\t{UID}\t{UID}\t{UID}\t{UID}" in out
    groups = next(line.split()[1:] for line in out.splitlines() if line.startswith("Groups:"))
    assert groups in ([], [str(UID)])
    capabilities = {line.split()[0]: line.split()[1] for line in out.splitlines() if line.startswith("Cap")}
    assert set(capabilities.values()) == {"0" * 16}, capabilities
    assert len(capabilities) == 5
    assert "NoNewPrivs:\t1" in out
    assert "LD=1" in out
    assert (work / "made").stat().st_uid == UID


@needs("git")
async def test_a_jail_lists_its_user_and_has_a_home(work: Path) -> None:
    if OFFERED["bubblewrap"]:
        pytest.skip(f"no jail: {OFFERED['bubblewrap']}")
    # Also where no other user gets through to the workspace from outside.
    work.parent.chmod(0o700)
    confinement = Confinement(mode="bubblewrap", writable=(str(work),), network="none")
    async with (
        holdfast.connect("inprocess") as box,
        await box.shell("bash", user=USER, cwd=str(work), confinement=confinement) as shell,
    ):
        assert (await shell.run("whoami; id -gn; echo $USER $HOME")).stdout == "agent\nagent\nagent /home/agent\n"
        made = await shell.run(f"cd {work} && touch file ~/mine && stat -c '%U %G' file ~/mine /etc/passwd")
        assert made.stdout == "agent agent\nagent agent\nroot root\n", made.stderr
        committed = await shell.run("git init -q . && git add file && git status")
        assert committed.exit_code == 0, committed.stderr
        mounts = (await shell.run("cut -d' ' -f6 /proc/self/mountinfo")).stdout.splitlines()
        assert mounts
        assert all("nosuid" in options.split(",") for options in mounts), mounts


async def test_a_program_whose_path_looks_like_a_variable(work: Path) -> None:
    if OFFERED["bubblewrap"]:
        pytest.skip(f"no jail: {OFFERED['bubblewrap']}")
    program = work / "a=b"
    program.write_text("#!/bin/sh\necho ran $0\n")
    program.chmod(0o755)
    confinement = Confinement(mode="bubblewrap", writable=(str(work),))
    environment = {"LC_ALL": "C", "PATH": os.defpath}
    async with holdfast.connect("inprocess") as box:
        process = await box.start(
            [str(program)], user=USER, cwd=str(work), confinement=confinement, env=environment
        )
        assert (await process.communicate())[0] == f"ran {program}\n".encode()


async def test_without_setpriv_a_jail_of_another_user_is_refused(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_plan, "_changes_users", lambda setpriv: False)
    confinement = Confinement(mode="bubblewrap", writable=(str(work),))
    async with holdfast.connect("inprocess") as box:
        with pytest.raises(PermissionRefused, match="needs setpriv of util-linux"):
            await box.start(["true"], user=USER, cwd=str(work), confinement=confinement)


async def test_shells_and_terminals_of_another_user(work: Path, confinement: Confinement) -> None:
    """Timeouts, keys, input that is awaited, a killed server, the end of everything that was started."""
    with running_server() as server:
        # As /dev/shm is, where the spool of a server lies by default.
        os.chmod(server.spool, 0o711)
        async with holdfast.connect(server.address("unix")) as box:
            await _use_and_kill(box, server, work, confinement)


async def _use_and_kill(box: Sandbox, server: RunningServer, work: Path, confinement: Confinement) -> None:
    shell = await box.shell("bash", user=USER, cwd=str(work), confinement=confinement)
    terminal = await box.terminal(["bash"], user=USER, cwd=str(work), confinement=confinement)
    await shell.run("name=value; sleep 1000 & job=$!")
    assert (await shell.run("sleep 1000", timeout=0.1)).exit_code == 124
    begun = asyncio.Event()
    reading = asyncio.create_task(shell.run("echo begun; cat", stdin="open", on_output=lambda _: begun.set()))
    await begun.wait()
    await shell.write("given")
    await shell.close_stdin()
    assert (await reading).stdout == "begun\ngiven"
    await _type_and_interrupt(terminal)

    send_signal(server.pid, signal.SIGKILL)
    assert (await shell.run("kill -0 $job && echo $name")).stdout == "value\n"
    assert (await terminal.run("id -u")).output == f"{UID}\n"
    await _type_and_interrupt(terminal)
    await shell.close()
    await terminal.close()
    server.pid = (await box.status()).pid
    assert _of_user(UID) == []


async def _type_and_interrupt(terminal: holdfast.Terminal) -> None:
    await terminal.send("cat\n")
    assert (await terminal.wait_until_awaiting_input(30)).foreground == "cat"
    await terminal.send_keys("C-c")
    await terminal.wait_until_idle(30)
    assert (await terminal.describe()).last_exit_code == 130


def _of_user(uid: int) -> list[str]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid and is_alive(int(name)):
                found.append(name)
        except FileNotFoundError:
            continue
    return found
