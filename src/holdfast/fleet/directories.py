"""Directories of sandboxes that this machine runs itself (jails, and local servers for tests).

One directory for each sandbox is the engine's object: it holds the record, the socket, the log and the files. A
lock on it is held by the sandbox's first process, so the kernel answers whether the sandbox lives, and releases the
lock whatever way it ended. Touches these directories and the processes that are named in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Final

from holdfast.errors import PermissionRefused, SandboxError, SandboxGone
from holdfast.fleet.record import Record, State, check_id, decode_record, encode_record, is_id, start_time
from holdfast.launch.pidfd_signals import signal_process

#: Overrides where the directories are.
DIRECTORY_VARIABLE: Final = "HOLDFAST_FLEET_DIRECTORY"
#: `sun_path` has 108 bytes, the last of them for the final NUL.
MAX_SOCKET_PATH: Final = 107
#: How long a killed sandbox may take until the kernel has released everything.
END_SECONDS: Final = 20.0
#: Between two checks of a lock whose holder is not recorded yet.
POLL_SECONDS: Final = 0.02
LOG_TAIL_BYTES: Final = 4_000


def fleet_path() -> str:
    """Where the directories of this user's sandboxes are."""
    if path := os.environ.get(DIRECTORY_VARIABLE):
        return path
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return "/var/lib/holdfast" if os.geteuid() == 0 else f"{state}/holdfast"


def listed_ids() -> list[str]:
    """The ids of all sandboxes with a directory, for completion: their state is not read."""
    found = glob.glob(os.path.join(glob.escape(fleet_path()), "*", "holdfast-*"))
    return sorted(id for path in found if is_id(id := os.path.basename(path)))


def fleet_directory() -> str:
    """The same, made if it is missing, refused unless it is ours."""
    path = fleet_path()
    os.makedirs(path, mode=0o711, exist_ok=True)
    found = os.stat(path)
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionRefused(f"{path}: is writable by other users; set {DIRECTORY_VARIABLE}")
    return path


class SandboxDirectory:
    """The directory of one sandbox."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.id = os.path.basename(path)
        self.socket = f"{path}/sock"
        self.log = f"{path}/log"

    # --- the record --------------------------------------------------------------------------------------------

    def record(self) -> Record | None:
        record = decode_record(self.read("record.json") or "")
        return record if record is not None and record.id == self.id else None

    def expires_at(self, record: Record) -> float | None:
        """The latest expiry: the record's, or that of an extension."""
        text = self.read("expires")
        return record.expires_at if text is None else json.loads(text)

    def extend(self, expires_at: float | None) -> None:
        self.write("expires", json.dumps(expires_at))

    def read(self, name: str) -> str | None:
        try:
            with open(f"{self.path}/{name}") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, text: str) -> None:
        """Replace a file as a whole: a reader sees the old text or the new one."""
        fd, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=self.path)
        try:
            with open(fd, "w") as file:
                file.write(text)
            os.rename(temporary, f"{self.path}/{name}")
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    # --- its processes -----------------------------------------------------------------------------------------

    def state(self) -> State:
        if self.read("paused") is not None:
            return "paused" if self.is_locked() else "ended"
        if not self.is_locked():
            return "ended"
        return "running" if self.read("ready") is not None else "creating"

    def is_locked(self) -> bool:
        """Whether a process of the sandbox, or its maker during `create`, holds the lock."""
        try:
            fd = os.open(f"{self.path}/lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(fd)

    def hold(self) -> int:
        """The descriptor that holds the lock of a sandbox that has ended."""
        lock = os.open(f"{self.path}/lock", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise SandboxError(f"{self.path}: another process is using this sandbox") from None
        return lock

    def first_process(self) -> int | None:
        """The pid of the sandbox's first process on this machine; None if it has ended."""
        text = self.read("process")
        if not text:
            return None  # not noted yet
        pid, started = map(int, text.split())
        return pid if start_time(pid) == started else None

    def send_kill(self) -> list[int]:
        """Kill the sandbox's first process and its children; returns their pids."""
        pid = self.first_process()
        if pid is None:
            return []
        # The parent outside of a pid namespace does not end its members; the first member does.
        inner = children(pid)
        for each in inner:
            signal_process(each, signal.SIGKILL, lambda member: parent(member) == pid)
        self._signal(signal.SIGKILL)
        return [*inner, pid]

    def _signal(self, number: signal.Signals) -> None:
        """Signal the first process, unless it has ended."""
        text = self.read("process")
        if text:
            pid, started = map(int, text.split())
            signal_process(pid, number, lambda process: start_time(process) == started)

    def kill(self) -> None:
        """Kill the sandbox's processes and wait until the kernel has released them."""
        deadline = time.monotonic() + END_SECONDS
        # Again: a sandbox that is just being started notes its process a moment after it took the lock.
        while not self._wait_end(self.send_kill(), POLL_SECONDS):
            if time.monotonic() > deadline:
                raise SandboxError(f"{self.path}: processes of the sandbox are left after {END_SECONDS:g} s")

    def terminate(self) -> None:
        """End the sandbox's processes in their own way, and kill them if that takes too long."""
        pid = self.first_process()
        deadline = time.monotonic() + END_SECONDS
        if pid is not None:
            self._signal(signal.SIGTERM)
            while time.monotonic() < deadline:
                if self._wait_end([pid], deadline - time.monotonic()):
                    return
        self.kill()

    def _wait_end(self, pids: list[int], seconds: float) -> bool:
        """Wait until these processes have ended, at most `seconds`; whether the lock is free then.

        The kernel reports the end of a process and not the release of a lock, so the processes are watched. A lock
        that is held without them belongs to a maker, and the caller tries again.
        """
        deadline = time.monotonic() + seconds
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
                finally:
                    os.close(pidfd)
        if not self.is_locked():
            return True
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        return not self.is_locked()

    def last_log(self) -> str:
        """The end of what the sandbox's first process printed."""
        with contextlib.suppress(OSError), open(self.log, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
        return ""

    def delete(self) -> None:
        """Remove the directory. The record goes last, so that an interrupted removal is continued by `prune`."""
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            for name in os.listdir(self.path):
                if name not in ("record.json", "lock"):
                    remove_tree(f"{self.path}/{name}")
        remove_tree(self.path)


class SandboxDirectories:
    """All directories of one engine."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    @property
    def path(self) -> str:
        path = f"{fleet_directory()}/{self._kind}"
        os.makedirs(path, mode=0o711, exist_ok=True)
        return path

    def make(self, record: Record) -> tuple[SandboxDirectory, int]:
        """A directory with its record, and the descriptor that holds its lock."""
        directory = SandboxDirectory(f"{self.path}/{record.id}")
        if len(os.fsencode(directory.socket)) > MAX_SOCKET_PATH:
            raise SandboxError(f"{directory.socket}: too long for a socket; set {DIRECTORY_VARIABLE}")
        with self._changing():
            os.mkdir(directory.path, 0o711)
            try:
                # Read-only: programs in a jail can take the descriptor from the process that holds the lock.
                lock = os.open(f"{directory.path}/lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                os.rmdir(directory.path)
                raise
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            directory.write("record.json", encode_record(record))
        except BaseException:
            os.close(lock)
            directory.delete()
            raise
        return directory, lock

    def get(self, id: str) -> SandboxDirectory:
        directory = SandboxDirectory(f"{self.path}/{check_id(id)}")
        if directory.record() is None:
            raise SandboxGone(f"{self._kind}:{id}: there is no such sandbox", final=True)
        return directory

    def find(self, id: str) -> SandboxDirectory | None:
        directory = SandboxDirectory(f"{self.path}/{check_id(id)}")
        return directory if os.path.isdir(directory.path) else None

    def all(self) -> Iterator[SandboxDirectory]:
        for name in sorted(os.listdir(self.path)):
            if is_id(name):
                yield SandboxDirectory(f"{self.path}/{name}")

    def abandoned(self) -> Iterator[SandboxDirectory]:
        """Directories whose maker ended before it had written the record."""
        with self._changing():
            for directory in self.all():
                if directory.record() is None and not directory.is_locked():
                    yield directory

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Held while a directory has no lock yet, so that `abandoned` does not see it."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(each) for each in file.read().split()]
    except OSError:
        return []


def parent(pid: int) -> int | None:
    """The pid of a process's parent; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def remove_tree(path: str) -> None:
    """Remove a tree that a sandbox may have written, however deep it is; a missing one is no error."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except (OSError, RecursionError):
        if os.path.lexists(path):
            _remove_hostile_tree(path)


def _remove_hostile_tree(path: str) -> None:
    """Remove a tree by programs: `rm` walks without recursion, thousands of levels deep."""
    done = subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.PIPE)
    if done.returncode != 0 and os.path.lexists(path):
        # An overlay's work directory, or a directory that the sandbox closed to its owner.
        subprocess.run(["chmod", "-R", "u+rwX", "--", path], stderr=subprocess.DEVNULL)
        done = subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.PIPE)
        if done.returncode != 0:
            raise SandboxError(f"{path}: cannot be removed: {done.stderr.decode(errors='replace').strip()}")
