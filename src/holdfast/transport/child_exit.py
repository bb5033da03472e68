"""Reports the exit of a child process to the event loop. Reaps the child, touches nothing else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable


def call_after_exit(process: subprocess.Popen[bytes], exited: Callable[[], None]) -> None:
    """Call `exited` in the running loop after the process was reaped; `process.returncode` is set then."""
    loop = asyncio.get_running_loop()
    if sys.platform != "linux":
        threading.Thread(target=_wait_in_thread, args=(process, loop, exited), daemon=True).start()
        return
    pidfd = os.pidfd_open(process.pid)

    def readable() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.wait()
        exited()

    loop.add_reader(pidfd, readable)


def _wait_in_thread(
    process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, exited: Callable[[], None]
) -> None:
    process.wait()
    loop.call_soon_threadsafe(exited)
