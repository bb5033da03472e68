"""Which processes a shell waits for, and what a process does at this moment. Reads /proc only."""

from __future__ import annotations

import os
import platform
from typing import Final

from holdfast.runtime.process_table import Entry, ProcessTable

#: A shell without job control makes its background jobs ignore both.
_INT_AND_QUIT: Final = (1 << 1) | (1 << 2)
_READ: Final = {"x86_64": b"0", "aarch64": b"63"}.get(platform.machine())


def foreground(table: ProcessTable, shell: int) -> dict[int, Entry]:
    """What the shell started and waits for, and all below: not its background jobs."""
    children = table.children.get(shell, ())
    return table.descendants(pid for pid in children if not _is_background(pid))


def _is_background(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"SigIgn:"):
                    return int(line.split()[1], 16) & _INT_AND_QUIT == _INT_AND_QUIT
    except OSError:
        pass  # gone
    return False


def reaped_faults(pid: int) -> int:
    """Page faults of the children that this process has waited for: more of them, and it has had another child."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        text = os.read(fd, 512)
    except OSError:
        return -1
    finally:
        os.close(fd)
    return int(text[text.rindex(b")") + 2 :].split(b" ", 10)[8])


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read(512)
    except OSError:
        return False
    return text[text.rindex(b")") + 2 :].startswith(b"T")


def waits_for_input(pid: int, descriptors: range) -> bool:
    """Whether it is blocked in read(2) on one of these descriptors; False where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/syscall", "rb") as file:
            words = file.read(256).split()
    except OSError:
        return False
    return len(words) > 1 and words[0] == _READ and int(words[1], 16) in descriptors


def command_line(pid: int) -> bytes:
    """What it was executed with; empty for one that is at its end."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def copies(pid: int, paths: dict[str, int]) -> list[tuple[int, int]]:
    """Descriptors above 2 of files that have these paths, each with what the path stands for."""
    found: list[tuple[int, int]] = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        if name in ("0", "1", "2"):
            continue
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target in paths:
            found.append((int(name), paths[target]))
    return found
