"""`StreamChannel` on real socketpairs, pipes and files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast.errors import ConnectionLost
from holdfast.transport.channel import SpoolFrame
from holdfast.transport.stream import StreamChannel, from_socket
from holdfast.wire.framing import Oversized

LIMIT = 8 * 1024 * 1024
MIB = 1024 * 1024


class Recorder:
    """A receiver that keeps what came, and lets a test wait for it."""

    def __init__(self) -> None:
        self.messages: list[bytes | Oversized] = []
        self.lost: list[Exception | None] = []
        self._changed = asyncio.Event()

    def message_received(self, message: bytes | Oversized) -> None:
        self.messages.append(message if isinstance(message, Oversized) else bytes(message))
        self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)
        self._changed.set()

    async def until_messages(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.messages) < count:
                self._changed.clear()
                await self._changed.wait()

    async def until_lost(self) -> Exception | None:
        async with asyncio.timeout(60):
            while not self.lost:
                self._changed.clear()
                await self._changed.wait()
        return self.lost[0]


class Frames:
    """A source that gives these frames, and counts the reads."""

    def __init__(self, frames: list[bytes | SpoolFrame]) -> None:
        self.frames = iter(frames)
        self.given = 0
        self.calls = 0

    def next_frame(self) -> bytes | SpoolFrame | None:
        self.calls += 1
        frame = next(self.frames, None)
        self.given += frame is not None
        return frame


class Pair:
    """A channel at each end of a socketpair."""

    def __init__(self, lend: bool = False) -> None:
        one, two = socket.socketpair()
        self.left, self.right = Recorder(), Recorder()
        self.a = from_socket(one, self.left, description="a", max_message_bytes=LIMIT)
        self.b = from_socket(two, self.right, description="b", max_message_bytes=LIMIT, lend=lend)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    pair.a.close()
    pair.b.close()
    await pair.left.until_lost()
    await pair.right.until_lost()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    data = os.urandom(3 * MIB + 17)
    path = tmp_path / "spool"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    yield fd, data
    os.close(fd)


async def test_lines_then_lengths(pair: Pair) -> None:
    pair.a.send(b'{"a":1}')
    pair.a.use_lengths()
    pair.a.send(b"\x81\x01\x0a")

    def switch(message: bytes | Oversized) -> None:
        Recorder.message_received(pair.right, message)
        pair.b.use_lengths()

    pair.right.message_received = switch  # type: ignore[method-assign]
    await pair.right.until_messages(2)
    assert pair.right.messages == [b'{"a":1}', b"\x81\x01\x0a"]


async def test_copies_of_a_file_that_does_not_lend_its_pages(
    spool: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object) -> int:
        raise AssertionError("sendfile was used")

    monkeypatch.setattr(os, "sendfile", forbidden)
    fd, data = spool
    one, two = socket.socketpair()
    left, right = Recorder(), Recorder()
    a = from_socket(one, left, description="a", max_message_bytes=LIMIT)
    b = from_socket(two, right, description="b", max_message_bytes=LIMIT)
    a.use_lengths()
    b.use_lengths()
    a.set_source(Frames([SpoolFrame(b"head", fd, 0, len(data), lends_pages=False)]))
    await right.until_messages(1)
    assert right.messages == [b"head" + data]
    a.close()
    assert await right.until_lost() is None
    assert await left.until_lost() is None


@pytest.mark.parametrize("lend", [False, True])
async def test_large_messages_arrive_whole_and_in_order(lend: bool) -> None:
    pair = Pair(lend)
    pair.a.use_lengths()
    pair.b.use_lengths()
    sent = [os.urandom(size) for size in (1, 0, 5 * MIB, 40_000, 1 * MIB, 7, 6 * MIB)]
    for message in sent:
        pair.a.send(message)
    await pair.right.until_messages(len(sent))
    assert pair.right.messages == sent
    pair.a.close()
    assert await pair.right.until_lost() is None
    assert await pair.left.until_lost() is None


async def test_spool_frames_of_every_size(pair: Pair, spool: tuple[int, bytes]) -> None:
    fd, data = spool
    pair.a.use_lengths()
    pair.b.use_lengths()
    pieces = [(0, 10), (10, MIB), (3, 0), (MIB, 2 * MIB), (17, 65_536), (5, 65_537)]
    pair.a.set_source(Frames([SpoolFrame(b"head", fd, offset, length) for offset, length in pieces]))
    await pair.right.until_messages(len(pieces))
    assert pair.right.messages == [b"head" + data[offset : offset + length] for offset, length in pieces]


async def test_control_overtakes_output_between_frames(pair: Pair, spool: tuple[int, bytes]) -> None:
    """A reader that reads nothing stalls the output in a frame; a control message goes right behind that frame."""
    fd, data = spool
    pair.a.use_lengths()
    pair.b.use_lengths()
    pair.b.pause_reading()
    frames = Frames([SpoolFrame(b"", fd, 0, MIB) for _ in range(100)])
    pair.a.set_source(frames)
    for _ in range(50):
        await asyncio.sleep(0)
    begun = frames.given
    assert 0 < begun < 100
    pair.a.send(b"control")
    assert pair.a.queued_bytes == 4 + len(b"control")
    pair.b.resume_reading()
    await pair.a.drain()
    await pair.right.until_messages(101)
    assert pair.right.messages.index(b"control") == begun
    assert pair.right.messages.count(data[:MIB]) == 100


async def test_a_held_frame_needs_its_file_no_more(pair: Pair, tmp_path: Path) -> None:
    """The source may give the bytes back while the rest of the frame waits for the reader."""
    data = os.urandom(7 * MIB)
    (tmp_path / "gone").write_bytes(data)
    fd = os.open(tmp_path / "gone", os.O_RDWR)
    pair.a.use_lengths()
    pair.b.use_lengths()
    pair.b.pause_reading()
    pair.a.set_source(Frames([SpoolFrame(b"head", fd, 0, len(data)), b"next"]))
    await asyncio.sleep(0)
    pair.a.hold_frame()
    held_from = len(data) - MIB
    os.pwrite(fd, bytes(MIB), held_from)
    os.close(fd)
    pair.b.resume_reading()
    await pair.right.until_messages(2)
    assert pair.right.messages == [b"head" + data, b"next"]


async def test_a_slow_reader_bounds_what_is_taken_from_the_source(pair: Pair) -> None:
    pair.a.use_lengths()
    pair.b.use_lengths()
    pair.b.pause_reading()
    frames = Frames([os.urandom(MIB) for _ in range(20)])
    pair.a.set_source(frames)
    for _ in range(100):
        await asyncio.sleep(0)
    assert frames.given < 12
    pair.b.resume_reading()
    await pair.right.until_messages(20)


async def test_an_empty_source_is_called_again_only_after_a_wake(pair: Pair) -> None:
    frames = Frames([b"{}"])
    pair.a.set_source(frames)
    assert frames.calls == 2
    pair.a.send(b"{}")
    await pair.right.until_messages(2)
    assert frames.calls == 2
    frames.frames = iter([b"{}"])
    pair.a.wake()
    await pair.right.until_messages(3)
    assert frames.calls == 4


async def test_a_spool_that_is_too_short_ends_the_connection(pair: Pair, spool: tuple[int, bytes]) -> None:
    fd, data = spool
    pair.a.use_lengths()
    pair.b.use_lengths()
    pair.a.set_source(Frames([SpoolFrame(b"head", fd, len(data) - MIB, 2 * MIB)]))
    error = await pair.left.until_lost()
    assert isinstance(error, OSError)
    assert "spool" in str(error)
    await pair.right.until_lost()
    assert pair.right.messages == []


async def test_without_sendfile_the_bytes_are_the_same(
    pair: Pair, spool: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", refuse)
    fd, data = spool
    pair.a.use_lengths()
    pair.b.use_lengths()
    pair.a.set_source(Frames([SpoolFrame(b"head", fd, 1, 3 * MIB)]))
    await pair.right.until_messages(1)
    assert pair.right.messages == [b"head" + data[1 : 1 + 3 * MIB]]


async def test_an_oversized_message_is_told_and_the_next_one_arrives(pair: Pair) -> None:
    pair.a.use_lengths()
    pair.b.use_lengths()
    pair.a.send(b"x" * (LIMIT + 1))
    pair.a.send(b"after")
    await pair.right.until_messages(2)
    oversized, after = pair.right.messages
    assert isinstance(oversized, Oversized)
    assert (oversized.size, oversized.limit) == (LIMIT + 1, LIMIT)
    assert after == b"after"


async def test_a_half_closed_peer_gets_what_was_queued_and_then_the_end() -> None:
    ours, theirs = socket.socketpair()
    receiver = Recorder()
    channel = from_socket(ours, receiver, description="half", max_message_bytes=LIMIT)
    theirs.sendall(b'{"id":1}\n')
    theirs.shutdown(socket.SHUT_WR)
    await receiver.until_messages(1)
    channel.send(b"answer")
    assert await receiver.until_lost() is None
    assert theirs.recv(100) == b"answer\n"
    assert theirs.recv(100) == b""
    theirs.close()
    channel.close()
    await asyncio.sleep(0)
    assert receiver.lost == [None]


async def test_last_words_are_read_before_a_failed_write_is_told() -> None:
    ours, theirs = socket.socketpair()
    receiver = Recorder()
    channel = from_socket(ours, receiver, description="refused", max_message_bytes=LIMIT)
    channel.pause_reading()
    theirs.sendall(b'{"error":"too many connections"}\n')
    theirs.close()
    channel.resume_reading()
    channel.send(b"initialize")
    await receiver.until_lost()
    assert receiver.messages == [b'{"error":"too many connections"}']
    assert len(receiver.lost) == 1


async def test_drain_fails_when_the_other_end_goes(pair: Pair) -> None:
    pair.b.pause_reading()
    pair.a.send(b"x" * (30 * MIB))
    waiting = asyncio.create_task(pair.a.drain())
    await asyncio.sleep(0)
    pair.b.close()
    with pytest.raises(ConnectionLost, match="a:"):
        await waiting


async def test_close_is_told_once_and_silences_the_channel(pair: Pair) -> None:
    pair.a.send(b"one")
    pair.a.close()
    pair.a.send(b"two")
    assert pair.left.lost == []
    assert await pair.left.until_lost() is None
    assert await pair.right.until_lost() is None
    assert pair.right.messages == [b"one"]
    pair.a.close()
    await asyncio.sleep(0)
    assert pair.left.lost == [None]


async def test_closing_in_the_middle_of_a_batch_delivers_nothing_more(pair: Pair) -> None:
    def close(message: bytes | Oversized) -> None:
        Recorder.message_received(pair.right, message)
        pair.b.close()

    pair.right.message_received = close  # type: ignore[method-assign]
    for _ in range(5):
        pair.a.send(b"again")
    await pair.right.until_lost()
    assert pair.right.messages == [b"again"]


async def test_two_pipes_with_spool_frames(spool: tuple[int, bytes]) -> None:
    fd, data = spool
    (read_a, write_b), (read_b, write_a) = os.pipe(), os.pipe()
    left, right = Recorder(), Recorder()
    a = StreamChannel(read_a, write_a, left, description="a", max_message_bytes=LIMIT)
    b = StreamChannel(read_b, write_b, right, description="b", max_message_bytes=LIMIT)
    a.use_lengths()
    b.use_lengths()
    a.set_source(Frames([SpoolFrame(b"h", fd, 0, len(data))]))
    await right.until_messages(1)
    (message,) = right.messages
    assert isinstance(message, bytes)
    assert hashlib.sha256(message).digest() == hashlib.sha256(b"h" + data).digest()
    b.send(b"back")
    await left.until_messages(1)
    assert left.messages == [b"back"]
    a.close()
    assert await left.until_lost() is None
    assert await right.until_lost() is None


async def test_regular_files_which_epoll_refuses(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"".join(b"%d\n" % n for n in range(50_000)))
    receiver = Recorder()
    channel = StreamChannel(
        os.open(tmp_path / "in", os.O_RDONLY),
        os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT),
        receiver,
        description="files",
        max_message_bytes=LIMIT,
    )
    source = Frames([b"y" * MIB for _ in range(5)])
    channel.set_source(source)
    assert await receiver.until_lost() is None
    assert receiver.messages == [b"%d" % n for n in range(50_000)]
    assert source.given >= 1
