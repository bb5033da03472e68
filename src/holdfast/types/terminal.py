"""Terminals: size, state, events and reads; pure."""

from __future__ import annotations

from typing import Final, Literal

from holdfast.types.base import Lifetime, Struct
from holdfast.types.confinement import Confinement, EnvPolicy, Limits

#: RUNNING: alive, no prompt known (yet). BUSY: a command runs. IDLE: the prompt is shown. ERROR: it crashed.
TerminalState = Literal["RUNNING", "BUSY", "IDLE", "CLOSING", "CLOSED", "ERROR"]
TerminalEventType = Literal[
    "output", "gap", "state", "promptStart", "prompt", "continuation", "command", "ended", "resize", "input"
]
TerminalWait = Literal["idle", "awaitingInput", "ended", "change"]
ReadCondition = Literal["prompt", "input", "text", "size"]
CloseMode = Literal["graceful", "force"]
JobsAtClose = Literal["kill", "keep"]
#: The default limit of the output that a command typed in a terminal returns: the latest part.
TERMINAL_OUTPUT_BYTES: Final = 16 * 1024 * 1024
#: Rows or columns of a terminal: the kernel has 16 bits for each.
MAX_TERMINAL_SIDE: Final = 65_535
#: Of a screen, and of a session of the service: a cell costs some tens of bytes, and the size comes from a caller.
MAX_SCREEN_SIDE: Final = 4_096
MAX_SESSION_SIDE: Final = 1_000


class TerminalStates:
    """The values of `TerminalState`, which are in upper case on the wire."""

    RUNNING: Final = "RUNNING"
    BUSY: Final = "BUSY"
    IDLE: Final = "IDLE"
    CLOSING: Final = "CLOSING"
    CLOSED: Final = "CLOSED"
    ERROR: Final = "ERROR"


class TerminalSize(Struct, frozen=True):
    """Rows and columns of a terminal, in this order everywhere."""

    rows: int = 24
    cols: int = 80


class TerminalSpec(Struct, frozen=True):
    """A terminal to open. `terminal_id` is also a process id, which `process/*` methods accept."""

    terminal_id: str
    #: A shell by name or path, or a program with its arguments; None: bash, or sh where bash is missing.
    argv: tuple[str, ...] | None = None
    size: TerminalSize = TerminalSize()
    cwd: str | None = None
    #: As in `ProcessSpec`.
    env: dict[str, str] | None = None
    env_policy: EnvPolicy | None = None
    user: str | None = None
    term: str = "xterm-256color"
    #: Sets LANG; None sets it to C.UTF-8 if the environment names no locale.
    locale: str | None = None
    #: A shell reads the profile files, as after a login.
    login: bool = True
    #: Make bash and zsh mark their prompts, which shows when a command ends.
    integration: bool = True
    #: Retain typed input for a recording, except lines that the terminal does not echo.
    record_input: bool = False
    lifetime: Lifetime = "server"
    limits: Limits | None = None
    confinement: Confinement | None = None
    start_id: str | None = None


class TerminalStatus(Struct, frozen=True):
    """The status of a terminal."""

    terminal_id: str
    pid: int
    argv: tuple[str, ...]
    state: TerminalState
    size: TerminalSize
    cwd: str
    started_at: float
    #: The position after all output and events so far.
    token: int
    #: Incremented at every change of this status; `terminal/wait` can wait for the next.
    changes: int
    #: The current or last prompt, without colours; None before the first.
    prompt: str | None = None
    #: Whether a foreground program, or a child of it in another session, is blocked on reading the terminal; None
    #: where the kernel does not report it.
    awaiting_input: bool | None = None
    #: Whether the terminal echoes, and whether it reads lines. A password prompt reads lines without echo.
    echo: bool = True
    canonical: bool = True
    #: The foreground program.
    foreground: str | None = None
    foreground_pid: int | None = None
    #: Bytes of input that the terminal has not accepted yet.
    input_queued: int = 0
    #: The exit code of the last command, and of the program itself once it has ended.
    last_exit_code: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    #: Why it is closed.
    reason: str = ""
    #: The shell that marks its prompts: `bash`, `zsh`, or empty.
    integration: str = ""
    #: Modes that programs have switched on.
    alternate_screen: bool = False
    bracketed_paste: bool = False
    application_cursor: bool = False
    user: str | None = None
    #: The shell shows a continuation prompt, for the rest of a command. The state is then BUSY.
    continuation: bool = False
    #: An interrupt was sent and no line was entered since: bash can drop the first byte of the next line.
    interrupted: bool = False

    @property
    def queue(self) -> Literal["empty", "busy"]:
        """Whether input is queued."""
        return "busy" if self.input_queued else "empty"

    @property
    def password_prompt(self) -> bool | None:
        """Whether a program awaits a line without echo; None if it is not known whether it waits."""
        return self.awaiting_input if self.canonical and not self.echo else False


class TerminalEvent(Struct, frozen=True, omit_defaults=True):
    """An event of a terminal: output, or an event between its bytes."""

    #: The position after it, from which to continue reading.
    token: int
    timestamp: float
    type: TerminalEventType
    #: Bytes of `output` or `input`; for a mark, its escape sequence if marks were requested.
    payload: bytes = b""
    #: Its offset in the output.
    offset: int = 0
    #: The state after it.
    state: TerminalState = "RUNNING"
    #: Of a command that ended, or of the program.
    exit_code: int | None = None
    #: A prompt is shown; `prompt` is its text.
    prompt_detected: bool = False
    prompt: str | None = None
    size: TerminalSize | None = None
    #: Positions that a gap skips.
    length: int = 0
    reason: str = ""
    #: Row and column on the screen, from 0; only if requested.
    cursor_position: tuple[int, int] | None = None
    #: With `prompt`: the shell's directory; None if the shell had continued by then.
    cwd: str | None = None
    #: With `command`: the id of the run that typed it; empty if it was typed as input.
    run_id: str = ""


class ReadUntil(Struct, frozen=True, omit_defaults=True):
    """Conditions of a terminal read. The first that holds ends the wait; so does the end of all output."""

    #: The shell shows its prompt, and each line that was typed has begun to run.
    prompt: bool = False
    #: A program that a command started blocks in a read of the terminal, and has read all that was typed.
    input: bool = False
    #: The output after `since` contains this text. Not a regular expression, which could block the server.
    text: str = ""
    #: So many positions after `since` are there: bytes and events. 0 is no condition.
    size: int = 0
    #: If `size` was reached, and the output ends within a line: wait this long for a program to read input, because
    #: a program prints its question just before it reads the answer.
    settle_ms: int = 0
    #: Determine `awaiting_input` also if no program runs, which reads a few files of /proc; otherwise that field is
    #: None then. Older servers always determine it.
    look: bool = True


class ReadOutcome(Struct, frozen=True):
    """The state of a terminal at the end of a read with `ReadUntil`, in one reply with the output."""

    #: The condition that holds; None if the time was over or the output ended.
    reached: ReadCondition | None
    #: Whether the shell shows its prompt, and each line that was typed has begun to run.
    idle: bool
    #: The text after the last line end, of at most 256 bytes: the question of a program that reads input.
    line: str
    terminal: TerminalStatus


class TerminalRead(Struct, frozen=True):
    """Output and events after a position."""

    events: tuple[TerminalEvent, ...]
    #: The `since` of the next read.
    token: int
    state: TerminalState
    #: Output in between is no longer retained; a `gap` event stands for it.
    truncated: bool = False
    #: The terminal is closed and all events were read.
    closed: bool = False
    #: Of a read with `ReadUntil`. None from servers before this field.
    outcome: ReadOutcome | None = None


class TerminalCommandEnded(Struct, frozen=True):
    """The end of a command that was typed at the prompt, and the output from its start to its end."""

    #: 124 after a timeout.
    exit_code: int
    #: Seconds since it was typed.
    duration: float
    output: bytes
    #: The positions of the beginning and the end of its output.
    start_token: int
    end_token: int
    timed_out: bool = False
    #: More was printed: this is the most recent part.
    truncated: bool = False
    #: The terminal's state after it; BUSY if it could not be stopped, CLOSED if it ended the shell.
    state: TerminalState = "IDLE"
    reason: str = ""
    #: The prompt after it, and the `changes` of the status at that time.
    prompt: str | None = None
    changes: int = 0
    #: The shell's directory after it; empty from a server that predates this field.
    cwd: str = ""
