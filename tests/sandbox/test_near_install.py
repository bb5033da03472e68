"""The server in a sandbox on this machine: sent without compression, and complete or not at all."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.errors import ConnectionLost
from holdfast.sandboxes.containers import Container
from holdfast.sandboxes.host_command import Outcome
from holdfast.sandboxes.install import installation
from holdfast.sandboxes.install.bundle import LAST_FILE, Bundle, plain_tar
from holdfast.sandboxes.install.installation import Installation
from holdfast.sandboxes.target import CommandTarget

#: The report of a boot script in a place with every program, of an unknown machine.
MISSING = "holdfast-missing: unknown tar chmod mkdir rm mv"


class Here(CommandTarget):
    """A directory of this machine in place of a sandbox; a `cut` changes the tar on its way."""

    def __init__(self, home: Path, *, near: bool = True) -> None:
        super().__init__("here:", Installation(directory=str(home)))
        self._near = near
        self.sent: list[Path | bytes] = []
        self.cut: bytes | None = None

    @property
    def is_near(self) -> bool:
        return self._near

    def command(self, argv: Sequence[str]) -> list[str]:
        return ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *argv]

    async def run(self, argv: Sequence[str], *, stdin: Path | bytes = b"", seconds: float | None = None) -> Outcome:
        self.sent.append(stdin)
        return await super().run(argv, stdin=stdin if self.cut is None else self.cut, seconds=seconds)


@pytest.fixture(autouse=True)
def cache(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the tests, which has the bundle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(bundle.path.parents[2]))


def installed(home: Path) -> list[Path]:
    return list(home.glob("holdfast-*"))


async def test_a_near_sandbox_gets_the_tar_without_compression(tmp_path: Path, bundle: Bundle) -> None:
    target = Here(tmp_path)
    await target.installation.install(target, MISSING)
    assert target.sent == [plain_tar(bundle)]
    (tree,) = installed(tmp_path)
    assert tree.name == bundle.name
    assert (await target.run([f"{tree}/bin/holdfast", "--version"])).stdout.startswith("holdfast ")


async def test_another_sandbox_gets_it_compressed(tmp_path: Path, bundle: Bundle) -> None:
    target = Here(tmp_path, near=False)
    await target.installation.install(target, MISSING)
    assert target.sent == [bundle.path]
    assert [tree.name for tree in installed(tmp_path)] == [bundle.name]


async def test_a_tar_that_was_cut_off_between_two_files_is_not_installed(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "RETRY_SECONDS", ())
    whole = plain_tar(bundle).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        last = tar.getmembers()[-1]
    target = Here(tmp_path)
    # Of this GNU tar returns 0, and the tree has every file but one.
    target.cut = whole[: last.offset]
    with pytest.raises(ConnectionLost, match="did not arrive inside whole"):
        await target.installation.install(target, MISSING)
    assert installed(tmp_path) == []


def test_the_plain_tar_has_the_same_files(bundle: Bundle) -> None:
    with tarfile.open(bundle.path) as packed, tarfile.open(plain_tar(bundle)) as plain:
        names = [member.name for member in plain]
        assert names == [*(member.name for member in packed), LAST_FILE]
        assert all(
            plain.extractfile(name).read() == packed.extractfile(name).read()  # type: ignore[union-attr]
            for name in names[:-1]
            if plain.getmember(name).isfile()
        )


@pytest.mark.parametrize(
    ("host", "near"),
    [(None, True), ("unix:///run/docker.sock", True), ("tcp://far:2376", False), ("ssh://far", False)],
)
def test_a_container_is_near_if_its_engine_is(
    host: str | None, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("CONTAINER_HOST", raising=False)
    if host is not None:
        monkeypatch.setenv("DOCKER_HOST", host)
    assert Container("docker", "web").is_near is near
