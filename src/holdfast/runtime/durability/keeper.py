"""The keeper: the server's parent, which holds descriptors, listening sockets and children that survive the server.

Run as `python -I -S keeper.py READY_FD ORPHANED_JOBS [running=PID:FD] COMMAND...`; standard library only, one loop,
nearly idle. It starts COMMAND, the server, and restarts it when it dies. The first server may run already, as its
child PID; FD is then the keeper's end of their socket. As child subreaper it inherits every process of a dead
server, with the exit status of ended ones. On request it waits without a server until a `serve`, of any version,
passes the command for the next one.

Packets of the server wait in the socket, with their descriptors, until a signal (SIGUSR1) or the death of the
server: most cost the server one system call and wake no process. A packet is a tuple, with descriptors beside it:

    KEEP key path     hold the descriptors of this packet; `path` is removed if the keeper gives up
    DROP key          close them
    TAKE              reply: every key with its descriptors, a packet each; then None, start, restarts, PROTOCOL
    LEAD pids         these children of the keeper are leaders of processes: do not reap them
    STATUS pid        reply: exit of a leader (si_code, si_status), or None; it stays a zombie
    FREE pid          its status is recorded: reap it
    UP                the server serves
    STOP              the server ends on purpose: do not restart it
    WAIT path         the server ends, and the keeper waits at this socket; reply: None, or an error

Packets at that socket, accepted from the keeper's own user and root, and the replies:

    STATUS            pid, the last command, why the keeper waits, number of children, start, restarts, PROTOCOL
    SERVE             with stdin, stdout, stderr, working directory, a file with (command, environment), and perhaps
                      a ready descriptor: the next server. (UP, pid) once it serves; (ENDED, exit code, why)

A server may be newer than its keeper, so this protocol only grows: packets get new verbs and replies get new
members at their end, with a new PROTOCOL; none changes its meaning.

SIGTERM, SIGINT and SIGHUP are forwarded to the server, which is not restarted afterwards. Without a server they end
everything.
"""

from __future__ import annotations

import array
import ctypes
import marshal
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable

#: Seconds before the n-th start in a row; the last value repeats.
DELAYS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)
#: After a server that lived this long, the delays start from the first.
LONG_LIFE_SECONDS = 60.0
#: Failed starts in a row after which the keeper gives up. With the delays that is 21 s: some seconds without
#: memory, or with a full disk, must not end all processes.
MAX_FAILURES = 10
#: The first ended child hides the others (waitid returns one): the interval of retries.
REAP_AGAIN_SECONDS = 0.5
#: The time between TERM and KILL when the keeper ends without a server, which has the setting.
GRACE_SECONDS = 5.0
#: The time for killed processes to exit.
KILL_SECONDS = 10.0
#: The largest packet, and the most descriptors in one.
PACKET_BYTES = 65_536
PACKET_DESCRIPTORS = 16
#: The version of the protocol above.
PROTOCOL = 1
PR_SET_CHILD_SUBREAPER = 36
#: The prefix of the argument with the pid and the socket of a server that runs already.
RUNNING = "running="
#: A flag in /proc/PID/stat: the process is in exit(2).
PF_EXITING = 4
#: Signals that packets wait in the socket.
BELL = signal.SIGUSR1
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


#: The type of a reply.
Plain = str | int | float | None
Message = Plain | tuple[Plain | list[str], ...]


class Keeper:
    """The state machine of the keeper; `run` it."""

    def __init__(self, command: list[str], ready_fd: int | None, *, kill_jobs: bool) -> None:
        self._command = command
        self._environment: dict[bytes, bytes] = dict(os.environb)
        #: The descriptor on which the first server reports that it serves.
        self._ready_fd = ready_fd
        self._kill_jobs = kill_jobs
        self._held: dict[str, tuple[str, list[int]]] = {}
        self._leaders: set[int] = set()
        self._born = time.monotonic()
        self._restarts = 0
        self._exit_code: int | None = None
        # The running server, if there is one.
        self._server = 0
        self._pidfd = -1
        self._link: socket.socket | None = None
        self._answers: deque[tuple[bytes, list[int]]] = deque()
        self._is_up = False
        self._was_up = False
        self._stopping = False
        self._started_at = 0.0
        # Without a server: the socket for the next command, the reason, its clients, the sender of the last
        # command.
        self._command_path = ""
        self._command_socket: socket.socket | None = None
        self._leaving = False
        self._why = ""
        self._clients: dict[int, socket.socket] = {}
        self._caller: socket.socket | None = None
        #: Starts in a row after a short life, and starts in a row that did not serve.
        self._short_lives = 0
        self._failures = 0
        #: The times of the next start and of the next reaping.
        self._start_due: float | None = time.monotonic()
        self._reap_due: float | None = None
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1], self._limits[1]))
        self._wake = _wake_on_signals()

    def run(self) -> int:
        """Run until the server is not restarted; returns the keeper's exit code."""
        while self._exit_code is None:
            now = time.monotonic()
            if self._start_due is not None and now >= self._start_due:
                self._start_due = None
                self._start()
            if self._reap_due is not None and now >= self._reap_due:
                self._reap_due = None
                self._reap()
            self._wait()
        return self._exit_code

    def _wait(self) -> None:
        """Wait for the next event and handle it."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._link is not None:
            poll.register(self._link, select.POLLOUT if self._answers else 0)  # and a hang-up
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        if self._command_socket is not None and not self._leaving:
            poll.register(self._command_socket, select.POLLIN)
        for client in self._clients.values():
            poll.register(client, select.POLLIN)
        due = [time for time in (self._start_due, self._reap_due) if time is not None]
        timeout = max(0.0, min(due) - time.monotonic()) * 1000 if due else None
        ready = dict(poll.poll(timeout))
        if self._wake in ready:
            self._take_signals(os.read(self._wake, 4096))
        if self._link is not None and self._link.fileno() in ready:
            self._handle_packets()
        if self._pidfd in ready:
            self._server_ended()
        for fd in self._clients.keys() & ready.keys():
            self._serve_client(self._clients.pop(fd))
        if self._command_socket is not None and self._command_socket.fileno() in ready:
            self._accept_client(self._command_socket)

    # --- the server ------------------------------------------------------------------------------------------

    def adopt(self, server: int, link: int) -> None:
        """Watch a server that is a child of this process already. Its signals are pending until now."""
        self._start_due = None
        connection = socket.socket(fileno=link)
        connection.set_inheritable(False)
        connection.setblocking(False)
        self._watch(server, connection)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPPING, BELL))

    def _start(self) -> None:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._failed(f"the server cannot be started: {error.strerror}")
            return
        ours.setblocking(False)
        theirs.set_inheritable(True)
        command = [*self._command, "--kept", str(theirs.fileno())]
        if self._ready_fd is not None:
            command += ["--ready-fd", str(self._ready_fd)]
        # The server raises its limit itself, and passes the original one to its processes.
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
        try:
            server = self._spawn(command)
        except OSError as error:
            ours.close()
            self._failed(f"the server cannot be started: {error.strerror}")
            return
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1], self._limits[1]))
            theirs.close()
        self._watch(server, ours)

    def _watch(self, server: int, ours: socket.socket) -> None:
        """Watch a server that was started, with this end of its socket."""
        try:
            # Under the keeper's own limit: under the server's, the held descriptors may leave no number free.
            self._pidfd = os.pidfd_open(server)
        except OSError as error:
            ours.close()
            _signal(server, signal.SIGKILL)
            os.waitpid(server, 0)
            self._failed(f"the server cannot be watched: {error.strerror}")
            return
        self._server = server
        self._link = ours
        self._answers.clear()
        self._is_up = False
        self._leaders.clear()
        self._started_at = time.monotonic()

    def _spawn(self, command: list[str]) -> int:
        """Start the server's process; returns its pid."""
        return os.posix_spawn(command[0], command, self._environment)

    def _server_ended(self) -> None:
        if self._link is not None:
            self._handle_packets()  # descriptors from before its death are held, too
        _, status = os.waitpid(self._server, 0)
        os.close(self._pidfd)
        self._hang_up()
        pid, self._server, self._pidfd = self._server, 0, -1
        code = os.waitstatus_to_exitcode(status)
        exit_code = 128 - code if code < 0 else code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._leaving and not self._stopping:
            self._wait_for_command(f"the server, pid {pid}, left its processes to the keeper", exit_code)
        elif self._stopping or (code >= 0 and not self._was_up and not self._command_path):
            # On purpose, or it never served and has logged the reason.
            self._end(exit_code, clean=code >= 0)
        else:
            self._failed(f"the server, pid {pid}, {how}", exit_code)

    def _failed(self, what: str, exit_code: int = 1) -> None:
        """Restart the server, with growing delays; give up after too many failed starts.

        A command that was passed at the socket and never served is not restarted: its sender gets the error and may
        pass another, and the keeper holds everything meanwhile.
        """
        if self._command_path and not self._was_up:
            self._wait_for_command(f"{what} before it served", exit_code)
            return
        lived = time.monotonic() - self._started_at
        self._failures = 0 if self._is_up else self._failures + 1
        self._short_lives = 1 if lived > LONG_LIFE_SECONDS else self._short_lives + 1
        self._is_up = False
        self._reap_due = None
        if self._failures >= MAX_FAILURES:
            what = f"{what}; given up: it did not come up {self._failures} times in a row"
            if self._command_path:
                self._wait_for_command(what, exit_code)
            else:
                _log(what)
                self._end(1, clean=False)
            return
        delay = DELAYS[min(self._short_lives, len(DELAYS)) - 1]
        _log(f"{what}; starting it again" + (f" in {delay:g} s" if delay else ""))
        self._restarts += 1
        self._start_due = time.monotonic() + delay

    def _end(self, code: int, *, clean: bool) -> None:
        self._exit_code = code
        self._notify_caller("ENDED", code, "")
        self._close_command_socket()
        if not clean:
            everything = self._stopping or self._kill_jobs
            if everything:
                _end_children(GRACE_SECONDS if self._stopping else 0.0)
            for path, _ in self._held.values():
                # The next server finds running processes by the spool.
                if path and (everything or not os.path.isdir(path)):
                    _remove(path)

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- the socket for commands -----------------------------------------------------------------------------

    def _bind_command_socket(self, path: str) -> str | None:
        """Listen for commands at this path; returns an error, or None."""
        self._close_command_socket()
        listener: socket.socket | None = None
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # By the directory's descriptor: the path may be longer than a socket's address.
            directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
            try:
                # Renamed only when it listens: a socket that refuses connections means a dead keeper.
                _remove(f"{path}.new")
                listener.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}.new")
                listener.listen()
                os.rename(f"{path}.new", path)
            finally:
                os.close(directory)
            listener.setblocking(False)
        except OSError as error:
            if listener is not None:
                listener.close()
            return f"{path}: {error.strerror}"
        self._command_path, self._command_socket = path, listener
        return None

    def _close_command_socket(self) -> None:
        if self._command_socket is not None:
            _remove(self._command_path)
            self._command_socket.close()
            self._command_socket = None

    def _wait_for_command(self, why: str, exit_code: int) -> None:
        """Hold everything without a server until the command for the next one arrives."""
        self._leaving = self._is_up = False
        self._start_due = self._reap_due = None
        self._why = why
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None
        cannot = self._bind_command_socket(self._command_path) if self._command_socket is None else None
        self._notify_caller("ENDED", exit_code, why)
        if cannot is None:
            _log(f"{why}; waiting at {self._command_path} for the next command")
        else:
            _log(f"{why}; starting it again, since no other command can be passed: {cannot}")
            self._start_due = time.monotonic() + DELAYS[-1]

    def _accept_client(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:
            return  # closed again, or no descriptor is left: the client retries
        _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid in (os.geteuid(), 0):
            client.setblocking(False)
            self._clients[client.fileno()] = client
        else:
            client.close()

    def _serve_client(self, client: socket.socket) -> None:
        fds: list[int] = []
        try:
            packet, fds, _ = _receive(client)
            verb, *_ = marshal.loads(packet)
            if verb == "SERVE" and self._command_socket is not None:
                self._take_command(client, *fds)
                return
        except (OSError, ValueError, TypeError, EOFError):
            verb = ""  # closed, or an invalid packet: ignored
        for fd in fds:
            os.close(fd)
        if verb == "STATUS":
            about = (os.getpid(), self._command, self._why, len(_children()), self._born, self._restarts, PROTOCOL)
            _send(client, about)
        client.close()

    def _take_command(
        self, caller: socket.socket, stdin: int, stdout: int, stderr: int, cwd: int, order: int, ready: int = -1
    ) -> None:
        """Start this server next, on these descriptors and in this directory, which the keeper uses too."""
        self._command, self._environment = marshal.loads(os.pread(order, os.fstat(order).st_size, 0))
        os.fchdir(cwd)
        for target, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, target)
        for fd in (stdin, stdout, stderr, cwd, order):
            os.close(fd)
        if ready >= 0:
            self._ready_fd = ready
            os.set_inheritable(ready, True)
        self._close_command_socket()
        self._caller = caller
        self._was_up = False
        self._failures = self._short_lives = 0
        self._restarts += 1
        self._start_due = time.monotonic()

    def _notify_caller(self, *message: str | int) -> None:
        if self._caller is not None and (not _send(self._caller, message) or message[0] == "ENDED"):
            self._caller.close()
            self._caller = None

    # --- signals ---------------------------------------------------------------------------------------------

    def _take_signals(self, numbers: bytes) -> None:
        if signal.SIGCHLD in numbers and self._is_up and self._reap_due is None:
            self._reap_due = time.monotonic()
        if BELL in numbers:
            self._handle_packets()
        stopping = [number for number in numbers if number in STOPPING]
        if not stopping:
            return
        self._stopping = True
        if self._server:
            number = signal.SIGINT if stopping[0] == signal.SIGINT else signal.SIGTERM
            signal.pidfd_send_signal(self._pidfd, number)
            signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)  # a stopped server handles TERM after this
        else:
            self._end(128 + stopping[0], clean=False)

    def _reap(self) -> None:
        """Reap every ended child that is not a leader: orphans of ended trees."""
        while True:
            try:
                # WNOWAIT first: the status of a leader, and of the server, must not be consumed here.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in self._leaders:
                self._handle_packets()  # its FREE may wait in the socket without a signal
                if ended.si_pid not in self._leaders:
                    continue
            if ended.si_pid in self._leaders or ended.si_pid == self._server:
                self._reap_due = time.monotonic() + REAP_AGAIN_SECONDS
                return
            if self._is_dying():
                return
            os.waitpid(ended.si_pid, 0)

    def _is_dying(self) -> bool:
        """Whether the server is exiting, so that an ended child may be one of its leaders, inherited a moment ago.

        The kernel reparents the children of a process once all of its threads are marked as exiting; the process is
        a zombie, with its files closed, only after the last thread has exited. So if the main thread is not marked
        now, the ended child was not the server's. On a kernel without these flags the socket is closed first.
        """
        hang_up = select.poll()
        if self._link is not None:
            hang_up.register(self._link, 0)
        if self._link is None or hang_up.poll(0):
            return True
        try:
            with open(f"/proc/{self._server}/stat", "rb") as file:
                return bool(int(file.read().rpartition(b")")[2].split()[6]) & PF_EXITING)
        except OSError:
            return True

    # --- packets of the server -------------------------------------------------------------------------------

    def _handle_packets(self) -> None:
        """Handle all waiting packets, then send replies as far as the socket accepts them."""
        while self._link is not None:
            try:
                packet, descriptors, complete = _receive(self._link)
            except BlockingIOError:
                break
            except ConnectionResetError:
                # The server died with a reply unread. The kernel reports that once; its packets are still readable.
                continue
            except ConnectionError:
                packet, descriptors, complete = b"", [], True
            if not packet:
                # The pidfd reports the exit. A server that closed its end and runs on is ended by itself.
                self._hang_up()
                return
            try:
                verb, arguments = read_packet(packet)
            except ValueError as error:
                _log(f"the server sent an invalid packet: {error}")
                _close(descriptors)
                continue
            if not complete:
                # The kernel delivered a part of the descriptors, which could be mistaken for all of them.
                _close(descriptors)
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                _log(f"{arguments[0]} will not survive the server: no descriptors are left, of {limit}")
                continue
            self._handle(verb, arguments, descriptors)
        try:
            while self._answers and self._link is not None:
                answer, fds = self._answers[0]
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                self._link.sendmsg([answer], rights)
                self._answers.popleft()
        except BlockingIOError:
            return
        except ConnectionError:
            self._hang_up()

    def _handle(self, verb: str, arguments: list[object], descriptors: list[int]) -> None:
        match verb, arguments:
            case "KEEP", [str(key), str(path)]:
                self._drop(key)
                self._held[key] = (path, descriptors)
            case "DROP", [str(key)]:
                self._drop(key)
            case "TAKE", []:
                for key, (path, fds) in self._held.items():
                    self._answer((key, path), fds)
                self._answer((None, self._born, self._restarts, PROTOCOL))
            case "LEAD", [tuple(pids)]:
                self._leaders.update(pids)
            case "STATUS", [int(pid)]:
                self._answer(_status_of(pid))
            case "FREE", [int(pid)]:
                self._leaders.discard(pid)
                if _status_of(pid) is not None:
                    os.waitpid(pid, 0)
            case "UP", []:
                self._is_up = self._was_up = True
                if self._ready_fd is not None:
                    os.close(self._ready_fd)
                    self._ready_fd = None
                self._reap_due = time.monotonic()
                self._notify_caller("UP", self._server)
            case "STOP", []:
                self._stopping = True
            case "WAIT", [str(path)]:
                cannot = self._bind_command_socket(path)
                self._leaving = cannot is None
                self._answer(cannot)
            case _:
                _log(f"the server sent an unknown packet: {verb} {arguments}")
                _close(descriptors)

    def _drop(self, key: str) -> None:
        _, fds = self._held.pop(key, ("", []))
        _close(fds)

    def _answer(self, message: Message, fds: list[int] | None = None) -> None:
        self._answers.append((marshal.dumps(message, 2), fds or []))


def read_packet(packet: bytes) -> tuple[str, list[object]]:
    """Return the verb and the arguments of a packet; raises `ValueError` if it is invalid."""
    try:
        content = marshal.loads(packet)
    except (EOFError, TypeError, ValueError) as error:
        raise ValueError(f"{len(packet)} bytes: {error}") from None
    match content:
        case (str(verb), *arguments) if isinstance(content, tuple):
            return verb, arguments
    raise ValueError(f"{len(packet)} bytes without a verb and arguments")


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _receive(connection: socket.socket) -> tuple[bytes, list[int], bool]:
    """Return a packet, empty at the end; its descriptors; and whether all of them were delivered."""
    space = socket.CMSG_SPACE(PACKET_DESCRIPTORS * array.array("i").itemsize)
    packet, extra, flags, _ = connection.recvmsg(PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for _, _, data in extra:
        descriptors.frombytes(data)
    return packet, list(descriptors), not flags & socket.MSG_CTRUNC


def _send(connection: socket.socket, message: Message) -> bool:
    """Send without waiting; returns False if the receiver does not read or is gone."""
    try:
        connection.send(marshal.dumps(message, 2))
    except OSError:
        return False
    return True


def _status_of(pid: int) -> tuple[int, int] | None:
    """Return the exit of a child, which stays a zombie; None if it runs."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else (ended.si_code, ended.si_status)


def _wake_on_signals() -> int:
    """Return a descriptor from which the numbers of signals are read."""
    wake, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (*STOPPING, signal.SIGCHLD, BELL):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, lambda *_: None)
    return wake


def _end_children(grace: float = 0.0) -> None:
    """Kill all descendants: orphans of a killed child become children of the keeper, until there are none."""
    kill_at = time.monotonic() + grace
    signalled: set[int] = set()
    while (now := time.monotonic()) < kill_at + KILL_SECONDS:
        for pid in _children():
            if now >= kill_at:
                _signal(pid, signal.SIGKILL)
            elif pid not in signalled:  # a second TERM would interrupt the handler of the first
                signalled.add(pid)
                _signal(pid, signal.SIGTERM)
                _signal(pid, signal.SIGCONT)  # a stopped process handles TERM only after SIGCONT
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)
    _log(f"processes {_children()} do not die: they are blocked in the kernel")


def _children() -> list[int]:
    """Return the pids of all children, ended ones included."""
    parents = {int(name): _parent_of(name) for name in os.listdir("/proc") if name.isdecimal()}
    return [pid for pid, parent in parents.items() if parent == os.getpid()]


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0  # ended


def _signal(pid: int, number: int) -> None:
    """Signal a child, which only the keeper reaps, so its pid is not reused; 0 would be the keeper's group."""
    assert pid > 1
    try:
        os.kill(pid, number)
    except PermissionError:
        return  # it changed its user; `_end_children` logs it if it remains


def _remove(path: str) -> None:
    """Remove a file, or a directory with its contents."""
    is_directory = os.path.isdir(path) and not os.path.islink(path)
    try:
        if is_directory:
            for name in os.listdir(path):
                _remove(f"{path}/{name}")
        (os.rmdir if is_directory else os.unlink)(path)
    except OSError:
        return  # missing, or not permitted


def _log(text: str) -> None:
    now = time.time()
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    line = f"{moment},{int(now * 1000) % 1000:03} WARNING holdfast.keeper {text}\n"
    try:
        os.write(2, line.encode())
    except OSError:
        return  # the reader of the log is gone


def main(arguments: list[str], kind: type[Keeper] = Keeper) -> int:
    """Run the keeper of the server that the arguments name."""
    ready, orphaned_jobs, *command = arguments
    running = command.pop(0).removeprefix(RUNNING) if command[0].startswith(RUNNING) else ""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        _log("the kernel has no child subreaper: processes will not survive their server")
    ready_fd = None if ready == "-" else int(ready)
    made = kind(command, ready_fd, kill_jobs=orphaned_jobs == "kill")
    if running:
        pid, _, link = running.partition(":")
        made.adopt(int(pid), int(link))
    return made.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
