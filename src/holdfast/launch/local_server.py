"""Where this machine's own server lives, and how it is started once however many callers race.

Standard library only, and neither asyncio nor msgspec: the stateless `holdfast exec` imports this module and must
start in tens of milliseconds. It touches one private directory: the socket, the lock and the log of the server.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import contextmanager

from holdfast.launch import keeper_client, self_exec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.errors import HoldfastError

#: `sun_path` has 108 bytes and the kernel wants the last one for the final NUL.
MAX_SOCKET_PATH = 107
#: Where the server's directory may be, the first that can be written: small images have no /tmp.
PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run")
#: A log beyond this size is set aside when the next server starts; one older log is kept.
MAX_LOG_BYTES = 1024 * 1024
#: How much of the log an error shows: a traceback fits, a screen does not overflow.
LOG_TAIL_BYTES = 2_000

#: Forks and lets the parent end, so that the server is nobody's child: the program that happened to start it need
#: not reap it. It tells its pid first, so that a server that never gets ready can be ended.
_LAUNCH = """
import os, sys
fd = int(sys.argv[1])
if os.fork():
    os._exit(0)
os.write(fd, b"%d %d\\n" % (os.getpid(), os.getsid(0)))
os.execv(sys.argv[2], sys.argv[2:])
"""


def directory() -> str:
    """The server's directory, made if it is missing; refused unless it is ours alone."""
    path = _chosen_directory()
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise _refused(f"cannot make {path}: {error.strerror}") from None
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(f"{path} is not a directory")
    if found.st_uid != os.geteuid():
        raise _refused(f"{path} belongs to uid {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o077:
        raise _refused(f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}); make it 0700")
    return path


def socket_path() -> str:
    """The path of the server's socket, in its checked directory."""
    path = os.path.join(directory(), "server.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise _refused(f"{path} is too long for a socket ({MAX_SOCKET_PATH} bytes); set HOLDFAST_DIRECTORY")
    return path


def connect_running() -> socket.socket | None:
    """A connection to the server that runs, or None; never starts one."""
    return connect_at(socket_path())


def is_running() -> bool:
    """Whether a server answers, or could go on with what a waiting keeper holds; does not start one."""
    keeper = keeper_client.find(socket_path())
    if keeper is not None:
        keeper.close()
        return True
    connection = connect_running()
    if connection is None:
        return False
    connection.close()
    return True


def connect_server(*, start_timeout: float = 10, environ: Mapping[str, str] | None = None) -> socket.socket:
    """A connection to the machine's server, which is started if none runs; in our environment, or in `environ`."""
    connection = connect_at(socket_path())
    if connection is not None:
        return connection
    with hold_start_lock():
        return start_locked(start_timeout=start_timeout, environ=environ)


@contextmanager
def hold_start_lock() -> Iterator[None]:
    """While this is held nobody else starts the machine's server."""
    import fcntl

    lock = os.open(os.path.join(directory(), "server.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def start_locked(*, start_timeout: float = 10, environ: Mapping[str, str] | None = None) -> socket.socket:
    """`connect_server` for who holds the lock."""
    path = socket_path()
    connection = connect_at(path)
    if connection is None:
        _start(path, start_timeout, environ)
        connection = connect_at(path)
    if connection is None:
        raise _not_started(f"the server said it was ready, but nobody listens at {path}")
    return connection


def ensure_server(*, start_timeout: float = 10, environ: Mapping[str, str] | None = None) -> str:
    """The path of a socket at which the machine's server listens; it is started if none runs, as `connect_server`
    does."""
    connect_server(start_timeout=start_timeout, environ=environ).close()
    return socket_path()


def log_path() -> str:
    """The log of the server that was started last."""
    return os.path.join(directory(), "server.log")


def _chosen_directory() -> str:
    chosen = os.environ.get("HOLDFAST_DIRECTORY")
    if chosen:
        return os.path.abspath(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # After `su` or `sudo -E` the variable still names the other user's directory.
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.geteuid():
        return os.path.join(runtime, "holdfast")
    place = next((each for each in PLACES if os.access(each, os.W_OK | os.X_OK)), PLACES[0])
    return os.path.join(place, f"holdfast-{os.geteuid()}")


def connect_at(path: str) -> socket.socket | None:
    """A connection to the server that listens at `path`, or None; never starts one."""
    keeper = keeper_client.find(path)
    if keeper is not None:
        keeper.close()
        return None  # a connection would be taken, by the next server
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        # No socket, or one that a server which is gone left behind.
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise _not_started(f"cannot connect to {path}: {error.strerror}") from None
    return connection


def _start(path: str, timeout: float, environ: Mapping[str, str] | None) -> None:
    """Start the server and wait until it listens. The caller holds the lock."""
    import subprocess

    log = _open_log()
    ready, tell = os.pipe()
    arguments = [*_arguments(path), "--ready-fd", str(tell), "--unattended"]
    server = [*self_exec.holdfast(), "serve", *arguments]
    try:
        began = os.fstat(log).st_size
        try:
            subprocess.run(
                [*self_exec.command(), "-I", "-S", "-c", _LAUNCH, str(tell), *server],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # What is put into a sandbox is there for it alone: commands start where the sandbox's own do.
                cwd=None if self_exec.is_injected() else "/",
                env=_server_environment(os.environ if environ is None else environ),
                start_new_session=True,
                pass_fds=(tell,),
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise _not_started(f"cannot start the server with {server[0]}: {error}") from None
        os.close(tell)
        tell = -1
        _await_ready(ready, log, began, timeout)
    finally:
        os.close(ready)
        os.close(log)
        if tell >= 0:
            os.close(tell)


def _arguments(path: str) -> list[str]:
    """For `serve`: those of the server that left its processes to a keeper, if one waits, else the usual ones."""
    keeper = keeper_client.find(path)
    if keeper is not None:
        try:
            command = keeper.about().command
        finally:
            keeper.close()
        if "serve" in command:
            return command[command.index("serve") + 1 :]
    return ["--listen", f"unix:{path}"]


def _await_ready(ready: int, log: int, began: int, timeout: float) -> None:
    """Read the two lines that a start writes: its pid and its session, and that it listens."""
    import select
    import time

    told = b""
    deadline = time.monotonic() + timeout
    poller = select.poll()
    poller.register(ready, select.POLLIN)
    while told.count(b"\n") < 2:
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            _end_unready(told)
            raise _not_started(f"the server was not ready after {timeout:g} s{_log_tail(log, began)}")
        data = os.read(ready, 65_536)
        if not data:
            raise _not_started(f"the server ended before it was ready{_log_tail(log, began)}")
        told += data


def _end_unready(told: bytes) -> None:
    """Kill a server that did not get ready, by the line that it wrote first; nothing if it wrote none."""
    import signal

    from holdfast.launch.pidfd_signals import signal_process

    line, end, _ = told.partition(b"\n")
    if end:
        pid, session = (int(word) for word in line.split())
        # Not our child: it may have ended, and its pid may be reused.
        signal_process(pid, signal.SIGKILL, lambda pid: os.getsid(pid) == session)


def _open_log() -> int:
    path = log_path()
    try:
        if os.stat(path).st_size > MAX_LOG_BYTES:
            os.replace(path, path + ".1")
    except FileNotFoundError:
        pass
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


def _log_tail(log: int, began: int) -> str:
    """What this start wrote to the log, for the error that says it failed."""
    end = os.fstat(log).st_size
    start = max(began, end - LOG_TAIL_BYTES)
    text = os.pread(log, end - start, start).decode(errors="replace").strip()
    return f"; its log {log_path()} ends:\n{text}" if text else f"; its log {log_path()} is empty"


def _server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """That of the server: it starts in `/`, where relative entries of PYTHONPATH would point elsewhere."""
    environment = dict(environ)
    paths = environment.get("PYTHONPATH")
    # An injected server does not look at it: it is for the programs that it runs, as they have it.
    if paths and not self_exec.is_injected():
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in paths.split(os.pathsep) if p)
    return environment


def _refused(message: str) -> HoldfastError:
    from holdfast.errors import PermissionRefused

    return PermissionRefused(message)


def _not_started(message: str) -> HoldfastError:
    from holdfast.errors import ConnectionLost

    return ConnectionLost(message)
