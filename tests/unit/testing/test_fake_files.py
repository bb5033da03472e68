"""The files in memory behave as the real ones do, as far as they go."""

from __future__ import annotations

import pytest

from holdfast import Sandbox
from holdfast.errors import FileError, FileExists, FileNotFound, IsADirectory, NotADirectory
from holdfast.testing import FakeExec
from holdfast.types import FILE_PIECE_BYTES


@pytest.fixture
def fake() -> FakeExec:
    return FakeExec()


@pytest.fixture
def box(fake: FakeExec) -> Sandbox:
    return Sandbox(fake)


async def test_what_is_written_is_read(box: Sandbox, fake: FakeExec) -> None:
    data = bytes(range(256)) * (FILE_PIECE_BYTES // 100)
    await box.write_file("/a/b/c", data, mode=0o600)
    assert fake.files.content("/a/b/c") == data
    assert await box.read_file("/a/b/c") == data
    assert (await box.stat("/a/b/c")).mode == 0o600
    await box.write_file("/a/b/c", "text")
    assert ((await box.stat("/a/b/c")).mode, await box.read_text("/a/b/c")) == (0o600, "text")
    await box.write_file("relative", b"x")
    assert "/fake/relative" in fake.files.paths


async def test_names(box: Sandbox, fake: FakeExec) -> None:
    fake.files.put("/d/one", b"1")
    await box.make_dir("/d/sub")
    await box.api.files.make_link("/d/link", "one")
    assert await box.read_file("/d/link") == b"1"
    assert await box.api.files.real_path("/d/link") == "/d/one"
    assert [(entry.name, entry.type) for entry in await box.list_dir("/d")] == [
        ("link", "symlink"),
        ("one", "file"),
        ("sub", "directory"),
    ]
    await box.copy("/d", "/e", recursive=True)
    await box.move("/e/one", "/e/two")
    assert [entry.name for entry in await box.list_dir("/", recursive=True)] == [
        *("d", "d/link", "d/one", "d/sub", "e", "e/link", "e/sub", "e/two", "fake")
    ]
    await box.remove("/e", recursive=True)
    assert not await box.exists("/e/two")


async def test_errors(box: Sandbox, fake: FakeExec) -> None:
    fake.files.put("/d/one", b"1")
    await box.api.files.make_link("/loop", "loop")
    with pytest.raises(FileNotFound, match="/none"):
        await box.read_file("/none")
    with pytest.raises(IsADirectory):
        await box.read_file("/d")
    with pytest.raises(IsADirectory):
        await box.write_file("/d", b"")
    with pytest.raises(NotADirectory):
        await box.list_dir("/d/one")
    with pytest.raises(FileExists):
        await box.make_dir("/d", exist_ok=False)
    with pytest.raises(FileError, match="not empty"):
        await box.remove("/d")
    with pytest.raises(FileError, match="too many levels"):
        await box.stat("/loop")
