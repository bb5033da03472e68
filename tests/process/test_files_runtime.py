"""Files where the machine refuses, and the end of uploads that are never finished."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.config import ExecServerConfig
from holdfast.errors import FileError, FileNotFound, InvalidParams, LimitReached, ResourceExhausted
from holdfast.runtime.files.local_files import LocalFiles
from holdfast.runtime.files.operations import FileOperations
from holdfast.runtime.files.user_helpers import MAX_HELPERS, UserHelpers
from holdfast.runtime.process.environment import resolve_user
from holdfast.types import FILE_PIECE_BYTES
from tests.support.servers import running_server
from tests.support.signalling import send_signal

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and become another user")


@pytest.fixture
async def files() -> AsyncIterator[LocalFiles]:
    files = LocalFiles(ExecServerConfig())
    yield files
    await files.aclose()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one MiB."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "holdfast-test", str(tmp_path)], check=False)
    if done.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@needs_root
async def test_no_room_is_told_and_leaves_the_old_file(files: LocalFiles, small_disk: Path) -> None:
    path = small_disk / "file"
    path.write_text("old")
    with pytest.raises(ResourceExhausted, match="file: no room"):
        await files.write(str(path), bytes(2 * 1024 * 1024))
    assert (path.read_text(), os.listdir(small_disk)) == ("old", ["file"])


@pytest.fixture
def mount_point(tmp_path: Path) -> Iterator[Path]:
    """A file, `place`, on which another, `real`, is mounted."""
    real, location = tmp_path / "real", tmp_path / "place"
    real.write_text("a longer content")
    location.write_text("")
    if subprocess.run(["mount", "--bind", str(real), str(location)], check=False).returncode != 0:
        pytest.skip("nothing can be mounted here")
    yield location
    subprocess.run(["umount", str(location)], check=True)


@needs_root
async def test_a_mount_point_is_written_in_place(files: LocalFiles, mount_point: Path) -> None:
    await files.write(str(mount_point), b"new")
    assert (mount_point.parent / "real").read_text() == "new"
    assert sorted(os.listdir(mount_point.parent)) == ["place", "real"]


async def test_an_upload_that_nobody_goes_on_with_is_removed(files: LocalFiles, tmp_path: Path) -> None:
    await files.write_piece(str(tmp_path / "file"), b"x", upload_id="a", offset=0)
    await files._remove_abandoned()
    assert os.listdir(tmp_path) == [".file.holdfast-a"], "its time is not over"
    files._config = ExecServerConfig(abandoned_upload_seconds=0.0)
    await files._remove_abandoned()
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileError, match="the upload is over"):
        await files.write_piece(str(tmp_path / "file"), b"x", upload_id="a", offset=1)


@needs_root
async def test_every_piece_of_an_upload_has_the_error_that_ended_it(files: LocalFiles, small_disk: Path) -> None:
    """Pieces are written at the same time, and the reply to any of them may be sent first."""
    with pytest.raises(ResourceExhausted, match="no room is left"):
        await files.write_piece(str(small_disk / "file"), bytes(2 * 1024 * 1024), upload_id="a", offset=0)
    with pytest.raises(ResourceExhausted, match="no room is left"):
        await files.write_piece(str(small_disk / "file"), b"x", upload_id="a", offset=2 * 1024 * 1024)


async def test_closing_removes_what_is_unfinished(tmp_path: Path) -> None:
    files = LocalFiles(ExecServerConfig())
    await files.write_piece(str(tmp_path / "file"), b"x", upload_id="a", offset=0)
    await files.aclose()
    assert os.listdir(tmp_path) == []


async def test_only_so_many_uploads_at_a_time(tmp_path: Path) -> None:
    files = LocalFiles(ExecServerConfig(max_uploads=3))
    for number in range(3):
        await files.write_piece(str(tmp_path / str(number)), b"x", upload_id=str(number), offset=0)
    with pytest.raises(LimitReached, match="max_uploads"):
        await files.write_piece(str(tmp_path / "more"), b"x", upload_id="more", offset=0)
    await files.commit(str(tmp_path / "0"), upload_id="0", size=1)
    await files.write_piece(str(tmp_path / "more"), b"x", upload_id="more", offset=0)
    await files.aclose()
    assert os.listdir(tmp_path) == ["0"]


def test_another_server_goes_on_with_an_upload(tmp_path: Path) -> None:
    """The first one died: what it had written is there, and the descriptor is not."""
    path = str(tmp_path / "file")
    before, after = FileOperations(8), FileOperations(8)
    before.do_write_piece(path, b"hello ", "id", 0, True)
    after.do_write_piece(path, b"world", "id", 6, True)
    after.do_commit(path, "id", 11, None, None)
    assert (tmp_path / "file").read_text() == "hello world"
    for upload in before.uploads.values():
        upload.close()


def test_an_upload_whose_beginning_is_gone_is_not_gone_on_with(tmp_path: Path) -> None:
    """A file with a hole in the place of what was lost would have the right size."""
    path = str(tmp_path / "file")
    with pytest.raises(OSError, match="gone: write it again"):
        FileOperations(8).do_write_piece(path, b"world", "id", 6, True)
    with pytest.raises(OSError, match="gone: write it again"):
        FileOperations(8).do_commit(path, "id", 11, None, None)
    assert os.listdir(tmp_path) == []


@needs_root
def test_another_users_upload_outlives_its_server(tmp_path: Path) -> None:
    for each in (tmp_path, *tmp_path.parents[:2]):
        each.chmod(0o777)
    path, account = str(tmp_path / "file"), resolve_user("65534:65534")
    piece = {"path": path, "upload_id": "id", "make_parents": True}
    for data, offset in ((b"hello ", 0), (b"world", 6)):
        children = UserHelpers(8)
        children.perform(account, "write_piece", {**piece, "data": data, "offset": offset})
        children.close()
    children = UserHelpers(8)
    wanted = {"path": path, "upload_id": "id", "size": 11, "mode": None, "mtime_ns": None}
    children.perform(account, "commit", wanted)
    children.close()
    assert ((tmp_path / "file").read_text(), (tmp_path / "file").stat().st_uid) == ("hello world", 65534)


def test_pieces_that_do_not_make_the_file_are_no_file(tmp_path: Path) -> None:
    path, work = str(tmp_path / "file"), FileOperations(8)
    work.do_write_piece(path, b"hello", "id", 0, True)
    with pytest.raises(OSError, match="5 of 6 bytes were received"):
        work.do_commit(path, "id", 6, None, None)
    assert os.listdir(tmp_path) == []


def test_somebody_elses_file_in_the_place_of_an_upload_is_not_written(tmp_path: Path) -> None:
    path, work = str(tmp_path / "file"), FileOperations(8)
    (tmp_path / "precious").write_text("precious")
    os.link(tmp_path / "precious", tmp_path / ".file.holdfast-id")
    with pytest.raises(OSError, match="another user"):
        work.do_write_piece(path, b"hello", "id", 0, True)
    (tmp_path / ".file.holdfast-two").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        work.do_write_piece(path, b"hello", "two", 0, True)
    assert (tmp_path / "precious").read_text() == "precious"


async def test_a_directory_that_is_there_keeps_its_permissions(files: LocalFiles, tmp_path: Path) -> None:
    await files.make_dir(str(tmp_path / "new"), mode=0o700)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    (tmp_path / "somebodys").mkdir(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "somebodys")
    for name in ("somebodys", "link"):
        await files.make_dir(str(tmp_path / name), mode=0o700)
    assert stat.S_IMODE((tmp_path / "somebodys").stat().st_mode) == 0o755


@needs_root
async def test_a_new_directory_can_belong_to_another_user(files: LocalFiles, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir(0o755)
    await files.make_dir(str(there), owner=54321)
    assert there.stat().st_uid == 0
    await files.make_dir(str(tmp_path / "new"), mode=0o700, owner=54321)
    made = (tmp_path / "new").stat()
    assert (made.st_uid, made.st_gid, stat.S_IMODE(made.st_mode)) == (54321, 54321, 0o700)
    with pytest.raises(InvalidParams, match="owner"):
        await files.make_dir(str(tmp_path / "other"), owner=2**32 - 1)
    assert not (tmp_path / "other").exists()
    (tmp_path / "link").symlink_to(there)
    with pytest.raises(FileError):
        await files.make_dir(str(tmp_path / "link"), exist_ok=False, owner=54321)
    assert there.stat().st_uid == 0


async def test_a_link_in_the_target_does_not_lead_a_copy_back_into_its_source(
    files: LocalFiles, tmp_path: Path
) -> None:
    (tmp_path / "source" / "a" / "b").mkdir(parents=True)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "a").symlink_to(tmp_path / "source" / "a" / "b")
    with pytest.raises(FileError, match="target/a: not a directory"):
        await files.copy(str(tmp_path / "source"), str(tmp_path / "target"), recursive=True)
    assert os.listdir(tmp_path / "source" / "a" / "b") == []


async def test_a_request_that_comes_twice_is_done_once(files: LocalFiles, tmp_path: Path) -> None:
    path = str(tmp_path / "d")
    for _ in range(2):
        await files.make_dir(path, exist_ok=False, request_id="make")
    for _ in range(2):
        await files.remove(path, request_id="remove")
    for _ in range(2):
        with pytest.raises(FileNotFound):
            await files.remove(path, request_id="remove again")


@pytest.mark.parametrize("user", [None, pytest.param("65534:65534", marks=needs_root)])
async def test_a_write_goes_on_when_its_server_is_killed(user: str | None, tmp_path: Path) -> None:
    for each in (tmp_path, *tmp_path.parents[:2]):
        each.chmod(0o777)
    parts = [bytes([number]) * FILE_PIECE_BYTES for number in range(6)]
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:

            async def content() -> AsyncIterator[bytes]:
                for number, part in enumerate(parts):
                    if number == 3:
                        send_signal((await box.status()).pid, signal.SIGKILL)
                    yield part

            await box.write_file(tmp_path / "file", content(), user=user)
            assert (await box.status()).restarts == 1
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert os.listdir(tmp_path) == ["file"]


@needs_root
def test_children_are_bounded_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    children = UserHelpers(8)
    try:
        for uid in range(50_000, 50_000 + MAX_HELPERS + 3):
            children.perform(resolve_user(f"{uid}:{uid}"), "stat", {"path": "/", "follow": True})
        assert len(children._helpers) == MAX_HELPERS
        key, child = list(children._helpers.items())[-1]
        child._process.kill()
        child._process.wait()
        found = children.perform(resolve_user(f"{key[0]}:{key[1]}"), "stat", {"path": "/", "follow": True})
        assert found[0] == "directory"
    finally:
        children.close()
