"""`BashExecutor`: runs single commands in a session of the service, with the interface of a plain executor.

A flag selects the implementation at construction: a session (`session_executor`, which imports gRPC) or one
`bash -lc` for each command (`one_shot`). Both have the same interface and results.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Protocol

from holdfast.client.defaults import StrPath, optional_path
from holdfast.errors import InvalidParams
from holdfast.service.client.endpoint import endpoint
from holdfast.service.shim.one_shot import ExecutionResult as ExecutionResult, OneShotExecutor

#: `on` or `off`; the argument `sessions` takes precedence.
FLAG: Final = "HOLDFAST_SESSION_EXECUTOR"
#: Bytes kept of each stream of a command: sixteen times the default of `RunCommand`, a fraction of its maximum.
MAX_OUTPUT_BYTES: Final = 1024 * 1024


class Executor(Protocol):
    """The implementation of a `BashExecutor`."""

    def run(self, command: str, *, timeout: float | None = None) -> ExecutionResult: ...

    async def run_async(self, command: str, *, timeout: float | None = None) -> ExecutionResult: ...

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


class BashExecutor:
    """Runs one command after the other and returns the output and exit code of each.

        with holdfast.BashExecutor(token="hf_...") as bash:
            print(bash.run("make test", timeout=600).stdout)

    In an `async with` block `run_async` does the same on the event loop. All commands run in one session, which is
    created at the first command, and again if it has ended: `cd`, `export` and functions persist. With
    `persistent=False` each command has a separate session, and nothing persists. With the flag off
    (`HOLDFAST_SESSION_EXECUTOR=off`, or `sessions=False`) there is no session and no service: each command is a
    `bash -lc` in `sandbox`. One executor is for one event loop, and for any number of threads.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        sessions: bool | None = None,
        persistent: bool = True,
        sandbox: str = "",
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        profile: str = "",
        timeout: float | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
    ) -> None:
        """`address` and `token` are those of the service, or HOLDFAST_SERVICE_ADDRESS and HOLDFAST_SERVICE_TOKEN.

        `sandbox` is the sandbox of the commands; the service's default if empty, and `local` without sessions.
        `timeout` is the default timeout of commands. `tls_ca` is a file with the authority that signed the
        certificate of the service; `tls_cert` and `tls_key` are the client's, if the service requires them.
        """
        self._timeout = timeout
        self.sessions = sessions_wanted() if sessions is None else sessions
        self._executor: Executor
        if not self.sessions:
            self._executor = OneShotExecutor(sandbox or "local", cwd=cwd, env=env)
            return
        try:
            from holdfast.service.shim.session_executor import SessionExecutor
        except ModuleNotFoundError as error:
            raise InvalidParams(
                f"sessions need {error.name}: pip install 'holdfast[service]', or {FLAG}=off"
            ) from None

        self._executor = SessionExecutor(
            endpoint(address, token, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key),
            persistent=persistent,
            sandbox=sandbox,
            cwd=optional_path(cwd) or "",
            env=dict(env or {}),
            profile=profile,
            max_output_bytes=max_output_bytes,
        )

    def run(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        """Run a command and wait for its end. After `timeout` seconds it is killed, and `timed_out` is set."""
        return self._executor.run(command, timeout=self._timeout if timeout is None else timeout)

    async def run_async(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        """The same on the running event loop."""
        return await self._executor.run_async(command, timeout=self._timeout if timeout is None else timeout)

    def close(self) -> None:
        """Close the session and the connection. `aclose` closes those of an event loop."""
        self._executor.close()

    async def aclose(self) -> None:
        """Close the session and the connection of the running event loop."""
        await self._executor.aclose()

    def __enter__(self) -> BashExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> BashExecutor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def sessions_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return the flag in the environment; the default is on."""
    word = (os.environ if environ is None else environ).get(FLAG, "on")
    if word not in ("on", "off"):
        raise InvalidParams(f"{FLAG}={word!r}: on or off")
    return word == "on"
