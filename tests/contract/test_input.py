"""Input: closed by default, in order, once, with back-pressure; and what an id means."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from holdfast import ProcessSpec, Sandbox, TerminalSize
from holdfast.errors import DuplicateProcess, StdinClosed, UnknownProcess
from tests.contract.ways import fifo, printed


async def test_stdin_is_closed_by_default(box: Sandbox) -> None:
    process = await box.start(["cat"])
    assert (await process.wait()).exit_code == 0
    other = await box.start(["sleep", "1000"])
    with pytest.raises(StdinClosed, match=other.id):
        await other.write("x")


async def test_writes_arrive_in_order(box: Sandbox) -> None:
    process = await box.start(["cat"], stdin="open")
    for number in range(200):
        await process.write(f"{number}\n")
    await process.close_stdin()
    assert await printed(process) == b"".join(b"%d\n" % i for i in range(200))
    assert (await process.wait()).exit_code == 0


async def test_a_write_after_the_exit_is_refused(box: Sandbox) -> None:
    process = await box.start(["true"], stdin="open")
    await process.wait()
    with pytest.raises(StdinClosed, match=process.id):
        await process.write("too late")


async def test_a_write_after_the_exit_of_a_terminal_is_refused(box: Sandbox) -> None:
    process = await box.start(["true"], tty=TerminalSize())
    await process.wait()
    with pytest.raises(StdinClosed, match=process.id):
        await process.write("too late")


async def test_a_write_after_close_is_refused_and_closing_twice_is_not(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "cat; exec sleep 1000"], stdin="open")
    await process.write("in time")
    await process.close_stdin()
    await process.close_stdin()
    with pytest.raises(StdinClosed, match=process.id):
        await process.write("too late")
    assert (await process.wait_for_output("in time")).offset == 0


async def test_input_of_any_size_arrives_whole(box: Sandbox) -> None:
    data = os.urandom(1 << 20) * 12
    process = await box.start(["sha256sum"], stdin="open")
    stdout, _ = await process.communicate(data)
    assert stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_a_write_waits_for_a_process_that_does_not_read(box: Sandbox, tmp_path: Path) -> None:
    with fifo(str(tmp_path), "go") as (path, fd):
        process = await box.start(["sh", "-c", f"read x < {path}; wc -c"], stdin="open")
        writing = asyncio.create_task(process.write(b"x" * 8_000_000))
        # Others are not held up meanwhile, and the write cannot have been taken.
        assert process.id in {other.id for other in await box.processes()}
        assert not writing.done()
        os.write(fd, b"\n")
        await writing
        await process.close_stdin()
        assert int(await printed(process)) == 8_000_000


async def test_a_write_that_waits_ends_with_its_process(box: Sandbox) -> None:
    process = await box.start(["sleep", "1000"], stdin="open")
    writing = asyncio.create_task(process.write(b"x" * 8_000_000))
    assert (await process.describe()).running
    await process.terminate(force=True)
    with pytest.raises(StdinClosed, match=process.id):
        await writing


async def test_one_write_id_writes_once(box: Sandbox) -> None:
    process = await box.start(["cat"], stdin="open")
    for _ in range(3):
        await box.api.write(process.id, b"once\n", write_id="w1")
    await box.api.write(process.id, b"twice\n", write_id="w2")
    await process.close_stdin()
    assert await printed(process) == b"once\ntwice\n"


async def test_a_taken_id_is_refused_and_leaves_the_first_alone(box: Sandbox) -> None:
    first = await box.start(["cat"], id="taken", stdin="open")
    with pytest.raises(DuplicateProcess, match="'taken'"):
        await box.start(["cat"], id="taken", stdin="open")
    assert (await box.process("taken")).pid == first.pid
    await first.close_stdin()
    await first.wait()
    with pytest.raises(DuplicateProcess, match="'taken'"):
        await box.start(["true"], id="taken")


async def test_one_start_id_starts_once(box: Sandbox, tmp_path: Path) -> None:
    script = f"echo started >> {tmp_path}/starts; echo up; exec sleep 1000"
    spec = ProcessSpec(process_id="again", argv=("sh", "-c", script), start_id="s1")
    starts = await asyncio.gather(*(box.api.start(spec) for _ in range(5)))
    assert len({info.pid for info in starts}) == 1
    assert (await box.api.start(spec)).pid == starts[0].pid
    await (await box.process("again")).wait_for_output("up", timeout=60)
    await box.api.terminate("again", grace=0)
    assert (tmp_path / "starts").read_text() == "started\n"


async def test_an_unknown_process_is_named(box: Sandbox) -> None:
    api, nobody = box.api, "no-such-id"
    requested = [
        api.read(nobody),
        api.write(nobody, b"x"),
        api.close_stdin(nobody),
        api.resize(nobody, TerminalSize()),
        api.signal(nobody, "INT"),
        api.wait(nobody),
        api.snapshot(nobody),
        api.describe(nobody),
        api.forget(nobody),
    ]
    for call in requested:
        with pytest.raises(UnknownProcess, match=nobody):
            await call
    with pytest.raises(UnknownProcess, match=nobody):
        await anext(aiter(api.events(nobody)))


async def test_a_process_is_found_again_by_its_id(box: Sandbox) -> None:
    await box.start(["sh", "-c", "echo found; exec sleep 1000"], id="find-me")
    process = await box.process("find-me")
    await process.wait_for_output("found")
    info = await process.describe()
    assert (info.process_id, info.running, info.stdout_bytes) == ("find-me", True, 6)
    assert "find-me" in [other.id for other in await box.processes()]
