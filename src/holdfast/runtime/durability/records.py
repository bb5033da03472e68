"""The record kinds of the ledger: everything that a new server needs of an earlier one; and their framing. Pure.

The ledger does not repeat what the files of the spool show. It holds the facts that readers have seen and the steps
that cannot be taken back. The specs of `holdfast.types` are recorded as they are, so a new field of a spec survives
a crash without a change here. Text that need not be UTF-8, such as a directory, is recorded as bytes.

`key` names one job (a process, a shell or a command of a shell) for as long as the spool exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Union

import msgspec

from holdfast import __version__
from holdfast.errors import SandboxError
from holdfast.runtime.output.journal import JournalState
from holdfast.types import (
    CommandEnded,
    CommandSpec,
    ExitStatus,
    ProcessSpec,
    ShellSpec,
    TerminalEventType,
    TerminalSize,
    TerminalSpec,
    TerminalState,
)

#: The version of the format. A server reads a ledger of its own version or of an earlier one. Within a version,
#: fields are added at the end of a record with defaults, and readers ignore fields that they do not know; a new
#: record kind, and every other change, needs a new version.
LEDGER_VERSION: Final = 1
_PREFIX_BYTES: Final = 4


class LedgerRecord(msgspec.Struct, frozen=True, array_like=True, tag_field="record"):
    """Base of all record kinds."""


class JobRecord(LedgerRecord, frozen=True):
    """Base of the records that belong to one job."""

    key: int


class LedgerHead(LedgerRecord, frozen=True, tag=0):
    """A server starts to write: the format's version, the server's version, its keeper, its address (`home`)."""

    version: int
    program: str
    keeper: int
    boot: str
    orphaned_jobs: str
    home: str


class OutputPrinted(JobRecord, frozen=True, tag=3):
    """The stream `kind` reached `end` while the journal was sealed up to `sealed`."""

    kind: int
    sealed: int
    end: int


class OutputLost(JobRecord, frozen=True, tag=4):
    """This range of a stream is no longer readable; its pages are freed after the record."""

    kind: int
    start: int
    end: int


class JobEnded(JobRecord, frozen=True, tag=5):
    """The job ended with this status; the leader of a process is reaped after the record.

    `exit_code` and `signal` serve earlier versions, which read no `full_status`.
    """

    exit_code: int
    signal: str | None
    at: float
    full_status: ExitStatus | None = None

    @classmethod
    def of(cls, key: int, status: ExitStatus, at: float) -> JobEnded:
        return cls(key, status.exit_code, status.signal, at, status)

    @property
    def status(self) -> ExitStatus:
        return self.full_status or ExitStatus(self.exit_code, self.signal)


class JobClosed(JobRecord, frozen=True, tag=6):
    """Every stream ended, at this time of the monotonic clock."""

    at: float


class JobForgotten(JobRecord, frozen=True, tag=7):
    """The process is no longer retained, or its start failed."""


class InputClosed(JobRecord, frozen=True, tag=8):
    """No input is accepted after the input accepted so far."""


class InputAccepted(JobRecord, frozen=True, tag=20):
    """Input up to `end` was accepted and will be delivered, once for this `write_id`."""

    write_id: str | None
    end: int


class JournalCheckpoint(JobRecord, frozen=True, tag=11):
    """A whole journal, in place of the records from which it was built."""

    state: JournalState


class ProcessBegun(JobRecord, frozen=True, tag=1):
    """A start is about to happen; the process carries `mark`. `spec` is without environment and directory."""

    spec: ProcessSpec
    mark: int
    cwd: bytes
    #: Whether the process is the program of a live shell.
    internal: bool


class ProcessStarted(JobRecord, frozen=True, tag=2):
    pid: int
    started_at: float


class ProcessDetached(JobRecord, frozen=True, tag=25):
    """The keeper and the server were killed: the streams are gone, and the exit status will not be known."""

    reason: str


class SignalSent(JobRecord, frozen=True, tag=9):
    signal_id: str


class TerminalOpening(LedgerRecord, frozen=True, tag=16):
    """The next process with this id runs in a terminal; its shell reads the startup files in `directory`."""

    spec: TerminalSpec
    argv: tuple[str, ...]
    integration: str
    nonce: str
    directory: str


class TerminalResized(JobRecord, frozen=True, tag=10):
    rows: int
    cols: int


class TerminalOutputStored(JobRecord, frozen=True, tag=15):
    """The bytes of the read with this `number` are in the log between two offsets; their marks are recorded."""

    number: int
    offset: int
    end: int
    at: float


class TerminalEventRecord(JobRecord, frozen=True, tag=17):
    """An event between the bytes of a terminal's output, with the state after it."""

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
    run_id: str = ""


class EventsDropped(JobRecord, frozen=True, tag=21):
    """`count` events of a terminal are no longer retained, nor any position before `horizon`."""

    count: int
    horizon: int


class TerminalCheckpoint(JobRecord, frozen=True, tag=18):
    """The state of a terminal except its events."""

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
    interrupted: bool = False


class RunTyped(LedgerRecord, frozen=True, tag=19):
    """A command is about to be typed in a terminal; the write has the same id."""

    terminal_id: str
    run_id: str
    command: str
    #: The end of the prompt before the command, and the number of events before it.
    prompt_end: int
    events: int
    #: Start and deadline by the monotonic clock.
    at: float
    deadline: float | None
    max_bytes: int


class AnswerRecord(msgspec.Struct, frozen=True, array_like=True):
    """The part of a shell's last answer that the next command needs."""

    status: int
    flags: str
    job: str
    last: bytes | None
    cwd: bytes
    old_cwd: bytes
    traps: dict[str, bytes]


class CommandEndRecord(msgspec.Struct, frozen=True, array_like=True):
    """The end of a command, the state of its shell at that time, and the settings to undo after it.

    The fields up to `reason` serve earlier versions, which read no `full_result`. `full_result` has an empty `cwd`:
    the directory need not be UTF-8 and is in `cwd`.
    """

    exit_code: int
    cwd: bytes
    duration: float
    timed_out: bool
    restored: str
    #: Why the shell is closed; None while it is open.
    reason: str | None
    answer: AnswerRecord
    stopped: bool
    #: Whether the EXIT trap of the control protocol is to be removed; None if none was set.
    trapped: bool | None
    back: tuple[bytes, bytes] | None
    full_result: CommandEnded | None = None


class ShellRecord(JobRecord, frozen=True):
    """Base of the records that belong to one shell, or to one command of a shell."""


class ShellOpening(ShellRecord, frozen=True, tag=30):
    """A shell is about to be started; `real` is the resolved path of its program, `directory` holds its files."""

    spec: ShellSpec
    path: str
    real: str
    directory: str
    started_at: float


class ProgramBegins(ShellRecord, frozen=True, tag=31):
    """Program `number` of a shell is about to be started; its process id ends with the number.

    `inode` identifies the shell's end of the control socket. A program after the first replaces one that the
    command with the key `command` ended; `restored` names the state that the new program gets.
    """

    number: int
    inode: int
    cwd: bytes | None
    restored: str
    command: int
    exit_code: int


class ProgramReady(ShellRecord, frozen=True, tag=32):
    """The program accepts commands."""

    answer: AnswerRecord
    command_line: bytes


class CommandQueued(ShellRecord, frozen=True, tag=33):
    """A command was accepted and waits for its turn."""

    shell: int
    spec: CommandSpec


class CommandBegan(ShellRecord, frozen=True, tag=34):
    """A command is about to be sent to its shell: the range of the file of control lines.

    `spec` is None for a command that was queued, and is without its input, which is in a file.
    """

    shell: int
    spec: CommandSpec | None
    #: By the kernel's clock of process starts, and by the monotonic clock.
    ticks: int
    at: float
    line_start: int
    line_end: int
    #: The pair of pipes on which the command prints.
    pipes: int
    #: Whether the shell's state is saved if the command ends the shell.
    armed: bool


class CommandStopping(ShellRecord, frozen=True, tag=35):
    """A command is being ended, by a timeout or on request."""

    timed_out: bool


class InterruptRequested(ShellRecord, frozen=True, tag=36):
    """The interrupt with this id was for this command; 0 if none ran."""

    interrupt_id: str
    command: int


class AnswerPart(ShellRecord, frozen=True, tag=37):
    """The first part of an answer is about to be read from the control socket."""

    data: bytes


class CommandAnswered(ShellRecord, frozen=True, tag=38):
    """A command ended, and its last output waits for a reader."""

    ended: CommandEndRecord


class CommandOver(ShellRecord, frozen=True, tag=39):
    """A command's exit and close are in its journal. `kept` is the number of ended commands that are retained."""

    ended: CommandEndRecord
    kept: int


class CommandRefused(ShellRecord, frozen=True, tag=40):
    """A command will not run."""


class ProgramGivenUp(ShellRecord, frozen=True, tag=41):
    """A command made the program unusable: the program is being ended, and another will replace it."""

    command: int
    exit_code: int


class ShellClosing(ShellRecord, frozen=True, tag=42):
    """A shell is being closed on request."""

    keep: bool
    grace: float


class ShellEnded(ShellRecord, frozen=True, tag=43):
    """A shell is closed. `refuses` if the running command fails as one that did not run."""

    reason: str
    exit_code: int
    signal: str | None
    refuses: bool
    full_status: ExitStatus | None = None

    @property
    def status(self) -> ExitStatus:
        return self.full_status or ExitStatus(self.exit_code, self.signal)


class ShellGone(ShellRecord, frozen=True, tag=44):
    """A shell and its commands are no longer retained."""


class ShellCheckpoint(ShellRecord, frozen=True, tag=45):
    """The facts about a shell from records that compaction leaves out."""

    commands_run: int
    #: Ids of commands that must not run again.
    known: tuple[str, ...]
    jobs: tuple[int, ...]
    #: The end of the last command in the current program.
    last: CommandEndRecord | None
    #: The current pair of pipes, and the end of the last command's line in the file of control lines.
    pipes: int
    line_end: int


#: The record kinds of the runtime. The server adds its own (`replay.ReplayExtension`).
RUNTIME_KINDS: Final = (
    *(LedgerHead, OutputPrinted, OutputLost, JobEnded, JobClosed, JobForgotten, InputClosed, InputAccepted),
    *(JournalCheckpoint, ProcessBegun, ProcessStarted, ProcessDetached, SignalSent, TerminalOpening),
    *(TerminalResized, TerminalOutputStored, TerminalEventRecord, EventsDropped, TerminalCheckpoint, RunTyped),
    *(ShellOpening, ProgramBegins, ProgramReady, CommandQueued, CommandBegan, CommandStopping),
    *(InterruptRequested, AnswerPart, CommandAnswered, CommandOver, CommandRefused, ProgramGivenUp),
    *(ShellClosing, ShellEnded, ShellGone, ShellCheckpoint),
)

Kinds = tuple[type[LedgerRecord], ...]


def encode_records(records: Iterable[LedgerRecord]) -> bytes:
    """Frame records as they are in the file."""
    encoder = msgspec.msgpack.Encoder()
    return b"".join(frame(encoder, record) for record in records)


def decode_records(data: bytes | memoryview, kinds: Kinds = ()) -> Iterator[LedgerRecord]:
    """Decode every whole record except heads; ignores a cut end, and raises on any other damage."""
    return (record for record in decode_all(data, "the ledger", kinds) if not isinstance(record, LedgerHead))


def decode_all(data: bytes | memoryview, name: str, kinds: Kinds = ()) -> Iterator[LedgerRecord]:
    """Decode every whole record, heads included; `name` is for errors, `kinds` are those of the server."""
    union: Any = Union[(*RUNTIME_KINDS, *kinds)]
    decoder: msgspec.msgpack.Decoder[LedgerRecord] = msgspec.msgpack.Decoder(union)
    program = "unknown"
    view = memoryview(data)
    for start, end in frames(data):
        try:
            record = decoder.decode(view[start:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SandboxError(
                f"{name} is damaged at byte {start - _PREFIX_BYTES}, or has a format that holdfast {__version__}"
                f" does not know: {error}; serve with the version that wrote it, {program}, or a later one"
            ) from None
        if isinstance(record, LedgerHead):
            program = record.program
        yield record


def frame(encoder: msgspec.msgpack.Encoder, record: LedgerRecord) -> bytes:
    """Encode one record with its length in front."""
    data = encoder.encode(record)
    return len(data).to_bytes(_PREFIX_BYTES, "little") + data


def frames(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each whole record."""
    position = 0
    while position + _PREFIX_BYTES <= len(data):
        start = position + _PREFIX_BYTES
        position = start + int.from_bytes(data[start - _PREFIX_BYTES : start], "little")
        if position > len(data):
            return
        yield start, position
