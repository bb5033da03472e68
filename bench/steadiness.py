"""Whether a program grows under steady work: samples, the slope through them, a table and a plot.

Arithmetic, but for the two files that it writes.

A program that was started again is another program, with memory of its own. So a slope is fitted within each life,
one slope for all lives of a program, and what lives begin with is compared from life to life.

An allocator approaches its largest size for an hour, so a slope through a long life shows that approach. Where a
life was sampled for an hour and a half, memory is judged by the halves of its last hour: a program that levels off
has equal ones.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

import msgspec

#: Loading, caches and retention are complete after so many seconds of a life: a hundred ended processes
#: and closed shells take two minutes. The ledger has been compacted by then, too, and the allocator keeps
#: what that took.
WARM_UP_SECONDS: Final = 200.0
#: A life with so many samples has a last hour that is not its first.
LONG_SECONDS: Final = 5400.0
LAST_SECONDS: Final = 3600.0


class Sample(msgspec.Struct, frozen=True):
    """One sample of one program. `life` counts how often it was started again."""

    at: float
    who: str
    life: int
    rss_kb: float
    #: The part of it that no file backs: the kernel maps and drops pages of files as it sees fit.
    anonymous_kb: float
    descriptors: int
    threads: int
    #: Size of the server's spool, its ledger included.
    spool_kb: float


class Quantity(msgspec.Struct, frozen=True):
    """Something that is not to grow, and by how much it may seem to."""

    field: str
    name: str
    unit: str
    scale: float
    #: Growth over the whole run that cannot be distinguished from noise.
    tolerance: float
    #: The most by which the second half of a last hour may exceed the first; None: the slope decides.
    plateau: float | None = None


#: Memory: pages that the allocator gives back later, and a ledger that is being compacted, come to a megabyte or
#: two; a leak of 100 bytes an operation is more in half an hour. Descriptors and spool go up and down with what
#: happens to run, and a slope through that is not exactly flat; one descriptor a minute is a leak and shows.
#: Threads come one at a time. Between halves of an hour, 1 MB is the rate of 4 MB in two hours.
QUANTITIES: Final = (
    Quantity("rss_kb", "RSS", "MB", 1e-3, 4.0, 1.0),
    Quantity("anonymous_kb", "anonymous", "MB", 1e-3, 4.0, 1.0),
    Quantity("descriptors", "descriptors", "", 1.0, 10.0),
    Quantity("threads", "threads", "", 1.0, 1.0),
    Quantity("spool_kb", "spool", "MB", 1e-3, 20.0),
)


class Growth(msgspec.Struct, frozen=True):
    """One quantity of one program: its means, and its growth while it was sampled."""

    who: str
    quantity: Quantity
    first_quarter: float
    last_quarter: float
    #: The slope within lives, times the sampled time.
    within: float
    #: The slope from one life's mean to the next one's, times the same; 0 with fewer than three lives.
    between: float
    #: The second half of the last hour minus the first; None after a shorter life.
    halves: float | None

    @property
    def too_much(self) -> bool:
        if self.halves is not None and self.quantity.plateau is not None:
            return self.halves > self.quantity.plateau
        return max(self.within, self.between) > self.quantity.tolerance


def measure(samples: Sequence[Sample], warm_up: float = WARM_UP_SECONDS) -> list[Growth]:
    """The growth of every quantity of every program. The first seconds of each life do not count."""
    found = []
    for who in dict.fromkeys(sample.who for sample in samples):
        lives = _lives([sample for sample in samples if sample.who == who], warm_up)
        if not lives:
            raise ValueError(f"every life of the {who} was shorter than {warm_up:g} s: nothing can be said")
        for quantity in QUANTITIES:
            series = [[(s.at, getattr(s, quantity.field) * quantity.scale) for s in life] for life in lives]
            if any(value for life in series for _, value in life):
                found.append(_growth(who, quantity, series))
    return found


def _lives(samples: Sequence[Sample], warm_up: float) -> list[list[Sample]]:
    lives = [list(life) for _, life in itertools.groupby(samples, key=lambda sample: sample.life)]
    settled = [[s for s in life if s.at >= life[0].at + warm_up] for life in lives]
    return [life for life in settled if len(life) > 1]


def _growth(who: str, quantity: Quantity, lives: Sequence[Sequence[tuple[float, float]]]) -> Growth:
    points = [point for life in lives for point in life]
    seconds = points[-1][0] - points[0][0]
    quarter = max(1, len(points) // 4)
    means = [tuple(map(statistics.fmean, zip(*life, strict=True))) for life in lives]
    centred = [
        (at - middle, value - mean) for life, (middle, mean) in zip(lives, means, strict=True) for at, value in life
    ]
    return Growth(
        who,
        quantity,
        statistics.fmean(value for _, value in points[:quarter]),
        statistics.fmean(value for _, value in points[-quarter:]),
        _slope(centred) * seconds,
        _slope([(at, value) for at, value in means]) * seconds if len(means) > 2 else 0.0,
        _halves(lives[-1]),
    )


def _halves(life: Sequence[tuple[float, float]]) -> float | None:
    end = life[-1][0]
    if end - life[0][0] < LONG_SECONDS:
        return None
    middle = end - LAST_SECONDS / 2
    first = [value for at, value in life if end - LAST_SECONDS <= at < middle]
    second = [value for at, value in life if at >= middle]
    return statistics.fmean(second) - statistics.fmean(first)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line with the least squares."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def table(growths: Sequence[Growth]) -> str:
    """As Markdown."""
    lines = [
        "| program | quantity | first quarter | last quarter | within lives | between lives | allowed | last hour "
        "| flat |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in growths:
        unit = f" {each.quantity.unit}".rstrip()
        lines.append(
            f"| {each.who} | {each.quantity.name} | {each.first_quarter:.1f}{unit} | {each.last_quarter:.1f}{unit} "
            f"| {each.within:+.2f}{unit} | {each.between:+.2f}{unit} | {each.quantity.tolerance:g}{unit} "
            f"| {'' if each.halves is None else f'{each.halves:+.2f}{unit}'} "
            f"| {'no' if each.too_much else 'yes'} |"
        )
    return "\n".join(lines)


def write_csv(path: str, samples: Sequence[Sample]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Sample.__struct_fields__)
        writer.writerows(msgspec.structs.astuple(sample) for sample in samples)


# --- the plot -----------------------------------------------------------------------------------------------------

_WIDTH: Final = 900
_HEIGHT: Final = 180
_LEFT: Final = 60
_TOP: Final = 30
_COLOURS: Final = {"server": "#1f6feb", "keeper": "#d29922", "client": "#2da44e"}


def write_svg(path: str, samples: Sequence[Sample], kills: Sequence[float]) -> None:
    """A panel for each quantity, a line for each life of each program; a kill of the server is dashed."""
    panels = "".join(
        _panel(quantity, samples, kills, _TOP + number * (_HEIGHT + 2 * _TOP))
        for number, quantity in enumerate(QUANTITIES)
    )
    height = len(QUANTITIES) * (_HEIGHT + 2 * _TOP) + _TOP
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _LEFT}" height="{height}" '
            f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
            f"{panels}</svg>\n"
        )


def _panel(quantity: Quantity, samples: Sequence[Sample], kills: Sequence[float], top: int) -> str:
    seconds = max(sample.at for sample in samples) or 1.0
    highest = max(getattr(sample, quantity.field) for sample in samples) * quantity.scale * 1.1 or 1.0

    def x(at: float) -> float:
        return round(_LEFT + at / seconds * _WIDTH, 1)

    def y(value: float) -> float:
        return round(top + _HEIGHT * (1 - value / highest), 1)

    bottom = top + _HEIGHT
    parts = [
        f'<text x="{_LEFT}" y="{top - 8}">{escape(f"{quantity.name} {quantity.unit}".strip())}</text>',
        f'<path d="M{_LEFT} {top}V{bottom}H{_LEFT + _WIDTH}" fill="none" stroke="black"/>',
        f'<text x="{_LEFT - 6}" y="{y(highest / 1.1)}" text-anchor="end">{highest / 1.1:.4g}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{_LEFT + _WIDTH}" y="{bottom + 16}" text-anchor="end">{seconds:.0f} s</text>',
    ]
    parts += [f'<path d="M{x(at)} {top}V{bottom}" stroke="#999" stroke-dasharray="4"/>' for at in kills]
    for number, who in enumerate(dict.fromkeys(sample.who for sample in samples)):
        colour = _COLOURS.get(who, "black")
        parts.append(f'<text x="{_LEFT + 200 + 80 * number}" y="{top - 8}" fill="{colour}">{escape(who)}</text>')
        own = [sample for sample in samples if sample.who == who]
        for _, life in itertools.groupby(own, key=lambda sample: sample.life):
            points = [(s.at, getattr(s, quantity.field) * quantity.scale) for s in life]
            line = " ".join(f"{x(at)},{y(value)}" for at, value in points)
            if any(value for _, value in points):
                parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
    return "".join(parts)
