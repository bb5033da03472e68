"""A child process of the host, for programs that make or reach a sandbox: an engine's client, bubblewrap, `ssh`.

`asyncio.create_subprocess_exec` is not used: if the loop cancels all tasks before the pipes of a new process are
connected, as `asyncio.run` does at its end, it waits forever (Python 3.11 to 3.13.0). Here, a start is one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, Self

from holdfast.errors import CommandNotFound
from holdfast.launch.pidfd_signals import signal_child_group
from holdfast.transport.child_exit import call_after_exit

#: The capacity of a pipe.
_READ_BYTES: Final = 64 * 1024
#: For a line with which a program reports that it is ready.
_LINE_BYTES: Final = 1024


class HostProcess:
    """A child that leads a session of its own. As a context manager, kills its group at the end, and reaps it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._over = asyncio.Event()
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=None if env is None else dict(env),
                cwd=cwd,
                pass_fds=pass_fds,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandNotFound(f"{argv[0]}: {error.strerror}") from None
        try:
            call_after_exit(self._process, self._over.set)
        except OSError:
            # No descriptor is left for the exit, so the process would not be reaped.
            self.kill()
            self._process.wait()
            self._close_pipes()
            raise

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None until the process was reaped."""
        return self._process.returncode if self._over.is_set() else None

    async def wait(self) -> int:
        """Wait for the exit, and return its code."""
        await self._over.wait()
        return self._process.returncode

    def kill(self) -> None:
        """Kill the process and its group."""
        signal_child_group(self._process.pid, signal.SIGKILL)

    async def feed(self, data: bytes) -> None:
        """Write the whole stdin, and close it. A process that ends without reading its input is no error."""
        pipe = self._process.stdin
        if pipe is None:
            return
        os.set_blocking(pipe.fileno(), False)
        left = memoryview(data)
        with pipe, contextlib.suppress(BrokenPipeError):
            while left:
                try:
                    left = left[os.write(pipe.fileno(), left) :]
                except BlockingIOError:
                    await _ready(pipe.fileno(), writing=True)

    async def read_stdout(self, limit: int) -> str:
        """Read stdout to its end, and return the last `limit` bytes."""
        return await _read(self._process.stdout, limit)

    async def read_stderr(self, limit: int) -> str:
        """Read stderr to its end, and return the last `limit` bytes."""
        return await _read(self._process.stderr, limit)

    async def read_line(self) -> bytes:
        """Read the first line of stdout; empty if stdout is closed before."""
        assert self._process.stdout is not None
        return await read_line(self._process.stdout.fileno())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self.returncode is None:
                self.kill()
                await self.wait()
        finally:
            self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


async def read_line(fd: int) -> bytes:
    """Read a line that ends a write, as far as 1 KiB; empty if the other end is closed before."""
    os.set_blocking(fd, False)
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
        await _ready(fd)
        data = os.read(fd, _LINE_BYTES)
        if not data:
            return b""
        line += data
    return line


async def _read(pipe: IO[bytes] | None, limit: int) -> str:
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    kept = bytearray()
    while True:
        await _ready(pipe.fileno())
        data = os.read(pipe.fileno(), _READ_BYTES)
        if not data:
            return kept.decode(errors="replace")
        kept += data
        del kept[:-limit]


async def _ready(fd: int, *, writing: bool = False) -> None:
    """Wait until the descriptor is readable, or writable."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)
