"""A sandbox client for the OpenAI Agents SDK: an agent's shell, files, terminals and ports are those of a sandbox.

Sandboxes are made by a fleet and outlive the process that made them, so another process resumes a session by its
state. The session itself is in `openai_agents_session`.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

from agents.sandbox.manifest import Manifest
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.session.sandbox_session import SandboxSession
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot

import holdfast
from holdfast.errors import InvalidParams, SandboxGone
from holdfast.fleet.engine import Engine
from holdfast.integrations.openai_agents_session import Session, SessionState


class ClientOptions(BaseSandboxClientOptions):
    """`SandboxRunConfig(client=..., options=ClientOptions(exposed_ports=(8000,)))`."""

    type: Literal["holdfast"] = "holdfast"
    exposed_ports: tuple[int, ...] = ()


class Client(BaseSandboxClient[ClientOptions | None]):
    """`SandboxRunConfig(client=Client("docker", image="python:3.12"))`: a sandbox of its own for each session.

    `template` and `fields` describe the sandboxes; see `holdfast.Template`. They live for their `lifetime`, a day
    by default, unless the SDK deletes them before.
    """

    backend_id = "holdfast"
    supports_default_options = True

    def __init__(
        self,
        engine: str | Engine = "bwrap",
        template: holdfast.Template | None = None,
        *,
        exposed_ports: tuple[int, ...] = (),
        **fields: Any,
    ) -> None:
        self._engine = engine
        self._template = template
        self._fields = fields
        self._exposed_ports = exposed_ports

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: ClientOptions | None = None,
    ) -> SandboxSession:
        manifest = Manifest() if manifest is None else manifest
        self._validate_manifest_for_create(manifest)
        _check(manifest)
        async with holdfast.Fleet(self._engine) as fleet:
            ref = await fleet.create(self._template, **self._fields)
        session_id = uuid.uuid4()
        state = SessionState(
            session_id=session_id,
            snapshot=resolve_snapshot(snapshot, str(session_id)),
            manifest=manifest,
            exposed_ports=self._exposed_ports if options is None else options.exposed_ports,
            sandbox_id=ref.id,
        )
        return self._wrap_session(Session(self._engine, state))

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Continue in the sandbox of the state, or, if that has ended, in a new one with the snapshot's files."""
        if not isinstance(state, SessionState):
            raise TypeError(f"{state.type}: not the state of a session of Holdfast")
        state.assert_path_grants_rebound()
        _check(state.manifest)
        preserved = True
        async with holdfast.Fleet(self._engine) as fleet:
            try:
                found = await fleet.get(state.sandbox_id)
                if found.state == "paused":
                    await fleet.resume(found.id)
            except SandboxGone:
                preserved = False
                state.sandbox_id = (await fleet.create(self._template, **self._fields)).id
                state.workspace_root_ready = False
        session = Session(self._engine, state)
        session._set_start_state_preserved(preserved)
        return self._wrap_session(session)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        inner = session._inner
        if not isinstance(inner, Session):
            raise TypeError("not a session of Holdfast")
        try:
            await inner.shutdown()
        finally:
            async with holdfast.Fleet(self._engine) as fleet:
                await fleet.remove(inner.state.sandbox_id)
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, SessionState)


def _check(manifest: Manifest) -> None:
    """Refuse the parts of a manifest that would give the sandbox more of the host, or need a mount inside."""
    for grant in manifest.extra_path_grants:
        if grant.host_path is not None:
            raise InvalidParams(
                f"manifest: host_path {grant.host_path}: not supported; use `mounts` of the template"
            )
    for _, path in manifest.mount_targets():
        raise InvalidParams(f"manifest: mount {path}: not supported; use `mounts` of the template")
