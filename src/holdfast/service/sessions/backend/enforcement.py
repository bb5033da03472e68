"""From a session's policy and what its sandbox offers to what the operating system is asked to enforce. Pure.

What it can enforce is planned; what it cannot is named, so that the metadata say it and the monitor watches it; and
what the policy requires and nobody can enforce is refused. docs/confinement.md has the table.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from holdfast.service.policy.profiles import is_container
from holdfast.service.problems import Denied, Invalid
from holdfast.service.types import Guard, Policy, Struct
from holdfast.types import ConfinedNetwork, Confinement, ConfinementMode, EnvironmentInfo, Limits

REASON: Final = "GUARD_UNAVAILABLE"
#: What each guard needs of a sandbox, in words of `environment/info`, for the refusal.
_NEEDS: Final[dict[Guard, str]] = {
    "filesystem": "bubblewrap, or Landlock and seccomp",
    "network": "bubblewrap, or a network namespace; for `allow-list` also h11 (egress)",
    "processes": "the cgroup controller pids, and a limit in the policy",
    "memory": "the cgroup controller memory, and a limit in the policy",
    "cpu": "the cgroup controller cpu, and a limit in the policy",
    "signals": "bubblewrap, or Landlock of ABI 6",
    "syscalls": "seccomp",
    "output": "what no operating system has: only the monitor watches it",
    "wall_clock": "",
    "file_size": "",
    "programs": "bubblewrap and mounts without execution (noexec, as root), and rules that deny by default",
}
#: By its name, or by its number where the user database has no name for it.
_ROOT: Final = ("root", "0")
#: Landlock keeps signals and abstract sockets inside since this version.
_SCOPING_ABI: Final = 6


class EnforcementPlan(Struct, frozen=True):
    """How to start a session, and what that enforces of its policy."""

    confinement: Confinement | None
    limits: Limits | None
    enforced: tuple[Guard, ...]
    #: What the policy wants and the operating system of this sandbox cannot do.
    unenforced: tuple[Guard, ...]
    #: Whom to run it as, `UID:GID`; None is the user of the sandbox's server.
    user: str | None = None


class _Offers:
    """The words of `environment/info` as questions."""

    def __init__(self, words: Collection[str]) -> None:
        self._words = frozenset(words)
        abi = [word.removeprefix("landlock:") for word in words if word.startswith("landlock:")]
        self.landlock = int(abi[0]) if abi and abi[0].isdecimal() else 0

    def __contains__(self, word: str) -> bool:
        return word in self._words

    def mode(self, wanted: ConfinementMode) -> ConfinementMode:
        """The wanted one, or the next that can be had. Landlock needs seccomp, which keeps it from Unix sockets."""
        if wanted == "bubblewrap" and "bubblewrap" in self:
            return "bubblewrap"
        if wanted != "none" and self.landlock and "seccomp" in self:
            return "landlock"
        return "none"


def plan(
    policy: Policy,
    offers: Collection[str],
    *,
    proxy: str | None = None,
    hidden: tuple[str, ...] = (),
    user: str | None = None,
) -> EnforcementPlan:
    """What to ask of the sandbox. `Denied` if the policy requires what it does not offer.

    `proxy` is the socket of the filtering proxy, for `allow-list`; `hidden` are paths of the service in this
    sandbox (the directory of its database), which are kept from the session whatever it may read; `user` is the
    user to run the session as, if it is not the server's.
    """
    offered = _Offers(offers)
    mode = offered.mode(policy.sandbox_mode)
    network = _network(policy, offered, mode)
    if network == "proxy" and proxy is None:
        raise Invalid("an allow-list needs the socket of its proxy", reason="PROXY_MISSING")
    wanted = _wanted(policy)
    confinement = Confinement(
        mode=mode,
        writable=policy.writable if mode != "none" else (),
        readable=policy.readable if mode != "none" else (),
        hidden=hidden if mode != "none" else (),
        network=network,
        proxy=proxy if network == "proxy" else None,
        seccomp="seccomp" in offered and (mode != "none" or network != "host"),
        total_memory_bytes=policy.resources.memory_bytes if "cgroup.memory" in offered else None,
        total_processes=policy.resources.processes if "cgroup.pids" in offered else None,
        cpu_cores=policy.resources.cpu_cores if "cgroup.cpu" in offered else None,
        programs=policy.programs if mode != "none" else None,
        no_execution=policy.programs is not None and mode == "bubblewrap" and "noexec" in offered,
    )
    works = {guard: _works(guard, policy, offered, confinement) for guard in wanted}
    enforced = tuple(guard for guard, does in works.items() if does)
    unenforced = tuple(guard for guard, does in works.items() if not does)
    missing = [guard for guard in policy.require if guard in unenforced]
    if missing:
        needs = "; ".join(f"{guard} needs {_NEEDS[guard]}" for guard in missing)
        raise Denied(
            f"the policy requires what this sandbox cannot enforce: {needs}",
            reason=REASON,
            missing=",".join(missing),
        )
    needed = mode != "none" or network != "host" or confinement.limits_tree
    return EnforcementPlan(confinement if needed else None, _limits(policy, offered), enforced, unenforced, user)


def needs_user(policy: Policy, sandbox: str, info: EnvironmentInfo) -> bool:
    """Whether the session is to run as another user than the sandbox's server: root's rights on files are more than
    any mask takes back. `Denied` if that is so and the server cannot change users."""
    wanted = policy.user
    if wanted == "auto":
        wanted = "server" if is_container(sandbox) else "own"
    if wanted == "server":
        return False
    if "users" in info.features:
        return True
    if info.user in _ROOT:
        raise Denied(
            "the sandbox's server is root and cannot run the session as another user (it needs CAP_SETUID and "
            "CAP_SETGID, in a jail also setpriv of util-linux, and not to be of an earlier version): run it "
            'as another user than root, or set sandbox.user to "server" in the rules',
            reason=REASON,
            missing="user",
        )
    return False


def _network(policy: Policy, offered: _Offers, mode: ConfinementMode) -> ConfinedNetwork:
    if policy.network == "host":
        return "host"
    if policy.network == "allow-list":
        # Where nobody can be let through to some hosts alone, nobody is let through: that is the narrower.
        return "proxy" if "network" in offered and "egress" in offered else _closed(offered, mode)
    return _closed(offered, mode)


def _closed(offered: _Offers, mode: ConfinementMode) -> ConfinedNetwork:
    return "none" if mode != "none" or "network" in offered else "host"


def _wanted(policy: Policy) -> tuple[Guard, ...]:
    """The guards that this policy is about: what it requires, and what it limits."""
    resources = policy.resources
    asked: dict[Guard, bool] = {
        "filesystem": policy.sandbox_mode != "none",
        "network": policy.network != "host",
        "signals": policy.sandbox_mode != "none",
        "syscalls": policy.sandbox_mode != "none",
        "processes": resources.processes is not None,
        "memory": resources.memory_bytes is not None,
        "cpu": resources.cpu_cores is not None or resources.cpu_seconds is not None,
        "output": resources.output_bytes is not None,
        "file_size": resources.file_size_bytes is not None,
        "programs": policy.programs is not None,
        # The service ends the session then, with all that runs in it.
        "wall_clock": True,
    }
    return tuple(guard for guard, is_asked in asked.items() if is_asked or guard in policy.require)


def _works(guard: Guard, policy: Policy, offered: _Offers, confinement: Confinement) -> bool:
    mode, resources = confinement.mode, policy.resources
    match guard:
        case "filesystem":
            return mode != "none"
        case "network":
            if policy.network == "host":
                return True
            # Root could go back to the machine's network (setns), if neither a mode nor the filter forbids it.
            kept = confinement.network != "host" and (mode != "none" or confinement.seccomp)
            return kept and (policy.network == "none" or confinement.network == "proxy")
        case "signals":
            return mode == "bubblewrap" or (mode == "landlock" and offered.landlock >= _SCOPING_ABI)
        case "syscalls":
            return confinement.seccomp
        case "processes":
            return resources.processes is not None and confinement.total_processes is not None
        case "memory":
            return resources.memory_bytes is not None and confinement.total_memory_bytes is not None
        case "cpu":
            # Seconds are an rlimit of each process; cores of the tree need the controller.
            limited = resources.cpu_cores is not None or resources.cpu_seconds is not None
            return limited and (resources.cpu_cores is None or confinement.cpu_cores is not None)
        case "file_size":
            return resources.file_size_bytes is not None
        case "programs":
            # Landlock leaves the loader, which runs any file that can be read; so does a place that can be written.
            return confinement.no_execution and not any(map(confinement.executes_in, confinement.writable))
        case "wall_clock":
            return True
        case "output":
            return False


def _limits(policy: Policy, offered: _Offers) -> Limits | None:
    """What each process is limited to by itself: weaker than a cgroup, for where there is none."""
    resources = policy.resources
    limits = Limits(
        cpu_seconds=resources.cpu_seconds,
        memory_bytes=None if "cgroup.memory" in offered else resources.memory_bytes,
        processes=None if "cgroup.pids" in offered else resources.processes,
        file_size_bytes=resources.file_size_bytes,
        core_bytes=0 if policy.sandbox_mode != "none" else None,
    )
    return None if limits == Limits() else limits
