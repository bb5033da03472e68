"""Searches for bytes in other processes: memory, variables, command lines, files. For tests of secrets.

Reads /proc and files, and changes nothing. A search without a hit proves little: also search for something that is
there with the same search.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def memory_of(pid: int) -> Iterator[bytes]:
    """Each region of a process that can be read, whole."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            span, access, *_ = line.split()
            if access[0] != "r" or line.rstrip().endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            memory.seek(start)
            yield memory.read(end - start)


def files_under(*directories: str) -> Iterator[bytes]:
    for directory in directories:
        for path in Path(directory).rglob("*"):
            if path.is_file():
                yield path.read_bytes()


def proc_files(name: str, pids: Iterable[int] | None = None) -> Iterator[bytes]:
    """This file of /proc, of these processes or of all others."""
    listed = (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())
    for pid in listed if pids is None else pids:
        try:
            yield Path(f"/proc/{pid}/{name}").read_bytes()
        except OSError:
            continue  # it has ended, or we may not read it


def processes_in_cgroup(name: str) -> list[int]:
    """Processes in a cgroup with this in its path: those of a container, by its id."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and name.encode() in b"".join(proc_files("cgroup", [int(entry)])):
            found.append(int(entry))
    return found


def finds(needle: bytes, haystack: Iterable[bytes]) -> bool:
    return any(needle in each for each in haystack)
