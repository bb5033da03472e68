"""Environment, limits and restrictions with which a process starts; pure."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from holdfast.types.base import Struct

ConfinementMode = Literal["bubblewrap", "landlock", "none"]
ConfinedNetwork = Literal["none", "host", "proxy"]


#: Patterns of the variables that a login sets: enough for a program to run, without secrets.
CORE_VARIABLES: Final = (
    *("HOME", "LANG", "LANGUAGE", "LC_*", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER"),
)
#: Patterns of the variables by which holdfast's own programs in a sandbox find their Python.
PYTHON_VARIABLES: Final = ("PYTHON*", "LD_LIBRARY_PATH")


class EnvPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """How a process's environment is derived from the server's; `ProcessSpec.env` is laid over the result."""

    #: `core`: only `CORE_VARIABLES`.
    inherit: Literal["all", "core", "none"] = "all"
    #: Keep variables that look like secrets (`secret_names.is_dropped`: `*KEY*`, `*SECRET*`, `*TOKEN*`, and more).
    ignore_default_excludes: bool = False
    #: Case-insensitive glob patterns of names to remove.
    exclude: tuple[str, ...] = ()
    set: dict[str, str] = msgspec.field(default_factory=dict)
    #: If given, only names that match one of these patterns are kept.
    include_only: tuple[str, ...] = ()

    @classmethod
    def minimal(cls, *more: str) -> EnvPolicy:
        """`CORE_VARIABLES` and names that match the patterns `more`, without secrets and holdfast's variables."""
        return cls(exclude=("HOLDFAST_*",), include_only=(*CORE_VARIABLES, *more))


class Limits(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Resource limits of one process, set as rlimits before exec; its children inherit them."""

    cpu_seconds: int | None = None
    memory_bytes: int | None = None
    open_files: int | None = None
    processes: int | None = None
    file_size_bytes: int | None = None
    core_bytes: int | None = None
    stack_bytes: int | None = None
    nice: int | None = None


class Confinement(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Restrictions that the operating system enforces on a process and all that it starts; set before exec.

    Like every Struct that restricts a process, it refuses unknown fields: a restriction that an older version
    ignored would look enforced.
    """

    #: `bubblewrap`: its own root and namespaces. `landlock`: rights on paths, where no namespace can be created.
    mode: ConfinementMode = "none"
    #: Absolute real paths. In addition: the machine's programs to read, and with `bubblewrap` a private /tmp.
    writable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    #: Paths inside those that must not be accessible.
    hidden: tuple[str, ...] = ()
    #: `proxy`: only through the filtering proxy at the Unix socket `proxy`.
    network: ConfinedNetwork = "host"
    proxy: str | None = None
    #: Refuse system calls that programs seldom need and exploits often use.
    seccomp: bool = True
    #: With `landlock`, hide /proc of other processes; `bubblewrap` has a PID namespace in any case.
    hide_processes: bool = True
    #: The size of each of /tmp, /dev/shm and the home directory, with `bubblewrap`.
    scratch_bytes: int = 256 * 1024 * 1024
    #: Limits for all its processes together, by cgroup.
    total_memory_bytes: int | None = None
    total_processes: int | None = None
    cpu_cores: float | None = None
    #: False: no Unix socket can be created, except pairs. Otherwise readable paths can be connected to.
    unix_sockets: bool = True
    #: Programs of the machine that can be executed: names or paths with `*` and `?`; None: all.
    programs: tuple[str, ...] | None = None
    #: With `bubblewrap`, and by root: nothing can be executed outside the directories of the machine's programs,
    #: unless a path among `programs` leads there.
    no_execution: bool = False

    def executes_in(self, directory: str) -> bool:
        """Whether a path among `programs` may lead into this directory."""
        for pattern in self.programs or ():
            fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
            if "/" in pattern and (f"{directory}/".startswith(fixed) or fixed.startswith(f"{directory}/")):
                return True
        return False

    @property
    def limits_tree(self) -> bool:
        """Whether these limits need a cgroup."""
        return (self.total_memory_bytes, self.total_processes, self.cpu_cores) != (None, None, None)
