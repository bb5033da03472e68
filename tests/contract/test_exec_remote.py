"""The `exec_remote_*` methods by hand: polls, lost replies, text that is cut in the middle of a character."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UnknownProcess
from tests.contract.ways import fifo
from tests.support.servers import Conversation, is_alive


async def begin(talk: Conversation, command: str, **more: Any) -> int:
    return int((await talk.result("exec_remote_start", command=command, **more))["pid"])


async def poll(talk: Conversation, pid: int, **more: Any) -> dict[str, Any]:
    return await talk.result("exec_remote_poll", pid=pid, wait_ms=30_000, **more)


async def to_end(talk: Conversation, pid: int) -> dict[str, Any]:
    """The last reply, with the output of all."""
    stdout, stderr = "", ""
    while True:
        reply = await poll(talk, pid)
        stdout += reply.get("stdout", "")
        stderr += reply.get("stderr", "")
        if reply["state"] != "running":
            return {**reply, "stdout": stdout, "stderr": stderr}


async def test_a_job_runs_to_its_end(talk: Conversation) -> None:
    pid = await begin(talk, "echo out; echo err >&2; exit 3")
    reply = await to_end(talk, pid)
    assert (reply["state"], reply["exit_code"]) == ("completed", 3)
    assert (reply["stdout"], reply["stderr"]) == ("out\n", "err\n")


async def test_the_pid_is_the_processs_own(talk: Conversation) -> None:
    pid = await begin(talk, "echo $$")
    assert (await to_end(talk, pid))["stdout"] == f"{pid}\n"


async def test_input_environment_and_directory(talk: Conversation, tmp_path: Path) -> None:
    command = 'cat; echo "$EXTRA in $PWD with ${PATH:+a path}"'
    pid = await begin(talk, command, input="given\n", env={"EXTRA": "value"}, cwd=str(tmp_path))
    assert (await to_end(talk, pid))["stdout"] == f"given\nvalue in {tmp_path} with a path\n"


async def test_stdin_can_be_kept_open(talk: Conversation) -> None:
    pid = await begin(talk, "cat", input="first\n", stdin_open=True)
    assert (await talk.result("exec_remote_write_stdin", pid=pid, data="second\n"))["success"]
    assert (await talk.result("exec_remote_close_stdin", pid=pid))["success"]
    reply = await to_end(talk, pid)
    assert (reply["stdout"], reply["exit_code"]) == ("first\nsecond\n", 0)


async def test_a_lost_reply_is_told_again(talk: Conversation) -> None:
    pid = await begin(talk, "echo one; read x; echo two; read x", stdin_open=True)
    first = await poll(talk, pid, ack_seq=0)
    assert (first["stdout"], first["seq"], first["state"]) == ("one\n", 1, "running")
    # The reply got lost, and so did the next two: the caller still acknowledges what it had before.
    for _ in range(3):
        again = await talk.result("exec_remote_poll", pid=pid, ack_seq=0)
        assert (again["stdout"], again["seq"]) == ("one\n", 1)
    await talk.result("exec_remote_write_stdin", pid=pid, data="\n")
    second = await poll(talk, pid, ack_seq=again["seq"])
    assert second["stdout"] == "two\n"
    await talk.result("exec_remote_close_stdin", pid=pid)
    last = await poll(talk, pid, ack_seq=second["seq"])
    while last["state"] == "running":
        last = await poll(talk, pid, ack_seq=last["seq"])
    assert (last["state"], last["exit_code"], last.get("stdout", "")) == ("completed", 1, "")
    # Even the exit event may be lost, and is sent again until it is acknowledged.
    repeated = await talk.result("exec_remote_poll", pid=pid, ack_seq=last["seq"] - 1)
    assert (repeated["state"], repeated["exit_code"]) == ("completed", 1)
    with pytest.raises(UnknownProcess, match=str(pid)):
        await talk.result("exec_remote_poll", pid=pid, ack_seq=repeated["seq"])


async def test_a_character_is_not_split_between_polls(talk: Conversation, tmp_path: Path) -> None:
    with fifo(str(tmp_path), "go") as (path, fd):
        command = (
            f"printf 'caf\\303'; read x < {path}; printf '\\251 \\360\\237'; read x < {path}; printf '\\230\\200'"
        )
        pid = await begin(talk, command)
        assert (await poll(talk, pid)).get("stdout") == "caf"
        os.write(fd, b"\n")
        second = await poll(talk, pid)
        assert second.get("stdout") == "é "
        os.write(fd, b"\n")
        reply = await to_end(talk, pid)
        assert (reply["stdout"], reply["exit_code"]) == ("😀", 0)


async def test_bytes_that_are_no_text_are_replaced(talk: Conversation) -> None:
    pid = await begin(talk, "printf 'a\\377b\\0c\\303'")
    assert (await to_end(talk, pid))["stdout"] == "a\ufffdb\0c\ufffd"


async def test_a_killed_job_says_so_and_drops_its_output(talk: Conversation) -> None:
    pid = await begin(talk, "echo unread; setsid sleep 1000 & echo $!; wait")
    reply = await poll(talk, pid)
    child = int(reply["stdout"].split()[-1]) if len(reply["stdout"].split()) > 1 else None
    while child is None:
        child = int((await poll(talk, pid))["stdout"])
    assert (await talk.result("exec_remote_kill", pid=pid))["success"]
    assert not is_alive(child)
    assert not is_alive(pid)
    end = await poll(talk, pid)
    assert (end["state"], end.get("stdout", ""), end.get("exit_code")) == ("killed", "", None)
    with pytest.raises(UnknownProcess, match=str(pid)):
        await poll(talk, pid)


async def test_killing_what_has_ended_is_no_error(talk: Conversation) -> None:
    pid = await begin(talk, "exit 5")
    reply = await poll(talk, pid, ack_seq=0)
    while reply["state"] == "running":
        reply = await poll(talk, pid, ack_seq=reply["seq"])
    assert (await talk.result("exec_remote_kill", pid=pid))["success"]
    again = await talk.result("exec_remote_poll", pid=pid, ack_seq=reply["seq"] - 1)
    assert (again["state"], again["exit_code"]) == ("completed", 5)


async def test_an_unknown_pid_is_named(talk: Conversation) -> None:
    for method, more in (
        ("exec_remote_poll", {}),
        ("exec_remote_kill", {}),
        ("exec_remote_write_stdin", {"data": "x"}),
        ("exec_remote_close_stdin", {}),
    ):
        code, message = await talk.error(method, pid=999_999_999, **more)
        assert (code, "999999999" in message) == (-32002, True)


async def test_a_wrong_acknowledgement_is_refused_and_loses_nothing(talk: Conversation) -> None:
    pid = await begin(talk, "echo kept")
    code, message = await talk.error("exec_remote_poll", pid=pid, ack_seq=17)
    assert (code, "17" in message) == (-32602, True)
    assert (await to_end(talk, pid))["stdout"] == "kept\n"


async def test_much_output_comes_in_parts(talk: Conversation) -> None:
    pid = await begin(talk, "seq 1000000")
    reply = await to_end(talk, pid)
    assert reply["stdout"] == "".join(f"{i}\n" for i in range(1, 1_000_001))
