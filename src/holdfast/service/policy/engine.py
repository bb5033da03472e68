"""Decides what a session may be, and what may be done in it, by the rules of its profile; pure.

Each decision carries the key of the rule and its location, `FILE:LINE`, for the audit. `refusal` returns the error
for a denied one.
"""

from __future__ import annotations

import fnmatch
import math
import posixpath
import re
from collections.abc import Mapping
from typing import Final, cast, get_args

from holdfast.secret_names import looks_secret
from holdfast.service.api import ControlType, PolicyRequest
from holdfast.service.policy.command_line import NEED_NO_RULE, CommandLine, decides_program, read_command_line
from holdfast.service.policy.command_rules import SYSTEM_DIRECTORIES, match_rule
from holdfast.service.policy.ports import covers
from holdfast.service.policy.profiles import BUILT_IN, PolicyRules, Profile, Verdict, valid_agent_id
from holdfast.service.problems import Denied, Invalid
from holdfast.service.types import Guard, Network, Resources, ServiceStruct, SessionPolicy

#: From narrow to wide.
_NETWORKS: Final[tuple[Network, ...]] = ("none", "allow-list", "host")
_STRICTNESS: Final[dict[Verdict, int]] = {"allow": 0, "ask": 1, "deny": 2}
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Decision(ServiceStruct, frozen=True):
    """Verdict on an action, and the rule behind it."""

    verdict: Verdict
    reason: str
    #: The key in the profile or agent, such as `commands.rules.2`.
    rule: str = ""
    location: str = BUILT_IN
    programs: tuple[str, ...] = ()
    background: tuple[str, ...] = ()

    @property
    def allowed(self) -> bool:
        return self.verdict == "allow"


class EnvironmentDecision(ServiceStruct, frozen=True):
    """Refused variables; if there are none, `environment` is the session's environment."""

    decision: Decision
    refused: tuple[str, ...]
    environment: dict[str, str]


def refusal(decision: Decision) -> Denied:
    """Return the error for the caller."""
    return Denied(
        f"{decision.reason} ({decision.location}: {decision.rule})",
        reason="POLICY_DENIED",
        rule=decision.rule,
        place=decision.location,
    )


# --- creation of a session ------------------------------------------------------------------------------------


def resolve(
    rules: PolicyRules, agent_id: str, request: PolicyRequest, *, initial_cwd: str = "", operator: bool = False
) -> SessionPolicy:
    """Return the policy of a new session: its profile, narrowed by its agent and by the request, never widened.

    Without `inherit_workspace`, a session that begins in a directory of the workspace gets only
    that directory.
    """
    if not valid_agent_id(agent_id):
        raise Invalid(f"{agent_id!r} is not the name of an agent", reason="INVALID_AGENT", field="agent_id")
    agent = rules.agent(agent_id)
    profile = _profile(rules, agent_id, request.profile, operator)
    idle = min(profile.idle.timeout, agent.idle or math.inf)
    lifetime = min(profile.lifetime.limit, agent.lifetime or math.inf)
    if request.allow_background and not profile.background.outlive:
        raise _denied(profile, "background.outlive", "processes in the background may not outlive the session")
    return SessionPolicy(
        profile=profile.name,
        idle_timeout=_narrowed(profile, "idle.timeout", idle, request.idle_timeout),
        max_lifetime=_narrowed(profile, "lifetime.limit", lifetime, request.max_lifetime),
        idle_grace=profile.idle.grace,
        allow_background=request.allow_background,
        writable=_directories(rules, agent_id, profile.directories.writable, request, initial_cwd),
        readable=_directories(rules, agent_id, profile.directories.readable, request, initial_cwd),
        sandbox_mode=profile.sandbox.mode,
        user=profile.sandbox.user,
        network=_network(profile, request.network),
        allowed_hosts=profile.network.hosts,
        ports=_ports(profile, request.ports),
        programs=_programs(profile),
        resources=_resources(profile, request.resources),
        require=_required(profile, request.require),
        owner_approves=profile.approvals.owner,
        approval_timeout=profile.approvals.timeout,
        activity=profile.idle.activity,
        idle_while_running=profile.idle.while_running,
        lifetime_warning=profile.lifetime.warning,
        inherited_variables=profile.environment.inherit,
    )


def _profile(rules: PolicyRules, agent_id: str, requested: str, operator: bool) -> Profile:
    agent = rules.agent(agent_id)
    name = requested or agent.profile
    if name not in rules.profiles:
        raise Invalid(f"there is no profile {name!r}", reason="UNKNOWN_PROFILE", field="policy.profile")
    if not operator and name not in (agent.profile, *agent.profiles):
        location = agent.location("profiles" if agent.profiles else "")
        message = f"agent {agent_id!r} may not use the profile {name!r} ({location}: agents.profiles)"
        raise Denied(message, reason="POLICY_DENIED", rule="agents.profiles", place=location)
    return rules.profiles[name]


def _denied(profile: Profile, rule: str, reason: str) -> Denied:
    return refusal(Decision("deny", reason, f"profiles.{profile.name}.{rule}", profile.location(rule)))


def _narrowed(profile: Profile, rule: str, limit: float, requested: float | None) -> float:
    if requested is None:
        return limit
    if not (math.isfinite(requested) and requested > 0):
        raise Invalid(f"{rule}: {requested} is not a number of seconds above 0", reason="INVALID_LIMIT", field=rule)
    if requested > limit:
        raise _denied(profile, rule, f"{requested:g} s is more than the {limit:g} s that are allowed")
    return requested


def _network(profile: Profile, requested: Network | None) -> Network:
    if requested is None:
        return profile.network.mode
    if requested not in _NETWORKS:
        expected = ", ".join(_NETWORKS)
        raise Invalid(
            f"network {requested!r} is not one of {expected}", reason="INVALID_NETWORK", field="policy.network"
        )
    if _NETWORKS.index(requested) > _NETWORKS.index(profile.network.mode):
        raise _denied(profile, "network.mode", f"network {requested!r} is more than {profile.network.mode!r}")
    return requested


def _ports(profile: Profile, requested: tuple[str, ...]) -> tuple[str, ...]:
    for index, ports in enumerate(requested):
        try:
            allowed = covers(profile.previews.ports, ports)
        except ValueError:
            raise Invalid(
                f"{ports!r} is not a port or a range", reason="INVALID_PORT", field=f"policy.ports[{index}]"
            ) from None
        if not allowed:
            raise _denied(profile, "previews.ports", f"a preview of port {ports} is not allowed")
    return requested or profile.previews.ports


def decide_preview(profile: Profile, policy: SessionPolicy, port: int) -> Decision:
    """Decide whether a session may have a preview of a port, by its policy and by the profile as it is now."""
    rule = "previews.ports"
    key, location = f"profiles.{profile.name}.{rule}", profile.location(rule)
    if covers(policy.ports, port) and covers(profile.previews.ports, port):
        return Decision("allow", f"a preview of port {port} is allowed", key, location)
    return Decision("deny", f"a preview of port {port} is not allowed", key, location)


def _resources(profile: Profile, requested: Resources) -> Resources:
    made: dict[str, float | None] = {}
    for name in Resources.__struct_fields__:
        limit, value = getattr(profile.resources, name), getattr(requested, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise Invalid(f"resources.{name}: {value} is not above 0", reason="INVALID_LIMIT", field=name)
        if None not in (limit, value) and value > limit:
            raise _denied(profile, f"resources.{name}", f"{value:,} is more than the {limit:,} that are allowed")
        made[name] = limit if value is None else value
    return Resources(**made)  # type: ignore[arg-type]


def _programs(profile: Profile) -> tuple[str, ...] | None:
    """Return the programs that the rules allow; None if others may be allowed, or approved."""
    if profile.commands.default != "deny" or profile.unknown_verdict != "deny":
        return None
    rules = [rule for rule in profile.commands.rules if rule.verdict != "deny"]
    named = [program for rule in rules for program in rule.program]
    if "*" in named or not all(rule.program for rule in rules):
        return None
    return tuple(dict.fromkeys([*named, *NEED_NO_RULE]))


def _required(profile: Profile, requested: tuple[str, ...]) -> tuple[Guard, ...]:
    for word in requested:
        if word not in get_args(Guard):
            expected = ", ".join(get_args(Guard))
            raise Invalid(
                f"require: {word!r} is not one of {expected}", reason="UNKNOWN_GUARD", field="policy.require"
            )
    return tuple(dict.fromkeys([*profile.sandbox.require, *(cast(Guard, word) for word in requested)]))


def _directories(
    rules: PolicyRules, agent_id: str, directories: tuple[str, ...], request: PolicyRequest, initial_cwd: str
) -> tuple[str, ...]:
    workspace = normal(rules.workspace(agent_id))
    made: list[str] = []
    for directory in directories:
        path = normal(directory.replace("{workspace}", workspace).replace("{agent}", agent_id))
        narrow = initial_cwd.startswith("/") and not request.inherit_workspace and path == workspace
        if narrow and is_inside(normal(initial_cwd), path):
            path = normal(initial_cwd)
        made.append(path)
    return tuple(dict.fromkeys(made))


def normal(path: str) -> str:
    """Normalise a path: no `.`, `..` and doubled slashes. Symbolic links are left to the operating system."""
    return "/" + posixpath.normpath(path).lstrip("/")


def is_inside(path: str, directory: str) -> bool:
    """True if `path` is inside of the directory; both normalised."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


# --- actions in a session -------------------------------------------------------------------------------------


def decide_cwd(profile: Profile, policy: SessionPolicy, cwd: str) -> Decision:
    """Decide on an initial directory: inside of one that is writable or readable."""
    rule = f"profiles.{profile.name}.directories"
    location = profile.location("directories.writable")
    if not cwd.startswith("/") or "\0" in cwd:
        return Decision("deny", f"{cwd!r} is not an absolute path", rule, location)
    path = normal(cwd)
    for kind, directories in (("writable", policy.writable), ("readable", policy.readable)):
        for directory in directories:
            if is_inside(path, directory):
                key = f"directories.{kind}"
                found = f"{path} is inside of {directory}"
                return Decision("allow", found, f"profiles.{profile.name}.{key}", profile.location(key))
    allowed = ", ".join([*policy.writable, *policy.readable]) or "none"
    return Decision("deny", f"{path} is outside of the allowed directories: {allowed}", rule, location)


def decide_environment(profile: Profile, requested: Mapping[str, str]) -> EnvironmentDecision:
    """Refuse variables that match `deny`, or nothing in `allow`. A literal name in `allow` takes precedence."""
    section = profile.environment
    refused: list[str] = []
    decision = Decision("allow", "no variable is refused", *_rule(profile, "environment.allow"))
    for name, value in requested.items():
        against = _against_variable(profile, name, value)
        if against is None:
            continue
        if not refused:
            decision = against
        refused.append(name)
    environment = {**{name: value for name, value in requested.items() if name not in refused}, **section.set}
    return EnvironmentDecision(decision, tuple(refused), environment)


def _against_variable(profile: Profile, name: str, value: str) -> Decision | None:
    section = profile.environment
    if not _VARIABLE.fullmatch(name) or "\0" in value:
        rule = _rule(profile, "environment.allow")
        return Decision("deny", f"{name!r} is not a variable that can be set", *rule)
    if name in section.set and section.set[name] != value:
        return Decision("deny", f"{name} is set by the rules", *_rule(profile, "environment.set"))
    if name in section.allow:
        return None
    if profile.guarded and decides_program(name):
        reason = f"the variable {name} decides which programs run, and the rules limit those"
        return Decision("deny", reason, *_rule(profile, "environment.allow"))
    # Secrets in lower-case names are as secret as those in capitals.
    if looks_secret(name):
        reason = f"the variable {name} has the name of a secret, and those are denied"
        return Decision("deny", reason, *_rule(profile, "environment.deny"))
    for pattern in section.deny:
        if fnmatch.fnmatchcase(name.upper(), pattern.upper()):
            reason = f"the variable {name} matches {pattern!r}, which is denied"
            return Decision("deny", reason, *_rule(profile, "environment.deny"))
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in section.allow):
        return Decision("deny", f"the variable {name} is not allowed", *_rule(profile, "environment.allow"))
    return None


def decide_shell(profile: Profile, shell: str) -> Decision:
    """Decide on a session's shell: with command rules, a system program with a supported grammar."""
    if not shell or not profile.guarded:
        return Decision("allow", "no rule is about commands", *_rule(profile, "commands.default"))
    key = _rule(profile, "commands.unknown")
    directory, name = posixpath.split(shell)
    if not read_command_line(":", shell=name).unknown and directory in ("", *SYSTEM_DIRECTORIES):
        return Decision("allow", f"{name} is a shell of the system", *key)
    reason = f"the commands of the shell {shell!r} cannot be determined"
    return Decision(profile.unknown_verdict, reason, *key)


def decide_signal(profile: Profile, control: ControlType) -> Decision:
    """Decide on a control action; sizes may always be set."""
    rule = _rule(profile, "signals.allow")
    if control == "RESIZE" or control in profile.signals.allow:
        return Decision("allow", f"{control} is allowed", *rule)
    return Decision("deny", f"{control} is not among the signals that are allowed", *rule)


def decide_takeover(profile: Profile) -> Decision:
    """Decide whether an operator may type in a session of another agent."""
    rule = _rule(profile, "takeover.operators")
    if profile.takeover.operators:
        return Decision("allow", "operators may take over", *rule)
    return Decision("deny", "the sessions of this profile cannot be taken over", *rule)


def decide_command(
    profile: Profile, text: str, cwd: str = "", *, shell: str = "bash", interactive: bool = True
) -> Decision:
    """Decide on a whole command line. An incomplete one is unknown."""
    line = read_command_line(text, shell=shell, interactive=interactive)
    decision = decide_line(profile, line, cwd)
    if line.incomplete and profile.guarded:
        incomplete = _unknown(profile, line, f"it is not complete: {line.incomplete}")
        return _stricter(decision, incomplete)
    return decision


def decide_line(profile: Profile, line: CommandLine, cwd: str = "") -> Decision:
    """Decide on a parsed line: the strictest verdict of its commands counts."""
    programs, background = line.programs, line.background
    decided = Decision(
        "allow", "every command is allowed", *_rule(profile, "commands.default"), programs, background
    )
    if not profile.guarded:
        return decided
    # After a `cd` in the line, `./tool` is a different file.
    cwd = "" if line.moves else cwd
    for command in line.commands:
        index = match_rule(profile.commands.rules, command, cwd)
        if index is not None:
            rule = profile.commands.rules[index]
            reason = rule.reason or f"`{command.name}` matches the rule `{rule.title}`"
            key = _rule(profile, f"commands.rules.{index}")
            decided = _stricter(decided, Decision(rule.verdict, reason, *key, programs, background))
        elif not command.transparent:
            reason = f"no rule matches `{command.name}`"
            key = _rule(profile, "commands.default")
            decision = Decision(profile.commands.default, reason, *key, programs, background)
            decided = _stricter(decided, decision)
    if background:
        reason = f"`{background[0]}` puts a command into the background"
        key = _rule(profile, "background.start")
        decided = _stricter(decided, Decision(profile.background.start, reason, *key, programs, background))
    for reason in line.unknown[:1]:
        decided = _stricter(decided, _unknown(profile, line, reason))
    return decided


def _unknown(profile: Profile, line: CommandLine, reason: str) -> Decision:
    reason = f"the commands cannot be determined: {reason}"
    key = _rule(profile, "commands.unknown")
    return Decision(profile.unknown_verdict, reason, *key, line.programs, line.background)


def _rule(profile: Profile, key: str) -> tuple[str, str]:
    return f"profiles.{profile.name}.{key}", profile.location(key)


def _stricter(first: Decision, second: Decision) -> Decision:
    return second if _STRICTNESS[second.verdict] > _STRICTNESS[first.verdict] else first
