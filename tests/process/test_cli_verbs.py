"""The verbs that people type, as real processes against a real server of their own."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SOURCE = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../src"))
#: Announces itself, prints a line for each INT, and goes on.
STUBBORN = """
import os, signal
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"interrupted\\n"))
print("ready", flush=True)
while True:
    signal.pause()
"""
#: Prints the size of its terminal now and whenever it changes.
SIZES = """
import os, signal
def tell(*_): os.write(1, b"size %d %d\\n" % os.get_terminal_size()[::-1])
signal.signal(signal.SIGWINCH, tell)
tell()
while True:
    signal.pause()
"""


class Holdfast:
    """The command, with a directory and so a server of its own."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.environment = {**os.environ, "HOLDFAST_DIRECTORY": directory, "PYTHONPATH": SOURCE}
        self.environment.pop("HOLDFAST_SANDBOX", None)
        self.argv = [sys.executable, "-m", "holdfast"]

    def __call__(self, *arguments: str, input: bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*self.argv, *arguments], input=input, capture_output=True, env=self.environment, timeout=60, **more
        )

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*self.argv, *arguments], env=self.environment, **{**pipes, **more})

    def json(self, *arguments: str) -> Any:
        done = self(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@contextmanager
def own_holdfast() -> Iterator[Holdfast]:
    directory = tempfile.mkdtemp(prefix="hf-", dir="/tmp")
    command = Holdfast(directory)
    yield command
    stopped = command("stop", "--grace", "0", "--force")
    assert stopped.returncode in (0, 3), stopped.stderr
    shutil.rmtree(directory)


@pytest.fixture
def holdfast() -> Iterator[Holdfast]:
    with own_holdfast() as command:
        yield command


@pytest.fixture(scope="module")
def shared() -> Iterator[Holdfast]:
    """For tests that leave nothing running and do not use the server."""
    with own_holdfast() as command:
        yield command


@pytest.fixture
def screen() -> Iterator[tuple[int, int]]:
    """A terminal of 40 rows and 120 columns: its master and its slave side."""
    master, slave = pty.openpty()
    set_size(slave, 40, 120)
    yield master, slave
    os.close(master)
    os.close(slave)


def set_size(fd: int, rows: int, cols: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def read_until(fd: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        # A terminal has no end of file that would show that its writer has failed.
        assert select.select([fd], [], [], 60)[0], seen
        data = os.read(fd, 4096)
        assert data, seen
        seen += data
    return seen


# --- run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["true"], 0, b""),
        (["sh", "-c", "exit 7"], 7, b""),
        (["sh", "-c", "kill -TERM $$"], 143, b""),
        (["sh", "-c", "kill -KILL $$"], 137, b""),
        (["no-such-command"], 127, b"no-such-command"),
        (["/etc/passwd"], 126, b"/etc/passwd"),
        (["--cwd", "/no-such-directory", "true"], 125, b"/no-such-directory"),
        (["--user", "no-such-user", "true"], 125, b"no-such-user"),
        (["--sandbox", "unix:/no-such-socket", "true"], 125, b"/no-such-socket"),
        (["--sandbox", "elsewhere", "true"], 125, b"elsewhere"),
        (["--timeout", "0.2", "--", "sleep", "1000"], 124, b"timed out after 0.2 s"),
    ],
)
def test_exit_codes(shared: Holdfast, arguments: list[str], code: int, complaint: bytes) -> None:
    done = shared("run", *arguments)
    assert (done.returncode, done.stdout) == (code, b""), done.stderr
    if complaint:
        assert done.stderr.startswith(b"holdfast: ")
        assert complaint in done.stderr
        assert b"Traceback" not in done.stderr
    else:
        assert done.stderr == b""


def test_bytes_pass_unchanged_in_and_out(shared: Holdfast) -> None:
    blob = os.urandom(1_000_000)
    done = shared("run", "--", "sh", "-c", "tee /dev/stderr", input=blob)
    assert done.returncode == 0
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(blob).digest()
    assert hashlib.sha256(done.stderr).digest() == hashlib.sha256(blob).digest()


def test_stdin_from_a_file_and_from_nothing(shared: Holdfast, tmp_path: Any) -> None:
    (tmp_path / "in").write_bytes(b"from a file\n")
    with open(tmp_path / "in", "rb") as file:
        process = shared.start("run", "cat", stdin=file)
        assert process.communicate(timeout=60)[0] == b"from a file\n"
    process = shared.start("run", "cat", stdin=subprocess.DEVNULL)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 0


def test_output_comes_as_it_is_printed_and_input_as_it_is_typed(shared: Holdfast) -> None:
    process = shared.start("run", "cat", stdin=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    for line in (b"one\n", b"two\n"):
        process.stdin.write(line)
        assert process.stdout.read(4) == line
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()


def test_here_means_our_directory_and_environment(holdfast: Holdfast, tmp_path: Any) -> None:
    holdfast.environment["COLOUR"] = "blue"
    done = holdfast("run", "-e", "SHADE=dark", "--", "sh", "-c", 'echo "$PWD $SHADE $COLOUR"', cwd=tmp_path)
    assert done.stdout.decode() == f"{tmp_path} dark blue\n"


def test_options_of_the_command_belong_to_the_command(shared: Holdfast) -> None:
    assert shared("run", "echo", "--json", "-n", "--").stdout == b"--json -n --\n"


def test_a_limit_reaches_the_command(shared: Holdfast) -> None:
    assert shared("run", "--limit", "open_files=77", "--", "sh", "-c", "ulimit -n").stdout == b"77\n"


def test_it_ends_with_the_command_though_a_child_holds_the_output(holdfast: Holdfast) -> None:
    done = holdfast("run", "--id", "parent", "--", "sh", "-c", "sleep 1000 & echo done")
    assert (done.returncode, done.stdout) == (0, b"done\n")
    [info] = holdfast.json("ps")
    assert (info["processId"], info["running"], info["closed"]) == ("parent", False, False)


def test_the_first_interrupt_goes_to_the_command(holdfast: Holdfast) -> None:
    process = holdfast.start("run", "--", "sh", "-c", "echo ready; exec sleep 1000")
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_the_second_interrupt_kills_everything(holdfast: Holdfast) -> None:
    process = holdfast.start("run", "--", sys.executable, "-c", STUBBORN)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"interrupted\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 137
    assert holdfast.json("ps") == []


def test_a_reader_that_leaves_ends_the_command(holdfast: Holdfast) -> None:
    process = holdfast.start("run", "yes")
    assert process.stdout is not None
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert holdfast.json("ps") == []


def test_a_reader_that_stalls_keeps_neither_ctrl_c_nor_the_time_limit_from_ending_it(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    # More than a pipe holds, less than is kept for a reader: beyond that a lossless command waits, and its exit.
    printed = tmp_path / "printed"
    os.mkfifo(printed)
    much = ("sh", "-c", 'yes | head -c 4000000; [ -z "$1" ] || : > "$1"; exec sleep 1000', "sh")
    interrupted = holdfast.start("run", "--id", "flood", "--", *much, str(printed))
    limited = holdfast.start("run", "--timeout", "0.5", "--", *much)
    assert interrupted.stdout is not None
    assert interrupted.stdout.read(2) == b"y\n"
    assert printed.read_bytes() == b""  # opened by both: all is printed, far more than our pipe takes
    for _ in range(2):
        interrupted.send_signal(signal.SIGINT)
        assert holdfast("wait", "flood").returncode == 130
    # The log was not read on meanwhile.
    assert interrupted.wait(60) == 137
    assert limited.wait(60) == 124
    for process in (interrupted, limited):
        process.communicate()


def test_descriptors_that_are_closed_do_not_get_in_the_way(holdfast: Holdfast) -> None:
    command = " ".join([*holdfast.argv, "run", "--id", "job", "echo", "hi", "<&-", ">&-"])
    assert subprocess.run(["sh", "-c", command], env=holdfast.environment, timeout=60).returncode == 0
    assert holdfast("logs", "job").stdout == b"hi\n"


def test_a_reader_of_a_table_may_leave(holdfast: Holdfast) -> None:
    process = holdfast.start("doctor")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (141, b"")
    process.stderr.close()


def test_a_hangup_leaves_the_command_running(holdfast: Holdfast) -> None:
    process = holdfast.start("run", "--id", "it", "--", "sh", "-c", "echo ready; exec sleep 1000")
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert b"holdfast attach it" in err
    assert [info["running"] for info in holdfast.json("ps")] == [True]


# --- on a terminal --------------------------------------------------------------------------------------------


def test_a_terminal_has_our_size_and_follows_it(holdfast: Holdfast, screen: tuple[int, int]) -> None:
    master, slave = screen
    argv = ("run", "--tty", "--id", "it", "--", sys.executable, "-c", SIZES)
    process = holdfast.start(*argv, stdin=slave, stdout=slave, stderr=slave)
    read_until(master, b"size 40 120\r\n")
    set_size(slave, 50, 100)
    process.send_signal(signal.SIGWINCH)
    read_until(master, b"size 50 100\r\n")
    os.write(master, b"\x03")
    assert process.wait(60) == 130


def test_the_detach_key_leaves_it_running_and_attach_comes_back(
    holdfast: Holdfast, screen: tuple[int, int]
) -> None:
    master, slave = screen
    before = termios.tcgetattr(slave)
    on_screen = {"stdin": slave, "stdout": slave, "stderr": slave}
    script = "echo first; read x; echo got:$x"
    process = holdfast.start("run", "--tty", "--id", "it", "--", "sh", "-c", script, **on_screen)
    read_until(master, b"first\r\n")
    os.write(master, b"\x1cd")
    read_until(master, b"detached")
    assert process.wait(60) == 0
    assert termios.tcgetattr(slave) == before, "the terminal was put back"
    assert [info["running"] for info in holdfast.json("ps")] == [True]
    process = holdfast.start("attach", "it", **on_screen)
    read_until(master, b"first\r\n")
    os.write(master, b"hello\r")
    read_until(master, b"got:hello\r\n")
    assert process.wait(60) == 0


# --- what was started before ------------------------------------------------------------------------------------


def test_detached_then_looked_at_waited_for_and_read(holdfast: Holdfast) -> None:
    script = "read x; printf 'out\\0\\377'; echo err >&2; exit 5"
    done = holdfast("run", "--detach", "--stdin", "--id", "job", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, b"job\n")
    [info] = holdfast.json("ps")
    assert (info["processId"], info["running"], info["argv"][:2]) == ("job", True, ["sh", "-c"])
    assert holdfast("wait", "job", "--timeout", "0").returncode == 124
    # The end of a pipe does not close the process's stdin; the line is enough for it.
    attached = holdfast("attach", "job", input=b"go\n")
    assert (attached.returncode, attached.stdout, attached.stderr) == (5, b"out\0\xff", b"err\n")
    waited = holdfast("wait", "job", "--json")
    assert waited.returncode == 5
    assert json.loads(waited.stdout)["exitCode"] == 5
    logs = holdfast("logs", "job")
    assert (logs.returncode, logs.stdout, logs.stderr) == (0, b"out\0\xff", b"err\n")
    assert holdfast("logs", "--stdout", "job").stderr == b""
    assert holdfast("logs", "--stderr", "job").stdout == b""
    assert holdfast("logs", "-f", "job").stdout == b"out\0\xff"
    assert holdfast.json("ps") == []
    assert [info["exitCode"] for info in holdfast.json("ps", "--all")] == [5]


def test_logs_as_json_can_be_continued(holdfast: Holdfast) -> None:
    holdfast("run", "--id", "job", "--", "sh", "-c", "echo one; echo two >&2")
    lines = [json.loads(line) for line in holdfast("logs", "-f", "--json", "job").stdout.splitlines()]
    assert [line["event"] for line in lines] == ["output", "output", "exited", "closed"]
    assert {line["stream"]: line["chunk"] for line in lines[:2]} == {"stdout": "b25lCg==", "stderr": "dHdvCg=="}
    later = holdfast("logs", "-f", "--json", "--since", str(lines[1]["seq"]), "job").stdout.splitlines()
    assert [json.loads(line) for line in later] == lines[2:]


def test_logs_follow_until_the_end(holdfast: Holdfast) -> None:
    holdfast("run", "--detach", "--stdin", "--id", "job", "--", "sh", "-c", "echo one; read x; echo two")
    process = holdfast.start("logs", "--follow", "job")
    assert process.stdout is not None
    assert process.stdout.readline() == b"one\n"
    assert holdfast("attach", "job", input=b"\n").returncode == 0
    assert process.communicate(timeout=60)[0] == b"two\n"
    assert process.returncode == 0


def test_attach_read_only_neither_types_nor_interrupts(holdfast: Holdfast) -> None:
    holdfast("run", "--detach", "--stdin", "--id", "job", "--", "sh", "-c", "echo one; exec cat")
    process = holdfast.start("attach", "--read-only", "job", stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"one\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(b"typed\n", timeout=60)
    assert (process.returncode, out) == (0, b"")
    assert b"job keeps running" in err
    assert [info["running"] for info in holdfast.json("ps")] == [True]
    assert holdfast("logs", "job").stdout == b"one\n"


def test_kill(holdfast: Holdfast) -> None:
    for name in ("a", "b", "c"):
        holdfast("run", "--detach", "--id", name, "--", "sleep", "1000")
    assert holdfast("kill", "a").stdout == b"a\n"
    assert holdfast("wait", "a").returncode == 143
    assert holdfast("kill", "--signal", "QUIT", "b").returncode == 0
    assert holdfast("wait", "b").returncode == 131
    assert holdfast("kill", "--force", "--all").stdout == b"c\n"
    assert holdfast("wait", "c").returncode == 137
    again = holdfast("kill", "a", "--json")
    assert (again.returncode, json.loads(again.stdout)) == (0, {"processId": "a", "wasRunning": False})
    unknown = holdfast("kill", "nobody")
    assert unknown.returncode == 1
    assert b"nobody" in unknown.stderr
    wrong = holdfast("kill", "--signal", "WAVE", "a")
    assert wrong.returncode == 1
    assert b"WAVE" in wrong.stderr


@pytest.mark.parametrize("verb", ["wait", "logs", "attach"])
def test_an_unknown_process_is_named(shared: Holdfast, verb: str) -> None:
    done = shared(verb, "nobody")
    assert done.returncode == (1 if verb == "logs" else 125)
    assert done.stderr.startswith(b"holdfast: ")
    assert b"nobody" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_taken_id_is_named(holdfast: Holdfast) -> None:
    holdfast("run", "--detach", "--id", "job", "--", "sleep", "1000")
    done = holdfast("run", "--id", "job", "true")
    assert done.returncode == 125
    assert b"job" in done.stderr


def test_ps_in_a_pipe_is_plain_columns(holdfast: Holdfast) -> None:
    holdfast("run", "--detach", "--id", "job", "--", "sh", "-c", "read x; exec sleep 1000")
    header, row = holdfast("ps", "--all").stdout.decode().splitlines()
    assert header.split() == ["ID", "PID", "STATE", "AGE", "EXIT", "OUTPUT", "COMMAND"]
    assert row.startswith("job")
    assert row.endswith("sh -c 'read x; exec sleep 1000'")
    assert "\x1b" not in row


def test_ps_watch_shows_a_live_table(holdfast: Holdfast, screen: tuple[int, int]) -> None:
    master, slave = screen
    holdfast("run", "--detach", "--id", "job", "--", "sleep", "1000")
    holdfast.environment["TERM"] = "xterm"
    process = holdfast.start("ps", "--watch", stdin=slave, stdout=slave, stderr=slave)
    shown = read_until(master, b"sleep 1000")
    assert b"\x1b[" in shown
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


# --- the server -------------------------------------------------------------------------------------------------


def test_status_and_ps_start_nothing(holdfast: Holdfast) -> None:
    assert holdfast("ps", "--json").stdout == b"[]\n"
    done = holdfast("status")
    assert done.returncode == 3
    assert holdfast.directory.encode() in done.stderr
    assert json.loads(holdfast("status", "--json").stdout) == {"running": False}
    assert holdfast("stop").returncode == 3
    assert os.listdir(holdfast.directory) == []


def test_status_tells_and_stop_leaves_nobody_behind(holdfast: Holdfast) -> None:
    holdfast("run", "--detach", "--id", "job", "--", "sleep", "1000")
    status = holdfast.json("status")
    assert (status["running"], status["processesRunning"]) == (True, 1)
    [info] = holdfast.json("ps")
    assert f"pid          {status['pid']}\n" in holdfast("status").stdout.decode()
    # A pidfd reports the end itself; the pid stays for as long as its parent does not reap it.
    watched = [os.pidfd_open(pid) for pid in (status["pid"], info["pid"])]
    stopped = holdfast("stop", "--grace", "1")
    listed = b"KIND     ID   COMMAND\nprocess  job  sleep 1000\n"
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, listed, b"")
    assert select.select(watched, [], [], 0)[0] == watched
    for fd in watched:
        os.close(fd)
    assert holdfast("status").returncode == 3


def test_stop_refuses_while_another_client_is_connected(holdfast: Holdfast) -> None:
    """It lists what would end and names the client; with --force it ends both."""
    with holdfast.start("run", "--id", "job", "--", "sh", "-c", "echo ready; exec sleep 1000") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        refused = holdfast("stop")
        assert refused.returncode == 1
        assert b"process  job  sh -c 'echo ready; exec sleep 1000'\n" in refused.stdout
        client = f"holdfast-cli (pid {other.pid}, 1 process)"
        assert f"another client is connected to the server, pid {holdfast.json('status')['pid']}: {client}" in (
            refused.stderr.decode()
        )
        assert b"--force" in refused.stderr
        status = holdfast.json("status")
        assert status["clients"] == [{"name": "holdfast-cli", "pid": other.pid, "processes": 1, "shells": 0}]
        reported = json.loads(holdfast("stop", "--json").stdout)
        assert (reported["stopped"], reported["clients"]) == (False, status["clients"])
        assert [each["id"] for each in reported["ends"]] == ["job"]
        assert holdfast("stop", "--force").returncode == 0
        other.communicate(timeout=60)
    assert holdfast("status").returncode == 3


def test_status_and_stop_are_about_the_sandbox_that_is_named(holdfast: Holdfast) -> None:
    """As the other verbs take it: by the option, and by the environment."""
    holdfast("run", "--detach", "--id", "here", "--", "sleep", "1000")
    read, write = os.pipe()
    path = f"{holdfast.directory}/other.sock"
    other = holdfast.start("serve", "--listen", f"unix:{path}", "--ready-fd", str(write), pass_fds=(write,))
    os.close(write)
    with open(read) as ready:
        pid = json.loads(ready.readline())["pid"]
    assert holdfast.json("status", "--sandbox", f"unix:{path}")["pid"] == pid
    local = holdfast.json("status")["pid"]
    assert local != pid
    holdfast.environment["HOLDFAST_SANDBOX"] = f"unix:{path}"
    assert holdfast.json("status")["pid"] == pid
    assert json.loads(holdfast("stop", "--json").stdout) == {"pid": pid, "stopped": True}
    other.communicate(timeout=60)
    assert holdfast("stop").returncode == 3
    del holdfast.environment["HOLDFAST_SANDBOX"]
    assert holdfast.json("status")["pid"] == local


@pytest.mark.parametrize("address", ["inprocess", "bwrap:/tmp", "stdio:cat"])
@pytest.mark.parametrize("verb", ["status", "stop"])
def test_an_address_without_a_server_of_its_own_is_refused(shared: Holdfast, verb: str, address: str) -> None:
    done = shared(verb, "--sandbox", address)
    assert done.returncode == 1
    assert f"{address}: has no server of its own" in done.stderr.decode()


def test_a_server_at_a_websocket_is_looked_at_and_stopped(holdfast: Holdfast) -> None:
    read, write = os.pipe()
    argv = ("serve", "--listen", "ws://127.0.0.1:0", "--no-auth", "--ready-fd", str(write))
    server = holdfast.start(*argv, pass_fds=(write,))
    os.close(write)
    with open(read) as ready:
        reported = json.loads(ready.readline())
    (address,) = reported["listening"]
    assert holdfast.json("status", "--sandbox", address)["pid"] == reported["pid"]
    with holdfast.start("run", "--sandbox", address, "--", "sh", "-c", "echo ready; exec sleep 1000") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        refused = holdfast("stop", "--sandbox", address)
        assert (refused.returncode, b"another client is connected" in refused.stderr) == (1, True)
        other.send_signal(signal.SIGINT)
        other.communicate(timeout=60)
    stopped = json.loads(holdfast("stop", "--sandbox", address, "--json").stdout)
    assert stopped == {"pid": reported["pid"], "stopped": True}
    server.communicate(timeout=60)


def test_stop_ends_a_server_that_does_not_understand_us(holdfast: Holdfast) -> None:
    """It refuses the handshake, as one of another version might."""
    script = """
import json, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
connection, _ = listener.accept()
request = json.loads(connection.makefile().readline())
reply = {"id": request["id"], "error": {"code": -32603, "message": "unknown"}}
connection.sendall(json.dumps(reply).encode() + b"\\n")
listener.accept()
"""
    path = f"{holdfast.directory}/server.sock"
    server = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    done = holdfast("stop", "--json")
    assert json.loads(done.stdout) == {"pid": server.pid, "stopped": True}
    server.communicate()
    assert server.returncode == -signal.SIGTERM


def test_serve_tells_when_it_listens_and_ends_on_term(holdfast: Holdfast) -> None:
    read, write = os.pipe()
    path = f"{holdfast.directory}/own.sock"
    argv = ("serve", "--listen", f"unix:{path}", "--ready-fd", str(write), "--max-connections", "9")
    process = holdfast.start(*argv, pass_fds=(write,))
    os.close(write)
    with open(read, "rb") as file:
        ready = json.loads(file.read())
    assert ready["keeper"] == process.pid
    assert ready["listening"] == [f"unix:{path}"]
    assert holdfast("run", "--sandbox", f"unix:{path}", "echo", "hi").stdout == b"hi\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_the_client_of_a_server_elsewhere_adds_to_its_environment(holdfast: Holdfast) -> None:
    holdfast("run", "true")
    holdfast.environment["COLOUR"] = "blue"
    address = f"unix:{holdfast.directory}/server.sock"
    script = 'echo "$PWD [$COLOUR] $SHADE ${PATH:+path}"'
    done = holdfast("run", "--sandbox", address, "-e", "SHADE=dark", "--", "sh", "-c", script)
    assert done.stdout == b"/ [] dark path\n"


def test_doctor(holdfast: Holdfast) -> None:
    findings = holdfast.json("doctor")
    assert {"name": "Python", "state": "ok"}.items() <= findings[0].items()
    lines = holdfast("doctor").stdout.decode().splitlines()
    assert lines[0].split() == ["WHAT", "STATE", "FOUND", "MEANS"]
    assert len(lines) == len(findings) + 1
