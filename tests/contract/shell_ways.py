"""Shells over each way, on a server with bounds that a test can meet. No shell outlives its test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from holdfast import OutputChunk, Sandbox
from holdfast.client.shell import Shell
from holdfast.types import CommandEvent, ShellStatus
from tests.contract.ways import open_box
from tests.support.servers import RunningServer

#: Settings that are small enough to be met by a test.
SHELL_SETTINGS: Final[dict[str, Any]] = {
    "retained_output_bytes_per_process": 2 * 1024 * 1024,
    "max_shells": 3,
    "max_queued_commands": 8,
    "interrupt_grace_seconds": 0.05,
    "detached_session_seconds": 20,
}


@contextlib.asynccontextmanager
async def shell_box(way: str, server: RunningServer) -> AsyncIterator[Sandbox]:
    """A sandbox over `way`; whatever shells it has at the end are closed, with all that they started."""
    async with open_box(way, server, SHELL_SETTINGS) as box:
        yield box
        for shell in await box.shells():
            await shell.close(grace=0.0)
        for process in await box.processes():
            await process.terminate(force=True)
            await process.forget()


async def until_queued(shell: Shell, count: int) -> ShellStatus:
    """Poll until so many commands wait behind the running one: no event reports the queue."""
    while (status := await shell.describe()).queued != count:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return status


class Running:
    """A command in a task of its own, and what it has printed so far."""

    def __init__(self, shell: Shell, command: str, **options: Any) -> None:
        self.printed = {"stdout": b"", "stderr": b"", "pty": b""}
        self._news = asyncio.Event()
        self.task = asyncio.create_task(shell.run(command, on_output=self._take, **options))
        self.task.add_done_callback(lambda _: self._news.set())

    def _take(self, event: CommandEvent) -> None:
        assert isinstance(event, OutputChunk), event
        self.printed[event.stream] += event.data
        self._news.set()

    async def until(self, text: bytes) -> bytes:
        """Wait until it has printed this; all that it has printed."""
        while text not in self.printed["stdout"]:
            assert not self.task.done(), self.task
            self._news.clear()
            await self._news.wait()
        return self.printed["stdout"]


async def late_output(shell: Shell, stdout: bytes = b"", stderr: bytes = b"") -> None:
    """Wait until the shell's own output has come to this, and to nothing else."""
    printed = {"stdout": b"", "stderr": b"", "pty": b""}
    output = shell.output()
    while (printed["stdout"], printed["stderr"]) != (stdout, stderr):
        assert len(printed["stdout"]) <= len(stdout), printed
        assert len(printed["stderr"]) <= len(stderr), printed
        event = await anext(output)
        assert isinstance(event, OutputChunk), event
        printed[event.stream] += event.data
    await output.aclose()
