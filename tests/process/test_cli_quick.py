"""`run`, `ps`, `logs`, `wait` and `kill` where a server runs: they start fast, and do what the full verbs do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.__main__ import main
from holdfast.cli import VERBS
from holdfast.cli.verbs.process import quick
from tests.support.signalling import send_signal

SOURCE = str(Path(__file__).parents[2] / "src")
#: Modules that take longer to import than a call takes.
TOO_SLOW = {"asyncio", "typer", "rich", "msgspec", "subprocess", "holdfast.errors", "holdfast.client.sandbox"}
#: An option that `quick` leaves to the full verb.
FULL = ("--grace", "5")
#: Announces itself, prints a line for each INT, and goes on.
STUBBORN = """
import os, signal
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"interrupted\\n"))
print("ready", flush=True)
while True:
    signal.pause()
"""


class Command:
    """The `holdfast` command, with a server that runs."""

    def __init__(self, directory: str) -> None:
        self.environment = {**os.environ, "HOLDFAST_DIRECTORY": directory, "PYTHONPATH": SOURCE}
        self.environment.pop("HOLDFAST_SANDBOX", None)
        self.argv = (sys.executable, "-m", "holdfast")

    def __call__(self, *arguments: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
        if "input" not in more:
            more.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run(
            [*self.argv, *arguments], capture_output=True, env=self.environment, timeout=60, **more
        )

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*self.argv, *arguments], env=self.environment, **{**pipes, **more})

    def modules(self, *arguments: str) -> set[str]:
        """The modules that the interpreter imports for this call."""
        done = subprocess.run(
            [sys.executable, "-S", "-X", "importtime", "-m", "holdfast", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self.environment,
            timeout=60,
        )
        return {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}


@pytest.fixture(scope="module")
def holdfast() -> Iterator[Command]:
    directory = tempfile.mkdtemp(prefix="hf-", dir="/tmp")
    command = Command(directory)
    assert command("run", "--", "true").returncode == 0
    yield command
    assert command("stop", "--grace", "0", "--force").returncode == 0
    shutil.rmtree(directory)


def test_every_quick_option_is_one_of_the_full_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(quick.VERBS) == {name for name, verb in VERBS.items() if verb.quick}
    for verb in quick.VERBS:
        main([verb, "--help"])
        text = capsys.readouterr().out
        for option in quick._OPTIONS[verb]:
            assert option in text, f"{verb} {option}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--", "sh", "-c", "echo out; echo err >&2"),
        ("run", "--detach", "--id", "fast", "--", "true"),
        ("wait", "fast"),
        ("logs", "fast"),
        ("kill", "fast"),
        ("ps",),
        ("ps", "--all", "--json"),
    ],
)
def test_a_call_loads_nothing_that_is_slow(holdfast: Command, arguments: tuple[str, ...]) -> None:
    if arguments[0] in ("wait", "logs", "kill"):
        # Fails if the process is there already, and is of no interest then.
        holdfast("run", "--detach", "--id", "fast", "--", "true")
    loaded = holdfast.modules(*arguments)
    assert "holdfast.cli.verbs.process.quick" in loaded
    assert loaded & TOO_SLOW == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["sh", "-c", "echo out; echo err >&2; exit 3"],
        ["sh", "-c", "kill -KILL $$"],
        ["sh", "-c", "head -c 700000 /dev/zero | tr '\\0' x; echo end >&2"],  # handed over in the middle
        ["no-such-command"],
        ["/etc/passwd"],
        ["--cwd", "/no-such-directory", "true"],
        ["--env", "A=b", "-e", "C=d", "--", "sh", "-c", "echo $A$C"],
        ["--env", "NOT_SET_ANYWHERE", "true"],
        ["--", "printf", "%s|", "-x", "--", "\udcff"],  # bytes that are no UTF-8
        ["--no-stdin", "cat"],
    ],
)
def test_run_does_what_the_full_verb_does(holdfast: Command, arguments: list[str]) -> None:
    short, full = holdfast("run", *arguments), holdfast("run", *FULL, *arguments)
    assert (short.returncode, short.stdout, short.stderr) == (full.returncode, full.stdout, full.stderr)


@pytest.mark.parametrize("data", [b"", b"some\0\xff", b"x" * 300_000])
def test_input_arrives_from_a_pipe_and_from_a_file(holdfast: Command, data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_bytes(data)
    assert holdfast("run", "cat", input=data).stdout == data
    with file.open("rb") as stdin:
        assert holdfast("run", "cat", stdin=stdin).stdout == data


def test_input_that_comes_after_output(holdfast: Command) -> None:
    with holdfast.start("run", "sh", "-c", "echo ready; read x; echo got:$x", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdin.write(b"late\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"got:late\n"
        assert process.communicate(timeout=60)[0] == b""
        assert process.returncode == 0


def test_the_first_interrupt_reaches_the_command_and_the_second_kills_it(holdfast: Command) -> None:
    with holdfast.start("run", sys.executable, "-c", STUBBORN) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"interrupted\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == b""
        assert process.returncode == 137


def test_a_reader_that_closes_our_stdout_ends_the_command(holdfast: Command) -> None:
    with holdfast.start(
        "run", "sh", "-c", "echo one; read x; echo two; exec sleep 1000", stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"one\n"
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(timeout=60) == 141


def test_a_command_outlives_a_server_that_is_killed(holdfast: Command) -> None:
    """The connection breaks in the middle; the full verb reconnects and goes on behind the last byte."""
    with holdfast.start("run", "sh", "-c", "echo one; read x; echo two; exit 5", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"one\n"
        status = json.loads(holdfast("status", "--json").stdout)
        send_signal(status["pid"], signal.SIGKILL)
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.stdout.read() == b"two\n"
        assert process.wait(timeout=60) == 5


def test_logs_wait_kill_and_ps_report_what_the_full_verbs_report(holdfast: Command) -> None:
    started = holdfast(
        "run", "--detach", "--id", "job", "--", "sh", "-c", "echo out; echo err >&2; exec sleep 1000"
    )
    assert started.stdout == b"job\n"
    waiting = holdfast("wait", "job", "--timeout", "0")
    assert (waiting.returncode, waiting.stderr) == (124, b"holdfast: job still runs after 0 s\n")
    # Polled by the full verb, which can wait for output.
    with holdfast.start("logs", "--follow", "job") as follow:
        assert follow.stdout is not None
        assert follow.stderr is not None
        assert (follow.stdout.readline(), follow.stderr.readline()) == (b"out\n", b"err\n")
        logs = holdfast("logs", "job")
        assert (logs.stdout, logs.stderr) == (b"out\n", b"err\n")
        assert holdfast("logs", "--stderr", "job").stdout == b""
        (info,) = [each for each in json.loads(holdfast("ps", "--json").stdout) if each["processId"] == "job"]
        assert info["running"]
        assert b"exec sleep 1000" in holdfast("ps").stdout
        assert holdfast("kill", "--signal", "TERM", "job").stdout == b"job\n"
        assert holdfast("wait", "job").returncode == 143
        assert follow.communicate(timeout=60) == (b"", b"")
        assert json.loads(holdfast("kill", "--json", "job").stdout) == {"processId": "job", "wasRunning": False}
        assert json.loads(holdfast("wait", "--json", "job").stdout)["signal"] == "SIGTERM"
        unknown = holdfast("kill", "nosuch")
        assert (unknown.returncode, unknown.stdout) == (1, b"")
        assert b"nosuch" in unknown.stderr
