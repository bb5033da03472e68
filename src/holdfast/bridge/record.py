"""Records of the calls of a bridge, without secrets; the latest are held in memory.

Bounded by count and by bytes. An optional file of JSON lines, readable by its owner only, is all that this module
touches.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, overload

import msgspec

from holdfast.bridge.types import TokenUsage

#: Calls in memory, and bytes of their texts: a long session of one agent, and no more memory than a few large
#: responses take.
MAX_CALLS: Final = 1_000
MAX_BYTES: Final = 64 * 1024 * 1024
#: Bytes of one request or reply: a whole conversation without its images. The middle of a longer one is omitted.
TEXT_BYTES: Final = 1024 * 1024


class CallRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished call. Texts and errors contain no key."""

    #: Counted from 1.
    number: int
    #: Seconds since the epoch.
    started_at: float
    method: str
    path: str
    #: Dialect of the route; empty if no dialect has it.
    dialect: str = ""
    model: str = ""
    stream: bool = False
    #: Status of the response; 0 if the caller disconnected before it.
    status: int = 0
    request: str = ""
    reply: str = ""
    #: Original sizes of `request` and `reply`, which may be cut.
    request_bytes: int = 0
    reply_bytes: int = 0
    usage: TokenUsage | None = None
    #: The response had no usage: the counts are an estimate from its length.
    usage_estimated: bool = False
    #: Cost, by the prices of the limits.
    money: float = 0.0
    #: Seconds from the request's arrival to the first byte of the answer's body, and to its end.
    first_token: float | None = None
    latency: float = 0.0
    #: The caller disconnected before the end.
    cancelled: bool = False
    #: Error for the host only.
    error: str = ""


class CallRecords(Sequence[CallRecord]):
    """The latest calls, oldest first."""

    def __init__(self, max_calls: int = MAX_CALLS, max_bytes: int = MAX_BYTES) -> None:
        self._records: deque[CallRecord] = deque()
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._bytes = 0
        #: Number of all calls, including those no longer held.
        self.total = 0

    def add(self, record: CallRecord) -> None:
        self.total += 1
        self._records.append(record)
        self._bytes += _size(record)
        while len(self._records) > self._max_calls or (self._bytes > self._max_bytes and len(self._records) > 1):
            self._bytes -= _size(self._records.popleft())

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> CallRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[CallRecord]: ...

    def __getitem__(self, index: int | slice) -> CallRecord | list[CallRecord]:
        return list(self._records)[index] if isinstance(index, slice) else self._records[index]

    def __iter__(self) -> Iterator[CallRecord]:
        return iter(list(self._records))


class RecordFile:
    """Appends records as lines of JSON, each in one write, so that a reader sees whole lines."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, record: CallRecord) -> None:
        line = memoryview(msgspec.json.encode(record) + b"\n")
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Excerpt:
    """Beginning and end of a byte stream, as much as a record holds."""

    def __init__(self, limit: int = TEXT_BYTES) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._half = limit // 2
        self.length = 0

    def add(self, data: bytes) -> None:
        self.length += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            # Trimmed only when doubled, not copied for every token.
            if len(self._tail) > 2 * self._half:
                del self._tail[: len(self._tail) - self._half]

    def bytes(self) -> bytes:
        tail = self._tail[-self._half :] if self._half else b""
        left_out = self.length - len(self._head) - len(tail)
        between = b"\n[%d bytes are left out]\n" % left_out if left_out else b""
        return bytes(self._head) + between + bytes(tail)


def _size(record: CallRecord) -> int:
    return len(record.request) + len(record.reply)
