"""A shell at the end of a connection that breaks: every byte once, every command once, and every result arrives."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest

from holdfast import OutputChunk, Sandbox
from holdfast.client.connection.channel_connection import ChannelConnection
from holdfast.client.dial import dialer
from holdfast.client.remote import RemoteExec
from holdfast.errors import UnknownShell
from holdfast.transport.channel import Channel, Receiver
from holdfast.types import CommandEnded
from holdfast.wire.messages import Encoding
from tests.contract.shell_ways import SHELL_SETTINGS, Running
from tests.contract.test_disconnect import broken_connection
from tests.contract.ways import address_of, fifo
from tests.support.servers import Conversation, RunningServer, conversation, is_alive, running_server

MEGABYTE = 1_000_003
PRINT = f"""
import random, sys
block = random.Random(3).randbytes({MEGABYTE})
for number in range(12):
    sys.stdout.buffer.write(number.to_bytes(8, "big") + block)
    sys.stderr.write(f"at {{number}}\\n")
    sys.stderr.flush()
"""


@pytest.fixture(scope="module")
def shell_server() -> Iterator[RunningServer]:
    with running_server(["unix", "ws"], settings=SHELL_SETTINGS) as server:
        yield server


class Gate:
    """A way to a server that a test closes and opens again."""

    def __init__(self, way: str, server: RunningServer) -> None:
        scheme, _, encoding = way.partition("-")
        self._dial = dialer(address_of(scheme, server, {}))
        self._open = asyncio.Event()
        self._open.set()
        self._channel: Channel | None = None
        self.connection = ChannelConnection(
            self._through, address=way, encoding=cast(Encoding, encoding or "msgpack")
        )

    async def _through(self, receiver: Receiver) -> Channel:
        await self._open.wait()
        self._channel = await self._dial(receiver)
        return self._channel

    async def close(self) -> None:
        """Break the connection; it does not come back before `open`."""
        self._open.clear()
        assert self._channel is not None
        self._channel.close()
        while self.connection.connected:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def open(self) -> None:
        self._open.set()


@contextlib.asynccontextmanager
async def gated(way: str, server: RunningServer) -> AsyncIterator[tuple[Sandbox, Gate]]:
    gate = Gate(way, server)
    await gate.connection.open()
    box = Sandbox(RemoteExec(gate.connection))
    try:
        yield box, gate
    finally:
        gate.open()
        for shell in await box.shells():
            await shell.close(grace=0)
        await box.aclose()


async def test_a_commands_output_is_exact_however_often_the_connection_breaks(
    remote_way: str, shell_server: RunningServer, directory: str, tmp_path: Path
) -> None:
    block = random.Random(3).randbytes(MEGABYTE)
    expected = hashlib.sha256(b"".join(n.to_bytes(8, "big") + block for n in range(12))).hexdigest()
    (tmp_path / "print.py").write_text(PRINT)
    command = f"echo ran >> {tmp_path}/log; {sys.executable} -I -S {tmp_path}/print.py; (exit 7)"
    async with broken_connection(remote_way, shell_server, directory, seed=8) as (box, proxy):
        sh = await box.shell()
        result = await sh.run(command)
        assert (len(result.stdout_bytes), result.exit_code) == (12 * (MEGABYTE + 8), 7)
        assert hashlib.sha256(result.stdout_bytes).hexdigest() == expected
        assert result.stderr == "".join(f"at {number}\n" for number in range(12))
        assert not result.truncated
        cuts = proxy.cuts
        digest, position, ended = hashlib.sha256(), 0, None
        async for event in sh.stream(command):
            if isinstance(event, CommandEnded):
                ended = event
            else:
                assert isinstance(event, OutputChunk), event
                if event.stream == "stdout":
                    assert event.offset == position
                    position += len(event.data)
                    digest.update(event.data)
        assert ended is not None
        assert (ended.exit_code, digest.hexdigest()) == (7, expected)
        assert (tmp_path / "log").read_text() == "ran\nran\n"
        assert min(cuts, proxy.cuts - cuts) >= 2
        proxy.peaceful = True
        await sh.close(grace=0)


async def test_commands_run_once_however_often_the_connection_breaks(
    remote_way: str, shell_server: RunningServer, directory: str, tmp_path: Path
) -> None:
    # A neighbour's flood makes the connection break while these are under way.
    async with broken_connection(remote_way, shell_server, directory, seed=5) as (box, proxy):
        flood = await box.start(["sh", "-c", "while :; do seq 20000; done"], overflow="block")
        reading = asyncio.create_task(_read_on(flood.output()))
        sh = await box.shell()
        number = 0
        while number < 20 or proxy.cuts < 6:
            result = await sh.run(f"echo {number} >> {tmp_path}/log; echo $((count++)); (exit {number % 256})")
            assert (result.stdout, result.exit_code) == (f"{number}\n", number % 256)
            number += 1
        assert (tmp_path / "log").read_text().split() == [str(n) for n in range(number)]
        proxy.peaceful = True
        reading.cancel()
        await asyncio.wait([reading])
        assert await flood.terminate(force=True)
        await flood.forget()
        await sh.close(grace=0)


async def _read_on(output: AsyncIterator[object]) -> None:
    async for _ in output:
        pass


async def test_a_command_goes_on_while_nobody_is_connected(
    remote_way: str, shell_server: RunningServer, tmp_path: Path
) -> None:
    async with gated(remote_way, shell_server) as (box, gate):
        with fifo(str(tmp_path), "go") as (go, _), fifo(str(tmp_path), "done") as (done, _):
            sh = await box.shell()
            running = Running(sh, f"echo before; read x < {go}; echo meanwhile; echo x > {done}; (exit 3)")
            await running.until(b"before\n")
            await gate.close()
            await asyncio.to_thread(_exchange, go, done)
            gate.open()
            result = await running.task
        assert (result.stdout, result.exit_code) == ("before\nmeanwhile\n", 3)
        assert running.printed["stdout"] == b"before\nmeanwhile\n"


def _exchange(go: str, done: str) -> None:
    with open(go, "w") as file:
        file.write("x\n")
    with open(done) as file:
        assert file.readline() == "x\n"


async def test_a_caller_that_gives_up_while_nobody_is_connected_ends_its_command(
    remote_way: str, shell_server: RunningServer
) -> None:
    async with gated(remote_way, shell_server) as (box, gate):
        sh = await box.shell()
        running = Running(sh, "sh -c 'echo $$; exec sleep 1000'; word=after")
        child = int(await running.until(b"\n"))
        await gate.close()
        running.task.cancel()
        await asyncio.wait([running.task])
        gate.open()
        # It would wait for ever behind a command that never ends.
        async with asyncio.timeout(60):
            assert (await sh.run("echo ${word-unset}")).stdout == "unset\n"
        assert not is_alive(child)


# --- by hand: the same requests again, on another connection ------------------------------------------------------


@contextlib.asynccontextmanager
async def returned(server: RunningServer, session: str) -> AsyncIterator[Conversation]:
    async with conversation(server.address("unix")) as talk:
        await talk.initialize(resumeSessionId=session)
        yield talk


async def test_results_that_nobody_heard_are_told_when_asked_again(
    shell_server: RunningServer, tmp_path: Path
) -> None:
    """Every command that one client may have under way: the one that runs and all that wait behind it."""
    count = 1 + int(SHELL_SETTINGS["max_queued_commands"])
    commands = {f"c{n}": f"echo {n} >> {tmp_path}/log; echo {n}; (exit {n})" for n in range(count)}
    async with conversation(shell_server.address("unix")) as talk:
        await talk.initialize()
        await talk.result("shell/open", shellId="by-hand")
        for id, command in commands.items():
            await talk.ask("shell/run", shellId="by-hand", commandId=id, command=command)
        session = talk.session_id
        # Not a word of the replies is read, and they are all on their way when the connection goes.
        log = tmp_path / "log"
        while not log.exists() or len(log.read_text().split()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)
    async with returned(shell_server, session) as talk:
        for id, command in commands.items():
            result = await talk.result("shell/run", shellId="by-hand", commandId=id, command=command)
            assert result["ended"]["exitCode"] == int(id[1:]), result
        assert (tmp_path / "log").read_text().split() == [str(n) for n in range(count)]
        await talk.result("shell/close", shellId="by-hand", graceMs=0)


async def test_a_shell_that_is_opened_twice_by_one_attempt_is_one(shell_server: RunningServer) -> None:
    spec = {"shellId": "twice", "startId": "attempt"}
    async with conversation(shell_server.address("unix")) as talk:
        await talk.initialize()
        requested = [await talk.ask("shell/open", **spec) for _ in range(3)]
        pids = {(await talk.reply(id))["result"]["pid"] for id in requested}
        assert len(pids) == 1
        assert {(await talk.result("shell/open", **spec))["pid"]} == pids
        code, message = await talk.error("shell/open", shellId="twice", startId="other")
        assert (code, "twice" in message) == (-32003, True)
        await talk.result("shell/close", shellId="twice", graceMs=0)
        with pytest.raises(UnknownShell, match="thrice"):
            await talk.result("shell/describe", shellId="thrice")


async def test_a_start_in_a_shell_that_is_sent_twice_starts_once(
    shell_server: RunningServer, tmp_path: Path
) -> None:
    start = {
        "shellId": "starter",
        "processId": "once",
        "startId": "attempt",
        "command": f"echo ran >> {tmp_path}/log; echo on; exec sleep 1000",
    }
    async with conversation(shell_server.address("unix")) as talk:
        await talk.initialize()
        await talk.result("shell/open", shellId="starter")
        first = await talk.result("shell/start", **start)
        session = talk.session_id
    async with returned(shell_server, session) as talk:
        assert (await talk.result("shell/start", **start))["pid"] == first["pid"]
        while not (await talk.result("process/read", processId="once", waitMs=1000))["chunks"]:
            pass
        assert (tmp_path / "log").read_text() == "ran\n"
        await talk.result("process/terminate", processId="once", force=True)
        await talk.result("shell/close", shellId="starter", graceMs=0)
