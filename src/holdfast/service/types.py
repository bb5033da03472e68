"""The nouns of the service as frozen Structs: what a session is, who calls, what is written down; pure.

Times are seconds since 1970. What goes over gRPC and HTTP is made of these in `handler` and nowhere else.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

Kind = Literal["terminal", "shell"]
#: As in `holdfast.types.TerminalState`, and UNKNOWN: nobody could ask the sandbox.
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
]
#: What the operating system can be asked to enforce; `Policy.require` and the metadata use these words.
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
#: The stream of audit rows that belong to no session: agents, refused calls, and each session's beginning and end.
SERVICE_STREAM: Final = ""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything that is data here."""


class Caller(Struct, frozen=True):
    """Who makes a call, as its token said."""

    agent_id: str
    role: Role = "agent"

    def may_see(self, agent_id: str) -> bool:
        return self.role == "operator" or self.agent_id == agent_id


#: Whom sessions run as where the sandbox's server is root. `own`: a user of the agent's own; `server`: the server's
#: user; `auto`: `own`, and in containers `server`.
SessionUser = Literal["auto", "own", "server"]


class Resources(Struct, frozen=True):
    """Limits of one session, all that it started included. None: none."""

    #: How many cores' worth of time it may use at once.
    cpu_cores: float | None = None
    #: CPU time of one process.
    cpu_seconds: int | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    #: What it may print in its life.
    output_bytes: int | None = None
    file_size_bytes: int | None = None


class Policy(Struct, frozen=True):
    """What one session may do: its profile with what its creator asked for, resolved once. Rules that change later
    change nothing of it."""

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
    #: Programs that can be executed, names or paths with `*` and `?`; None where the rules name no list.
    programs: tuple[str, ...] | None = None
    resources: Resources = Resources()
    #: What must be enforced by the operating system.
    require: tuple[Guard, ...] = ()
    #: Whether the owner may answer its own approval requests.
    owner_approves: bool = False
    approval_timeout: float = 300.0
    #: What counts as activity, and whether a session whose command still runs can be idle.
    activity: tuple[Literal["input", "output"], ...] = ("input", "output")
    idle_while_running: bool = False
    #: Seconds between the warning and the end of its life.
    lifetime_warning: float = 300.0
    #: Variables of the sandbox that the session has beside those of a login, as patterns.
    inherited_variables: tuple[str, ...] = ()


class SessionRecord(Struct, frozen=True):
    """A session as the database has it. What its terminal or shell is doing now, only the sandbox knows."""

    session_id: str
    agent_id: str
    kind: Kind
    sandbox: str
    policy: Policy
    created_at: float
    last_activity_at: float
    initial_cwd: str
    state: State = "RUNNING"
    shell: str = ""
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    cols: int = 80
    rows: int = 24
    #: What enforces the policy, and what nobody could.
    enforced: tuple[Guard, ...] = ()
    unenforced: tuple[Guard, ...] = ()
    closed_at: float | None = None
    close_reason: str = ""
    summary: str = ""
    #: The creator's `request_id`, if it gave one.
    request_id: str = ""
    #: Up to here its output was looked at for the audit.
    audited_token: int = 0
    commands_run: int = 0
    #: When the idle warning was given, if the session has been idle since.
    warned_at: float | None = None

    @property
    def expires_at(self) -> float:
        return self.created_at + self.policy.max_lifetime

    @property
    def over(self) -> bool:
        return self.state in OVER


class AuditEntry(Struct, frozen=True):
    """Something that happened, before it is written down: `body` is already redacted and cut."""

    session_id: str
    at: float
    agent_id: str
    #: `session_created`, `input`, `control`, `command`, `command_ended`, `decision`, `event`, `error`, ...
    kind: str
    command_id: str = ""
    body: dict[str, Any] = msgspec.field(default_factory=dict)


class AuditRow(Struct, frozen=True):
    """The same as it stands in the log: counted, and chained to the row before it."""

    session_id: str
    seq: int
    at: float
    agent_id: str
    kind: str
    command_id: str
    #: JSON, exactly as it was hashed.
    body: str
    previous: str
    hash: str


class Approval(Struct, frozen=True):
    """A command that waits for somebody to allow it."""

    approval_id: str
    session_id: str
    agent_id: str
    command: str
    reason: str
    asked_at: float
    expires_at: float
    command_id: str = ""
    #: What is typed once it is allowed.
    data: bytes = b""
    #: Empty while it waits. `abandoned`: the call or the session that asked for it ended first; `comment` has why.
    outcome: Literal["", "approved", "refused", "expired", "abandoned"] = ""
    answered_by: str = ""
    comment: str = ""
    #: The `RunCommand` that waits for the answer, as `REPLICA/RANDOM`. Empty for input that is held in `data`.
    caller: str = ""
    #: Until when that call counts as there. Its replica renews this while the call lasts.
    caller_expires: float = 0.0


class Usage(Struct, frozen=True):
    """What a session's processes use, as the monitor last saw it."""

    sampled_at: float
    process_count: int = 0
    cpu_percent: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    session_idle: bool = False
    long_running: bool = False
