"""The open descriptors of a process, by what they are open on; and waits until there are no more than before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from typing import Final

from tests.support.servers import PATIENCE_SECONDS

#: Descriptors are closed a moment after the reply; nothing reports it.
SETTLE_SECONDS: Final = PATIENCE_SECONDS


def descriptors(pid: int | str = "self") -> Counter[str]:
    """The open files of a process, each without its unique part."""
    found: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found[re.sub(r"\d+", "N", os.readlink(f"/proc/{pid}/fd/{name}"))] += 1
    return found


async def settles(what: str, pid: int, before: Counter[str]) -> None:
    """Wait until a process has nothing open that it had not before."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_SECONDS
    while more := descriptors(pid) - before:
        assert loop.time() < deadline, f"{what} still has {dict(more)}"
        await asyncio.sleep(0.02)
