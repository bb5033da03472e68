"""The expected output of a job, and the description of a difference. Pure.

Every byte is compared at its offset with the expected byte; a reported gap is counted, and is wrong
unless something was scarce while the job ran.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.types import Closed, Exited, ExitStatus, OutputChunk, OutputGap, ProcessEvent

#: How much of the two sides of a difference is shown.
_SHOWN_BYTES = 40


class Broken(AssertionError):
    """The invariant does not hold."""


def compare(what: str, got: bytes, expected: bytes, start: int = 0) -> None:
    """`got` must be what `expected` has from `start` on, as far as it goes."""
    wanted = expected[start : start + len(got)]
    if got == wanted:
        return
    at = next((i for i, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), len(wanted))
    if start + at >= len(expected):
        more = got[at : at + _SHOWN_BYTES]
        raise Broken(f"{what}: {len(got) - at} bytes too many after its end at {len(expected)}: {more!r}")
    shown = f"{got[at : at + _SHOWN_BYTES]!r} instead of {wanted[at : at + _SHOWN_BYTES]!r}"
    found = expected.find(got[at : at + _SHOWN_BYTES])
    hint = f"; these bytes belong to offset {found}" if found >= 0 and len(got) - at >= 8 else ""
    raise Broken(f"{what}: the first differing byte is at offset {start + at}: {shown}{hint}")


def same(what: str, got: bytes, expected: bytes) -> None:
    """All of it."""
    compare(what, got, expected)
    if len(got) < len(expected):
        raise Broken(f"{what}: ends at byte {len(got)} of {len(expected)}")


class Following:
    """Takes the events of one process in their order, and knows what they must be."""

    def __init__(self, what: str, expected: Mapping[str, bytes], status: ExitStatus) -> None:
        self._what = what
        self._expected = expected
        self._status = status
        self._ends = dict.fromkeys(expected, 0)
        self._seq = 0
        self._reported: list[str] = []
        #: Bytes that were compared, and bytes that were reported as lost.
        self.seen = 0
        self.lost = 0

    def take(self, event: ProcessEvent) -> None:
        match event:
            case OutputGap():
                self._in_order(event.stream, event.offset, event.length)
                self.lost += event.length
            case OutputChunk():
                self.number(event.seq)
                self._in_order(event.stream, event.offset, len(event.data))
                compare(f"{self._what}, {event.stream}", event.data, self._expected[event.stream], event.offset)
                self.seen += len(event.data)
            case Exited():
                self.number(event.seq)
                self._reported.append("exited")
                self.ended(event.status)
            case Closed():
                self.number(event.seq)
                self._reported.append("closed")

    def number(self, seq: int) -> None:
        # The two ends of a chunk with a lost middle have one number.
        if seq < self._seq or (seq == self._seq and not self.lost):
            raise Broken(f"{self._what}: number {seq} comes after number {self._seq}")
        self._seq = seq

    def ended(self, status: ExitStatus) -> None:
        if status != self._status:
            raise Broken(f"{self._what}: ended with {status} instead of {self._status}")

    def over(self) -> None:
        """Nothing more will come."""
        if self._reported != ["exited", "closed"]:
            raise Broken(f"{self._what}: told {self._reported} instead of its exit and its close, once each")
        self.all_printed()

    def all_printed(self) -> None:
        for stream, expected in self._expected.items():
            if self._ends[stream] != len(expected):
                raise Broken(f"{self._what}, {stream}: ends at byte {self._ends[stream]} of {len(expected)}")

    def _in_order(self, stream: str, offset: int, length: int) -> None:
        if stream not in self._ends:
            raise Broken(f"{self._what}: output on {stream}, which it does not have")
        if offset != self._ends[stream]:
            how = "there twice" if offset < self._ends[stream] else "missing"
            where = f"offset {offset} comes after offset {self._ends[stream]}"
            raise Broken(f"{self._what}, {stream}: {where}: bytes are {how}")
        self._ends[stream] = offset + length
