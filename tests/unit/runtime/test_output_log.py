"""The output log against a plain model: every byte that it claims to keep is right, and it keeps no more."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.errors import ResourceExhausted
from holdfast.runtime.output import output_log
from holdfast.runtime.output.output_log import HEAD_FRACTION, PAGE, SLACK_FRACTION, OutputLog, Spool

RETAINED: Final = 64 * 1024
#: Everything that the streams of these tests print; the model of a log is its first `end` bytes.
PRINTED: Final = random.Random(7).randbytes(4 * 1024 * 1024)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(str(tmp_path))
    yield spool
    spool.remove()


class Pipe:
    """A real pipe that holds up to a megabyte."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.read)
        if self.write >= 0:
            os.close(self.write)

    def close_write(self) -> None:
        os.close(self.write)
        self.write = -1


def check(log: OutputLog) -> None:
    """The invariant at any time: each retained byte is the byte that was printed, at every offset."""
    lost = range(log.lost_start, log.lost_end)
    assert 0 <= lost.start <= lost.stop <= max(log.end, lost.stop)
    edges = {0, 1, log.end // 2, log.end - 1, log.end} | {
        edge + step for edge in (lost.start, lost.stop) for step in (-PAGE, -1, 0, 1, PAGE)
    }
    for offset in sorted(edge for edge in edges if 0 <= edge <= log.end):
        data = log.read(offset, 10_000)
        stop = lost.start if lost and offset < lost.start else log.end
        wanted = b"" if offset in lost else PRINTED[offset : min(stop, offset + 10_000)]
        assert data == wanted
        assert log.is_kept(offset, len(data)) or offset in lost
    if lost:
        assert log.contents() == PRINTED[: lost.start] + PRINTED[lost.stop : log.end]
    else:
        assert log.contents() == PRINTED[: log.end]
    assert log.kept_bytes == len(log.contents())


operations = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 40_000)),
    st.tuples(st.just("move"), st.integers(1, 40_000)),
    st.tuples(st.just("trim"), st.just(0)),
    st.tuples(st.just("floor"), st.integers(0, 100_000)),
    st.tuples(st.just("release"), st.integers(0, 100_000)),
    st.tuples(st.just("full"), st.integers(1, 5_000)),
    st.tuples(st.just("shrink"), st.just(0)),
)


@pytest.mark.parametrize("punching", [True, False])
@settings(max_examples=300)
@given(
    steps=st.lists(operations, min_size=8, max_size=30),
    retained=st.sampled_from([PAGE, 40_000, RETAINED, RETAINED + 1]),
)
def test_any_use_keeps_the_right_bytes(punching: bool, steps: list[tuple[str, int]], retained: int) -> None:
    with pytest.MonkeyPatch.context() as patch, Pipe() as pipe:
        if not punching:
            patch.setattr(output_log, "punch_hole", refuse_to_punch)
        spool = Spool()
        log = OutputLog(spool, retained)
        lost_before = range(0)
        for action, amount in steps:
            end = log.end
            data = PRINTED[end : end + amount]
            floor = None
            if action == "append":
                log.append(data)
            elif action == "move":
                sent = os.write(pipe.write, data)
                assert log.move_from(pipe.read) == sent
                data = data[:sent]
            elif action == "full":
                with pytest.MonkeyPatch.context() as full:
                    full.setattr(os, "pwrite", no_room)
                    log.append(data)
            elif action == "floor":
                floor = max(0, log.end - amount)
                log.trim(floor)
            elif action == "release":
                floor = max(0, log.end - amount)
                blocks = blocks_of(log)
                assert log.release(floor) == (blocks_of(log) < blocks)
            elif action == "shrink":
                log.shrink()
            else:
                log.trim()
            if action in ("append", "move", "full"):
                assert log.end == end + len(data)
            check(log)
            # The lost range keeps its start unless the head is given up; bytes at or after a
            # floor are not touched.
            lost = range(log.lost_start, log.lost_end)
            if lost_before:
                assert lost.start == lost_before.start or (action, lost.start) == ("release", 0)
                assert lost.stop >= lost_before.stop
            if floor is not None and lost != lost_before:
                assert lost.stop <= floor
            if lost:
                lost_before = lost
            if action in ("trim", "shrink"):
                assert log.kept_bytes <= log.capacity + log.capacity // SLACK_FRACTION
            assert spool.used == log.kept_bytes
            if log.fd >= 0:
                assert os.fstat(log.fd).st_blocks * 512 <= log.kept_bytes + 4 * PAGE + (0 if punching else retained)
        log.close()
        assert spool.used == 0
        assert os.listdir(spool.path) == []
        spool.remove()


def blocks_of(log: OutputLog) -> int:
    return 0 if log.fd < 0 else os.fstat(log.fd).st_blocks


def refuse_to_punch(fd: int, offset: int, length: int) -> None:
    raise OSError(errno.EOPNOTSUPP, "no holes here")


def no_room(fd: int, data: bytes, offset: int) -> int:
    raise OSError(errno.ENOSPC, "no room")


def test_the_head_and_the_latest_tail_are_kept(spool: Spool) -> None:
    log = OutputLog(spool, RETAINED)
    for at in range(0, 1_000_000, 1000):
        log.append(PRINTED[at : at + 1000])
        log.trim()
    head = RETAINED // HEAD_FRACTION
    assert log.lost_start == head
    assert log.end == 1_000_000
    assert RETAINED <= log.kept_bytes <= RETAINED + RETAINED // SLACK_FRACTION
    check(log)
    log.close()


def test_no_file_is_made_before_the_first_byte(spool: Spool) -> None:
    log = OutputLog(spool, RETAINED)
    with Pipe() as pipe:
        with pytest.raises(BlockingIOError):
            log.move_from(pipe.read)
        pipe.close_write()
        assert log.move_from(pipe.read) == 0
    assert (log.read(0, 10), log.contents(), log.kept_bytes) == (b"", b"", 0)
    log.trim()
    log.shrink()
    log.close()
    assert os.listdir(spool.path) == []


def test_a_move_takes_no_more_than_asked_and_tells_empty_from_ended(spool: Spool) -> None:
    log = OutputLog(spool, RETAINED)
    with Pipe() as pipe:
        os.write(pipe.write, PRINTED[:1000])
        assert log.move_from(pipe.read, 300) == 300
        assert log.move_from(pipe.read, 10_000) == 700
        with pytest.raises(BlockingIOError):
            log.move_from(pipe.read)
        pipe.close_write()
        assert log.move_from(pipe.read) == 0
    check(log)
    log.close()


class NotedLease:
    """Records the contents of the file at each copy."""

    def __init__(self, log: OutputLog, start: int, stop: int) -> None:
        self.log, self.start, self.stop = log, start, stop
        self.saved = b""
        log.leases.add(self)

    def rescue(self) -> None:
        self.saved = os.pread(self.log.fd, self.stop - self.start, self.start)


@pytest.mark.parametrize("way", ["punch", "rewrite", "full", "close"])
def test_who_is_sending_a_range_is_told_before_it_goes(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "rewrite":
        monkeypatch.setattr(output_log, "punch_hole", refuse_to_punch)
    log = OutputLog(spool, RETAINED)
    log.append(PRINTED[:RETAINED])
    lease = NotedLease(log, 10_000, 30_000)
    if way == "full":
        monkeypatch.setattr(os, "pwrite", no_room)
        log.append(b"x")
    elif way == "close":
        log.close()
    else:
        log.append(PRINTED[RETAINED : 4 * RETAINED])
        log.trim()
    assert lease.saved == PRINTED[10_000:30_000]
    assert not log.leases
    log.close()


def test_where_holes_are_refused_the_file_is_written_anew(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_log, "punch_hole", refuse_to_punch)
    log = OutputLog(spool, RETAINED)
    for at in range(0, 1_000_000, 5000):
        log.append(PRINTED[at : at + 5000])
        log.trim()
        assert len(os.listdir(spool.path)) == 1
        assert os.fstat(log.fd).st_blocks * 512 <= 2 * RETAINED
    check(log)
    log.close()


def test_a_new_file_that_finds_no_room_costs_the_tail_and_not_the_stream(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk without holes there is nowhere to copy the tail to."""
    monkeypatch.setattr(output_log, "punch_hole", refuse_to_punch)
    log = OutputLog(spool, RETAINED)
    log.append(PRINTED[: 4 * RETAINED])
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", no_room)
        log.trim()
    check(log)
    assert log.lost_start == RETAINED // HEAD_FRACTION
    assert spool.used == log.kept_bytes
    assert len(os.listdir(spool.path)) == 1
    assert os.fstat(log.fd).st_blocks * 512 <= 2 * RETAINED
    log.append(PRINTED[log.end : log.end + 100])
    check(log)
    log.close()


def test_an_error_of_the_kernel_that_is_no_lack_of_room_is_told(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.EIO, "broken")

    log = OutputLog(spool, RETAINED)
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="broken"):
        log.append(b"x")
    log.close()


def test_early_losses_leave_the_head_alone(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost range then begins inside a page with retained first bytes."""
    log = OutputLog(spool, RETAINED)
    log.append(PRINTED[:100])
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", no_room)
        log.append(PRINTED[100:150])
    assert (log.lost_start, log.lost_end) == (100, 150)
    for at in range(150, 500_000, 1000):
        log.append(PRINTED[at : min(at + 1000, 500_000)])
        log.trim()
    assert log.lost_start == 100
    check(log)
    assert spool.used == log.kept_bytes
    log.close()
    assert spool.used == 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_splice_without_room_drains_the_pipe_and_counts_it_as_lost(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(error, "no room")

    log = OutputLog(spool, RETAINED)
    log.append(PRINTED[:5000])
    with Pipe() as pipe:
        os.write(pipe.write, PRINTED[5000:9000])
        with monkeypatch.context() as full:
            full.setattr(os, "splice", refuse)
            assert log.move_from(pipe.read) == 4000
            with pytest.raises(BlockingIOError):
                log.move_from(pipe.read)
        assert (log.lost_start, log.lost_end, log.end) == (PAGE, 9000, 9000)
        os.write(pipe.write, PRINTED[9000:9100])
        assert log.move_from(pipe.read) == 100
    check(log)
    log.close()


def test_a_file_system_that_cannot_splice_is_copied_to(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EINVAL, "no splicing")

    monkeypatch.setattr(os, "splice", refuse)
    log = OutputLog(spool, RETAINED)
    with Pipe() as pipe:
        for at in range(0, 200_000, 10_000):
            os.write(pipe.write, PRINTED[at : at + 10_000])
            assert log.move_from(pipe.read) == 10_000
        pipe.close_write()
        assert log.move_from(pipe.read) == 0
    check(log)
    log.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small tmpfs")
def test_a_spool_that_is_really_full_loses_output_and_goes_on(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode()}")
    try:
        spool = Spool(str(tmp_path))
        log = OutputLog(spool, 1024 * 1024)
        with Pipe() as pipe:
            for at in range(0, 2_000_000, 50_000):
                os.write(pipe.write, PRINTED[at : at + 50_000])
                moved = 0
                while moved < 50_000:
                    moved += log.move_from(pipe.read)
                log.trim()
        assert log.end == 2_000_000
        assert log.truncated
        check(log)
        assert spool.used == log.kept_bytes
        log.append(PRINTED[2_000_000:2_400_000])
        check(log)
        log.append(PRINTED[log.end : log.end + 10])
        check(log)
        log.close()
        assert spool.used == 0
        spool.remove()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_spool_that_somebody_removed_costs_the_output_and_not_the_process(spool: Spool) -> None:
    """Cleaners of temporary directories exist; an error here would come back with every byte that is printed."""
    kept, late = OutputLog(spool, RETAINED), OutputLog(spool, RETAINED)
    kept.append(PRINTED[:100])
    shutil.rmtree(spool.path)
    with Pipe() as pipe:
        os.write(pipe.write, PRINTED[:100])
        assert late.move_from(pipe.read) == 100
    late.append(PRINTED[100:200])
    assert (late.end, late.kept_bytes, late.lost_end) == (200, 0, 200)
    check(late)
    check(kept)
    kept.close()
    late.close()
    assert spool.used == 0


def test_after_a_close_everything_is_lost_and_the_offsets_stay(spool: Spool) -> None:
    """A reader that is still there must get a gap, and no empty chunks."""
    log = OutputLog(spool, RETAINED)
    log.append(PRINTED[: 3 * RETAINED])
    log.trim()
    log.close()
    log.close()
    assert (log.end, log.lost_start, log.lost_end, log.kept_bytes) == (3 * RETAINED, 0, 3 * RETAINED, 0)
    assert not log.is_kept(0, 1)
    log.append(PRINTED[log.end : log.end + 50])
    assert (spool.used, log.kept_bytes) == (50, 50)
    check(log)
    log.close()
    assert spool.used == 0


def test_a_spool_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ResourceExhausted, match=str(file)):
        Spool(str(file))


def test_spool_files_are_private(spool: Spool) -> None:
    log = OutputLog(spool, RETAINED)
    log.append(b"secret")
    assert os.stat(spool.path).st_mode & 0o777 == 0o700
    assert os.fstat(log.fd).st_mode & 0o777 == 0o600
    log.close()
