"""Bounded buffers for output: the latest bytes, the first and the latest bytes, and the search for a pattern.

Pure. Works on bytes, so that a character that is split over two chunks stays whole; each class holds a bounded
number of bytes.
"""

from __future__ import annotations

import io
import re
from collections import deque
from typing import Final

from holdfast.types import ExitStatus, OutputChunk, OutputGap, Stream, Struct

MIB: Final = 1024 * 1024

#: The bytes that a regular expression searches: a longer match is not found.
SEARCH_WINDOW_BYTES: Final = 64 * 1024
#: The latest output in an error message, and the part of each stream in the `repr` of a result.
SHOWN_TAIL_BYTES: Final = 2_000


def unfinished_character(data: bytes | bytearray) -> int:
    """The number of bytes at the end that begin an incomplete UTF-8 character: 0 to 3."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
        return back if length > back else 0
    return 0


def leading_continuation(data: bytes | bytearray) -> int:
    """The number of bytes at the start that continue a cut UTF-8 character: 0 to 3."""
    count = 0
    while count < min(3, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count


def _cut(data: bytearray, length: int) -> bytes:
    cut = bytes(data[len(data) - length :])
    del data[len(data) - length :]
    return cut


def shown(data: bytes | str) -> str:
    """The `repr` of `data`, without the middle if it is long."""
    if len(data) <= SHOWN_TAIL_BYTES:
        return repr(data)
    half = SHOWN_TAIL_BYTES // 2
    return f"{data[:half]!r} + <{len(data) - 2 * half} more> + {data[-half:]!r}"


class TailBuffer:
    """The most recent `limit` bytes of the appended data."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: All bytes, while none is dropped. BytesIO grows in place and returns its own memory as bytes, so that a
        #: large result is in memory once.
        self._all = io.BytesIO()
        #: The latest bytes, after some were dropped or cut; `_all` is empty then.
        self._latest = bytearray()
        #: The number of bytes before the held ones.
        self.dropped = 0

    def __len__(self) -> int:
        return self._all.tell() + len(self._latest)

    def append(self, data: bytes) -> None:
        if not self._latest and self._all.tell() + len(data) <= self._limit:
            self._all.write(data)
            return
        self._make_cuttable()
        self._latest += data
        excess = len(self._latest) - self._limit
        if excess > 0:
            del self._latest[:excess]
            self.dropped += excess

    def _make_cuttable(self) -> None:
        if self._all.tell():
            self._latest = bytearray(self._all.getbuffer())
            self._all = io.BytesIO()

    def skip(self, length: int) -> None:
        """Count bytes of the stream that were lost."""
        self.dropped += length

    def clear(self) -> None:
        """Drop the held bytes."""
        self.dropped += len(self)
        self._all = io.BytesIO()
        self._latest.clear()

    def cut_unfinished(self) -> bytes:
        """Remove and return an incomplete character at the end."""
        self._make_cuttable()
        return _cut(self._latest, unfinished_character(self._latest))

    def value(self) -> bytes:
        return self._all.getvalue() or bytes(self._latest)


class StreamTails:
    """The most recent `limit` bytes of stdout and of stderr."""

    def __init__(self, limit: int) -> None:
        self.stdout = TailBuffer(limit)
        self.stderr = TailBuffer(limit)
        #: Bytes in gaps.
        self.lost = 0

    def take(self, event: OutputChunk | OutputGap) -> None:
        buffer = self.stderr if event.stream == "stderr" else self.stdout
        if isinstance(event, OutputChunk):
            buffer.append(event.data)
        else:
            # The two sides of a gap must not be joined. The sandbox retains the latest part of a stream, so the
            # output after the gap is kept.
            buffer.clear()
            buffer.skip(event.length)
            self.lost += event.length

    @property
    def truncated(self) -> bool:
        return bool(self.stdout.dropped or self.stderr.dropped)


class Collected(Struct, frozen=True):
    """One bounded window of output, all streams in the printed order.

    Between `head` and `tail` exactly `omitted_bytes` are left out. If there are none, `tail` is empty or continues
    `head`.
    """

    head: bytes
    tail: bytes
    omitted_bytes: int
    #: How the process ended; None while it runs.
    exit: ExitStatus | None = None
    #: Seconds that the collection took.
    elapsed: float = 0.0

    @property
    def running(self) -> bool:
        return self.exit is None

    @property
    def exit_code(self) -> int | None:
        return None if self.exit is None else self.exit.exit_code

    @property
    def truncated(self) -> bool:
        return self.omitted_bytes > 0

    @property
    def output(self) -> bytes:
        """Head and tail joined, with nothing between them."""
        return self.head + self.tail

    @property
    def text(self) -> str:
        """The output as text, with a line in place of omitted bytes."""
        if not self.omitted_bytes:
            return self.output.decode("utf-8", "replace")
        mark = f"\n[... {self.omitted_bytes} bytes omitted ...]\n"
        return self.head.decode("utf-8", "replace") + mark + self.tail.decode("utf-8", "replace")


class HeadTailBuffer:
    """The first and the latest bytes of a window, together at most `limit`; those between are counted."""

    def __init__(self, limit: int) -> None:
        self._head = bytearray()
        self._head_room = limit // 2
        self._tail = TailBuffer(limit - limit // 2)

    def append(self, data: bytes) -> None:
        if self._head_room:
            taken = data[: self._head_room]
            self._head += taken
            self._head_room -= len(taken)
            data = data[len(taken) :]
        if data:
            self._tail.append(data)

    def skip(self, length: int) -> None:
        """Count bytes that the sandbox no longer retains. The head ends here, and the tail begins again."""
        self._head_room = 0
        self._tail.clear()
        self._tail.skip(length)

    def cut_unfinished(self) -> bytes:
        """Remove and return an incomplete character at the end, for the next window."""
        if len(self._tail):
            return self._tail.cut_unfinished()
        return _cut(self._head, unfinished_character(self._head))

    def collected(self, *, exit: ExitStatus | None = None, elapsed: float = 0.0) -> Collected:
        """The window. The cut around omitted bytes is moved so that it splits no UTF-8 character."""
        head, tail, omitted = bytes(self._head), self._tail.value(), self._tail.dropped
        if omitted:
            split = unfinished_character(head)
            head = head[: len(head) - split]
            joined = leading_continuation(tail)
            tail = tail[joined:]
            omitted += split + joined
        return Collected(head, tail, omitted, exit, elapsed)


class OutputMatch(Struct, frozen=True):
    """A match of a pattern: `data` at `offset` of `stream`. `seq` is that of the chunk that completed it."""

    stream: Stream
    offset: int
    data: bytes
    seq: int
    groups: tuple[bytes | None, ...] = ()
    #: A position before the chunk in which the match ends; `seq` is after that whole chunk.
    before: int = 0

    @property
    def end(self) -> int:
        """The offset in the stream directly after the match."""
        return self.offset + len(self.data)

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


Pattern = str | bytes | re.Pattern[str] | re.Pattern[bytes]


class OutputSearch:
    """Searches each stream for a pattern, across chunk boundaries, holding `SEARCH_WINDOW_BYTES` a stream.

    A str or bytes pattern is literal; a compiled one is a regular expression. It matches as soon as it can: `\\d+`
    matches the first digit. `since` is the position to read from, or an earlier match after which to search; the
    attribute `since` is then the position to read from.
    """

    def __init__(self, pattern: Pattern, since: int | OutputMatch = 0) -> None:
        self.pattern = pattern
        self._after = since if isinstance(since, OutputMatch) else None
        self.since = since.before if isinstance(since, OutputMatch) else since
        #: The positions before and after the current chunk.
        self._before = self._seq = self.since
        self._windows: dict[Stream, bytearray] = {}
        #: The offset of each chunk of a window, and the position before it.
        self._chunks: dict[Stream, deque[tuple[int, int]]] = {}
        self._tail = TailBuffer(SHOWN_TAIL_BYTES)
        literal = pattern.encode() if isinstance(pattern, str) else pattern if isinstance(pattern, bytes) else None
        # For a literal, only its possible beginning needs to be held.
        self._keep = SEARCH_WINDOW_BYTES if literal is None else max(len(literal) - 1, 0)
        self._bytes_pattern: re.Pattern[bytes] | None = None
        self._text_pattern: re.Pattern[str] | None = None
        if literal is not None:
            self._bytes_pattern = re.compile(re.escape(literal))
        elif isinstance(pattern, re.Pattern):
            if isinstance(pattern.pattern, bytes):
                self._bytes_pattern = re.compile(pattern)
            else:
                self._text_pattern = re.compile(pattern)

    def feed(self, event: OutputChunk | OutputGap, before: int | None = None) -> OutputMatch | None:
        """Search the next piece of output; returns the match that it completes, if any.

        `before` is the `before` of a match that ends in it; the default is the position of the previous piece.
        """
        if isinstance(event, OutputGap):
            # Output after a gap does not continue the output before it.
            self._windows.pop(event.stream, None)
            self._chunks.pop(event.stream, None)
            return None
        if before is not None:
            self._before = before
        elif event.seq != self._seq:
            # A chunk with a lost middle arrives as two chunks with the same position.
            self._before, self._seq = self._seq, event.seq
        offset, printed = event.offset, event.data
        if self._after is not None and event.seq <= self._after.seq and event.stream != self._after.stream:
            return None
        if self._after is not None and event.stream == self._after.stream and offset < self._after.end:
            printed = printed[self._after.end - offset :]
            offset = event.offset + len(event.data) - len(printed)
        self._tail.append(printed)
        window = self._windows.setdefault(event.stream, bytearray())
        chunks = self._chunks.setdefault(event.stream, deque())
        window += printed
        chunks.append((offset, self._before))
        start = offset + len(printed) - len(window)
        match = self._search(bytes(window)) if printed else None
        if match is not None:
            position, data, groups = match
            end = start + position + len(data)
            last = next((before for at, before in reversed(chunks) if at < end), chunks[0][1])
            return OutputMatch(event.stream, start + position, data, event.seq, groups, last)
        if len(window) > self._keep:
            del window[: len(window) - self._keep]
        start = offset + len(printed) - len(window)
        while len(chunks) > 1 and chunks[1][0] <= start:
            chunks.popleft()
        return None

    def _search(self, window: bytes) -> tuple[int, bytes, tuple[bytes | None, ...]] | None:
        if self._bytes_pattern is not None:
            found = self._bytes_pattern.search(window)
            return None if found is None else (found.start(), found.group(), found.groups())
        assert self._text_pattern is not None
        # surrogateescape keeps every byte, so positions in the text can be turned back into positions in the bytes.
        text = window.decode("utf-8", "surrogateescape")
        match = self._text_pattern.search(text)
        if match is None:
            return None
        groups = tuple(None if group is None else _as_bytes(group) for group in match.groups())
        return len(_as_bytes(text[: match.start()])), _as_bytes(match.group()), groups

    def describe(self, latest: bytes = b"") -> str:
        """The pattern and the latest output, for an error message; `latest` is used if nothing was searched."""
        shown = self.pattern.pattern if isinstance(self.pattern, re.Pattern) else self.pattern
        tail = (self._tail.value() or latest).decode("utf-8", "replace")
        return f"{shown!r}; its output ends with {tail!r}" if tail else f"{shown!r}; it printed nothing"


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
