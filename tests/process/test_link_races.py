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
def place(tmp_path: Path) -> Path:
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


def swap(place: Path) -> None:
    """The directory is moved away, and a link to the other one has its name."""
    (place / "work").rename(place / "moved")
    (place / "work").symlink_to(place / "outside")


@pytest.mark.parametrize("user", USERS)
async def test_an_upload_stays_in_the_directory_in_which_it_began(
    files: LocalFiles, place: Path, user: str | None
) -> None:
    path = str(place / "work" / "file")
    await files.write_piece(path, b"one ", upload_id="u1", offset=0, user=user)
    swap(place)
    (place / "outside" / ".file.holdfast-u1").write_text("planted")
    before = (place / "outside" / "file").stat()
    await files.write_piece(path, b"two", upload_id="u1", offset=4, user=user)
    wanted = FileAttributes(mode=0o600, mtime_ns=10**18)
    info = await files.commit(path, upload_id="u1", size=7, attributes=wanted, user=user)
    assert (info.size, info.mode, info.mtime_ns) == (7, 0o600, 10**18)
    assert contents(place / "moved") == {"file": "one two"}
    assert contents(place / "outside") == {"file": "of others", ".file.holdfast-u1": "planted"}
    after = (place / "outside" / "file").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@pytest.mark.parametrize("user", USERS)
async def test_an_upload_that_is_given_up_removes_its_own_file_alone(
    files: LocalFiles, place: Path, user: str | None
) -> None:
    path = str(place / "work" / "file")
    await files.write_piece(path, b"one ", upload_id="u2", offset=0, user=user)
    swap(place)
    (place / "outside" / ".file.holdfast-u2").write_text("planted")
    await files.abandon(path, upload_id="u2", user=user)
    assert contents(place / "moved") == {}
    assert contents(place / "outside") == {"file": "of others", ".file.holdfast-u2": "planted"}


@pytest.mark.parametrize("user", USERS)
async def test_a_link_that_takes_the_name_of_an_upload_is_replaced_and_not_followed(
    files: LocalFiles, place: Path, user: str | None
) -> None:
    target = place / "work" / "file"
    await files.write_piece(str(target), b"new", upload_id="u3", offset=0, user=user)
    target.symlink_to(place / "outside" / "file")
    wanted = FileAttributes(mode=0o640, mtime_ns=10**18)
    await files.commit(str(target), upload_id="u3", size=3, attributes=wanted, user=user)
    assert (target.is_symlink(), target.read_text()) == (False, "new")
    assert (place / "outside" / "file").read_text() == "of others"
    assert (place / "outside" / "file").stat().st_mtime_ns != 10**18


def test_a_file_that_is_written_in_place_is_the_one_that_was_looked_at(place: Path) -> None:
    target = place / "work" / "file"
    target.write_text("old")
    looked_at = target.stat()
    directory = os.open(place / "work", os.O_RDONLY | os.O_DIRECTORY)
    try:
        target.unlink()
        target.symlink_to(place / "outside" / "file")
        with pytest.raises(OSError, match="symbolic links") as link:
            open_in_place("file", directory, looked_at, "shown")
        assert link.value.errno == errno.ELOOP
        target.unlink()
        os.link(place / "outside" / "file", target)
        with pytest.raises(OSError, match="was replaced while it was written"):
            open_in_place("file", directory, looked_at, "shown")
    finally:
        os.close(directory)


@pytest.mark.parametrize("user", USERS)
async def test_a_copy_follows_no_link_in_its_target(files: LocalFiles, place: Path, user: str | None) -> None:
    (place / "source" / "sub").mkdir(parents=True)
    (place / "source" / "sub" / "file").write_text("copied")
    (place / "work" / "sub").symlink_to(place / "outside")
    before = (place / "outside").stat()
    with pytest.raises(NotADirectory, match="sub"):
        await files.copy(str(place / "source"), str(place / "work"), recursive=True, user=user)
    assert contents(place / "outside") == {"file": "of others"}
    after = (place / "outside").stat()
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
    files: LocalFiles, place: Path, user: str | None
) -> None:
    source = place / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "own").write_text("own")
    source.chmod(0o777)
    with swapping(source / "sub", place / "outside"):
        for number in range(ROUNDS):
            with suppress(HoldfastError):
                await files.copy(str(source), str(place / "work" / str(number)), recursive=True, user=user)
    copied = [path for path in (place / "work").rglob("file") if not path.parent.is_symlink()]
    assert copied == []
    assert any((place / "work").rglob("own"))


@pytest.mark.parametrize("user", USERS)
async def test_a_removal_leaves_what_a_link_leads_to(files: LocalFiles, place: Path, user: str | None) -> None:
    for _ in range(ROUNDS // 3):
        top = place / "work" / "top"
        (top / "sub").mkdir(parents=True)
        (top / "sub" / "own").write_text("own")
        for path in (top, top / "sub"):
            path.chmod(0o777)
        with swapping(top / "sub", place / "outside"), suppress(HoldfastError):
            await files.remove(str(top), recursive=True, user=user)
        await files.remove(str(top), recursive=True, missing_ok=True)
    assert contents(place / "outside") == {"file": "of others"}


def test_a_download_stays_in_the_directory_in_which_it_began(place: Path) -> None:
    tree = LocalTree(str(place / "work"))
    tree.make_directory(("before",))
    swap(place)
    file = tree.begin_file(("file",))
    file.write(b"new", 0)
    file.finish(0o600, 10**18)
    tree.make_directory(("sub",))
    tree.make_link(("link",), "file")
    tree.finish_directory((), 0o700, 10**18)
    tree.close()
    assert sorted(os.listdir(place / "moved")) == ["before", "file", "link", "sub"]
    assert contents(place / "outside") == {"file": "of others"}
    assert (place / "outside").stat().st_mode & 0o777 == 0o777
