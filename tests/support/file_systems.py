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
