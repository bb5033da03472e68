"""Watched directories: every change becomes an event, in order and without a lost file; the same over every way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import holdfast
from holdfast import ExecServerConfig, Sandbox, WatchEvent
from holdfast.client.dial import open_connection
from holdfast.client.files.watch import DirectoryEvents
from holdfast.client.remote import RemoteExec
from holdfast.errors import (
    FileNotFound,
    InvalidParams,
    LimitReached,
    NotADirectory,
    PermissionRefused,
    UnknownWatch,
)
from holdfast.testing import FakeExec
from tests.contract import cutting_proxy
from tests.contract.test_files import NOBODY, ODD_NAMES, needs_root
from tests.support.servers import RunningServer

Seen = tuple[str, str, str | None]


async def until(events: DirectoryEvents, last: str) -> list[Seen]:
    """The events up to the one about the file `last`, without those that only repeat that a file was written."""
    seen: list[Seen] = []
    async for event in events:
        if event.kind not in ("modified", "written"):
            seen.append((event.kind, event.name, event.old_name))
        if event.name == last and event.kind in ("created", "root_removed"):
            return seen
    raise AssertionError(f"the events ended before {last!r}: {seen}")


@contextlib.asynccontextmanager
async def limited(**settings: object) -> AsyncIterator[Sandbox]:
    async with holdfast.connect("inprocess", config=ExecServerConfig(**settings)) as box:  # type: ignore[arg-type]
        yield box


async def test_a_file_is_followed_from_its_creation_to_its_end(box: Sandbox, tmp_path: Path) -> None:
    kinds: list[tuple[str, str]] = []
    (tmp_path / "old").mkdir()
    async with box.watch(tmp_path) as events:
        file = tmp_path / "file"
        file.write_bytes(b"content")
        file.chmod(0o600)
        file.unlink()
        (tmp_path / "old" / "unseen").touch()
        (tmp_path / "last").touch()
        async for event in events:
            kinds.append((event.kind, event.name))
            if event.name == "last":
                break
    assert kinds[:5] == [(kind, "file") for kind in ("created", "modified", "written", "attributes", "removed")]
    assert kinds[-1] == ("created", "last")
    assert not any("unseen" in name for _, name in kinds)


async def test_no_file_of_a_new_tree_is_lost(box: Sandbox, tmp_path: Path) -> None:
    """Files are created while the watch adds their directories."""
    made: set[str] = set()
    async with box.watch(tmp_path, recursive=True) as events:

        async def create() -> None:
            for a, b in itertools.product(range(6), range(6)):
                directory = tmp_path / f"d{a}" / f"e{b}"
                directory.mkdir(parents=True, exist_ok=True)
                made.update({f"d{a}", f"d{a}/e{b}"})
                for number in range(3):
                    (directory / str(number)).write_text("x")
                    made.add(f"d{a}/e{b}/{number}")
                await asyncio.sleep(0)
            (tmp_path / "last").touch()

        creating = asyncio.ensure_future(create())
        seen = await until(events, "last")
        await creating
        # The records of the last directories may come after that of the last file.
        created = [name for kind, name, _ in seen if kind == "created" and name != "last"]
        while made - set(created):
            event = await anext(events)
            if event.kind == "created":
                created.append(event.name)
    assert set(created) == made
    assert len(created) == len(made), "a file was reported twice"


async def test_a_rename_is_one_event_and_its_tree_is_followed(box: Sandbox, tmp_path: Path) -> None:
    watched, outside = tmp_path / "watched", tmp_path / "outside"
    (watched / "a" / "b").mkdir(parents=True)
    (outside / "in" / "deep").mkdir(parents=True)
    async with box.watch(watched, recursive=True) as events:
        (watched / "a").rename(watched / "z")
        (watched / "z" / "b" / "f").touch()
        assert await until(events, "z/b/f") == [("moved", "z", "a"), ("created", "z/b/f", None)]
        (watched / "z" / "b" / "f").rename(outside / "f")
        (watched / "1").touch()
        assert await until(events, "1") == [("removed", "z/b/f", None), ("created", "1", None)]
        (watched / "z" / "b").rename(outside / "b")
        (outside / "b" / "unseen").touch()
        (watched / "2").touch()
        assert await until(events, "2") == [("removed", "z/b", None), ("created", "2", None)]
        (outside / "in").rename(watched / "in")
        seen = await until(events, "in/deep")
        assert seen == [("created", "in", None), ("created", "in/deep", None)]
        (watched / "in" / "deep" / "f").touch()
        assert await until(events, "in/deep/f") == [("created", "in/deep/f", None)]


async def test_names_may_be_any_bytes(box: Sandbox, tmp_path: Path) -> None:
    async with box.watch(tmp_path) as events:
        for name in ODD_NAMES:
            os.mkdir(os.path.join(os.fsencode(tmp_path), name))
            assert os.fsencode((await anext(events)).name) == name


async def test_the_end_of_the_directory_ends_the_events(box: Sandbox, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for elsewhere in (None, tmp_path / "elsewhere"):
        root.mkdir()
        async with box.watch(root) as events:
            if elsewhere is None:
                root.rmdir()
            else:
                root.rename(elsewhere)
            assert [event.kind async for event in events] == ["root_removed"]


async def test_a_directory_that_is_in_use_ends_too(box: Sandbox, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    process = await box.start(["sh", "-c", "echo ready; read line"], cwd=root, stdin="open")
    async with process, box.watch(root) as events:
        await anext(aiter(process.output()))
        root.rmdir()
        assert [event.kind async for event in events] == ["root_removed"]


async def test_wrong_places_are_refused_by_name(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFound, match="nowhere"):
        await box.watch(tmp_path / "nowhere").start()
    with pytest.raises(NotADirectory, match="file"):
        await box.watch(tmp_path / "file").start()


@needs_root
async def test_another_user_is_refused_by_name(box: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match=f"watch: user '{NOBODY}'"):
        await box.watch(tmp_path, user=NOBODY).start()
    async with box.watch(tmp_path, user="0:0") as events:
        (tmp_path / "file").touch()
        assert await until(events, "file") == [("created", "file", None)]


async def test_a_broken_connection_loses_no_event(server: RunningServer, tmp_path: Path) -> None:
    path = f"{server.directory}/watch-proxy.sock"
    async with cutting_proxy.cutting_unix(path, server.socket, seed=3) as proxy:
        box = Sandbox(RemoteExec(await open_connection(f"unix:{path}")))
        proxy.peaceful = True
        async with box, box.watch(tmp_path) as events:
            (tmp_path / "0").mkdir()
            assert (await anext(events)).name == "0"
            for number in range(1, 30):
                (tmp_path / str(number)).mkdir()
                if number % 10 == 0:
                    proxy.cut_all()
                assert (await anext(events)).name == str(number)


# --- limits: in process, where a test can set them -----------------------------------------------------------


async def test_limits_are_named(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / str(number)).mkdir()
    async with limited(max_watched_directories=3) as box:
        with pytest.raises(LimitReached, match="max_watched_directories"):
            await box.watch(tmp_path, recursive=True).start()
        async with box.watch(tmp_path / "0", recursive=True) as events:
            for name in ("a", "b", "c"):
                (tmp_path / "0" / name).mkdir()
            seen = [await anext(events) for _ in range(4)]
            lost = [event for event in seen if event.kind == "overflow"]
            assert [event.name for event in lost] == ["c"]
            assert "max_watched_directories" in lost[0].reason
    async with limited(max_watches=1) as box, box.watch(tmp_path):
        with pytest.raises(LimitReached, match="max_watches"):
            await box.watch(tmp_path).start()


async def test_a_reader_that_is_too_slow_gets_an_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's queue is filled while the watch holds its few unread events; then the tree is watched anew."""
    monkeypatch.setattr("holdfast.runtime.files.directory_watch.MAX_UNREAD", 4)
    with open("/proc/sys/fs/inotify/max_queued_events") as setting:  # noqa: ASYNC230 - a file of the kernel
        queue = int(setting.read())
    if queue > 100_000:
        pytest.skip(f"needs fs.inotify.max_queued_events of at most 100000, not {queue}")
    first, second = tmp_path / "first", tmp_path / "second"
    first.touch()
    second.touch()
    async with limited() as box, box.watch(tmp_path, recursive=True) as events:
        for _ in range(queue // 2 + 10):
            # In turn, because the kernel joins equal records.
            os.utime(first)
            os.utime(second)
        (tmp_path / "new").mkdir()
        async for event in events:
            if event.kind == "overflow":
                break
        assert "queue" in event.reason
        (tmp_path / "new" / "file").touch()
        assert ("created", "new/file", None) in await until(events, "new/file")


async def test_a_watch_without_readers_is_removed_and_begun_again(tmp_path: Path) -> None:
    async with limited(abandoned_watch_seconds=0.01) as box, box.watch(tmp_path) as events:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()

        def check() -> None:
            if box.api.files._watches._watches:  # type: ignore[attr-defined]
                loop.call_later(0.005, check)
            else:
                gone.set()

        check()
        await gone.wait()
        assert (await anext(events)).kind == "overflow"
        (tmp_path / "file").mkdir()
        assert (await anext(events)).name == "file"
        with pytest.raises(UnknownWatch):
            await box.api.files.read_watch("unknown")


@needs_root
async def test_a_directory_without_permission_is_reported() -> None:
    """By a server of another user: root may read every directory."""
    # Not pytest's directory, which only its own user may enter.
    with tempfile.TemporaryDirectory(prefix="hf-watch-") as directory:
        secret = os.path.join(directory, "secret")
        os.chmod(directory, 0o755)
        os.mkdir(secret, 0o700)
        async with holdfast.connect("inprocess") as box:
            os.seteuid(65534)
            try:
                async with box.watch(directory, recursive=True) as events:
                    event = await anext(events)
                with pytest.raises(PermissionRefused):
                    await box.watch(secret).start()
            finally:
                os.seteuid(0)
    assert (event.kind, event.name) == ("overflow", "secret")
    assert "ermission" in event.reason


# --- the other faces ---------------------------------------------------------------------------------------------


def test_the_blocking_form(tmp_path: Path) -> None:
    with holdfast.sync.connect("inprocess") as box, box.watch(tmp_path, recursive=True) as events:
        (tmp_path / "a").mkdir()
        assert next(events) == WatchEvent(1, "created", "a", directory=True)


async def test_the_fake_reports_what_the_test_does() -> None:
    box = Sandbox(FakeExec())
    await box.make_dir("/srv/app")
    async with box.watch("/srv", recursive=True) as events:
        await box.write_file("/srv/app/f", b"x")
        await box.move("/srv/app/f", "/srv/app/g")
        await box.move("/srv/app/g", "/g")
        await box.remove("/srv", recursive=True)
        seen = [(event.kind, event.name, event.old_name) async for event in events]
    assert seen == [
        ("created", "app/f", None),
        ("written", "app/f", None),
        ("moved", "app/g", "app/f"),
        ("removed", "app/g", None),
        ("removed", "app", None),
        ("root_removed", "", None),
    ]
