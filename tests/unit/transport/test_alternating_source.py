"""Two sources of one channel: their frames alternate, and an empty source costs the other no turn."""

from __future__ import annotations

from collections import deque

from holdfast.transport.multiplexer import AlternatingSource


class Frames:
    """A source of given frames."""

    def __init__(self, *frames: bytes) -> None:
        self.frames = deque(frames)

    def next_frame(self) -> bytes | None:
        return self.frames.popleft() if self.frames else None


def test_frames_alternate_and_an_empty_source_is_passed_over() -> None:
    first, second = Frames(b"a1", b"a2", b"a3"), Frames(b"b1", b"b2")
    source = AlternatingSource(first, second)
    assert [source.next_frame() for _ in range(6)] == [b"a1", b"b1", b"a2", b"b2", b"a3", None]

    second.frames.extend((b"b3", b"b4"))
    assert source.next_frame() == b"b3"
    first.frames.append(b"a4")
    assert {source.next_frame(), source.next_frame()} == {b"a4", b"b4"}
    assert source.next_frame() is None
