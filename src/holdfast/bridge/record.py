"""What is written down of every call of a bridge, without secrets, and the latest of them in memory.

Bounded by count and by bytes. A file of JSON lines, if one is asked for, is the only thing that is touched; it can
be read by its owner alone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, overload

import msgspec

from holdfast.bridge.types import TokenUsage

#: Calls that are kept in memory, and bytes of their texts: a long session of one agent, and no more memory than a
#: few large answers take.
KEPT_CALLS: Final = 1_000
KEPT_BYTES: Final = 64 * 1024 * 1024
#: Of one request or reply: a whole conversation without its images. What is over is left out from the middle.
TEXT_BYTES: Final = 1024 * 1024


class CallRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call, when it has ended. Texts and errors have no key in them."""

    #: Counted from 1.
    number: int
    #: Seconds since the epoch.
    started_at: float
    method: str
    path: str
    #: How the caller speaks; empty if no dialect has this route.
    dialect: str = ""
    model: str = ""
    stream: bool = False
    #: What the caller was answered; 0 if it left before.
    status: int = 0
    request: str = ""
    reply: str = ""
    #: How long they were, if they are cut here.
    request_bytes: int = 0
    reply_bytes: int = 0
    usage: TokenUsage | None = None
    #: The answer did not tell its usage: it is a guess from its length.
    usage_estimated: bool = False
    #: By the limits' prices.
    money: float = 0.0
    #: Seconds from the request's arrival to the first byte of the answer's body, and to its end.
    first_token: float | None = None
    latency: float = 0.0
    #: Its caller left before the end.
    cancelled: bool = False
    #: What went wrong, in words for the host alone.
    error: str = ""


class CallRecords(Sequence[CallRecord]):
    """The latest calls, oldest first."""

    def __init__(self, kept_calls: int = KEPT_CALLS, kept_bytes: int = KEPT_BYTES) -> None:
        self._records: deque[CallRecord] = deque()
        self._kept_calls = kept_calls
        self._kept_bytes = kept_bytes
        self._bytes = 0
        #: All that there were, those that are kept no longer too.
        self.total = 0

    def add(self, record: CallRecord) -> None:
        self.total += 1
        self._records.append(record)
        self._bytes += _size(record)
        while len(self._records) > self._kept_calls or (self._bytes > self._kept_bytes and len(self._records) > 1):
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
    """Records as lines of JSON, each in one write, so that a reader sees whole lines."""

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
    """The beginning and the end of bytes that pass, as much as a record keeps."""

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
            # Cut when it has doubled: not a copy for every token.
            if len(self._tail) > 2 * self._half:
                del self._tail[: len(self._tail) - self._half]

    def bytes(self) -> bytes:
        tail = self._tail[-self._half :] if self._half else b""
        left_out = self.length - len(self._head) - len(tail)
        between = b"\n[%d bytes are left out]\n" % left_out if left_out else b""
        return bytes(self._head) + between + bytes(tail)


def _size(record: CallRecord) -> int:
    return len(record.request) + len(record.reply)
