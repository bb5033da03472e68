"""A fuzz target: a function of bytes with a name and seeds; and how it may cut a stream. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable

Run = Callable[[bytes], None]


class Target:
    """A function of bytes that raises when a promise is broken, and inputs to begin with."""

    def __init__(self, run: Run, seeds: tuple[bytes, ...]) -> None:
        self.name = run.__name__.replace("_", "-")
        self.run = run
        self.seeds = seeds


def target(*seeds: bytes) -> Callable[[Run], Target]:
    """Makes a target of the function below it."""
    return lambda run: Target(run, seeds)


def cut_at(data: bytes, locations: bytes) -> list[bytes]:
    """The same in pieces; each byte of `places` is the length of one."""
    edges = [0, *itertools.accumulate(locations), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(min(edge, len(data)) for edge in edges)]


def places_of(data: bytes) -> tuple[bytes, bytes]:
    """Split the input into the lengths of pieces and the stream: the first byte counts the lengths."""
    count = data[0] % 16 if data else 0
    return data[1 : 1 + count], data[1 + count :]
