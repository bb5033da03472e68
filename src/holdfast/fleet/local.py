"""Sandboxes without isolation, for tests and for machines that are a sandbox themselves.

Each is a server of its own with a directory to work in; its processes are ordinary processes of this user.
"""

from __future__ import annotations

import os
import subprocess
from typing import ClassVar, Final

from holdfast.errors import SandboxError
from holdfast.fleet.directories import SandboxDirectory
from holdfast.fleet.directory_engine import DirectoryEngine
from holdfast.fleet.engine import Progress
from holdfast.fleet.record import Record, SandboxRef
from holdfast.fleet.template import Template
from holdfast.launch import self_exec
from holdfast.sandboxes.host_process import HostProcess
from holdfast.secret_names import looks_secret

#: Between TERM and KILL, when a sandbox is removed.
GRACE_MS: Final = 1_000


class LocalEngine(DirectoryEngine):
    """`local`."""

    name: ClassVar[str] = "local"
    fields: ClassVar = frozenset({"network"})

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
            await self._remove(directory)
            raise
        return self._ref(directory, record)

    async def _start(self, directory: SandboxDirectory, lock: int, template: Template) -> None:
        workdir = template.workdir or f"{directory.path}/work"
        os.makedirs(workdir, exist_ok=True)
        server = [
            *(*self_exec.holdfast(), "serve", "--listen", f"unix:{directory.socket}"),
            *("--shutdown-grace-period-ms", str(GRACE_MS)),
        ]
        with open(directory.log, "ab") as log:  # noqa: ASYNC230 - a file of our own
            launcher = HostProcess(
                [*self_exec.command(), "-I", "-S", "-c", _LAUNCH, f"{directory.path}/process", *server],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=workdir,
                pass_fds=(lock,),
                env={**_environment(), **template.env},
            )
        async with launcher:
            ready = await launcher.read_line()
            await launcher.wait()
        if not ready:
            raise SandboxError(f"local: the server did not start: {directory.last_log() or 'nothing was printed'}")
        directory.write("ready", "")

    def _end(self, directory: SandboxDirectory) -> None:
        directory.terminate()


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
