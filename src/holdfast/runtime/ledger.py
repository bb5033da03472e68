"""What a new server must know of an old one: a file of records on the spool, written before each fact counts.

A record is written with one system call and is there from then on: the page cache outlives the server. What can be
seen in the spool's files is not repeated here; what readers were told, and what cannot be taken back, is. Touches
one file; knows nothing of processes.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from holdfast.model import (
    ProcessSpec,
    TerminalEventType,
    TerminalSize,
    TerminalSpec,
    TerminalState,
)
from holdfast.runtime.shell_records import AnyShellRecord

log = logging.getLogger(__name__)

#: A ledger below this size is not worth compacting.
COMPACT_BYTES: Final = 4 * 1024 * 1024
_PREFIX_BYTES: Final = 4


class Record(msgspec.Struct, frozen=True, array_like=True, tag_field="record"):
    """Base of all records. `key` names a process, for as long as the spool lives."""


class Begun(Record, frozen=True, tag=1):
    """A start is about to happen: whoever carries the mark is this process. `spec` is without its environment."""

    key: int
    spec: ProcessSpec
    mark: int
    #: As the kernel has it: it need not be UTF-8.
    cwd: bytes
    #: The program of a live shell.
    internal: bool


class Started(Record, frozen=True, tag=2):
    key: int
    pid: int
    started_at: float


class Printed(Record, frozen=True, tag=3):
    """A stream has come to `end`, when the journal's records up to `sealed` could no longer grow."""

    key: int
    kind: int
    sealed: int
    end: int


class Lost(Record, frozen=True, tag=4):
    """This range of a stream can no longer be read: it is about to be given back."""

    key: int
    kind: int
    start: int
    end: int


class Ended(Record, frozen=True, tag=5):
    """The leader ended like this; it is about to be reaped."""

    key: int
    exit_code: int
    signal: str | None
    at: float


class Closed(Record, frozen=True, tag=6):
    """Every stream ended, at this time of the monotonic clock."""

    key: int
    at: float


class Forgotten(Record, frozen=True, tag=7):
    """Nobody can ask for it any more; or it was not started in the end."""

    key: int


class InputClosed(Record, frozen=True, tag=8):
    """Nothing is written to its stdin after what was accepted so far."""

    key: int


class Written(Record, frozen=True, tag=20):
    """Input was accepted, once under this name: up to `end` it will be delivered."""

    key: int
    write_id: str | None
    end: int


class Signalled(Record, frozen=True, tag=9):
    key: int
    signal_id: str


class Resized(Record, frozen=True, tag=10):
    key: int
    rows: int
    cols: int


class Taken(Record, frozen=True, tag=15):
    """What was read from a terminal at this time is in its log, between these offsets; its marks are noted."""

    key: int
    number: int
    offset: int
    end: int
    at: float


class TerminalOpening(Record, frozen=True, tag=16):
    """The next process with this id runs in a terminal. `directory` has the files that its shell reads first."""

    spec: TerminalSpec
    argv: tuple[str, ...]
    integration: str
    nonce: str
    directory: str


class Happened(Record, frozen=True, tag=17):
    """An event between the bytes of a terminal's output; the state is the one after it."""

    key: int
    offset: int
    at: float
    type: TerminalEventType
    state: TerminalState
    payload: bytes
    exit_code: int | None
    prompt: str | None
    size: TerminalSize | None
    reason: str


class TerminalMemory(Record, frozen=True, tag=18):
    """What a terminal knows beside its events."""

    key: int
    changes: int
    reason: str
    last_exit_code: int | None
    prompt: str | None
    prompts: int
    continued: bool
    typed: bool
    typed_at: int
    unsettled: int
    prompt_due: bool
    prompt_start: int | None
    command_runs: bool
    closing: bool
    #: Output that may be the beginning of a mark, and of a mode.
    held: bytes
    mode_tail: bytes
    alternate_screen: bool
    application_cursor: bool
    bracketed_paste: bool


class EventsDropped(Record, frozen=True, tag=21):
    """So many events of a terminal are no longer told, and positions before `horizon` with them."""

    key: int
    count: int
    horizon: int


class RunTyped(Record, frozen=True, tag=19):
    """A command is about to be typed in a terminal, by this name, which is that of the write too."""

    terminal_id: str
    run_id: str
    command: str
    #: Where its line begins, and how many events there had been.
    prompt_end: int
    events: int
    #: When, and until when it may run, by the monotonic clock.
    at: float
    deadline: float | None
    max_bytes: int


class Journalled(Record, frozen=True, tag=11):
    """A whole journal, in place of the records that made it."""

    key: int
    state: tuple[int, bytes, bytes, bytes, bytes, int]


class SessionOpened(Record, frozen=True, tag=12):
    id: str
    client_name: str


class SessionStarted(Record, frozen=True, tag=13):
    """A session started a process, which ends with it if it is bound."""

    id: str
    process_id: str
    bound: bool


class SessionEnded(Record, frozen=True, tag=14):
    id: str


class SessionShell(Record, frozen=True, tag=24):
    """A session opened a shell, which ends with it if it is bound."""

    id: str
    shell_id: str
    bound: bool


#: What happened to a process after it had begun.
ProcessRecord = (
    Started
    | Printed
    | Lost
    | Ended
    | Closed
    | Forgotten
    | InputClosed
    | Written
    | Signalled
    | Resized
    | Journalled
    | Taken
    | Happened
    | TerminalMemory
    | EventsDropped
)
SessionRecord = SessionOpened | SessionStarted | SessionShell | SessionEnded
AnyRecord = Begun | ProcessRecord | SessionRecord | TerminalOpening | RunTyped | AnyShellRecord


#: Gives the fewest records that tell the same as others.
Compaction = Callable[[Iterable[AnyRecord]], Iterable[AnyRecord]]


class Ledger:
    """The file, open for appending. What no longer matters is taken out by `compaction`, now and then."""

    def __init__(self, path: str, compaction: Compaction | None = None) -> None:
        self.path = path
        self._compaction = compaction
        self._encoder = msgspec.msgpack.Encoder()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._compact_at = max(COMPACT_BYTES, self._size)
        self._thread: threading.Thread | None = None
        #: What the thread has made: the new file, its size, and up to where it tells the same as the old one.
        self._compacted: tuple[int, int, int] | None = None
        self._failed = False

    def write(self, *records: AnyRecord) -> None:
        """Add records, all or none of them. When it returns, a new server will know."""
        if self._compacted is not None:
            self._change_over(*self._compacted)
        if len(records) == 1:  # nearly always
            data = _framed(self._encoder, records[0])
        else:
            data = b"".join([_framed(self._encoder, record) for record in records])
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._tell_failure(error.strerror or str(error))
            return
        if written < len(data):
            # A torn record would hide all that come after it.
            os.ftruncate(self._fd, self._size)
            self._tell_failure("no room")
            return
        self._size += written
        if self._size > self._compact_at and self._thread is None and self._compaction is not None:
            self._compact_at = 2 * self._size  # not again if it fails
            self._thread = threading.Thread(target=self._compact, args=(self._size,), name="holdfast-ledger")
            self._thread.start()

    def close(self) -> None:
        self.settle()
        os.close(self._fd)

    def settle(self) -> None:
        """Let a compaction that is under way come to its end."""
        if self._thread is not None:
            self._thread.join()
        if self._compacted is not None:
            self._change_over(*self._compacted)

    def _compact(self, upto: int) -> None:
        """On a thread: what the first `upto` bytes tell, into a new file."""
        assert self._compaction is not None
        aside = f"{self.path}.new"
        try:
            records = self._compaction(_decode(os.pread(self._fd, upto, 0)))
            encoder = msgspec.msgpack.Encoder()
            data = b"".join(_framed(encoder, record) for record in records)
            fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if os.write(fd, data) < len(data):
                os.close(fd)
                os.unlink(aside)
                raise OSError(errno.ENOSPC, "no room")
        except OSError as error:
            log.warning("%s cannot be compacted: %s; it grows on", self.path, error.strerror)
            self._thread = None
            return
        self._compacted = (fd, len(data), upto)

    def _change_over(self, fd: int, size: int, upto: int) -> None:
        """The new file, with what was written since, takes the place of the old one in one step."""
        self._compacted = self._thread = None
        rest = os.pread(self._fd, self._size - upto, upto)
        try:
            if os.write(fd, rest) < len(rest):
                raise OSError(errno.ENOSPC, "no room")
            os.rename(f"{self.path}.new", self.path)
        except OSError as error:
            os.close(fd)
            log.warning("%s cannot be compacted: %s; it grows on", self.path, error.strerror)
            return
        os.close(self._fd)
        self._fd, self._size = fd, size + len(rest)
        # Half of it will be garbage by then.
        self._compact_at = max(COMPACT_BYTES, 2 * self._size)

    def _tell_failure(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            log.error("%s cannot be written (%s): what happens now would not survive a restart", self.path, why)


def read_ledger(path: str) -> list[AnyRecord]:
    """Every whole record of a ledger, in order. What a dying server had written halfway is cut off."""
    with open(path, "r+b") as file:
        data = file.read()
        file.truncate(max((end for _, end in _frames(data)), default=0))
    return list(_decode(data))


def _framed(encoder: msgspec.msgpack.Encoder, record: AnyRecord) -> bytes:
    data = encoder.encode(record)
    return len(data).to_bytes(_PREFIX_BYTES, "little") + data


def _decode(data: bytes) -> Iterator[AnyRecord]:
    decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)
    view = memoryview(data)
    for start, end in _frames(data):
        yield decoder.decode(view[start:end])


def _frames(data: bytes) -> Iterator[tuple[int, int]]:
    position = 0
    while position + _PREFIX_BYTES <= len(data):
        start = position + _PREFIX_BYTES
        position = start + int.from_bytes(data[start - _PREFIX_BYTES : start], "little")
        if position > len(data):
            return
        yield start, position
