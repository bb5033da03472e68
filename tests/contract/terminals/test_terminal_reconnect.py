"""A terminal at the end of a connection that breaks: every byte once, every command once, and every wait ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast import Sandbox
from holdfast.client.remote import RemoteExec
from tests.contract.terminals.ways import (
    PATIENCE,
    Opener,
    make_home,
    number_in,
    until_event,
    until_shown,
)
from tests.contract.test_disconnect import broken_connection
from tests.contract.test_shell_reconnect import Gate
from tests.contract.ways import kill_quietly
from tests.support.servers import RunningServer, conversation


@pytest.fixture(params=["unix", "ws-json"])
def remote_way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def gated(way: str, server: RunningServer) -> AsyncIterator[tuple[Sandbox, Gate]]:
    gate = Gate(way, server)
    await gate.connection.open()
    box = Sandbox(RemoteExec(gate.connection))
    try:
        yield box, gate
    finally:
        gate.open()
        for terminal in await box.terminals():
            await terminal.close("force")
            await (await box.process(terminal.id)).forget()
        await box.aclose()


async def test_a_command_goes_on_while_nobody_is_connected(
    remote_way: str, terminal_server: RunningServer, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    async with gated(remote_way, terminal_server) as (box, gate):
        terminal = await Opener(box, make_home(tmp_path))()
        command = f"echo ran >> {tmp_path}/log; echo up:$((1+1)); read x < {tmp_path}/go; echo on; (exit 3)"
        running = asyncio.create_task(terminal.run(command))
        reading = asyncio.create_task(all_output(terminal.output()))
        await until_shown(terminal, b"up:2")
        idle = asyncio.create_task(terminal.wait_until_idle(PATIENCE))
        await gate.close()
        # Opening it waits for the reader on the other side, which is the command.
        await asyncio.to_thread((tmp_path / "go").write_text, "x\n")
        gate.open()
        result = await running
        assert (result.output, result.exit_code) == ("up:2\non\n", 3)
        assert (await idle).last_exit_code == 3
        assert (tmp_path / "log").read_text() == "ran\n"
        await terminal.close()
        assert (await reading).count(b"up:2\r\non\r\n") == 1


async def all_output(output: AsyncIterator[bytes]) -> bytes:
    return b"".join([data async for data in output])


async def test_commands_run_once_however_often_the_connection_breaks(
    remote_way: str, terminal_server: RunningServer, directory: str, tmp_path: Path
) -> None:
    # A neighbour's flood makes the connection break while these are under way.
    async with broken_connection(remote_way, terminal_server, directory, seed=5) as (box, proxy):
        flood = await box.start(["sh", "-c", "while :; do seq 20000; done"], overflow="block")
        reading = asyncio.create_task(read_on(flood.output()))
        terminal = await Opener(box, make_home(tmp_path))()
        number = 0
        async with asyncio.timeout(60):
            while number < 20 or proxy.cuts < 5:
                if number % 2:
                    result = await terminal.run(
                        f"echo {number} >> {tmp_path}/log; echo $((count++)); (exit {number % 256})"
                    )
                    assert (result.output, result.exit_code) == (f"{number}\n", number % 256)
                else:
                    await terminal.send(f"echo {number} >> {tmp_path}/log; ((count++)); true\n")
                    assert (await terminal.wait_until_idle()).state == "IDLE"
                number += 1
        assert (tmp_path / "log").read_text().split() == [str(n) for n in range(number)]
        proxy.peaceful = True
        reading.cancel()
        await asyncio.wait([reading])
        await flood.terminate(force=True)
        await flood.forget()
        await terminal.close("force")
        await (await box.process(terminal.id)).forget()


async def read_on(output: AsyncIterator[object]) -> None:
    async for _ in output:
        pass


async def test_what_was_typed_arrives_once_and_what_was_shown_is_exact(
    remote_way: str, terminal_server: RunningServer, directory: str, tmp_path: Path
) -> None:
    async with broken_connection(remote_way, terminal_server, directory, seed=11) as (box, proxy):
        terminal = await Opener(box, make_home(tmp_path))()
        reading = asyncio.create_task(all_output(terminal.output()))
        async with asyncio.timeout(60):
            # A result is one message: it arrives as soon as one connection lives long enough.
            for _ in range(5):
                result = await terminal.run("seq 40000", PATIENCE)
                assert result.output_bytes == b"".join(b"%d\r\n" % n for n in range(1, 40_001))
            # Raw, so that a line may be longer than the 4,096 characters that the kernel edits.
            await terminal.send(f"stty raw -echo; head -c 3000000 > {tmp_path}/got; stty sane\n")
            await terminal.wait_until_awaiting_input(PATIENCE)
            await terminal.send(b"0123456789" * 300_000)
            await terminal.wait_until_idle(PATIENCE)
        assert (tmp_path / "got").read_bytes() == b"0123456789" * 300_000
        assert proxy.cuts >= 2
        proxy.peaceful = True
        await terminal.close("force")
        assert (await reading).count(result.output_bytes) == 5
        await (await box.process(terminal.id)).forget()


async def test_a_caller_that_gives_up_while_nobody_is_connected_interrupts_its_command(
    remote_way: str, terminal_server: RunningServer, tmp_path: Path
) -> None:
    async with gated(remote_way, terminal_server) as (box, gate):
        terminal = await Opener(box, make_home(tmp_path))()
        running = asyncio.create_task(terminal.run("sh -c 'echo $$; exec sleep 1000'; echo never"))
        began = await until_event(terminal, lambda event: event.type == "command")
        pid = number_in((await until_shown(terminal, b"\r\n", began.token)).decode())
        await gate.close()
        running.cancel()
        await asyncio.wait([running])
        gate.open()
        try:
            assert (await terminal.wait_until_idle(1.0)).last_exit_code == 130
        finally:
            kill_quietly(pid)


async def test_a_run_that_is_asked_for_again_is_the_same(terminal_server: RunningServer, tmp_path: Path) -> None:
    run = {"terminalId": "by-hand", "runId": "r1", "command": f"echo ran >> {tmp_path}/log; echo out; (exit 4)"}
    async with conversation(terminal_server.address("unix")) as talk:
        await talk.initialize()
        home = make_home(tmp_path)
        spec = {"terminalId": "by-hand", "startId": "s", "env": {"HOME": str(home), "PATH": os.environ["PATH"]}}
        pid = (await talk.result("terminal/open", **spec))["pid"]
        await talk.ask("terminal/run", **run)
        session = talk.session_id
    async with conversation(terminal_server.address("unix")) as talk:
        await talk.initialize(resumeSessionId=session)
        assert (await talk.result("terminal/open", **spec))["pid"] == pid
        for _ in range(2):
            result = await talk.result("terminal/run", **run)
            assert result["exitCode"] == 4, result
        assert (tmp_path / "log").read_text() == "ran\n"
        keys = {"terminalId": "by-hand", "keys": ["e", "c", "h", "o", "Space", "x", ">", ">"], "writeId": "w1"}
        for _ in range(3):
            await talk.result("terminal/keys", **keys)
        await talk.result("terminal/keys", terminalId="by-hand", keys=[*f" {tmp_path}/log", "Enter"], writeId="w2")
        found = await talk.result("terminal/wait", terminalId="by-hand", until="idle", timeoutMs=30_000)
        assert found["reached"]
        assert (tmp_path / "log").read_text() == "ran\nx\n"
        code, message = await talk.error("terminal/wait", terminalId="by-hand", until="never")
        assert (code, "until" in message) == (-32602, True)
        status = await talk.result("terminal/close", terminalId="by-hand", mode="force")
        assert status["state"] == "CLOSED"
        await talk.result("process/forget", processId="by-hand")


async def test_results_that_nobody_heard_are_told_when_asked_again(
    terminal_server: RunningServer, tmp_path: Path
) -> None:
    """More commands under way than a server remembers of those without a waiter."""
    count = 40
    runs = {f"unheard-{n}": f"echo {n} >> {tmp_path}/log; (exit {n})" for n in range(count)}
    home = make_home(tmp_path)
    async with conversation(terminal_server.address("unix")) as talk:
        await talk.initialize()
        env = {"HOME": str(home), "PATH": os.environ["PATH"]}
        await talk.result("terminal/open", terminalId="unheard", env=env)
        for id, command in runs.items():
            await talk.ask("terminal/run", terminalId="unheard", runId=id, command=command)
        session = talk.session_id
        log = tmp_path / "log"
        async with asyncio.timeout(PATIENCE):
            while not log.exists() or len(log.read_text().split()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0)
    async with conversation(terminal_server.address("unix")) as talk:
        await talk.initialize(resumeSessionId=session)
        for id, command in runs.items():
            result = await talk.result("terminal/run", terminalId="unheard", runId=id, command=command)
            assert result["exitCode"] == int(id.rpartition("-")[2]), result
        assert log.read_text().split() == [str(n) for n in range(count)]
        await talk.result("terminal/close", terminalId="unheard", mode="force")
        await talk.result("process/forget", processId="unheard")
