"""The data types of the system as frozen Structs; pure, imports no other module of holdfast, on every platform.

The same Structs go over the wire: camelCase, bytes as base64 in JSON and raw in MessagePack.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

Stream = Literal["stdout", "stderr", "pty"]
#: When output exceeds the retained size. `follow`: the process waits for readers that follow it, for a limited time
#: without progress. `drop`: it never waits. `block`: it waits for every attached reader.
Overflow = Literal["follow", "drop", "block"]
Lifetime = Literal["server", "connection"]
SpecKind = Literal["direct", "prepared"]
StdinMode = Literal["open", "closed"]
ShellState = Literal["idle", "running", "closed"]
#: RUNNING: alive, no prompt known (yet). BUSY: a command runs. IDLE: the prompt is shown. ERROR: it crashed.
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
#: `written`: closed after writing. `overflow`: events are lost. `root_removed`: the watched directory is gone.
WatchKind = Literal["created", "modified", "written", "attributes", "removed", "moved", "overflow", "root_removed"]
#: The default limit of the output that a command typed in a terminal returns: the latest part.
TERMINAL_OUTPUT_BYTES: Final = 16 * 1024 * 1024
#: The largest message that servers and clients accept by default. A 50 MiB body of a model call as base64 fits.
MAX_MESSAGE_BYTES: Final = 96 * 1024 * 1024
#: Larger input is written in pieces of this size; a process accepts about as much before the writer has to wait.
WRITE_PIECE_BYTES: Final = 1024 * 1024
#: Ended commands of a shell that stay readable, for a client whose connection broke.
KEPT_SHELL_COMMANDS: Final = 4
#: A piece of a file in one message: large enough that a round trip counts little, and 8 of them fit in memory.
FILE_PIECE_BYTES: Final = 1024 * 1024
#: Entries of one page of a directory.
DIRECTORY_PAGE: Final = 5_000
#: Events of a watched directory in one reply.
WATCH_EVENTS: Final = 1_000
#: Rows or columns of a terminal: the kernel has 16 bits for each.
MAX_TERMINAL_SIDE: Final = 65_535
#: Of a screen, and of a session of the service: a cell costs some tens of bytes, and the size comes from a caller.
MAX_SCREEN_SIDE: Final = 4_096
MAX_SESSION_SIDE: Final = 1_000
#: Ids of commands whose caller awaits the end begin with this, and `process/ended` leaves them out. Not a field of
#: `ProcessSpec`, which servers before it would refuse.
AWAITED_PREFIX: Final = "exec-"
#: Pids that a usage sample lists for one process; a fork bomb has more.
USAGE_PIDS: Final = 1_000


class Struct(msgspec.Struct, frozen=True, rename="camel"):
    """Base of all data types: frozen, and camelCase on the wire."""


class ShellStates:
    """The values of `ShellState`."""

    IDLE: Final = "idle"
    RUNNING: Final = "running"
    CLOSED: Final = "closed"


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


#: Patterns of the variables that a login sets: enough for a program to run, without secrets.
CORE_VARIABLES: Final = (
    *("HOME", "LANG", "LANGUAGE", "LC_*", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER"),
)
#: Patterns of the variables by which holdfast's own programs in a sandbox find their Python.
PYTHON_VARIABLES: Final = ("PYTHON*", "LD_LIBRARY_PATH")


class EnvPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """How a process's environment is derived from the server's; `ProcessSpec.env` is laid over the result."""

    #: `core`: only `CORE_VARIABLES`.
    inherit: Literal["all", "core", "none"] = "all"
    #: Keep variables that look like secrets (`secret_names.is_dropped`: `*KEY*`, `*SECRET*`, `*TOKEN*`, and more).
    ignore_default_excludes: bool = False
    #: Case-insensitive glob patterns of names to remove.
    exclude: tuple[str, ...] = ()
    set: dict[str, str] = {}
    #: If given, only names that match one of these patterns are kept.
    include_only: tuple[str, ...] = ()

    @classmethod
    def minimal(cls, *more: str) -> EnvPolicy:
        """`CORE_VARIABLES` and names that match the patterns `more`, without secrets and holdfast's variables."""
        return cls(exclude=("HOLDFAST_*",), include_only=(*CORE_VARIABLES, *more))


class Limits(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Resource limits of one process, set as rlimits before exec; its children inherit them."""

    cpu_seconds: int | None = None
    memory_bytes: int | None = None
    open_files: int | None = None
    processes: int | None = None
    file_size_bytes: int | None = None
    core_bytes: int | None = None
    stack_bytes: int | None = None
    nice: int | None = None


class Confinement(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Restrictions that the operating system enforces on a process and all that it starts; set before exec.

    Like every Struct that restricts a process, it refuses unknown fields: a restriction that an older version
    ignored would look enforced.
    """

    #: `bubblewrap`: its own root and namespaces. `landlock`: rights on paths, where no namespace can be created.
    mode: ConfinementMode = "none"
    #: Absolute real paths. In addition: the machine's programs to read, and with `bubblewrap` a private /tmp.
    writable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    #: Paths inside those that must not be accessible.
    hidden: tuple[str, ...] = ()
    #: `proxy`: only through the filtering proxy at the Unix socket `proxy`.
    network: ConfinedNetwork = "host"
    proxy: str | None = None
    #: Refuse system calls that programs seldom need and exploits often use.
    seccomp: bool = True
    #: With `landlock`, hide /proc of other processes; `bubblewrap` has a PID namespace in any case.
    hide_processes: bool = True
    #: The size of each of /tmp, /dev/shm and the home directory, with `bubblewrap`.
    scratch_bytes: int = 256 * 1024 * 1024
    #: Limits for all its processes together, by cgroup.
    total_memory_bytes: int | None = None
    total_processes: int | None = None
    cpu_cores: float | None = None
    #: False: no Unix socket can be created, except pairs. Otherwise readable paths can be connected to.
    unix_sockets: bool = True
    #: Programs of the machine that can be executed: names or paths with `*` and `?`; None: all.
    programs: tuple[str, ...] | None = None
    #: With `bubblewrap`, and by root: nothing can be executed outside the directories of the machine's programs,
    #: unless a path among `programs` leads there.
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
        """Whether these limits need a cgroup."""
        return (self.total_memory_bytes, self.total_processes, self.cpu_cores) != (None, None, None)


class ProcessSpec(Struct, frozen=True, omit_defaults=True):
    """A process to start. `process_id` is a key that the caller chooses, not an OS pid."""

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
    #: Idempotency key: a repeated start with the same key starts one process.
    start_id: str | None = None
    #: stderr is the same pipe as stdout, so that both are one stream in the printed order.
    merge_stderr: bool = False
    #: Seconds without output after which its whole tree is killed; its exit status is then `silent`.
    silence: float | None = None


class OutputChunk(Struct, frozen=True):
    """Bytes that one stream printed, at their absolute offset in that stream.

    `seq` is the position in the process's sequence of output, exit and close; continue reading after it.
    """

    stream: Stream
    offset: int
    data: bytes = msgspec.field(name="chunk")
    seq: int


class OutputGap(Struct, frozen=True):
    """Bytes of one stream that were printed and are no longer retained."""

    stream: Stream
    offset: int
    length: int


class ExitStatus(Struct, frozen=True):
    """How a process ended. After signal n, `exit_code` is 128 + n, as in a shell, and `signal` is its name."""

    exit_code: int
    signal: str | None = None
    #: The kernel killed it for memory, or a child whose exit code 137 it passed on.
    oom: bool = False
    #: It was killed because it printed nothing for the time that its spec allows.
    silent: bool = False

    @property
    def success(self) -> bool:
        return self.exit_code == 0


class Exited(Struct, frozen=True):
    """The process's leader ended; all output that it printed before has preceded this event."""

    seq: int
    status: ExitStatus


class Closed(Struct, frozen=True):
    """All streams reached end of file; this is the last event."""

    seq: int


#: The events of a process, in order.
ProcessEvent = OutputChunk | OutputGap | Exited | Closed


class OutputTime(Struct, frozen=True):
    """The time at which a stream printed the bytes from an offset on, in seconds since 1970."""

    stream: Stream
    offset: int
    at: float


class ReadResult(Struct, frozen=True):
    """Output and state of a process after a position; continue with `after_seq`."""

    chunks: tuple[OutputChunk, ...]
    next_seq: int
    exited: bool
    exit_code: int | None
    closed: bool
    failure: str | None = None
    gap: tuple[OutputGap, ...] = ()
    sandbox_denied: bool = False
    #: Of the chunks, if requested; not on the wire otherwise, nor from servers before this field.
    times: tuple[OutputTime, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def after_seq(self) -> int:
        """The position for the next read: the `after_seq` of `ExecApi.read` and the `since` of `Process.read`."""
        return self.next_seq - 1


class Snapshot(Struct, frozen=True):
    """The retained output of a process; head and tail are joined where the middle was dropped."""

    stdout: bytes
    stderr: bytes
    terminal: bytes
    truncated: bool
    exit_code: int | None
    running: bool


class ProcessInfo(Struct, frozen=True):
    """The status of a process: one line of `holdfast ps`."""

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
    #: Why its output or its exit status is incomplete.
    failure: str | None = None
    #: As in `ExitStatus`.
    oom: bool = False
    silent: bool = False


class EndedProcess(Struct, frozen=True):
    """A process that has ended, in the order of the ends; continue with its `number`."""

    number: int
    info: ProcessInfo


class EndedProcesses(Struct, frozen=True):
    """The processes that ended after a number. `missed`: more ended than are remembered."""

    ended: tuple[EndedProcess, ...]
    #: The `after` of the next call.
    next: int
    missed: bool = False


class MemberUsage(Struct, frozen=True, omit_defaults=True):
    """The resources of one operating system process, without its children."""

    pid: int
    parent: int
    #: The name of the program, for a kernel thread or a zombie, whose `argv` is empty.
    name: str
    argv: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    thread_count: int = 0
    #: Since its start.
    seconds: float = 0.0


class ProcessUsage(Struct, frozen=True, omit_defaults=True):
    """The resources of a process, a terminal or a shell, with all that it started.

    CPU time and bytes count from its start and include ended children that were reaped; memory is the resident size
    now, and shared memory counts once for each process.
    """

    process_id: str
    #: Whether the program itself runs; its children may run without it.
    running: bool
    process_count: int = 0
    thread_count: int = 0
    #: Its lowest pids, at most `USAGE_PIDS`.
    pids: tuple[int, ...] = ()
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    #: From and to storage, where the kernel reports it.
    read_bytes: int = 0
    written_bytes: int = 0
    #: Output of its streams; for a shell, with its commands.
    printed_bytes: int = 0
    #: The foreground program of a terminal or a shell, and for how long it has run; None at its prompt.
    foreground: str | None = None
    foreground_seconds: float = 0.0
    #: Whether that program awaits input; None where the kernel does not report it.
    awaiting_input: bool | None = False
    #: The age of the oldest other process, without the program itself.
    background_seconds: float = 0.0
    #: The processes of `pids` one by one, if requested. Empty from servers before this field.
    members: tuple[MemberUsage, ...] = ()

    @property
    def longest_running_seconds(self) -> float:
        """The longest run time among the processes that it started."""
        return max(self.foreground_seconds, self.background_seconds)


class UsageSample(Struct, frozen=True, omit_defaults=True):
    """One sample of the processes of a sandbox."""

    #: For the requested ids that are known.
    usages: tuple[ProcessUsage, ...]
    #: Pids of leftover descendants of processes that are no longer known; at most `USAGE_PIDS`.
    strays: tuple[int, ...] = ()


class ShellInfo(Struct, frozen=True):
    """The sandbox's default shell."""

    name: str
    path: str


class EnvironmentInfo(Struct, frozen=True):
    """The environment of a sandbox."""

    shell: ShellInfo
    cwd: str
    user: str
    home: str
    hostname: str
    os: str
    arch: str
    version: str
    features: tuple[str, ...] = ()
    #: The command that runs holdfast there, without the verb.
    holdfast: tuple[str, ...] = ()
    #: The parts of the Codex protocol that the server has, by name; only for clients of that protocol.
    capabilities: dict[str, bool] | msgspec.UnsetType = msgspec.UNSET


class ClientInfo(Struct, frozen=True):
    """A client that is connected to the server, and the number of its processes and shells."""

    #: The client's own name: `holdfast-python`, `holdfast-cli`, `holdfast-service` ...
    name: str
    #: The OS pid of the process that holds the connection, over a Unix socket; None elsewhere.
    pid: int | None = None
    #: Running processes of the client, with terminals, and open shells.
    processes: int = 0
    shells: int = 0


class ServerStatus(Struct, frozen=True):
    """The status of a server."""

    version: str
    pid: int
    uptime: float
    processes_running: int
    processes_kept: int
    sessions: int
    spool: str
    spool_bytes: int
    #: Open live shells.
    shells: int = 0
    #: Open terminals.
    terminals: int = 0
    listening: tuple[str, ...] = ()
    #: How processes are marked and killed here: `cgroup`, `mark`, `tree`.
    containment: tuple[str, ...] = ()
    #: The keeper's pid, its uptime, and the number of servers that it has restarted; None without a keeper.
    keeper_pid: int | None = None
    keeper_uptime: float | None = None
    restarts: int = 0
    #: The limit of retained output, and the free room and type of the spool's file system.
    spool_limit: int = 0
    spool_free: int = 0
    spool_file_system: str = ""
    #: A description of the losses when an earlier keeper was killed with its server; empty if there were none.
    lost: str = ""
    #: For the Codex client, which reads only this field.
    status: Literal["ready"] = "ready"
    #: The connected clients, without the one that sent this request; None from an older server.
    clients: tuple[ClientInfo, ...] | None = None
    #: Seconds since a client's last call, without calls that only observe the server; None from an older server.
    idle_seconds: float | None = None


class ShellSpec(Struct, frozen=True):
    """A shell to start. `shell_id` is a key that the caller chooses."""

    shell_id: str
    #: A name or a path; None: bash, or sh where bash is missing.
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
    """One command for a live shell. `command_id` is an idempotency key."""

    command_id: str
    command: str
    #: For this command alone; the shell keeps its own.
    cwd: str | None = None
    env: dict[str, str] | None = None
    #: Its whole stdin; None: empty.
    input: bytes | None = None
    #: Seconds until the command and its foreground processes are ended.
    timeout: float | None = None
    #: Keep its stdin writable, under its id, until it is closed or the command ends; not with `input`.
    pipe_stdin: bool = False
    #: Seconds without output after which it is ended as by a timeout.
    silence: float | None = None


class CommandEnded(Struct, frozen=True):
    """How a command in a shell ended; all output that it printed before has preceded this event."""

    #: 124 after a timeout, 130 after an interrupt.
    exit_code: int
    #: The shell's working directory now.
    cwd: str
    #: Seconds since the shell began it.
    duration: float
    timed_out: bool = False
    #: The shell was replaced by a new one in the same directory, with the state that `restored` names.
    shell_restarted: bool = False
    restored: Literal["", "exports", "state"] = ""
    #: The shell's state after it, and the reason if it is closed.
    state: ShellState = "idle"
    reason: str = ""
    #: The kernel killed one of its processes for memory, and its exit code is that process's.
    oom: bool = False
    #: With `timed_out`: it had printed nothing for its `silence`.
    silent: bool = False


#: The events of a command in a shell, in order.
CommandEvent = OutputChunk | OutputGap | CommandEnded


class ShellStatus(Struct, frozen=True):
    """The status of a shell."""

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
    #: The running command, and the number of queued ones.
    command: str | None = None
    command_id: str | None = None
    queued: int = 0
    commands_run: int = 0
    restarts: int = 0
    #: Bytes that background jobs printed after their command ended.
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    user: str | None = None
    login: bool = False


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


class FileInfo(Struct, frozen=True, kw_only=True):
    """The attributes of a file. `mode` has only the permission bits."""

    type: FileType
    size: int
    mode: int
    #: Modification time in nanoseconds since 1970, for which a float is not precise enough.
    mtime_ns: int
    uid: int
    gid: int
    #: The content of a symbolic link.
    target: str | None = None

    @property
    def mtime(self) -> float:
        """Modification time in seconds since 1970."""
        return self.mtime_ns / 1e9


class DirEntry(FileInfo, frozen=True, kw_only=True):
    """An entry of a directory; for a symbolic link, the link itself."""

    name: str


class DirPage(Struct, frozen=True):
    """Entries of a directory in the order of their names; `more` follow after the last of them."""

    entries: tuple[DirEntry, ...]
    more: bool


class WatchEvent(Struct, frozen=True, omit_defaults=True):
    """A change below a watched directory. Names are relative to it: `src/main.c`; the directory itself is empty."""

    seq: int
    kind: WatchKind
    name: str
    #: The earlier name of a file that was moved.
    old_name: str | None = None
    #: Whether the name is that of a directory.
    directory: bool = False
    #: Why events below `name` are lost.
    reason: str = ""


class WatchRead(Struct, frozen=True):
    """Events of a watched directory; after `ended` there are no more."""

    events: tuple[WatchEvent, ...]
    ended: bool = False


class FilePiece(Struct, frozen=True, kw_only=True):
    """A part of a file. `chunk` is the last field, as in `process/output`."""

    #: The size of the whole file now.
    size: int
    #: The file ends with this piece, now.
    eof: bool
    #: Identifies the file, in case another one gets its name meanwhile.
    file_id: str
    data: bytes = msgspec.field(name="chunk")


class FileAttributes(Struct, frozen=True, omit_defaults=True):
    """Attributes to set on a file; None leaves one as it is, or at the default of a new file."""

    mode: int | None = None
    mtime_ns: int | None = None
