"""Terminals over each way, on a server with bounds that a test can meet. Nothing of a test's terminals outlives it.

Every shell has a home of its own with files of three lines: what the machine's users have in theirs is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from holdfast import Sandbox
from holdfast.client.terminal import Terminal
from holdfast.types import TerminalEvent, TerminalStatus
from tests.contract.ways import open_box
from tests.support.servers import RunningServer, is_alive

#: Settings that are small enough to be met by a test.
TERMINAL_SETTINGS: Final[dict[str, Any]] = {
    "retained_output_bytes_per_process": 8 * 1024 * 1024,
    "max_terminals": 5,
    "interrupt_grace_seconds": 0.2,
    "detached_session_seconds": 20,
    "stdin_buffer_bytes": 64 * 1024,
}
#: No wire, MessagePack on a stream, JSON in frames: the others are made of the same parts.
TERMINAL_WAYS: Final = ("inprocess", "unix", "ws-json")
#: For what a test waits at most, if it does not test the time itself.
PATIENCE: Final = 60.0


def make_home(directory: Path) -> Path:
    """A home with shells that show `$ ` (bash) and `% ` (zsh)."""
    home = directory / "home"
    home.mkdir()
    for name in (".bash_profile", ".bashrc"):
        (home / name).write_text("PS1='$ '\nPS2='> '\nunset HISTFILE PROMPT_COMMAND\n")
    (home / ".zshrc").write_text("PS1='%% '\nPS2='> '\nunset HISTFILE\n")
    (home / ".inputrc").write_text("set bell-style none\n")
    (home / ".vimrc").write_text("set nocompatible\n")
    return home


@contextlib.asynccontextmanager
async def terminal_box(way: str, server: RunningServer) -> AsyncIterator[Sandbox]:
    """A sandbox over `way`; whatever terminals it has at the end are closed, with all that they started."""
    os.chmod(server.spool, 0o711)  # another user's shell reads its files there
    async with open_box(way, server, TERMINAL_SETTINGS) as box:
        yield box
        for terminal in await box.terminals():
            await terminal.close("force")
        for process in await box.processes():
            await process.forget()


class Opener:
    """Opens terminals with a home of their own."""

    def __init__(self, box: Sandbox, home: Path) -> None:
        self.box = box
        self.home = home

    async def __call__(self, command: str | Sequence[str] | None = None, **options: Any) -> Terminal:
        env = {"HOME": str(self.home), "INPUTRC": str(self.home / ".inputrc"), **options.pop("env", {})}
        return await self.box.terminal(command, env=env, cwd=options.pop("cwd", str(self.home)), **options)


async def shown(terminal: Terminal, since: int = 0) -> bytes:
    """All output after a position that is there now, which must hold no gaps."""
    parts = []
    while True:
        found = await terminal.read(since)
        assert not found.truncated
        parts += [event.payload for event in found.events if event.type == "output"]
        if found.token == since:
            return b"".join(parts)
        since = found.token


async def until_shown(terminal: Terminal, text: bytes, since: int = 0) -> bytes:
    """Wait until the terminal has shown this after a position; all that it has shown since."""
    seen = b""
    async with asyncio.timeout(PATIENCE):
        async for event in terminal.events(since):
            if event.type == "output":
                seen += event.payload
                if text in seen:
                    return seen
    raise AssertionError(f"{text!r} was not shown: {seen!r}")


async def until_event(terminal: Terminal, holds: Callable[[TerminalEvent], bool], since: int = 0) -> TerminalEvent:
    """The first event for which something holds."""
    async with asyncio.timeout(PATIENCE):
        async for event in terminal.events(since):
            if holds(event):
                return event
    raise AssertionError("the terminal closed before")


async def until_status(terminal: Terminal, holds: Callable[[TerminalStatus], bool]) -> TerminalStatus:
    """Poll until something holds of the terminal that no event reports."""
    async with asyncio.timeout(PATIENCE):
        while not holds(status := await terminal.describe()):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return status


async def until_gone(pid: int) -> None:
    """Wait until a process has ended, or has been left as a zombie by a parent that is not ours."""
    async with asyncio.timeout(PATIENCE):
        while is_alive(pid):  # noqa: ASYNC110
            await asyncio.sleep(0)


def number_in(text: str) -> int:
    """The one number that a command printed."""
    return int("".join(char for char in text if char.isdecimal()))


def is_root() -> bool:
    return os.geteuid() == 0
