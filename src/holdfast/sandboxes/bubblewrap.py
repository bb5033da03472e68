"""A new bubblewrap jail over a directory: the machine's programs, that directory to write in, and nothing else.

The server is the jail's first process and listens on a socket in a directory that both sides see, so a broken
connection loses nothing. `aclose` ends the jail with all of its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.errors import CommandNotFound, InvalidParams, SandboxError, SandboxGone
from holdfast.sandboxes.host_process import HostProcess, read_line
from holdfast.sandboxes.install.bundle import Bundle, bundle
from holdfast.sandboxes.install.unpacking import unpacked
from holdfast.sandboxes.target import SandboxTarget
from holdfast.transport import unix
from holdfast.transport.channel import Channel, Receiver

#: Directories that programs of the machine need to run; those that do not exist are left out.
READ_ONLY: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt")
#: Paths inside: the server's tree, and the directory with its socket.
SERVER: Final = "/run/holdfast/server"
SOCKETS: Final = "/run/holdfast/sockets"
START_SECONDS: Final = 30.0
#: Kept of the jail's output, for the error if it does not start.
LOG_BYTES: Final = 4_000


class BwrapJail(SandboxTarget):
    """`bwrap:DIRECTORY`. The directory has the same path inside, and is where commands start.

    `network` shares the machine's network; `read_only` and `writable` are further paths, the same inside; `env` is
    the whole environment inside, beside PATH, HOME and TMPDIR.
    """

    def __init__(
        self,
        directory: str,
        *,
        network: bool = False,
        read_only: Sequence[str] = (),
        writable: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        program: str = "bwrap",
        arguments: Sequence[str] = (),
    ) -> None:
        if not directory:
            raise InvalidParams("bwrap: needs a directory: bwrap:DIRECTORY")
        self.directory = os.path.abspath(os.path.expanduser(directory))
        self.address = f"bwrap:{self.directory}"
        self.network = network
        self.read_only = tuple(read_only)
        self.writable = tuple(writable)
        self.env = dict(env or {})
        self.program = program
        #: Further options of bwrap, before the command.
        self.arguments = tuple(arguments)
        self._sockets: str | None = None
        self._process: HostProcess | None = None
        #: Holds the lock on the tree that the server runs from.
        self._held = contextlib.AsyncExitStack()

    # --- its life --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if not os.path.isdir(self.directory):  # noqa: ASYNC240 - one system call
            raise SandboxGone(f"{self.address}: the directory does not exist")
        chosen = await bundle()
        tree = await self._held.enter_async_context(unpacked(chosen))
        # A short path: that of a socket has at most 107 bytes.
        self._sockets = tempfile.mkdtemp(prefix="hf-jail-", dir="/tmp")
        ready, ready_end = os.pipe()
        try:
            with open(f"{self._sockets}/log", "wb") as log:  # noqa: ASYNC230 - one file, on tmpfs mostly
                self._process = HostProcess(
                    self.command(chosen, str(tree), ready_end),
                    stdout=log,
                    stderr=log,
                    pass_fds=(ready_end,),
                    env={"PATH": os.environ.get("PATH", os.defpath)},
                )
        except OSError as error:
            os.close(ready)
            if not isinstance(error, CommandNotFound):
                raise
            raise SandboxError(f"{error.message}; is bubblewrap installed?") from None
        finally:
            os.close(ready_end)
        await self._await_ready(ready)

    async def _await_ready(self, ready: int) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await read_line(ready)
        except TimeoutError:
            line = b""
        finally:
            os.close(ready)
        if not line:
            raise SandboxError(f"{self.address}: the jail did not start: {self._last_output()}")

    def _last_output(self) -> str:
        with open(f"{self._sockets}/log", "rb") as log:
            return log.read()[-LOG_BYTES:].decode(errors="replace").strip() or "no reason given"

    def command(self, chosen: Bundle, tree: str, ready_fd: int) -> list[str]:
        """Return the command of the jail with the server in it."""
        binds: list[str] = []
        for path in (*READ_ONLY, *self.read_only):
            binds += ["--ro-bind-try", path, path]
        for path in self.writable:
            binds += ["--bind", path, path]
        environment = {"PATH": os.defpath, "HOME": self.directory, "TMPDIR": "/tmp", **self.env}
        return [
            self.program,
            "--unshare-all",
            *(["--share-net"] if self.network else []),
            "--die-with-parent",
            "--new-session",
            *("--proc", "/proc"),
            *("--dev", "/dev"),
            *("--tmpfs", "/tmp"),
            *("--tmpfs", "/run"),
            *binds,
            *("--bind", self.directory, self.directory),
            *("--ro-bind", tree, SERVER),
            *("--bind", str(self._sockets), SOCKETS),
            *("--chdir", self.directory),
            "--clearenv",
            *(word for name, value in environment.items() for word in ("--setenv", name, value)),
            *self.arguments,
            "--",
            *chosen.command(SERVER),
            "serve",
            *("--listen", f"unix:{SOCKETS}/server.sock"),
            *("--ready-fd", str(ready_fd)),
        ]

    async def dial(self, receiver: Receiver) -> Channel:
        assert self._process is not None
        if self._process.returncode is not None:
            raise SandboxGone(
                f"{self.address}: the jail has ended with {self._process.returncode}: {self._last_output()}",
                final=True,
            )
        return await unix.dial(f"{self._sockets}/server.sock", receiver, lend=True)

    async def aclose(self) -> None:
        process, sockets = self._process, self._sockets
        if process is not None and process.returncode is None:
            process.kill()  # ends the first process of the namespace, and so all of them
            await process.wait()
        await self._held.aclose()
        if sockets is not None:
            shutil.rmtree(sockets, ignore_errors=True)
