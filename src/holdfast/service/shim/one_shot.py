"""The plain executor: each command is a separate `bash -lc` in a sandbox, without a session and a service.

`BashExecutor` uses it when its flag is off. Uses sandboxes through the client, and no gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack

import holdfast
from holdfast import sync
from holdfast.client.defaults import StrPath
from holdfast.client.exec_remote import ExecRemoteOptions, ExecResult
from holdfast.client.sandbox import Sandbox
from holdfast.errors import EXIT_TIMED_OUT, InvalidRequest, TimeoutError
from holdfast.service.types import ServiceStruct
from holdfast.types import EnvPolicy


class ExecutionResult(ServiceStruct, frozen=True):
    """Output and exit code of one command."""

    stdout: str
    stderr: str
    #: 124 after a timeout.
    exit_code: int
    timed_out: bool = False
    #: Seconds.
    duration: float = 0.0
    #: Only the end of the output is here.
    truncated: bool = False

    @property
    def success(self) -> bool:
        return self.exit_code == 0


class OneShotExecutor:
    """Runs commands that share only the sandbox: `cd` and `export` end with their command."""

    def __init__(
        self, sandbox: str = "local", *, cwd: StrPath | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._address = sandbox
        self._cwd = cwd
        self._env = dict(env) if env else None
        self._blocking: tuple[ExitStack, sync.Sandbox] | None = None
        self._awaited: tuple[AsyncExitStack, Sandbox, asyncio.AbstractEventLoop] | None = None

    def run(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        """Run a command and wait for its end."""
        if self._blocking is None:
            stack = ExitStack()
            self._blocking = stack, stack.enter_context(sync.connect(self._address))
        began = time.monotonic()
        try:
            done = self._blocking[1].exec_remote(["bash", "-lc", command], self._options(timeout), stream=False)
        except TimeoutError as late:
            return _timed_out(late, began)
        return _ended(done, began)

    async def run_async(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        """The same on an event loop."""
        box = await self._box()
        began = time.monotonic()
        try:
            done = await box.exec_remote(["bash", "-lc", command], self._options(timeout), stream=False)
        except TimeoutError as late:
            return _timed_out(late, began)
        return _ended(done, began)

    def _options(self, timeout: float | None) -> ExecRemoteOptions:
        # As in a session: commands do not get the environment of the program that started the server.
        return ExecRemoteOptions(cwd=self._cwd, env=self._env, env_policy=EnvPolicy.minimal(), timeout=timeout)

    async def _box(self) -> Sandbox:
        loop = asyncio.get_running_loop()
        if self._awaited is None:
            stack = AsyncExitStack()
            self._awaited = stack, await stack.enter_async_context(holdfast.connect(self._address)), loop
        if self._awaited[2] is not loop:
            raise InvalidRequest("this executor belongs to another event loop; make one for each")
        return self._awaited[1]

    def close(self) -> None:
        if self._blocking is not None:
            self._blocking[0].close()
            self._blocking = None

    async def aclose(self) -> None:
        if self._awaited is not None:
            stack, self._awaited = self._awaited[0], None
            await stack.aclose()


def _ended(done: ExecResult, began: float) -> ExecutionResult:
    return ExecutionResult(
        stdout=done.stdout,
        stderr=done.stderr,
        exit_code=done.returncode,
        duration=time.monotonic() - began,
        truncated=done.truncated,
    )


def _timed_out(late: TimeoutError, began: float) -> ExecutionResult:
    return ExecutionResult(
        stdout=late.stdout,
        stderr=late.stderr,
        exit_code=EXIT_TIMED_OUT,
        timed_out=True,
        duration=time.monotonic() - began,
    )
