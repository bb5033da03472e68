"""What the ledger tells of live shells and their commands, record by record. Data only; `ledger` writes it.

`key` names a shell or a command, for as long as the spool lives; both are counted together with the processes. What
a shell says of itself is text that need not be UTF-8, and is bytes here.
"""

from __future__ import annotations

import msgspec

from holdfast.types import CommandSpec, ShellSpec


class ShellRecord(msgspec.Struct, frozen=True, array_like=True, tag_field="record"):
    """Base of all of them."""

    key: int


class NotedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What a shell said last, as far as the next command needs it."""

    status: int
    flags: str
    job: str
    last: bytes | None
    cwd: bytes
    old_cwd: bytes
    traps: dict[str, bytes]


class NotedEnd(msgspec.Struct, frozen=True, array_like=True):
    """How a command ended, how its shell was then, and what was to be undone after it."""

    exit_code: int
    cwd: bytes
    duration: float
    timed_out: bool
    restored: str
    #: Why the shell is closed, if it is.
    reason: str | None
    answer: NotedAnswer
    stopped: bool
    #: Whether our EXIT trap was to be taken off; None if there was nothing of the kind.
    trapped: bool | None
    back: tuple[bytes, bytes] | None


class ShellOpening(ShellRecord, frozen=True, tag=30):
    """A shell is about to be started. `real` is what its program really is; its files are in `directory`."""

    spec: ShellSpec
    path: str
    real: str
    directory: str
    started_at: float


class ProgramBegins(ShellRecord, frozen=True, tag=31):
    """The next program of a shell is about to be started: the process that has this number behind its id.

    `inode` is that of the shell's end of the control socket. After the first program it takes the place of one that
    a command, by its key, has cost: `restored` says what of.
    """

    number: int
    inode: int
    cwd: bytes | None
    restored: str
    command: int
    exit_code: int


class ProgramReady(ShellRecord, frozen=True, tag=32):
    """The program takes commands."""

    answer: NotedAnswer
    command_line: bytes


class CommandQueued(ShellRecord, frozen=True, tag=33):
    """A command was accepted and waits for its turn."""

    shell: int
    spec: CommandSpec


class CommandBegan(ShellRecord, frozen=True, tag=34):
    """A command is about to be told to its shell, by what the file of its lines has between two positions.

    `spec` is None for one that waited, and without its input, which is in a file by now.
    """

    shell: int
    spec: CommandSpec | None
    #: By the kernel's clock of process starts, and by the monotonic one.
    ticks: int
    at: float
    said_from: int
    said_to: int
    #: The pair of pipes that it prints on.
    pipes: int
    #: Whether the shell's state is saved if the command ends the shell.
    armed: bool


class CommandStopping(ShellRecord, frozen=True, tag=35):
    """Somebody wants a command to end."""

    timed_out: bool


class Interrupted(ShellRecord, frozen=True, tag=36):
    """An interrupt by this name was for this command; 0 if none ran."""

    interrupt_id: str
    command: int


class AnswerPart(ShellRecord, frozen=True, tag=37):
    """The first part of an answer is about to be taken from the control socket."""

    data: bytes


class CommandAnswered(ShellRecord, frozen=True, tag=38):
    """A command has ended, and its last output waits for its reader."""

    ended: NotedEnd


class CommandOver(ShellRecord, frozen=True, tag=39):
    """A command's end is told: its exit and its close. Of the ended commands the latest so many are kept."""

    ended: NotedEnd
    kept: int


class CommandRefused(ShellRecord, frozen=True, tag=40):
    """A command will not run."""


class ProgramGivenUp(ShellRecord, frozen=True, tag=41):
    """A command has cost its shell the program: it is being ended, and there will be another."""

    command: int
    exit_code: int


class ShellClosing(ShellRecord, frozen=True, tag=42):
    """Somebody wants a shell to end."""

    keep: bool
    grace: float


class ShellEnded(ShellRecord, frozen=True, tag=43):
    """A shell is closed. `refuses` if the command that ran is to be told that it did not."""

    reason: str
    exit_code: int
    signal: str | None
    refuses: bool


class ShellGone(ShellRecord, frozen=True, tag=44):
    """Nobody can ask for a shell any more, nor for its commands."""


class ShellKnows(ShellRecord, frozen=True, tag=45):
    """What records that compaction has left out would tell of a shell."""

    commands_run: int
    #: Ids of commands that are not to run again.
    known: tuple[str, ...]
    jobs: tuple[int, ...]
    #: How it was at the end of the last command in its program.
    last: NotedEnd | None
    #: The pipes that it prints on, and up to where the line of the last command in its program goes.
    pipes: int
    said_to: int


AnyShellRecord = (
    ShellOpening
    | ProgramBegins
    | ProgramReady
    | CommandQueued
    | CommandBegan
    | CommandStopping
    | Interrupted
    | AnswerPart
    | CommandAnswered
    | CommandOver
    | CommandRefused
    | ProgramGivenUp
    | ShellClosing
    | ShellEnded
    | ShellGone
    | ShellKnows
)
