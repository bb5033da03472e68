"""File operations under a confinement, by a helper process in a jail that is made for one request.

Only a process in the jail has exactly the rights of the policy: a check of paths in the server would race with
links. A jail lasts for one request, because mounts are those of the moment at which it was made: a path that the
policy protects may have come into existence since. Touches processes and pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from holdfast.config import ExecServerConfig
from holdfast.errors import HelperFailed, InvalidParams, PermissionRefused
from holdfast.launch import self_exec
from holdfast.runtime.files.local_files import LocalFiles
from holdfast.runtime.files.operations import read_message, write_message
from holdfast.runtime.process.environment import resolve_cwd
from holdfast.runtime.process.spawn import JailFailed, StandardStreams
from holdfast.types import Confinement

#: Jails at a time; further requests wait. Each is an interpreter.
MAX_JAILS: Final = 4
_PROGRAM: Final = self_exec.script(__file__, "operations")
#: How much is read of what bwrap or the helper printed: the size of a pipe.
_ERROR_BYTES: Final = 64 * 1024

#: Starts a program in a jail and returns its pid, which the caller reaps and gives back.
Spawn = Callable[[Confinement, list[str], StandardStreams], Awaitable[int]]


class ConfinedFiles(LocalFiles):
    """The files of this machine with the rights of one jail."""

    def __init__(self, config: ExecServerConfig, helper: _Helper) -> None:
        super().__init__(config)
        self._helper = helper

    def _perform(self, operation: str, arguments: dict[str, Any], user: str | None) -> Any:
        if user is not None:
            raise InvalidParams("user: a confined file operation has the server's user")
        for name in ("path", "source", "target"):
            if name in arguments and not os.path.isabs(arguments[name]):
                arguments[name] = os.path.join(resolve_cwd(None), arguments[name])
        return self._helper.perform(operation, arguments)


class Jails:
    """Makes jails for file operations."""

    def __init__(self, config: ExecServerConfig, spawn: Spawn, reaped: Callable[[int], None]) -> None:
        self._config = config
        self._spawn = spawn
        self._reaped = reaped
        self._slots = asyncio.Semaphore(MAX_JAILS)

    @asynccontextmanager
    async def files(self, confinement: Confinement) -> AsyncIterator[ConfinedFiles]:
        """The files under a confinement, for the length of a block."""
        async with self._slots:
            helper = await self._start(confinement)
            files = ConfinedFiles(self._config, helper)
            try:
                yield files
            finally:
                await asyncio.shield(self._end(files, helper))

    async def _start(self, confinement: Confinement) -> _Helper:
        opened: list[int] = []
        try:
            for _ in range(3):
                opened += os.pipe2(os.O_CLOEXEC)
            stdin, to, back, stdout, errors, stderr = opened
            os.set_blocking(errors, False)
            command = [*self_exec.command(), "-I", "-S", _PROGRAM]
            try:
                pid = await self._spawn(confinement, command, StandardStreams(stdin, stdout, stderr))
            except JailFailed as error:
                raise PermissionRefused(f"confinement: {_printed(errors) or error}") from None
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        return _Helper(pid, to, back, errors, self._config.max_uploads)

    async def _end(self, files: ConfinedFiles, helper: _Helper) -> None:
        files.drop_threads()
        await asyncio.get_running_loop().run_in_executor(None, helper.close)
        self._reaped(helper.pid)


class _Helper:
    """The helper process of a jail. It takes one request at a time."""

    def __init__(self, pid: int, to: int, back: int, errors: int, max_uploads: int) -> None:
        self.pid = pid
        self._to, self._from, self._errors = os.fdopen(to, "wb"), os.fdopen(back, "rb"), errors
        self._lock = threading.Lock()
        #: It has the user of the server: in the jail it cannot change it.
        self._hello: tuple[Any, ...] | None = (None, None, None, max_uploads)

    def perform(self, operation: str, arguments: dict[str, Any]) -> Any:
        with self._lock:
            # The exit of a helper is noticed when its reply is read, with the reason.
            with contextlib.suppress(BrokenPipeError):
                if self._hello is not None:
                    hello, self._hello = self._hello, None
                    write_message(self._to, hello)
                write_message(self._to, (operation, arguments))
            try:
                failure, result = read_message(self._from)
            except EOFError:
                raise HelperFailed(f"the confined helper for files failed: {_printed(self._errors)}") from None
        if failure is not None:
            number, text, path = failure
            raise OSError(number, text, path)
        return result

    def close(self) -> None:
        """End it by the end of its input, and reap it."""
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        self._from.close()
        os.close(self._errors)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _printed(fd: int) -> str:
    """The last line that was printed."""
    try:
        lines = os.read(fd, _ERROR_BYTES).decode(errors="replace").split("\n")
    except BlockingIOError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
