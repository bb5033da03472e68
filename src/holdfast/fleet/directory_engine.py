"""The part that engines share whose sandboxes are directories of this machine: finding, leases and removal."""

from __future__ import annotations

import abc
import asyncio

from holdfast.errors import SandboxGone
from holdfast.exec_api import ExecApi
from holdfast.fleet.directories import SandboxDirectories, SandboxDirectory, remove_tree
from holdfast.fleet.engine import Engine, make_ref
from holdfast.fleet.record import Record, Refs, SandboxRef
from holdfast.sandboxes.opening import open_target
from holdfast.sandboxes.target import SandboxTarget
from holdfast.transport import unix
from holdfast.transport.channel import Channel, Receiver


class DirectoryEngine(Engine):
    """An engine with a directory for each sandbox. A subclass starts and ends the processes."""

    def __init__(self) -> None:
        self._directories = SandboxDirectories(self.name)

    @abc.abstractmethod
    def _end(self, directory: SandboxDirectory) -> None:
        """End the processes of a sandbox. Blocks."""

    async def list(self) -> Refs:
        return await asyncio.to_thread(self._list)

    def _list(self) -> Refs:
        found = ((directory, directory.record()) for directory in self._directories.all())
        refs = (self._ref(directory, record) for directory, record in found if record is not None)
        return sorted(refs, key=lambda ref: ref.created_at)

    def _ref(self, directory: SandboxDirectory, record: Record) -> SandboxRef:
        address, expires_at = f"unix:{directory.socket}", directory.expires_at(record)
        return make_ref(self.name, address, record, directory.state(), expires_at=expires_at)

    async def get(self, id: str) -> SandboxRef:
        directory = self._directories.get(id)
        record = directory.record()
        if record is None:  # removed meanwhile
            raise SandboxGone(f"{self.name}:{id}: there is no such sandbox", final=True)
        return self._ref(directory, record)

    async def open(self, ref: SandboxRef, *, reconnect_deadline: float) -> ExecApi:
        target = RunningServer(self._directories.get(ref.id))
        return await open_target(target, reconnect_deadline=reconnect_deadline)

    async def extend(self, id: str, expires_at: float | None) -> None:
        self._directories.get(id).extend(expires_at)

    async def remove(self, id: str) -> None:
        directory = self._directories.find(id)
        if directory is not None:
            await self._remove(directory)

    async def _remove(self, directory: SandboxDirectory) -> None:
        """End a sandbox and delete its directory, also if the caller is cancelled meanwhile."""

        def remove() -> None:
            self._end(directory)
            directory.delete()

        await asyncio.shield(asyncio.to_thread(remove))

    async def sweep(self) -> int:
        return await asyncio.to_thread(self._sweep)

    def _sweep(self) -> int:
        abandoned = [directory.path for directory in self._directories.abandoned()]
        for path in abandoned:
            remove_tree(path)
        return len(abandoned)


class RunningServer(SandboxTarget):
    """The server of a sandbox that runs on this machine, reached through its socket."""

    def __init__(self, directory: SandboxDirectory) -> None:
        self.address = f"unix:{directory.socket}"
        self._directory = directory

    async def dial(self, receiver: Receiver) -> Channel:
        if self._directory.first_process() is None:
            raise SandboxGone(f"{self.address}: the sandbox has ended: {self._directory.last_log()}", final=True)
        return await unix.dial(self._directory.socket, receiver, lend=True)
