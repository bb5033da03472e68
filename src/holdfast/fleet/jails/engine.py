"""Sandboxes that are bubblewrap jails on this machine: no engine, no image needed, a few milliseconds each.

A jail is made by `launch`. Its root is the host's system directories, read-only, with private directories for
everything that is written; or a root directory or an unpacked image under a private overlay, so that any number of
jails share one tree. The server inside listens on a socket that was opened outside: programs in the jail cannot put
another one in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import msgspec

from holdfast.errors import SandboxError, SandboxGone
from holdfast.fleet.directories import SandboxDirectory, children, remove_tree
from holdfast.fleet.directory_engine import DirectoryEngine
from holdfast.fleet.engine import Progress
from holdfast.fleet.jails import launch as jail_launch
from holdfast.fleet.jails.cgroups import MAX_ROUNDS, JailGroups
from holdfast.fleet.jails.images import unpack_image
from holdfast.fleet.jails.starter import server_bundle, zygote
from holdfast.fleet.record import Record, SandboxRef
from holdfast.fleet.template import Template
from holdfast.launch import self_exec
from holdfast.launch.pidfd_signals import signal_process
from holdfast.runtime.process.oom import COUNT_FILES, JAIL_GROUP
from holdfast.sandboxes.bubblewrap import READ_ONLY
from holdfast.sandboxes.host_command import run_host_command
from holdfast.sandboxes.install.unpacking import unpacked

#: Inside: the server's files, and its own directory with the socket for programs in the jail.
INSIDE: Final = "/run/holdfast"
SERVER: Final = jail_launch.SERVER
SERVER_DIRECTORY: Final = f"{INSIDE}/private"
START_SECONDS: Final = 30.0
BACKLOG: Final = 1024
#: Directories of a jail that has no root of its own, with their modes.
PRIVATE_DIRECTORIES: Final = {
    "upper/root": 0o700,
    "upper/home": 0o755,
    "upper/tmp": 0o1777,
    "upper/var": 0o755,
    "upper/var/tmp": 0o1777,
    "upper/run": 0o755,
    "upper/mnt": 0o755,
    "upper/srv": 0o755,
}
#: The capabilities of the jail's root, within its user namespace: what package managers and `su` need. Without
#: SYS_ADMIN, NET_ADMIN and SYS_PTRACE.
CAPABILITIES: Final = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETPCAP": 8,
    "CAP_NET_BIND_SERVICE": 10,
    "CAP_SYS_CHROOT": 18,
    "CAP_AUDIT_WRITE": 29,
    "CAP_SETFCAP": 31,
}
#: How a jail was stopped: by the freezer of its cgroup, or by signals where it can have none.
FREEZER: Final = "freezer"
SIGNALS: Final = "signals"
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class JailEngine(DirectoryEngine):
    """`bwrap`."""

    name: ClassVar[str] = "bwrap"
    fields: ClassVar = frozenset(
        {"image", "root", "cpus", "memory", "disk", "processes", "network", "user", "mounts"}
    )
    serves_as_user: ClassVar[bool] = False
    #: `user_namespaces`: whether programs in the jail may make some; `arguments`: further options of bwrap.
    options: ClassVar = frozenset({"user_namespaces", "arguments"})

    def __init__(self, *, program: str = "bwrap") -> None:
        super().__init__()
        self._program = program

    async def check(self, template: Template) -> None:
        await super().check(template)
        if shutil.which(self._program) is None:
            raise SandboxError(f"engine bwrap: {self._program}: not found; is bubblewrap installed?")
        await asyncio.to_thread(self._check_paths, template)
        if not _is_root(template.user) and os.geteuid() != 0:
            self.refuse("user", "the jail of an unprivileged user has one uid, its root")
        if template.image is None:
            self._check_user(template.user, template.root or "/")
        for field, reason in JailGroups.missing(template):
            self.refuse(field, reason)

    def _check_paths(self, template: Template) -> None:
        if template.root is not None and not os.path.isdir(template.root):
            self.refuse("root", f"{template.root}: not a directory")
        if template.root is not None and os.geteuid() not in (0, owner := os.stat(template.root).st_uid):
            # The overlay cannot copy a file up whose uid the user namespace does not map (EOVERFLOW).
            self.refuse(
                "root", f"{template.root}: belongs to uid {owner}; an unprivileged user needs a tree of its own"
            )
        if template.image is not None and not os.path.isfile(template.image):
            self.refuse("image", f"{template.image}: not a file; give the tar of `docker save` or an OCI layout")
        for mount in template.mounts:
            if not os.path.exists(mount.source):
                self.refuse("mounts", f"{mount.source}: there is no such path")
        for field, path in (
            ("workdir", template.workdir),
            *(("mounts", mount.target) for mount in template.mounts),
        ):
            if path is not None and (above := _read_only_above(path, template)) is not None:
                self.refuse(field, f"{path}: cannot be made, because the sandbox shows {above} read-only")

    def _check_user(self, user: str | None, root: str) -> None:
        """Refuse a user or group by name that the root directory does not have."""
        for name, database in zip((user or "").split(":", 1), ("passwd", "group"), strict=False):
            if name and not name.isdecimal() and name not in _names(f"{root}/etc/{database}"):
                self.refuse("user", f"{name}: not in /etc/{database} of the sandbox")

    # --- making ------------------------------------------------------------------------------------------------

    async def create(self, template: Template, record: Record, progress: Progress | None = None) -> SandboxRef:
        lower = template.root
        if template.image is not None:
            image = await unpack_image(template.image, progress)
            lower = image.root
            self._check_user(template.user, lower)
            template = msgspec.structs.replace(
                template,
                env={**image.env, **template.env},
                workdir=template.workdir or image.workdir,
                user=template.user or image.user,
            )
            record = msgspec.structs.replace(record, template=msgspec.structs.replace(template, files={}, setup=()))
        return await self._create(record, lower, None)

    async def _create(self, record: Record, lower: str | None, source: SandboxDirectory | None) -> SandboxRef:
        directory, lock = self._directories.make(record)
        try:
            try:
                os.mkdir(f"{directory.path}/files", 0o711)
                if source is not None:
                    with _stopped(source):
                        await _copy_files(_files_of(source), f"{directory.path}/files")
                await self._start(directory, lock, record.template, lower)
            finally:
                os.close(lock)
        except BaseException:
            await self._remove(directory)
            raise
        return self._ref(directory, record)

    async def _start(self, directory: SandboxDirectory, lock: int, template: Template, lower: str | None) -> None:
        os.mkdir(f"{directory.path}/stage")
        if lower is not None:
            directory.write("lower", lower)
        groups = JailGroups.make(directory, template)
        chosen = await asyncio.to_thread(server_bundle)
        async with contextlib.AsyncExitStack() as stack:
            tree = await stack.enter_async_context(unpacked(chosen))
            listener = stack.enter_context(_listen(directory.socket))
            log = stack.enter_context(open(directory.log, "ab"))  # noqa: ASYNC230, SIM115
            ready, ready_inside = os.pipe()
            process_file = os.open(f"{directory.path}/process", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            stack.callback(os.close, process_file)
            memory = next((path for path in groups if _counts_kills(path)), None)
            mounts, arguments = self._mounts(template, lower, str(tree), memory)
            spec = {
                "cgroups": groups,
                "stage": f"{directory.path}/stage",
                "files": f"{directory.path}/files",
                "lower": lower,
                "disk": template.disk,
                "directories": _private_directories(lower),
                "own_etc": _has_own_etc(lower),
                "links": _system_links() if lower is None else {},
                "mounts": mounts,
                "user_namespaces": bool(template.options.get("user_namespaces")),
                "program": shutil.which(self._program),
                "arguments": arguments,
                "holder": [*self_exec.loader_in_bundle(SERVER), f"{INSIDE}/cat", f"{INSIDE}/hold"],
                "workdir": _workdir(template),
                "capabilities": list(CAPABILITIES.values()),
                "env": {"PATH": PATH, "HOME": "/root", **template.env},
                "serve": ["--listen", f"unix:{SERVER_DIRECTORY}/server.sock"],
            }
            held = stack.enter_context(_held(str(tree)))
            descriptors = [lock, held, listener.fileno(), log.fileno(), ready_inside, process_file]
            try:
                await asyncio.to_thread(zygote(str(tree)).start, spec, descriptors)
            finally:
                os.close(ready_inside)
            if not await _read_line(ready):
                raise SandboxError(
                    f"bwrap: the jail did not start: {directory.last_log() or 'nothing was printed'}"
                )
        directory.write("ready", "")

    def _mounts(
        self, template: Template, lower: str | None, tree: str, memory: str | None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """The mounts that the launcher prepares, and the options of bubblewrap.

        `memory` is the cgroup that limits the jail's memory: its server reads the kernel's count of kills there.
        """
        mounts: list[dict[str, Any]] = []

        def staged(source: str, *, idmap: bool = False, writable: bool = False) -> str:
            mounts.append({"source": source, "idmap": idmap, "writable": writable})
            return f"{jail_launch.STAGE}/{len(mounts) - 1}"

        binds = ["--bind", f"{jail_launch.STAGE}/root", "/"]
        if lower is None:
            for path in READ_ONLY:
                if path == "/etc" and _has_own_etc(lower):
                    binds += ["--bind", f"{jail_launch.STAGE}/etc", path]
                elif os.path.isdir(path) and not os.path.islink(path):
                    binds += ["--ro-bind", staged(path), path]
        binds += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run"]
        for mount in template.mounts:
            source = staged(mount.source, idmap=True, writable=mount.writable)
            # Without this, bubblewrap makes the directories above a target for root alone.
            binds += ["--dir", os.path.dirname(mount.target)]
            binds += ["--bind" if mount.writable else "--ro-bind", source, mount.target]
        if template.network == "host" and lower is not None and os.path.exists("/etc/resolv.conf"):
            binds += ["--ro-bind", staged(os.path.realpath("/etc/resolv.conf")), "/etc/resolv.conf"]
        workdir = _workdir(template)
        return mounts, [
            *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
            *(() if template.network == "host" else ("--unshare-net",)),
            *binds,
            *("--ro-bind", staged(tree), SERVER),
            *("--ro-bind", staged(_cat()), f"{INSIDE}/cat"),
            *("--bind", f"{jail_launch.STAGE}/hold", f"{INSIDE}/hold"),
            *(() if memory is None else ("--ro-bind", staged(memory), JAIL_GROUP)),
            *("--perms", "0700", "--dir", SERVER_DIRECTORY),
            *("--dir", workdir, "--chdir", workdir),
            *("--cap-drop", "ALL"),
            *("--hostname", "sandbox"),
            *map(str, template.options.get("arguments", ())),
        ]

    # --- the rest of a life ------------------------------------------------------------------------------------

    async def pause(self, id: str) -> None:
        directory = self._running(id)
        directory.write("paused", await asyncio.to_thread(_stop_processes, directory))

    async def resume(self, id: str) -> None:
        directory = self._running(id)
        means = directory.read("paused")
        await asyncio.to_thread(_continue_processes, directory, means or FREEZER)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{directory.path}/paused")

    def _running(self, id: str) -> SandboxDirectory:
        directory = self._directories.get(id)
        if directory.first_process() is None:
            raise SandboxGone(f"bwrap:{id}: the sandbox has ended: {directory.last_log()}", final=True)
        return directory

    async def fork(self, ref: SandboxRef, record: Record) -> SandboxRef:
        source = self._running(ref.id)
        return await self._create(record, source.read("lower"), source)

    async def reset(self, ref: SandboxRef) -> SandboxRef:
        directory = self._directories.get(ref.id)
        await asyncio.to_thread(self._clear, directory)
        lock = directory.hold()
        try:
            os.mkdir(f"{directory.path}/files", 0o711)
            await self._start(directory, lock, ref.record.template, directory.read("lower"))
        finally:
            os.close(lock)
        return await self.get(ref.id)

    def _clear(self, directory: SandboxDirectory) -> None:
        self._end(directory)
        for name in ("ready", "process", "paused", "sock", "stage", "files"):
            remove_tree(f"{directory.path}/{name}")

    def _end(self, directory: SandboxDirectory) -> None:
        """Kill a jail's processes and remove its cgroups."""
        directory.send_kill()
        # A frozen process ends when it is thawed; the signal is there before it can run.
        JailGroups.thaw(directory)
        directory.kill()
        JailGroups.remove(directory)


def _is_root(user: str | None) -> bool:
    return (user or "root").partition(":")[0] in ("root", "0")


def _workdir(template: Template) -> str:
    """The directory of commands: that of root is closed to other users."""
    return template.workdir or ("/root" if _is_root(template.user) else "/")


def _names(database: str) -> frozenset[str]:
    """The names in a file of users or groups; none if it cannot be read."""
    try:
        with open(database, encoding="utf-8", errors="surrogateescape") as file:
            return frozenset(line.partition(":")[0] for line in file)
    except OSError:
        return frozenset()


def _read_only_above(path: str, template: Template) -> str | None:
    """The read-only directory in which a missing path would have to be made; None if it exists or can be made."""
    shown = {mount.target: (mount.source, mount.writable) for mount in template.mounts}
    if template.root is None and template.image is None:
        shown |= {each: (each, each == "/etc" and _has_own_etc(None)) for each in READ_ONLY if os.path.isdir(each)}
    above = [each for each in shown if path.startswith(f"{each.rstrip('/')}/")]
    if not above:
        return None
    nearest = max(above, key=len)
    source, writable = shown[nearest]
    return None if writable or os.path.exists(source + path[len(nearest) :]) else nearest


def _counts_kills(cgroup: str) -> bool:
    return any(os.path.exists(f"{cgroup}/{name}") for name in COUNT_FILES)


def _has_own_etc(lower: str | None) -> bool:
    """Whether a jail has a layer of its own over the host's /etc: only one with uids of its own can add users."""
    return lower is None and os.geteuid() == 0 and os.path.isdir("/etc")


def _private_directories(lower: str | None) -> dict[str, int]:
    if lower is not None:
        return {}
    return {**PRIVATE_DIRECTORIES, "upper/etc": 0o755} if _has_own_etc(lower) else PRIVATE_DIRECTORIES


def _system_links() -> dict[str, str]:
    """System directories of this machine that are links (`/bin` to `usr/bin`), with their targets."""
    return {f"upper{path}": os.readlink(path) for path in READ_ONLY if os.path.islink(path)}


def _cat() -> str:
    """The program that holds a jail's namespaces; it runs with the bundle's C library."""
    found = shutil.which("cat", path=os.defpath)
    if found is None:
        raise SandboxError("bwrap: cat: not found on this machine")
    return os.path.realpath(found)


@contextlib.contextmanager
def _held(tree: str) -> Iterator[int]:
    """A descriptor that keeps the bundle's tree for as long as a jail runs from it."""
    fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _listen(path: str) -> Iterator[socket.socket]:
    """A listening socket at `path`, for its owner alone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        yield listener


async def _read_line(fd: int) -> bytes:
    """The line that the server writes once it listens; empty if the jail ended first."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            return await reader.readline()
    except TimeoutError:
        return b""
    finally:
        transport.close()


def _files_of(directory: SandboxDirectory) -> str:
    """The private files of a jail that runs; those in memory are visible through its first process."""
    pid = directory.first_process()
    in_memory = f"/proc/{pid}/root{jail_launch.STAGE}/files"
    return in_memory if os.path.isdir(in_memory) else f"{directory.path}/files"


async def _copy_files(source: str, target: str) -> None:
    argv = ["cp", "-a", "--reflink=auto", "--", f"{source}/upper", target]
    done = await run_host_command(argv, seconds=3_600)
    if done.exit_code != 0:
        raise SandboxError(f"bwrap: fork: {done.summary}")


# --- stopping a jail --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stopped(directory: SandboxDirectory) -> Iterator[None]:
    """Hold a jail's processes for the block, so that its files do not change."""
    if directory.read("paused") is not None:
        yield
        return
    means = _stop_processes(directory)
    try:
        yield
    finally:
        _continue_processes(directory, means)


def _stop_processes(directory: SandboxDirectory) -> str:
    """Stop all processes of a jail; returns the means, by which they are continued."""
    if JailGroups.freeze(directory, lambda: _members(directory)):
        return FREEZER
    # Without a cgroup: again while there are new ones, because a process may fork while others are being stopped.
    stopped: set[int] = set()
    for _ in range(MAX_ROUNDS):
        found = set(_members(directory)) - stopped
        if not found:
            return SIGNALS
        _signal_all(found, signal.SIGSTOP)
        stopped |= found
    _signal_all(stopped, signal.SIGCONT)
    raise SandboxError(f"bwrap:{directory.id}: cannot be stopped: its processes fork too fast")


def _continue_processes(directory: SandboxDirectory, means: str) -> None:
    """Continue the processes of a jail. Some may be in a freezer that could not take them all."""
    thawed = JailGroups.thaw(directory)
    if means == SIGNALS or not thawed:
        _signal_all(_members(directory), signal.SIGCONT)


def _members(directory: SandboxDirectory) -> Sequence[int]:
    """The processes of a jail: those in the pid namespace of bubblewrap's child, without that child."""
    outer = directory.first_process()
    first = children(outer) if outer is not None else []
    if not first:
        return []
    namespace = _pid_namespace(first[0])
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if pid != first[0] and namespace and _pid_namespace(pid) == namespace]


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _signal_all(pids: Sequence[int] | set[int], number: signal.Signals) -> None:
    """Signal processes of jails. The pid of one that has ended may belong to a process of the host by now."""
    host = _pid_namespace(os.getpid())
    for pid in pids:
        signal_process(pid, number, lambda process: _pid_namespace(process) not in (None, host))
