"""A disk that fills up under the service's database: writes are refused, nothing is damaged, and it recovers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.service.problems import Unavailable
from holdfast.service.store import Store
from tests.service.session_records import entry, record
from tests.support.file_systems import fill_blocks

DISK_BYTES = 2 * 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs stands for a disk: both answer ENOSPC."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path) -> Path:
    """Take every block that is free."""
    with open(disk / "filler", "wb") as file:
        fill_blocks(file.fileno())
    return disk / "filler"


async def written_until_full(store: Store) -> tuple[int, Unavailable]:
    """How many rows were written before the first refusal: the database's log has some room of its own."""
    for number in range(1_000):
        try:
            await store.append([entry("s1", "input", text=f"{number} {'x' * 4000}")])
        except Unavailable as refused:
            return number, refused
    raise AssertionError("the disk was never full")


async def test_a_full_disk_refuses_what_writes_and_damages_nothing(disk: Path) -> None:
    url = f"sqlite:///{disk}/service.db"
    store = await Store.open(url)
    await store.add_session(record("s1"), per_agent=10, total=10)
    filler = fill(disk)
    written, refused = await written_until_full(store)
    assert (refused.reason, "no room" in refused.message) == ("STORE_UNAVAILABLE", True)
    with pytest.raises(Unavailable, match="no room"):
        await store.add_session(record("s2", labels={"large": "x" * 8000}), per_agent=10, total=10)
    assert (await store.session("s1")).session_id == "s1"
    os.unlink(filler)
    rows = await store.append([entry("s1", "input", text="after")])
    assert rows[0].seq > written
    assert not (await store.verify()).breaks
    await store.close()


async def test_a_database_that_cannot_be_made_is_refused_in_one_line(disk: Path) -> None:
    fill(disk)
    with pytest.raises(Unavailable, match="disk") as refused:
        await Store.open(f"sqlite:///{disk}/service.db")
    assert "\n" not in refused.value.message
