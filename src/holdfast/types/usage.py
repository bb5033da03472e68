"""Resource use of processes; pure."""

from __future__ import annotations

from typing import Final

from holdfast.types.base import Struct

#: Pids that a usage sample lists for one process; a fork bomb has more.
USAGE_PIDS: Final = 1_000


class MemberUsage(Struct, frozen=True, omit_defaults=True):
    """The resources of one operating system process, without its children."""

    pid: int
    parent: int
    #: The name of the program, for a kernel thread or a zombie, whose `argv` is empty.
    name: str
    argv: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    thread_count: int = 0
    #: Since its start.
    seconds: float = 0.0


class ProcessUsage(Struct, frozen=True, omit_defaults=True):
    """The resources of a process, a terminal or a shell, with all that it started.

    CPU time and bytes count from its start and include ended children that were reaped; memory is the resident size
    now, and shared memory counts once for each process.
    """

    process_id: str
    #: Whether the program itself runs; its children may run without it.
    running: bool
    process_count: int = 0
    thread_count: int = 0
    #: Its lowest pids, at most `USAGE_PIDS`.
    pids: tuple[int, ...] = ()
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    #: From and to storage, where the kernel reports it.
    read_bytes: int = 0
    written_bytes: int = 0
    #: Output of its streams; for a shell, with its commands.
    printed_bytes: int = 0
    #: The foreground program of a terminal or a shell, and for how long it has run; None at its prompt.
    foreground: str | None = None
    foreground_seconds: float = 0.0
    #: Whether that program awaits input; None where the kernel does not report it.
    awaiting_input: bool | None = False
    #: The age of the oldest other process, without the program itself.
    background_seconds: float = 0.0
    #: The processes of `pids` one by one, if requested. Empty from servers before this field.
    members: tuple[MemberUsage, ...] = ()

    @property
    def longest_running_seconds(self) -> float:
        """The longest run time among the processes that it started."""
        return max(self.foreground_seconds, self.background_seconds)


class UsageSample(Struct, frozen=True, omit_defaults=True):
    """One sample of the processes of a sandbox."""

    #: For the requested ids that are known.
    usages: tuple[ProcessUsage, ...]
    #: Pids of leftover descendants of processes that are no longer known; at most `USAGE_PIDS`.
    strays: tuple[int, ...] = ()
