"""Spawns a program on pipes or on a terminal; returns its pid, or raises an error that names the cause.

The usual start is one posix_spawn (by vfork: its cost does not grow with the server's memory). A user switch and
rlimits, which posix_spawn lacks, go through `launcher.py`. Neither runs Python between fork and exec in this
process.
"""

from __future__ import annotations

import asyncio
import errno
import marshal
import os
import resource
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from holdfast.errors import (
    CommandNotFound,
    CwdNotFound,
    HelperFailed,
    HoldfastError,
    InvalidParams,
    NotExecutable,
    PermissionRefused,
    ResourceExhausted,
)
from holdfast.launch import self_exec
from holdfast.runtime.confine.launch_plan import LaunchPlan
from holdfast.runtime.libc import SpawnPlan
from holdfast.runtime.process.environment import Account
from holdfast.runtime.process.launcher import ORDERS_FD, REPORT_FD
from holdfast.runtime.process.spawner import Spawner
from holdfast.types import Limits

#: The descriptor after the two of the launcher.
SCRIPTED_INPUT_FD: Final = REPORT_FD + 1
_LAUNCHER: Final = self_exec.script(__file__, "launcher")
_HIGHEST_OOM_SCORE: Final = 1_000
_RLIMIT_NAMES: Final = {
    "cpu_seconds": "RLIMIT_CPU",
    "memory_bytes": "RLIMIT_AS",
    "open_files": "RLIMIT_NOFILE",
    "processes": "RLIMIT_NPROC",
    "file_size_bytes": "RLIMIT_FSIZE",
    "core_bytes": "RLIMIT_CORE",
    "stack_bytes": "RLIMIT_STACK",
}


class SpawnCommand(NamedTuple):
    """A program to start, with all names resolved."""

    path: str
    argv: Sequence[str]
    #: `NAME=value` each, as the kernel takes them.
    variables: Sequence[bytes]
    cwd: str
    account: Account | None = None
    limits: Limits | None = None
    #: The wrapper that is executed in place of the program, and the confinement.
    confined: LaunchPlan | None = None
    #: Directories of cgroups to join before the exec, and whether a failure to join is an error.
    cgroups: Sequence[tuple[str, bool]] = ()


class OomScore:
    """The oom_score_adj of processes: the server's and `added`, so that the kernel kills them before the server.

    A child inherits its parent's value and passes it on. So the server's own value is raised during a spawn:
    written to the child after the spawn, it would come too late for processes that the child forks at once. Where
    the value cannot be set, the kernel's default applies.
    """

    def __init__(self, added: int) -> None:
        self._fd = -1
        self._ours = self._theirs = b""
        if added <= 0:
            return
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self._ours = os.pread(fd, 16, 0).strip()
            self._theirs = b"%d" % min(_HIGHEST_OOM_SCORE, int(self._ours) + added)
            os.pwrite(fd, self._theirs, 0)
            os.pwrite(fd, self._ours, 0)
        except OSError:
            os.close(fd)  # some containers refuse it
            return
        self._fd = fd

    @contextmanager
    def for_children(self) -> Iterator[None]:
        """Raise the value for the children that are spawned in this context."""
        if self._fd < 0:
            yield
            return
        os.pwrite(self._fd, self._theirs, 0)
        try:
            yield
        finally:
            os.pwrite(self._fd, self._ours, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class StandardStreams(NamedTuple):
    """The sources of the child's descriptors 0, 1 and 2, or the path of a terminal for all three."""

    stdin: int = -1
    stdout: int = -1
    stderr: int = -1
    terminal: str | None = None
    #: The input of a program that reads its script from stdin: descriptor `SCRIPTED_INPUT_FD`.
    scripted_input: int = -1


def encode_variables(environment: Mapping[str, str]) -> list[bytes]:
    """Encode `NAME=value`; surrogates stand for bytes that are not UTF-8 (PEP 383)."""
    return [f"{name}={value}".encode(errors="surrogateescape") for name, value in environment.items()]


def find_program(name: str, environment: Mapping[str, str], cwd: str) -> str:
    """Return the file of `name` for a process with this environment and directory, as execvp(3) would find it."""
    if not name:
        raise InvalidParams("argv[0] is empty")
    if "/" in name:
        return name
    denied: str | None = None
    for directory in environment.get("PATH", os.defpath).split(":"):
        path = os.path.join(cwd, directory, name)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                continue
        except OSError:
            continue
        if os.access(path, os.X_OK):
            return path
        denied = denied or path
    if denied:
        raise NotExecutable(f"{denied}: permission denied")
    raise CommandNotFound(f"{name}: command not found")


def spawn(
    command: SpawnCommand,
    streams: StandardStreams,
    soft_limits: Mapping[int, int],
    oom_score: OomScore,
    spawner: Spawner | None = None,
) -> int:
    """Start a program; returns the pid. `soft_limits` are rlimits of the child alone.

    With a `spawner` its thread makes the call, so that the child gets no copies of the server's descriptors.
    """
    argv = [os.fsencode(argument) for argument in command.argv]

    def run(streams: StandardStreams) -> int:
        plan = _plan(streams)
        plan.chdir(os.fsencode(command.cwd))
        plan.close_from(3 if streams.scripted_input < 0 else SCRIPTED_INPUT_FD + 1)
        return plan.run(os.fsencode(command.path), argv, command.variables)

    numbers = (streams.stdin, streams.stdout, streams.stderr, streams.scripted_input)
    given = sorted({*numbers} - {-1})

    def run_with(copies: Sequence[int]) -> int:
        stdin, stdout, stderr, scripted = (dict(zip(given, copies, strict=True)).get(fd, -1) for fd in numbers)
        return run(StandardStreams(stdin, stdout, stderr, streams.terminal, scripted))

    try:
        with _soft_limits(soft_limits), oom_score.for_children():
            return run(streams) if spawner is None else spawner.call(given, run_with)
    except OSError as error:
        raise explain(error.errno or 0, command) from None


async def spawn_through_launcher(
    command: SpawnCommand,
    streams: StandardStreams,
    soft_limits: Mapping[int, int],
    oom_score: OomScore,
    newborn: set[int],
) -> int:
    """Start a command with a user, limits or a confinement; returns once the launcher has executed the program.

    For a jail, returns once the jail is set up; raises `JailFailed` if that fails, with bwrap's message on the
    command's stderr. The pid is in `newborn` meanwhile, so that the reaper of orphans leaves it alone.
    """
    limits = command.limits or Limits()
    python = self_exec.command()
    orders = {
        **_what_to_execute(command),
        "account": _user_to_become(command),
        "rlimits": [
            (name, value) for field, name in _RLIMIT_NAMES.items() if (value := getattr(limits, field)) is not None
        ],
        "nice": limits.nice,
    }
    opened: list[int] = []
    try:
        orders_fd = os.memfd_create("holdfast-orders")
        opened.append(orders_fd)
        write_all(orders_fd, marshal.dumps(orders))
        os.lseek(orders_fd, 0, os.SEEK_SET)
        report, report_fd = _report_channel(jailed=_is_jailed(command))
        opened += [report, report_fd]
        plan = _plan(streams)
        # A low descriptor would be overwritten before it is copied; in a server they are high, not in a script.
        lowest = SCRIPTED_INPUT_FD + 1
        orders_fd, report_fd = _above(orders_fd, lowest, opened), _above(report_fd, lowest, opened)
        plan.dup2(orders_fd, ORDERS_FD)
        plan.dup2(report_fd, REPORT_FD)
        plan.close_from(SCRIPTED_INPUT_FD if streams.scripted_input < 0 else lowest)
        with _soft_limits(soft_limits), oom_score.for_children():
            pid = plan.run(
                os.fsencode(python[0]),
                # By its path: Python searches its library beside argv[0], and otherwise in the working directory,
                # where `/` has the library of the system's Python.
                [os.fsencode(word) for word in (*python, "-I", "-S", _LAUNCHER)],
                [b"LC_ALL=C.UTF-8"],
            )
        for fd in opened:
            if fd != report:
                os.close(fd)
        opened = [report]
        newborn.add(pid)
        try:
            received, failed = await _read_report(report)
        finally:
            newborn.discard(pid)
    except OSError as error:
        raise _explain_launcher(error.errno or 0, command, python[0]) from None
    finally:
        for fd in opened:
            os.close(fd)
    if received:
        os.waitpid(pid, 0)  # noqa: ASYNC222 - it has closed its report and is exiting
        stage, number, text = marshal.loads(received)
        if stage == "limits":
            raise PermissionRefused(f"limits: {text}")
        if stage == "confinement":
            raise PermissionRefused(f"confinement: {text}")
        if stage == "user" and command.account:
            raise PermissionRefused(f"cannot run as {command.account.name!r}: {text}")
        raise explain(number, command, cwd_failed=stage == "cwd")
    if failed:
        os.waitpid(pid, 0)  # noqa: ASYNC222 - the jail's first process has ended, and bwrap exits after it
        raise JailFailed("the jail could not be set up")
    return pid


class JailFailed(PermissionRefused):
    """bwrap could not make the jail."""


def _user_to_become(command: SpawnCommand) -> tuple[int, int, list[int]] | None:
    """Return the user for the launcher. bwrap runs as the server does: a program in its jail changes the user."""
    account = command.account
    if account is None or _is_jailed(command):
        return None
    return account.uid, account.gid, list(account.groups)


def _is_jailed(command: SpawnCommand) -> bool:
    return command.confined is not None and command.confined.orders["mode"] == "bubblewrap"


def _what_to_execute(command: SpawnCommand) -> dict[str, object]:
    confined = command.confined
    if confined is None:
        return {
            "path": os.fsencode(command.path),
            "argv": [os.fsencode(argument) for argument in command.argv],
            "environment": dict(variable.split(b"=", 1) for variable in command.variables),
            "cwd": os.fsencode(command.cwd),
            "confinement": None,
        }
    orders = dict(confined.orders)
    orders["rules"] = orders["rules"] and [(os.fsencode(path), rights) for path, rights in orders["rules"]]
    orders["named"] = [os.fsencode(path) for path in orders["named"]]
    orders["opened"] = [(os.fsencode(path), number) for path, number in orders["opened"]]
    orders["command"] = [os.fsencode(word) for word in orders.get("command", ())]
    return {
        "path": os.fsencode(confined.path),
        "argv": [os.fsencode(argument) for argument in confined.argv],
        "environment": dict(variable.split(b"=", 1) for variable in encode_variables(confined.environment)),
        "cwd": os.fsencode(confined.cwd),
        "confinement": orders,
        "cgroups": [(os.fsencode(path), needed) for path, needed in command.cgroups],
    }


def _report_channel(*, jailed: bool) -> tuple[int, int]:
    """Return the server's end and the launcher's; for a jail a socket with a byte that bwrap reads after its setup.

    If bwrap ends with the byte unread, the server's end gets ECONNRESET.
    """
    if not jailed:
        report, theirs = os.pipe2(os.O_CLOEXEC)
    else:
        ours, other = socket.socketpair()
        ours.send(b".")
        report, theirs = ours.detach(), other.detach()
    os.set_blocking(report, False)
    return report, theirs


async def _read_report(fd: int) -> tuple[bytes, bool]:
    """Return the launcher's report, empty after its exec, and whether a byte was left unread."""
    loop = asyncio.get_running_loop()
    received = b""
    while True:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            readable = asyncio.Event()
            loop.add_reader(fd, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(fd)
            continue
        except ConnectionResetError:
            return received, True
        if not data:
            return received, False
        received += data


def _plan(streams: StandardStreams) -> SpawnPlan:
    plan = SpawnPlan()
    if streams.terminal is not None:
        plan.open(0, os.fsencode(streams.terminal), os.O_RDWR)
        plan.dup2(0, 1)
        plan.dup2(0, 2)
    else:
        plan.dup2(streams.stdin, 0)
        plan.dup2(streams.stdout, 1)
        plan.dup2(streams.stderr, 2)
        if streams.scripted_input >= 0:
            plan.dup2(streams.scripted_input, SCRIPTED_INPUT_FD)
    return plan


def write_all(fd: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(fd, data[written:])


def _above(fd: int, lowest: int, opened: list[int]) -> int:
    if fd >= lowest:
        return fd
    import fcntl

    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    opened.append(copy)
    return copy


@contextmanager
def _soft_limits(limits: Mapping[int, int]) -> Iterator[None]:
    """Set the server's own limits during a spawn: a child inherits its parent's, and no other spawn runs then."""
    saved: dict[int, tuple[int, int]] = {}
    applied: dict[int, int] = {}
    try:
        for kind, soft in limits.items():
            hard = resource.getrlimit(kind)[1]
            applied[kind] = _at_most(soft, hard)  # another process may have lowered the hard limit
            # prlimit(2) replaces and returns a limit in one step, so a change by another process is not undone.
            saved[kind] = resource.prlimit(0, kind, (applied[kind], hard))
        yield
    finally:
        for kind, both in saved.items():
            changed = resource.prlimit(0, kind, both)
            if changed[0] != applied[kind]:
                resource.prlimit(0, kind, changed)


def _at_most(soft: int, hard: int) -> int:
    """The soft limit, or the hard limit if that is lower; both may be `RLIM_INFINITY`, which is negative."""
    if hard == resource.RLIM_INFINITY or (soft != resource.RLIM_INFINITY and soft <= hard):
        return soft
    return hard


def _explain_launcher(number: int, command: SpawnCommand, python: str) -> HoldfastError:
    """Return the error of a launcher that did not start."""
    if os.path.exists(python):
        return explain(number, command)
    return HelperFailed(
        f"{command.argv[0]}: the launcher cannot be started: the server's Python {python} was removed"
    )


def explain(number: int, command: SpawnCommand, *, cwd_failed: bool = False) -> HoldfastError:
    """Return the error of a failed start: posix_spawn reports the same errno for chdir and for exec."""
    name = command.argv[0]
    text = os.strerror(number)
    if number in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG):
        if cwd_failed or not os.path.isdir(command.cwd) or not os.access(command.cwd, os.X_OK):
            return CwdNotFound(f"working directory {command.cwd!r}: {text}")
        full = os.path.join(command.cwd, command.path)
        if not os.path.exists(full):
            return CommandNotFound(f"{name}: command not found")
        if os.path.isdir(full):
            return NotExecutable(f"{name}: is a directory")
        if number == errno.ENOENT:
            return NotExecutable(f"{name}: its interpreter or loader was not found")
        return NotExecutable(f"{name}: {text.lower()}")
    if number == errno.ENOEXEC:
        return NotExecutable(f"{name}: neither a binary for this machine nor a script that begins with #!")
    if number == errno.E2BIG:
        return InvalidParams(f"{name}: the arguments and the environment together are too long for this kernel")
    if number == errno.EAGAIN:
        return ResourceExhausted(
            f"{name}: no more processes can be started: the user's limit (RLIMIT_NPROC), pids.max of the cgroup, "
            "or kernel.pid_max is reached; end some"
        )
    if number == errno.ENOMEM:
        return ResourceExhausted(f"{name}: no memory is left to start it: {text}")
    if number in (errno.EMFILE, errno.ENFILE):
        return ResourceExhausted(f"{name}: no more descriptors: {text}")
    if number == errno.EPERM:
        return PermissionRefused(f"{name}: {text}")
    return NotExecutable(f"{name}: {text}")
