"""Where the spool goes: the first place with enough room, else the one with most; nowhere is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import ResourceExhausted
from holdfast.runtime.local import LocalExec
from holdfast.runtime.output import spool as spool_place
from holdfast.runtime.output.output_log import Spool
from holdfast.runtime.output.spool import choose_directory, file_system_of, room_in
from holdfast.types import ProcessSpec

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("rooms", "chosen"),
    [
        ({"memory": 900 * MIB, "disk": 5_000 * MIB}, "memory"),
        ({"memory": 64 * MIB, "disk": 5_000 * MIB}, "disk"),
        ({"memory": 64 * MIB, "disk": 10 * MIB}, "memory"),
        ({"memory": None, "disk": 0}, "disk"),
        ({"memory": 0, "small": 100 * MIB, "disk": 300 * MIB}, "disk"),
    ],
)
def test_the_first_with_enough_room_or_the_one_with_most(
    rooms: dict[str, int | None], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_place, "room_in", rooms.get)
    assert choose_directory(256 * MIB, list(rooms)) == chosen


def test_no_place_at_all_is_told() -> None:
    with pytest.raises(ResourceExhausted, match="none of /nowhere can be written; set spool_directory"):
        choose_directory(1, ["/nowhere"])


def test_room_without_inodes_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (room_in(str(tmp_path)) or 0) > 0
    monkeypatch.setattr(spool_place, "WANTED_FILES", 1 << 62)
    found = os.statvfs(tmp_path)
    assert room_in(str(tmp_path)) == (0 if found.f_files else found.f_bavail * found.f_frsize)


def test_what_a_spool_is_on() -> None:
    assert file_system_of("/proc/self").kind == "proc"


async def test_how_much_is_kept_is_looked_at_again_when_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    full = [True]
    monkeypatch.setattr(Spool, "free", property(lambda spool: 0 if full[0] else 1 << 40))
    box = LocalExec()
    try:
        assert (await box.status()).spool_limit == 0
        full[0] = False  # others have removed their files
        await box.start(ProcessSpec("p", ("head", "-c", "100000", "/dev/zero")))
        await box.wait("p")
        assert len((await box.snapshot("p")).stdout) == 100_000
        assert (await box.status()).spool_limit > 100_000
    finally:
        await box.aclose()
