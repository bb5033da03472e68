"""`holdfast exec`: stateless calls as real processes, and a server that starts once however many of them race."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

SOURCE = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../src"))
STATUS = b'{"jsonrpc":"2.0","id":1,"method":"environment/status"}'
#: Modules that must not be loaded for a stateless call, each for the milliseconds that it costs.
TOO_SLOW = {"asyncio", "typer", "rich", "msgspec", "subprocess", "holdfast.errors", "holdfast.client"}


class Exec:
    """`holdfast exec`, with a directory and so a server of its own."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.environment = {**os.environ, "HOLDFAST_DIRECTORY": directory, "PYTHONPATH": SOURCE}
        self.argv = [sys.executable, "-m", "holdfast"]

    def send(self, request: bytes | str) -> subprocess.CompletedProcess[bytes]:
        """By argument if it is text, through stdin if it is bytes."""
        arguments = [request] if isinstance(request, str) else []
        given = b"" if isinstance(request, str) else request
        return subprocess.run(
            [*self.argv, "exec", *arguments], input=given, capture_output=True, env=self.environment, timeout=60
        )

    def call(self, method: str, **params: Any) -> Any:
        done = self.send(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}))
        assert done.returncode == 0, (done.stdout, done.stderr)
        return json.loads(done.stdout)["result"]


@pytest.fixture
def call() -> Iterator[Exec]:
    directory = tempfile.mkdtemp(prefix="hf-", dir="/tmp")
    made = Exec(directory)
    yield made
    argv = [*made.argv, "stop", "--grace", "0", "--force"]
    stopped = subprocess.run(argv, env=made.environment, capture_output=True, timeout=60)
    assert stopped.returncode in (0, 3), stopped.stderr
    shutil.rmtree(directory)


def test_racing_callers_start_one_server(call: Exec) -> None:
    argv = [*call.argv, "exec"]
    racers = [
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=call.environment)
        for _ in range(20)
    ]
    replies = [json.loads(racer.communicate(STATUS, timeout=60)[0]) for racer in racers]
    assert len({reply["result"]["pid"] for reply in replies}) == 1
    assert [racer.returncode for racer in racers] == [0] * 20


def test_the_counter_of_the_walk_through(call: Exec) -> None:
    """Start a counter, poll it, see each number once, kill it."""
    script = "i=0; while true; do echo $i; i=$((i+1)); read line; done"
    pid = call.call("exec_remote_start", command=script, stdin_open=True)["pid"]
    os.kill(pid, 0)
    seen, acknowledged = "", None
    for expected in ("0\n", "0\n1\n", "0\n1\n2\n"):
        while seen != expected:
            polled = call.call("exec_remote_poll", pid=pid, ack_seq=acknowledged, wait_ms=1_000)
            assert polled["state"] == "running"
            seen += polled.get("stdout", "")
            acknowledged = polled["seq"]
            assert expected.startswith(seen)
        call.call("exec_remote_write_stdin", pid=pid, data="\n")
    assert call.call("exec_remote_kill", pid=pid)["success"] is True
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_reply_is_printed_as_it_came_on_one_line(call: Exec) -> None:
    done = call.send('{"jsonrpc":"2.0",\n"id":"seven","method":"ping"}')
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 1
    assert json.loads(done.stdout) == {"jsonrpc": "2.0", "id": "seven", "result": {}}


def test_output_that_is_pushed_is_not_taken_for_the_reply(call: Exec) -> None:
    started = call.call("process/start", processId="p", argv=["sh", "-c", "yes | head -c 100000"])
    assert started["processId"] == "p"
    ended = call.call("process/wait", processId="p")
    assert (ended["running"], ended["exitCode"], ended["signal"]) == (False, 0, None)


@pytest.mark.parametrize(
    ("request_text", "code"),
    [
        ("{oops", -32700),
        ("[1, 2]", -32600),
        ('{"id": 1}', -32600),
        ('{"id": 1, "method": "fly"}', -32601),
        ('{"id": 1, "method": "process/read", "params": {}}', -32602),
        ('{"id": 1, "method": "process/read", "params": {"processId": "nobody"}}', -32002),
    ],
)
def test_what_is_wrong_is_answered_with_exit_code_1(call: Exec, request_text: str, code: int) -> None:
    done = call.send(request_text.encode())
    assert (done.returncode, done.stderr) == (1, b"")
    assert json.loads(done.stdout)["error"]["code"] == code


def test_a_notification_prints_nothing(call: Exec) -> None:
    done = call.send('{"jsonrpc":"2.0","method":"initialized"}')
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_large_request_and_a_large_reply(call: Exec) -> None:
    text = "x" * 1_000_000
    pid = call.call("exec_remote_start", command="cat", stdin_open=True)["pid"]
    request = {"jsonrpc": "2.0", "id": 1, "method": "exec_remote_write_stdin", "params": {"pid": pid, "data": text}}
    assert call.send(json.dumps(request).encode()).returncode == 0
    call.call("exec_remote_close_stdin", pid=pid)
    seen, acknowledged, state = 0, None, "running"
    while state == "running":
        polled = call.call("exec_remote_poll", pid=pid, ack_seq=acknowledged, wait_ms=1_000)
        state, acknowledged = polled["state"], polled["seq"]
        seen += len(polled.get("stdout", ""))
    assert seen == len(text)


def test_a_call_loads_nothing_that_is_slow(call: Exec) -> None:
    call.call("ping")
    argv = [sys.executable, "-S", "-X", "importtime", "-m", "holdfast", "exec"]
    done = subprocess.run(argv, input=STATUS, capture_output=True, env=call.environment, timeout=60)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}
    assert "holdfast.cli.support.stateless" in loaded
    assert loaded & TOO_SLOW == set()


def test_a_directory_that_is_not_ours_alone_is_refused(call: Exec) -> None:
    os.chmod(call.directory, 0o755)
    done = call.send(STATUS)
    os.chmod(call.directory, 0o700)
    assert done.returncode == 2
    assert done.stderr.startswith(b"holdfast: exec: ")
    assert call.directory.encode() in done.stderr
