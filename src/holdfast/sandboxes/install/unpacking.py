"""The bundle as a tree on this machine, for jails that mount it and for engines that copy trees.

Unpacked once, beside its tar. Each user of a tree holds a lock on it, so that a program with another bundle does
not remove the tree while a jail runs from it. A container that mounts a tree cannot hold a lock: the tree is kept
until the container expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from holdfast.sandboxes.install.bundle import Bundle, cache_directory

#: The names of the files that hold until when a tree is kept.
_KEPT: Final = ".kept-"


@contextlib.asynccontextmanager
async def unpacked(bundle: Bundle) -> AsyncIterator[Path]:
    """Unpack a bundle, and hold its tree for the block; the last part of the path is the bundle's name."""
    path, held = await asyncio.to_thread(_unpack, bundle)
    try:
        yield path
    finally:
        os.close(held)


def _unpack(bundle: Bundle) -> tuple[Path, int]:
    trees = _trees()
    os.makedirs(trees, mode=0o700, exist_ok=True)
    target = os.path.join(trees, bundle.name)
    while (held := _hold(target)) is None:
        _extract(bundle, target)
    for name in os.listdir(trees):
        # Those with a dot were being unpacked by a killed process, or are locked by one that unpacks them now.
        if name != bundle.name and not name.startswith(_KEPT) and not _is_kept(trees, name):
            _remove_unused(os.path.join(trees, name))
    return Path(target), held


def keep_tree(name: str, until: float) -> None:
    """Keep the tree of this name at least until this time, in seconds since the epoch, if it is here."""
    mark = _mark(_trees(), name)
    if name and os.path.isdir(os.path.join(_trees(), name)):
        with open(mark, "a"):
            os.utime(mark, (until, max(until, os.stat(mark).st_mtime)))


def _is_kept(trees: str, name: str) -> bool:
    mark = _mark(trees, name)
    with contextlib.suppress(FileNotFoundError):
        if os.stat(mark).st_mtime > time.time():
            return True
        os.unlink(mark)
    return False


def _mark(trees: str, name: str) -> str:
    """The file with the time until which a tree is kept as the time of its change."""
    return os.path.join(trees, _KEPT + os.path.basename(name))


def _trees() -> str:
    return os.path.join(os.path.dirname(cache_directory()), "trees")


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
    """Unpack the bundle to `target`. No effect if another process removed the new directory before its lock."""
    aside = tempfile.mkdtemp(prefix=f".{bundle.name}.", dir=os.path.dirname(target))
    held = _hold(aside)
    if held is None:
        return
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
    finally:
        os.close(held)


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
