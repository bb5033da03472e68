"""Plans how the operating system enforces a session's policy with the features of its sandbox; pure.

The plan names the guards that are enforced and those that are not; the metadata show both, and the monitor watches
the latter. A required guard that cannot be enforced is refused. docs/confinement.md has the table.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from holdfast.service.policy.profiles import is_container
from holdfast.service.problems import Denied, Invalid
from holdfast.service.types import Guard, Resources, ServiceStruct, SessionPolicy
from holdfast.types import ConfinedNetwork, Confinement, ConfinementMode, EnvironmentInfo, Limits

REASON: Final = "GUARD_UNAVAILABLE"
#: The features of `environment/info` that each guard needs, for the refusal.
_NEEDS: Final[dict[Guard, str]] = {
    "filesystem": "bubblewrap, or Landlock and seccomp",
    "network": "bubblewrap, or a network namespace; for `allow-list` also h11 (egress)",
    "processes": "the cgroup controller pids, and a limit in the policy",
    "memory": "the cgroup controller memory, and a limit in the policy",
    "cpu": "the cgroup controller cpu, and a limit in the policy",
    "signals": "bubblewrap, or Landlock of ABI 6",
    "syscalls": "seccomp",
    "output": "a feature that no operating system has: only the monitor watches it",
    "wall_clock": "",
    "file_size": "",
    "programs": "bubblewrap and mounts without execution (noexec, as root), and rules that deny by default",
}
#: The name, or the number where the user database has no name.
_ROOT: Final = ("root", "0")
#: Landlock restricts signals and abstract sockets since this version.
_SCOPING_ABI: Final = 6


class EnforcementPlan(ServiceStruct, frozen=True):
    """The confinement and limits of a session, and the guards that they enforce."""

    confinement: Confinement | None
    limits: Limits | None
    enforced: tuple[Guard, ...]
    #: Guards of the policy that the operating system of this sandbox cannot enforce.
    unenforced: tuple[Guard, ...]
    #: The user of the session, `UID:GID`; None is the user of the sandbox's server.
    user: str | None = None


class _Features:
    """The features in `environment/info`."""

    def __init__(self, words: Collection[str]) -> None:
        self._words = frozenset(words)
        abi = [word.removeprefix("landlock:") for word in words if word.startswith("landlock:")]
        self.landlock = int(abi[0]) if abi and abi[0].isdecimal() else 0

    def __contains__(self, word: str) -> bool:
        return word in self._words

    def mode(self, wanted: ConfinementMode) -> ConfinementMode:
        """Return the wanted mode, or the next available one. Landlock needs seccomp, which blocks Unix sockets."""
        if wanted == "bubblewrap" and "bubblewrap" in self:
            return "bubblewrap"
        if wanted != "none" and self.landlock and "seccomp" in self:
            return "landlock"
        return "none"


def plan(
    policy: SessionPolicy,
    offers: Collection[str],
    *,
    proxy: str | None = None,
    hidden: tuple[str, ...] = (),
    user: str | None = None,
) -> EnforcementPlan:
    """Return the plan for a session. `Denied` if the policy requires a guard that the sandbox lacks.

    `proxy` is the socket of the filtering proxy, for `allow-list`; `hidden` are paths of the service in this
    sandbox (the directory of its database), which the session cannot read; `user` is the user of the session, if it
    is not the server's.
    """
    offered = _Features(offers)
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


def needs_user(policy: SessionPolicy, sandbox: str, info: EnvironmentInfo) -> bool:
    """Return whether the session runs as another user than the sandbox's server, because root can read all files.

    `Denied` if the server would have to change users and cannot.
    """
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


def _network(policy: SessionPolicy, offered: _Features, mode: ConfinementMode) -> ConfinedNetwork:
    if policy.network == "host":
        return "host"
    if policy.network == "allow-list":
        # Without a proxy the network is closed, which is narrower than the allow-list.
        return "proxy" if "network" in offered and "egress" in offered else _closed(offered, mode)
    return _closed(offered, mode)


def _closed(offered: _Features, mode: ConfinementMode) -> ConfinedNetwork:
    return "none" if mode != "none" or "network" in offered else "host"


def _wanted(policy: SessionPolicy) -> tuple[Guard, ...]:
    """Return the guards of a policy: those that it requires, and those of its limits."""
    resources = policy.resources
    requested: dict[Guard, bool] = {
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
        # The service closes the session at the end of its lifetime.
        "wall_clock": True,
    }
    return tuple(guard for guard, is_requested in requested.items() if is_requested or guard in policy.require)


def _works(guard: Guard, policy: SessionPolicy, offered: _Features, confinement: Confinement) -> bool:
    mode, resources = confinement.mode, policy.resources
    match guard:
        case "filesystem":
            return mode != "none"
        case "network":
            if policy.network == "host":
                return True
            # Root could return to the machine's network (setns), unless a mode or the filter forbids it.
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
            # CPU seconds are an rlimit of each process; CPU cores of the tree need the controller.
            limited = resources.cpu_cores is not None or resources.cpu_seconds is not None
            return limited and (resources.cpu_cores is None or confinement.cpu_cores is not None)
        case "file_size":
            return resources.file_size_bytes is not None
        case "programs":
            # Landlock permits the loader, which runs any readable file; a writable directory permits the same.
            return confinement.no_execution and not any(map(confinement.executes_in, confinement.writable))
        case "wall_clock":
            return True
        case "output":
            return False


def _limits(policy: SessionPolicy, offered: _Features) -> Limits | None:
    """Return the rlimits of each process: weaker than a cgroup, for sandboxes without one."""
    resources = policy.resources
    common = set(Limits.__struct_fields__).intersection(Resources.__struct_fields__)
    values = {name: getattr(resources, name) for name in common}
    if "cgroup.memory" in offered:
        del values["memory_bytes"]
    if "cgroup.pids" in offered:
        del values["processes"]
    limits = Limits(**values, core_bytes=0 if policy.sandbox_mode != "none" else None)
    return None if limits == Limits() else limits
