"""The bundle as a tree on this machine, for jails that see it where it is and for engines that copy trees.

Unpacked once, beside the tar that it comes from.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from holdfast.sandboxes.bundle import Bundle, cache_directory


async def unpacked(bundle: Bundle) -> Path:
    """The directory with the tree of this bundle; its last part is the bundle's name."""
    return await asyncio.to_thread(_unpack, bundle)


def _unpack(bundle: Bundle) -> Path:
    trees = os.path.join(os.path.dirname(cache_directory()), "trees")
    os.makedirs(trees, mode=0o700, exist_ok=True)
    target = os.path.join(trees, bundle.name)
    if os.path.isdir(target):
        return Path(target)
    aside = tempfile.mkdtemp(prefix=f".{bundle.name}.", dir=trees)
    try:
        with tarfile.open(bundle.path, "r:gz") as tar:
            # Python 3.11.2, which Debian 12 has, knows no filters.
            if hasattr(tarfile, "data_filter"):
                tar.extraction_filter = tarfile.data_filter
            tar.extractall(aside)
        # A jail may run as another user.
        os.chmod(aside, 0o755)
        os.rename(aside, target)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not os.path.isdir(target):  # else somebody was faster
            raise
    for name in os.listdir(trees):
        if name != bundle.name and not name.startswith("."):
            shutil.rmtree(os.path.join(trees, name), ignore_errors=True)
    return Path(target)
