"""Enforcement of a policy where a sandbox offers much, little and nothing, and refusals."""

from __future__ import annotations

import pytest

from holdfast.service.problems import Denied, Invalid
from holdfast.service.sessions.backend.enforcement import plan
from holdfast.service.types import Resources, SessionPolicy
from holdfast.types import Confinement, Limits

EVERYTHING = (
    *("process", "tty", "bubblewrap", "landlock:7", "seccomp", "network", "egress"),
    *("cgroup.memory", "cgroup.pids", "cgroup.cpu"),
)
CONTAINER = ("process", "landlock:5", "seccomp")
POLICY = SessionPolicy(
    "default",
    idle_timeout=60,
    max_lifetime=600,
    idle_grace=5,
    writable=("/work",),
    readable=("/data",),
    sandbox_mode="bubblewrap",
    network="none",
    resources=Resources(
        cpu_cores=1.5,
        cpu_seconds=60,
        memory_bytes=1 << 30,
        processes=100,
        output_bytes=1 << 20,
        file_size_bytes=1 << 24,
    ),
)


def changed(**changes: object) -> SessionPolicy:
    fields = {name: getattr(POLICY, name) for name in POLICY.__struct_fields__}
    return SessionPolicy(**{**fields, **changes})


def test_where_everything_is_offered() -> None:
    found = plan(POLICY, EVERYTHING, hidden=("/data/sessions.db",))
    assert found.confinement == Confinement(
        mode="bubblewrap",
        writable=("/work",),
        readable=("/data",),
        hidden=("/data/sessions.db",),
        network="none",
        seccomp=True,
        total_memory_bytes=1 << 30,
        total_processes=100,
        cpu_cores=1.5,
    )
    assert found.limits == Limits(cpu_seconds=60, file_size_bytes=1 << 24, core_bytes=0)
    assert set(found.enforced) == {
        *("filesystem", "network", "signals", "syscalls", "processes", "memory", "cpu", "file_size", "wall_clock")
    }
    assert found.unenforced == ("output",)


def test_a_container_without_namespaces_and_cgroups() -> None:
    found = plan(POLICY, CONTAINER)
    assert found.confinement == Confinement("landlock", ("/work",), ("/data",), network="none", seccomp=True)
    # Each process for itself, since nothing limits them together.
    assert found.limits == Limits(
        cpu_seconds=60, file_size_bytes=1 << 24, core_bytes=0, memory_bytes=1 << 30, processes=100
    )
    assert set(found.enforced) == {"filesystem", "network", "syscalls", "file_size", "wall_clock"}
    assert set(found.unenforced) == {"signals", "processes", "memory", "cpu", "output"}


def test_where_nothing_is_offered() -> None:
    found = plan(POLICY, ("process",))
    assert found.confinement is None
    assert {"filesystem", "network", "signals", "syscalls", "memory"} <= set(found.unenforced)


@pytest.mark.parametrize(
    ("offered", "required", "named"),
    [
        (("process",), "filesystem", "bubblewrap, or Landlock"),
        (("process",), "network", "network namespace"),
        (CONTAINER, "signals", "Landlock of ABI 6"),
        (CONTAINER, "memory", "cgroup controller memory"),
        (CONTAINER, "processes", "cgroup controller pids"),
        (CONTAINER, "cpu", "cgroup controller cpu"),
        (("landlock:7",), "syscalls", "seccomp"),
        (EVERYTHING, "output", "the monitor"),
    ],
)
def test_what_is_required_and_not_offered_is_refused(offered: tuple[str, ...], required: str, named: str) -> None:
    with pytest.raises(Denied, match=named) as refused:
        plan(changed(require=(required,)), offered)
    assert refused.value.reason == "GUARD_UNAVAILABLE"
    assert refused.value.details["missing"] == required


def test_what_is_required_is_enforced_also_if_nothing_else_asks_for_it() -> None:
    assert "filesystem" in plan(changed(require=("filesystem",)), EVERYTHING).enforced
    with pytest.raises(Denied):
        plan(changed(require=("memory",), resources=Resources()), EVERYTHING)


def test_an_allow_list_needs_a_proxy_and_a_network_of_its_own() -> None:
    policy = changed(network="allow-list", allowed_hosts=("example.com",))
    found = plan(policy, EVERYTHING, proxy="/run/egress.sock")
    assert found.confinement is not None
    assert (found.confinement.network, found.confinement.proxy) == ("proxy", "/run/egress.sock")
    assert "network" in found.enforced
    with pytest.raises(Invalid, match="proxy"):
        plan(policy, EVERYTHING)
    # Nothing can let it through to some hosts alone: it is let through to none, and the plan reports it.
    narrower = plan(policy, CONTAINER, proxy="/run/egress.sock")
    assert narrower.confinement is not None
    assert narrower.confinement.network == "none"
    assert "network" in narrower.unenforced


def test_a_list_of_programs_is_enforced_where_nothing_else_can_be_executed() -> None:
    policy = changed(programs=("git", "ls"))
    with_noexec = plan(policy, (*EVERYTHING, "noexec"))
    assert with_noexec.confinement is not None
    assert (with_noexec.confinement.programs, with_noexec.confinement.no_execution) == (("git", "ls"), True)
    assert "programs" in with_noexec.enforced
    # Landlock, and a jail without such mounts, leave the loader: the list is applied, and not called enforced.
    for offered in (EVERYTHING, (*CONTAINER, "noexec")):
        found = plan(policy, offered)
        assert found.confinement is not None
        assert (found.confinement.programs, found.confinement.no_execution) == (("git", "ls"), False)
        assert "programs" in found.unenforced
    # A rule that leads into a directory that can be written leaves whatever is put there.
    assert "programs" in plan(changed(programs=("/work/*",)), (*EVERYTHING, "noexec")).unenforced
    with pytest.raises(Denied, match="noexec"):
        plan(changed(programs=("git",), require=("programs",)), EVERYTHING)
    with pytest.raises(Denied, match="deny by default"):
        plan(changed(require=("programs",)), (*EVERYTHING, "noexec"))
    assert plan(policy, ("process",)).confinement is None


def test_a_policy_that_asks_for_nothing() -> None:
    free = SessionPolicy("free", idle_timeout=60, max_lifetime=600, idle_grace=5)
    found = plan(free, EVERYTHING)
    assert (found.confinement, found.limits, found.enforced, found.unenforced) == (None, None, ("wall_clock",), ())


def test_limits_without_a_sandbox_mode() -> None:
    found = plan(changed(sandbox_mode="none", network="host"), EVERYTHING)
    assert found.confinement is not None
    assert (found.confinement.mode, found.confinement.total_processes, found.confinement.seccomp) == (
        "none",
        100,
        False,
    )
    assert {"memory", "processes", "cpu"} <= set(found.enforced)
