"""Bytes that were read from a terminal and not used yet: the next server finds exactly these."""

from __future__ import annotations

import os
import select
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.runtime.durability.terminal_reads import GATHER_BYTES, ReadBuffer, UnstoredRead


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    yield ours, theirs
    for fd in (ours, theirs):
        os.close(fd)


def test_what_was_read_is_found_by_the_next(tmp_path: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    path = str(tmp_path / "reads")
    buffer = ReadBuffer(path)
    assert buffer.unstored is None
    for number, text in enumerate((b"hello", b"a longer text\xff\xfe with bytes that are none", b"x"), 1):
        os.write(theirs, text)
        assert buffer.gather(ours, 1000, key=7, offset=10 * number) == (text, number)
        # The first was not closed: it died.
        after = ReadBuffer(path)
        assert after.unstored == UnstoredRead(number, 7, 10 * number, text)
        after.close()
    buffer.close()


def test_a_read_that_found_nothing_leaves_nothing(tmp_path: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    path = str(tmp_path / "reads")
    buffer = ReadBuffer(path)
    os.write(theirs, b"hello")
    buffer.gather(ours, 1000, key=7, offset=0)
    with pytest.raises(BlockingIOError):
        buffer.gather(ours, 1000, key=7, offset=5)
    after = ReadBuffer(path)
    assert after.unstored is None
    after.close()
    buffer.close()


def test_no_more_is_gathered_than_was_asked_for(tmp_path: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    buffer = ReadBuffer(str(tmp_path / "reads"))
    os.write(theirs, b"0123456789")
    assert buffer.gather(ours, 4, key=1, offset=0)[0] == b"0123"
    assert buffer.gather(ours, GATHER_BYTES, key=1, offset=4)[0] == b"456789"
    buffer.close()


def test_a_short_read_is_not_followed_by_another(
    tmp_path: Path, terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = terminal
    os.write(theirs, b"x")
    wait_until_readable(ours)
    counts: list[int] = []

    def readv(fd: int, buffers: list[memoryview]) -> int:
        counts.append(real(fd, buffers))
        return counts[-1]

    real = os.readv
    monkeypatch.setattr(os, "readv", readv)
    buffer = ReadBuffer(str(tmp_path / "reads"))
    assert buffer.gather(ours, GATHER_BYTES, key=1, offset=0)[0] == b"x"
    assert counts == [1]
    buffer.close()


def wait_until_readable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(60_000)


def test_the_end_of_a_terminal(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    os.write(theirs, b"last")
    os.close(theirs)
    buffer = ReadBuffer(str(tmp_path / "reads"))
    assert buffer.gather(ours, 1000, key=1, offset=0)[0] == b"last"
    assert buffer.gather(ours, 1000, key=1, offset=4)[0] == b""
    buffer.close()
    os.close(ours)
