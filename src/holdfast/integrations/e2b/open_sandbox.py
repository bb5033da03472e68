"""`OpenSandbox`: the connection to one sandbox, with its users, its processes by pid, and its deadlines.

A pid of the E2B API is the OS pid in the sandbox. The id of a process has its deadline and its tag, so a server
that was restarted reads both from the sandbox. Touches the sandbox through its connection.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import posixpath
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from holdfast.client.process import Process
from holdfast.errors import FileError, HoldfastError, UnknownProcess, UnknownUser
from holdfast.fleet.fleet import FleetSandbox
from holdfast.fleet.record import SandboxRef
from holdfast.types import EnvironmentInfo, ProcessInfo

#: What ids of processes begin with: `e2b-DEADLINE-RANDOM[-TAG]`.
PROCESS_PREFIX: Final = "e2b"
#: What ids of the code interpreter's kernels begin with.
KERNEL_PREFIX: Final = "e2bkernel-"
#: Tags are part of an id, which has at most 256 characters on the wire.
MAX_TAG_BYTES: Final = 100
#: The lists of users and groups are read again after this time, for users that were added meanwhile.
_USERS_SECONDS: Final = 30.0
_USERS_BYTES: Final = 1024 * 1024
#: Pids that are remembered; others are looked up in the sandbox.
_MAX_PIDS: Final = 1_000


class OpenSandbox:
    """A connected sandbox."""

    def __init__(self, ref: SandboxRef, box: FleetSandbox, info: EnvironmentInfo) -> None:
        self.ref = ref
        self.box = box
        self.info = info
        template = ref.record.template
        #: The user of requests that name none.
        self.user = template.user or info.user
        self.home = template.workdir or info.home
        self._processes: dict[int, str] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._killing: set[asyncio.Task[None]] = set()
        #: Watches by request, by their ids.
        self.watchers: dict[str, Any] = {}
        #: Called before the connection is closed.
        self.on_close: list[Callable[[], Awaitable[None]]] = []
        self._users_read = 0.0
        #: Name and home by uid, and name by gid.
        self._users: dict[int, tuple[str, str]] = {}
        self._groups: dict[int, str] = {}

    async def aclose(self) -> None:
        for timer in self._deadlines.values():
            timer.cancel()
        self._deadlines.clear()
        for task in self._killing:
            task.cancel()
        for close in self.on_close:
            await close()
        with contextlib.suppress(HoldfastError):
            await self.box.aclose()

    # --- users and paths -----------------------------------------------------------------------------------------

    def run_as(self, user: str) -> str | None:
        """The `user` of a call; None if the server in the sandbox runs as this user already."""
        return None if user in ("", self.user) else user

    async def path(self, path: str, user: str) -> str:
        """An absolute path: `~` and relative paths begin at the user's home."""
        if path.startswith("/"):
            return posixpath.normpath(path) if not path.startswith("//") else posixpath.normpath(path[1:])
        home = await self.home_of(user)
        if path == "~" or path.startswith("~/"):
            path = path[2:]
        return posixpath.normpath(posixpath.join(home, path))

    async def home_of(self, user: str) -> str:
        if user in ("", self.user):
            return self.home
        await self._read_users()
        for name, home in self._users.values():
            if name == user:
                return home
        raise UnknownUser(f"invalid username: {user[:64]!r}")

    async def owner(self, uid: int, gid: int) -> tuple[str, str]:
        """The names of a user and a group; the number where there is no name."""
        if uid not in self._users or gid not in self._groups:
            await self._read_users()
        return self._users.get(uid, (str(uid), ""))[0], self._groups.get(gid, str(gid))

    async def _read_users(self) -> None:
        now = time.monotonic()
        if now - self._users_read < _USERS_SECONDS and self._users_read:
            return
        self._users_read = now
        for line in await self._lines("/etc/passwd"):
            fields = line.split(":")
            if len(fields) >= 7 and fields[2].isdecimal():
                self._users.setdefault(int(fields[2]), (fields[0], fields[5]))
        for line in await self._lines("/etc/group"):
            fields = line.split(":")
            if len(fields) >= 4 and fields[2].isdecimal():
                self._groups.setdefault(int(fields[2]), fields[0])

    async def _lines(self, path: str) -> list[str]:
        try:
            data = await self.box.read_file(path, size=_USERS_BYTES)
        except FileError:
            return []
        return data.decode("utf-8", "replace").splitlines()

    # --- processes -----------------------------------------------------------------------------------------------

    def remember(self, process: Process) -> None:
        """Note the pid of a process, and kill the process at its deadline."""
        if len(self._processes) >= _MAX_PIDS:
            self._processes.pop(next(iter(self._processes)))
        self._processes[process.pid] = process.id
        self._watch_deadline(process.info)

    async def process(self, pid: int | None, tag: str | None, *, running: bool = False) -> Process:
        """The process with this pid or tag: one that runs, or else the last one that ended.

        With `running`, an ended one is not found.
        """
        if pid is not None and (id := self._processes.get(pid)) is not None:
            with contextlib.suppress(UnknownProcess):
                process = await self.box.process(id)
                if process.info.running or not running:
                    return process
        found = [
            process
            for process in await self.box.processes()
            if (process.pid == pid if pid is not None else tag is not None and tag_of(process.id) == tag)
            and (process.info.running or not running)
        ]
        if not found:
            raise UnknownProcess(f"process with {'pid' if pid is not None else 'tag'} {pid or tag!r} not found")
        process = max(found, key=lambda each: (each.info.running, each.info.started_at))
        if pid is not None:
            self._processes[pid] = process.id
        return process

    async def watch_deadlines(self) -> None:
        """Arm the deadlines of processes that were started through an earlier connection."""
        for process in await self.box.processes():
            if process.info.running:
                self._watch_deadline(process.info)

    def _watch_deadline(self, info: ProcessInfo) -> None:
        deadline = deadline_of(info.process_id)
        if deadline is None or info.process_id in self._deadlines:
            return
        loop = asyncio.get_running_loop()
        delay = max(0.0, deadline - time.time())
        self._deadlines[info.process_id] = loop.call_later(delay, self._kill_at_deadline, info.process_id)

    def _kill_at_deadline(self, id: str) -> None:
        self._deadlines.pop(id, None)
        task = asyncio.get_running_loop().create_task(self._kill(id))
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    async def _kill(self, id: str) -> None:
        # A process that ended, or a sandbox that ended with it, needs no kill.
        with contextlib.suppress(HoldfastError):
            await self.box.api.terminate(id, force=True)

    def ended(self, id: str) -> None:
        """A process has ended: its deadline has no further use."""
        timer = self._deadlines.pop(id, None)
        if timer is not None:
            timer.cancel()


def process_id(timeout: float | None, tag: str | None) -> str:
    """A new id of a process that is killed after `timeout` seconds."""
    deadline = 0 if timeout is None else int((time.time() + timeout) * 1000)
    parts = [PROCESS_PREFIX, f"{deadline:x}", secrets.token_hex(8)]
    if tag:
        parts.append(base64.urlsafe_b64encode(tag.encode()).decode().rstrip("=").replace("-", "."))
    return "-".join(parts)


def deadline_of(id: str) -> float | None:
    """When a process is to be killed, in seconds since the epoch."""
    parts = id.split("-")
    if parts[0] != PROCESS_PREFIX or len(parts) < 3:
        return None
    try:
        milliseconds = int(parts[1], 16)
    except ValueError:
        return None
    return milliseconds / 1000 or None


def is_late(id: str) -> bool:
    """Whether the deadline of a process is over."""
    deadline = deadline_of(id)
    return deadline is not None and deadline <= time.time()


def tag_of(id: str) -> str | None:
    parts = id.split("-")
    if parts[0] != PROCESS_PREFIX or len(parts) != 4:
        return None
    text = parts[3].replace(".", "-")
    with contextlib.suppress(binascii.Error, UnicodeDecodeError, ValueError):
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    return None
