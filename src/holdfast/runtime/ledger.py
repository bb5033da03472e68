"""What a new server must know of an old one: a file of records on the spool, written before each fact counts.

A record is written with one system call and is there from then on: the page cache outlives the server. What can be
seen in the spool's files is not repeated here; what readers were told, and what cannot be taken back, is. Touches
one file; knows nothing of processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from holdfast.model import ProcessSpec, TerminalEventType, TerminalSize, TerminalSpec, TerminalState

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
    entered: bool
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


class RunTyped(Record, frozen=True, tag=19):
    """A command was typed in a terminal, by this name."""

    run_id: str


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
)
SessionRecord = SessionOpened | SessionStarted | SessionEnded
AnyRecord = Begun | ProcessRecord | SessionRecord | TerminalOpening | RunTyped


class Ledger:
    """The file, open for appending. `snapshot` gives the records that say all that is true now."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.snapshot: Callable[[], Iterable[AnyRecord]] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._compact_at = max(COMPACT_BYTES, 2 * self._size)
        self._failed = False

    def write(self, *records: AnyRecord) -> None:
        """Add records, all or none of them. When it returns, a new server will know."""
        data = b"".join(map(self._framed, records))
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
        if self._size > self._compact_at and self.snapshot is not None:
            self.compact()

    def compact(self) -> None:
        """Write what is true now into a new file, which then takes the place of the old one in one step."""
        assert self.snapshot is not None
        aside = f"{self.path}.new"
        try:
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                size = 0
                for record in self.snapshot():
                    data = self._framed(record)
                    if os.write(fd, data) < len(data):
                        raise OSError("no room")
                    size += len(data)
                os.rename(aside, self.path)
            except OSError:
                os.close(fd)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside)
                raise
        except OSError as error:
            self._compact_at = 2 * self._size
            log.warning("%s cannot be compacted: %s; it grows on", self.path, error)
            return
        os.close(self._fd)
        self._fd, self._size = fd, size
        # Half of it will be garbage by then.
        self._compact_at = max(COMPACT_BYTES, 2 * size)

    def close(self) -> None:
        os.close(self._fd)

    def _framed(self, record: AnyRecord) -> bytes:
        data = self._encoder.encode(record)
        return len(data).to_bytes(_PREFIX_BYTES, "little") + data

    def _tell_failure(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            log.error("%s cannot be written (%s): what happens now would not survive a restart", self.path, why)


def read_ledger(path: str) -> list[AnyRecord]:
    """Every whole record of a ledger, in order. What a dying server had written halfway is cut off."""
    decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)
    records: list[AnyRecord] = []
    with open(path, "r+b") as file:
        data = file.read()
        position = 0
        while position + _PREFIX_BYTES <= len(data):
            start = position + _PREFIX_BYTES
            end = start + int.from_bytes(data[position:start], "little")
            if end > len(data):
                break
            records.append(decoder.decode(memoryview(data)[start:end]))
            position = end
        file.truncate(position)
    return records
