"""The public client over real processes of this machine, without a server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from pathlib import Path

import pytest

import holdfast
from holdfast.client.command import OUTPUT_LIMIT_BYTES
from holdfast.client.exec_remote import Completed, StderrChunk, StdoutChunk
from holdfast.errors import CommandNotFound, CwdNotFound
from holdfast.testing.sandbox_suite import TIMEOUTS
from tests.support.servers import is_alive


async def test_exec() -> None:
    async with holdfast.connect("inprocess") as box:
        result = await box.exec(["sh", "-c", 'printf "$A"; echo err >&2; pwd; exit 3'], env={"A": "x"}, cwd="/")
        assert (result.stdout, result.stderr, result.returncode) == ("x/\n", "err\n", 3)
        with pytest.raises(CommandNotFound):
            await box.exec(["no-such-program"])
        with pytest.raises(CwdNotFound):
            await box.exec(["true"], cwd="/no/such/place")


async def test_exec_is_binary_safe_both_ways() -> None:
    data = os.urandom(3_000_000)
    async with holdfast.connect("inprocess") as box:
        result = await box.exec(["cat"], input=data)
        assert hashlib.sha256(result.stdout_bytes).digest() == hashlib.sha256(data).digest()


async def test_exec_keeps_the_latest_ten_mebibytes() -> None:
    async with holdfast.connect("inprocess") as box:
        script = "head -c 60000000 /dev/zero; printf end"
        result = await box.exec(["sh", "-c", script])
        assert result.truncated
        assert len(result.stdout_bytes) == OUTPUT_LIMIT_BYTES
        assert result.stdout_bytes == b"\0" * (OUTPUT_LIMIT_BYTES - 3) + b"end"


async def test_exec_adds_to_the_environment_and_start_can_replace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "kept")
    async with holdfast.connect("inprocess") as box:
        assert "MY_SECRET_TOKEN=kept" in (await box.exec(["env"], env={"B": "2"})).stdout
        bare = await box.start(["/usr/bin/env"], env={"B": "2"}, exact_env=True)
        out, _ = await bare.communicate()
        assert b"B=2" in out
        assert b"PATH=" not in out


async def test_a_timeout_leaves_nothing_behind() -> None:
    async with holdfast.connect("inprocess") as box:
        script = "setsid sleep 1000 & echo $!; sleep 1000"
        for timeout in TIMEOUTS:
            with pytest.raises(holdfast.TimeoutError) as caught:
                await box.exec(["sh", "-c", script], timeout=timeout, timeout_retry=False)
            if caught.value.stdout:
                break
        assert not is_alive(int(caught.value.stdout))


async def test_a_cancelled_exec_leaves_nothing_behind(tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    async with holdfast.connect("inprocess") as box:
        running = asyncio.create_task(box.exec(["sh", "-c", f"echo $$ > {started}; exec sleep 1000"]))
        # Opening the pipe waits for the writer, so its line shows that the command runs.
        pid = int(await asyncio.to_thread(started.read_text))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not is_alive(pid)
        (process,) = await box.processes()
        assert (await process.wait()).signal == "SIGKILL"


async def test_exec_does_not_wait_for_children_that_hold_the_pipes() -> None:
    async with holdfast.connect("inprocess") as box:
        result = await box.exec(["sh", "-c", "sleep 1000 & echo done"], timeout=60)
        assert result.stdout == "done\n"
        (left,) = await box.processes()
        await left.terminate()


async def test_exec_remote_streams() -> None:
    async with holdfast.connect("inprocess") as box:
        script = r"printf '\303'; read x; printf '\251'; echo $x >&2; exit 4"
        proc = box.exec_remote(["sh", "-c", script], holdfast.ExecRemoteOptions(stdin_open=True))
        await proc.write_stdin("line\n")
        events = [event async for event in proc]
        assert StdoutChunk("é") in events
        assert StderrChunk("line\n") in events
        assert events[-1] == Completed(4, "é", "line\n")
        with pytest.raises(CommandNotFound):
            async for _ in box.exec_remote(["no-such-program"]):
                pass


async def test_collect_and_wait_for_output() -> None:
    async with holdfast.connect("inprocess") as box:
        process = await box.start(["sh", "-c", "echo port 4321; read x; head -c 100000 /dev/zero"], stdin="open")
        match = await process.wait_for_output(re.compile(r"port (\d+)\n"), timeout=60)
        assert match.groups == (b"4321",)
        first = await process.collect(yield_after=0)
        assert (first.output, first.running) == (b"port 4321\n", True)
        await process.write("go\n")
        last = await process.collect(yield_after=60, max_bytes=1000)
        assert (len(last.output), last.omitted_bytes, last.exit_code) == (1000, 99_000, 0)


async def test_a_terminal_takes_input_and_a_size() -> None:
    async with holdfast.connect("inprocess") as box:
        size = holdfast.TerminalSize(33, 101)
        async with await box.start(["sh", "-c", "stty size; read x; stty size"], tty=size) as process:
            await process.wait_for_output("33 101", timeout=60)
            await process.resize(44, 88)
            await process.write("\n")
            await process.wait_for_output("44 88", timeout=60)
            assert (await process.wait(60)).success


async def test_unified_exec_over_a_real_terminal() -> None:
    async with holdfast.connect("inprocess") as box, holdfast.UnifiedExec(box) as unified:
        output = await unified.exec_command(
            "stty -echo; echo name?; read n; echo hello $n", tty=True, yield_time_ms=250
        )
        while "name?" not in output.output and output.session_id is not None:
            output = await unified.write_stdin(output.session_id)
        assert output.session_id is not None
        output = await unified.write_stdin(output.session_id, "bob\n", yield_time_ms=30_000)
        assert (output.output, output.exit_code) == ("hello bob\r\n", 0)


async def test_many_at_once() -> None:
    async with holdfast.connect("inprocess") as box:
        results = await asyncio.gather(*(box.exec(["echo", str(n)]) for n in range(200)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(200)]
