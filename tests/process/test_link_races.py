"""Work on files while another process swaps directories for links: nothing is read or written elsewhere."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from holdfast.client.files.local_tree import LocalTree
from holdfast.config import ExecServerConfig
from holdfast.errors import HoldfastError, NotADirectory
from holdfast.runtime.files.local_files import LocalFiles
from holdfast.runtime.files.operations import open_in_place
from holdfast.types import FileAttributes

#: As the server's own user, and in the process of another, which only root can start.
USERS = [
    None,
    pytest.param("nobody", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")),
]
#: Operations that race with swaps: each ends by itself, and so many meet a swap in every place.
ROUNDS = 150


@pytest.fixture
async def files() -> AsyncIterator[LocalFiles]:
    files = LocalFiles(ExecServerConfig())
    yield files
    await files.aclose()


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """A directory `work` to work in, and `outside`, to which no work leads; any user may write to both."""
    for path in (*tmp_path.parents[:3], tmp_path):
        # pytest makes them for one user; another must be able to pass.
        with suppress(PermissionError):
            path.chmod(path.stat().st_mode | 0o055)
    for name in ("work", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    (tmp_path / "outside" / "file").write_text("of others")
    (tmp_path / "outside" / "file").chmod(0o666)
    return tmp_path


def contents(directory: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in directory.iterdir()}


def swap(location: Path) -> None:
    """The directory is moved away, and a link to the other one has its name."""
    (location / "work").rename(location / "moved")
    (location / "work").symlink_to(location / "outside")


@pytest.mark.parametrize("user", USERS)
async def test_an_upload_stays_in_the_directory_in_which_it_began(
    files: LocalFiles, location: Path, user: str | None
) -> None:
    path = str(location / "work" / "file")
    await files.write_piece(path, b"one ", upload_id="u1", offset=0, user=user)
    swap(location)
    (location / "outside" / ".file.holdfast-u1").write_text("planted")
    before = (location / "outside" / "file").stat()
    await files.write_piece(path, b"two", upload_id="u1", offset=4, user=user)
    wanted = FileAttributes(mode=0o600, mtime_ns=10**18)
    info = await files.commit(path, upload_id="u1", size=7, attributes=wanted, user=user)
    assert (info.size, info.mode, info.mtime_ns) == (7, 0o600, 10**18)
    assert contents(location / "moved") == {"file": "one two"}
    assert contents(location / "outside") == {"file": "of others", ".file.holdfast-u1": "planted"}
    after = (location / "outside" / "file").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@pytest.mark.parametrize("user", USERS)
async def test_an_upload_that_is_given_up_removes_its_own_file_alone(
    files: LocalFiles, location: Path, user: str | None
) -> None:
    path = str(location / "work" / "file")
    await files.write_piece(path, b"one ", upload_id="u2", offset=0, user=user)
    swap(location)
    (location / "outside" / ".file.holdfast-u2").write_text("planted")
    await files.abandon(path, upload_id="u2", user=user)
    assert contents(location / "moved") == {}
    assert contents(location / "outside") == {"file": "of others", ".file.holdfast-u2": "planted"}


@pytest.mark.parametrize("user", USERS)
async def test_a_link_that_takes_the_name_of_an_upload_is_replaced_and_not_followed(
    files: LocalFiles, location: Path, user: str | None
) -> None:
    target = location / "work" / "file"
    await files.write_piece(str(target), b"new", upload_id="u3", offset=0, user=user)
    target.symlink_to(location / "outside" / "file")
    wanted = FileAttributes(mode=0o640, mtime_ns=10**18)
    await files.commit(str(target), upload_id="u3", size=3, attributes=wanted, user=user)
    assert (target.is_symlink(), target.read_text()) == (False, "new")
    assert (location / "outside" / "file").read_text() == "of others"
    assert (location / "outside" / "file").stat().st_mtime_ns != 10**18


def test_a_file_that_is_written_in_place_is_the_one_that_was_looked_at(location: Path) -> None:
    target = location / "work" / "file"
    target.write_text("old")
    looked_at = target.stat()
    directory = os.open(location / "work", os.O_RDONLY | os.O_DIRECTORY)
    try:
        target.unlink()
        target.symlink_to(location / "outside" / "file")
        with pytest.raises(OSError, match="symbolic links") as link:
            open_in_place("file", directory, looked_at, "shown")
        assert link.value.errno == errno.ELOOP
        target.unlink()
        os.link(location / "outside" / "file", target)
        with pytest.raises(OSError, match="was replaced while it was written"):
            open_in_place("file", directory, looked_at, "shown")
    finally:
        os.close(directory)


@pytest.mark.parametrize("user", USERS)
async def test_a_copy_follows_no_link_in_its_target(files: LocalFiles, location: Path, user: str | None) -> None:
    (location / "source" / "sub").mkdir(parents=True)
    (location / "source" / "sub" / "file").write_text("copied")
    (location / "work" / "sub").symlink_to(location / "outside")
    before = (location / "outside").stat()
    with pytest.raises(NotADirectory, match="sub"):
        await files.copy(str(location / "source"), str(location / "work"), recursive=True, user=user)
    assert contents(location / "outside") == {"file": "of others"}
    after = (location / "outside").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@contextmanager
def swapping(directory: Path, outside: Path) -> Iterator[None]:
    """While the block runs, `directory` is a directory and a link to `outside` by turns."""
    over = threading.Event()
    aside, link = directory.with_name("aside"), directory.with_name("link")
    link.symlink_to(outside)

    def run() -> None:
        for _ in range(1_000_000):
            if over.is_set():
                return
            with suppress(FileNotFoundError, FileExistsError):
                directory.rename(aside)
                link.rename(directory)
                directory.rename(link)
                aside.rename(directory)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("user", USERS)
async def test_a_copy_reads_nothing_through_a_link_that_takes_a_directorys_name(
    files: LocalFiles, location: Path, user: str | None
) -> None:
    source = location / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "own").write_text("own")
    source.chmod(0o777)
    with swapping(source / "sub", location / "outside"):
        for number in range(ROUNDS):
            with suppress(HoldfastError):
                await files.copy(str(source), str(location / "work" / str(number)), recursive=True, user=user)
    copied = [path for path in (location / "work").rglob("file") if not path.parent.is_symlink()]
    assert copied == []
    assert any((location / "work").rglob("own"))


@pytest.mark.parametrize("user", USERS)
async def test_a_removal_leaves_what_a_link_leads_to(files: LocalFiles, location: Path, user: str | None) -> None:
    for _ in range(ROUNDS // 3):
        top = location / "work" / "top"
        (top / "sub").mkdir(parents=True)
        (top / "sub" / "own").write_text("own")
        for path in (top, top / "sub"):
            path.chmod(0o777)
        with swapping(top / "sub", location / "outside"), suppress(HoldfastError):
            await files.remove(str(top), recursive=True, user=user)
        await files.remove(str(top), recursive=True, missing_ok=True)
    assert contents(location / "outside") == {"file": "of others"}


def test_a_download_stays_in_the_directory_in_which_it_began(location: Path) -> None:
    tree = LocalTree(str(location / "work"))
    tree.make_directory(("before",))
    swap(location)
    file = tree.begin_file(("file",))
    file.write(b"new", 0)
    file.finish(0o600, 10**18)
    tree.make_directory(("sub",))
    tree.make_link(("link",), "file")
    tree.finish_directory((), 0o700, 10**18)
    tree.close()
    assert sorted(os.listdir(location / "moved")) == ["before", "file", "link", "sub"]
    assert contents(location / "outside") == {"file": "of others"}
    assert (location / "outside").stat().st_mode & 0o777 == 0o777
