"""Data types of the rules: agents, and profiles with their sections; the defaults are the rules without a file.

Frozen Structs, pure. `rules` parses them from TOML and checks them; docs/policy.md has every key, and a test
asserts that it does.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from holdfast.fleet.template import Template
from holdfast.service.problems import Denied
from holdfast.service.types import Guard, Network, Resources, SandboxMode, ServiceStruct, SessionUser

Verdict = Literal["allow", "ask", "deny"]
#: Control actions of `SendInput`; a size may always be set.
SignalName = Literal["CTRL_C", "CTRL_D", "SIGINT", "SIGTERM", "SIGKILL"]
Activity = Literal["input", "output"]
#: Engines of `holdfast.fleet` that make sandboxes for sessions.
EngineName = Literal["bwrap", "docker", "kubernetes", "podman", "local"]
#: Seconds, or text such as "90s", "30m", "8h", "7d".
Seconds = Annotated[float, msgspec.Meta(extra={"unit": "seconds"})]
#: A port, or text such as "8000", "9000-9100" (`policy.ports`).
Ports = Annotated[str, msgspec.Meta(extra={"unit": "ports"})]

MIB: Final = 1024 * 1024
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
#: Location of a decision that no line of a file made.
BUILT_IN: Final = "built-in"
#: Names that change which programs run, or run something themselves. Names of secrets are denied as well
#: (`secret_names`).
DENIED_VARIABLES: Final = (
    *("LD_*", "BASH_ENV", "BASH_FUNC_*", "ENV", "PROMPT_COMMAND", "SHELLOPTS", "BASHOPTS", "HOLDFAST_*"),
)


class Directories(ServiceStruct, frozen=True):
    """Directories that a session may write, or only read. `{workspace}` and `{agent}` are replaced."""

    writable: tuple[str, ...] = ("{workspace}",)
    readable: tuple[str, ...] = ()


class Background(ServiceStruct, frozen=True):
    """Whether commands may run in the background, and whether they may outlive the session."""

    start: Verdict = "allow"
    outlive: bool = False


class Signals(ServiceStruct, frozen=True):
    """Control actions that are allowed."""

    allow: tuple[SignalName, ...] = ("CTRL_C", "CTRL_D", "SIGINT", "SIGTERM", "SIGKILL")


class Environment(ServiceStruct, frozen=True):
    """Variables that the creator of a session may set. `deny` adds to the inherited list."""

    allow: tuple[str, ...] = ("*",)
    #: Patterns of sandbox variables that a session gets beside those of a login.
    inherit: tuple[str, ...] = ()
    deny: tuple[str, ...] = DENIED_VARIABLES
    set: dict[str, str] = msgspec.field(default_factory=dict)


class CommandRule(ServiceStruct, frozen=True):
    """Matches commands of these programs, with these first arguments, that contain this pattern."""

    verdict: Verdict
    program: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    pattern: str = ""
    reason: str = ""

    @property
    def matches_any_arguments(self) -> bool:
        """True if the rule matches every command of its programs."""
        return not any(getattr(self, name) for name in MATCHERS if name != "program")

    @property
    def title(self) -> str:
        parts = ["|".join(self.program) or "*", *self.arguments]
        return " ".join(parts) + (f" /{self.pattern}/" if self.pattern else "")


#: The keys of a rule that select commands.
MATCHERS: Final = tuple(name for name in CommandRule.__struct_fields__ if name not in ("verdict", "reason"))


class Commands(ServiceStruct, frozen=True):
    """The first matching rule decides on a command; the strictest command decides on the line."""

    default: Verdict = "allow"
    #: Verdict on unknown parts; by default the strictest verdict of the section.
    unknown: Verdict | None = None
    rules: tuple[CommandRule, ...] = ()


class NetworkAccess(ServiceStruct, frozen=True):
    """Network of a session. `allow-list`: only `hosts`, through a filtering proxy."""

    mode: Network = "none"
    hosts: tuple[str, ...] = ()


class PreviewRules(ServiceStruct, frozen=True):
    """Ports of a session's sandbox that browsers may reach through the service. By default none."""

    ports: tuple[Ports, ...] = ()


class SandboxRules(ServiceStruct, frozen=True):
    """Confinement of sessions, guards without which no session is created, and sandboxes made for sessions."""

    mode: SandboxMode = "bubblewrap"
    user: SessionUser = "auto"
    require: tuple[Guard, ...] = ()
    #: Engines of `ENGINE:new` and templates of `ENGINE:new?template=NAME`. By default none: a sandbox costs more
    #: than a session.
    engines: tuple[EngineName, ...] = ()
    templates: tuple[str, ...] = ()
    #: Pools of `pool:NAME`.
    pools: tuple[str, ...] = ()


class ApprovalRules(ServiceStruct, frozen=True):
    """Time limit of an approval, and whether the session's owner may give it."""

    timeout: Seconds = 300.0
    owner: bool = False


class Takeover(ServiceStruct, frozen=True):
    """Whether an operator may type in the sessions of other agents."""

    operators: bool = True


class Idle(ServiceStruct, frozen=True):
    """A warning after `timeout` without activity, and the close `grace` later."""

    timeout: Seconds = 1_800.0
    grace: Seconds = 60.0
    activity: tuple[Activity, ...] = ("input", "output")
    #: Whether a session with a running command can be idle.
    while_running: bool = False


class Lifetime(ServiceStruct, frozen=True):
    """Longest life of a session, and the time of the warning before its end."""

    limit: Seconds = 8 * 3_600.0
    warning: Seconds = 300.0


class Profile(ServiceStruct, frozen=True):
    """Permissions of sessions, with everything inherited."""

    name: str = "default"
    description: str = ""
    directories: Directories = Directories()
    background: Background = Background()
    signals: Signals = Signals()
    environment: Environment = Environment()
    commands: Commands = Commands()
    network: NetworkAccess = NetworkAccess()
    previews: PreviewRules = PreviewRules()
    resources: Resources = Resources(memory_bytes=4096 * MIB, processes=1_024, output_bytes=1024 * MIB)
    sandbox: SandboxRules = SandboxRules()
    approvals: ApprovalRules = ApprovalRules()
    takeover: Takeover = Takeover()
    idle: Idle = Idle()
    lifetime: Lifetime = Lifetime()
    #: `FILE:LINE` of each key of the file: `network.mode`, `commands.rules.0`.
    locations: dict[str, str] = msgspec.field(default_factory=dict)

    def location(self, key: str) -> str:
        """Return the location of a key, or of its section."""
        return self.locations.get(key, BUILT_IN)

    @property
    def guarded(self) -> bool:
        """True if the profile restricts commands."""
        strict = {self.commands.default, self.background.start, self.commands.unknown}
        return bool(self.commands.rules) or not strict <= {"allow", None}

    @property
    def unknown_verdict(self) -> Verdict:
        if self.commands.unknown is not None:
            return self.commands.unknown
        verdicts = {self.commands.default, self.background.start, *(rule.verdict for rule in self.commands.rules)}
        return strictest(verdicts)


class AgentRules(ServiceStruct, frozen=True):
    """Rules for agents of a name or pattern: their profile, and narrower limits."""

    profile: str = "default"
    #: Further profiles that a session may request.
    profiles: tuple[str, ...] = ()
    workspace: str = ""
    #: Concurrently open sessions.
    sessions: Annotated[int, msgspec.Meta(extra={"unit": "whole"})] = 20
    #: The lower of this and the profile's limit counts.
    lifetime: Annotated[float | None, msgspec.Meta(extra={"unit": "seconds"})] = None
    idle: Annotated[float | None, msgspec.Meta(extra={"unit": "seconds"})] = None
    #: `FILE:LINE` of its keys; the empty key is the agent itself.
    locations: dict[str, str] = msgspec.field(default_factory=dict)

    def location(self, key: str) -> str:
        return self.locations.get(key, BUILT_IN)


class TemplateRules(ServiceStruct, frozen=True):
    """A template of the rules. With `engine`, only that engine makes sandboxes of it."""

    template: Template = Template()
    engine: EngineName | None = None


class PoolRules(ServiceStruct, frozen=True):
    """A pool of warm sandboxes, of which each replica keeps its own."""

    #: By default the engine of the template.
    engine: EngineName = "bwrap"
    #: A name in `templates`; empty for the engine's own defaults.
    template: str = ""
    #: Sandboxes that are ready, and sandboxes in all.
    warm: Annotated[int, msgspec.Meta(extra={"unit": "whole"})] = 1
    max: Annotated[int, msgspec.Meta(extra={"unit": "whole"})] = 10
    #: Warm sandboxes beyond the first are removed after this time without a session.
    shrink_after: Seconds = 600.0
    #: The interval of the calls to each warm sandbox; one that does not reply is replaced.
    health_interval: Seconds = 30.0


class PolicyRules(ServiceStruct, frozen=True):
    """The rules of a file, or the defaults."""

    profiles: dict[str, Profile] = msgspec.field(default_factory=dict)
    #: By name or pattern, in the order of the file.
    agents: dict[str, AgentRules] = msgspec.field(default_factory=dict)
    #: Parent directory of workspaces, for agents without a workspace of their own.
    workspaces: str = "/var/lib/holdfast/workspaces"
    name: str = BUILT_IN
    #: Whether the file sets `workspaces`: then it applies to every sandbox.
    names_workspaces: bool = False
    templates: dict[str, TemplateRules] = msgspec.field(default_factory=dict)
    pools: dict[str, PoolRules] = msgspec.field(default_factory=dict)

    def agent(self, agent_id: str) -> AgentRules:
        """Return the agent by name, else by the first matching pattern, else one with the defaults."""
        if agent_id in self.agents:
            return self.agents[agent_id]
        for pattern, agent in self.agents.items():
            if fnmatch.fnmatchcase(agent_id, pattern):
                return agent
        return AgentRules()

    def profile(self, name: str) -> Profile:
        """Return a profile; raise Denied if reloaded rules no longer have the profile of a session."""
        if name not in self.profiles:
            raise Denied(f"the rules have no profile {name!r}", reason="UNKNOWN_PROFILE", profile=name)
        return self.profiles[name]

    def within(self, sandbox: str) -> PolicyRules:
        """Return the rules for a sandbox: its kind determines `workspaces`, unless the file sets it."""
        elsewhere = "" if self.names_workspaces else _workspaces_in(sandbox)
        return msgspec.structs.replace(self, workspaces=elsewhere) if elsewhere else self

    def workspace(self, agent_id: str) -> str:
        given = self.agent(agent_id).workspace
        return given.replace("{agent}", agent_id) if given else f"{self.workspaces}/{agent_id}"


def is_container(sandbox: str) -> bool:
    """True if a sandbox at this address has its own file system and its own root user."""
    return sandbox.partition(":")[0] in ("docker", "podman", "kubernetes", "bwrap")


def _workspaces_in(sandbox: str) -> str:
    """Return the default directory of workspaces in a sandbox; empty on the service's own machine."""
    kind = sandbox.partition(":")[0]
    if is_container(sandbox):
        # The one directory that users other than root can write in nearly every image, also with a read-only root.
        return "/tmp/holdfast-workspaces"
    if kind == "ssh" or (kind in ("ws", "wss") and urlsplit(sandbox).hostname not in _LOOPBACK):
        # Another user of that host could have created a directory in /tmp before.
        return "/var/lib/holdfast/workspaces"
    return ""


def strictest(verdicts: set[Verdict]) -> Verdict:
    """Return the strictest: `deny`, then `ask`, then `allow`."""
    for verdict in ("deny", "ask"):
        if verdict in verdicts:
            return verdict
    return "allow"


def valid_agent_id(agent_id: str) -> bool:
    """True if the id is valid as a directory name."""
    return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,127}", agent_id))
