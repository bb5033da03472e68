"""A live shell over every way: what its commands print and leave behind, byte by byte, and in which order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast import OutputChunk, Sandbox
from holdfast.client.shell import Shell
from holdfast.errors import (
    CommandNotFound,
    CwdNotFound,
    DuplicateProcess,
    InvalidParams,
    LimitReached,
    UnknownShell,
)
from holdfast.types import CommandEnded, CommandEvent, CommandSpec, OutputGap, ShellState
from tests.contract.shell_ways import SHELL_SETTINGS, Running, late_output, shell_box, until_queued
from tests.contract.ways import fifo
from tests.support.servers import RunningServer, is_alive, running_server


@pytest.fixture(scope="module")
def shell_server() -> Iterator[RunningServer]:
    with running_server(["unix", "ws"], settings=SHELL_SETTINGS) as server:
        yield server


@pytest.fixture
async def box(way: str, shell_server: RunningServer) -> AsyncIterator[Sandbox]:
    async with shell_box(way, shell_server) as box:
        yield box


@pytest.fixture
async def sh(box: Sandbox) -> Shell:
    return await box.shell()


# --- one command --------------------------------------------------------------------------------------------------


async def test_a_command_has_its_own_streams_and_exit_code_and_the_state_of_those_before(
    sh: Shell, tmp_path: Path
) -> None:
    first = await sh.run(
        f'printf out; printf err >&2; word=kept; f() {{ echo "$word $1"; }}; cd {tmp_path}; (exit 3)'
    )
    assert (first.stdout, first.stderr, first.exit_code, first.success) == ("out", "err", 3, False)
    assert (first.cwd, sh.cwd, sh.state) == (str(tmp_path), str(tmp_path), "idle")
    assert (first.timed_out, first.truncated, first.shell_restarted, first.state) == (False, False, False, "idle")
    second = await sh.run("echo $?; f here; pwd")
    assert (second.stdout, second.stderr, second.exit_code) == (f"3\nkept here\n{tmp_path}\n", "", 0)
    silent = await sh.run(":")
    assert (silent.stdout_bytes, silent.stderr_bytes, silent.exit_code) == (b"", b"", 0)


async def test_what_is_printed_arrives_as_it_is(sh: Shell, tmp_path: Path) -> None:
    every = bytes(range(256)) + b"\xff\xfe\x00\n\r\n\t%s\\n\x01\x01\x01 \xe2\x82"
    for number, data in enumerate((every, b"no newline", b"\n\n\n", b"\0", b"\n")):
        (tmp_path / "out").write_bytes(data)
        (tmp_path / "err").write_bytes(data[::-1])
        result = await sh.run("cat out; cat err >&2", cwd=str(tmp_path))
        assert (result.stdout_bytes, result.stderr_bytes) == (data, data[::-1]), number
        assert result.stdout == data.decode("utf-8", "replace")


async def test_megabytes_on_both_streams_at_once(sh: Shell, tmp_path: Path) -> None:
    out, err = random.Random(1).randbytes(3_000_017), random.Random(2).randbytes(2_500_003)
    (tmp_path / "out").write_bytes(out)
    (tmp_path / "err").write_bytes(err)
    result = await sh.run(f"cd {tmp_path}; cat out & cat err >&2; wait; echo end")
    assert (len(result.stdout_bytes), len(result.stderr_bytes)) == (len(out) + 4, len(err))
    assert result.stdout_bytes == out + b"end\n"
    assert result.stderr_bytes == err
    assert not result.truncated


async def test_a_slow_reader_loses_nothing_and_the_command_waits_for_it(sh: Shell) -> None:
    """Far more than is kept, or fits on the way: the command cannot end before its reader has gone on."""
    states: list[ShellState] = []

    async def slowly(event: OutputChunk | OutputGap) -> None:
        if not states:
            # As many round trips as one likes: it is still there.
            states.extend([(await sh.describe()).state for _ in range(20)])

    result = await sh.run("yes 0123456 | head -c 12000000", on_output=slowly)
    assert states == ["running"] * 20
    assert not result.truncated
    assert result.stdout_bytes == b"0123456\n" * 1_500_000


async def test_output_comes_while_the_command_runs(sh: Shell, tmp_path: Path) -> None:
    with fifo(str(tmp_path), "go") as (path, fd):
        running = Running(sh, f"printf 'Password: '; read word < {path}; echo $word; echo no >&2")
        # No newline: it is there all the same, and the command waits.
        await running.until(b"Password: ")
        os.write(fd, b"secret\n")
        result = await running.task
    assert (result.stdout_bytes, result.stderr_bytes) == (b"Password: secret\n", b"no\n")
    assert running.printed["stdout"] == result.stdout_bytes
    assert running.printed["stderr"] == result.stderr_bytes


async def test_a_stream_of_events_ends_with_the_end(sh: Shell) -> None:
    events: list[CommandEvent] = [event async for event in sh.stream("echo a; echo b >&2; cd /; (exit 4)")]
    *output, end = events
    assert isinstance(end, CommandEnded)
    assert (end.exit_code, end.cwd, end.state, sh.cwd) == (4, "/", "idle", "/")
    printed = {"stdout": b"", "stderr": b""}
    last = 0
    for event in output:
        assert isinstance(event, OutputChunk), event
        assert event.offset == len(printed[event.stream])
        assert event.seq > last
        last = event.seq
        printed[event.stream] += event.data
    assert printed == {"stdout": b"a\n", "stderr": b"b\n"}


async def test_a_stream_that_is_left_interrupts_its_command(sh: Shell) -> None:
    stream = sh.stream("echo $BASHPID; sh -c 'echo $$; exec sleep 1000'; echo after")
    pids = b""
    async for event in stream:
        assert isinstance(event, OutputChunk), event
        pids += event.data
        if pids.count(b"\n") == 2:
            break
    await stream.aclose()
    shell, child = map(int, pids.split())
    assert (await sh.run("echo $?; echo $BASHPID")).stdout == f"130\n{shell}\n"
    assert not is_alive(child)
    assert (await sh.describe()).restarts == 0


async def test_what_is_for_one_command_alone_does_not_stay(sh: Shell, tmp_path: Path) -> None:
    here = (await sh.run("kept=1; export EXPORTED=old; pwd")).cwd
    value = "a 'quoted' \"value\"\nwith $HOME, `id` and \\ in it "
    result = await sh.run(
        'pwd; printf "%s|" "$NEW" "$EXPORTED"; env | grep -c ^NEW=; cat; kept=2; sh -c \'echo "$NEW"\'',
        cwd=str(tmp_path),
        env={"NEW": value, "EXPORTED": "new"},
        input="in\nput",
    )
    assert result.stdout == f"{tmp_path}\n{value}|new|1\nin\nput{value}\n"
    assert (result.cwd, result.stderr) == (here, "")
    after = await sh.run('pwd; echo "${NEW-unset} $EXPORTED $kept"; cat; read x; echo $?')
    assert after.stdout == f"{here}\nunset old 2\n1\n"


async def test_input_is_all_of_stdin(sh: Shell) -> None:
    data = random.Random(3).randbytes(1_000_003)
    assert (await sh.run("cat", input=data)).stdout_bytes == data
    lines = await sh.run("read a; read b; echo $b-$a; wc -c", input="one\ntwo\nrest")
    assert lines.stdout.split() == ["two-one", "4"]
    assert (await sh.run("cat; read x; echo $?")).stdout == "1\n"


async def test_a_directory_that_is_not_there(sh: Shell, tmp_path: Path) -> None:
    here = sh.cwd
    result = await sh.run(f"echo ran; touch {tmp_path}/ran", cwd=f"{tmp_path}/not there")
    assert (result.stdout, result.exit_code, result.cwd) == ("", 1, here)
    assert "not there" in result.stderr
    assert "No such file" in result.stderr
    assert os.listdir(tmp_path) == []
    assert (await sh.run("pwd")).stdout == f"{here}\n"


# --- many callers -------------------------------------------------------------------------------------------------


async def test_commands_of_callers_that_come_at_once_run_in_their_order(sh: Shell, tmp_path: Path) -> None:
    with fifo(str(tmp_path), "go") as (path, fd):
        first = Running(sh, f"log=first; echo on; read x < {path}")
        await first.until(b"on")
        waiting = [asyncio.create_task(sh.run(f"log=$log,{number}; echo $log")) for number in range(8)]
        status = await until_queued(sh, 8)
        assert (status.state, status.command) == ("running", f"log=first; echo on; read x < {path}")
        with pytest.raises(LimitReached, match="max_queued_commands"):
            await sh.run("log=refused")
        assert not any(task.done() for task in waiting)
        os.write(fd, b"\n")
        results = [(await task).stdout for task in waiting]
    assert results == ["first," + ",".join(map(str, range(number + 1))) + "\n" for number in range(8)]
    status = await sh.describe()
    assert (status.state, status.queued, status.command, status.commands_run) == ("idle", 0, None, 9)


async def test_a_caller_that_gives_up_takes_its_command_out_of_the_queue(sh: Shell, tmp_path: Path) -> None:
    with fifo(str(tmp_path), "go") as (path, fd):
        first = Running(sh, f"log=first; echo on; read x < {path}")
        await first.until(b"on")
        waiting = [asyncio.create_task(sh.run(f"log=$log,{number}")) for number in range(3)]
        await until_queued(sh, 3)
        waiting[1].cancel()
        await until_queued(sh, 2)
        os.write(fd, b"\n")
        await asyncio.wait(waiting)
    assert waiting[1].cancelled()
    assert (await sh.run("echo $log")).stdout == "first,0,2\n"
    assert (await first.task).exit_code == 0


async def test_a_caller_that_gives_up_ends_its_command_and_the_shell_goes_on(sh: Shell, tmp_path: Path) -> None:
    await sh.run(f"word=kept; cd {tmp_path}")
    running = Running(sh, "sh -c 'echo $$; exec sleep 1000'; touch after; word=lost")
    child = int(await running.until(b"\n"))
    running.task.cancel()
    await asyncio.wait([running.task])
    assert running.task.cancelled()
    result = await sh.run("echo $word; ls")
    assert (result.stdout, result.cwd) == ("kept\n", str(tmp_path))
    assert not is_alive(child)


async def test_an_interrupt_ends_the_command_that_runs_and_no_other(sh: Shell, tmp_path: Path) -> None:
    await sh.run(f"word=kept; cd {tmp_path}")
    assert not await sh.interrupt()
    running = Running(sh, "echo before; trap 'echo TERM' TERM; sh -c 'echo on; exec sleep 1000' | cat; touch after")
    await running.until(b"before\non\n")
    behind = asyncio.create_task(sh.run("echo $?; echo $word; ls"))
    await until_queued(sh, 1)
    assert await sh.interrupt()
    result = await running.task
    assert (result.exit_code, result.stdout, result.timed_out) == (130, "before\non\n", False)
    assert (await behind).stdout == "130\nkept\n"
    assert not await sh.interrupt()


async def test_two_handles_are_one_shell(box: Sandbox, sh: Shell, tmp_path: Path) -> None:
    other = await box.open_shell(sh.id)
    await sh.run(f"word=shared; cd {tmp_path}")
    assert (await other.run("echo $word; pwd")).stdout == f"shared\n{tmp_path}\n"
    assert (other.id, other.pid, other.cwd) == (sh.id, sh.pid, str(tmp_path))
    assert sh.id in [each.id for each in await box.shells()]
    await other.close()
    assert (await sh.describe()).state == sh.state == "closed"


# --- what comes late ----------------------------------------------------------------------------------------------


async def test_what_a_background_job_prints_during_the_next_command_is_the_shells(
    sh: Shell, tmp_path: Path
) -> None:
    with fifo(str(tmp_path), "go") as (go, _), fifo(str(tmp_path), "done") as (done, _):
        job = f"{{ read x < {go}; echo late; echo error >&2; echo x > {done}; }}"
        first = await sh.run(f"{job} & echo now")
        assert (first.stdout, first.stderr) == ("now\n", "")
        second = await sh.run(f"echo own; echo x > {go}; read x < {done}; echo own again")
        assert (second.stdout, second.stderr) == ("own\nown again\n", "")
        await late_output(sh, b"late\n", b"error\n")
    third = await sh.run("wait; echo third")
    assert (third.stdout, third.stderr) == ("third\n", "")
    snapshot = await sh.snapshot()
    assert (snapshot.stdout, snapshot.stderr, snapshot.running) == (b"late\n", b"error\n", True)
    status = await sh.describe()
    assert (status.stdout_bytes, status.stderr_bytes) == (5, 6)


async def test_what_comes_late_can_be_read_on_from_where_one_was(sh: Shell, tmp_path: Path) -> None:
    with fifo(str(tmp_path), "go") as (go, fd):
        await sh.run(f"while read word; do echo $word; done < {go} &")
        seen, since = b"", 0
        for word in (b"one\n", b"two\n", b"three\n"):
            os.write(fd, word)
            output = sh.output(since)
            while not seen.endswith(word):
                event = await anext(output)
                assert isinstance(event, OutputChunk), event
                assert event.offset == len(seen)
                seen, since = seen + event.data, event.seq
            await output.aclose()
    assert seen == b"one\ntwo\nthree\n"


# --- background processes -----------------------------------------------------------------------------------------


async def test_a_process_begins_with_the_state_of_the_shell(box: Sandbox, sh: Shell, tmp_path: Path) -> None:
    await sh.run(
        f"plain='not exported'; export SHOWN=1; list=(a 'b c'); shopt -s extglob; cd {tmp_path}; umask 027\n"
        'f() { echo "$plain $SHOWN ${list[1]} $1 $PWD $(umask)"; cat; plain=changed; echo err >&2; return 7; }'
    )
    process = await sh.start("f argument; exit $?", id="started")
    assert (await process.wait()).exit_code == 7
    snapshot = await process.snapshot()
    assert snapshot.stdout.decode() == f"not exported 1 b c argument {tmp_path} 0027\n"
    assert snapshot.stderr == b"err\n"
    assert (await box.process("started")).pid == process.pid
    assert (await sh.run("echo $plain")).stdout == "not exported\n"
    await process.forget()


async def test_a_process_runs_beside_its_shell_and_ends_as_a_tree(sh: Shell) -> None:
    process = await sh.start("setsid sleep 1000 & echo pid: $!; trap '' TERM; echo ready; wait; sleep 1000")
    assert await process.wait_for_output("ready", timeout=60)
    child = int((await process.snapshot()).stdout.split()[1])
    assert (await sh.run("echo free")).stdout == "free\n"
    assert is_alive(child)
    assert await process.terminate(grace=0.05)
    assert not is_alive(child)
    assert not is_alive(process.pid)
    assert (await sh.run("echo still")).stdout == "still\n"


async def test_a_process_of_a_posix_shell_has_its_variables(box: Sandbox, tmp_path: Path) -> None:
    sh = await box.shell("dash", cwd=str(tmp_path))
    await sh.run("plain='not exported'; export SHOWN='a b'")
    process = await sh.start('echo "$plain $SHOWN $PWD"; exit 5')
    assert (await process.wait()).exit_code == 5
    assert (await process.snapshot()).stdout.decode() == f"not exported a b {tmp_path}\n"


# --- what is refused ----------------------------------------------------------------------------------------------


async def test_a_command_that_cannot_be_told_to_a_shell_is_refused(sh: Shell) -> None:
    with pytest.raises(InvalidParams, match="command holds a NUL"):
        await sh.run("echo a\0b")
    with pytest.raises(InvalidParams, match="command"):
        await sh.run("echo \ud800")
    with pytest.raises(InvalidParams, match="cwd"):
        await sh.run("true", cwd="")
    with pytest.raises(InvalidParams, match="cwd holds a NUL"):
        await sh.run("true", cwd="/\0")
    for name in ("", "1A", "A-B", "A=B", "A B", "x;reboot"):
        with pytest.raises(InvalidParams, match="environment variable"):
            await sh.run("true", env={name: "1"})
    with pytest.raises(InvalidParams, match="'A' holds a NUL"):
        await sh.run("true", env={"A": "\0"})
    with pytest.raises(InvalidParams, match="timeout"):
        await sh.run("true", timeout=-1)
    with pytest.raises(InvalidParams, match="command holds a NUL"):
        await sh.start("\0")
    assert (await sh.run("echo fine")).stdout == "fine\n"
    assert (await sh.describe()).queued == 0


async def test_ids_name_one_thing(box: Sandbox, sh: Shell) -> None:
    with pytest.raises(DuplicateProcess, match=sh.id):
        await box.shell(id=sh.id)
    for call in (box.open_shell("nobody"), box.api.interrupt_shell("nobody"), box.api.close_shell("nobody")):
        with pytest.raises(UnknownShell, match="nobody"):
            await call
    with pytest.raises(UnknownShell, match="nobody"):
        async with contextlib.aclosing(box.api.run_in_shell("nobody", CommandSpec("c", "true"))) as stream:
            await anext(stream)
    with pytest.raises(UnknownShell, match="nobody"):
        await box.api.start_in_shell("nobody", "true", "p")
    await box.start(["sleep", "1000"], id="taken")
    with pytest.raises(DuplicateProcess, match="taken"):
        await sh.start("true", id="taken")


async def test_shells_have_a_number_and_need_a_program_and_a_directory(
    box: Sandbox, way: str, tmp_path: Path
) -> None:
    with pytest.raises(CommandNotFound, match="no-such-shell"):
        await box.shell("no-such-shell")
    with pytest.raises(CwdNotFound, match="nowhere"):
        await box.shell(cwd=f"{tmp_path}/nowhere")
    shells = [await box.shell(cwd=str(tmp_path), env={"NUMBER": str(number)}) for number in range(3)]
    assert [(await each.run("echo $NUMBER; pwd")).stdout for each in shells] == [
        f"{number}\n{tmp_path}\n" for number in range(3)
    ]
    with pytest.raises(LimitReached, match="max_shells"):
        await box.shell()
    await shells[0].close()
    posix = await box.shell("/bin/sh", id=f"another-{way}")
    assert (posix.id, posix.state, (await posix.run("echo $0")).exit_code) == (f"another-{way}", "idle", 0)
