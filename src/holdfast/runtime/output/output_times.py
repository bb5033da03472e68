"""When the output of a job was printed: a bounded list of times with the ends of its streams. Pure memory.

A time stands for the output after it. Times are at least `resolution` seconds apart: output in that interval has
the time of its first byte. When the list is full, the resolution doubles and the times between are dropped: a job
that prints every 0.1 s for a day has one time for each 26 s. The error is less than twice the resolution, because
the time that stood for a dropped one may be dropped later.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final

#: 24 bytes each: 96 KiB for a job that prints all the time, and much less for others.
MAX_TIMES: Final = 4_096
#: Shorter than a person distinguishes, and 7 minutes of steady output before the first reduction.
FIRST_RESOLUTION: Final = 0.1


class OutputTimes:
    """Times of the output of the two streams of a job, by offset. The slot of stderr is 1, of the others 0."""

    __slots__ = ("_at", "_ends", "resolution")

    def __init__(self) -> None:
        self.resolution = FIRST_RESOLUTION
        self._at = array("d")
        #: For each slot the end of the stream before the output of that time.
        self._ends = (array("Q"), array("Q"))

    def add(self, at: float, first: int, second: int) -> None:
        """Note that output follows these ends at the time `at`; a clock that was set back counts as not moved."""
        if self._at and at - self._at[-1] < self.resolution:
            return
        self._at.append(at)
        self._ends[0].append(first)
        self._ends[1].append(second)
        if len(self._at) > MAX_TIMES:
            self._reduce()

    def between(self, slot: int, start: int, end: int) -> list[tuple[int, float]]:
        """Return the times of a range of a stream: the offset from which each holds; empty if none is known."""
        ends = self._ends[slot]
        index = bisect_right(ends, start) - 1
        if index < 0:
            return []
        found = [(start, self._at[index])]
        for later in range(index + 1, len(ends)):
            if ends[later] >= end:
                break
            if ends[later] == found[-1][0]:
                found.pop()  # only the other stream printed in between
            found.append((ends[later], self._at[later]))
        return found

    def _reduce(self) -> None:
        while len(self._at) > MAX_TIMES // 2:
            self.resolution *= 2
            kept = [0]
            for index in range(1, len(self._at)):
                if self._at[index] - self._at[kept[-1]] >= self.resolution:
                    kept.append(index)
            self._at = array("d", (self._at[index] for index in kept))
            first, second = self._ends
            self._ends = (array("Q", (first[i] for i in kept)), array("Q", (second[i] for i in kept)))
