"""`holdfast shell` and its sub-verbs, as real processes against a real server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import holdfast.sync
from holdfast.__main__ import main
from holdfast.cli.verbs.terminal.shell import SUB_VERBS, row
from holdfast.types import ShellStatus
from tests.support.parts import needs
from tests.support.servers import (
    MARK_VARIABLE,
    PATIENCE_SECONDS,
    RunningServer,
    running_server,
    server_environment,
)

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
NOTE = b"holdfast: "


class Holdfast:
    """The command, with a server of its own as this machine's."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        # The mark is in our environment too: children here inherit it, and the final check finds them by it.
        mark = {MARK_VARIABLE: server.mark}
        self.environment = {**server_environment(HOLDFAST_DIRECTORY=server.directory), **mark}
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

    def open(self, *arguments: str, id: str = "s") -> str:
        done = self("shell", "open", "--id", id, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{id}\n".encode(), b"")
        return id

    def reported(self, *arguments: str, input: bytes = b"") -> tuple[int, bytes, bytes]:
        done = self("shell", *arguments, input=input)
        return done.returncode, done.stdout, done.stderr

    def json(self, *arguments: str) -> Any:
        done = self("shell", *arguments, "--json")
        assert done.stderr == b""
        return json.loads(done.stdout)


@pytest.fixture
def command() -> Iterator[Holdfast]:
    with running_server() as server:
        yield Holdfast(server)


@pytest.fixture
def box(command: Holdfast) -> Iterator[holdfast.sync.Sandbox]:
    """The same server, for calls without starting a program."""
    with holdfast.sync.connect(command.server.address("unix")) as box:
        yield box


@pytest.fixture
def screen() -> Iterator[tuple[int, int]]:
    """A terminal: its master and its slave side."""
    master, slave = pty.openpty()
    yield master, slave
    os.close(master)
    os.close(slave)


def read_until(fd: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        # A terminal has no end of file that would show that its writer has failed.
        assert select.select([fd], [], [], PATIENCE_SECONDS)[0], seen
        data = os.read(fd, 4096)
        assert data, seen
        seen += data
    return seen


def line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def until(holds: Callable[[ShellStatus], bool], sh: holdfast.sync.Shell) -> None:
    """No event reports a change of a shell's queue, so poll; the test's own end bounds this."""
    while not holds(sh.describe()):
        pass


# --- run --------------------------------------------------------------------------------------------------------


def test_state_stays_from_program_to_program_and_the_streams_apart(command: Holdfast, tmp_path: Path) -> None:
    command.open("--cwd", str(tmp_path))
    assert command.reported("run", "s", "x=kept; f() { return 7; }; mkdir d; cd d") == (0, b"", b"")
    printed = "echo $x; pwd; printf 'a\\0\\377' >&2; f"
    assert command.reported("run", "s", printed) == (7, f"kept\n{tmp_path}/d\n".encode(), b"a\0\xff")


def test_output_comes_as_it_is_printed(command: Holdfast, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    command.open("--cwd", str(tmp_path))
    process = command.start("shell", "run", "s", "echo one; read x < gate; echo two >&2; echo $x")
    assert line(process) == b"one\n"
    (tmp_path / "gate").write_bytes(b"three\n")
    assert process.communicate(timeout=PATIENCE_SECONDS) == (b"three\n", b"two\n")
    assert process.returncode == 0


def test_input_directory_and_variables_are_for_one_command(command: Holdfast) -> None:
    command.environment["COLOUR"] = "blue"
    command.open("--cwd", "/")
    blob = bytes(range(256)) * 1000
    assert command.reported("run", "s", "cat", "--stdin", input=blob) == (0, blob, b"")
    assert command.reported("run", "s", "cat", input=blob) == (0, b"", b"")
    options = ("--cwd", "/usr", "--env", "shade=a b", "-e", "COLOUR")
    assert command.reported("run", *options, "s", 'echo "$PWD $shade $COLOUR"') == (0, b"/usr a b blue\n", b"")
    assert command.reported("run", "s", 'echo "$PWD [$shade] $COLOUR"') == (0, b"/ [] blue\n", b"")
    code, out, err = command.reported("run", "s", "echo no", "--cwd", "/no-such-directory")
    assert (code, out) == (1, b"")
    assert b"/no-such-directory" in err


def test_json_is_one_object(command: Holdfast) -> None:
    command.open("--cwd", "/")
    done = command("shell", "run", "s", "--json", "cd /usr; echo out; printf 'e\\377' >&2; (exit 5)")
    assert (done.returncode, done.stderr) == (5, b"")
    reported = json.loads(done.stdout)
    assert reported.pop("duration") > 0
    assert reported == {
        "stdout": "out\n",
        "stderr": "e\N{REPLACEMENT CHARACTER}",
        "stderrBase64": "Zf8=",
        "truncated": False,
        "exitCode": 5,
        "cwd": "/usr",
        "timedOut": False,
        "shellRestarted": False,
        "restored": "",
        "state": "idle",
        "reason": "",
        "oom": False,
        "silent": False,
    }


def test_a_time_limit_ends_the_command_and_not_the_shell(command: Holdfast) -> None:
    command.open()
    code, out, err = command.reported("run", "s", "--timeout", "0.2", "x=kept; echo begun; sleep 1000; echo no")
    assert (code, out) == (124, b"begun\n")
    assert err.endswith(NOTE + b"timed out after 0.2 s\n")
    done = command("shell", "run", "s", "--timeout", "0.2", "--json", "sleep 1000")
    assert (done.returncode, json.loads(done.stdout)["timedOut"]) == (124, True)
    assert command.reported("run", "s", "echo $x") == (0, b"kept\n", b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_command_and_not_the_shell(command: Holdfast, number: signal.Signals) -> None:
    command.open()
    child = "trap 'echo cleaned up; exit' TERM; echo ready; while :; do sleep 0.01; done"
    process = command.start("shell", "run", "s", f"x=kept; sh -c {child!r}; echo no")
    assert line(process) == b"ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (130, b"cleaned up\n"), err
    assert NOTE not in err
    assert command.reported("run", "s", "echo $x") == (0, b"kept\n", b"")


def test_ctrl_c_with_json_prints_what_there_was(command: Holdfast, box: holdfast.sync.Sandbox) -> None:
    command.open("--cwd", "/")
    process = command.start("shell", "run", "s", "--json", "echo begun; sleep 1000")
    until(lambda status: status.state == "running", box.open_shell("s"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (130, b"")
    reported = json.loads(out)
    assert (reported["exitCode"], reported["cwd"], reported["state"]) == (130, "/", "idle")


def test_ctrl_c_takes_out_a_command_that_waits_and_leaves_the_one_that_runs(
    command: Holdfast, box: holdfast.sync.Sandbox, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "gate")
    command.open("--cwd", str(tmp_path))
    running = command.start("shell", "run", "s", "echo ready; read x < gate; echo $x")
    assert line(running) == b"ready\n"
    waiting = command.start("shell", "run", "s", "touch ran; echo no")
    until(lambda status: status.queued == 1, box.open_shell("s"))
    waiting.send_signal(signal.SIGINT)
    assert waiting.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
    assert waiting.returncode == 130
    assert box.open_shell("s").describe().queued == 0
    (tmp_path / "gate").write_bytes(b"done\n")
    assert running.communicate(timeout=PATIENCE_SECONDS) == (b"done\n", b"")
    assert running.returncode == 0
    assert not (tmp_path / "ran").exists()


def test_a_second_ctrl_c_does_not_wait() -> None:
    with running_server(settings={"interrupt_grace_seconds": 1000.0}) as server:
        command = Holdfast(server)
        command.open()
        child = "trap 'echo still here' TERM; echo ready; while :; do sleep 0.01; done"
        process = command.start("shell", "run", "s", f"sh -c {child!r}")
        assert line(process) == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert line(process) == b"still here\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 130
        assert [status["state"] for status in command.json("list")] == ["running"]
        assert command.reported("close", "s", "--grace", "0") == (0, b"s\n", b"")


def test_a_hangup_leaves_the_command_running(command: Holdfast, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    command.open("--cwd", str(tmp_path))
    process = command.start("shell", "run", "s", "echo ready; read x < gate; echo no reader")
    assert line(process) == b"ready\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGHUP
    assert [status["state"] for status in command.json("list")] == ["running"]
    (tmp_path / "gate").write_bytes(b"went on\n")
    assert command.reported("run", "s", "echo $x") == (0, b"went on\n", b"")


def test_a_reader_that_leaves_ends_the_command(command: Holdfast) -> None:
    command.open()
    process = command.start("shell", "run", "s", "x=kept; yes")
    assert line(process) == b"y\n"
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(PATIENCE_SECONDS) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert command.reported("run", "s", "echo $x") == (0, b"kept\n", b"")


@needs("bash")
def test_a_shell_that_was_restarted_is_noted(command: Holdfast) -> None:
    command.open("--shell", "bash")
    code, out, err = command.reported("run", "s", "x=kept; set -e; false")
    assert (code, out) == (1, b"")
    assert err.startswith(NOTE + b"shell 's' was restarted with its variables")
    assert command.reported("run", "s", "set +e; echo $x") == (0, b"kept\n", b"")


def test_a_shell_that_the_command_closed_is_noted_and_takes_no_more(command: Holdfast) -> None:
    command.open()
    note = NOTE + b"shell 's' is closed: exited with code 3\n"
    assert command.reported("run", "s", "echo out; exit 3") == (3, b"out\n", note)
    assert command.reported("run", "s", "true") == (125, b"", note)
    assert command.reported("list") == (0, b"ID  PID  STATE  QUEUED  CWD  COMMAND\n", b"")
    [header, reported] = command.reported("list", "--all")[1].decode().splitlines()
    assert re.fullmatch(r"s +- +closed +0 +\S+ +exited with code 3", reported)
    assert header.split() == ["ID", "PID", "STATE", "QUEUED", "CWD", "COMMAND"]
    assert command.reported("close", "s") == (0, b"", b"")


# --- open -------------------------------------------------------------------------------------------------------


def test_open_here_has_our_directory_and_environment(command: Holdfast, tmp_path: Path) -> None:
    command.environment["COLOUR"] = "blue"
    done = command("shell", "open", "--shell", "sh", "-e", "SHADE=dark", cwd=tmp_path)
    id = done.stdout.decode().strip()
    assert re.fullmatch(r"sh-[0-9a-f]+", id)
    printed = f"{tmp_path} dark blue\n".encode()
    assert command.reported("run", id, 'echo "$PWD $SHADE $COLOUR"') == (0, printed, b"")


def test_open_elsewhere_has_the_sandboxs(command: Holdfast) -> None:
    address = command.server.address("unix")
    command.environment["COLOUR"] = "blue"
    command.open("--sandbox", address, "-e", "SHADE=dark")
    reported = command.reported("run", "--sandbox", address, "s", 'echo "$PWD $SHADE [$COLOUR] ${PATH:+path}"')
    assert reported == (0, f"{command.server.directory} dark [] path\n".encode(), b"")
    command.environment["HOLDFAST_SANDBOX"] = address
    assert [status["shellId"] for status in command.json("list")] == ["s"]


def test_open_as_json_and_as_a_login_shell(command: Holdfast, tmp_path: Path) -> None:
    (tmp_path / ".profile").write_text("greeting=hello\n")
    status = command.json(
        "open", "--shell", "sh", "--login", "--cwd", "/usr", "-e", f"HOME={tmp_path}", "--id", "s"
    )
    assert (status["shellId"], status["state"], status["cwd"], status["login"]) == ("s", "idle", "/usr", True)
    assert command.reported("run", "s", "echo $greeting") == (0, b"hello\n", b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_open_as_another_user(command: Holdfast) -> None:
    # Its files are in there, and the server's own default for this directory lets every user pass through.
    os.chmod(command.server.spool, 0o711)
    command.open("--user", "nobody", "--cwd", "/")
    assert command.reported("run", "s", "id -un") == (0, b"nobody\n", b"")


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["open", "--shell", "no-such-shell"], 127, b"no-such-shell"),
        (["open", "--cwd", "/no-such-directory"], 1, b"/no-such-directory"),
        (["open", "--user", "no-such-user"], 1, b"no-such-user"),
        (["open", "--id", "taken"], 1, b"'taken'"),
        (["open", "--sandbox", "unix:/no-such-socket"], 1, b"/no-such-socket"),
        (["run", "nobody", "true"], 125, b"'nobody'"),
        (["run", "taken", "true", "--env", "a-b=c"], 125, b"'a-b'"),
        (["start", "nobody", "true"], 1, b"'nobody'"),
        (["interrupt", "nobody"], 1, b"'nobody'"),
        (["output", "nobody"], 1, b"'nobody'"),
        (["output", "-f", "nobody"], 1, b"'nobody'"),
        (["close", "nobody"], 1, b"'nobody'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_named(shared: Holdfast, arguments: list[str], code: int, named: bytes) -> None:
    done = shared("shell", *arguments)
    assert (done.returncode, done.stdout) == (code, b"")
    assert done.stderr.startswith(NOTE)
    assert named in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.fixture(scope="module")
def shared() -> Iterator[Holdfast]:
    with running_server() as server:
        shared = Holdfast(server)
        shared.open(id="taken")
        yield shared


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["fly"], 2, "'fly'"),
        (["--colour"], 125, "--colour"),
        (["run", "s"], 125, "COMMAND"),
        (["run", "s", "ls", "-l"], 125, "-l"),
        (["run", "s", "true", "--timeout", "soon"], 125, "--timeout"),
        (["run", "s", "true", "--env", "=x"], 125, "'=x'"),
        (["open", "--env", "=x"], 1, "'=x'"),
        (["close"], 2, "ID"),
    ],
)
def test_wrong_usage_is_named(
    arguments: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shell", *arguments]) == code
    reported = capsys.readouterr()
    assert reported.out == ""
    assert named in reported.err


# --- the others -------------------------------------------------------------------------------------------------


def test_start_begins_with_the_shells_state_and_is_a_process(command: Holdfast, tmp_path: Path) -> None:
    command.open("--cwd", str(tmp_path))
    command.reported("run", "s", "x=kept; f() { echo f:$x; }")
    assert command.reported("start", "s", "f; pwd; x=lost; exit 4", "--id", "job") == (0, b"job\n", b"")
    assert command("wait", "job").returncode == 4
    assert command("logs", "job").stdout.decode() == f"f:kept\n{tmp_path}\n"
    info = command.json("start", "s", "sleep 1000")
    assert info["processId"].startswith("sleep-")
    assert (info["running"], info["cwd"]) == (True, str(tmp_path))
    assert command("kill", info["processId"]).returncode == 0
    assert command.reported("run", "s", "echo $x") == (0, b"kept\n", b"")


def test_list_tells_what_runs_and_what_waits(command: Holdfast, box: holdfast.sync.Sandbox, tmp_path: Path) -> None:
    command.open("--cwd", str(tmp_path))
    command.open("--cwd", "/usr", id="other")
    running = command.start("shell", "run", "s", "echo ready\nexec sleep 1000")
    assert line(running) == b"ready\n"
    waiting = command.start("shell", "run", "s", "true")
    sh = box.open_shell("s")
    until(lambda status: status.queued == 1, sh)
    _, first, second = command.reported("list")[1].decode().splitlines()
    assert re.split("  +", first) == ["s", str(sh.pid), "running", "1", str(tmp_path), "echo ready …"]
    assert re.split("  +", second) == ["other", str(box.open_shell("other").pid), "idle", "0", "/usr", "-"]
    reported = command.json("list")
    assert [(status["shellId"], status["command"]) for status in reported] == [
        ("s", "echo ready\nexec sleep 1000"),
        ("other", None),
    ]
    assert command.reported("close", "s", "--grace", "0") == (0, b"s\n", b"")
    for process in (running, waiting):
        process.communicate(timeout=PATIENCE_SECONDS)
    assert waiting.returncode == 125


def test_long_commands_are_cut_in_the_table() -> None:
    status = ShellStatus("s", "/bin/sh", 1, "running", "/", 0.0, command="echo " + "x" * 1000)
    assert row(status)[-1] == "echo " + "x" * 55 + " …"


def test_list_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("HOLDFAST_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("HOLDFAST_SANDBOX", raising=False)
    assert main(["shell", "list", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
    assert list(tmp_path.iterdir()) == []


def test_interrupt(command: Holdfast) -> None:
    command.open()
    assert command.reported("interrupt", "s") == (0, b"", b"")
    process = command.start("shell", "run", "s", "x=kept; echo ready; sleep 1000; echo no")
    assert line(process) == b"ready\n"
    assert command.reported("interrupt", "s") == (0, b"s\n", b"")
    assert process.communicate(timeout=PATIENCE_SECONDS)[0] == b""
    assert process.returncode == 130
    assert command.json("interrupt", "s") == {"shellId": "s", "wasRunning": False}
    assert command.reported("run", "s", "echo $x") == (0, b"kept\n", b"")


def test_output_is_what_came_late(command: Holdfast, box: holdfast.sync.Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    command.open("--cwd", str(tmp_path))
    assert command.reported("output", "s") == (0, b"", b"")
    job = "while read x; do echo out:$x; echo err:$x >&2; done < gate &"
    assert command.reported("run", "s", f"{job} echo now") == (0, b"now\n", b"")
    following = command.start("shell", "output", "s", "--follow")
    with open(tmp_path / "gate", "wb", buffering=0) as gate:
        gate.write(b"one\n")
        assert line(following) == b"out:one\n"
        until(lambda status: status.stderr_bytes == 8, box.open_shell("s"))
        assert command.reported("output", "s") == (0, b"out:one\n", b"err:one\n")
        pieces = [json.loads(each) for each in command("shell", "output", "s", "--json").stdout.splitlines()]
        assert {each["stream"]: each["chunk"] for each in pieces} == {
            "stdout": "b3V0Om9uZQo=",
            "stderr": "ZXJyOm9uZQo=",
        }
        gate.write(b"two\n")
        assert line(following) == b"out:two\n"
        until(lambda status: status.stderr_bytes == 16, box.open_shell("s"))
    since = str(pieces[-1]["seq"])
    assert command.reported("output", "s", "--since", since) == (0, b"out:two\n", b"err:two\n")
    assert command.reported("close", "s") == (0, b"s\n", b"")
    assert following.communicate(timeout=PATIENCE_SECONDS) == (b"", b"err:one\nerr:two\n")
    assert following.returncode == 0
    assert command.reported("output", "s", "--since", since) == (0, b"out:two\n", b"err:two\n")


@pytest.mark.parametrize("keep", [False, True])
def test_close_ends_jobs_or_keeps_them(command: Holdfast, tmp_path: Path, keep: bool) -> None:
    for name in ("gate", "alive"):
        os.mkfifo(tmp_path / name)
    command.open("--cwd", str(tmp_path))
    command.reported("run", "s", "trap 'echo trapped > trap' EXIT; (read x < gate; echo released) > alive &")
    # Only the job holds this pipe for writing, so its end of file is the job's end.
    with open(tmp_path / "alive", "rb", buffering=0) as alive:
        assert command.reported("close", "s", *(["--keep"] if keep else [])) == (0, b"s\n", b"")
        assert (tmp_path / "trap").read_text() == "trapped\n"
        if keep:
            (tmp_path / "gate").write_bytes(b"go\n")
        assert alive.read() == (b"released\n" if keep else b"")
    assert command.json("close", "s") == {"shellId": "s", "wasOpen": False}


# --- on a terminal ----------------------------------------------------------------------------------------------


@pytest.fixture
def plain_home(command: Holdfast, tmp_path: Path) -> None:
    """No profile of the user that runs the tests."""
    (tmp_path / ".profile").write_text("PS1='prompt> '; greeting=hello\n")
    command.environment.update(HOME=str(tmp_path), TERM="dumb")


@pytest.mark.usefixtures("plain_home")
def test_the_detach_key_leaves_the_shell_and_attach_comes_back(command: Holdfast, screen: tuple[int, int]) -> None:
    master, slave = screen
    before = termios.tcgetattr(slave)
    on_screen = {"stdin": slave, "stdout": slave, "stderr": slave}
    process = command.start("shell", "--id", "it", "--cwd", "/usr", **on_screen)
    read_until(master, b"prompt> ")
    os.write(master, b"x=kept; echo $greeting:$PWD\r")
    read_until(master, b"hello:/usr\r\n")
    os.write(master, b"\x1cd")
    read_until(master, b"holdfast attach it")
    assert process.wait(PATIENCE_SECONDS) == 0
    assert termios.tcgetattr(slave) == before, "the terminal was put back"
    process = command.start("attach", "it", **on_screen)
    read_until(master, b"hello:/usr\r\nprompt> ")
    os.write(master, b"echo got:$x; exit 7\r")
    read_until(master, b"got:kept\r\n")
    assert process.wait(PATIENCE_SECONDS) == 7


@pytest.mark.usefixtures("plain_home")
def test_it_can_be_another_shell(command: Holdfast, screen: tuple[int, int]) -> None:
    master, slave = screen
    process = command.start("shell", "--shell", "sh", stdin=slave, stdout=slave, stderr=slave)
    read_until(master, b"prompt> ")
    os.write(master, b"exit 8\r")
    assert process.wait(PATIENCE_SECONDS) == 8
    done = command("shell", "--shell", "no-such-shell")
    assert done.returncode == 127
    assert b"no-such-shell" in done.stderr


# --- the page ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUB_VERBS)
def test_every_sub_verb_is_documented_with_its_options(name: str) -> None:
    parts = re.split(r"^#{1,6} +(.+)$", PAGE.read_text(), flags=re.MULTILINE)
    section = dict(zip(parts[1::2], parts[2::2], strict=True))[f"shell {name}"]
    app = typer.Typer(add_completion=False)
    app.command()(SUB_VERBS[name])
    options = [option for each in typer.main.get_command(app).params for option in each.opts]
    missing = [option for option in options if option.startswith("-") and f"`{option}" not in section]
    assert missing == []
