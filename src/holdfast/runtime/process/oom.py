"""The kernel's choice when memory runs out: what we started is to go before us. Touches our own oom_score_adj.

A child has its parent's from its first instruction, and gives it to all that it starts. So ours is raised for the
moment of a spawn; written to the child afterwards, it would come too late for what the child forks at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

_OURS: Final = "/proc/self/oom_score_adj"
#: The kernel takes this one first.
HIGHEST: Final = 1_000


class OomScore:
    """What processes get: ours and `added`, never less than ours. Where it cannot be set, the kernel decides."""

    def __init__(self, added: int) -> None:
        self._fd = -1
        self._ours = self._theirs = b""
        if added <= 0:
            return
        try:
            fd = os.open(_OURS, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self._ours = os.pread(fd, 16, 0).strip()
            self._theirs = b"%d" % min(HIGHEST, int(self._ours) + added)
            os.pwrite(fd, self._theirs, 0)
            os.pwrite(fd, self._ours, 0)
        except OSError:
            os.close(fd)  # some containers refuse it
            return
        self._fd = fd

    @contextlib.contextmanager
    def for_children(self) -> Iterator[None]:
        """Whoever is spawned meanwhile has it."""
        if self._fd < 0:
            yield
            return
        os.pwrite(self._fd, self._theirs, 0)
        try:
            yield
        finally:
            os.pwrite(self._fd, self._ours, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
