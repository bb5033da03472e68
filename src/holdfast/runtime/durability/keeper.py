"""The server's parent, which holds what must not die with it: descriptors, listening sockets, and its children.

Run as `python -I -S keeper.py READY_FD ORPHANED_JOBS COMMAND...`; standard library only, one loop, and as good as
nothing to do. It starts COMMAND, the server, and starts it again when it dies. As child subreaper it inherits every
process that a dead server had started, ended ones with their status included; nothing of them is lost. Told to, it
waits without a server until a `serve`, of whatever version, brings the command for the next one.

What the server says waits in the socket, descriptors too, until we are rung (SIGUSR1) or the server is dead: most
packets cost the server one system call and wake nobody. A packet is a tuple, with descriptors beside it:

    KEEP key path     hold the descriptors of this packet; `path` is removed should we give up
    DROP key          close them
    TAKE              every key with its descriptors, a packet each; then None, our start, restarts, PROTOCOL
    LEAD pids         these children of ours are leaders of processes: theirs to end, not ours to reap
    STATUS pid        how a leader ended: (si_code, si_status), or None; it stays a zombie
    FREE pid          its status is noted: reap it
    UP                the server serves
    STOP              the server ends on purpose: do not start it again
    WAIT path         the server ends, and we wait at this socket; answered by None, or by why we cannot

What comes in at that socket, from our own user alone, and what we answer:

    STATUS            our pid, the last command, why we wait, how many children we have, start, restarts, PROTOCOL
    SERVE             with stdin, stdout, stderr, working directory, a file with (command, environment), and perhaps
                      a ready descriptor: this is the server now. (UP, pid) once it serves; (ENDED, exit code, why)

A server of a later version speaks to a keeper of an earlier one, so this protocol only grows: packets get new verbs
and answers get new members at their end, with a new PROTOCOL; none changes its meaning.

SIGTERM, SIGINT and SIGHUP are the server's to obey; afterwards it is not started again. Without a server they end
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

#: Seconds before the n-th start in a row; the last one goes on.
DELAYS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)
#: A server that lived so long starts anew with the delays.
LONG_LIFE_SECONDS = 60.0
#: Starts in a row that did not come up, after which we give up. With the delays before them that is 21 s: a machine
#: that is out of memory, or a disk that is full, for some seconds must not cost everything that runs.
MAX_FAILURES = 10
#: The first child that has ended hides the others (waitid shows one): look again after so long.
LOOK_AGAIN_SECONDS = 0.5
#: What processes have between TERM and KILL when we are told to end, and have no server that knows its settings.
GRACE_SECONDS = 5.0
#: How long killed processes may take to be gone.
KILL_SECONDS = 10.0
#: The largest packet, and the descriptors that one may carry.
PACKET_BYTES = 65_536
PACKET_DESCRIPTORS = 16
#: What we understand; grows with what is said above.
PROTOCOL = 1
PR_SET_CHILD_SUBREAPER = 36
#: Of the flags in /proc/PID/stat: the process is in exit(2).
PF_EXITING = 4
#: Packets wait.
BELL = signal.SIGUSR1
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


#: What we answer.
Plain = str | int | float | None
Message = Plain | tuple[Plain | list[str], ...]


class Keeper:
    """One state machine: `run` it."""

    def __init__(self, command: list[str], ready_fd: int | None, *, kill_jobs: bool) -> None:
        self._command = command
        self._environment: dict[bytes, bytes] = dict(os.environb)
        #: Where the first server that comes up tells it.
        self._ready_fd = ready_fd
        self._kill_jobs = kill_jobs
        self._kept: dict[str, tuple[str, list[int]]] = {}
        self._leaders: set[int] = set()
        self._born = time.monotonic()
        self._restarts = 0
        self._exit_code: int | None = None
        # The server that lives, if one does.
        self._server = 0
        self._pidfd = -1
        self._link: socket.socket | None = None
        self._answers: deque[tuple[bytes, list[int]]] = deque()
        self._is_up = False
        self._was_up = False
        self._stopping = False
        self._started_at = 0.0
        # While none does: where we wait for the next command, and why; who is there, and who brought the last one.
        self._door_path = ""
        self._door: socket.socket | None = None
        self._leaving = False
        self._why = ""
        self._visitors: dict[int, socket.socket] = {}
        self._caller: socket.socket | None = None
        #: Starts in a row that followed a short life, and those that did not come up.
        self._short_lives = 0
        self._failures = 0
        #: When to start the next, and when to look for ended children again.
        self._start_due: float | None = time.monotonic()
        self._reap_due: float | None = None
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1], self._limits[1]))
        self._wake = _wake_on_signals()

    def run(self) -> int:
        """Until the server has ended for good; returns our exit code."""
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
        """For whatever comes first."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._link is not None:
            poll.register(self._link, select.POLLOUT if self._answers else 0)  # and its hang-up
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        if self._door is not None and not self._leaving:
            poll.register(self._door, select.POLLIN)
        for visitor in self._visitors.values():
            poll.register(visitor, select.POLLIN)
        due = [time for time in (self._start_due, self._reap_due) if time is not None]
        timeout = max(0.0, min(due) - time.monotonic()) * 1000 if due else None
        ready = dict(poll.poll(timeout))
        if self._wake in ready:
            self._take_signals(os.read(self._wake, 4096))
        if self._link is not None and self._link.fileno() in ready:
            self._talk()
        if self._pidfd in ready:
            self._server_ended()
        for fd in self._visitors.keys() & ready.keys():
            self._listen_to(self._visitors.pop(fd))
        if self._door is not None and self._door.fileno() in ready:
            self._open_door(self._door)

    # --- the server ------------------------------------------------------------------------------------------

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
        # It raises its limit itself, and gives the one that we had to its processes.
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
        try:
            # Under our own limit: under the server's, what we hold may leave no number free.
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
            self._talk()  # what it handed over before it died is kept
        _, status = os.waitpid(self._server, 0)
        os.close(self._pidfd)
        self._hang_up()
        pid, self._server, self._pidfd = self._server, 0, -1
        code = os.waitstatus_to_exitcode(status)
        exit_code = 128 - code if code < 0 else code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._leaving and not self._stopping:
            self._wait_for_command(f"the server, pid {pid}, left its processes to us", exit_code)
        elif self._stopping or (code >= 0 and not self._was_up and not self._door_path):
            # On purpose, or it never served and has said why.
            self._end(exit_code, clean=code >= 0)
        else:
            self._failed(f"the server, pid {pid}, {how}", exit_code)

    def _failed(self, what: str, exit_code: int = 1) -> None:
        """Start it again, later each time; or not, if it does not come up.

        One whose command was brought to us has somebody who is told, and who may bring another: that one costs
        nothing of what we hold.
        """
        if self._door_path and not self._was_up:
            self._wait_for_command(f"{what} before it served", exit_code)
            return
        lived = time.monotonic() - self._started_at
        self._failures = 0 if self._is_up else self._failures + 1
        self._short_lives = 1 if lived > LONG_LIFE_SECONDS else self._short_lives + 1
        self._is_up = False
        self._reap_due = None
        if self._failures >= MAX_FAILURES:
            what = f"{what}; given up: it did not come up {self._failures} times in a row"
            if self._door_path:
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
        self._tell_caller("ENDED", code, "")
        self._close_door()
        if not clean:
            everything = self._stopping or self._kill_jobs
            if everything:
                _end_children(GRACE_SECONDS if self._stopping else 0.0)
            for path, _ in self._kept.values():
                # A spool tells the next server what runs on.
                if path and (everything or not os.path.isdir(path)):
                    _remove(path)

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- waiting for a command -------------------------------------------------------------------------------

    def _bind_door(self, path: str) -> str | None:
        """Let others bring a command at this path; returns why not, if we cannot."""
        self._close_door()
        door: socket.socket | None = None
        try:
            door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # By the directory's descriptor: its own path may be longer than a socket's address.
            directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
            try:
                # Under its name only when it listens: a door that refuses is one whose keeper is dead.
                _remove(f"{path}.new")
                door.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}.new")
                door.listen()
                os.rename(f"{path}.new", path)
            finally:
                os.close(directory)
            door.setblocking(False)
        except OSError as error:
            if door is not None:
                door.close()
            return f"{path}: {error.strerror}"
        self._door_path, self._door = path, door
        return None

    def _close_door(self) -> None:
        if self._door is not None:
            _remove(self._door_path)
            self._door.close()
            self._door = None

    def _wait_for_command(self, why: str, exit_code: int) -> None:
        """Hold everything, without a server, until somebody brings the command for one."""
        self._leaving = self._is_up = False
        self._start_due = self._reap_due = None
        self._why = why
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None
        cannot = self._bind_door(self._door_path) if self._door is None else None
        self._tell_caller("ENDED", exit_code, why)
        if cannot is None:
            _log(f"{why}; waiting at {self._door_path} for the next command")
        else:
            _log(f"{why}; starting it again, for nobody can bring another command: {cannot}")
            self._start_due = time.monotonic() + DELAYS[-1]

    def _open_door(self, door: socket.socket) -> None:
        try:
            visitor, _ = door.accept()
        except OSError:
            return  # gone again, or no descriptor is left: it will knock again
        _, uid, _ = struct.unpack("3i", visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid in (os.geteuid(), 0):
            visitor.setblocking(False)
            self._visitors[visitor.fileno()] = visitor
        else:
            visitor.close()

    def _listen_to(self, visitor: socket.socket) -> None:
        fds: list[int] = []
        try:
            packet, fds, _ = _receive(visitor)
            verb, *_ = marshal.loads(packet)
            if verb == "SERVE" and self._door is not None:
                self._take_command(visitor, *fds)
                return
        except (OSError, ValueError, TypeError, EOFError):
            verb = ""  # gone, or it speaks another language: not a reason to lose what we hold
        for fd in fds:
            os.close(fd)
        if verb == "STATUS":
            about = (os.getpid(), self._command, self._why, len(_children()), self._born, self._restarts, PROTOCOL)
            _send(visitor, about)
        visitor.close()

    def _take_command(
        self, caller: socket.socket, stdin: int, stdout: int, stderr: int, cwd: int, order: int, ready: int = -1
    ) -> None:
        """This is the server from now on, on these descriptors and in this directory; ours, too: we log there."""
        self._command, self._environment = marshal.loads(os.pread(order, os.fstat(order).st_size, 0))
        os.fchdir(cwd)
        for target, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, target)
        for fd in (stdin, stdout, stderr, cwd, order):
            os.close(fd)
        if ready >= 0:
            self._ready_fd = ready
            os.set_inheritable(ready, True)
        self._close_door()
        self._caller = caller
        self._was_up = False
        self._failures = self._short_lives = 0
        self._restarts += 1
        self._start_due = time.monotonic()

    def _tell_caller(self, *message: str | int) -> None:
        if self._caller is not None and (not _send(self._caller, message) or message[0] == "ENDED"):
            self._caller.close()
            self._caller = None

    # --- signals ---------------------------------------------------------------------------------------------

    def _take_signals(self, numbers: bytes) -> None:
        if signal.SIGCHLD in numbers and self._is_up and self._reap_due is None:
            self._reap_due = time.monotonic()
        if BELL in numbers:
            self._talk()
        told = [number for number in numbers if number in STOPPING]
        if not told:
            return
        self._stopping = True
        if self._server:
            number = signal.SIGINT if told[0] == signal.SIGINT else signal.SIGTERM
            signal.pidfd_send_signal(self._pidfd, number)
            signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)  # a stopped one would not take the first
        else:
            self._end(128 + told[0], clean=False)

    def _reap(self) -> None:
        """Take every ended child of ours that leads no process: orphans of ended trees."""
        while True:
            try:
                # Look first and take then: the status of a leader, and of the server, is taken elsewhere.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in self._leaders:
                self._talk()  # the word that it may go waits in the socket, and nobody may ring for it
                if ended.si_pid not in self._leaders:
                    continue
            if ended.si_pid in self._leaders or ended.si_pid == self._server:
                self._reap_due = time.monotonic() + LOOK_AGAIN_SECONDS
                return
            if self._is_dying():
                return
            os.waitpid(ended.si_pid, 0)

    def _is_dying(self) -> bool:
        """Whether the server is, and this child may be one of its leaders, inherited a moment ago.

        The kernel gives the children of a process away once every one of its threads is marked as exiting; it is a
        zombie, and its files are closed, only when the last thread is through. A main thread without the mark now
        says that what we saw before was no child of the server. A kernel that tells no flags closes the line first.
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

    # --- what the server says --------------------------------------------------------------------------------

    def _talk(self) -> None:
        """Read all that is there, then answer as far as the socket takes it."""
        while self._link is not None:
            try:
                packet, descriptors, complete = _receive(self._link)
            except BlockingIOError:
                break
            except ConnectionResetError:
                # It died with an answer unread. The kernel tells that first, once; what it had said is still there.
                continue
            except ConnectionError:
                packet, descriptors, complete = b"", [], True
            if not packet:
                # Its pidfd tells the rest. One that closed its end and runs on cannot be helped: it ends.
                self._hang_up()
                return
            try:
                verb, arguments = read_packet(packet)
            except ValueError as error:
                _log(f"the server said what cannot be read: {error}")
                _close(descriptors)
                continue
            if not complete:
                # The kernel gave us what we had room for. A part of them would be taken for the whole.
                _close(descriptors)
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                _log(f"{arguments[0]} will not survive the server: no descriptors are left, of {limit}")
                continue
            self._obey(verb, arguments, descriptors)
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

    def _obey(self, verb: str, arguments: list[object], descriptors: list[int]) -> None:
        match verb, arguments:
            case "KEEP", [str(key), str(path)]:
                self._drop(key)
                self._kept[key] = (path, descriptors)
            case "DROP", [str(key)]:
                self._drop(key)
            case "TAKE", []:
                for key, (path, fds) in self._kept.items():
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
                self._tell_caller("UP", self._server)
            case "STOP", []:
                self._stopping = True
            case "WAIT", [str(path)]:
                cannot = self._bind_door(path)
                self._leaving = cannot is None
                self._answer(cannot)
            case _:
                _log(f"the server said {verb} {arguments}, which means nothing here")
                _close(descriptors)

    def _drop(self, key: str) -> None:
        _, fds = self._kept.pop(key, ("", []))
        _close(fds)

    def _answer(self, message: Message, fds: list[int] | None = None) -> None:
        self._answers.append((marshal.dumps(message, 2), fds or []))


def read_packet(packet: bytes) -> tuple[str, list[object]]:
    """A verb and its arguments."""
    try:
        said = marshal.loads(packet)
    except (EOFError, TypeError, ValueError) as error:
        raise ValueError(f"{len(packet)} bytes: {error}") from None
    match said:
        case (str(verb), *arguments) if isinstance(said, tuple):
            return verb, arguments
    raise ValueError(f"{len(packet)} bytes that are no verb with arguments")


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _receive(connection: socket.socket) -> tuple[bytes, list[int], bool]:
    """A packet, empty at the end; the descriptors beside it; and whether these are all that were sent."""
    space = socket.CMSG_SPACE(PACKET_DESCRIPTORS * array.array("i").itemsize)
    packet, extra, flags, _ = connection.recvmsg(PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for _, _, data in extra:
        descriptors.frombytes(data)
    return packet, list(descriptors), not flags & socket.MSG_CTRUNC


def _send(connection: socket.socket, message: Message) -> bool:
    """Whether it was taken: one who does not read, or has gone, is not waited for."""
    try:
        connection.send(marshal.dumps(message, 2))
    except OSError:
        return False
    return True


def _status_of(pid: int) -> tuple[int, int] | None:
    """How a child ended, which it stays to tell."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else (ended.si_code, ended.si_status)


def _wake_on_signals() -> int:
    """A descriptor from which the numbers of signals can be read, as they come."""
    wake, told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    for number in (*STOPPING, signal.SIGCHLD, BELL):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, lambda *_: None)
    return wake


def _end_children(grace: float = 0.0) -> None:
    """Kill everything below us: what a killed child leaves behind becomes our child, until there is none."""
    kill_at = time.monotonic() + grace
    told: set[int] = set()
    while (now := time.monotonic()) < kill_at + KILL_SECONDS:
        for pid in _children():
            if now >= kill_at:
                _signal(pid, signal.SIGKILL)
            elif pid not in told:  # a second TERM would cut short what the first made it do
                told.add(pid)
                _signal(pid, signal.SIGTERM)
                _signal(pid, signal.SIGCONT)  # a stopped process takes its TERM only when it goes on
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)
    _log(f"processes {_children()} do not die: the kernel keeps them in an operation")


def _children() -> list[int]:
    """Our children, the ended ones too."""
    parents = {int(name): _parent_of(name) for name in os.listdir("/proc") if name.isdecimal()}
    return [pid for pid, parent in parents.items() if parent == os.getpid()]


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0  # gone


def _signal(pid: int, number: int) -> None:
    """Signal a child of ours. Only we reap it, so its number is not another's; 0 would be our own group."""
    assert pid > 1
    try:
        os.kill(pid, number)
    except PermissionError:
        return  # it changed its user; if it does not end by itself that is told in the end


def _remove(path: str) -> None:
    """A file, or a directory and what is below it."""
    is_directory = os.path.isdir(path) and not os.path.islink(path)
    try:
        if is_directory:
            for name in os.listdir(path):
                _remove(f"{path}/{name}")
        (os.rmdir if is_directory else os.unlink)(path)
    except OSError:
        return  # gone, or not ours to remove


def _log(text: str) -> None:
    now = time.time()
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    line = f"{moment},{int(now * 1000) % 1000:03} WARNING holdfast.keeper {text}\n"
    try:
        os.write(2, line.encode())
    except OSError:
        return  # whoever read the log is gone


def main(arguments: list[str], kind: type[Keeper] = Keeper) -> int:
    """Keep the server that the arguments name."""
    ready, orphaned_jobs, *command = arguments
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        _log("the kernel has no child subreaper: processes will not survive their server")
    ready_fd = None if ready == "-" else int(ready)
    return kind(command, ready_fd, kill_jobs=orphaned_jobs == "kill").run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
