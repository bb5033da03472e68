"""Whole trees to a sandbox and back: everything comes along, and nothing leaves the place it was sent to."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Sandbox
from holdfast.errors import FileError, FileExists, FileNotFound, IsADirectory
from holdfast.testing import FakeExec, FakeFiles
from holdfast.types import FILE_PIECE_BYTES, DirPage, FilePiece


@pytest.fixture(params=("inprocess", "unix"))
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_tree(root: Path) -> None:
    """Modes, times, links, empty directories, odd names, a file of several pieces."""
    (root / "empty").mkdir(parents=True)
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "big").write_bytes(random.Random(3).randbytes(3 * FILE_PIECE_BYTES + 11))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o750)
    (root / "nothing").write_bytes(b"")
    (root / os.fsdecode(b"caf\xe9")).write_text("coffee")
    (root / "deep" / "up").symlink_to("../run.sh")
    (root / "self").symlink_to(".")
    for number in range(40):
        (root / "deep" / f"{number}.txt").write_text(str(number))
    os.utime(root / "run.sh", (5, 1_000_000.25))
    (root / "deep").chmod(0o500)
    os.utime(root / "deep", (5, 2_000_000))


def shape(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        kind, mode = stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode)
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = (kind, str(path.readlink()))
        else:
            content = path.read_bytes() if path.is_file() else b""
            found[name] = (kind, mode, status.st_mtime_ns, content)
    return found


async def test_a_tree_goes_there_and_comes_back(box: Sandbox, tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    seen: list[tuple[int, int]] = []
    sent = await box.upload(tmp_path / "tree", tmp_path / "there", progress=lambda *now: seen.append(now))
    assert shape(tmp_path / "there") == shape(tmp_path / "tree")
    came = await box.download(tmp_path / "there", tmp_path / "back", progress=lambda *now: seen.append(now))
    assert shape(tmp_path / "back") == shape(tmp_path / "tree")
    files = [path for path in (tmp_path / "tree").rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_size for path in files)
    assert sent == came
    assert (sent.files, sent.directories, sent.links, sent.bytes) == (44, 4, 2, size)
    assert {total for _, total in seen} == {size}
    assert seen[-1] == (size, size)
    # Once more over what is there: the same again.
    await box.upload(tmp_path / "tree", tmp_path / "there")
    assert shape(tmp_path / "there") == shape(tmp_path / "tree")


async def test_a_single_file_gets_the_name_that_was_said(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    (tmp_path / "a").chmod(0o741)
    await box.upload(tmp_path / "a", tmp_path / "made" / "b")
    await box.download(tmp_path / "made" / "b", tmp_path / "other" / "c")
    found = tmp_path / "other" / "c"
    assert (found.read_text(), stat.S_IMODE(found.stat().st_mode)) == ("content", 0o741)
    with pytest.raises(FileNotFound, match=r"^local file .*/none"):
        await box.upload(tmp_path / "none", tmp_path / "x")
    with pytest.raises(FileNotFound, match=r"^/.*/none"):
        await box.download(tmp_path / "none", tmp_path / "x")
    with pytest.raises(IsADirectory, match="local file"):
        await box.download(tmp_path / "a", tmp_path / "made")


async def test_what_is_no_file_is_left_out_and_told(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree").mkdir()
    os.mkfifo(tmp_path / "tree" / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        monkeypatch.chdir(tmp_path / "tree")  # a socket's path has 107 bytes
        sock.bind("s")
    (tmp_path / "tree" / "out").symlink_to("/etc")
    (tmp_path / "tree" / "up").symlink_to("../x")
    sent = await box.upload(tmp_path / "tree", tmp_path / "there")
    assert [Path(skipped.path).name for skipped in sent.skipped] == ["fifo", "s"]
    assert (tmp_path / "there" / "out").readlink() == Path("/etc"), "to the sandbox a link is what it says"
    came = await box.download(tmp_path / "tree", tmp_path / "back")
    assert {Path(skipped.path).name for skipped in came.skipped} == {"fifo", "s", "out", "up"}
    assert list((tmp_path / "back").iterdir()) == []


async def test_a_cancelled_download_leaves_nothing(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(20 * FILE_PIECE_BYTES))
    begun = asyncio.Event()
    task = asyncio.create_task(
        box.download(tmp_path / "big", tmp_path / "got" / "big", progress=lambda *_: begun.set())
    )
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "got").iterdir()) == []


# --- a sandbox that lies ------------------------------------------------------------------------------------------


class LyingFiles(FakeFiles):
    """Gives names and links that no file system would, in any directory or in one."""

    def __init__(self, *entries: tuple[str, str, str | None], inside: str = "/tree") -> None:
        super().__init__()
        self.put("/tree/ok", b"fine")
        self._lies = entries
        self._inside = inside

    async def list(self, path: str, **options: Any) -> DirPage:
        if path != self._inside:
            return DirPage((), False)
        model = (await super().list("/tree")).entries[0]
        made = [
            msgspec.structs.replace(model, name=name, type=kind, target=target) for name, kind, target in self._lies
        ]
        return DirPage(tuple(made), False)

    async def read(self, path: str, **options: Any) -> FilePiece:
        return FilePiece(size=4, eof=True, file_id="1", data=b"evil")


def lying(*entries: tuple[str, str, str | None], inside: str = "/tree") -> Sandbox:
    fake = FakeExec()
    fake.files = LyingFiles(*entries, inside=inside)
    return Sandbox(fake)


@pytest.mark.parametrize("name", ["..", ".", "../escaped", "/tmp/escaped", "a/../../escaped", "nul\0"])
async def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    for kind in ("file", "directory", "symlink"):
        with pytest.raises(FileError, match="not a file name"):
            await lying((name, kind, "ok")).download("/tree", tmp_path / "target")
    assert os.listdir(tmp_path) == ["target"]
    assert list((tmp_path / "target").iterdir()) == []


async def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    """A link first and then a directory of its name: what is put into that would go where the link leads."""
    (tmp_path / "outside").mkdir()
    with pytest.raises(FileError, match="after"):
        await lying(("a", "symlink", "b"), ("a", "directory", None)).download("/tree", tmp_path / "target")


async def test_a_link_that_is_there_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "d").symlink_to(tmp_path / "outside")
    with pytest.raises(FileExists, match="not a directory"):
        await lying(("d", "directory", None)).download("/tree", tmp_path / "target")
    (tmp_path / "target" / "f").symlink_to(tmp_path / "outside" / "f")
    await lying(("f", "file", None)).download("/tree", tmp_path / "target")
    assert (tmp_path / "target" / "f").read_bytes() == b"evil"
    assert not (tmp_path / "target" / "f").is_symlink()
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize("target", ["/etc", "..", "../..", "x/../..", "ok/../../x", "./../x", "a/b/../../../x"])
async def test_a_link_that_leads_out_is_left_out(target: str, tmp_path: Path) -> None:
    result = await lying(("l", "symlink", target)).download("/tree", tmp_path / "target")
    assert [skipped.path for skipped in result.skipped] == ["/tree/l"]
    assert list((tmp_path / "target").iterdir()) == []


async def test_no_program_gets_rights_from_a_sandbox(tmp_path: Path) -> None:
    fake = FakeExec()
    fake.files.put("/tree/su", b"#!", mode=0o6755)
    await Sandbox(fake).download("/tree", tmp_path / "target")
    assert stat.S_IMODE((tmp_path / "target" / "su").stat().st_mode) == 0o755
