"""What rules are made of: agents, and profiles with their sections; the defaults here are the rules without a file.

Frozen Structs, pure. `rules` reads them from TOML and checks them; docs/policy.md has every key, and a test asserts
that it does.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from holdfast.service.problems import Denied
from holdfast.service.types import Guard, Network, Resources, SandboxMode, SessionUser, Struct

Verdict = Literal["allow", "ask", "deny"]
#: What a `SendInput` may ask for beside keys; a size may always be set.
SignalName = Literal["CTRL_C", "CTRL_D", "SIGINT", "SIGTERM", "SIGKILL"]
Activity = Literal["input", "output"]
#: Seconds, or text such as "90s", "30m", "8h", "7d".
Seconds = Annotated[float, msgspec.Meta(extra={"unit": "seconds"})]
#: Bytes, or text such as "512M", "4GiB" (`holdfast.sizes`); "unlimited" is no limit.
Bytes = Annotated[int | None, msgspec.Meta(extra={"unit": "bytes"})]
#: A number above zero, or "unlimited".
Count = Annotated[int | None, msgspec.Meta(extra={"unit": "count"})]
Cores = Annotated[float | None, msgspec.Meta(extra={"unit": "cores"})]

MIB: Final = 1024 * 1024
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
#: Where a decision comes from that no line of a file made.
BUILT_IN: Final = "built-in"
#: Names that change which programs run, or run something by themselves. Beside them, names of secrets are denied
#: (`secret_names`).
DENIED_VARIABLES: Final = (
    "LD_*",
    "BASH_ENV",
    "BASH_FUNC_*",
    "ENV",
    "PROMPT_COMMAND",
    "SHELLOPTS",
    "BASHOPTS",
    "HOLDFAST_*",
)


class Directories(Struct, frozen=True):
    """Where a session may write, and where it may only read. `{workspace}` and `{agent}` are filled in."""

    writable: tuple[str, ...] = ("{workspace}",)
    readable: tuple[str, ...] = ()


class Background(Struct, frozen=True):
    """Whether commands may be put into the background, and whether these may outlive the session."""

    start: Verdict = "allow"
    outlive: bool = False


class Signals(Struct, frozen=True):
    """Control actions that may be sent."""

    allow: tuple[SignalName, ...] = ("CTRL_C", "CTRL_D", "SIGINT", "SIGTERM", "SIGKILL")


class Environment(Struct, frozen=True):
    """Variables that the creator of a session may give it. `deny` adds to what is inherited."""

    allow: tuple[str, ...] = ("*",)
    #: Variables of the sandbox that a session has beside those of a login, as patterns.
    inherit: tuple[str, ...] = ()
    deny: tuple[str, ...] = DENIED_VARIABLES
    set: dict[str, str] = msgspec.field(default_factory=dict)


class CommandRule(Struct, frozen=True):
    """Commands of these programs, with these first arguments, that this pattern is found in."""

    verdict: Verdict
    program: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    pattern: str = ""
    reason: str = ""

    @property
    def title(self) -> str:
        parts = ["|".join(self.program) or "*", *self.arguments]
        return " ".join(parts) + (f" /{self.pattern}/" if self.pattern else "")


class Commands(Struct, frozen=True):
    """The first rule that matches a command decides it; the strictest command decides the line."""

    default: Verdict = "allow"
    #: For what cannot be known; if not given, the strictest verdict that the section has.
    unknown: Verdict | None = None
    rules: tuple[CommandRule, ...] = ()


class NetworkAccess(Struct, frozen=True):
    """`allow-list`: only `hosts`, through a filtering proxy."""

    mode: Network = "none"
    hosts: tuple[str, ...] = ()


class ResourceLimits(Struct, frozen=True):
    """Of one session and all that it started."""

    cpu_cores: Cores = None
    cpu_seconds: Count = None
    memory_bytes: Bytes = 4096 * MIB
    processes: Count = 1_024
    output_bytes: Bytes = 1024 * MIB
    file_size_bytes: Bytes = None

    def plain(self) -> Resources:
        return Resources(**{name: getattr(self, name) for name in self.__struct_fields__})


class SandboxRules(Struct, frozen=True):
    """How sessions are confined, and what must be enforced for one to be created at all."""

    mode: SandboxMode = "bubblewrap"
    user: SessionUser = "auto"
    require: tuple[Guard, ...] = ()


class ApprovalRules(Struct, frozen=True):
    """How long a command waits to be allowed, and whether the session's owner may do that."""

    timeout: Seconds = 300.0
    owner: bool = False


class Idle(Struct, frozen=True):
    """After `timeout` without activity a warning, and `grace` later the close."""

    timeout: Seconds = 1_800.0
    grace: Seconds = 60.0
    activity: tuple[Activity, ...] = ("input", "output")
    #: Whether a session whose command still runs can be idle.
    while_running: bool = False


class Lifetime(Struct, frozen=True):
    """How long a session lives at most, and how long before its end it is told."""

    limit: Seconds = 8 * 3_600.0
    warning: Seconds = 300.0


class Profile(Struct, frozen=True):
    """What sessions of a profile may do, with everything that it inherits."""

    name: str = "default"
    description: str = ""
    directories: Directories = Directories()
    background: Background = Background()
    signals: Signals = Signals()
    environment: Environment = Environment()
    commands: Commands = Commands()
    network: NetworkAccess = NetworkAccess()
    resources: ResourceLimits = ResourceLimits()
    sandbox: SandboxRules = SandboxRules()
    approvals: ApprovalRules = ApprovalRules()
    idle: Idle = Idle()
    lifetime: Lifetime = Lifetime()
    #: `FILE:LINE` of each key that a file gives: `network.mode`, `commands.rules.0`.
    places: dict[str, str] = msgspec.field(default_factory=dict)

    def place(self, key: str) -> str:
        """Where this key, or the section it is in, stands."""
        return self.places.get(key, BUILT_IN)

    @property
    def guarded(self) -> bool:
        """Whether it matters what is typed as a command."""
        strict = {self.commands.default, self.background.start, self.commands.unknown}
        return bool(self.commands.rules) or not strict <= {"allow", None}

    @property
    def unknown_verdict(self) -> Verdict:
        if self.commands.unknown is not None:
            return self.commands.unknown
        verdicts = {self.commands.default, self.background.start, *(rule.verdict for rule in self.commands.rules)}
        return strictest(verdicts)


class AgentRules(Struct, frozen=True):
    """Agents of a name or pattern: their profile, and what of it is narrower for them."""

    profile: str = "default"
    #: Profiles that a session may ask for beside that one.
    profiles: tuple[str, ...] = ()
    workspace: str = ""
    #: Sessions that are open at a time.
    sessions: Annotated[int, msgspec.Meta(extra={"unit": "whole"})] = 20
    #: If given, the lower of this and the profile's holds.
    lifetime: Annotated[float | None, msgspec.Meta(extra={"unit": "seconds"})] = None
    idle: Annotated[float | None, msgspec.Meta(extra={"unit": "seconds"})] = None
    #: `FILE:LINE` of its keys, and under the empty key of itself.
    places: dict[str, str] = msgspec.field(default_factory=dict)

    def place(self, key: str) -> str:
        return self.places.get(key, BUILT_IN)


class PolicyRules(Struct, frozen=True):
    """A file of rules, or what holds without one."""

    profiles: dict[str, Profile] = msgspec.field(default_factory=dict)
    #: By name or pattern, in the order of the file.
    agents: dict[str, AgentRules] = msgspec.field(default_factory=dict)
    #: The directory of workspaces, for agents that name none.
    workspaces: str = "/var/lib/holdfast/workspaces"
    name: str = BUILT_IN
    #: Whether the file names `workspaces`: then it is a path of every sandbox.
    names_workspaces: bool = False

    def agent(self, agent_id: str) -> AgentRules:
        """By its name, else by the first pattern, else an agent with the defaults."""
        if agent_id in self.agents:
            return self.agents[agent_id]
        for pattern, agent in self.agents.items():
            if fnmatch.fnmatchcase(agent_id, pattern):
                return agent
        return AgentRules()

    def profile(self, name: str) -> Profile:
        """Refused if there is none: rules that were read again may have lost the profile of a session."""
        if name not in self.profiles:
            raise Denied(f"the rules have no profile {name!r} (any more)", reason="UNKNOWN_PROFILE", profile=name)
        return self.profiles[name]

    def within(self, sandbox: str) -> PolicyRules:
        """The same rules for a sandbox: without `workspaces` in the file, its kind decides where those are."""
        elsewhere = "" if self.names_workspaces else _workspaces_in(sandbox)
        return msgspec.structs.replace(self, workspaces=elsewhere) if elsewhere else self

    def workspace(self, agent_id: str) -> str:
        given = self.agent(agent_id).workspace
        return given.replace("{agent}", agent_id) if given else f"{self.workspaces}/{agent_id}"


def is_container(sandbox: str) -> bool:
    """Whether a sandbox at this address has a file system of its own, of which its root is root."""
    return sandbox.partition(":")[0] in ("docker", "podman", "kubernetes", "bwrap")


def _workspaces_in(sandbox: str) -> str:
    """The default directory of workspaces in a sandbox; empty on the service's own machine."""
    kind = sandbox.partition(":")[0]
    if is_container(sandbox):
        # The one directory that users other than root can write in nearly every image, also with a read-only root.
        return "/tmp/holdfast-workspaces"
    if kind == "ssh" or (kind in ("ws", "wss") and urlsplit(sandbox).hostname not in _LOOPBACK):
        # Another user of that host could have made a directory in /tmp before.
        return "/var/lib/holdfast/workspaces"
    return ""


def strictest(verdicts: set[Verdict]) -> Verdict:
    """`deny` before `ask` before `allow`."""
    for verdict in ("deny", "ask"):
        if verdict in verdicts:
            return verdict
    return "allow"


def valid_agent_id(agent_id: str) -> bool:
    """It becomes the name of a directory."""
    return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,127}", agent_id))
