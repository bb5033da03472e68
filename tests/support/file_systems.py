"""File systems that tests make for themselves and may fill."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def small_file_system(options: str) -> Iterator[str]:
    """Mount a tmpfs with these options; like a full disk, a full tmpfs fails writes with ENOSPC."""
    path = tempfile.mkdtemp(prefix="hf-", dir="/tmp")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True)
    try:
        if mounted.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
        yield path
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", "--lazy", path], check=True)
        os.rmdir(path)


def fill_blocks(fd: int, leave: int = 0) -> None:
    """Grow a file until its file system has at most so many free bytes.

    Others may take room at the same time: then it grows by less, and last by single blocks.
    """
    found = os.fstatvfs(fd)
    count = found.f_bavail * found.f_frsize
    while count >= found.f_frsize:
        free = os.fstatvfs(fd).f_bavail * found.f_frsize - leave
        if free < found.f_frsize:
            return
        count = min(count, free)
        try:
            os.posix_fallocate(fd, os.fstat(fd).st_size, count)
        except OSError:
            count //= 2
