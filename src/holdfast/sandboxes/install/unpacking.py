"""The bundle as a tree on this machine, for jails that mount it and for engines that copy trees.

Unpacked once, beside its tar. Each user of a tree holds a lock on it, so that a program with another bundle does
not remove the tree while a jail runs from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from holdfast.sandboxes.install.bundle import Bundle, cache_directory


@contextlib.asynccontextmanager
async def unpacked(bundle: Bundle) -> AsyncIterator[Path]:
    """Unpack a bundle, and hold its tree for the block; the last part of the path is the bundle's name."""
    path, held = await asyncio.to_thread(_unpack, bundle)
    try:
        yield path
    finally:
        os.close(held)


def _unpack(bundle: Bundle) -> tuple[Path, int]:
    trees = os.path.join(os.path.dirname(cache_directory()), "trees")
    os.makedirs(trees, mode=0o700, exist_ok=True)
    target = os.path.join(trees, bundle.name)
    while (held := _hold(target)) is None:
        _extract(bundle, target)
    for name in os.listdir(trees):
        if name != bundle.name and not name.startswith("."):
            _remove_unused(os.path.join(trees, name))
    return Path(target), held


def _hold(tree: str) -> int | None:
    """Return a descriptor that locks the tree; None if the tree does not exist or was being removed."""
    try:
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(fd, fcntl.LOCK_SH)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), os.stat(tree)):
            return fd
    os.close(fd)
    return None


def _extract(bundle: Bundle, target: str) -> None:
    aside = tempfile.mkdtemp(prefix=f".{bundle.name}.", dir=os.path.dirname(target))
    try:
        with tarfile.open(bundle.path, "r:gz") as tar:
            # Python 3.11.2, which Debian 12 has, lacks filters.
            if hasattr(tarfile, "data_filter"):
                tar.extraction_filter = tarfile.data_filter
            tar.extractall(aside)
        # A jail may run as another user.
        os.chmod(aside, 0o755)
        os.rename(aside, target)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not os.path.isdir(target):  # otherwise another process unpacked it
            raise


def _remove_unused(tree: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process removed it
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(tree, ignore_errors=True)
        except BlockingIOError:
            return  # a jail runs from it
        finally:
            os.close(fd)
