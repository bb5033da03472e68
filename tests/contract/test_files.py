"""Files of a sandbox: read, written at once, listed, moved, as another user; the same over every way."""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import io
import os
import random
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast import Sandbox
from holdfast.client.dial import open_connection
from holdfast.client.remote import RemoteExec
from holdfast.errors import (
    FileError,
    FileExists,
    FileNotFound,
    InvalidParams,
    IsADirectory,
    LimitReached,
    NotADirectory,
    PermissionRefused,
    UnknownUser,
)
from holdfast.types import FILE_PIECE_BYTES
from tests.contract import cutting_proxy
from tests.support.servers import RunningServer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
MIB = 1024 * 1024
NOBODY = "65534:65534"
#: No UTF-8, and a name that resembles a URI.
ODD_NAMES = (b"caf\xe9", b"file:x", b"two\nlines", "ünï".encode(), b"back\\slash", b"100%25")


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture(params=("inprocess", "unix", "unix-json"))
def way(request: pytest.FixtureRequest) -> str:
    """Each encoding once, and none: what a transport adds is tested with processes."""
    return str(request.param)


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """A directory that every user may enter and write to: pytest's own is its user's alone."""
    for each in (tmp_path, *tmp_path.parents[:2]):
        each.chmod(0o777)
    return tmp_path


def leftovers(location: Path) -> list[str]:
    return [str(path) for path in location.rglob("*holdfast-*")]


async def test_what_is_written_is_read(box: Sandbox, location: Path) -> None:
    for size in (0, 1, FILE_PIECE_BYTES, FILE_PIECE_BYTES + 1, 3 * MIB + 7):
        data = noise(size)
        path = location / "made" / "on the way" / str(size)
        await box.write_file(path, data)
        assert path.read_bytes() == data
        assert await box.read_file(path) == data
        assert b"".join([piece async for piece in box.open_read(path)]) == data
    assert await box.read_file(path, offset=5, size=7) == data[5:12]
    assert await box.read_file(path, offset=MIB, size=MIB + 3) == data[MIB : 2 * MIB + 3]
    assert await box.read_file(path, offset=len(data) + 1) == b""
    assert await box.read_file(path, size=0) == b""
    assert leftovers(location) == []


async def test_content_may_come_from_anywhere(box: Sandbox, location: Path) -> None:
    data = noise(2 * MIB + 3)

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 300_000):
            yield data[start : start + 300_000]

    (location / "source").write_bytes(data)
    for content in (bytearray(data), memoryview(data), io.BytesIO(data), location / "source", parts()):
        await box.write_file(location / "target", content)
        assert (location / "target").read_bytes() == data
    await box.write_file(location / "text", "ünï\n")
    assert await box.read_text(location / "text") == "ünï\n"
    with pytest.raises(FileNotFound, match="local file /no/such/file"):
        await box.write_file(location / "target", Path("/no/such/file"))


async def test_a_file_of_proc_has_no_size_and_is_read(box: Sandbox) -> None:
    assert b"processor" in await box.read_file("/proc/cpuinfo")


async def test_a_file_too_large_for_memory_names_the_other_way(box: Sandbox, location: Path) -> None:
    (location / "big").write_bytes(bytes(5000))
    with pytest.raises(LimitReached, match=r"big: 5000 bytes are more than .* open_read"):
        await box.read_file(location / "big", max_bytes=4999)
    assert len(await box.read_file(location / "big", size=4999, max_bytes=4999)) == 4999


async def test_a_reader_that_stops_early_leaves_nothing_under_way(box: Sandbox, location: Path) -> None:
    (location / "big").write_bytes(noise(6 * MIB))
    before = asyncio.all_tasks()
    pieces = box.open_read(location / "big")
    assert len(await anext(pieces)) == FILE_PIECE_BYTES
    await pieces.aclose()
    assert asyncio.all_tasks() == before


async def test_mode_and_owner_stay(box: Sandbox, location: Path) -> None:
    path = location / "script"
    await box.write_file(path, "one", mode=0o750)
    before = path.stat()
    assert stat.S_IMODE(before.st_mode) == 0o750
    await box.write_file(path, "two")
    after = path.stat()
    assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)
    assert after.st_ino != before.st_ino, "it is a new file under the old name"
    await box.write_file(path, "three", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@needs_root
async def test_the_owner_of_a_replaced_file_stays(box: Sandbox, location: Path) -> None:
    path = location / "theirs"
    path.write_text("one")
    os.chown(path, 1234, 4321)
    await box.write_file(path, "two")
    found = path.stat()
    assert (path.read_text(), found.st_uid, found.st_gid) == ("two", 1234, 4321)


async def test_a_link_is_written_through(box: Sandbox, location: Path) -> None:
    (location / "real").write_text("old")
    (location / "link").symlink_to("real")
    (location / "dangling").symlink_to("made")
    for name in ("link", "dangling"):
        await box.write_file(location / name, "new")
    assert (location / "link").readlink() == Path("real")
    assert ((location / "real").read_text(), (location / "made").read_text()) == ("new", "new")


async def test_a_write_that_is_cancelled_leaves_the_old_file(box: Sandbox, location: Path) -> None:
    path = location / "file"
    path.write_text("old")
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield noise(2 * MIB)
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(box.write_file(path, endless()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert path.read_text() == "old"
    assert leftovers(location) == []


async def test_an_error_names_the_file_and_not_the_temporary_one(box: Sandbox, location: Path) -> None:
    (location / "source").write_text("x")
    missing, files = str(location / "none" / "a"), box.api.files
    for work in (
        files.write(missing, b"x", make_parents=False),
        files.make_link(missing, "target"),
        files.copy(str(location / "source"), missing),
    ):
        with pytest.raises(FileNotFound) as error:
            await work
        assert f"{missing}: no such file" in str(error.value)
        assert "holdfast-" not in str(error.value)


async def test_errors_name_the_path_and_are_pythons_own(box: Sandbox, location: Path) -> None:
    (location / "file").write_text("")
    (location / "full" / "inner").mkdir(parents=True)
    with pytest.raises(FileNotFound, match="/missing: no such file") as missing:
        await box.read_file(location / "missing")
    assert isinstance(missing.value, builtins.FileNotFoundError)
    with pytest.raises(IsADirectory) as directory:
        await box.read_file(location)
    assert isinstance(directory.value, builtins.IsADirectoryError)
    with pytest.raises(IsADirectory):
        await box.write_file(location, "x")
    with pytest.raises(NotADirectory) as no_directory:
        await box.list_dir(location / "file")
    assert isinstance(no_directory.value, builtins.NotADirectoryError)
    with pytest.raises(NotADirectory):
        await box.write_file(location / "file" / "below", b"")
    with pytest.raises(NotADirectory):
        await box.make_dir(location / "file" / "below")
    with pytest.raises(FileExists) as exists:
        await box.make_dir(location / "full", exist_ok=False)
    assert isinstance(exists.value, builtins.FileExistsError)
    with pytest.raises(FileExists):
        await box.make_dir(location / "file")
    with pytest.raises(FileError, match="full: the directory is not empty"):
        await box.remove(location / "full")
    with pytest.raises(FileNotFound):
        await box.write_file(location / "no" / "such", "x", make_parents=False)
    with pytest.raises(InvalidParams, match="NUL"):
        await box.stat("/a\0b")
    with pytest.raises(InvalidParams, match="empty"):
        await box.stat("")
    with pytest.raises(FileError, match="not a regular file"):
        await box.read_file("/dev/zero")


async def test_a_fifo_keeps_nobody_waiting(box: Sandbox, location: Path) -> None:
    os.mkfifo(location / "fifo")
    with pytest.raises(FileError, match="not a regular file"):
        await box.read_file(location / "fifo")
    with pytest.raises(FileError, match="not a regular file"):
        await box.write_file(location / "fifo", "x")
    assert (await box.stat(location / "fifo")).type == "fifo"


async def test_stat_tells_what_it_is(box: Sandbox, location: Path) -> None:
    (location / "file").write_bytes(b"12345")
    os.utime(location / "file", (1, 1234.5))
    (location / "file").chmod(0o640)
    (location / "link").symlink_to("file")
    info = await box.stat(location / "link")
    assert (info.type, info.size, info.mode, info.mtime, info.uid) == ("file", 5, 0o640, 1234.5, os.getuid())
    link = await box.stat(location / "link", follow=False)
    assert (link.type, link.target) == ("symlink", "file")
    assert await box.exists(location / "file")
    assert not await box.exists(location / "missing")
    assert await box.real_path(location / "missing" / ".." / "file") == str(location / "file")
    with pytest.raises(FileNotFound):
        await box.real_path(location / "missing", strict=True)
    assert not await box.exists(location / "file" / "below")


async def test_names_may_be_any_bytes(box: Sandbox, location: Path) -> None:
    for name in ODD_NAMES:
        await box.write_file(os.fsencode(location) + b"/" + name, name)
        assert (location / os.fsdecode(name)).read_bytes() == name
        (location / "links").mkdir(exist_ok=True)
        await box.api.files.make_link(str(location / "links" / "l"), os.fsdecode(name))
        assert (await box.stat(location / "links" / "l", follow=False)).target == os.fsdecode(name)
    listed = [os.fsencode(entry.name) for entry in await box.list_dir(location) if entry.type == "file"]
    assert listed == sorted(ODD_NAMES)
    for entry in await box.list_dir(location):
        if entry.type == "file":
            assert await box.read_file(location / entry.name) == os.fsencode(entry.name)


async def test_a_directory_is_listed_page_by_page(box: Sandbox, location: Path) -> None:
    names = sorted(f"{number:03}" for number in range(25))
    for name in names:
        (location / name).write_text(name)
    seen: list[str] = []
    more = True
    while more:
        page = await box.api.files.list(str(location), after=seen[-1] if seen else "", limit=10)
        assert len(page.entries) <= 10
        seen += [entry.name for entry in page.entries]
        more = page.more
    assert seen == names


async def test_a_tree_is_listed_in_order(box: Sandbox, location: Path) -> None:
    (location / "a" / "b").mkdir(parents=True)
    (location / "a" / "b" / "f").write_text("")
    (location / "a.txt").write_text("")
    (location / "loop").symlink_to(".")
    entries = await box.list_dir(location, recursive=True)
    assert [entry.name for entry in entries] == ["a", "a/b", "a/b/f", "a.txt", "loop"]
    assert [entry.type for entry in entries] == ["directory", "directory", "file", "file", "symlink"]


async def test_directories_are_made_moved_copied_and_removed(box: Sandbox, location: Path) -> None:
    await box.make_dir(location / "a" / "b", mode=0o711)
    assert stat.S_IMODE((location / "a" / "b").stat().st_mode) == 0o711
    with pytest.raises(FileNotFound):
        await box.make_dir(location / "x" / "y", parents=False)
    await box.write_file(location / "a" / "f", "content", mode=0o755)
    (location / "a" / "l").symlink_to("f")
    await box.copy(location / "a", location / "c", recursive=True)
    assert ((location / "c" / "f").read_text(), (location / "c" / "l").readlink()) == ("content", Path("f"))
    assert stat.S_IMODE((location / "c" / "f").stat().st_mode) == 0o755
    with pytest.raises(IsADirectory):
        await box.copy(location / "a", location / "d")
    with pytest.raises(FileError, match="into itself"):
        await box.copy(location / "a", location / "a" / "b" / "c", recursive=True)
    await box.move(location / "c", location / "moved")
    assert (location / "moved" / "f").exists()
    await box.remove(location / "moved" / "l")
    assert (location / "moved" / "f").exists(), "a link is removed, not what it leads to"
    await box.remove(location / "moved", recursive=True)
    assert not (location / "moved").exists()
    with pytest.raises(FileNotFound):
        await box.remove(location / "moved")
    await box.remove(location / "moved", missing_ok=True)


# --- as another user ----------------------------------------------------------------------------------------------


@needs_root
async def test_files_belong_to_the_user(box: Sandbox, location: Path) -> None:
    data = noise(2 * MIB + 1)
    for path, content in ((location / "small", b"x"), (location / "large", data), (location / "d" / "e", b"y")):
        await box.write_file(path, content, user=NOBODY)
        assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)
        assert await box.read_file(path, user=NOBODY) == content
    assert (location / "d").stat().st_uid == 65534
    assert leftovers(location) == []


@needs_root
async def test_a_user_gets_at_nothing_that_is_not_his(box: Sandbox, location: Path) -> None:
    (location / "secret").write_text("s")
    (location / "secret").chmod(0o600)
    (location / "closed").mkdir(mode=0o700)
    (location / "closed" / "inner").write_text("s")
    own = f"/proc/{os.getpid()}"
    for path in (
        location / "secret",
        location / "closed" / "inner",
        f"{own}/environ",
        f"{own}/fd/0",
        f"{own}/cwd/x",
    ):
        with pytest.raises(PermissionRefused):
            await box.read_file(path, user=NOBODY)
    with pytest.raises(PermissionRefused) as refused:
        await box.write_file(location / "secret", "mine", user=NOBODY)
    assert isinstance(refused.value, builtins.PermissionError)
    with pytest.raises(PermissionRefused):
        await box.list_dir(location / "closed", user=NOBODY)
    with pytest.raises(PermissionRefused):
        await box.write_file(location / "closed" / "new", "x", user=NOBODY)
    with pytest.raises(PermissionRefused):
        await box.remove(location / "closed", recursive=True, user=NOBODY)
    # Descriptors of the server's process cannot be opened by their number either.
    for number in range(12):
        with pytest.raises((PermissionRefused, FileNotFound, FileError)):
            await box.read_file(f"/proc/self/fd/{number}", user=NOBODY)
    assert (location / "secret").read_text() == "s"
    with pytest.raises(UnknownUser):
        await box.read_file("/etc/passwd", user="no-such-user")


@needs_root
async def test_a_user_writes_in_place_where_no_file_can_be_made(box: Sandbox, location: Path) -> None:
    closed = location / "closed"
    closed.mkdir(mode=0o755)
    path = closed / "file"
    path.write_text("a longer content")
    path.chmod(0o666)
    before = path.stat()
    await box.write_file(path, "new", user=NOBODY)
    assert (path.read_text(), path.stat().st_ino, path.stat().st_uid) == ("new", before.st_ino, 0)


# --- when the connection breaks -----------------------------------------------------------------------------------


async def test_files_cross_a_connection_that_breaks(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far enough apart that a window of pieces gets through: what is unanswered is sent again from its beginning.
    monkeypatch.setattr(cutting_proxy, "RANGES", ((1, 400), (400, 20_000), (6 * MIB, 12 * MIB)))
    data = noise(24 * MIB)
    proxy_path = f"{server.directory}/files-proxy.sock"
    async with cutting_proxy.cutting_unix(proxy_path, server.socket, seed=7) as proxy:
        box = Sandbox(RemoteExec(await open_connection(f"unix:{proxy_path}")))
        try:
            await box.write_file(tmp_path / "up", data)
            assert hashlib.sha256((tmp_path / "up").read_bytes()).digest() == hashlib.sha256(data).digest()
            assert await box.read_file(tmp_path / "up") == data
            for number in range(30):
                await box.make_dir(tmp_path / str(number), exist_ok=False)
                await box.move(tmp_path / str(number), tmp_path / f"moved-{number}")
                await box.remove(tmp_path / f"moved-{number}")
            assert proxy.cuts >= 3
        finally:
            proxy.peaceful = True
            await box.aclose()
    assert os.listdir(tmp_path) == ["up"]
