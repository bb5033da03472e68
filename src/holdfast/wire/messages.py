"""Parameters and results of every method, and the notifications; pure data.

Where a Struct of the model is already the right shape it is used as it is. Fields that a peer may leave out have
defaults; fields that a peer sends and we do not know are ignored, so newer and older versions talk.
"""

from __future__ import annotations

from typing import Any, Literal

from holdfast.types import (
    TERMINAL_OUTPUT_BYTES,
    CloseMode,
    CommandEnded,
    JobsAtClose,
    ProcessInfo,
    ProcessSpec,
    ReadUntil,
    ShellStatus,
    Stream,
    Struct,
    TerminalStatus,
    TerminalWait,
)

Encoding = Literal["json", "msgpack"]


class Empty(Struct, frozen=True):
    """No parameters, or nothing to tell."""


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
    #: The largest message that the server takes, if it tells.
    max_message_bytes: int | None = None


class SubscribeSpec(Struct, frozen=True, omit_defaults=True):
    """A reader of one process. The caller chooses `subscription`; it names the reader on this connection."""

    subscription: str
    after_seq: int = 0
    #: Bytes that may be on their way unacknowledged; None: as fast as the connection takes them.
    window: int | None = None
    #: The reader polls: nothing is pushed, and `subscription` is the `reader` of its `process/read`.
    polls: bool = False


class StartParams(ProcessSpec, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A `ProcessSpec`, how its output is to be pushed, and what the Codex client adds.

    `subscribe` true (the default) pushes everything to this connection, as the Codex client expects; false
    pushes nothing; a `SubscribeSpec` opens that reader in the same round trip. A field that is not known is an
    error: it may restrict the process, and must not look enforced.
    """

    subscribe: bool | SubscribeSpec = True
    #: A policy, read by `server.sandbox_policy`.
    sandbox: Any = None
    #: A network behind the client's own proxy, which this server cannot provide.
    enforce_managed_network: bool = False
    managed_network: Any = None
    network_proxy: Any = None
    #: For the client's telemetry, and a cache of shell state. Neither restricts anything, and neither is used.
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
    #: A name for the polls of one reader: output is kept for the next poll as for a subscription.
    reader: str | None = None


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
    """`signal_id` names this sending, so that a request which is sent twice signals once."""

    process_id: str
    signal: str
    signal_id: str | None = None


class TerminateParams(Struct, frozen=True):
    process_id: str
    grace_ms: int = 5_000
    force: bool = False


class TerminateResult(Struct, frozen=True):
    """Whether it was running when asked. An unknown process is not an error: it does not run."""

    running: bool


class WaitParams(Struct, frozen=True):
    process_id: str
    timeout_ms: int | None = None


class WaitResult(Struct, frozen=True):
    running: bool
    exit_code: int | None = None
    signal: str | None = None


class ListResult(Struct, frozen=True):
    processes: tuple[ProcessInfo, ...]


class UsageParams(Struct, frozen=True):
    """Of processes, terminals and shells."""

    process_ids: tuple[str, ...]


class SubscribeParams(Struct, frozen=True):
    process_id: str
    subscription: str
    after_seq: int = 0
    window: int | None = None


class UnsubscribeParams(Struct, frozen=True):
    subscription: str


class CreditParams(Struct, frozen=True):
    """The reader has taken everything up to `seq`, `bytes` more than it said before."""

    subscription: str
    seq: int
    bytes: int


class CancelParams(Struct, frozen=True):
    """Nobody waits any more for the reply to the request with this id."""

    id: int | str


class WaitForPortParams(Struct, frozen=True):
    port: int
    host: str = "127.0.0.1"
    timeout_ms: int = 30_000


class ShutdownParams(Struct, frozen=True):
    """End the server; None takes the grace period of its settings. `keep` leaves what runs to the keeper."""

    grace_ms: int | None = None
    keep: bool = False


# --- the exec_remote family: snake_case on the wire, as its callers have it -----------------------------------


class Snake(Struct, frozen=True, rename=None):
    """Base of the `exec_remote_*` messages."""


class ExecRemoteStartParams(Snake, frozen=True):
    command: str
    input: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None
    #: Keep stdin open after `input` for `exec_remote_write_stdin`.
    stdin_open: bool = False


class ExecRemoteStartResult(Snake, frozen=True):
    pid: int


class ExecRemotePollParams(Snake, frozen=True):
    """`ack_seq`: the `seq` of the last reply that arrived; what was sent after it is sent again."""

    pid: int
    ack_seq: int | None = None
    #: Wait this long for something to tell.
    wait_ms: int = 0


class ExecRemotePollResult(Snake, frozen=True, omit_defaults=True):
    #: These have no defaults, so that they are always sent: callers of other languages look them up unasked.
    state: Literal["running", "completed", "killed"]
    stdout: str
    stderr: str
    seq: int
    exit_code: int | None = None


class ExecRemotePidParams(Snake, frozen=True):
    pid: int


class ExecRemoteWriteParams(Snake, frozen=True):
    pid: int
    data: str


class ExecRemoteDone(Snake, frozen=True):
    success: bool
    message: str = ""


# --- shells ----------------------------------------------------------------------------------------------------


class ShellParams(Struct, frozen=True):
    shell_id: str


class ShellRunParams(Struct, frozen=True, omit_defaults=True):
    """A command, and how its output comes: little output in the reply, more through the subscription."""

    shell_id: str
    #: Names the command, so that one that is sent twice runs once; its output is read under this id.
    command_id: str
    command: str
    cwd: str | None = None
    env: dict[str, str] | None = None
    input: bytes | None = None
    timeout_ms: int | None = None
    subscribe: SubscribeSpec | None = None
    #: Push every byte as it is printed; without it, what fits comes with the reply.
    live: bool = False
    #: Keep its stdin writable: `process/write` and `process/closeStdin` take the command's id.
    pipe_stdin: bool = False


class ShellRunResult(Struct, frozen=True, omit_defaults=True):
    """How the command ended, and its output unless that was pushed."""

    ended: CommandEnded
    stdout: bytes = b""
    stderr: bytes = b""
    #: Output comes through the subscription, up to `process/exited`; `stdout` and `stderr` are empty.
    pushed: bool = False
    #: More was printed than is kept.
    truncated: bool = False


class ShellStartParams(Struct, frozen=True):
    shell_id: str
    process_id: str
    command: str
    #: Names this attempt, so that a start which is sent twice starts once.
    start_id: str | None = None
    #: Keep stdin writable; without it, it is empty.
    pipe_stdin: bool = False


class ShellInterruptParams(Struct, frozen=True):
    shell_id: str
    #: Only this command: one that waits is taken out of the queue. Without it, the one that runs.
    command_id: str | None = None
    #: Names this interrupt, so that one which is sent twice interrupts once.
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
    #: Look who waits for input: a few files of /proc. Without it `awaiting_input` is None.
    look: bool = True


class TerminalReadParams(Struct, frozen=True, omit_defaults=True):
    """What came after the position `since`."""

    terminal_id: str
    since: int = 0
    max_bytes: int | None = None
    #: Wait this long for something to come.
    wait_ms: int = 0
    #: Output of different times in events of their own.
    timing: bool = False
    #: Prompt marks have their escape sequences as payload.
    marks: bool = False
    #: Wait for one of these conditions instead of for anything.
    until: ReadUntil | None = None


class TerminalRunParams(Struct, frozen=True, omit_defaults=True):
    """Type a command at the prompt, and wait for the prompt to come back."""

    terminal_id: str
    command: str
    timeout_ms: int | None = None
    #: Of more output, the latest part comes.
    max_bytes: int = TERMINAL_OUTPUT_BYTES
    #: Names the command, so that one that is sent twice is typed once.
    run_id: str | None = None


class TerminalWithdrawParams(Struct, frozen=True):
    """Nobody waits for this command any more: it is interrupted."""

    terminal_id: str
    run_id: str


class TerminalKeysParams(Struct, frozen=True, omit_defaults=True):
    """Keys by name."""

    terminal_id: str
    keys: tuple[str, ...]
    #: Names this write, so that one that is sent twice is typed once.
    write_id: str | None = None


class TerminalWaitParams(Struct, frozen=True, omit_defaults=True):
    terminal_id: str
    until: TerminalWait
    #: None waits without end.
    timeout_ms: int | None = None
    #: With `change`: for a status with more than so many changes.
    changes: int = 0


class TerminalWaitResult(Struct, frozen=True):
    #: Whether it came in time.
    reached: bool
    terminal: TerminalStatus


class TerminalCloseParams(Struct, frozen=True, omit_defaults=True):
    terminal_id: str
    mode: CloseMode = "graceful"
    #: What becomes of background jobs.
    jobs: JobsAtClose = "kill"
    grace_ms: int = 5000


class TerminalListResult(Struct, frozen=True):
    terminals: tuple[TerminalStatus, ...]


# --- services of the host --------------------------------------------------------------------------------------


class ServiceCalled(Struct, frozen=True, tag="called", tag_field="kind"):
    """Somebody inside calls: the host is to answer under `call_id`."""

    seq: int
    call_id: str
    method: str
    body: bytes


class ServiceCancelled(Struct, frozen=True, tag="cancelled", tag_field="kind"):
    """The caller is gone, or wants no more."""

    seq: int
    call_id: str


ServiceEvent = ServiceCalled | ServiceCancelled


class ServiceOfferParams(Struct, frozen=True, omit_defaults=True):
    """The host answers calls of `service`; who calls must know the instance, which is a hash of `key`.

    A long poll: the reply has what happened after `after_seq`, and what came before need not be kept any more.
    """

    service: str
    key: str
    #: Of the last reply; a server that was restarted counts anew.
    epoch: str = ""
    after_seq: int = 0
    wait_ms: int = 0


class ServiceOfferResult(Struct, frozen=True):
    epoch: str
    events: tuple[ServiceEvent, ...]


class ServiceAnswerParams(Struct, frozen=True, omit_defaults=True):
    """The next pieces of an answer. Counted from 1, so that one that is sent twice arrives once."""

    call_id: str
    key: str
    #: The number of the first piece.
    seq: int
    data: bytes = b""
    #: Further pieces, made at the same time.
    more: tuple[bytes, ...] = ()
    end: bool = False
    #: The end, and the error that the caller gets.
    error: ServiceFailure | None = None


class ServiceFailure(Struct, frozen=True):
    code: int
    message: str


class ServiceAnswerResult(Struct, frozen=True):
    """The reply comes once there is room for the next piece. `wanted` is false if nobody reads on."""

    wanted: bool


class ServiceWithdrawParams(Struct, frozen=True):
    service: str
    key: str


class ServiceCallParams(Struct, frozen=True, omit_defaults=True):
    """Call a service of the host. The reply waits so long for the first pieces of the answer."""

    service: str
    instance: str
    method: str
    body: bytes = b""
    wait_ms: int = 0
    #: Chosen by the caller, who can then call it off before the first reply. None: the server chooses.
    call_id: str | None = None


class ServiceReceiveParams(Struct, frozen=True, omit_defaults=True):
    """What was answered after piece `after_seq`, which is acknowledged with it."""

    call_id: str
    after_seq: int = 0
    wait_ms: int = 0


class ServicePieces(Struct, frozen=True, omit_defaults=True):
    """Pieces of an answer; `seq` is that of the last. An answer that failed is an error instead."""

    call_id: str
    seq: int
    pieces: tuple[bytes, ...] = ()
    ended: bool = False


class ServiceCancelParams(Struct, frozen=True):
    call_id: str


# --- notifications ---------------------------------------------------------------------------------------------


class OutputParams(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Output as it comes. `chunk` stands last, so that its bytes can be sent straight from the spool."""

    process_id: str
    seq: int
    stream: Stream
    offset: int
    subscription: str | None = None
    #: Set when several chunks of one stream were joined: they are `first_seq` to `seq`.
    first_seq: int | None = None
    chunk: bytes


class ExitedParams(Struct, frozen=True):
    process_id: str
    seq: int
    exit_code: int
    signal: str | None = None
    sandbox_denied: bool = False
    subscription: str | None = None


class ClosedParams(Struct, frozen=True):
    process_id: str
    seq: int
    subscription: str | None = None
