"""Edits and patches of files in a sandbox: exact, all files or none, no lost update; over each encoding."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast import PatchedFile, Sandbox
from holdfast.client.files.edits import Edits
from holdfast.errors import EditConflict, FileError, FileNotFound, InvalidParams, LimitReached


@pytest.fixture(params=("inprocess", "unix", "unix-json"))
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_an_edit_replaces_an_exact_text(box: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one two\r\none \xff three\n")
    path.chmod(0o750)
    await box.edit(path, "two\r\n", "2\r\n")
    await box.edit(path, b"\xff", b"\xfe")
    await box.edit(path, "one", "1", 2)
    assert path.read_bytes() == b"1 2\r\n1 \xfe three\n"
    assert path.stat().st_mode & 0o777 == 0o750
    with pytest.raises(EditConflict, match=r"occurs 2 times \(lines 1, 2\), not 1"):
        await box.edit(path, "1", "one")
    with pytest.raises(EditConflict, match="does not occur"):
        await box.edit(path, "missing", "")
    with pytest.raises(InvalidParams, match="empty text"):
        await box.edit(path, "", "x")
    with pytest.raises(FileNotFound):
        await box.edit(tmp_path / "no", "a", "b")
    assert path.read_bytes() == b"1 2\r\n1 \xfe three\n"


async def test_a_patch_of_git_changes_all_its_files(box: Sandbox, tmp_path: Path) -> None:
    def git(*args: str) -> bytes:
        return subprocess.run(["git", "-C", top, *args], capture_output=True, check=True).stdout

    top = str(tmp_path)
    (tmp_path / "big").write_text("".join(f"line {n}\n" for n in range(200_000)))
    (tmp_path / "old name").write_text("moved\n" * 9)
    (tmp_path / "old name").chmod(0o755)
    (tmp_path / "gone").write_text("x\n")
    git("init", "-q")
    git("add", "-A")
    tree = git("write-tree").decode().strip()
    (tmp_path / "big").write_text("".join(f"line {n}\n" for n in range(200_000) if n % 50_000 != 7))
    (tmp_path / "gone").unlink()
    (tmp_path / "old name").rename(tmp_path / "new name")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "ü").write_text("new, without newline")
    (tmp_path / "d" / "ü").chmod(0o755)
    git("add", "-A")
    patch = git("diff", "--cached", "-M", tree)
    wanted = contents(tmp_path)
    git("apply", "-R", input_of(tmp_path, patch))
    assert (tmp_path / "gone").exists()
    changed = await box.apply_patch(patch, cwd=tmp_path)
    assert set(changed) == {
        PatchedFile("big", "changed"),
        PatchedFile("gone", "removed"),
        PatchedFile("old name", "removed"),
        PatchedFile("new name", "created"),
        PatchedFile("d/ü", "created"),
    }
    assert contents(tmp_path) == wanted
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("new name", "d/ü")} == {0o755}


def input_of(location: Path, patch: bytes) -> str:
    path = location / ".git" / "the.patch"
    path.write_bytes(patch)
    return str(path)


def two_files(second: str = "b") -> str:
    return f"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+A\n--- a/sub/g\n+++ b/sub/g\n@@ -1 +1 @@\n-{second}\n+B\n"


@pytest.fixture
def location(tmp_path: Path) -> Path:
    (tmp_path / "f").write_text("a\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "g").write_text("b\n")
    return tmp_path


def contents(location: Path) -> dict[str, str]:
    files = {str(path.relative_to(location)): path for path in location.rglob("*") if path.is_file()}
    return {name: path.read_text() for name, path in files.items() if not name.startswith(".git")}


async def test_a_hunk_that_does_not_apply_changes_no_file(box: Sandbox, location: Path) -> None:
    with pytest.raises(EditConflict, match="sub/g: hunk 1"):
        await box.apply_patch(two_files("other"), cwd=location)
    assert contents(location) == {"f": "a\n", "sub/g": "b\n"}


class FailsAtSecondCommit:
    """The files of a sandbox; the second rename fails, or another program changes a file before the first."""

    def __init__(self, files: Any, before_rename: Any = None) -> None:
        self._files = files
        self._commits = 0
        self._before_rename = before_rename

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    async def write_piece(self, path: str, data: bytes, **more: Any) -> None:
        await self._files.write_piece(path, data, **more)
        if self._before_rename is not None:
            self._before_rename()

    async def commit(self, path: str, **more: Any) -> Any:
        self._commits += 1
        if self._commits == 2:
            raise FileError(f"{path}: the device failed")
        return await self._files.commit(path, **more)


async def test_a_rename_that_fails_restores_the_files_before_it(box: Sandbox, location: Path) -> None:
    edits = Edits(FailsAtSecondCommit(box.api.files), box.read_file, None)
    with pytest.raises(FileError, match="the device failed"):
        await edits.apply(two_files(), None, lambda name: str(location / name))
    assert contents(location) == {"f": "a\n", "sub/g": "b\n"}


async def test_a_file_that_another_program_changes_meanwhile_is_not_replaced(box: Sandbox, location: Path) -> None:
    files = FailsAtSecondCommit(box.api.files, lambda: (location / "sub" / "g").write_text("of another\n"))
    edits = Edits(files, box.read_file, None)
    with pytest.raises(EditConflict, match="sub/g: another program changed it meanwhile"):
        await edits.apply(two_files(), None, lambda name: str(location / name))
    assert contents(location) == {"f": "a\n", "sub/g": "of another\n"}


async def test_a_directory_without_permission_changes_no_file(box: Sandbox, location: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    for each in (location, *location.parents[:2]):
        each.chmod(0o777)
    (location / "f").chmod(0o666)
    with pytest.raises(PermissionError, match="sub/g"):
        await box.apply_patch(two_files(), cwd=location, user="65534:65534")
    assert contents(location) == {"f": "a\n", "sub/g": "b\n"}


async def test_a_patch_of_too_many_files_is_refused(box: Sandbox, tmp_path: Path) -> None:
    patch = "".join(f"--- /dev/null\n+++ b/{n}\n@@ -0,0 +1 @@\n+x\n" for n in range(129))
    with pytest.raises(LimitReached, match="129 files are more than 128"):
        await box.apply_patch(patch, cwd=tmp_path)
    assert contents(tmp_path) == {}
