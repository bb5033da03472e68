"""Standard input of real processes: closed by default, in order, once for each write id, with a bound."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StdinClosed
from holdfast.exec_api import EventStream
from holdfast.runtime.local import LocalExec
from holdfast.runtime.process.input import RETAINED_WRITE_IDS, InputQueue
from holdfast.types import OutputChunk, ProcessSpec

SAFETY_NET = 60


def sh(script: str, process_id: str = "p", **fields: Any) -> ProcessSpec:
    return ProcessSpec(process_id, ("sh", "-c", script), **fields)


async def until(events: EventStream, text: bytes) -> bytes:
    """The output of the process up to and with `text`."""
    seen = b""
    async with asyncio.timeout(SAFETY_NET):
        while text not in seen:
            event = await anext(events)
            if isinstance(event, OutputChunk):
                seen += event.data
    return seen


async def output(box: LocalExec, process_id: str = "p") -> bytes:
    async with asyncio.timeout(SAFETY_NET):
        events = [event async for event in box.events(process_id)]
    return b"".join(event.data for event in events if isinstance(event, OutputChunk))


async def test_stdin_is_empty_and_closed_by_default(box: LocalExec) -> None:
    await box.start(sh("cat; echo end; readlink /proc/self/fd/0"))
    assert await output(box) == b"end\n/dev/null\n"
    await box.start(sh("read x", "q"))
    with pytest.raises(StdinClosed, match="'q'"):
        await box.write("q", b"x")
    await box.close_stdin("q")


async def test_what_is_written_arrives_and_the_end_too(box: LocalExec) -> None:
    await box.start(sh("cat; echo end", pipe_stdin=True))
    await box.write("p", b"one ")
    await box.write("p", b"")
    await box.write("p", b"two\n")
    await box.close_stdin("p")
    await box.close_stdin("p")
    assert await output(box) == b"one two\nend\n"


async def test_a_large_input_arrives_whole_and_in_order(box: LocalExec) -> None:
    await box.start(ProcessSpec("p", ("sha256sum",), pipe_stdin=True))
    blocks = [bytes([n]) * 300_000 for n in range(20)]
    for block in blocks:
        await box.write("p", block)
    await box.close_stdin("p")
    assert (await output(box)).split()[0].decode() == hashlib.sha256(b"".join(blocks)).hexdigest()


async def test_many_writers_keep_their_order(box: LocalExec) -> None:
    await box.start(sh("cat", pipe_stdin=True))
    blocks = [b"%06d" % n * 10_000 for n in range(30)]
    await asyncio.gather(*(box.write("p", block) for block in blocks))
    await box.close_stdin("p")
    assert await output(box) == b"".join(blocks)


async def test_close_waits_for_what_is_queued(make_exec: Callable[..., LocalExec]) -> None:
    box = make_exec()
    await box.start(sh("echo ready; read go; cat | wc -c", pipe_stdin=True))
    await until(box.events("p"), b"ready")
    size = 500_000
    await box.write("p", b"go\n" + b"x" * size)
    assert box.processes.process("p").input.queued_bytes > 0
    await box.close_stdin("p")
    with pytest.raises(StdinClosed):
        await box.write("p", b"late")
    assert (await output(box)).split()[-1] == b"%d" % size


async def test_a_writer_feels_a_process_that_does_not_read(make_exec: Callable[..., LocalExec]) -> None:
    box = make_exec(stdin_buffer_bytes=100_000)
    await box.start(_idle())
    events = box.events("p")
    await until(events, b"ready")
    await box.write("p", b"x" * 150_000)  # the pipe takes 64 KiB of it, the queue the rest
    writing = asyncio.ensure_future(box.write("p", b"y" * 150_000))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not writing.done()
    # Every other client is served meanwhile.
    assert (await box.describe("p")).running
    await box.signal("p", "USR1")
    async with asyncio.timeout(SAFETY_NET):
        await writing
    await box.close_stdin("p")
    assert b"300000" in await until(events, b"00")


def _idle() -> ProcessSpec:
    """Reads its stdin only after SIGUSR1, and then prints how much there was."""
    script = (
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "print('ready', flush=True)\n"
        "signal.sigwait({signal.SIGUSR1})\n"
        "print(len(sys.stdin.buffer.read()), end='', flush=True)\n"
    )
    return ProcessSpec("p", (sys.executable, "-S", "-c", script), pipe_stdin=True)


async def test_a_waiting_writer_is_let_go_when_the_process_ends(make_exec: Callable[..., LocalExec]) -> None:
    box = make_exec(stdin_buffer_bytes=1000)
    await box.start(sh("echo ready; exec sleep 1000", pipe_stdin=True))
    await until(box.events("p"), b"ready")
    writing = asyncio.ensure_future(box.write("p", b"x" * 1_000_000))
    await asyncio.sleep(0)
    assert not writing.done()
    await box.terminate("p", force=True)
    async with asyncio.timeout(SAFETY_NET):
        await asyncio.wait({writing})
    with pytest.raises(StdinClosed, match="'p'"):
        await box.write("p", b"x")


async def test_a_write_id_counts_once(box: LocalExec) -> None:
    await box.start(sh("cat", pipe_stdin=True))
    for write_id in ("a", "a", "b", "a", None, None):
        await box.write("p", b"<%s>" % str(write_id).encode(), write_id=write_id)
    await box.close_stdin("p")
    await box.write("p", b"<a>", write_id="a")  # a repetition of what was accepted is no news
    assert await output(box) == b"<a><b><None><None>"


async def test_write_ids_are_remembered_up_to_a_bound() -> None:
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    queue = InputQueue(write, name="p", limit=10, owns_fd=True)
    for number in range(RETAINED_WRITE_IDS + 1):
        await queue.write(b"x", str(number))
    await queue.write(b"latest", str(RETAINED_WRITE_IDS))
    await queue.write(b"oldest", "0")
    assert os.read(read, 10_000) == b"x" * (RETAINED_WRITE_IDS + 1) + b"oldest"
    assert len(queue._writes) == RETAINED_WRITE_IDS
    queue.abandon()
    os.close(read)


@pytest.fixture
def pipe(tmp_path: Path) -> tuple[Path, int]:
    """A named pipe, and a writing end of it while it has no reader."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.close(read)
    return path, write


def whole(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.parametrize("late", [False, True])
async def test_a_pipe_is_neither_written_nor_closed_before_it_has_a_reader(
    pipe: tuple[Path, int], late: bool
) -> None:
    path, write = pipe
    queue = InputQueue(-1 if late else write, name="p", limit=10, owns_fd=True, awaits_reader=True)
    queue.put(b"early ", "w")
    queue.put(b"early ", "w")
    queue.close()
    with pytest.raises(StdinClosed):
        queue.put(b"after the end")
    if late:
        queue.open(write)
    # A pipe without a writer would make the reader wait for one.
    async with asyncio.timeout(SAFETY_NET):
        assert await asyncio.to_thread(whole, path) == b"early "
    assert not queue.queued_bytes


async def test_much_input_for_a_reader_that_comes_later(pipe: tuple[Path, int]) -> None:
    path, write = pipe
    queue = InputQueue(write, name="p", limit=10, owns_fd=True, awaits_reader=True)
    writing = asyncio.create_task(queue.write(b"x" * 300_000))
    reading = asyncio.create_task(asyncio.to_thread(whole, path))
    async with asyncio.timeout(SAFETY_NET):
        await writing
        queue.close()
        assert await reading == b"x" * 300_000


async def test_a_pipe_that_never_gets_a_reader_is_let_go(pipe: tuple[Path, int]) -> None:
    _, write = pipe
    queue = InputQueue(write, name="p", limit=1, owns_fd=True, awaits_reader=True)
    waiting = asyncio.create_task(queue.write(b"xx"))
    await asyncio.sleep(0)
    queue.abandon()
    async with asyncio.timeout(SAFETY_NET):
        await waiting
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write)


async def test_a_process_that_closed_its_stdin_says_so_every_time(box: LocalExec) -> None:
    await box.start(sh("exec 0<&-; echo ready; exec sleep 1000", pipe_stdin=True))
    await until(box.events("p"), b"ready")
    for _ in range(2):
        with pytest.raises(StdinClosed, match="'p'"):
            await box.write("p", b"x", write_id="same")
    assert (await box.describe("p")).running


async def test_write_after_the_exit_is_refused(box: LocalExec) -> None:
    await box.start(sh("exit 0", pipe_stdin=True))
    await box.wait("p")
    with pytest.raises(StdinClosed):
        await box.write("p", b"x")
    await box.close_stdin("p")


async def test_a_terminal_is_writable_and_its_end_is_control_d(box: LocalExec) -> None:
    await box.start(sh("stty -echo; echo ready; cat; echo end", tty=True))
    events = box.events("p")
    await until(events, b"ready")
    await box.write("p", b"hello\n")
    await until(events, b"hello\r\n")
    await box.close_stdin("p")
    assert b"end" in await until(events, b"end")


async def test_no_descriptor_is_left_by_a_queue(box: LocalExec) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for tty in (False, True):
        for how in ("close", "kill"):
            id = f"{tty}{how}"
            await box.start(sh("echo ready; cat >/dev/null", id, pipe_stdin=True, tty=tty))
            await until(box.events(id), b"ready")
            if how == "close":
                await box.close_stdin(id)
                assert await box.wait(id, timeout=SAFETY_NET) is not None
            else:
                await box.terminate(id, force=True)
            await output(box, id)
            await box.forget(id)
    assert sorted(os.listdir("/proc/self/fd")) == before
