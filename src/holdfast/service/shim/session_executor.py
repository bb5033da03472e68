"""Runs single commands in a session of the service, over gRPC; the part of `BashExecutor` that needs gRPC.

A generator without IO decides which calls to make; `service.client.rpc` makes them.
"""

from __future__ import annotations

import secrets
import threading
from typing import Final

from holdfast.errors import EXIT_TIMED_OUT
from holdfast.service import problems
from holdfast.service.client.endpoint import ServiceEndpoint
from holdfast.service.client.rpc import SLACK_SECONDS, AsyncCaller, BlockingCaller, RpcCall, Steps, retried
from holdfast.service.shim.one_shot import ExecutionResult
from holdfast.session.v1 import session_pb2 as pb

#: Sessions that one command may use in turn. The end of a second session is an effect of the command.
RENEWALS: Final = 2
_OVER: Final = (pb.CLOSING, pb.CLOSED, pb.ERROR)


class SessionExecutor:
    """Runs commands in one session, which is created at the first command."""

    def __init__(
        self,
        endpoint: ServiceEndpoint,
        *,
        persistent: bool = True,
        sandbox: str = "",
        cwd: str = "",
        env: dict[str, str] | None = None,
        profile: str = "",
        max_output_bytes: int = 1024 * 1024,
    ) -> None:
        self._blocking = BlockingCaller(endpoint)
        self._awaited = AsyncCaller(endpoint)
        self._persistent = persistent
        self._max_bytes = max_output_bytes
        self._create = pb.CreateSessionRequest(
            initial_cwd=cwd,
            environment=env or {},
            kind=pb.SHELL,
            sandbox=sandbox,
            policy=pb.SessionPolicy(profile=profile),
        )
        # Sessions of one executor are numbered: concurrent creators use the same request id and create one session.
        self._name = secrets.token_hex(8)
        self._generation = 0
        self._session_id = ""
        self._changing = threading.Lock()

    @property
    def session_id(self) -> str:
        """The session in use; empty before the first command."""
        return self._session_id

    # --- steps ---------------------------------------------------------------------------------------------------

    def steps(self, command: str, timeout: float | None) -> Steps[ExecutionResult]:
        """Yield the steps of a command, and return its result."""
        request = pb.RunCommandRequest(
            command=command,
            timeout_ms=0 if timeout is None else max(1, round(timeout * 1000)),
            max_bytes=self._max_bytes,
            request_id=secrets.token_hex(16),
        )
        if not self._persistent:
            request.create.CopyFrom(self._create)
            # A repeated call gets the same session, so the command does not run in a second one.
            request.create.request_id = request.request_id
            return (yield from self._run(request, timeout))
        for _ in range(RENEWALS):
            generation, request.session_id = yield from self._session()
            try:
                return (yield from self._run(request, timeout))
            except (problems.NotFound, problems.NotNow):
                # Refused, so the command has not started. The state of the session shows whether it ended.
                if not (yield from self._session_over(request.session_id)):
                    raise
                self._forget(generation)
        _, request.session_id = yield from self._session()
        return (yield from self._run(request, timeout))

    def _session(self) -> Steps[tuple[int, str]]:
        with self._changing:
            generation, session_id = self._generation, self._session_id
        if not session_id:
            create = pb.CreateSessionRequest()
            create.CopyFrom(self._create)
            create.request_id = f"{self._name}-{generation}"
            created = yield from retried(RpcCall("CreateSession", create))
            session_id = created.session_id
            with self._changing:
                if self._generation == generation:
                    self._session_id = session_id
        return generation, session_id

    def _run(self, request: pb.RunCommandRequest, timeout: float | None) -> Steps[ExecutionResult]:
        limit = None if timeout is None else timeout + SLACK_SECONDS
        generation = self._generation
        reply = yield from retried(RpcCall("RunCommand", request, limit))
        if request.session_id and reply.state in _OVER:
            self._forget(generation)
        return ExecutionResult(
            stdout=reply.stdout.decode("utf-8", "replace"),
            stderr=reply.stderr.decode("utf-8", "replace"),
            exit_code=EXIT_TIMED_OUT if reply.timed_out else reply.exit_code,
            timed_out=reply.timed_out,
            duration=reply.duration_ms / 1000,
            truncated=reply.truncated,
        )

    def _session_over(self, session_id: str) -> Steps[bool]:
        try:
            found = yield from retried(RpcCall("GetSession", pb.GetSessionRequest(session_id=session_id)))
        except problems.NotFound:
            return True
        return found.state in _OVER

    def _forget(self, generation: int) -> None:
        with self._changing:
            if self._generation == generation:
                self._generation += 1
                self._session_id = ""

    # --- calls ---------------------------------------------------------------------------------------------------

    def run(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        return self._blocking.drive(self.steps(command, timeout))

    async def run_async(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        return await self._awaited.drive(self.steps(command, timeout))

    # --- close ---------------------------------------------------------------------------------------------------

    def _closing_call(self) -> RpcCall | None:
        """Forget the session; return the call that closes it, if there is one."""
        with self._changing:
            session_id, self._session_id = self._session_id, ""
            self._generation += 1
        return RpcCall("CloseSession", pb.CloseSessionRequest(session_id=session_id)) if session_id else None

    def close(self) -> None:
        try:
            if (rpc := self._closing_call()) is not None:
                self._blocking.call(rpc)
        except (problems.NotFound, problems.NotNow, problems.Unavailable):
            pass  # the session is over, or unreachable: its idle timeout closes it
        finally:
            self._blocking.close()

    async def aclose(self) -> None:
        try:
            if (rpc := self._closing_call()) is not None:
                await self._awaited.call(rpc)
        except (problems.NotFound, problems.NotNow, problems.Unavailable):
            pass  # as in `close`
        finally:
            await self._awaited.aclose()
