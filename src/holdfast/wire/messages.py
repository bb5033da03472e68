"""Parameters and results of every method, and the notifications; pure data.

A Struct of `holdfast.types` that has the right shape is used as it is. Fields that a peer may leave out have
defaults, and unknown fields are ignored, so that newer and older versions are compatible.
"""

from __future__ import annotations

from typing import Any, Literal

from holdfast.types import (
    TERMINAL_OUTPUT_BYTES,
    CloseMode,
    CommandEnded,
    EndedProcesses,
    EnvironmentInfo,
    ExitStatus,
    JobsAtClose,
    ProcessInfo,
    ProcessSpec,
    ReadResult,
    ReadUntil,
    ServerStatus,
    ShellSpec,
    ShellStatus,
    Snapshot,
    Stream,
    Struct,
    TerminalCommandEnded,
    TerminalRead,
    TerminalSpec,
    TerminalStatus,
    TerminalWait,
    UsageSample,
)
from holdfast.wire.methods import Notification, WireMethod

Encoding = Literal["json", "msgpack"]


class Empty(Struct, frozen=True):
    """No parameters, or no result."""


class InitializeParams(Struct, frozen=True):
    client_name: str
    resume_session_id: str | None = None
    encoding: Encoding = "json"
    client_version: str | None = None


class InitializeResult(Struct, frozen=True):
    session_id: str
    encoding: Encoding
    server_version: str
    protocol: int
    resumed: bool
    #: The largest message that the server accepts; None from an older server.
    max_message_bytes: int | None = None


class SubscribeSpec(Struct, frozen=True, omit_defaults=True):
    """A reader of one process. The caller chooses `subscription`, the reader's name on this connection."""

    subscription: str
    after_seq: int = 0
    #: Bytes that may be in flight unacknowledged; None: no bound.
    window: int | None = None
    #: The reader polls: nothing is pushed, and `subscription` is the `reader` of its `process/read` calls.
    polls: bool = False


class StartParams(ProcessSpec, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A `ProcessSpec`, the way its output is pushed, and fields of the Codex client.

    `subscribe` true (the default) pushes everything to this connection, as the Codex client expects; false
    pushes nothing; a `SubscribeSpec` opens that reader in the same round trip. An unknown field is an error: it may
    be a restriction, which must not look enforced.
    """

    subscribe: bool | SubscribeSpec = True
    #: A policy, read by `server.sandbox_policy`.
    sandbox: Any = None
    #: A network behind the client's own proxy; refused, because this server cannot provide it.
    enforce_managed_network: bool = False
    managed_network: Any = None
    network_proxy: Any = None
    #: Telemetry of the client and a cache of shell state; neither restricts anything, and both are ignored.
    metadata: Any = None
    shell_snapshot: Any = None


class StartResult(Struct, frozen=True):
    process_id: str
    pid: int
    process: ProcessInfo


class ProcessParams(Struct, frozen=True):
    process_id: str


class ReadParams(Struct, frozen=True):
    process_id: str
    after_seq: int | None = None
    max_bytes: int | None = None
    wait_ms: int | None = None
    #: The name of a polling reader: output is held back for its next poll, as for a subscription.
    reader: str | None = None
    #: Return the times of the output.
    timing: bool = False


class WriteParams(Struct, frozen=True):
    process_id: str
    chunk: bytes
    write_id: str | None = None


class WriteResult(Struct, frozen=True):
    status: Literal["accepted", "unknownProcess", "stdinClosed"]


class ResizeParams(Struct, frozen=True):
    process_id: str
    rows: int
    cols: int


class SignalParams(Struct, frozen=True):
    """`signal_id` is an idempotency key: a repeated request signals once."""

    process_id: str
    signal: str
    signal_id: str | None = None


class TerminateParams(Struct, frozen=True):
    process_id: str
    grace_ms: int = 5_000
    force: bool = False


class TerminateResult(Struct, frozen=True):
    """Whether the process was running. An unknown process is not an error: it does not run."""

    running: bool


class WaitParams(Struct, frozen=True):
    process_id: str
    timeout_ms: int | None = None


class WaitResult(Struct, frozen=True):
    running: bool
    exit_code: int | None = None
    signal: str | None = None
    oom: bool = False
    silent: bool = False


class EndedParams(Struct, frozen=True, omit_defaults=True):
    """`after`: the `next` of the last reply; without it the reply has only the number to begin at."""

    after: int | None = None
    #: How long to wait for the first end.
    wait_ms: int = 0


class ListResult(Struct, frozen=True):
    processes: tuple[ProcessInfo, ...]


class UsageParams(Struct, frozen=True, omit_defaults=True):
    process_ids: tuple[str, ...]
    #: List the operating system processes of each id, with their command lines.
    members: bool = False


class SubscribeParams(Struct, frozen=True):
    process_id: str
    subscription: str
    after_seq: int = 0
    window: int | None = None


class UnsubscribeParams(Struct, frozen=True):
    subscription: str


class CreditParams(Struct, frozen=True):
    """The reader has taken everything up to `seq`, `bytes` more than at its last credit."""

    subscription: str
    seq: int
    bytes: int


class CancelParams(Struct, frozen=True):
    """The caller no longer waits for the reply to the request with this id."""

    id: int | str


class WaitForPortParams(Struct, frozen=True):
    port: int
    host: str = "127.0.0.1"
    timeout_ms: int = 30_000


class ShutdownParams(Struct, frozen=True):
    """Stop the server; None means the grace period of its settings. `keep` leaves processes to the keeper."""

    grace_ms: int | None = None
    keep: bool = False


# --- shells ----------------------------------------------------------------------------------------------------


class ShellParams(Struct, frozen=True):
    shell_id: str


class ShellRunParams(Struct, frozen=True, omit_defaults=True):
    """A command, and how its output is sent: a little with the reply, more through the subscription."""

    shell_id: str
    #: Idempotency key: a repeated request runs the command once. Its output is read under this id.
    command_id: str
    command: str
    cwd: str | None = None
    env: dict[str, str] | None = None
    input: bytes | None = None
    timeout_ms: int | None = None
    subscribe: SubscribeSpec | None = None
    #: Push output as it is printed, instead of sending a small one with the reply.
    live: bool = False
    #: Keep its stdin writable: `process/write` and `process/closeStdin` take the command's id.
    pipe_stdin: bool = False
    #: How long it may print nothing before it is ended as by a timeout.
    silence_ms: int | None = None


class ShellRunResult(Struct, frozen=True, omit_defaults=True):
    """How the command ended, and its output unless it was pushed."""

    ended: CommandEnded
    stdout: bytes = b""
    stderr: bytes = b""
    #: Output goes through the subscription, up to `process/exited`; `stdout` and `stderr` are empty.
    pushed: bool = False
    #: More was printed than is retained.
    truncated: bool = False


class ShellStartParams(Struct, frozen=True):
    shell_id: str
    process_id: str
    command: str
    #: Idempotency key: a repeated request starts one process.
    start_id: str | None = None
    #: Keep stdin writable; false gives an empty stdin.
    pipe_stdin: bool = False


class ShellInterruptParams(Struct, frozen=True):
    shell_id: str
    #: Interrupt this command, or remove it from the queue. None: the running command.
    command_id: str | None = None
    #: Idempotency key: a repeated request interrupts once.
    interrupt_id: str | None = None


class ShellInterruptResult(Struct, frozen=True):
    running: bool


class ShellCloseParams(Struct, frozen=True):
    shell_id: str
    #: Let background jobs run on.
    keep: bool = False
    grace_ms: int = 5000


class ShellListResult(Struct, frozen=True):
    shells: tuple[ShellStatus, ...]


# --- terminals -------------------------------------------------------------------------------------------------


class TerminalParams(Struct, frozen=True, omit_defaults=True):
    terminal_id: str
    #: Determine `awaiting_input`, which reads a few files of /proc; otherwise that field is None.
    look: bool = True


class TerminalReadParams(Struct, frozen=True, omit_defaults=True):
    """A read after the position `since`."""

    terminal_id: str
    since: int = 0
    max_bytes: int | None = None
    #: How long to wait for output or events.
    wait_ms: int = 0
    #: Split output of different times into separate events.
    timing: bool = False
    #: Give prompt marks their escape sequences as payload.
    marks: bool = False
    #: Wait for one of these conditions instead of for anything.
    until: ReadUntil | None = None
    #: Without `until`: after the first output or event, wait this long for more, within `wait_ms`.
    gather_ms: int = 0


class TerminalRunParams(Struct, frozen=True, omit_defaults=True):
    """Type a command at the prompt, and wait for the next prompt."""

    terminal_id: str
    command: str
    timeout_ms: int | None = None
    #: Of more output, the latest part is returned.
    max_bytes: int = TERMINAL_OUTPUT_BYTES
    #: Idempotency key: a repeated request types the command once.
    run_id: str | None = None


class TerminalWithdrawParams(Struct, frozen=True):
    """Interrupt a command for which no caller waits any more."""

    terminal_id: str
    run_id: str


class TerminalKeysParams(Struct, frozen=True, omit_defaults=True):
    """Keys by name."""

    terminal_id: str
    keys: tuple[str, ...]
    #: Idempotency key: a repeated request types once.
    write_id: str | None = None


class TerminalWaitParams(Struct, frozen=True, omit_defaults=True):
    terminal_id: str
    until: TerminalWait
    #: None waits without end.
    timeout_ms: int | None = None
    #: With `change`: wait for a status with a larger `changes`.
    changes: int = 0


class TerminalWaitResult(Struct, frozen=True):
    #: Whether the condition was reached in time.
    reached: bool
    terminal: TerminalStatus


class TerminalCloseParams(Struct, frozen=True, omit_defaults=True):
    terminal_id: str
    mode: CloseMode = "graceful"
    #: Whether background jobs end with it.
    jobs: JobsAtClose = "kill"
    grace_ms: int = 5000


class TerminalListResult(Struct, frozen=True):
    terminals: tuple[TerminalStatus, ...]


# --- notifications ---------------------------------------------------------------------------------------------


class OutputParams(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Output as it is printed. `chunk` is the last field, so that its bytes can be sent from the spool."""

    process_id: str
    seq: int
    stream: Stream
    offset: int
    subscription: str | None = None
    #: Set when several chunks of one stream were joined: `first_seq` to `seq`.
    first_seq: int | None = None
    chunk: bytes


class ExitedParams(ExitStatus, frozen=True, kw_only=True):
    process_id: str
    seq: int
    sandbox_denied: bool = False
    subscription: str | None = None

    @property
    def status(self) -> ExitStatus:
        return ExitStatus(*(getattr(self, name) for name in ExitStatus.__struct_fields__))


class ClosedParams(Struct, frozen=True):
    process_id: str
    seq: int
    subscription: str | None = None


# --- rows of the method table -----------------------------------------------------------------------------------

INITIALIZE = WireMethod("initialize", InitializeParams, InitializeResult)
PING = WireMethod("ping", Empty, Empty)
ENVIRONMENT_INFO = WireMethod("environment/info", Empty, EnvironmentInfo)
ENVIRONMENT_STATUS = WireMethod("environment/status", Empty, ServerStatus)
SERVER_SHUTDOWN = WireMethod("server/shutdown", ShutdownParams, Empty)

PROCESS_START = WireMethod("process/start", StartParams, StartResult)
PROCESS_READ = WireMethod("process/read", ReadParams, ReadResult)
PROCESS_WRITE = WireMethod("process/write", WriteParams, WriteResult)
PROCESS_CLOSE_STDIN = WireMethod("process/closeStdin", ProcessParams, Empty)
PROCESS_RESIZE = WireMethod("process/resize", ResizeParams, Empty)
PROCESS_SIGNAL = WireMethod("process/signal", SignalParams, Empty)
PROCESS_TERMINATE = WireMethod("process/terminate", TerminateParams, TerminateResult)
PROCESS_WAIT = WireMethod("process/wait", WaitParams, WaitResult)
PROCESS_ENDED = WireMethod("process/ended", EndedParams, EndedProcesses)
PROCESS_SNAPSHOT = WireMethod("process/snapshot", ProcessParams, Snapshot)
PROCESS_DESCRIBE = WireMethod("process/describe", ProcessParams, ProcessInfo)
PROCESS_LIST = WireMethod("process/list", Empty, ListResult)
PROCESS_USAGE = WireMethod("process/usage", UsageParams, UsageSample)
PROCESS_FORGET = WireMethod("process/forget", ProcessParams, Empty)
PROCESS_SUBSCRIBE = WireMethod("process/subscribe", SubscribeParams, Empty)
PROCESS_UNSUBSCRIBE = WireMethod("process/unsubscribe", UnsubscribeParams, Empty)
PORT_WAIT = WireMethod("port/wait", WaitForPortParams, Empty)

SHELL_OPEN = WireMethod("shell/open", ShellSpec, ShellStatus)
SHELL_RUN = WireMethod("shell/run", ShellRunParams, ShellRunResult)
SHELL_START = WireMethod("shell/start", ShellStartParams, ProcessInfo)
SHELL_INTERRUPT = WireMethod("shell/interrupt", ShellInterruptParams, ShellInterruptResult)
SHELL_CLOSE = WireMethod("shell/close", ShellCloseParams, Empty)
SHELL_DESCRIBE = WireMethod("shell/describe", ShellParams, ShellStatus)
SHELL_LIST = WireMethod("shell/list", Empty, ShellListResult)

TERMINAL_OPEN = WireMethod("terminal/open", TerminalSpec, TerminalStatus)
TERMINAL_READ = WireMethod("terminal/read", TerminalReadParams, TerminalRead)
TERMINAL_RUN = WireMethod("terminal/run", TerminalRunParams, TerminalCommandEnded)
TERMINAL_WITHDRAW = WireMethod("terminal/withdraw", TerminalWithdrawParams, Empty)
TERMINAL_KEYS = WireMethod("terminal/keys", TerminalKeysParams, Empty)
TERMINAL_WAIT = WireMethod("terminal/wait", TerminalWaitParams, TerminalWaitResult)
TERMINAL_CLOSE = WireMethod("terminal/close", TerminalCloseParams, TerminalStatus)
TERMINAL_DESCRIBE = WireMethod("terminal/describe", TerminalParams, TerminalStatus)
TERMINAL_LIST = WireMethod("terminal/list", Empty, TerminalListResult)

INITIALIZED = Notification("initialized", Empty, sender="client")
REQUEST_CANCEL = Notification("request/cancel", CancelParams, sender="client")
PROCESS_CREDIT = Notification("process/credit", CreditParams, sender="client")
PROCESS_OUTPUT = Notification("process/output", OutputParams, sender="server")
PROCESS_EXITED = Notification("process/exited", ExitedParams, sender="server")
PROCESS_CLOSED = Notification("process/closed", ClosedParams, sender="server")
