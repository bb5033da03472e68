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

from holdfast import __version__
from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.model import (
    ProcessSpec,
    TerminalEventType,
    TerminalSize,
    TerminalSpec,
    TerminalState,
)
from holdfast.runtime.libc import reserve
from holdfast.runtime.shell_records import AnyShellRecord

log = logging.getLogger(__name__)

#: A ledger below this size is not worth compacting.
COMPACT_BYTES: Final = 4 * 1024 * 1024
#: Room set aside behind the end of a ledger: some ten thousand records, for when the spool is full.
RESERVE_BYTES: Final = 1024 * 1024
#: So much of what could not be written is held in memory until there is room.
MAX_UNWRITTEN_BYTES: Final = 1024 * 1024
_PREFIX_BYTES: Final = 4
#: What records mean. A reader takes a ledger of its own version or of an earlier one. Within a version, fields are
#: added at the end of a record, with defaults, and readers pass over those that they do not know; a new kind of
#: record, and every other change, is a new version.
LEDGER_VERSION: Final = 1


class Record(msgspec.Struct, frozen=True, array_like=True, tag_field="record"):
    """Base of all records. `key` names a process, for as long as the spool lives."""


class Head(Record, frozen=True, tag=0):
    """A server writes from here on: of this version of the program, at this address, under this keeper."""

    version: int
    program: str
    keeper: int
    boot: str
    orphaned_jobs: str
    home: str


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
    """A session started a process: it ends with it if it is bound, and is told its events if they are pushed."""

    id: str
    process_id: str
    bound: bool
    pushed: bool = False


class SessionEnded(Record, frozen=True, tag=14):
    id: str


class SessionShell(Record, frozen=True, tag=24):
    """A session opened a shell, which ends with it if it is bound."""

    id: str
    shell_id: str
    bound: bool


class Detached(Record, frozen=True, tag=25):
    """Its keeper and its server were killed: its streams are gone, and how it ends will not be known."""

    key: int
    reason: str


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
    | Detached
)
SessionRecord = SessionOpened | SessionStarted | SessionShell | SessionEnded
AnyRecord = Begun | ProcessRecord | SessionRecord | TerminalOpening | RunTyped | AnyShellRecord


#: Gives the fewest records that tell the same as others.
Compaction = Callable[[Iterable[AnyRecord]], Iterable[AnyRecord]]


class Ledger:
    """The file, open for appending. What no longer matters is taken out by `compaction`, now and then.

    Room for `reserve_bytes` is set aside behind its end: a spool that others fill does not keep us from noting what
    becomes of processes that run. New ones are for `require_room` to refuse, while half of it is left.
    """

    def __init__(
        self,
        path: str,
        compaction: Compaction | None = None,
        head: Head | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self.path = path
        self._head = () if head is None else (head,)
        self._reserve_bytes = reserve_bytes
        self._compaction = compaction
        self._encoder = msgspec.msgpack.Encoder()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._compact_at = max(COMPACT_BYTES, self._size)
        self._thread: threading.Thread | None = None
        #: What the thread has made: the new file, its size, and up to where it tells the same as the old one.
        self._compacted: tuple[int, int, int] | None = None
        #: What found no room: it goes before what comes next.
        self._unwritten = bytearray()
        self._failed = False
        #: The size at which more room is set aside, and why there was none.
        self._reserve_at = 0
        self._short = ""
        self._set_room_aside()
        if head is not None:
            self.write(head)

    def require_room(self) -> None:
        """Raise if what a new process needs to survive us might find no room."""
        if self._unwritten:
            self.write()
        if self._short:
            self._set_room_aside()
        if self._short or self._unwritten:
            raise ResourceExhausted(
                f"{self.path} cannot be written on ({self._short or 'no room'}): what is started now would not "
                "survive a restart of the server; make room there"
            )

    def write(self, *records: AnyRecord | Head) -> None:
        """Add records, all or none of them. When it returns, a new server will know."""
        if self._compacted is not None:
            self._change_over(*self._compacted)
        if len(records) == 1:  # nearly always
            data = _framed(self._encoder, records[0])
        else:
            data = b"".join([_framed(self._encoder, record) for record in records])
        if self._unwritten:
            data = bytes(self._unwritten) + data
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._put_off(data, error.strerror or str(error))
            return
        if written < len(data):
            # A torn record would hide all that come after it.
            os.ftruncate(self._fd, self._size)
            self._put_off(data, "no room")
            return
        self._size += written
        if self._failed:
            self._failed = False
            self._unwritten.clear()
            log.warning("%s can be written again", self.path)
        if self._size > self._reserve_at:
            self._set_room_aside()
        if self._size > self._compact_at and self._thread is None and self._compaction is not None:
            self._compact_at = 2 * self._size  # not again if it fails
            self._compact_aside()

    def _compact_aside(self) -> None:
        self._thread = threading.Thread(target=self._compact, args=(self._size,), name="holdfast-ledger")
        try:
            self._thread.start()
        except RuntimeError as error:  # no pids are left, or no memory
            self._thread = None
            log.warning("%s cannot be compacted: %s; it grows on", self.path, error)

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
        fd = -1
        try:
            records = self._compaction(decode_records(os.pread(self._fd, upto, 0)))
            data = encode_records((*self._head, *records))
            fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            _reserve(fd, 0, len(data) + self._reserve_bytes)
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, "no room")
        except (OSError, SandboxError) as error:
            if fd >= 0:
                os.close(fd)
                os.unlink(aside)
            log.warning("%s cannot be compacted: %s; it grows on", self.path, error)
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
        self._set_room_aside()

    def _set_room_aside(self) -> None:
        try:
            _reserve(self._fd, self._size, self._reserve_bytes)
        except OSError as error:
            self._short = error.strerror or str(error)
            # Not at each record: a file system may go a long way before it finds that it is full.
            self._reserve_at = self._size + self._reserve_bytes // 16
        else:
            self._short = ""
            self._reserve_at = self._size + self._reserve_bytes // 2

    def _put_off(self, data: bytes, why: str) -> None:
        if len(data) <= MAX_UNWRITTEN_BYTES:
            self._unwritten[:] = data
        if not self._failed:
            self._failed = True
            log.error("%s cannot be written (%s): what happens now would not survive a restart", self.path, why)


def read_ledger(path: str) -> list[AnyRecord]:
    """Every whole record of a ledger, in order. What a dying server had written halfway is cut off.

    `SandboxError` if a later version wrote it, in a way that we do not understand; then nothing is changed.
    """
    return read_headed(path)[1]


def read_headed(path: str) -> tuple[Head | None, list[AnyRecord]]:
    """The same, and the head of the server that wrote last."""
    with open(path, "r+b") as file:
        data = file.read()
        head, records = None, []
        for record in _decode_all(data, path):
            if not isinstance(record, Head):
                records.append(record)
                continue
            head = record
            if head.version > LEDGER_VERSION:
                raise SandboxError(
                    f"{path}: holdfast {head.program} wrote it in version {head.version}, and"
                    f" holdfast {__version__} knows {LEDGER_VERSION}: serve with that version, or a later one"
                )
        whole = max((end for _, end in _frames(data)), default=0)
        if whole < len(data):
            file.truncate(whole)  # which gives up the room behind its end, too
    return head, records


def encode_records(records: Iterable[AnyRecord | Head]) -> bytes:
    """Records as they stand in the file."""
    encoder = msgspec.msgpack.Encoder()
    return b"".join(_framed(encoder, record) for record in records)


def _reserve(fd: int, offset: int, length: int) -> None:
    try:
        reserve(fd, offset, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):  # it has room when it has room, there
            raise


def boot_id() -> str:
    """What tells this run of the machine from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""  # hidden from us: then a spool of another boot is one whose processes are gone


def _framed(encoder: msgspec.msgpack.Encoder, record: AnyRecord | Head) -> bytes:
    data = encoder.encode(record)
    return len(data).to_bytes(_PREFIX_BYTES, "little") + data


def decode_records(data: bytes) -> Iterator[AnyRecord]:
    """Every whole record but the heads; a cut end is passed over, and all else that is wrong is raised."""
    return (record for record in _decode_all(data, "the ledger") if not isinstance(record, Head))


def _decode_all(data: bytes, name: str) -> Iterator[AnyRecord | Head]:
    decoder: msgspec.msgpack.Decoder[AnyRecord | Head] = msgspec.msgpack.Decoder(AnyRecord | Head)
    program = "unknown"
    view = memoryview(data)
    for start, end in _frames(data):
        try:
            record = decoder.decode(view[start:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SandboxError(
                f"{name} is damaged at byte {start - _PREFIX_BYTES}, or of a version that holdfast {__version__}"
                f" does not know: {error}; serve with the version that wrote it, {program}, or a later one"
            ) from None
        if isinstance(record, Head):
            program = record.program
        yield record


def _frames(data: bytes) -> Iterator[tuple[int, int]]:
    position = 0
    while position + _PREFIX_BYTES <= len(data):
        start = position + _PREFIX_BYTES
        position = start + int.from_bytes(data[start - _PREFIX_BYTES : start], "little")
        if position > len(data):
            return
        yield start, position
