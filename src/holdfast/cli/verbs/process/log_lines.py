"""The output of a process line by line, with times: for `logs --tail`, `--since`, `--until` and `--timestamps`.

`LineSplitter` and `LineFilter` are pure. Without these options `logs` copies bytes and does not use this module.
"""

from __future__ import annotations

import base64
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from typing import Final, NamedTuple

import msgspec

from holdfast.cli.support.byte_streams import ByteSink
from holdfast.cli.support.command_request import STDERR, STDOUT
from holdfast.cli.support.moments import stamp
from holdfast.cli.support.text import complain
from holdfast.errors import SandboxError
from holdfast.exec_api import ExecApi
from holdfast.types import OutputChunk, OutputTime, ReadResult

#: Bytes of one read; bounds the memory.
_STEP_BYTES: Final = 1024 * 1024
#: A longer line is printed in parts: a stream without line ends must not fill the memory.
MAX_LINE_BYTES: Final = 1024 * 1024
#: One read that waits for output; another follows.
_WAIT_SECONDS: Final = 20.0


class Line(NamedTuple):
    """A line of one stream with its line end, and the time of its first byte; None where times are not needed."""

    stream: str
    offset: int
    seq: int
    data: bytes
    at: float | None


class LineFilter(NamedTuple):
    """Which lines are printed: of these streams, not before `since`, before `until`, and only the last `tail`."""

    streams: tuple[str, ...]
    since: float | None = None
    until: float | None = None
    tail: int | None = None
    timestamps: bool = False

    @property
    def needs_times(self) -> bool:
        return self.timestamps or self.since is not None or self.until is not None

    def accept(self, line: Line) -> bool:
        if line.stream not in self.streams:
            return False
        if line.at is None:
            return True
        return (self.since is None or line.at >= self.since) and (self.until is None or line.at < self.until)


class LineSplitter:
    """Joins the chunks of each stream to lines."""

    def __init__(self) -> None:
        self._parts: dict[str, Line] = {}

    def split(self, chunk: OutputChunk, times: list[OutputTime]) -> Iterator[Line]:
        """Yield the lines that the chunk completes; `times` are those of the chunk, without any if not needed."""
        stream, data = chunk.stream, chunk.data
        part = self._parts.pop(stream, None)
        if part is not None and part.offset + len(part.data) != chunk.offset:
            yield part  # a gap follows
            part = None
        start = 0
        while start < len(data):
            end = data.find(b"\n", start) + 1 or len(data)
            end = min(end, start + MAX_LINE_BYTES)
            piece = data[start:end]
            if part is None:
                offset = chunk.offset + start
                part = Line(stream, offset, chunk.seq, piece, _time_at(times, offset))
            else:
                part = part._replace(data=part.data + piece, seq=chunk.seq)
            start = end
            if piece.endswith(b"\n") or len(part.data) >= MAX_LINE_BYTES:
                yield part
                part = None
        if part is not None:
            self._parts[stream] = part

    def rest(self) -> Iterator[Line]:
        """Yield the lines without a line end."""
        yield from self._parts.values()
        self._parts.clear()


def _time_at(times: list[OutputTime], offset: int) -> float | None:
    found = None
    while times and times[0].offset <= offset:
        found = times[0].at
        if len(times) > 1 and times[1].offset <= offset:
            times.pop(0)
        else:
            break
    return found


async def print_lines(
    api: ExecApi, id: str, which: LineFilter, ends: dict[str, int], *, after_seq: int, follow: bool, as_json: bool
) -> None:
    """Print the lines of a process that the filter accepts; with `follow`, until its streams close."""
    sinks = {"stdout": ByteSink(STDOUT), "stderr": ByteSink(STDERR)}
    try:
        splitter = LineSplitter()
        kept: deque[Line] | None = None if which.tail is None else deque(maxlen=which.tail)
        until_now = True
        async for result in _reads(api, id, which, ends, after_seq=after_seq, follow=follow):
            for gap in result.gap if result is not None else ():
                if gap.stream in which.streams:
                    complain(f"{gap.length} bytes of {gap.stream} at offset {gap.offset} are no longer kept")
            found = (
                splitter.rest() if result is None and not follow else _lines(splitter, result, which, ends, follow)
            )
            for line in found:
                if not which.accept(line):
                    continue
                if kept is not None and until_now:
                    kept.append(line)
                else:
                    await _print(sinks, line, which, as_json)
            if result is None:
                # Everything that was printed before the call is read: the tail is known.
                until_now = False
                for line in kept or ():
                    await _print(sinks, line, which, as_json)
        for line in filter(which.accept, splitter.rest()):
            await _print(sinks, line, which, as_json)
    finally:
        for sink in sinks.values():
            sink.close()


async def _reads(
    api: ExecApi, id: str, which: LineFilter, ends: dict[str, int], *, after_seq: int, follow: bool
) -> AsyncGenerator[ReadResult | None, None]:
    """Yield the reads up to `ends`, then None, and with `follow` the later ones until the streams close."""
    timing = which.needs_times
    caught_up = False
    reached = dict.fromkeys(ends, 0)
    while True:
        wait = _WAIT_SECONDS if caught_up else 0.0
        if which.until is not None:
            wait = max(0.0, min(wait, which.until - time.time()))
        result = await api.read(id, after_seq=after_seq, max_bytes=_STEP_BYTES, wait=wait, timing=timing)
        if timing and result.times is msgspec.UNSET:
            raise SandboxError("the server of this sandbox is older and keeps no times: see `holdfast upgrade`")
        if result.chunks or result.gap:
            yield result
        for chunk in result.chunks:
            reached[chunk.stream] = chunk.offset + len(chunk.data)
        is_new = not result.chunks and not result.gap
        if not caught_up and (is_new or all(reached[stream] >= end for stream, end in ends.items())):
            caught_up = True
            yield None
            if not follow:
                return
        over = which.until is not None and time.time() >= which.until
        if is_new and (result.closed or over):
            return
        after_seq = result.after_seq


def _lines(
    splitter: LineSplitter, result: ReadResult | None, which: LineFilter, ends: dict[str, int], follow: bool
) -> Iterator[Line]:
    if result is None:
        return
    times = () if result.times is msgspec.UNSET else result.times
    assert isinstance(times, tuple)
    for chunk in result.chunks:
        # Output that was printed after the call began is left out, unless it is followed.
        if not follow and chunk.offset >= ends[chunk.stream]:
            continue
        end = chunk.offset + len(chunk.data)
        yield from splitter.split(
            chunk, [each for each in times if each.stream == chunk.stream and chunk.offset <= each.offset < end]
        )


async def _print(sinks: dict[str, ByteSink], line: Line, which: LineFilter, as_json: bool) -> None:
    if as_json:
        shown = {
            "event": "output",
            "seq": line.seq,
            "stream": line.stream,
            "offset": line.offset,
            **({} if line.at is None else {"time": line.at}),
            "chunk": base64.b64encode(line.data).decode(),
        }
        await sinks["stdout"].write(json.dumps(shown).encode() + b"\n")
        return
    prefix = f"{stamp(line.at)} ".encode() if which.timestamps and line.at is not None else b""
    await sinks["stderr" if line.stream == "stderr" else "stdout"].write(prefix + line.data)
