"""Whether real programs on a real terminal wait for input: shells, pagers, editors, loops, servers, prompts."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.launch.pidfd_signals import signal_group
from holdfast.runtime.terminal import input_wait
from holdfast.runtime.terminal.input_wait import InputState, input_state
from tests.support.parts import require

#: Between fork and exec nothing happens here that a thread of another test could have locked.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SAFETY_NET = 60
PYTHON = (sys.executable, "-I", "-S", "-c")
#: How many times an event that must not happen is checked for.
LOOKS = 25


class Program:
    """A program on a terminal of its own. Its output is read whenever we wait."""

    def __init__(self, *argv: str, stdin: int | None = None) -> None:
        self.master, peer = os.openpty()
        os.set_blocking(self.master, False)
        self.printed = b""
        termios.tcsetwinsize(self.master, (24, 80))
        environment = {"PATH": os.environ["PATH"], "TERM": "xterm", "HOME": "/nonexistent", "PS1": "prompt> "}
        self.process = subprocess.Popen(
            argv,
            stdin=peer if stdin is None else stdin,
            stdout=peer,
            stderr=peer,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        )
        os.close(peer)

    @property
    def state(self) -> InputState:
        return input_state(self.master)

    def send(self, data: bytes) -> None:
        assert os.write(self.master, data) == len(data)

    def pump(self, seconds: float) -> None:
        """Wait for output so long at most, and take it."""
        if select.select([self.master], [], [], seconds)[0]:
            with contextlib.suppress(OSError):  # EIO: no process has the terminal any more
                self.printed += os.read(self.master, 65536)

    def eventually(self, condition: Callable[[], bool], what: object = "") -> None:
        deadline = time.monotonic() + SAFETY_NET
        while not condition():
            assert time.monotonic() < deadline, (
                f"not in time: {what}; {self.state}; printed {self.printed[-500:]!r}"
            )
            self.pump(0.002)

    def wait_printed(self, text: bytes) -> None:
        self.eventually(lambda: text in self.printed, text)

    def wait_awaiting(self) -> InputState:
        """The state once it waits: to see it twice is to see what a caller would act on."""
        self.eventually(lambda: self.state.awaiting is True and self.state.awaiting is True, "awaiting")
        return self.state

    def never_awaits(self) -> None:
        for _ in range(LOOKS):
            assert self.state.awaiting is False
            self.pump(0.001)

    def end(self) -> None:
        group = os.tcgetpgrp(self.master)
        if group > 0:  # of the terminal's session, which this program leads
            signal_group(group, self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        os.close(self.master)  # and the rest get SIGHUP


Start = Callable[..., Program]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Program] = []

    def start(*argv: str, stdin: int | None = None) -> Program:
        require(argv[0])
        started.append(Program(*argv, stdin=stdin))
        return started[-1]

    yield start
    for program in started:
        program.end()


# --- programs that wait --------------------------------------------------------------------------------------

WATCH = {
    "select": "import select; select.select([0], [], [])",
    "select with a timeout": "import select; select.select([0], [], [], 1000)",
    "select of a high descriptor": "import os, select; os.dup2(0, 900); select.select([900], [], [])",
    "poll": "import select; p = select.poll(); p.register(0, select.POLLIN); p.poll()",
    "poll with a timeout": "import select; p = select.poll(); p.register(0, select.POLLIN); p.poll(1000000)",
    "epoll": "import select; e = select.epoll(); e.register(0, select.EPOLLIN); e.poll()",
    "epoll in an epoll": """
import select
inner, outer = select.epoll(), select.epoll()
inner.register(0, select.EPOLLIN)
outer.register(inner.fileno(), select.EPOLLIN)
outer.poll()
""",
    "epoll in a poll": """
import select
inner, outer = select.epoll(), select.poll()
inner.register(0, select.EPOLLIN)
outer.register(inner.fileno(), select.POLLIN)
outer.poll()
""",
    "selectors": """
import selectors, sys
s = selectors.DefaultSelector()
s.register(sys.stdin, selectors.EVENT_READ)
s.select()
""",
    "asyncio": """
import asyncio
async def main():
    asyncio.get_running_loop().add_reader(0, print)
    await asyncio.Event().wait()
asyncio.run(main())
""",
    "readv": "import os; os.readv(0, [bytearray(10)])",
    "splice": "import os; os.splice(0, os.pipe()[1], 10)",
    "a thread": """
import os, threading
threading.Thread(target=os.read, args=(0, 10)).start()
threading.Event().wait()
""",
    "/dev/tty": "open('/dev/tty').read()",
    "/dev/tty in a poll": """
import select
p, terminal = select.poll(), open('/dev/tty')
p.register(terminal, select.POLLIN)
p.poll()
""",
}


@pytest.mark.parametrize("way", WATCH)
def test_each_way_to_wait(start: Start, way: str) -> None:
    program = start(*PYTHON, WATCH[way])
    state = program.wait_awaiting()
    assert state == InputState(True, program.process.pid, echo=True, canonical=True)


LINE_READERS = {
    "cat": ("cat",),
    "bash read": ("bash", "-c", "read x; echo got $x"),
    "input": (*PYTHON, "input('name? ')"),
    "sh": ("sh", "-c", "read x; echo got $x"),
}


@pytest.mark.parametrize("name", LINE_READERS)
def test_readers_of_lines(start: Start, name: str) -> None:
    program = start(*LINE_READERS[name])
    assert program.wait_awaiting() == InputState(True, program.process.pid, echo=True, canonical=True)


PASSWORDS = {
    "bash read -s": ("bash", "-c", "read -s x; echo got $x"),
    "getpass": (*PYTHON, "import getpass; print('got', getpass.getpass())"),
}


@pytest.mark.parametrize("name", PASSWORDS)
def test_passwords(start: Start, name: str) -> None:
    program = start(*PASSWORDS[name])
    state = program.wait_awaiting()
    assert (state.pid, state.echo, state.canonical) == (program.process.pid, False, True)
    program.send(b"secret\n")
    program.wait_printed(b"got secret")


def test_a_prompt_on_the_terminal_of_a_program_whose_input_is_a_pipe(start: Start) -> None:
    reader, writer = os.pipe()
    try:
        program = start(*PYTHON, "import getpass; print('got', getpass.getpass('passphrase: '))", stdin=reader)
        state = program.wait_awaiting()
        assert state == InputState(True, program.process.pid, echo=False, canonical=True)
        program.wait_printed(b"passphrase: ")
    finally:
        os.close(reader)
        os.close(writer)


KEY_READERS = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
    "python": ("python3", "-i", "-q"),
    "node": ("node", "-i"),
    "top": ("top",),
    "less": ("less", __file__),
    "vim": ("vim", "-N", "-n", "-i", "NONE", "-u", "NONE", __file__),
    "node stdin": ("node", "-e", "process.stdin.setRawMode(true); process.stdin.on('data', () => {})"),
}


@pytest.mark.parametrize("name", KEY_READERS)
def test_readers_of_keys(start: Start, name: str) -> None:
    program = start(*KEY_READERS[name])
    # Some query the terminal in its first mode before they set their own.
    program.eventually(lambda: program.state.awaiting is True and not program.state.canonical, "awaiting keys")
    assert os.getpgid(program.state.pid or 0) == os.tcgetpgrp(program.master)


def test_a_pager_behind_a_pipe(start: Start) -> None:
    require("less")
    program = start("bash", "-c", "seq 1000 | less; true")
    state = program.wait_awaiting()
    assert state.pid not in (None, program.process.pid)
    assert Path(f"/proc/{state.pid}/comm").read_text() == "less\n"


def test_a_pipeline_waits_at_its_start(start: Start) -> None:
    program = start("bash", "--norc", "--noprofile", "-i")
    program.wait_awaiting()
    program.send(b"cat | cat\r")
    program.eventually(lambda: program.state.awaiting is True and program.state.pid != program.process.pid)
    leader = program.state.pid
    assert leader == os.tcgetpgrp(program.master)
    program.send(b"through\n")
    program.eventually(lambda: program.printed.count(b"through") == 2)
    assert program.wait_awaiting().pid == leader


def test_only_another_member_than_the_leader_waits(start: Start) -> None:
    program = start("sh", "-c", "cat; true")
    state = program.wait_awaiting()
    assert state.pid != program.process.pid
    assert Path(f"/proc/{state.pid}/comm").read_text() == "cat\n"


#: They start their program in a session of its own, which has no controlling terminal, and wait for its end.
OTHER_SESSIONS = {
    "setsid": ("setsid", "-w", "sh", "-c"),
    "su": ("su", "-s", "/bin/sh", "nobody", "-c"),
    "runuser": ("runuser", "-s", "/bin/sh", "nobody", "-c"),
}
SECRET = "stty -echo; printf ready; read x; stty echo; echo got $x"


def start_elsewhere(start: Start, name: str, script: str) -> Program:
    require(name)
    if name != "setsid" and os.geteuid() != 0:
        pytest.skip("only root becomes another user without a password")
    # Below a shell as from a prompt: `setsid` forks only if it leads its group.
    return start("bash", "-m", "-c", f"{shlex.join((*OTHER_SESSIONS[name], script))}; true")


@pytest.mark.parametrize("name", OTHER_SESSIONS)
def test_a_reader_in_another_session(start: Start, name: str) -> None:
    program = start_elsewhere(start, name, "echo ready; cat; true")
    program.wait_printed(b"ready")
    state = program.wait_awaiting()
    assert state.pid is not None
    assert Path(f"/proc/{state.pid}/comm").read_text() == "cat\n"
    assert os.getsid(state.pid) != program.process.pid
    program.send(b"a line\n")
    program.eventually(lambda: program.printed.count(b"a line") == 2)
    assert program.wait_awaiting().pid == state.pid


@pytest.mark.parametrize("name", OTHER_SESSIONS)
def test_a_password_is_read_in_another_session(start: Start, name: str) -> None:
    program = start_elsewhere(start, name, SECRET)
    program.wait_printed(b"ready")
    state = program.wait_awaiting()
    assert (state.echo, state.canonical) == (False, True)
    program.send(b"secret\n")
    program.wait_printed(b"got secret")


@pytest.mark.parametrize("name", OTHER_SESSIONS)
def test_a_busy_program_in_another_session(start: Start, name: str) -> None:
    program = start_elsewhere(start, name, "printf ready; while printf .; do sleep 0.01; done")
    program.wait_printed(b"ready")
    program.never_awaits()


def test_a_reader_in_a_session_below_another_session(start: Start) -> None:
    require("setsid")
    program = start("bash", "-m", "-c", "setsid -w setsid -w sh -c 'echo ready; setsid -w cat; true'; true")
    program.wait_printed(b"ready")
    assert Path(f"/proc/{program.wait_awaiting().pid}/comm").read_text() == "cat\n"


def test_a_kernel_that_does_not_list_children(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    contents, exists = input_wait._contents, os.path.exists

    def without_children(path: str, limit: int = 1024) -> bytes:
        if path.endswith("/children"):
            raise FileNotFoundError(path)
        return contents(path, limit)

    program = start_elsewhere(start, "setsid", "echo ready; cat; true")
    waiter = program.wait_awaiting().pid
    monkeypatch.setattr(input_wait, "_contents", without_children)
    monkeypatch.setattr(os.path, "exists", lambda path: not path.endswith("/children") and exists(path))
    assert (program.state.awaiting, program.state.pid) == (True, waiter)


def test_a_reader_behind_a_job_in_the_background_is_not_in_front(start: Start) -> None:
    require("setsid")
    program = start("bash", "-c", "set -m; { setsid -w sh -c 'echo $$; exec cat'; true; } & wait")
    program.wait_printed(b"\n")
    reader = int(program.printed)
    program.eventually(lambda: input_wait.blocked_in_read(reader) == 0, "cat reads")
    program.never_awaits()


def test_a_process_whose_first_thread_has_ended(start: Start) -> None:
    script = """
import ctypes, os, platform, threading
threading.Thread(target=lambda: os.read(0, 10)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""
    program = start(*PYTHON, script)
    stat = Path(f"/proc/{program.process.pid}/stat")
    program.eventually(lambda: b") Z " in stat.read_bytes())
    assert program.wait_awaiting().pid == program.process.pid


def test_nested_programs_and_back(start: Start) -> None:
    shell = start("bash", "--norc", "--noprofile", "-i")
    assert shell.wait_awaiting().pid == shell.process.pid
    for _ in range(3):
        shell.send(f"{sys.executable} -I -q -i\r".encode())
        shell.eventually(lambda: shell.state.awaiting is True and shell.state.pid != shell.process.pid, "python")
        shell.send(b"import time; print('sle' + 'eps'); time.sleep(1000)\r")
        shell.wait_printed(b"sleeps")
        shell.never_awaits()
        shell.send(b"\x03")
        shell.eventually(lambda: shell.state.awaiting is True, "python again")
        assert shell.state.pid != shell.process.pid
        shell.send(b"\x04")
        shell.eventually(
            lambda: shell.state.awaiting is True and shell.state.pid == shell.process.pid, "bash again"
        )
        shell.printed = b""


# --- programs that do not ------------------------------------------------------------------------------------

BUSY = {
    "sleep": ("sh", "-c", "echo ready; exec sleep 1000"),
    "sleep in a shell": ("sh", "-c", "echo ready; sleep 1000; true"),
    "a busy loop": ("bash", "-c", "echo ready; while :; do :; done"),
    "a compiler": ("sh", "-c", "echo ready; while :; do /bin/true; done"),
    "a server": (
        *PYTHON,
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print('ready', flush=True); s.accept()",
    ),
    "an asyncio server": (
        *PYTHON,
        """
import asyncio
async def main():
    async with await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0) as server:
        print("ready", flush=True)
        await server.serve_forever()
asyncio.run(main())
""",
    ),
    "a node server": ("node", "-e", "require('http').createServer().listen(0, () => console.log('ready'))"),
    "a reader of a pipe": (*PYTHON, "import os; print('ready', flush=True); os.read(os.pipe()[0], 1)"),
    "a reader of another terminal": (*PYTHON, "import os; print('ready', flush=True); os.read(os.openpty()[1], 1)"),
    "a poll for room to write": (
        *PYTHON,
        """
import os, select
r, w = os.pipe()
os.set_blocking(w, False)
while True:
    try:
        os.write(w, bytes(65536))
    except BlockingIOError:
        break
e, p = select.epoll(), select.poll()
p.register(w, select.POLLOUT)
p.register(0, select.POLLPRI)
print("ready", flush=True)
p.poll()
""",
    ),
    "a pipeline": ("bash", "-c", "echo ready; sleep 1000 | cat; true"),
    "a background reader": ("bash", "-mc", "cat & echo ready; wait; sleep 1000"),
}


@pytest.mark.parametrize("name", BUSY)
def test_busy_programs(start: Start, name: str) -> None:
    program = start(*BUSY[name])
    program.wait_printed(b"ready")
    program.never_awaits()
    assert program.state.pid == os.tcgetpgrp(program.master)
    # Typed ahead, and not read.
    program.send(b"line\n")
    program.never_awaits()


# --- input that is there -------------------------------------------------------------------------------------


def test_a_line_that_is_not_finished_is_still_waited_for(start: Start) -> None:
    program = start("cat")
    program.wait_awaiting()
    program.send(b"par")
    program.wait_printed(b"par")
    for _ in range(LOOKS):
        assert program.state.awaiting is True
    program.send(b"tial\n")
    program.eventually(lambda: program.printed.count(b"partial") == 2)
    assert program.wait_awaiting().pid == program.process.pid


def test_a_stopped_reader_does_not_wait(start: Start) -> None:
    program = start("cat")
    program.wait_awaiting()
    program.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, program.process.pid, os.WSTOPPED)
    program.never_awaits()
    program.send(b"line\n")
    program.never_awaits()
    program.process.send_signal(signal.SIGCONT)
    program.eventually(lambda: program.printed.count(b"line") == 2)
    assert program.wait_awaiting().pid == program.process.pid


def test_a_poll_that_went_on_after_a_stop_waits(start: Start) -> None:
    program = start(*PYTHON, WATCH["poll with a timeout"])
    program.wait_awaiting()
    for _ in range(2):
        program.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, program.process.pid, os.WSTOPPED)
        program.process.send_signal(signal.SIGCONT)
        assert program.wait_awaiting().pid == program.process.pid


# A futex with a timeout, on memory that would read as an array of pollfds with the terminal in it.
FUTEX = """
import ctypes, platform
words = (ctypes.c_int * 512)(*[0, 1] * 256)
timeout = (ctypes.c_long * 2)(1000, 0)
print("ready", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 202, "aarch64": 98}[platform.machine()], words, 128, 0, timeout, 0, 0)
"""


@pytest.mark.parametrize(
    "argv", [("sh", "-c", "echo ready; exec sleep 1000"), (*PYTHON, FUTEX)], ids=["sleep", "futex"]
)
def test_other_calls_that_went_on_after_a_stop_do_not(start: Start, argv: tuple[str, ...]) -> None:
    program = start(*argv)
    call = Path(f"/proc/{program.process.pid}/syscall")
    program.wait_printed(b"ready")
    waits_with_a_timeout = ("35", "115", "202", "98", "230")  # nanosleep, futex, clock_nanosleep
    program.eventually(lambda: call.read_text().split()[0] in waits_with_a_timeout, "in its call")
    program.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, program.process.pid, os.WSTOPPED)
    program.process.send_signal(signal.SIGCONT)
    program.eventually(lambda: call.read_text().split()[0] in ("219", "128"), "restart_syscall")
    program.never_awaits()


# The reader of a line prints the reply: a program that is reported to wait has printed its reply.
RACERS: dict[str, tuple[tuple[str, ...], Callable[[int], bytes], int]] = {
    "cat": (("cat",), lambda n: b"<%d>\n" % n, 5000),
    "python": ((*PYTHON, "while True: print(input(), flush=True)"), lambda n: b"<%d>\n" % n, 3000),
    "bash": (("bash", "--norc", "--noprofile", "-i"), lambda n: b"printf '<%%s>' %d\r" % n, 1000),
    "a shell's child": (("sh", "-c", "cat; true"), lambda n: b"<%d>\n" % n, 2000),
}


@pytest.mark.parametrize("name", RACERS)
def test_nobody_awaits_who_has_not_read_what_was_written(start: Start, name: str) -> None:
    argv, line, rounds = RACERS[name]
    program = start(*argv)
    program.wait_awaiting()
    if name != "bash":  # readline echoes by itself, and what we type there is not what it prints
        modes = termios.tcgetattr(program.master)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(program.master, termios.TCSANOW, modes)
    deadline = time.monotonic() + SAFETY_NET
    for number in range(rounds):
        program.pump(0)
        program.printed = b""
        program.send(line(number))
        while program.state.awaiting is not True:
            assert time.monotonic() < deadline
        # A poll of our side takes in all that was printed before, as one of the other side does.
        while select.select([program.master], [], [], 0)[0]:
            program.pump(0)
        assert b"<%d>" % number in program.printed


# --- unknown answers -----------------------------------------------------------------------------------------


def test_a_terminal_that_nobody_has(start: Start) -> None:
    program = start("true")
    program.process.wait()
    state = program.state
    assert (state.awaiting, state.pid) == (False, None)


def test_a_descriptor_that_is_no_terminal() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match="Inappropriate ioctl"):
            input_state(reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_asking_leaves_nothing_open(start: Start) -> None:
    program = start("cat")
    program.wait_awaiting()
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(10):
        assert program.state.awaiting is True
    assert sorted(os.listdir("/proc/self/fd")) == before


def ask_as_a_stranger(master: int) -> InputState:
    """The answer to a server that is not root."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            os.write(writer, repr(tuple(input_state(master))).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    input_wait, pid, echo, canonical = ast.literal_eval(answer.decode())
    return InputState(input_wait, pid, echo, canonical)


#: As a program with another user's rights (sudo): its state cannot be read without privileges.
CLOSED = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); "


def test_a_sleeper_into_whom_we_may_not_look_is_not_told(start: Start) -> None:
    program = start(*PYTHON, CLOSED + "import os; print('ready', flush=True); os.read(0, 10)")
    program.wait_printed(b"ready")
    program.eventually(lambda: b") S " in Path(f"/proc/{program.process.pid}/stat").read_bytes())
    assert ask_as_a_stranger(program.master) == InputState(None, program.process.pid, echo=True, canonical=True)
    program.send(b"unread")
    assert ask_as_a_stranger(program.master).awaiting is None  # a line that is not finished
    program.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, program.process.pid, os.WSTOPPED)
    program.send(b"\n")
    assert ask_as_a_stranger(program.master).awaiting is False


HIDDEN_READER = """
import ctypes, os
prctl = ctypes.CDLL(None).prctl
child = os.fork()
if child == 0:
    os.setsid()
    prctl(4, 0, 0, 0, 0)
    print("ready", flush=True)
    os.read(0, 10)
    os._exit(0)
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    prctl(4, 1, 0, 0, 0)
os.waitpid(child, 0)
"""


def test_a_sleeper_in_another_session_into_whom_we_may_not_look_is_not_told(start: Start) -> None:
    program = start(*PYTHON, HIDDEN_READER)
    program.wait_printed(b"ready")
    program.eventually(lambda: ask_as_a_stranger(program.master).awaiting is None, "not told")


def test_a_busy_program_into_which_we_may_not_look_does_not_wait(start: Start) -> None:
    program = start(*PYTHON, CLOSED + "print('ready', flush=True)\nwhile True: pass")
    program.wait_printed(b"ready")
    # Preempted or not, what runs does not sleep.
    assert ask_as_a_stranger(program.master) == InputState(False, program.process.pid, echo=True, canonical=True)


def test_an_unknown_machine_is_not_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    program = start("cat")
    program.wait_awaiting()
    monkeypatch.setattr("holdfast.runtime.terminal.input_wait.CALLS", {})
    assert program.state == InputState(None, program.process.pid, echo=True, canonical=True)


def test_more_threads_than_we_look_at_are_not_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    program = start("sh", "-c", "cat; true")
    waiter = program.wait_awaiting().pid
    monkeypatch.setattr("holdfast.runtime.terminal.input_wait._MOST_THREADS", 1)
    assert program.state == InputState(None, program.process.pid, echo=True, canonical=True)
    monkeypatch.setattr("holdfast.runtime.terminal.input_wait._MOST_THREADS", 2)
    assert program.state.pid == waiter


RING = """
import ctypes
libc = ctypes.CDLL(None)
ring = libc.syscall(425, 1, ctypes.create_string_buffer(120))
print("ready" if ring >= 0 else "refused", flush=True)
libc.syscall(426, ring, 0, 1, 1, None, 8)
"""


def test_who_waits_in_io_uring_is_not_told(start: Start) -> None:
    program = start(*PYTHON, RING)
    program.eventually(lambda: program.printed.endswith(b"\n"))
    if program.printed.startswith(b"refused"):
        pytest.skip("io_uring is switched off: sysctl kernel.io_uring_disabled=0")
    program.eventually(lambda: program.state.awaiting is None, "not told")
    assert program.state.pid == program.process.pid
