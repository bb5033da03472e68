"""Finds the machine's own server, and starts it once even if several callers race.

Standard library only, and neither asyncio nor msgspec: the stateless `holdfast exec` imports this module and must
start in tens of milliseconds. Touches one private directory: the socket, the lock and the log of the server.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import contextmanager, suppress

from holdfast.launch import keeper_client, self_exec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.errors import HoldfastError

#: `sun_path` has 108 bytes, and the last one is for the final NUL.
MAX_SOCKET_PATH = 107
#: The parents of the server's directory, the first writable one is used: small images have no /tmp.
PARENTS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
#: A larger log is renamed when the next server starts; one older log is retained.
MAX_LOG_BYTES = 1024 * 1024
#: How long a server may take to listen. A server that ends is noticed at once; with fifty programs on two cores the
#: start of its interpreter has taken more than ten seconds. Less than the handshake of a channel, which waits for
#: the start.
START_SECONDS = 25.0
#: The part of the log in an error: enough for a traceback, less than a screen.
LOG_TAIL_BYTES = 2_000

#: Forks and lets the parent exit, so that the program that starts the server need not reap it. Writes its pid
#: first, so that a server that does not become ready can be ended.
_LAUNCH = """
import os, sys
fd = int(sys.argv[1])
if os.fork():
    os._exit(0)
os.write(fd, b"%d %d\\n" % (os.getpid(), os.getsid(0)))
os.execv(sys.argv[2], sys.argv[2:])
"""


def directory() -> str:
    """Return the server's directory, made if missing; raises unless this user alone has access."""
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
    """Return the path of the server's socket, in its checked directory."""
    path = os.path.join(directory(), "server.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise _refused(f"{path} is too long for a socket ({MAX_SOCKET_PATH} bytes); set HOLDFAST_DIRECTORY")
    return path


def connect_running() -> socket.socket | None:
    """Return a connection to the running server, or None; never starts one."""
    return connect_at(socket_path())


def is_running() -> bool:
    """Whether a server runs, or a waiting keeper holds processes for the next one; does not start one."""
    keeper = keeper_client.find(socket_path())
    if keeper is not None:
        keeper.close()
        return True
    connection = connect_running()
    if connection is None:
        return False
    connection.close()
    return True


def connect_server(
    *, start_timeout: float = START_SECONDS, environ: Mapping[str, str] | None = None
) -> socket.socket:
    """Return a connection to the machine's server; starts one if none runs, in this environment or in `environ`."""
    connection = connect_at(socket_path())
    if connection is not None:
        return connection
    with hold_start_lock():
        return start_locked(start_timeout=start_timeout, environ=environ)


@contextmanager
def hold_start_lock() -> Iterator[None]:
    """Hold the lock without which no program starts the machine's server."""
    import fcntl

    lock = os.open(os.path.join(directory(), "server.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def start_locked(
    *, start_timeout: float = START_SECONDS, environ: Mapping[str, str] | None = None
) -> socket.socket:
    """`connect_server` for a caller that holds the lock."""
    path = socket_path()
    connection = connect_at(path)
    if connection is None:
        _start(path, start_timeout, environ)
        connection = connect_at(path)
    if connection is None:
        raise _not_started(f"the server reported that it was ready, but {path} has no listener")
    return connection


def ensure_server(*, start_timeout: float = START_SECONDS, environ: Mapping[str, str] | None = None) -> str:
    """Return the path of the socket of the machine's server; starts one if none runs, as `connect_server` does."""
    connect_server(start_timeout=start_timeout, environ=environ).close()
    return socket_path()


def log_path() -> str:
    """Return the path of the log of the last server."""
    return os.path.join(directory(), "server.log")


def _chosen_directory() -> str:
    chosen = os.environ.get("HOLDFAST_DIRECTORY")
    if chosen:
        return os.path.abspath(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # After `su` or `sudo -E` the variable still has the other user's directory.
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.geteuid():
        return os.path.join(runtime, "holdfast")
    parent = next((each for each in PARENTS if os.access(each, os.W_OK | os.X_OK)), PARENTS[0])
    return os.path.join(parent, f"holdfast-{os.geteuid()}")


def connect_at(path: str) -> socket.socket | None:
    """Return a connection to the server that listens at `path`, or None; never starts one."""
    keeper = keeper_client.find(path)
    if keeper is not None:
        keeper.close()
        return None  # a connection would wait for the next server
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        # No socket, or the socket of a dead server.
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise _not_started(f"cannot connect to {path}: {error.strerror}") from None
    return connection


def _start(path: str, timeout: float, environ: Mapping[str, str] | None) -> None:
    """Start the server and wait until it listens. The caller holds the lock."""
    log = open_log()
    ready, report = os.pipe()
    arguments = [*_arguments(path), "--ready-fd", str(report), "--unattended"]
    server = [*self_exec.holdfast(), "serve", *arguments]
    environment = _server_environment(os.environ if environ is None else environ)
    try:
        began = os.fstat(log).st_size
        try:
            if self_exec.is_injected() and _has_one_thread():
                _fork(server, report, log, environment)
            else:
                _launch(server, report, log, environment)
        except OSError as error:
            raise _not_started(f"cannot start the server with {server[0]}: {error}") from None
        os.close(report)
        report = -1
        _await_ready(ready, log, began, timeout)
    finally:
        os.close(ready)
        os.close(log)
        if report >= 0:
            os.close(report)


def _launch(server: list[str], report: int, log: int, environment: dict[str, str]) -> None:
    """Start the server, which is no child of this process and has a session of its own."""
    import subprocess

    try:
        subprocess.run(
            [*self_exec.command(), "-I", "-S", "-c", _LAUNCH, str(report), *server],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=_server_directory(),
            env=environment,
            start_new_session=True,
            pass_fds=(report,),
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise OSError(str(error)) from None


def _has_one_thread() -> bool:
    """Whether a fork is safe: another thread could hold a lock, which its copy in the child would never release."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _fork(server: list[str], report: int, log: int, environment: dict[str, str]) -> None:
    """`_launch` by a fork of this process: without another interpreter, whose start takes 10 ms."""
    import signal

    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.write(report, b"%d %d\n" % (os.getpid(), os.getsid(0)))
            null = os.open(os.devnull, os.O_RDONLY)
            for number, fd in enumerate((null, log, log)):
                os.dup2(fd, number)
            os.set_inheritable(report, True)
            # Descriptors that this process inherited, which the server must not hold open.
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) != report:
                    with suppress(OSError):  # that of the listing
                        os.set_inheritable(int(name), False)
            # Python ignores these, and an ignored signal stays so.
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored, signal.SIG_DFL)
            os.chdir(_server_directory() or ".")
            os.execve(server[0], server, environment)
        except BaseException as error:  # noqa: BLE001 - the log has the reason, and nothing of the caller runs here
            os.write(2, f"{server[0]}: {error}\n".encode())
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if status:
        raise OSError(f"its launcher ended with {os.waitstatus_to_exitcode(status)}")


def _server_directory() -> str | None:
    """The server's directory at its start. An injected server belongs to its sandbox: commands start in the
    sandbox's own directory."""
    return None if self_exec.is_injected() else "/"


def _arguments(path: str) -> list[str]:
    """Return the arguments for `serve`: those of the last server if its keeper waits, else the usual ones."""
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
    """Read the two lines of a start: the pid with the session, and the announcement that it listens."""
    import select
    import time

    lines = b""
    deadline = time.monotonic() + timeout
    poller = select.poll()
    poller.register(ready, select.POLLIN)
    while lines.count(b"\n") < 2:
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            _end_unready(lines)
            raise _not_started(f"the server was not ready after {timeout:g} s{_log_tail(log, began)}")
        data = os.read(ready, 65_536)
        if not data:
            raise _not_started(f"the server ended before it was ready{_log_tail(log, began)}")
        lines += data


def _end_unready(lines: bytes) -> None:
    """Kill a server that did not become ready, by the first line that it wrote; does nothing without one."""
    import signal

    from holdfast.launch.pidfd_signals import signal_process

    line, end, _ = lines.partition(b"\n")
    if end:
        pid, session = (int(word) for word in line.split())
        # Not a child of this process: it may have ended, and its pid may be reused.
        signal_process(pid, signal.SIGKILL, lambda pid: os.getsid(pid) == session)


def open_log() -> int:
    """Open the log of the next server; a large one is renamed."""
    path = log_path()
    try:
        if os.stat(path).st_size > MAX_LOG_BYTES:
            os.replace(path, path + ".1")
    except FileNotFoundError:
        pass
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


def _log_tail(log: int, began: int) -> str:
    """Return the end of this start's part of the log, for an error."""
    end = os.fstat(log).st_size
    start = max(began, end - LOG_TAIL_BYTES)
    text = os.pread(log, end - start, start).decode(errors="replace").strip()
    return f"; its log {log_path()} ends:\n{text}" if text else f"; its log {log_path()} is empty"


def _server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: it starts in `/`, so relative entries of PYTHONPATH become absolute."""
    environment = dict(environ)
    paths = environment.get("PYTHONPATH")
    # An injected server ignores the variable, which is for the programs that it runs.
    if paths and not self_exec.is_injected():
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in paths.split(os.pathsep) if p)
    return environment


def _refused(message: str) -> HoldfastError:
    from holdfast.errors import PermissionRefused

    return PermissionRefused(message)


def _not_started(message: str) -> HoldfastError:
    from holdfast.errors import ConnectionLost

    return ConnectionLost(message)
