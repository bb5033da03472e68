"""What must be there in a sandbox before a session is opened in it, and the plan of what confines it there.

The directories that the session may write to and, if its network is an allow-list, the proxy that lets it through.
Touches sandboxes through the pool.
"""

from __future__ import annotations

import posixpath

from holdfast.errors import FileError, FileNotFound
from holdfast.exec_api import FileApi
from holdfast.model import EnvironmentInfo
from holdfast.service.model import SessionRecord
from holdfast.service.problems import Denied, NotNow
from holdfast.service.sessions.egress import Egress, is_wanted
from holdfast.service.sessions.enforcement import Plan, plan
from holdfast.service.sessions.sandbox_pool import SandboxPool


class Preparation:
    """`ports.Prepare` and `ports.PlanEnforcement`."""

    def __init__(self, pool: SandboxPool, egress: Egress, hidden: tuple[str, ...] = ()) -> None:
        """`hidden` are paths of the service itself, where a session may be on the same machine."""
        self._pool = pool
        self._egress = egress
        self._hidden = hidden

    async def prepare(self, record: SessionRecord, info: EnvironmentInfo) -> None:
        async with self._pool.use(record.sandbox) as api:
            for directory in record.policy.writable:
                try:
                    if record.policy.sandbox_mode == "none":
                        await api.files.make_dir(directory, mode=0o700)
                    else:
                        await _make_workspace(api.files, directory)
                except FileError as error:
                    raise NotNow(
                        f"sandbox {record.sandbox!r}: the session's directory {directory} cannot be made: "
                        f"{error.message}; name one that can be in the rules (workspaces, directories.writable)",
                        reason="DIRECTORY_UNAVAILABLE",
                        directory=directory,
                    ) from error
        if is_wanted(record.policy, info):
            await self._egress.start(record, info)

    def plan(self, record: SessionRecord, info: EnvironmentInfo) -> Plan:
        proxy = self._egress.socket_of(record.session_id)
        return plan(record.policy, info.features, proxy=proxy, hidden=self._hidden)


async def _make_workspace(files: FileApi, directory: str) -> None:
    """A workspace is its agent's alone. One that is there stays as it is.

    The agent may have named a directory inside of its own, where another session of it can put links: below one of
    those nothing is made, or we would do outside what the session may not.
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
    for each in reversed(missing):
        await files.make_dir(each, parents=False, mode=0o700 if each == directory else None)
