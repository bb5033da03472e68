"""What a new server must know of an old one, as records, and how they stand in the ledger's file; pure.

What can be seen in the spool's files is not repeated; what readers were told, and what cannot be taken back, is.
The records of live shells are in `shell_records`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from holdfast import __version__
from holdfast.errors import SandboxError
from holdfast.runtime.durability.shell_records import AnyShellRecord
from holdfast.types import ProcessSpec, TerminalEventType, TerminalSize, TerminalSpec, TerminalState

#: What records mean. A reader takes a ledger of its own version or of an earlier one. Within a version, fields are
#: added at the end of a record, with defaults, and readers pass over those that they do not know; a new kind of
#: record, and every other change, is a new version.
LEDGER_VERSION: Final = 1
_PREFIX_BYTES: Final = 4


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
    cwd: str | None = None


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
    #: Written since this field exists.
    interrupted: bool = False


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


def encode_records(records: Iterable[AnyRecord | Head]) -> bytes:
    """Records as they stand in the file."""
    encoder = msgspec.msgpack.Encoder()
    return b"".join(frame(encoder, record) for record in records)


def decode_records(data: bytes) -> Iterator[AnyRecord]:
    """Every whole record but the heads; a cut end is passed over, and all else that is wrong is raised."""
    return (record for record in decode_all(data, "the ledger") if not isinstance(record, Head))


def decode_all(data: bytes, name: str) -> Iterator[AnyRecord | Head]:
    """The same with the heads; errors call it `name`."""
    decoder: msgspec.msgpack.Decoder[AnyRecord | Head] = msgspec.msgpack.Decoder(AnyRecord | Head)
    program = "unknown"
    view = memoryview(data)
    for start, end in frames(data):
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


def frame(encoder: msgspec.msgpack.Encoder, record: AnyRecord | Head) -> bytes:
    """One record as it stands in the file."""
    data = encoder.encode(record)
    return len(data).to_bytes(_PREFIX_BYTES, "little") + data


def frames(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each whole record begins and ends."""
    position = 0
    while position + _PREFIX_BYTES <= len(data):
        start = position + _PREFIX_BYTES
        position = start + int.from_bytes(data[start - _PREFIX_BYTES : start], "little")
        if position > len(data):
            return
        yield start, position
