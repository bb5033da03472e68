"""The server's parent, which holds what must not die with it: descriptors, listening sockets, and its children.

Run as `python -I -S keeper.py READY_FD ORPHANED_JOBS COMMAND...`; standard library only, one loop, and as good as
nothing to do. It starts COMMAND, the server, and starts it again when it dies. As child subreaper it inherits every
process that a dead server had started, ended ones with their status included; nothing of them is lost.

What the server says waits in the socket, descriptors too, until we are rung (SIGUSR1) or the server is dead: most
packets cost the server one system call and wake nobody. A packet is a tuple, with descriptors beside it:

    KEEP key path     hold the descriptors of this packet; `path` is removed should we give up
    DROP key          close them
    TAKE              every key with its descriptors, a packet each; then None, our start (monotonic), restarts
    LEAD pids         these children of ours are leaders of processes: theirs to end, not ours to reap
    STATUS pid        how a leader ended: (si_code, si_status), or None; it stays a zombie
    FREE pid          its status is noted: reap it
    UP                the server serves
    STOP              the server ends on purpose: do not start it again

SIGTERM, SIGINT and SIGHUP are the server's to obey; afterwards it is not started again.
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
import sys
import time
from collections import deque

#: Seconds before the n-th start in a row; the last one goes on.
DELAYS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)
#: A server that lived so long starts anew with the delays.
LONG_LIFE_SECONDS = 60.0
#: Starts in a row that did not come up, after which we give up.
MAX_FAILURES = 5
#: The first child that has ended hides the others (waitid shows one): look again after so long.
LOOK_AGAIN_SECONDS = 0.5
#: How long killed processes may take to be gone when we give up.
KILL_SECONDS = 10.0
#: The largest packet, and the descriptors that one may carry.
PACKET_BYTES = 65_536
PACKET_DESCRIPTORS = 16
PR_SET_CHILD_SUBREAPER = 36
#: Packets wait.
BELL = signal.SIGUSR1
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Keeper:
    """One state machine: `run` it."""

    def __init__(self, command: list[str], ready_fd: int | None, *, kill_jobs: bool) -> None:
        self._command = command
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
        due = [time for time in (self._start_due, self._reap_due) if time is not None]
        timeout = max(0.0, min(due) - time.monotonic()) * 1000 if due else None
        ready = dict(poll.poll(timeout))
        if self._wake in ready:
            self._take_signals(os.read(self._wake, 4096))
        if self._link is not None and self._link.fileno() in ready:
            self._talk()
        if self._pidfd in ready:
            self._server_ended()

    # --- the server ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.set_inheritable(True)
        command = [*self._command, "--kept", str(theirs.fileno())]
        if self._ready_fd is not None:
            command += ["--ready-fd", str(self._ready_fd)]
        # It raises its limit itself, and gives the one that we had to its processes.
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
        try:
            self._server = os.posix_spawn(command[0], command, os.environ)
            self._pidfd = os.pidfd_open(self._server)
        except OSError as error:
            ours.close()
            self._failed(f"the server cannot be started: {error.strerror}")
            return
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1], self._limits[1]))
            theirs.close()
        self._link = ours
        self._answers.clear()
        self._is_up = False
        self._leaders.clear()
        self._started_at = time.monotonic()

    def _server_ended(self) -> None:
        if self._link is not None:
            self._talk()  # what it handed over before it died is kept
        _, status = os.waitpid(self._server, 0)
        os.close(self._pidfd)
        self._hang_up()
        pid, self._server, self._pidfd = self._server, 0, -1
        code = os.waitstatus_to_exitcode(status)
        if self._stopping or (code >= 0 and not self._was_up):
            # On purpose, or it never served and has said why.
            self._end(128 - code if code < 0 else code, clean=code >= 0)
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._failed(f"the server, pid {pid}, {how}")

    def _failed(self, what: str) -> None:
        """Start it again, later each time; or not, if it does not come up."""
        lived = time.monotonic() - self._started_at
        self._failures = 0 if self._is_up else self._failures + 1
        self._short_lives = 1 if lived > LONG_LIFE_SECONDS else self._short_lives + 1
        self._is_up = False
        self._reap_due = None
        if self._failures >= MAX_FAILURES:
            _log(f"{what}; given up: it did not come up {self._failures} times in a row")
            self._end(1, clean=False)
            return
        delay = DELAYS[min(self._short_lives, len(DELAYS)) - 1]
        _log(f"{what}; starting it again" + (f" in {delay:g} s" if delay else ""))
        self._restarts += 1
        self._start_due = time.monotonic() + delay

    def _end(self, code: int, *, clean: bool) -> None:
        self._exit_code = code
        if not clean:
            if self._kill_jobs:
                _end_children()
            for path, _ in self._kept.values():
                if path:
                    _remove(path)

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

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
            os.kill(self._server, signal.SIGINT if told[0] == signal.SIGINT else signal.SIGTERM)
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
            if self._is_hung_up():
                return
            os.waitpid(ended.si_pid, 0)

    def _is_hung_up(self) -> bool:
        """Whether the server is dying, and this child may be one of its leaders, inherited a moment ago.

        The kernel closes a dying process's files before it gives its children away, and makes it a zombie only
        afterwards: a line that is open now says that what we saw before was no child of the server.
        """
        if self._link is None:
            return True
        poll = select.poll()
        poll.register(self._link, 0)
        return bool(poll.poll(0))

    # --- what the server says --------------------------------------------------------------------------------

    def _talk(self) -> None:
        """Read all that is there, then answer as far as the socket takes it."""
        space = socket.CMSG_SPACE(PACKET_DESCRIPTORS * array.array("i").itemsize)
        while self._link is not None:
            try:
                packet, extra, _, _ = self._link.recvmsg(PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                break
            except ConnectionResetError:
                # It died with an answer unread. The kernel tells that first, once; what it had said is still there.
                continue
            except ConnectionError:
                packet, extra = b"", []
            if not packet:
                # Its pidfd tells the rest. One that closed its end and runs on cannot be helped: it ends.
                self._hang_up()
                return
            descriptors = array.array("i")
            for _, _, data in extra:
                descriptors.frombytes(data)
            verb, *arguments = marshal.loads(packet)
            self._obey(verb, arguments, list(descriptors))
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
                self._answer((None, self._born, self._restarts))
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
            case "STOP", []:
                self._stopping = True
            case _:
                _log(f"the server said {verb} {arguments}, which means nothing here")

    def _drop(self, key: str) -> None:
        _, fds = self._kept.pop(key, ("", []))
        for fd in fds:
            os.close(fd)

    def _answer(self, message: tuple[str | int | float | None, ...] | None, fds: list[int] | None = None) -> None:
        self._answers.append((marshal.dumps(message, 2), fds or []))


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


def _end_children() -> None:
    """Kill everything below us: what a killed child leaves behind becomes our child, until there is none."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
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


def _remove(path: str) -> None:
    if os.path.isdir(path):
        import shutil

        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def _log(text: str) -> None:
    now = time.time()
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    line = f"{moment},{int(now * 1000) % 1000:03} WARNING holdfast.keeper {text}\n"
    try:
        os.write(2, line.encode())
    except OSError:
        return  # whoever read the log is gone


def main(arguments: list[str]) -> int:
    """Keep the server that the arguments name."""
    ready, orphaned_jobs, *command = arguments
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        _log("the kernel has no child subreaper: processes will not survive their server")
    ready_fd = None if ready == "-" else int(ready)
    return Keeper(command, ready_fd, kill_jobs=orphaned_jobs == "kill").run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
