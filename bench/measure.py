"""How a figure is taken: baseline and measured in turns, a figure a round, the median over the rounds.

Noise of a shared machine comes in bursts, so a burst hits neighbours in the same round and the ratio of a round
survives it. Pure arithmetic over what the contenders return.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")

#: A contender that returns latencies, in seconds.
Samples = Callable[[], Awaitable[list[float]]]

Unit = Literal["ms", "MB/s", "/s", "MB", "KB", "%"]
Bound = Literal["ratio at most", "ratio at least", "at most", "at least"]


class Scale(msgspec.Struct, frozen=True):
    """How much of everything a run measures."""

    rounds: int
    #: Runs of `/bin/true` in a round, one after the other, and sixteen at once.
    starts: int
    burst: int
    #: Lines through `cat` in a round.
    echoes: int
    #: Sizes are in MiB, the block that the producer writes.
    unix_blocks: int
    websocket_blocks: int
    flood_blocks: int
    #: Processes that run meanwhile.
    crowd: int
    lists: int
    #: Whole command-line calls in a round.
    calls: int
    #: Rounds of what takes seconds each: whole streams, and fresh servers with a crowd or a flood.
    stream_rounds: int
    server_rounds: int
    #: Sessions of a service that do nothing, for so long; and agents of one that all work at once.
    sessions: int
    idle_seconds: float
    agents: int
    #: Output of a terminal before its screen is drawn, in MB.
    screen_mb: int
    #: Calls of a model between two samples of the memory.
    model_calls: int


FULL = Scale(
    rounds=11,
    starts=40,
    burst=160,
    echoes=400,
    unix_blocks=1000,
    websocket_blocks=300,
    flood_blocks=2000,
    crowd=1000,
    lists=100,
    calls=10,
    stream_rounds=5,
    server_rounds=3,
    sessions=500,
    idle_seconds=15.0,
    agents=200,
    screen_mb=10,
    model_calls=10_000,
)
#: Shows that every row can be measured. Its figures mean little.
QUICK = Scale(
    rounds=2,
    starts=5,
    burst=16,
    echoes=40,
    unix_blocks=32,
    websocket_blocks=8,
    flood_blocks=64,
    crowd=100,
    lists=5,
    calls=1,
    stream_rounds=1,
    server_rounds=1,
    sessions=6,
    idle_seconds=1.0,
    agents=6,
    screen_mb=1,
    model_calls=200,
)


class Rounds(msgspec.Struct, frozen=True, rename="camel"):
    """One contender's figures, one a round; and, of latencies, the 99th percentile of all its samples."""

    figures: tuple[float, ...]
    p99: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.figures)


def latencies(rounds: Sequence[Sequence[float]]) -> Rounds:
    """Rounds of samples in seconds, as medians in milliseconds."""
    samples = sorted(sample for samples in rounds for sample in samples)
    worst = samples[min(len(samples) - 1, len(samples) * 99 // 100)]
    return Rounds(tuple(statistics.median(samples) * 1000 for samples in rounds), worst * 1000)


def figures(rounds: Sequence[float]) -> Rounds:
    """Rounds that are one figure each: a rate, a size."""
    return Rounds(tuple(rounds))


class Target(msgspec.Struct, frozen=True, rename="camel"):
    """The target of a row: a ratio to its baseline, or a figure."""

    bound: Bound
    limit: float


class Row(msgspec.Struct, frozen=True, rename="camel"):
    """One line of the table. `ratio` is the median of the rounds' ratios."""

    name: str
    what: str
    unit: Unit
    baseline_what: str
    baseline: float
    measured: float
    ratio: float
    baseline_p99: float | None
    measured_p99: float | None
    target: Target | None
    reached: bool | None
    note: str
    baseline_rounds: tuple[float, ...]
    measured_rounds: tuple[float, ...]


def compare(
    name: str,
    what: str,
    unit: Unit,
    *,
    baseline_what: str,
    baseline: Rounds,
    measured: Rounds,
    target: Target | None = None,
    note: str = "",
) -> Row:
    """The row for two contenders of the same rounds. Without a target it is shown for comparison."""
    ratio = statistics.median(
        ours / theirs for ours, theirs in zip(measured.figures, baseline.figures, strict=True)
    )
    return Row(
        name=name,
        what=what,
        unit=unit,
        baseline_what=baseline_what,
        baseline=baseline.median,
        measured=measured.median,
        ratio=ratio,
        baseline_p99=baseline.p99,
        measured_p99=measured.p99,
        target=target,
        reached=None if target is None else is_reached(target, ratio, measured.median),
        note=note,
        baseline_rounds=baseline.figures,
        measured_rounds=measured.figures,
    )


def is_reached(target: Target, ratio: float, measured: float) -> bool:
    figure = ratio if target.bound.startswith("ratio") else measured
    return figure >= target.limit if target.bound.endswith("at least") else figure <= target.limit


async def interleave(rounds: int, contenders: Mapping[str, Callable[[], Awaitable[T]]]) -> dict[str, list[T]]:
    """The results of each contender in each round. One round before the first is thrown away: it warms up."""
    taken: dict[str, list[T]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(-1, rounds):
        for name in names:
            result = await contenders[name]()
            if number >= 0:
                taken[name].append(result)
        # Each goes first in its turn, so that what one leaves behind does not always fall on the same next.
        names.append(names.pop(0))
    return taken


async def interleave_samples(
    rounds: int, turns: int, contenders: Mapping[str, Samples]
) -> dict[str, list[list[float]]]:
    """Rounds of latencies: a round has so many turns, and in each turn every contender adds its samples."""
    pooled: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, taken in (await interleave(turns, contenders)).items():
            pooled[name].append([sample for samples in taken for sample in samples])
    return pooled


def one(run: Callable[[], Awaitable[float]]) -> Samples:
    """A contender that adds one sample a turn."""

    async def sample() -> list[float]:
        return [await run()]

    return sample
