"""A missing server is installed by the command that becomes the channel: one command, the same guarantees."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from holdfast.client.sandbox import Sandbox
from holdfast.errors import ConnectionLost, SandboxError
from holdfast.sandboxes import target as targets
from holdfast.sandboxes.install import installation
from holdfast.sandboxes.install.bundle import Bundle
from holdfast.sandboxes.install.installation import Installation
from holdfast.sandboxes.opening import open_target
from holdfast.sandboxes.target import CommandTarget

PATIENCE = 60.0
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
#: Shells that are `sh` somewhere, with the command that runs a script of theirs.
SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}


class Here(CommandTarget):
    """A directory of this machine in place of a sandbox, with the commands that were run there."""

    def __init__(self, home: Path, *, near: bool = True, shell: Sequence[str] = ("sh",), path: str = PATH) -> None:
        super().__init__("here:", Installation(directory=str(home)))
        self.home = home
        self.near = near
        self.shell = shell
        self.path = path
        #: Runs before each command, with the command as its arguments.
        self.before = 'exec "$@"'
        self.scripts: list[str] = []

    @property
    def is_near(self) -> bool:
        return self.near

    def command(self, argv: Sequence[str]) -> list[str]:
        self.scripts.append(" ".join(argv))
        words = [*self.shell, *argv[1:]] if argv[0] == "sh" else argv
        variables = [f"PATH={self.path}", f"HOLDFAST_DIRECTORY={self.home}/run", f"HOME={self.home}"]
        # As an engine's client does: the caller's umask and descriptors do not matter inside.
        return ["/usr/bin/env", "-i", *variables, "/bin/sh", "-c", f"umask 022; {self.before}", "before", *words]


@pytest.fixture(autouse=True)
def cache(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the tests, which has the bundle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(bundle.path.parents[2]))


@contextlib.asynccontextmanager
async def connected(target: Here) -> AsyncIterator[Sandbox]:
    async with asyncio.timeout(PATIENCE):
        box = Sandbox(await open_target(target, reconnect_deadline=PATIENCE))
        try:
            yield box
        finally:
            await box.aclose()
            (tree,) = installed(target.home)
            await target.run([f"{tree}/bin/holdfast", "stop", "--force"])


def installed(home: Path) -> list[Path]:
    """The trees below a directory, unfinished ones included."""
    return list(home.glob("holdfast-*"))


@pytest.mark.parametrize("near", [True, False], ids=["plain", "compressed"])
@pytest.mark.parametrize("shell", SHELLS)
async def test_one_command_installs_the_server_and_is_the_channel(
    tmp_path: Path, bundle: Bundle, shell: str, near: bool
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    target = Here(tmp_path, near=near, shell=SHELLS[shell])
    async with connected(target) as box:
        done = await box.exec(["sh", "-c", "umask; echo ${LC_ALL-unset}; ls /proc/self/fd"])
        assert len(target.scripts) == 1
        assert done.stdout.split()[:2] == ["0022", "unset"]
        # Beside the three of every command, `ls` has the directory that it lists.
        assert done.stdout.split()[2:] == ["0", "1", "2", "3"]
        assert [tree.name for tree in installed(tmp_path)] == [bundle.name]


async def test_a_second_connection_finds_it(tmp_path: Path) -> None:
    target = Here(tmp_path)
    async with connected(target):
        again = Here(tmp_path)
        box = Sandbox(await open_target(again, reconnect_deadline=PATIENCE))
        assert (await box.exec(["true"])).returncode == 0
        await box.aclose()
        assert len(again.scripts) == 1


async def test_two_clients_at_once_install_one_tree(tmp_path: Path, bundle: Bundle) -> None:
    first, second = Here(tmp_path), Here(tmp_path)
    async with connected(first) as box:
        pass
    shutil.rmtree(installed(tmp_path)[0])
    async with asyncio.timeout(PATIENCE):
        boxes = [
            Sandbox(each)
            for each in await asyncio.gather(
                *(open_target(each, reconnect_deadline=PATIENCE) for each in (first, second))
            )
        ]
        for box in boxes:
            assert (await box.exec(["true"])).returncode == 0
        for box in boxes:
            await box.aclose()
        assert [tree.name for tree in installed(tmp_path)] == [bundle.name]
        await first.run([f"{tmp_path}/{bundle.name}/bin/holdfast", "stop", "--force"])


async def test_a_reply_that_was_cut_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "RETRY_SECONDS", ())
    monkeypatch.setattr(targets, "RETRY_SECONDS", ())
    target = Here(tmp_path)
    target.before = 'head -c 1000000 | "$@"'
    with pytest.raises(ConnectionLost, match="did not arrive inside whole"):
        await open_target(target, reconnect_deadline=0.0)
    # First the command of the channel, then the installation that reports the reason.
    assert len(target.scripts) == 2
    assert installed(tmp_path) == []


async def test_a_command_that_is_killed_while_it_reads_is_run_again(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "RETRY_SECONDS", (0.0,))
    target = Here(tmp_path)
    # The first command gets a part of its input, and is killed then.
    target.before = (
        f'[ ! -e {tmp_path}/cut ] || exec "$@"; : > {tmp_path}/cut; '
        f"{{ head -c 1000000; kill -KILL $(cat {tmp_path}/pid); }} | "
        f"{{ sh -c 'echo $PPID > {tmp_path}/pid'; exec \"$@\"; }}"
    )
    async with connected(target) as box:
        assert (await box.exec(["true"])).returncode == 0
        assert len(target.scripts) == 2
        assert bundle.name in [tree.name for tree in installed(tmp_path)]


@pytest.mark.parametrize(("missing", "commands"), [("head", 3), ("dd", 1)])
async def test_without_a_program_the_server_is_installed_otherwise(
    tmp_path: Path, bundle: Bundle, missing: str, commands: int
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("cat", "chmod", "dd", "env", "gzip", "head", "mkdir", "mv", "rm", "sh", "tar", "uname"):
        if name != missing:
            (programs / name).symlink_to(shutil.which(name) or "")
    target = Here(tmp_path, path=str(programs))
    async with connected(target) as box:
        assert (await box.exec(["sh", "-c", ":"])).returncode == 0
        assert len(target.scripts) == commands
        assert [tree.name for tree in installed(tmp_path)] == [bundle.name]


async def test_a_sandbox_of_another_machine_gets_nothing(tmp_path: Path) -> None:
    (tmp_path / "uname").write_text("#!/bin/sh\necho sparc\n")
    (tmp_path / "uname").chmod(0o755)
    target = Here(tmp_path, path=f"{tmp_path}:{PATH}")
    with pytest.raises(SandboxError, match="is sparc, and the bundle is for"):
        await open_target(target, reconnect_deadline=0.0)
    assert len(target.scripts) == 1
    assert installed(tmp_path) == []
