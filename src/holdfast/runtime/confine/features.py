"""The features of this machine for confinement, each detected by a trial. Starts short programs, makes a cgroup.

The words are those of `environment/info`: `bubblewrap`, `landlock:N`, `seccomp`, `network`, `cgroup.memory`,
`cgroup.pids`, `cgroup.cpu`, `egress`, `users`, `noexec`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from typing import Final, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.launch import self_exec
from holdfast.runtime.confine.launch_plan import plan_launch
from holdfast.runtime.confine.resource_groups import CONTROLLERS, hierarchies
from holdfast.runtime.confine.seccomp import AF_UNIX, ARCHITECTURES, filter_program
from holdfast.runtime.process.environment import Account
from holdfast.types import Confinement

_APPLYING: Final = self_exec.script(__file__, "applying")
_OTHER_USER: Final = Account("nobody", 65534, 65534, (), "/", "/bin/sh")
_JAIL_ATTEMPTS: Final = 3
#: A jail is set up within a tenth of a second; a machine that swaps may take longer.
_SECONDS: Final = 10.0


class Feature(NamedTuple):
    """One feature, and why it is missing; empty if it is available."""

    #: The name in `environment/info`.
    word: str
    missing: str = ""


def detect_features() -> tuple[Feature, ...]:
    """All features, in the order of `holdfast doctor`. Takes some 200 ms."""
    tried, jail = _try(), _try_jail()
    version = tried.get("landlock_version", 0)
    groups = hierarchies()
    return (
        Feature("bubblewrap", jail),
        Feature(f"landlock:{version}" if version else "landlock", str(tried["landlock"])),
        Feature("seccomp", str(tried["seccomp"])),
        Feature("network", str(tried["network"])),
        *(
            Feature(f"cgroup.{name}", groups[name].why_not() if name in groups else "no such controller here")
            for name in CONTROLLERS
        ),
        Feature("egress", "" if importlib.util.find_spec("h11") else "h11 is not installed here"),
        # In each available mode.
        Feature("users", str(tried["users"]) or ("" if jail else _try_jail(_OTHER_USER))),
        Feature("noexec", str(tried["noexec"])),
    )


def available(found: tuple[Feature, ...]) -> tuple[str, ...]:
    """The names of the available features."""
    return tuple(feature.word for feature in found if not feature.missing)


def _try() -> dict[str, object]:
    machine = os.uname().machine
    program = filter_program(machine, (AF_UNIX,)).hex() if machine in ARCHITECTURES else ""
    done = _run([*self_exec.command(), "-I", "-S", _APPLYING, program])
    # By its output, and not by its exit code: the server's orphan reaper may have taken that.
    if not done.stdout:
        why = _last_line(done)
        return {"landlock": why, "seccomp": why, "network": why, "users": why, "noexec": why}
    found: dict[str, object] = json.loads(done.stdout)
    return found


def _try_jail(user: Account | None = None) -> str:
    """Why no jail can be made; empty if one can. Repeated, because a file of /etc may be removed before bwrap
    mounts
    over it, and the result is kept for the server's lifetime."""
    for _ in range(_JAIL_ATTEMPTS - 1):
        if not _try_jail_once(user):
            return ""
    return _try_jail_once(user)


def _try_jail_once(user: Account | None) -> str:
    confinement = Confinement(mode="bubblewrap", network="none", seccomp=False)
    try:
        composed = plan_launch(
            confinement,
            path="/bin/sh",
            argv=["sh", "-c", "echo works"],
            environment={},
            cwd="/",
            as_root=os.geteuid() == 0,
            own=(),
            account=user,
        )
    except HoldfastError as error:
        return str(error)
    options = [os.fsdecode(word) for word in composed.orders["options"].split(b"\0")[:-1]]
    done = _run([composed.path, *options, "--", *composed.orders["command"]])
    return "" if done.stdout == b"works\n" else _last_line(done)


def _run(argv: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, env={})
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, b"", f"no answer in {_SECONDS:g} s".encode())
    except OSError as error:
        return subprocess.CompletedProcess(argv, 127, b"", str(error.strerror).encode())


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
