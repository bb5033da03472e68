"""Sandboxes in which no command may stay: each call is one, output is polled for, a lost reply loses nothing."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.client.sandbox import Sandbox
from holdfast.errors import ConnectionLost, HandshakeFailed, TimeoutError
from holdfast.sandboxes import polling
from holdfast.sandboxes.polling import ends_in
from holdfast.sandboxes.target import CommandSandbox
from holdfast.testing.sandbox_suite import TIMEOUTS
from holdfast.types import CommandEnded, CommandSpec, OutputChunk, ReadResult
from tests.support.servers import PATIENCE_SECONDS, running_server

#: Runs the command to its end; the reply of every third one is lost on the way back.
LOSES_REPLIES = """#!/bin/sh
count=$(cat "$0.count" 2>/dev/null || echo 0)
echo $((count + 1)) > "$0.count"

if [ $((count % 3)) = 2 ]; then "$@" >/dev/null; echo "the line broke" >&2; exit 4; fi
exec "$@"
"""


@pytest.fixture
def prefix(tmp_path: Path) -> Iterator[list[str]]:
    """A sandbox that is this machine with a server of its own."""
    with running_server() as server:
        yield ["env", f"HOLDFAST_DIRECTORY={server.directory}"]


@asynccontextmanager
async def polled(prefix: list[str], tmp_path: Path) -> AsyncIterator[Sandbox]:
    location = CommandSandbox(prefix, channel=False, poll_interval=0.01, directory=str(tmp_path))
    async with holdfast.connect(location) as box:
        yield box


async def test_a_command_its_output_and_its_exit(prefix: list[str], tmp_path: Path) -> None:
    async with polled(prefix, tmp_path) as box:
        result = await box.exec(["sh", "-c", "cat; echo err >&2; exit 3"], input=b"in\0\xff")
        assert (result.stdout_bytes, result.stderr_bytes, result.returncode) == (b"in\0\xff", b"err\n", 3)
        killed = await box.exec(["sh", "-c", "kill -9 $$"])
        assert killed.returncode == 137
        # A child that goes on printing does not delay the exit event.
        talking = await box.exec(["sh", "-c", "yes & exit 7"], timeout=60)
        assert talking.returncode == 7
        for timeout in TIMEOUTS:
            with pytest.raises(TimeoutError) as late:
                await box.exec(["sh", "-c", "echo so far; sleep 1000"], timeout=timeout, timeout_retry=False)
            if late.value.stdout:
                break
        assert late.value.stdout == "so far\n"


async def test_a_stream_and_its_events(prefix: list[str], tmp_path: Path) -> None:
    async with polled(prefix, tmp_path) as box:
        printed = b"".join(b"%d\n" % n for n in range(400_000))
        result = await box.exec(["seq", "0", "399999"])
        assert hashlib.sha256(result.stdout_bytes).digest() == hashlib.sha256(printed).digest()
        options = holdfast.ExecRemoteOptions(stdin_open=True, poll_interval=0.02)
        process = box.exec_remote(["sh", "-c", "while read line; do echo got $line; done; exit 5"], options)
        await process.write_stdin("one\n")
        assert await anext(process) == holdfast.StdoutChunk("got one\n")
        await process.close_stdin()
        assert await anext(process) == holdfast.Completed(5, "got one\n", "")


@pytest.fixture
def patient_prefix() -> Iterator[list[str]]:
    """Little is kept, each poll takes a part of it, and no reader is ever given up: one that is not read hangs."""
    settings = {"retained_output_bytes_per_process": 2**21, "reader_stall_seconds": 3600.0}
    with running_server(settings=settings) as server:
        yield ["env", f"HOLDFAST_DIRECTORY={server.directory}"]


#: More than is kept, before the first poll.
AMOUNT = 6_000_000
FLOOD = f"yes 0123456789abcde | head -c {AMOUNT}"
FLOOD_HASH = hashlib.sha256(b"0123456789abcde\n" * (AMOUNT // 16)).hexdigest()


async def test_a_process_is_held_back_for_polls(patient_prefix: list[str], tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), polled(patient_prefix, tmp_path) as box:
        digest, lost = hashlib.sha256(), 0
        async for event in box.exec_remote(["sh", "-c", FLOOD]):
            if isinstance(event, holdfast.StdoutChunk):
                digest.update(event.data.encode())
            elif isinstance(event, holdfast.Completed):
                lost = event.lost_bytes
    assert (digest.hexdigest(), lost) == (FLOOD_HASH, 0)


@pytest.mark.parametrize("live", [False, True])
async def test_a_command_in_a_shell_is_held_back_for_polls(
    patient_prefix: list[str], tmp_path: Path, live: bool
) -> None:
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        polled(patient_prefix, tmp_path) as box,
        await box.shell() as shell,
    ):
        if live:
            chunks = [event async for event in shell.stream(FLOOD) if isinstance(event, OutputChunk)]
            printed = b"".join(chunk.data for chunk in chunks)
        else:
            printed = (await shell.run(FLOOD)).stdout_bytes
    assert hashlib.sha256(printed).hexdigest() == FLOOD_HASH


async def test_output_that_was_polled_does_not_come_again_with_the_reply(
    prefix: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "REPLY_SECONDS", 0.0)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with polled(prefix, tmp_path) as box, await box.shell() as shell:
        spec = CommandSpec("c", f"echo first; read x <{fifo}; echo last")
        stream = box.api.run_in_shell(shell.id, spec)
        seen = [await anext(stream)]
        # The command ends once its first line was polled for; then all of its output comes with the reply.
        await asyncio.to_thread(fifo.write_text, "\n")
        seen += [event async for event in stream]
    printed = [(event.offset, event.data) for event in seen if isinstance(event, OutputChunk)]
    assert printed == [(0, b"first\n"), (6, b"last\n")]
    assert isinstance(seen[-1], CommandEnded)


async def test_a_shell_keeps_its_state(prefix: list[str], tmp_path: Path) -> None:
    async with polled(prefix, tmp_path) as box, await box.shell() as shell:
        await shell.run(f"cd {tmp_path}; word=hello")
        result = await shell.run("echo $word; head -c 200000 /dev/zero; pwd >&2; (exit 4)")
        assert (len(result.stdout_bytes), result.stderr, result.exit_code) == (200_006, f"{tmp_path}\n", 4)
        seen = [event async for event in shell.stream("echo live")]
        assert [event.data for event in seen if isinstance(event, OutputChunk)] == [b"live\n"]
        assert isinstance(seen[-1], CommandEnded)


async def test_a_directory_is_watched(prefix: list[str], tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    watched.mkdir()
    async with polled(prefix, tmp_path) as box, box.watch(watched) as events:
        for name in ("a", "b"):
            (watched / name).mkdir()
            assert (await anext(events)).name == name


async def test_what_is_done_is_done_once_though_replies_are_lost(prefix: list[str], tmp_path: Path) -> None:
    script = tmp_path / "loses"
    script.write_text(LOSES_REPLIES)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    async with polled(prefix, tmp_path) as box:
        await box.exec(["true"])  # it is put in without losses
    async with polled([str(script), *prefix], tmp_path) as box:
        process = await box.start(["sh", "-c", "cat; exit 3"], stdin="open")
        for n in range(10):
            await process.write(b"%d\n" % n)
        await process.close_stdin()
        chunks = [event async for event in process.output() if isinstance(event, OutputChunk)]
        assert b"".join(chunk.data for chunk in chunks) == b"".join(b"%d\n" % n for n in range(10))
        assert (await process.wait()).exit_code == 3
        async with await box.shell() as shell:
            for n in range(5):
                assert (await shell.run("count=$((count+1)); echo $count")).stdout == f"{n + 1}\n"
    assert int((tmp_path / "loses.count").read_text()) > 30


async def test_a_sandbox_that_does_not_answer(tmp_path: Path) -> None:
    location = CommandSandbox(["sh", "-c", "echo 'no such sandbox' >&2; exit 1"], channel=False, name="box")
    with pytest.raises(ConnectionLost, match="box: no such sandbox"):
        async with holdfast.connect(location, reconnect_deadline=0.3):
            pass


@pytest.mark.parametrize("reply", ['{"id":4711,"result":{}}', "no reply", '{"id":1,"result":"\\ud800"}'])
async def test_a_sandbox_whose_reply_is_none_fails_the_call(tmp_path: Path, reply: str) -> None:
    (tmp_path / "reply").write_text(reply)
    location = CommandSandbox(["sh", "-c", f"cat {tmp_path}/reply"], channel=False, name="box")
    with pytest.raises(HandshakeFailed, match=r"^box: "):
        async with holdfast.connect(location):
            pass


@pytest.mark.parametrize(
    ("seqs", "next_seq", "exited", "closed", "reported", "ends"),
    [
        ((1, 2), 3, False, False, False, (None, None)),
        ((1, 2), 4, True, False, False, (3, None)),
        ((1, 2), 3, True, False, False, (None, None)),
        ((1, 3), 4, True, False, False, (2, None)),
        ((1, 2), 5, True, True, False, (3, 4)),
        ((1, 3), 5, True, True, False, (2, 4)),
        ((1,), 3, True, True, False, (2, None)),
        ((1, 2), 3, True, True, False, (None, None)),
        ((), 3, True, True, False, (1, 2)),
        ((), 2, True, True, True, (None, 1)),
        ((1,), 3, True, True, True, (None, 2)),
    ],
)
def test_where_the_exit_and_the_close_are(
    seqs: tuple[int, ...],
    next_seq: int,
    exited: bool,
    closed: bool,
    reported: bool,
    ends: tuple[int | None, int | None],
) -> None:
    chunks = tuple(OutputChunk("stdout", 0, b"x", seq) for seq in seqs)
    result = ReadResult(chunks, next_seq, exited, 0 if exited else None, closed)
    assert ends_in(result, 0, exit_sent=reported) == ends
