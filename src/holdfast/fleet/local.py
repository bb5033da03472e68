"""Sandboxes without isolation, for tests and for machines that are a sandbox themselves.

Each is a server of its own with a directory to work in; its processes are ordinary processes of this user.
"""

from __future__ import annotations

import asyncio
import os
from typing import ClassVar, Final

from holdfast.errors import SandboxError, SandboxGone
from holdfast.exec_api import ExecApi
from holdfast.fleet.directories import SandboxDirectories, SandboxDirectory, extended, remove_tree
from holdfast.fleet.engine import Engine, Progress, make_ref
from holdfast.fleet.record import Record, Refs, SandboxRef
from holdfast.fleet.template import Template
from holdfast.launch import self_exec
from holdfast.sandboxes.opening import open_target
from holdfast.sandboxes.target import SandboxTarget
from holdfast.secret_names import looks_secret
from holdfast.transport import unix
from holdfast.transport.channel import Channel, Receiver

#: Between TERM and KILL, when a sandbox is removed.
GRACE_MS: Final = 1_000


class LocalEngine(Engine):
    """`local`."""

    name: ClassVar[str] = "local"
    fields: ClassVar = frozenset({"network"})

    def __init__(self) -> None:
        self._directories = SandboxDirectories("local")

    async def check(self, template: Template) -> None:
        await super().check(template)
        if template.network not in (None, "host"):
            self.refuse("network", "this engine does not isolate; its sandboxes have the network of the machine")

    async def create(self, template: Template, record: Record, progress: Progress | None = None) -> SandboxRef:
        directory, lock = self._directories.make(record)
        try:
            try:
                await self._start(directory, lock, template)
            finally:
                os.close(lock)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._remove, directory))
            raise
        return make_ref(self.name, f"unix:{directory.socket}", record, "running")

    async def _start(self, directory: SandboxDirectory, lock: int, template: Template) -> None:
        workdir = template.workdir or f"{directory.path}/work"
        os.makedirs(workdir, exist_ok=True)
        server = [
            *(*self_exec.holdfast(), "serve", "--listen", f"unix:{directory.socket}"),
            *("--shutdown-grace-period-ms", str(GRACE_MS)),
        ]
        with open(directory.log, "ab") as log, open(os.devnull) as null:  # noqa: ASYNC230 - files of our own
            process = await asyncio.create_subprocess_exec(
                *(*self_exec.command(), "-I", "-S", "-c", _LAUNCH, f"{directory.path}/process", *server),
                stdin=null,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=workdir,
                pass_fds=(lock,),
                env={**_environment(), **template.env},
            )
            assert process.stdout is not None
            ready = await process.stdout.readline()
            await process.wait()
        if not ready:
            raise SandboxError(f"local: the server did not start: {directory.last_log() or 'nothing was printed'}")
        directory.write("ready", "")

    # --- finding -----------------------------------------------------------------------------------------------

    async def list(self) -> Refs:
        refs = (self._ref(directory) for directory in self._directories.all())
        return sorted((ref for ref in refs if ref is not None), key=lambda ref: ref.created_at)

    def _ref(self, directory: SandboxDirectory) -> SandboxRef | None:
        record = directory.record()
        if record is None:
            return None
        return extended(make_ref(self.name, f"unix:{directory.socket}", record, directory.state()), directory)

    async def get(self, id: str) -> SandboxRef:
        ref = self._ref(self._directories.get(id))
        assert ref is not None
        return ref

    async def open(self, ref: SandboxRef, *, reconnect_deadline: float) -> ExecApi:
        directory = self._directories.get(ref.id)
        return await open_target(RunningServer(directory), reconnect_deadline=reconnect_deadline)

    # --- the rest of a life ------------------------------------------------------------------------------------

    async def extend(self, id: str, expires_at: float | None) -> None:
        self._directories.get(id).extend(expires_at)

    async def remove(self, id: str) -> None:
        directory = self._directories.find(id)
        if directory is not None:
            await asyncio.to_thread(self._remove, directory)

    def _remove(self, directory: SandboxDirectory) -> None:
        directory.terminate()
        directory.delete()

    async def sweep(self) -> int:
        abandoned = list(self._directories.abandoned())
        for directory in abandoned:
            remove_tree(directory.path)
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


def _environment() -> dict[str, str]:
    """The environment of the sandbox: that of this process without Holdfast's own variables and without secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOLDFAST_") and not looks_secret(name)
    }


#: Forks, so that the server is not a child of the maker; notes its pid; executes the command.
_LAUNCH: Final = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
with open("/proc/self/stat", "rb") as file:
    started = file.read().rpartition(b")")[2].split()[19].decode()
with open(sys.argv[1], "x") as file:
    file.write(f"{os.getpid()} {started}")
os.execv(sys.argv[2], [*sys.argv[2:], "--ready-fd", "1"])
"""
