"""The nouns of the system as frozen Structs; pure, imports nothing of ours, safe on every platform.

The same Structs go over the wire: camelCase there, bytes as base64 in JSON and raw in MessagePack.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

Stream = Literal["stdout", "stderr", "pty"]
#: When more is printed than is kept. `follow`: the process waits for readers that follow it, for a limited time
#: without progress. `drop`: never. `block`: for every reader, as long as it is attached.
Overflow = Literal["follow", "drop", "block"]
Lifetime = Literal["server", "connection"]
SpecKind = Literal["direct", "prepared"]
StdinMode = Literal["open", "closed"]
ShellState = Literal["idle", "running", "closed"]
#: RUNNING: alive, and no prompt is known (yet). BUSY: a command runs. IDLE: the prompt is shown. ERROR: it crashed.
TerminalState = Literal["RUNNING", "BUSY", "IDLE", "CLOSING", "CLOSED", "ERROR"]
TerminalEventType = Literal[
    "output", "gap", "state", "promptStart", "prompt", "continuation", "command", "ended", "resize", "input"
]
TerminalWait = Literal["idle", "awaitingInput", "ended", "change"]
ReadCondition = Literal["prompt", "input", "text", "size"]
CloseMode = Literal["graceful", "force"]
JobsAtClose = Literal["kill", "keep"]
ConfinementMode = Literal["bubblewrap", "landlock", "none"]
ConfinedNetwork = Literal["none", "host", "proxy"]
FileType = Literal["file", "directory", "symlink", "fifo", "socket", "character", "block", "other"]
#: What a command typed in a terminal returns of its output, if nobody says how much: the latest.
TERMINAL_OUTPUT_BYTES: Final = 16 * 1024 * 1024
#: How much of a file goes in one message: large enough that a round trip counts little, and 8 are not much.
FILE_PIECE_BYTES: Final = 1024 * 1024
#: Names that one page of a directory holds.
DIRECTORY_PAGE: Final = 5_000
#: Rows or columns of a terminal: the kernel has 16 bits for each.
MAX_TERMINAL_SIDE: Final = 65_535
#: Of a screen, and of a session of the service: a cell costs some tens of bytes, and the size comes from a caller.
MAX_SCREEN_SIDE: Final = 4_096
MAX_SESSION_SIDE: Final = 1_000
#: Pids that a sample of usage names for one process: a fork bomb has more than anybody reads.
USAGE_PIDS: Final = 1_000


class Struct(msgspec.Struct, frozen=True, rename="camel"):
    """Base of everything that is data: frozen, and camelCase outside Python."""


class TerminalSize(Struct, frozen=True):
    """Rows and columns of a terminal, in this order everywhere."""

    rows: int = 24
    cols: int = 80


#: Variables that a login sets, as patterns: enough for a program to run, nothing to leak.
CORE_VARIABLES: Final = (
    *("HOME", "LANG", "LANGUAGE", "LC_*", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER"),
)
#: Variables by which a program of holdfast's own that runs in a sandbox finds its Python, as patterns.
PYTHON_VARIABLES: Final = ("PYTHON*", "LD_LIBRARY_PATH")


class EnvPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """How to make a process's environment from the server's own; `ProcessSpec.env` is laid over the result."""

    #: `core`: only `CORE_VARIABLES`.
    inherit: Literal["all", "core", "none"] = "all"
    #: Keep variables that look like secrets (`secret_names.is_dropped`: `*KEY*`, `*SECRET*`, `*TOKEN*`, and more).
    ignore_default_excludes: bool = False
    #: Case-insensitive glob patterns of names to leave out.
    exclude: tuple[str, ...] = ()
    set: dict[str, str] = {}
    #: If given, only names that match one of these patterns are kept.
    include_only: tuple[str, ...] = ()

    @classmethod
    def minimal(cls, *more: str) -> EnvPolicy:
        """`CORE_VARIABLES` and what matches the patterns `more`; never a secret, or a variable of holdfast's."""
        return cls(exclude=("HOLDFAST_*",), include_only=(*CORE_VARIABLES, *more))


class Limits(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Resource limits of one process, set as rlimits before it executes; its children inherit them."""

    cpu_seconds: int | None = None
    memory_bytes: int | None = None
    open_files: int | None = None
    processes: int | None = None
    file_size_bytes: int | None = None
    core_bytes: int | None = None
    stack_bytes: int | None = None
    nice: int | None = None


class Confinement(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the operating system keeps a process, and all that it starts, from doing; set before it executes.

    Like every Struct that restricts a process, it refuses a field that it does not know: a restriction that an
    older version ignored would look enforced.
    """

    #: `bubblewrap`: a root of its own, and namespaces. `landlock`: rights on paths, where no namespace can be had.
    mode: ConfinementMode = "none"
    #: Absolute real paths. Beside them: the machine's programs to read, and with `bubblewrap` a /tmp of its own.
    writable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    #: What must not be reached although it lies in one of those.
    hidden: tuple[str, ...] = ()
    #: `proxy`: nothing but what the filtering proxy at the Unix socket `proxy` lets through.
    network: ConfinedNetwork = "host"
    proxy: str | None = None
    #: Refuse system calls that programs seldom need and attackers often do.
    seccomp: bool = True
    #: With `landlock`, no /proc of others; `bubblewrap` has a process namespace in any case.
    hide_processes: bool = True
    #: How much /tmp, /dev/shm and the home directory hold each, with `bubblewrap`.
    scratch_bytes: int = 256 * 1024 * 1024
    #: Limits of all its processes together, by cgroup.
    total_memory_bytes: int | None = None
    total_processes: int | None = None
    cpu_cores: float | None = None
    #: False: no Unix socket can be made, except for pairs. A path that may be read is a path to connect to.
    unix_sockets: bool = True
    #: Programs of the machine that can be executed: names, or paths, with `*` and `?`; None is all of them.
    programs: tuple[str, ...] | None = None
    #: With `bubblewrap`, and by root: nothing can be executed that lies in a directory in which the machine's own
    #: programs do not, unless a path among `programs` leads there.
    no_execution: bool = False

    def executes_in(self, directory: str) -> bool:
        """Whether a path among `programs` may lead into this directory."""
        for pattern in self.programs or ():
            fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
            if "/" in pattern and (f"{directory}/".startswith(fixed) or fixed.startswith(f"{directory}/")):
                return True
        return False

    @property
    def limits_tree(self) -> bool:
        """Whether it needs a cgroup."""
        return (self.total_memory_bytes, self.total_processes, self.cpu_cores) != (None, None, None)


class ProcessSpec(Struct, frozen=True, omit_defaults=True):
    """What to start and how. `process_id` is a key that the caller chooses, never an OS pid."""

    process_id: str
    argv: tuple[str, ...]
    #: A path or a `file:` URI; None is the server's own working directory.
    cwd: str | None = None
    #: With neither `env` nor `env_policy`: the server's environment. `env` alone: exactly this environment.
    env: dict[str, str] | None = None
    env_policy: EnvPolicy | None = None
    arg0: str | None = None
    tty: bool = False
    size: TerminalSize | None = None
    #: Keep stdin writable; False gives the process an empty stdin. A terminal is always writable.
    pipe_stdin: bool = False
    user: str | None = None
    overflow: Overflow = "follow"
    lifetime: Lifetime = "server"
    limits: Limits | None = None
    confinement: Confinement | None = None
    kind: SpecKind = "direct"
    #: Names this attempt, so that a start which is sent twice starts once.
    start_id: str | None = None
    #: stderr is the same pipe as stdout, so that both come as one stream in the order in which they were printed.
    merge_stderr: bool = False


class OutputChunk(Struct, frozen=True):
    """Bytes that one stream printed, at their absolute offset in that stream.

    `seq` is the position in the process's one sequence over output, exit and close: read on after it.
    """

    stream: Stream
    offset: int
    data: bytes = msgspec.field(name="chunk")
    seq: int


class OutputGap(Struct, frozen=True):
    """Bytes of one stream that were printed and are no longer kept: exactly these, and no others."""

    stream: Stream
    offset: int
    length: int


class ExitStatus(Struct, frozen=True):
    """How a process ended: `exit_code` is 128 + n after signal n, as in every shell, and `signal` names it."""

    exit_code: int
    signal: str | None = None

    @property
    def success(self) -> bool:
        return self.exit_code == 0


class Exited(Struct, frozen=True):
    """The process's leader ended; everything it printed before is in the log and came before this."""

    seq: int
    status: ExitStatus


class Closed(Struct, frozen=True):
    """All streams ended: nobody holds them any more, nothing will come after this."""

    seq: int


#: What happens to a process, in the order in which it happened.
ProcessEvent = OutputChunk | OutputGap | Exited | Closed


class ReadResult(Struct, frozen=True):
    """What came after a position. `next_seq` is the `after_seq` of the next read plus one."""

    chunks: tuple[OutputChunk, ...]
    next_seq: int
    exited: bool
    exit_code: int | None
    closed: bool
    failure: str | None = None
    gap: tuple[OutputGap, ...] = ()
    sandbox_denied: bool = False


class Snapshot(Struct, frozen=True):
    """What is kept of a process's output now, with the head and the tail joined where the middle is gone."""

    stdout: bytes
    stderr: bytes
    terminal: bytes
    truncated: bool
    exit_code: int | None
    running: bool


class ProcessInfo(Struct, frozen=True):
    """One line of `holdfast ps`."""

    process_id: str
    pid: int
    argv: tuple[str, ...]
    cwd: str
    tty: bool
    running: bool
    closed: bool
    started_at: float
    exited_at: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    #: Bytes that each stream has printed so far.
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    pty_bytes: int = 0
    size: TerminalSize | None = None
    user: str | None = None
    #: Why its output, or how it ended, is not all known.
    failure: str | None = None


class ProcessUsage(Struct, frozen=True, omit_defaults=True):
    """What a process, a terminal or a shell uses, all that it started included.

    CPU time and bytes are counted since its start, also of what has ended and was waited for; memory is what is
    resident now, and what processes share is counted for each of them.
    """

    process_id: str
    #: Whether the program itself runs; what it started may run on without it.
    running: bool
    process_count: int = 0
    thread_count: int = 0
    #: The lowest pids of it, `USAGE_PIDS` at most.
    pids: tuple[int, ...] = ()
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    #: From and to storage, where the kernel lets us know.
    read_bytes: int = 0
    written_bytes: int = 0
    #: What its streams have printed; of a shell, its commands included.
    printed_bytes: int = 0
    #: What runs in the foreground of a terminal or a shell, and for how long; None at its prompt.
    foreground: str | None = None
    foreground_seconds: float = 0.0
    #: Whether that waits for input; None where the kernel does not tell.
    awaiting_input: bool | None = False
    #: How old the oldest of the others is, the program itself left out.
    background_seconds: float = 0.0

    @property
    def longest_running_seconds(self) -> float:
        """Of what it started, the longest."""
        return max(self.foreground_seconds, self.background_seconds)


class UsageSample(Struct, frozen=True, omit_defaults=True):
    """One look at the processes of a sandbox."""

    #: Of those that were asked for and are known.
    usages: tuple[ProcessUsage, ...]
    #: Pids of what processes started that are not known any more; `USAGE_PIDS` at most.
    strays: tuple[int, ...] = ()


class ShellInfo(Struct, frozen=True):
    """The sandbox's default shell."""

    name: str
    path: str


class EnvironmentInfo(Struct, frozen=True):
    """What kind of place the sandbox is."""

    shell: ShellInfo
    cwd: str
    user: str
    home: str
    hostname: str
    os: str
    arch: str
    version: str
    features: tuple[str, ...] = ()
    #: The command that runs holdfast there; a verb follows.
    holdfast: tuple[str, ...] = ()


class ClientInfo(Struct, frozen=True):
    """A client that is connected to the server, and what it has started there."""

    #: As the client named itself: `holdfast-python`, `holdfast-cli`, `holdfast-service` ...
    name: str
    #: The OS pid of the process that holds the connection, over a Unix socket; None elsewhere.
    pid: int | None = None
    #: Processes of the client that run, terminals among them, and shells that are open.
    processes: int = 0
    shells: int = 0


class ServerStatus(Struct, frozen=True):
    """How the server is."""

    version: str
    pid: int
    uptime: float
    processes_running: int
    processes_kept: int
    sessions: int
    spool: str
    spool_bytes: int
    #: Live shells that are open.
    shells: int = 0
    #: Terminals that are open.
    terminals: int = 0
    listening: tuple[str, ...] = ()
    #: How processes are marked and killed here: `cgroup`, `mark`, `tree`.
    containment: tuple[str, ...] = ()
    #: The keeper's pid, how long it has been there, and how often it has started a server again; None without one.
    keeper_pid: int | None = None
    keeper_uptime: float | None = None
    restarts: int = 0
    #: How much output is kept at most, how much room is left on the spool's file system, and what that is.
    spool_limit: int = 0
    spool_free: int = 0
    spool_file_system: str = ""
    #: What was lost when an earlier keeper was killed with its server; empty if nothing was.
    lost: str = ""
    #: For the Codex client, which reads this field alone.
    status: Literal["ready"] = "ready"
    #: The other clients that are connected, without the one that sent this request; None from a server that is too
    #: old to list them.
    clients: tuple[ClientInfo, ...] | None = None


class ShellSpec(Struct, frozen=True):
    """Which shell to start and how. `shell_id` is a key that the caller chooses."""

    shell_id: str
    #: A name or a path; None is bash where there is one, else sh.
    shell: str | None = None
    cwd: str | None = None
    #: As in `ProcessSpec`.
    env: dict[str, str] | None = None
    env_policy: EnvPolicy | None = None
    user: str | None = None
    #: Read the profile files, as after a login.
    login: bool = False
    lifetime: Lifetime = "server"
    limits: Limits | None = None
    confinement: Confinement | None = None
    start_id: str | None = None


class CommandSpec(Struct, frozen=True):
    """One command for a live shell. The same `command_id` again is the same command."""

    command_id: str
    command: str
    #: For this command alone; both are as before afterwards.
    cwd: str | None = None
    env: dict[str, str] | None = None
    #: All of its stdin; None is an empty one.
    input: bytes | None = None
    #: Seconds until it and what it started in the foreground are ended.
    timeout: float | None = None
    #: Keep its stdin writable, under its id, until it is closed or the command ends; goes without `input`.
    pipe_stdin: bool = False


class CommandEnded(Struct, frozen=True):
    """How a command in a shell ended. Everything it printed before is in its log and came before this."""

    #: 124 after a timeout, 130 after an interrupt.
    exit_code: int
    #: The shell's working directory now.
    cwd: str
    #: Seconds from when the shell was told to run it.
    duration: float
    timed_out: bool = False
    #: The shell is a new one, in the same directory; `restored` says what it has of the old one.
    shell_restarted: bool = False
    restored: Literal["", "exports", "state"] = ""
    #: The shell's state after it, and why it is closed.
    state: ShellState = "idle"
    reason: str = ""


#: What happens to a command in a shell, in the order in which it happened.
CommandEvent = OutputChunk | OutputGap | CommandEnded


class ShellStatus(Struct, frozen=True):
    """How a shell is."""

    shell_id: str
    #: The program.
    path: str
    pid: int
    state: ShellState
    cwd: str
    started_at: float
    #: Why it is closed.
    reason: str = ""
    exit_code: int | None = None
    #: The command that runs now, and how many wait behind it.
    command: str | None = None
    command_id: str | None = None
    queued: int = 0
    commands_run: int = 0
    restarts: int = 0
    #: Bytes that background jobs printed after their command had ended.
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    user: str | None = None
    login: bool = False


class TerminalSpec(Struct, frozen=True):
    """Which terminal to open and what runs in it. `terminal_id` is a process id, too: `process/*` take it."""

    terminal_id: str
    #: A shell by name or path, or a program with its arguments; None is bash where there is one, else sh.
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
    #: Have bash and zsh mark their prompts, so that it is known when a command ends.
    integration: bool = True
    #: Keep what is typed, for a recording; nothing that is typed while the terminal does not echo a line.
    record_input: bool = False
    lifetime: Lifetime = "server"
    limits: Limits | None = None
    confinement: Confinement | None = None
    start_id: str | None = None


class TerminalStatus(Struct, frozen=True):
    """How a terminal is."""

    terminal_id: str
    pid: int
    argv: tuple[str, ...]
    state: TerminalState
    size: TerminalSize
    cwd: str
    started_at: float
    #: The position after everything so far.
    token: int
    #: Grows with every change of what is told here; `terminal/wait` can wait for the next.
    changes: int
    #: The prompt that is shown or was shown last, without colours; None before the first.
    prompt: str | None = None
    #: Whether a program in the foreground, or behind one in a session of its own, is blocked on reading the
    #: terminal; None where the kernel does not tell.
    awaiting_input: bool | None = None
    #: Whether the terminal shows what is typed, and whether it gives whole lines. A password: lines, no echo.
    echo: bool = True
    canonical: bool = True
    #: What is in the foreground.
    foreground: str | None = None
    foreground_pid: int | None = None
    #: Bytes that were sent and that the terminal has not taken yet.
    input_queued: int = 0
    #: Of the last command that ended, and of the program itself once it has ended.
    last_exit_code: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    #: Why it is closed.
    reason: str = ""
    #: The shell whose prompts are marked: `bash`, `zsh`, or none.
    integration: str = ""
    #: What programs have switched on: the other screen, pasting as such, cursor keys for applications.
    alternate_screen: bool = False
    bracketed_paste: bool = False
    application_cursor: bool = False
    user: str | None = None
    #: The shell shows a continuation prompt: it asks for the rest of a command. The state is BUSY then.
    continuation: bool = False
    #: An interrupt was typed or sent, and no line was entered since: bash can drop the first byte of the next line.
    interrupted: bool = False

    @property
    def queue(self) -> Literal["empty", "busy"]:
        """Whether input waits to be taken."""
        return "busy" if self.input_queued else "empty"

    @property
    def password_prompt(self) -> bool | None:
        """Whether a program waits for a line that is not shown; None if only the waiting is not known."""
        return self.awaiting_input if self.canonical and not self.echo else False


class TerminalEvent(Struct, frozen=True, omit_defaults=True):
    """Something that happened in a terminal: output, or one of the events between its bytes."""

    #: The position after it: read on from here.
    token: int
    timestamp: float
    type: TerminalEventType
    #: What was printed (`output`) or typed (`input`); of a mark, its escape sequence if marks were asked for.
    payload: bytes = b""
    #: Where in the output it happened.
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
    #: Row and column on the screen, from 0; only if the reader asked for it.
    cursor_position: tuple[int, int] | None = None
    #: With `prompt`: the shell's directory; None if it had gone on by then.
    cwd: str | None = None


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
    #: Something between was printed and is no longer kept: a `gap` says where.
    truncated: bool = False
    #: Nothing will come any more.
    closed: bool = False
    #: Of a read with `ReadUntil`. None from servers before this field.
    outcome: ReadOutcome | None = None


class TerminalCommandEnded(Struct, frozen=True):
    """How a command that was typed at the prompt ended, and what the terminal showed from its start to its end."""

    #: 124 after a timeout.
    exit_code: int
    #: Seconds, from when it was typed.
    duration: float
    output: bytes
    #: Where its output begins and ends.
    start_token: int
    end_token: int
    timed_out: bool = False
    #: More was printed than is here: the most recent part is.
    truncated: bool = False
    #: The terminal's state after it; BUSY if it could not be stopped, CLOSED if it ended the shell.
    state: TerminalState = "IDLE"
    reason: str = ""
    #: The prompt after it, and how much of the status had changed by then.
    prompt: str | None = None
    changes: int = 0


class FileInfo(Struct, frozen=True, kw_only=True):
    """What a file is. `mode` has the permission bits alone."""

    type: FileType
    size: int
    mode: int
    #: When its content last changed, in nanoseconds since 1970: a float would not hold it.
    mtime_ns: int
    uid: int
    gid: int
    #: Where a symbolic link leads, as it is written in it.
    target: str | None = None

    @property
    def mtime(self) -> float:
        """When its content last changed, in seconds since 1970."""
        return self.mtime_ns / 1e9


class DirEntry(FileInfo, frozen=True, kw_only=True):
    """A file in a directory; of a symbolic link the link itself."""

    name: str


class DirPage(Struct, frozen=True):
    """Entries of a directory in the order of their names; `more` come after the last of them."""

    entries: tuple[DirEntry, ...]
    more: bool


class FilePiece(Struct, frozen=True, kw_only=True):
    """A part of a file. `chunk` stands last, as in `process/output`."""

    #: The size of the whole file now.
    size: int
    #: Nothing comes after this piece, now.
    eof: bool
    #: Tells one file from another that got its name meanwhile.
    file_id: str
    data: bytes = msgspec.field(name="chunk")


class FileAttributes(Struct, frozen=True, omit_defaults=True):
    """What a file is to have; None leaves it as it is, or as a new file gets it."""

    mode: int | None = None
    mtime_ns: int | None = None
