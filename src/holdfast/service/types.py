"""The data types of the service as frozen Structs: sessions, callers, audit rows, approvals; pure.

Times are seconds since 1970. `fronts` converts these types to and from the messages of the protocol.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

Kind = Literal["terminal", "shell"]
#: As in `holdfast.types.TerminalState`; UNKNOWN if the sandbox cannot be queried.
State = Literal["UNKNOWN", "RUNNING", "BUSY", "IDLE", "CLOSING", "CLOSED", "ERROR"]
Role = Literal["agent", "operator"]
CloseMode = Literal["graceful", "force"]
Network = Literal["none", "host", "allow-list"]
SandboxMode = Literal["bubblewrap", "landlock", "none"]
EventType = Literal[
    "IDLE_WARNING",
    "IDLE_TIMEOUT",
    "RESOURCE_THRESHOLD",
    "POLICY_VIOLATION",
    "SESSION_CLOSED",
    "SESSION_CREATED",
    "APPROVAL_REQUESTED",
    "APPROVAL_ANSWERED",
    "LIFETIME_WARNING",
    "SESSION_ERROR",
    "COMMAND_ENDED",
    "MODEL_CALL",
    "TAKEN_OVER",
    "RELEASED",
    "SANDBOX_ENDING",
]
#: Guards that the operating system can enforce; `SessionPolicy.require` and the metadata name them.
Guard = Literal[
    "filesystem",
    "network",
    "processes",
    "memory",
    "cpu",
    "signals",
    "syscalls",
    "output",
    "wall_clock",
    "file_size",
    "programs",
]

OVER: Final[tuple[State, ...]] = ("CLOSED", "ERROR")
#: The stream of audit rows that belong to no session: agents, refused calls, start and end of each session.
SERVICE_STREAM: Final = ""


class ServiceStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the data types of the service."""


class Caller(ServiceStruct, frozen=True):
    """The agent of a call, from its token."""

    agent_id: str
    role: Role = "agent"

    def may_see(self, agent_id: str) -> bool:
        return self.role == "operator" or self.agent_id == agent_id


#: The user of sessions where the sandbox's server is root. `own`: a user of the agent; `server`: the user of the
#: server; `auto`: `own`, and in containers `server`.
SessionUser = Literal["auto", "own", "server"]


#: How the rules may write a limit: bytes also as text such as "512M", "4GiB" (`holdfast.sizes`), and each as
#: "unlimited", which is None.
Bytes = Annotated[int | None, msgspec.Meta(extra={"unit": "bytes"})]
Count = Annotated[int | None, msgspec.Meta(extra={"unit": "count"})]
Cores = Annotated[float | None, msgspec.Meta(extra={"unit": "cores"})]


class Resources(ServiceStruct, frozen=True):
    """Limits of one session with all its processes, in the rules, in requests and in policies. None is no limit."""

    #: CPU cores that the session may use at a time.
    cpu_cores: Cores = None
    #: CPU time of one process.
    cpu_seconds: Count = None
    memory_bytes: Bytes = None
    processes: Count = None
    #: Output of the session in its lifetime.
    output_bytes: Bytes = None
    file_size_bytes: Bytes = None


class SessionPolicy(ServiceStruct, frozen=True):
    """The rights of one session: its profile with the creator's request, resolved once.

    Later changes of the rules do not change it.
    """

    profile: str
    idle_timeout: float
    max_lifetime: float
    #: Seconds between the warning and the close.
    idle_grace: float
    allow_background: bool = False
    #: Directories that may be written, and those that may only be read; the first of them all is the default cwd.
    writable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    sandbox_mode: SandboxMode = "none"
    user: SessionUser = "auto"
    network: Network = "host"
    #: `HOST`, `*.DOMAIN`, `HOST:PORT`, with `network = "allow-list"`.
    allowed_hosts: tuple[str, ...] = ()
    #: Ports of which the session may have previews: `8000`, `9000-9100`.
    ports: tuple[str, ...] = ()
    #: Programs that can be executed, names or paths with `*` and `?`; None where the rules name no list.
    programs: tuple[str, ...] | None = None
    resources: Resources = Resources()
    #: Guards that the operating system must enforce.
    require: tuple[Guard, ...] = ()
    #: Whether the owner may answer its own approval requests.
    owner_approves: bool = False
    approval_timeout: float = 300.0
    #: Sources of activity, and whether a session with a running command can be idle.
    activity: tuple[Literal["input", "output"], ...] = ("input", "output")
    idle_while_running: bool = False
    #: Seconds between the warning and the end of the lifetime.
    lifetime_warning: float = 300.0
    #: Variables of the sandbox that the session gets beside those of a login, as patterns.
    inherited_variables: tuple[str, ...] = ()


class SessionRecord(ServiceStruct, frozen=True):
    """A session in the database. The current state of its terminal or shell is in the sandbox."""

    session_id: str
    agent_id: str
    kind: Kind
    sandbox: str
    policy: SessionPolicy
    created_at: float
    last_activity_at: float
    initial_cwd: str
    state: State = "RUNNING"
    shell: str = ""
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    cols: int = 80
    rows: int = 24
    #: The guards that the operating system enforces, and those that it cannot.
    enforced: tuple[Guard, ...] = ()
    unenforced: tuple[Guard, ...] = ()
    closed_at: float | None = None
    close_reason: str = ""
    summary: str = ""
    #: The `request_id` of the creator; may be empty.
    request_id: str = ""
    #: The position up to which the follower has read the session.
    audited_token: int = 0
    commands_run: int = 0
    #: The time of the idle warning, if the session has been idle since.
    warned_at: float | None = None

    @property
    def expires_at(self) -> float:
        return self.created_at + self.policy.max_lifetime

    @property
    def over(self) -> bool:
        return self.state in OVER


class AuditEntry(ServiceStruct, frozen=True):
    """A row of the audit log before it is numbered; `body` is already redacted and cut."""

    session_id: str
    at: float
    agent_id: str
    #: `session_created`, `input`, `control`, `command`, `command_ended`, `decision`, `event`, `error`, ...
    kind: str
    command_id: str = ""
    body: dict[str, Any] = msgspec.field(default_factory=dict)


class AuditRow(ServiceStruct, frozen=True):
    """A row of the audit log: numbered, and chained to the row before it."""

    session_id: str
    seq: int
    at: float
    agent_id: str
    kind: str
    command_id: str
    #: The JSON text that was hashed.
    body: str
    previous: str
    hash: str


class Approval(ServiceStruct, frozen=True):
    """A command that waits for an approval."""

    approval_id: str
    session_id: str
    agent_id: str
    command: str
    reason: str
    asked_at: float
    expires_at: float
    command_id: str = ""
    #: Input that is typed after the approval.
    data: bytes = b""
    #: Empty while open. `abandoned`: the call or the session ended first; `comment` has the reason.
    outcome: Literal["", "approved", "refused", "expired", "abandoned"] = ""
    answered_by: str = ""
    comment: str = ""
    #: The `RunCommand` that waits for the answer, as `REPLICA/RANDOM`. Empty for input that is held in `data`.
    caller: str = ""
    #: The call counts as alive until then. Its replica renews this while the call lasts.
    caller_expires: float = 0.0
    #: The rule that requires it, from the audit log; the table has no such column.
    rule: str = ""


class ResourceUsage(ServiceStruct, frozen=True):
    """The resource usage of a session's processes in the last sample of the monitor."""

    sampled_at: float
    process_count: int = 0
    cpu_percent: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    session_idle: bool = False
    long_running: bool = False
    #: Output in the lifetime of the session.
    output_bytes: int = 0
