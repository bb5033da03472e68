"""Recordings of terminals as asciicast v2: one JSON line for the header and one for each event.

Written from events with times and bytes, and read back line by line. Pure: no files, no clock, and no more of a
recording in memory than one line.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TextIO

import msgspec

from holdfast.errors import InvalidParams
from holdfast.types import Struct, TerminalSize

OUTPUT: Final = "o"
INPUT: Final = "i"
RESIZE: Final = "r"
MARKER: Final = "m"

#: Rows or columns: the kernel has 16 bits for them.
_SIZE: Final = re.compile(rb"[1-9][0-9]{0,4}")
#: A line over this length is refused: writers make one of each chunk that they read, and none is nearly this long.
LONGEST_LINE: Final = 16 * 1024 * 1024


class CastHeader(Struct, frozen=True, omit_defaults=True):
    """The first line of a recording. Unknown fields (`theme`) are ignored."""

    width: int
    height: int
    version: int = msgspec.field(default=0)
    #: Seconds since the epoch at which the recording began.
    timestamp: int | float | None = None
    duration: float | None = None
    idle_time_limit: float | None = msgspec.field(default=None, name="idle_time_limit")
    command: str | None = None
    title: str | None = None
    env: dict[str, str] | None = None


class CastEvent(Struct, frozen=True):
    """An event `time` seconds after the start; `code` is `o`, `i`, `r`, `m` or an unknown one."""

    time: float
    code: str
    data: bytes

    @property
    def size(self) -> TerminalSize | None:
        """The new size, if this is a resize."""
        cols, cross, rows = self.data.partition(b"x")
        if self.code != RESIZE or not cross or not (_SIZE.fullmatch(cols) and _SIZE.fullmatch(rows)):
            return None
        return TerminalSize(rows=int(rows), cols=int(cols))


class Recording(NamedTuple):
    """A recording as it is read: the header, and an iterator that reads one event at a time."""

    header: CastHeader
    events: Iterator[CastEvent]


def resize_event(time: float, size: TerminalSize) -> CastEvent:
    return CastEvent(time, RESIZE, b"%dx%d" % (size.cols, size.rows))


class Cast:
    """A writer: each call returns one line, with its newline, or an empty string where a character is incomplete.

    Bytes become text as they would on a terminal: a character that was cut between two events is written whole with
    the second one, and bytes that are no UTF-8 become U+FFFD. Times never go back.
    """

    def __init__(self) -> None:
        self._time = 0.0
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {code: decoder("replace") for code in (OUTPUT, INPUT)}

    def header(
        self,
        *,
        width: int,
        height: int,
        timestamp: float | None = None,
        title: str | None = None,
        env: Mapping[str, str] | None = None,
        command: str | None = None,
    ) -> str:
        if width < 1 or height < 1:
            raise InvalidParams(f"a recording has at least one row and column, got {width}x{height}")
        return _line(
            CastHeader(
                version=2,
                width=width,
                height=height,
                timestamp=None if timestamp is None else int(_finite("timestamp", timestamp)),
                title=title or None,
                env=dict(env) if env else None,
                command=command or None,
            )
        )

    def event(self, time: float, code: str, data: bytes) -> str:
        self._time = max(self._time, round(float(_finite("time", time)), 6))
        decoder = self._decoders.get(code)
        text = decoder.decode(data) if decoder is not None else data.decode(errors="replace")
        return _line((self._time, code, text)) if text or decoder is None else ""

    def end(self) -> str:
        """Return the lines for characters that were begun and never finished."""
        cut = [(code, decoder.decode(b"", final=True)) for code, decoder in self._decoders.items()]
        return "".join(_line((self._time, code, text)) for code, text in cut if text)


def write_cast(
    events: Iterable[CastEvent],
    *,
    width: int,
    height: int,
    timestamp: float | None = None,
    title: str | None = None,
    env: Mapping[str, str] | None = None,
    command: str | None = None,
) -> Iterator[str]:
    """Yield the lines of a recording, as the events come."""
    cast = Cast()
    yield cast.header(width=width, height=height, timestamp=timestamp, title=title, env=env, command=command)
    for event in events:
        if line := cast.event(event.time, event.code, event.data):
            yield line
    if line := cast.end():
        yield line


def cast_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file for `read_cast`; a line without an end does not fill the memory."""
    while line := file.readline(LONGEST_LINE + 1):
        yield line


def read_cast(lines: Iterable[str]) -> Recording:
    """Read the recording in these lines: the header at once, each event when the iterator reaches it.

    Blank lines are skipped and events with unknown codes are returned unchanged; anything else that is not
    asciicast v2 raises `InvalidParams` with the number of the line.
    """
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in numbered:
        return Recording(_read_header(number, line), _read_events(numbered))
    raise InvalidParams("line 1: the recording is empty; an asciicast begins with a header", line=1)


def _line(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode() + "\n"
    except UnicodeEncodeError as error:
        raise InvalidParams(f"a recording holds UTF-8 alone: {error}") from None


def _finite(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidParams(f"{name} must be a number from 0, got {value}")
    return value


def _read_header(number: int, line: str) -> CastHeader:
    _check_length(number, line)
    try:
        # The version first: the header of another version may lack required fields of version 2.
        version = msgspec.json.decode(line, type=_Version).version
        if version != 2:
            raise InvalidParams(f"line {number}: asciicast version {version} is not supported, only 2", line=number)
        header = msgspec.json.decode(line, type=CastHeader)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidParams(f"line {number}: not a header of asciicast v2: {error}", line=number) from None
    if header.width < 1 or header.height < 1:
        raise InvalidParams(f"line {number}: a size of {header.width}x{header.height}", line=number)
    return header


def _read_events(numbered: Iterator[tuple[int, str]]) -> Iterator[CastEvent]:
    decoder = msgspec.json.Decoder(tuple[float, str, str])
    for number, line in numbered:
        _check_length(number, line)
        try:
            time, code, text = decoder.decode(line)
            event = CastEvent(_finite("time", time), code, text.encode())
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise InvalidParams(f"line {number}: not an event [time, code, data]: {error}", line=number) from None
        except InvalidParams as error:
            raise InvalidParams(f"line {number}: {error.message}", line=number) from None
        yield event


def _check_length(number: int, line: str) -> None:
    if len(line) > LONGEST_LINE:
        raise InvalidParams(f"line {number}: longer than {LONGEST_LINE} characters", line=number)


class _Version(msgspec.Struct):
    version: int
