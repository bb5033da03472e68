"""A session of the OpenAI Agents SDK over a sandbox of a fleet.

The SDK's base class derives the file tools, manifests and snapshots from `exec`, `read` and `write`; terminals are
those of `UnifiedExec`, ports those of `Sandbox.url`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import shlex
import tarfile
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    PtySessionNotFoundError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.pty_types import (
    PtyExecUpdate,
    clamp_pty_yield_time_ms,
    resolve_pty_write_yield_time_ms,
    truncate_text_by_tokens,
)
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.session.tar_workspace import shell_tar_exclude_args
from agents.sandbox.session.workspace_payloads import coerce_write_payload
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tarfile

import holdfast
from holdfast.client.command import oom_note
from holdfast.client.tools.unified_exec import TRANSCRIPT_BYTES
from holdfast.errors import (
    FileNotFound,
    HoldfastError,
    InvalidParams,
    NotADirectory,
    StdinClosed,
    UnknownProcess,
)
from holdfast.fleet.engine import Engine
from holdfast.fleet.fleet import FleetSandbox

#: An archive of a workspace is held in memory up to this size, above it in a file.
SPOOLED_BYTES: Final = 16 * 1024 * 1024
#: The SDK's tool recognises this text and shows the model how to get a terminal.
_NO_STDIN: Final = "stdin is not available for this process"


class SessionState(SandboxSessionState):
    """The state by which another process continues a session: the id of its sandbox on the engine."""

    type: Literal["holdfast"] = "holdfast"
    sandbox_id: str


class Session(BaseSandboxSession):
    """One sandbox. `shutdown` closes the connection; `Client.delete` removes the sandbox."""

    state: SessionState

    def __init__(self, engine: str | Engine, state: SessionState) -> None:
        self.state = state
        self._engine = engine
        self._fleet: holdfast.Fleet | None = None
        self._connected: FleetSandbox | None = None
        self._tools: holdfast.UnifiedExec | None = None
        self._env: dict[str, str] = {}

    @property
    def box(self) -> FleetSandbox:
        """The sandbox of a started session."""
        if self._connected is None:
            raise InvalidParams(f"the session with sandbox {self.state.sandbox_id} is not started")
        return self._connected

    # --- lifecycle -----------------------------------------------------------------------------------------------

    async def _ensure_backend_started(self) -> None:
        if self._connected is None:
            self._fleet = holdfast.Fleet(self._engine)
            self._connected = await self._fleet.connect(self.state.sandbox_id)
        self._env = dict(await self.state.manifest.environment.resolve())
        self._tools = self._tools or holdfast.UnifiedExec(self._connected, env=self._env)

    async def _prepare_backend_workspace(self) -> None:
        await self.box.make_dir(self.state.manifest.root)

    async def running(self) -> bool:
        if self._connected is None:
            return False
        try:
            await self._connected.status()
        except HoldfastError:
            return False
        return True

    async def _shutdown_backend(self) -> None:
        box, fleet = self._connected, self._fleet
        self._connected = self._fleet = self._tools = None
        if box is not None:
            await box.aclose()
        if fleet is not None:
            await fleet.aclose()

    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    def _current_runtime_helper_cache_key(self) -> object | None:
        return self.state.sandbox_id

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        # In the sandbox, where the links are that could lead out of the workspace.
        checked: Path = await self._validate_remote_path_access(path, for_write=for_write)
        return checked

    # --- commands ------------------------------------------------------------------------------------------------

    async def exec(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
    ) -> ExecResult:
        argv = self._prepare_exec_command(*command, shell=shell, user=None)
        return await self._run(argv, timeout, _name(user))

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        return await self._run([str(part) for part in command], timeout, None)

    async def _run(self, argv: list[str], timeout: float | None, user: str | None) -> ExecResult:
        root = self.state.manifest.root
        try:
            result = await self.box.exec(
                argv, cwd=root, env=self._env, user=user, timeout=timeout, start_errors="result"
            )
        except holdfast.TimeoutError as error:
            raise ExecTimeoutError(command=argv, timeout_s=timeout, cause=error) from error
        except HoldfastError as error:
            raise ExecTransportError(command=argv, cause=error) from error
        stderr = result.stderr_bytes + oom_note(result.oom).encode()
        return ExecResult(stdout=result.stdout_bytes, stderr=stderr, exit_code=result.exit_code)

    # --- terminals -----------------------------------------------------------------------------------------------

    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        argv = self._prepare_exec_command(*command, shell=shell, user=None)
        wait = clamp_pty_yield_time_ms(10_000 if yield_time_s is None else int(yield_time_s * 1000))
        try:
            async with asyncio.timeout(None if timeout is None else timeout + wait / 1000):
                output = await self._unified.exec_command(
                    argv,
                    workdir=self.state.manifest.root,
                    user=_name(user),
                    tty=tty,
                    yield_time_ms=wait,
                    max_output_bytes=TRANSCRIPT_BYTES,
                )
        except TimeoutError as error:
            raise ExecTimeoutError(command=argv, timeout_s=timeout, cause=error) from error
        except HoldfastError as error:
            raise ExecTransportError(command=argv, cause=error) from error
        return _update(output, max_output_tokens)

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        wait = 250 if yield_time_s is None else int(yield_time_s * 1000)
        wait = resolve_pty_write_yield_time_ms(yield_time_ms=wait, input_empty=not chars)
        try:
            output = await self._unified.write_stdin(
                session_id, chars, yield_time_ms=wait, max_output_bytes=TRANSCRIPT_BYTES
            )
        except UnknownProcess as error:
            raise PtySessionNotFoundError(session_id=session_id, cause=error) from error
        except StdinClosed as error:
            raise RuntimeError(_NO_STDIN) from error
        return _update(output, max_output_tokens)

    async def pty_terminate_all(self) -> None:
        if self._tools is not None:
            await self._tools.aclose()

    @property
    def _unified(self) -> holdfast.UnifiedExec:
        if self._tools is None:
            raise InvalidParams(f"the session with sandbox {self.state.sandbox_id} is not started")
        return self._tools

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            address = urlsplit(await self.box.url(port))
        except HoldfastError as error:
            raise ExposedPortUnavailableError(
                port=port, exposed_ports=self.state.exposed_ports, reason="backend_unavailable", cause=error
            ) from error
        return ExposedPortEndpoint(host=address.hostname or "", port=address.port or 0, tls=False)

    # --- files ---------------------------------------------------------------------------------------------------

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        return io.BytesIO(await self._read(path, user=_name(user)))

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        return await self._read(path, size=max_bytes)

    async def _read(self, path: Path, **options: Any) -> bytes:
        place = await self._validate_path_access(path)
        try:
            return await self.box.read_file(place, **options)
        except (FileNotFound, NotADirectory) as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error
        except HoldfastError as error:
            raise WorkspaceArchiveReadError(path=path, cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        payload = coerce_write_payload(path=path, data=data)
        place = await self._validate_path_access(path, for_write=True)
        try:
            await self.box.write_file(place, cast(Any, payload.stream), user=_name(user))
        except HoldfastError as error:
            raise WorkspaceArchiveWriteError(path=path, cause=error) from error

    async def persist_workspace(self) -> io.IOBase:
        root = self._workspace_root_path()
        excluded = " ".join(shell_tar_exclude_args(self._persist_workspace_skip_relpaths()))
        archive = tempfile.SpooledTemporaryFile(SPOOLED_BYTES)  # noqa: SIM115 - the caller closes it
        try:
            async with self._archive() as place:
                script = f"tar {excluded} -C {shlex.quote(str(root))} -cf {place} ."
                await self.box.exec(["sh", "-c", script], check=True)
                async for piece in self.box.open_read(place):
                    archive.write(piece)
        except HoldfastError as error:
            archive.close()
            raise WorkspaceArchiveReadError(path=root, cause=error) from error
        archive.seek(0)
        return cast(io.IOBase, archive)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        root = self._workspace_root_path()
        with tempfile.SpooledTemporaryFile(SPOOLED_BYTES) as archive:
            while piece := data.read(1 << 20):
                archive.write(piece)
            archive.seek(0)
            try:
                with tarfile.open(fileobj=archive, mode="r:*") as tar:
                    validate_tarfile(tar, allow_external_symlink_targets=False)
                archive.seek(0)
                async with self._archive() as place:
                    await self.box.write_file(place, archive)
                    await self.box.make_dir(root)
                    await self.box.exec(["tar", "-C", str(root), "-xf", place], check=True)
            except (HoldfastError, UnsafeTarMemberError, tarfile.TarError) as error:
                raise WorkspaceArchiveWriteError(path=root, cause=error) from error

    @contextlib.asynccontextmanager
    async def _archive(self) -> AsyncIterator[str]:
        """The path of a temporary file in the sandbox."""
        place = f"/tmp/holdfast-{uuid.uuid4().hex}.tar"
        try:
            yield place
        finally:
            await self.box.remove(place, missing_ok=True)


def _name(user: str | User | None) -> str | None:
    return user.name if isinstance(user, User) else user


def _update(output: holdfast.ToolOutput, max_tokens: int | None) -> PtyExecUpdate:
    text, tokens = truncate_text_by_tokens(output.output, max_tokens)
    text += oom_note(output.oom)
    return PtyExecUpdate(
        process_id=output.session_id,
        output=text.encode(errors="replace"),
        exit_code=output.exit_code,
        original_token_count=tokens,
    )
