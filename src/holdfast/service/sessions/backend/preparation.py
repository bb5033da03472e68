"""Prepares a sandbox for a session: creates its writable directories, starts the proxy of an allow-list network.

Touches sandboxes through the pool.
"""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Awaitable, Callable

from holdfast.errors import FileError, FileNotFound
from holdfast.exec_api import FileApi
from holdfast.service.problems import Denied, NotNow
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.backend.egress import Egress, is_wanted
from holdfast.service.sessions.backend.enforcement import EnforcementPlan, needs_user, plan
from holdfast.service.types import SessionRecord
from holdfast.types import EnvironmentInfo


class Preparation:
    """`ports.Prepare` and `ports.PlanEnforcement`."""

    def __init__(
        self,
        pool: SandboxConnections,
        egress: Egress,
        session_uid: Callable[[str], Awaitable[int]],
        hidden: tuple[str, ...] = (),
    ) -> None:
        """`session_uid` returns the uid of an agent; `hidden` are paths of the service on its machine."""
        self._pool = pool
        self._egress = egress
        self._session_uid = session_uid
        self._hidden = hidden
        #: The uids of sessions that are prepared and not planned yet.
        self._users: dict[str, int] = {}

    async def prepare(self, record: SessionRecord, info: EnvironmentInfo) -> None:
        uid = await self._session_uid(record.agent_id) if needs_user(record.policy, record.sandbox, info) else None
        async with self._pool.use(record.sandbox) as api:
            for directory in record.policy.writable:
                try:
                    if record.policy.sandbox_mode == "none" and uid is None:
                        await api.files.make_dir(directory, mode=0o700)
                    else:
                        await _make_workspace(api.files, directory, uid)
                except FileError as error:
                    raise NotNow(
                        f"sandbox {record.sandbox!r}: cannot create the session's directory {directory}: "
                        f"{error.message}; name another one in the rules (workspaces, directories.writable)",
                        reason="DIRECTORY_UNAVAILABLE",
                        directory=directory,
                    ) from error
        if is_wanted(record.policy, info):
            await self._egress.start(record, info)
        if uid is not None:
            self._users[record.session_id] = uid

    def plan(self, record: SessionRecord, info: EnvironmentInfo) -> EnforcementPlan:
        proxy = self._egress.socket_of(record.session_id)
        uid = self._users.pop(record.session_id, None)
        user = None if uid is None else f"{uid}:{uid}"
        return plan(record.policy, info.features, proxy=proxy, hidden=self._hidden, user=user)


async def _make_workspace(files: FileApi, directory: str, uid: int | None) -> None:
    """Create a private workspace that belongs to the agent's uid, if there is one. An existing one is unchanged.

    The agent may have named a directory inside its own, where another of its sessions can create links. Nothing is
    created below a link, because the link could point to a directory that the session may not write.
    """
    missing: list[str] = []
    path = directory
    while True:
        try:
            real = await files.real_path(path)
            break
        except FileNotFound:
            missing.append(path)
            path = posixpath.dirname(path)
    if real != path:
        raise Denied(
            f"{directory} is a symbolic link, or below one: name {real}",
            reason="POLICY_DENIED",
            directory=directory,
        )
    user = None
    if uid is not None:
        found = await files.stat(path)
        if not missing and found.uid != uid and not found.mode & stat.S_IXOTH:
            raise NotNow(
                f"{directory} belongs to uid {found.uid}, and the agent's uid {uid} has no access: give it to the "
                f"agent (chown -R {uid}:{uid} {directory}), or name another directory in the rules",
                reason="DIRECTORY_UNAVAILABLE",
                directory=directory,
            )
        # With the agent's rights in the agent's directory: its sessions can create links there.
        user = str(uid) if found.uid == uid else None
    for each in reversed(missing):
        last = each == directory
        mode = 0o700 if last else None if uid is None else 0o755
        owner = uid if last and user is None else None
        await files.make_dir(each, parents=False, mode=mode, user=user, owner=owner)
