"""`holdfast shell`, `attach`, `screen` and `replay` as a person uses them: on a terminal, against a real server."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast.sync
from holdfast.client.screen.asciicast import read_cast
from holdfast.client.screen.screen import Screen, emulator
from holdfast.types import TerminalSize
from tests.support.parts import needs
from tests.support.servers import (
    MARK_VARIABLE,
    PATIENCE_SECONDS,
    RunningServer,
    running_server,
    server_environment,
)

DETACH = b"\x1cd"
#: Prints the size of its terminal now and whenever it changes.
SIZES = """
import os, signal
def tell(*_): print("size %d %d" % os.get_terminal_size()[::-1], flush=True)
signal.signal(signal.SIGWINCH, tell)
tell()
while True:
    signal.pause()
"""

pytestmark = needs("bash")


class Person:
    """A person at a terminal: types keys, and sees the emulator's screen of the output."""

    def __init__(self, rows: int = 20, cols: int = 70) -> None:
        self.master, self.slave = pty.openpty()
        self.got = b""
        self._window = emulator(rows, cols)
        self.resize(rows, cols)
        self.settings = termios.tcgetattr(self.slave)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Holdfast, *arguments: str) -> subprocess.Popen[bytes]:
        """The command as a shell would start it here, so that sizes and hang-ups reach it."""
        process = command.start(
            *arguments,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._started.append(process)
        return process

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        self._window.resize(rows, cols)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    @property
    def screen(self) -> Screen:
        return self._window.screen()

    def see(self, what: str | Callable[[Screen], bool]) -> Screen:
        """Poll until it is there."""
        while not (what in self.screen.text if isinstance(what, str) else what(self.screen)):
            # A terminal has no end of file that would show that its writer has failed.
            assert select.select([self.master], [], [], PATIENCE_SECONDS)[0], self.screen.text
            self._take()
        return self.screen

    def see_all(self) -> Screen:
        """Output that is written and not read yet; for when its writer has ended."""
        while select.select([self.master], [], [], 0)[0]:
            self._take()
        return self.screen

    def _take(self) -> None:
        data = os.read(self.master, 65536)
        self.got += data
        self._window.feed(data)

    def is_as_before(self) -> bool:
        """Whether keys, mouse, colours and cursor are those of a fresh terminal."""
        drawn = self._window.restore()
        shown = self.screen
        modes = re.search(rb"\x1b\[(\?|4h|20h|\d+;\d+r|>)|\x1b=", drawn)
        return modes is None and shown.cursor_visible and termios.tcgetattr(self.slave) == self.settings

    def close(self) -> None:
        """Go away, as a window does that is closed."""
        os.close(self.master)
        os.close(self.slave)
        self._window.close()
        for process in self._started:
            process.wait(PATIENCE_SECONDS)


class Holdfast:
    """The command, with a server of its own as this machine's, and a home without a profile."""

    def __init__(self, server: RunningServer, home: Path) -> None:
        self.server = server
        # The mark is in our environment too: children here inherit it, and the final check finds them by it.
        mark = {MARK_VARIABLE: server.mark}
        more = {"HOLDFAST_DIRECTORY": server.directory, "HOME": str(home), "TERM": "xterm-256color"}
        self.environment = {**server_environment(**more), **mark}
        self.environment.pop("HOLDFAST_SANDBOX", None)
        self.argv = [sys.executable, "-m", "holdfast"]

    def __call__(self, *arguments: str, input: bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*self.argv, *arguments],
            input=input,
            capture_output=True,
            env=self.environment,
            timeout=PATIENCE_SECONDS,
            **more,
        )

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*self.argv, *arguments], env=self.environment, **{**pipes, **more})

    def json(self, *arguments: str) -> Any:
        done = self(*arguments, "--json")
        assert (done.returncode, done.stderr) == (0, b"")
        return json.loads(done.stdout)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".bash_profile").write_text("PS1='prompt> '; greeting=hello\n")
    return tmp_path


@pytest.fixture
def command(home: Path) -> Iterator[Holdfast]:
    with running_server() as server:
        yield Holdfast(server, home)


@pytest.fixture
def box(command: Holdfast) -> Iterator[holdfast.sync.Sandbox]:
    """The same server, for calls without starting a program."""
    with holdfast.sync.connect(command.server.address("unix")) as box:
        yield box


@pytest.fixture
def person() -> Iterator[Person]:
    with contextlib.closing(Person()) as person:
        yield person


@pytest.fixture
def other() -> Iterator[Person]:
    with contextlib.closing(Person()) as person:
        yield person


def detach(person: Person, process: subprocess.Popen[bytes]) -> None:
    person.type(DETACH)
    person.see("holdfast: detached; ")
    assert process.wait(PATIENCE_SECONDS) == 0


# --- shell ------------------------------------------------------------------------------------------------------


def test_a_shell_is_typed_in_and_gives_its_exit_code(command: Holdfast, person: Person, home: Path) -> None:
    process = person.start(command, "shell", "--id", "it", "--cwd", "/usr", "-e", "SHADE=dark")
    person.see("Ctrl-\\ d leaves it running")
    person.see("prompt>")
    person.type(b"echo $greeting:$PWD:$SHADE:$TERM; stty size\r")
    person.see(lambda screen: screen.lines[2:5] == ("hello:/usr:dark:xterm-256color", "20 70", "prompt>"))
    [info] = command.json("ps")
    assert (info["processId"], info["argv"], info["tty"], info["terminalState"]) == (
        "it",
        ["/bin/bash"],
        True,
        "IDLE",
    )
    [_, row] = command("ps").stdout.decode().splitlines()
    assert row.split()[2] == "idle"
    person.type(b"exit 7\r")
    assert process.wait(PATIENCE_SECONDS) == 7
    assert person.see_all().lines[4:6] == ("prompt> exit 7", "logout")
    assert person.is_as_before()


def test_the_size_is_followed(command: Holdfast, person: Person) -> None:
    process = person.start(command, "shell", "--id", "it", "--shell", "bash")
    person.see("prompt>")
    person.type(f"exec {sys.executable} -c '{SIZES}'\r".encode())
    person.see("size 20 70")
    person.resize(30, 90)
    person.see("size 30 90")
    person.type(b"\x03")
    assert process.wait(PATIENCE_SECONDS) == 130


def test_input_from_a_pipe_is_typed_and_its_end_ends_the_shell(command: Holdfast) -> None:
    done = command("shell", "--id", "it", input=b'echo $((6 * 7)); python3 -c "print(input())"\nline\n')
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\r\n" in done.stdout
    assert re.search(rb"\x1b\[\?2004l\r42\r\nline\r\n", done.stdout)
    assert done.stdout.count(b"echo") == 1, "it was typed at the prompt"
    assert command("shell", input=b"exit 3\n").returncode == 3
    assert command("wait", "it").returncode == 0
    assert command.json("ps") == []


def test_a_reader_that_leaves_ends_the_shell(command: Holdfast, box: holdfast.sync.Sandbox) -> None:
    process = command.start("shell", "--id", "it", stdin=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"echo ready-$((1+1))\n")
    while b"ready-2" not in process.stdout.readline():
        pass
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"echo unread\n")
    assert process.wait(PATIENCE_SECONDS) == 141
    process.stdin.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert box.open_terminal("it").describe().state == "CLOSED"


def test_what_cannot_be_opened_is_named(command: Holdfast) -> None:
    for arguments, code, named in [
        (["--shell", "no-such-shell"], 127, b"no-such-shell"),
        (["--cwd", "/no-such-directory"], 125, b"/no-such-directory"),
        (["--user", "no-such-user"], 125, b"no-such-user"),
        (["--sandbox", "unix:/no-such-socket"], 125, b"/no-such-socket"),
        (["--env", "=x"], 125, b"'=x'"),
    ]:
        done = command("shell", *arguments)
        assert (done.returncode, done.stdout) == (code, b"")
        assert done.stderr.startswith(b"holdfast: ")
        assert named in done.stderr


def test_a_shell_without_marks(command: Holdfast, box: holdfast.sync.Sandbox, person: Person) -> None:
    process = person.start(command, "shell", "--no-marks", "--id", "it")
    person.see("prompt>")
    status = box.open_terminal("it").describe()
    assert (status.integration, status.state) == ("", "RUNNING")
    assert command("ps").stdout.decode().splitlines()[1].split()[2] == "running"
    person.type(b"exit\r")
    assert process.wait(PATIENCE_SECONDS) == 0


def test_elsewhere_has_the_sandboxs_environment_and_our_kind_of_terminal(command: Holdfast, person: Person) -> None:
    command.environment |= {"TERM": "vt220", "COLOUR": "blue"}
    address = command.server.address("unix")
    process = person.start(command, "shell", "--sandbox", address, "-e", f"HOME={command.environment['HOME']}")
    person.see("prompt>")
    person.type(b"echo [$COLOUR] $TERM $PWD; exit 4\r")
    assert process.wait(PATIENCE_SECONDS) == 4
    assert f"[] vt220 {command.server.directory}" in person.see_all().text


# --- detach and attach ------------------------------------------------------------------------------------------


def test_what_was_left_is_restored(command: Holdfast, person: Person, other: Person) -> None:
    process = person.start(command, "shell", "--id", "it")
    person.see("prompt>")
    person.type(b"clear; x=kept; printf '\\e[31mred\\e[0m w\\xc3\\xafde \\xe6\\xbc\\xa2\\n'; seq 5\r")
    person.see(lambda screen: screen.lines[5:7] == ("5", "prompt>"))
    person.type(b"half a line")
    left = person.see("half a line")
    detach(person, process)
    assert "`holdfast attach it` reattaches" in person.screen.text
    assert person.is_as_before()
    process = other.start(command, "attach", "it")
    shown = other.see(lambda screen: screen.cursor == left.cursor)
    assert shown == left
    assert re.search(rb"\x1b\[[0-9;]*(31|38;5;1)mred", other.got)
    other.type(b"\x15echo got:$x; exit 5\r")
    other.see("got:kept")
    assert process.wait(PATIENCE_SECONDS) == 5
    assert other.is_as_before()
    # Of one that is over there is the last screen, and its code.
    process = person.start(command, "attach", "it")
    assert process.wait(PATIENCE_SECONDS) == 5
    assert "got:kept" in person.see_all().text


@needs("vim")
def test_a_full_screen_program_is_left_and_found_again(
    command: Holdfast, person: Person, other: Person, home: Path
) -> None:
    (home / "text").write_text("".join(f"line {number}\n" for number in range(1, 100)))
    process = person.start(command, "shell", "--id", "it", "--cwd", str(home))
    person.see("prompt>")
    person.type(b"vim -u NONE -N -i NONE -c 'set mouse=a ruler' text\r")
    person.see("line 19")
    person.type(b"10Gdd")
    left = person.see(lambda screen: "line 10" not in screen.lines and "10,1" in screen.text and screen.alternate)
    assert not person.is_as_before()
    detach(person, process)
    assert not person.screen.alternate
    assert person.is_as_before()
    process = other.start(command, "attach", "it")
    shown = other.see(
        lambda screen: screen.alternate and screen.cursor == left.cursor and screen.lines == left.lines
    )
    assert shown.lines[9] == "line 11"
    # The screen below it is there, too.
    other.type(b":q!\r")
    other.see(lambda screen: not screen.alternate and screen.text.endswith("prompt>"))
    assert "prompt> vim -u NONE" in other.screen.text
    detach(other, process)
    assert other.is_as_before()


def test_a_window_of_another_size_wins(command: Holdfast, person: Person, other: Person) -> None:
    process = person.start(command, "shell", "--id", "it")
    person.see("prompt>")
    person.type(f"{sys.executable} -c '{SIZES}'\r".encode())
    person.see("size 20 70")
    detach(person, process)
    other.resize(25, 100)
    process = other.start(command, "attach", "it")
    other.see("size 25 100")
    other.resize(26, 101)
    other.see("size 26 101")
    detach(other, process)


def test_two_are_attached_at_once(command: Holdfast, person: Person, other: Person) -> None:
    one = person.start(command, "shell", "--id", "it")
    person.see("prompt>")
    two = other.start(command, "attach", "it")
    other.see("prompt>")
    other.type(b"echo from-$((1+1))\r")
    other.see("from-2")
    person.see("from-2")
    person.type(b"echo and-$((1+2)); exit 6\r")
    other.see("and-3")
    assert one.wait(PATIENCE_SECONDS) == two.wait(PATIENCE_SECONDS) == 6


def test_read_only_passes_on_neither_keys_nor_size(
    command: Holdfast, box: holdfast.sync.Sandbox, person: Person, other: Person
) -> None:
    process = person.start(command, "shell", "--id", "it")
    person.see("prompt>")
    other.resize(10, 40)
    looking = other.start(command, "attach", "--read-only", "it")
    other.see("prompt>")
    other.type(b"echo typed\r")
    other.resize(11, 41)
    person.type(b"echo seen-$((1+1))\r")
    other.see("seen-2")
    other.type(b"\x03")
    note = "detached; it keeps running (it has 20 rows and 70 columns, this terminal 10 and 40: not all of it"
    # A line of the screen has no spaces at its end.
    other.see(lambda screen: note.replace(" ", "") in "".join(screen.lines).replace(" ", ""))
    assert looking.wait(PATIENCE_SECONDS) == 0
    assert other.is_as_before()
    assert "typed" not in box.open_terminal("it").screen().text
    assert box.open_terminal("it").size == TerminalSize(20, 70)
    looking = other.start(command, "attach", "--read-only", "it")
    other.see(lambda screen: screen.text.endswith("seen-2\nprompt>"))
    detach(other, looking)
    person.type(b"exit\r")
    assert process.wait(PATIENCE_SECONDS) == 0


def test_a_hangup_leaves_it_running(command: Holdfast, box: holdfast.sync.Sandbox) -> None:
    with contextlib.closing(Person()) as person:
        process = person.start(command, "shell", "--id", "it")
        person.see("prompt>")
    assert process.returncode is not None
    assert box.open_terminal("it").run("echo here", PATIENCE_SECONDS).output == "here\n"


def test_attach_in_a_pipe_streams_what_is_kept(command: Holdfast, box: holdfast.sync.Sandbox) -> None:
    box.terminal(["sh", "-c", "echo one; read x; echo two:$x; exit 9"], id="it")
    done = command("attach", "it", input=b"go\n")
    assert (done.returncode, done.stdout) == (9, b"one\r\ngo\r\ntwo:go\r\n")
    assert done.stderr == b""


def test_who_is_too_slow_sees_the_screen_and_not_a_hole(home: Path, person: Person) -> None:
    with running_server(settings={"retained_output_bytes_per_process": 200_000}) as server:
        command = Holdfast(server, home)
        process = person.start(command, "shell", "--id", "it")
        person.see("prompt>")
        person.type(b"seq 500000\r")
        with holdfast.sync.connect(server.address("unix")) as box:
            # The person's terminal is not read until all of it was printed.
            terminal = box.open_terminal("it")
            while terminal.wait_until_idle(PATIENCE_SECONDS).last_exit_code is None:
                pass
            person.see("500000\nprompt>")
            assert person.screen == terminal.screen()
            person.type(b"exit\r")
            assert process.wait(PATIENCE_SECONDS) == 0
            assert len(person.got) < 3_000_000


# --- screen -----------------------------------------------------------------------------------------------------


def test_the_screen_as_text_and_as_json(command: Holdfast, box: holdfast.sync.Sandbox) -> None:
    with box.terminal("bash", id="it", rows=6, cols=40, env={"HOME": command.environment["HOME"]}) as terminal:
        terminal.run("printf '\\e]2;a title\\a'; seq 3", PATIENCE_SECONDS)
        done = command("screen", "it")
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.decode().splitlines()[1:] == ["1", "2", "3", "prompt>"]
        reported = command.json("screen", "it")
        assert reported["lines"][1:] == ["1", "2", "3", "prompt>", ""]
        assert (reported["terminalId"], reported["rows"], reported["cols"]) == ("it", 6, 40)
        assert reported["cursor"] == {"row": 4, "col": 8, "visible": True}
        assert (reported["title"], reported["alternate"]) == ("a title", False)
        assert (reported["state"], reported["prompt"], reported["awaitingInput"]) == ("IDLE", "prompt> ", True)
        assert reported["lastExitCode"] == 0
        terminal.send("read -s secret\n")
        while terminal.wait_until_awaiting_input(PATIENCE_SECONDS).state != "BUSY":
            pass
        reported = command.json("screen", "it")
        assert (reported["state"], reported["echo"]) == ("BUSY", False)
        assert command("screen", "it", "--sandbox", command.server.address("unix")).returncode == 0


def test_the_screen_of_a_process_with_and_without_a_terminal(command: Holdfast, box: holdfast.sync.Sandbox) -> None:
    process = box.start(["sh", "-c", "printf 'one\\ntwo\\e[1;1Hh'; exit 3"], id="it", tty=TerminalSize(5, 20))
    process.wait(PATIENCE_SECONDS)
    assert command("screen", "it").stdout == b"hne\ntwo\n"
    reported = command.json("screen", "it")
    assert (reported["rows"], reported["cols"], reported["state"], reported["exitCode"]) == (5, 20, "CLOSED", 3)
    box.start(["true"], id="plain")
    for name in ("plain", "nobody"):
        done = command("screen", name)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.startswith(b"holdfast: ")
        assert f"'{name}'".encode() in done.stderr


# --- replay -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cast(tmp_path: Path) -> Path:
    """A recording with pauses in which a person can press keys: no test waits for their end."""
    file = tmp_path / "recorded.cast"
    events = [[0.0, "o", "one\r\n"], [300.0, "o", "two\r\n"], [600.0, "i", "x"], [601.0, "o", "three\r\n"]]
    header = {"version": 2, "width": 70, "height": 20, "title": "a test"}
    file.write_text("\n".join(json.dumps(line) for line in [header, *events, [2000.0, "o", "four\r\n"]]) + "\n")
    return file


def test_a_saved_recording_prints_the_same_bytes(
    command: Holdfast, box: holdfast.sync.Sandbox, tmp_path: Path, person: Person
) -> None:
    script = "printf '\\e[31mred\\e[0m w\\303\\257de\\n'; stty size; read x; echo got:$x; exit 2"
    terminal = box.terminal(["sh", "-c", script], id="it", rows=20, cols=70, record_input=True)
    with terminal.output() as output:
        seen = b""
        while b"20 70\r\n" not in seen:
            seen += next(output)
    terminal.send("word\n")
    terminal.wait(PATIENCE_SECONDS)
    printed = command("logs", "it").stdout
    assert printed.endswith(b"got:word\r\n")
    file = tmp_path / "it.cast"
    assert command("replay", "it", "--save", str(file)).stdout == b""
    played = command("replay", str(file), "--speed", "100")
    assert (played.returncode, played.stdout, played.stderr) == (0, printed, b"")
    assert command("replay", "-", "--speed", "100", input=file.read_bytes()).stdout == printed
    assert command("replay", "it", "--seek", "1000").stdout == printed
    assert command("replay", "it", "--save", "-").stdout == file.read_bytes()
    typed = command("replay", "it", "--save", "-", "--input").stdout.decode()
    assert [event.data for event in read_cast(typed.splitlines()).events if event.code == "i"] == [b"word\n"]
    reported = command.json("replay", "it")
    assert (reported["rows"], reported["cols"], reported["outputBytes"]) == (20, 70, len(printed))
    assert reported["duration"] >= 0
    assert reported["events"] > 0
    process = person.start(command, "replay", "--speed", "100", str(file))
    assert process.wait(PATIENCE_SECONDS) == 0
    assert person.see_all().lines[:4] == ("red wïde", "20 70", "word", "got:word")
    assert person.is_as_before()


@needs("asciinema")
def test_asciinema_reads_what_was_saved(
    command: Holdfast, box: holdfast.sync.Sandbox, tmp_path: Path, person: Person
) -> None:
    box.terminal(["printf", "one\\ntwo\\303\\251\\n"], id="it").wait(PATIENCE_SECONDS)
    command("replay", "it", "--save", str(tmp_path / "it.cast"))
    command.argv = ["asciinema"]
    process = person.start(command, "cat", str(tmp_path / "it.cast"))
    person.see("one\ntwoé")
    assert process.wait(PATIENCE_SECONDS) == 0
    assert person.got.replace(b"\r", b"") == b"one\ntwo\xc3\xa9\n"


def test_keys_pause_step_seek_and_leave(command: Holdfast, person: Person, cast: Path) -> None:
    process = person.start(command, "replay", str(cast))
    person.see("one")
    person.type(b" ")
    person.see(lambda screen: screen.title.startswith("paused at "))
    person.type(b".")
    person.see("one\ntwo")
    person.type(b"+")
    person.see(lambda screen: screen.title == "paused at 300.0 s, speed 2")
    person.type(b".")
    person.see("two\nthree")
    person.see(lambda screen: screen.title == "paused at 601.0 s, speed 2")
    # An answer of the terminal to a question in the recording is no key.
    person.type(b"\x1b[?62;q\x1b]11;rgb:q\x07-\x1b[D")
    person.see(lambda screen: screen.title == "paused at 596.0 s, speed 1")
    assert person.screen.lines[:3] == ("one", "two", "")
    person.type(b"\x1b[C")
    person.see("two\nthree")
    person.type(b"q")
    assert process.wait(PATIENCE_SECONDS) == 0
    assert "four" not in person.see_all().text
    assert person.is_as_before()


def test_pauses_are_cut_and_the_beginning_is_skipped(command: Holdfast, cast: Path) -> None:
    assert command("replay", str(cast), "--idle-limit", "0").stdout == b"one\r\ntwo\r\nthree\r\nfour\r\n"
    assert command("replay", str(cast), "--seek", "3000").stdout == b"one\r\ntwo\r\nthree\r\nfour\r\n"
    process = command.start("replay", str(cast), "--seek", "601")
    assert process.stdout is not None
    assert process.stdout.read(17) == b"one\r\ntwo\r\nthree\r\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130


def test_ctrl_c_leaves_and_puts_the_terminal_back(command: Holdfast, person: Person, tmp_path: Path) -> None:
    file = tmp_path / "full.cast"
    shown = "\x1b[?1049h\x1b[?25l\x1b[?1000h\x1b[?2004h\x1b[31mfull"
    file.write_text(
        f'{{"version": 2, "width": 100, "height": 20}}\n{json.dumps([0, "o", shown])}\n[900, "o", "no"]\n'
    )
    process = person.start(command, "replay", str(file))
    person.see("full")
    assert b"this terminal 20 and 70: not all of it can be shown" in person.got
    assert not person.is_as_before()
    person.type(b"\x03")
    assert process.wait(PATIENCE_SECONDS) == 130
    assert not person.see_all().alternate
    assert person.is_as_before()


@pytest.mark.parametrize(
    ("arguments", "text", "named"),
    [
        ([], None, "no-such.cast: no such file, and no terminal's id"),
        ([], "", "line 1"),
        ([], "hello\n", "line 1"),
        ([], '{"version": 1, "width": 80, "height": 24}\n', "version 1"),
        ([], '{"version": 2, "width": 80, "height": 24}\n[0, "o", "a"]\n[1, "o"]\n', "line 3"),
        (["--json"], '{"version": 2, "width": 80, "height": 24}\n\x00\xff\n', "line 2"),
        (["--speed", "0"], '{"version": 2, "width": 80, "height": 24}\n', "--speed 0"),
        (["--save", "copy"], '{"version": 2, "width": 80, "height": 24}\n', "--save copy"),
        (["--input"], '{"version": 2, "width": 80, "height": 24}\n', "--input"),
    ],
)
def test_what_cannot_be_played_is_named(
    command: Holdfast, tmp_path: Path, arguments: list[str], text: str | None, named: str
) -> None:
    if text is not None:
        (tmp_path / "no-such.cast").write_bytes(text.encode("latin-1"))
    done = command("replay", "no-such.cast", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert named in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
