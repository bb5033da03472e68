"""The engines of the tests themselves: what they start is gone at the end, whatever became of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sandbox.conftest import or_skip
from tests.support import engines
from tests.support.engines import Missing


def processes_naming(directory: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        if directory in words:
            found.append(words.replace("\0", " "))
    return found


def test_a_docker_engine_leaves_nothing(busybox_root: Path) -> None:
    with or_skip(), engines.docker_engine() as docker:
        directory = os.path.dirname(os.environ["DOCKER_HOST"].removeprefix("unix://"))
        assert processes_naming(directory)
        docker.image(busybox_root, "hf-once")
        container = docker.container("hf-once")  # it still runs when the engine ends
        assert docker("exec", container, "echo", "here") == "here"
        (parent,) = {cgroup.split("/")[1] for cgroup in cgroups_of(docker("inspect", "-f", "{{.Id}}", container))}
    assert not os.path.exists(directory)
    assert processes_naming(directory) == []
    assert directory not in Path("/proc/mounts").read_text()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{parent}"))


def cgroups_of(container: str) -> list[str]:
    """The paths of a container's cgroups, below each mount of them."""
    paths = Path("/sys/fs/cgroup").glob(f"*/holdfast-*/{container}")
    return [f"/{path.parent.name}" for path in paths]


def test_namespaces_leave_nothing(debian_root: Path) -> None:
    with or_skip(), engines.namespaced_root(debian_root) as prefix:
        inside = subprocess.run([*prefix, "sh", "-c", "echo /proc/[0-9]*; pwd"], capture_output=True, text=True)
        assert inside.stdout.startswith("/proc/1 ")
        assert inside.stdout.endswith("\n/\n")
        holder = prefix[prefix.index("--target") + 1]
    # At most its adopter has not reaped it yet.
    assert not os.path.exists(f"/proc/{holder}/cwd")
    assert str(debian_root) not in Path("/proc/mounts").read_text()


def test_namespaces_are_ready_behind_their_root(
    debian_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for `chroot` refuses if its caller has already announced that commands may enter."""
    real = shutil.which("chroot", path="/usr/sbin:/sbin:/usr/bin:/bin")
    (tmp_path / "chroot").write_text(f'#!/bin/sh\ngrep -q ready /proc/self/fd/1 && exit 1\nexec {real} "$@"\n')
    (tmp_path / "chroot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with or_skip(), engines.namespaced_root(debian_root) as prefix:
        inside = subprocess.run([*prefix, "pwd"], capture_output=True, text=True)
        assert (inside.stdout, inside.stderr) == ("/\n", "")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(Missing, match="no-such-engine: "):
        engines.need("no-such-engine")
