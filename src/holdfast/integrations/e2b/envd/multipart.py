"""Files in a `multipart/form-data` body, piece by piece, so that an upload is never held in memory; pure.

The parser is `python_multipart`; this module has its events in order and its bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from holdfast.integrations.e2b.problems import Problem, invalid

#: Files of one upload.
MAX_PARTS: Final = 1_000
_MAX_HEADER_BYTES: Final = 16 * 1024


class PartBegin(msgspec.Struct, frozen=True):
    """The beginning of a file; `filename` is empty if the part is not a file."""

    name: str
    filename: str


class PartData(msgspec.Struct, frozen=True):
    data: bytes


class PartEnd(msgspec.Struct, frozen=True):
    pass


PartEvent = PartBegin | PartData | PartEnd


def boundary_of(content_type: str) -> bytes | None:
    """The boundary of a multipart body; None if the body is another one."""
    kind, options = parse_options_header(content_type)
    return options.get(b"boundary") if kind == b"multipart/form-data" else None


class MultipartEvents:
    """Bytes in, events of parts out."""

    def __init__(self, boundary: bytes) -> None:
        self._events: deque[PartEvent] = deque()
        self._field = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._parts = 0
        self._complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._data,
                    "on_part_end": lambda: self._events.append(PartEnd()),
                    "on_end": self._end,
                },
                max_header_size=_MAX_HEADER_BYTES,
            )
        except FormParserError as error:
            raise invalid(f"multipart: {error}") from None

    def feed(self, data: bytes) -> list[PartEvent]:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise invalid(f"multipart: {error}") from None
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        """The body has ended."""
        if not self._complete:
            raise invalid("multipart: the body ends before its last boundary")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise Problem(413, "resource_exhausted", f"multipart: more than {MAX_PARTS} parts")
        self._disposition = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if bytes(self._field).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        self._events.append(PartBegin(_text(options.get(b"name", b"")), _text(options.get(b"filename", b""))))

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(PartData(bytes(data[start:end])))

    def _end(self) -> None:
        self._complete = True


def _text(value: bytes) -> str:
    """A name in the form of HTML: UTF-8, with three characters escaped."""
    text = value.decode("utf-8", "surrogateescape")
    return text.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")


async def part_events(body: AsyncIterator[bytes], boundary: bytes) -> AsyncGenerator[PartEvent, None]:
    events = MultipartEvents(boundary)
    async for piece in body:
        for event in events.feed(piece):
            yield event
    events.close()
