"""Commands as channels: their messages, their ends, and their stderr in errors."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import CommandNotFound, ConnectionLost, InvalidParams
from holdfast.transport import stdio
from holdfast.wire.framing import Oversized

IGNORES_ITS_END = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"{__import__('os').getpid()}", flush=True)
while True:
    signal.pause()
"""

SERVES = """
import asyncio, sys
from holdfast.transport import stdio
class Echo:
    def message_received(self, message):
        print("stray output")
        sys.stdout.flush()
        self.channel.send(b"echo " + message)
    def connection_lost(self, error):
        done.set_result(None)
async def main():
    global done
    done = asyncio.get_running_loop().create_future()
    echo = Echo()
    echo.channel = stdio.serve(echo)
    assert sys.stdin.read() == ""
    await done
asyncio.run(main())
"""


class Client:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def message_received(self, message: bytes | Oversized) -> None:
        assert not isinstance(message, Oversized)
        self.messages.put_nowait(bytes(message))

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)


async def test_a_conversation_and_an_orderly_end() -> None:
    client = Client()
    channel = await stdio.dial(["cat"], client)
    channel.send(b"one")
    channel.send(b"two")
    assert [await client.messages.get() for _ in range(2)] == [b"one", b"two"]
    channel.close()
    async with asyncio.timeout(60):
        assert await client.lost is None


async def test_a_command_that_dies_tells_its_code_and_its_stderr() -> None:
    client = Client()
    await stdio.dial(["sh", "-c", "echo no such container >&2; exit 9"], client)
    async with asyncio.timeout(60):
        error = await client.lost
    assert isinstance(error, ConnectionLost)
    assert "exit code 9: no such container" in str(error)
    assert error.details["exit_code"] == 9


async def test_a_command_that_is_killed_tells_the_signal() -> None:
    client = Client()
    await stdio.dial(["sh", "-c", "kill -KILL $$"], client)
    async with asyncio.timeout(60):
        assert "SIGKILL" in str(await client.lost)


async def test_a_command_that_will_not_end_is_made_to() -> None:
    client = Client()
    channel = await stdio.dial([sys.executable, "-c", IGNORES_ITS_END], client, grace=0.05)
    pid = int(await client.messages.get())
    channel.close()
    async with asyncio.timeout(60):
        assert await client.lost is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_endless_stderr_is_drained_and_only_its_tail_is_kept() -> None:
    client = Client()
    script = "import sys; sys.stderr.write('x' * 3_000_000 + 'the end'); sys.exit(1)"
    await stdio.dial([sys.executable, "-c", script], client)
    async with asyncio.timeout(60):
        error = await client.lost
    assert str(error).endswith("xthe end")
    assert len(str(error)) < 10_000


async def test_a_command_that_reports_before_it_becomes_the_channel() -> None:
    """Lines before the report are not messages, as of a login shell that greets."""
    client = Client()
    script = "echo welcome; echo ready; exec cat"
    channel = await stdio.dial(["sh", "-c", script], client, explain=lambda error: error, report=b"ready")
    channel.send(b"{}")
    assert await client.messages.get() == b"{}"
    channel.close()
    async with asyncio.timeout(60):
        assert await client.lost is None


async def test_a_command_that_ends_before_its_report() -> None:
    client = Client()
    script = "echo on stdout; echo on stderr >&2; exit 9"
    with pytest.raises(ConnectionLost, match="exit code 9") as raised:
        await stdio.dial(["sh", "-c", script], client, explain=lambda error: error, report=b"ready")
    assert sorted(raised.value.details["words"].splitlines()) == ["on stderr", "on stdout"]
    assert not client.lost.done()


async def test_a_report_that_does_not_come_can_be_given_up() -> None:
    client = Client()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await stdio.dial(["cat"], client, explain=lambda error: error, report=b"ready")
    async with asyncio.timeout(60):
        assert await client.lost is None


async def test_a_command_that_is_not_there() -> None:
    with pytest.raises(CommandNotFound, match="no-such-command"):
        await stdio.dial(["/no-such-command"], Client())
    with pytest.raises(InvalidParams, match="command"):
        await stdio.dial([], Client())


async def test_the_environment_is_the_one_given() -> None:
    client = Client()
    channel = await stdio.dial(["/bin/sh", "-c", "echo $ONLY$HOME; cat"], client, env={"ONLY": "this"})
    assert await client.messages.get() == b"this"
    channel.close()
    await client.lost


async def test_serve_keeps_strays_out_of_the_conversation() -> None:
    import holdfast

    source = str(Path(holdfast.__file__).parent.parent)
    client = Client()
    channel = await stdio.dial([sys.executable, "-c", SERVES], client, env={**os.environ, "PYTHONPATH": source})
    channel.send(b"a")
    channel.send(b"b")
    async with asyncio.timeout(60):
        assert [await client.messages.get() for _ in range(2)] == [b"echo a", b"echo b"]
    channel.close()
    async with asyncio.timeout(60):
        assert await client.lost is None


def test_serve_answers_requests_from_a_file(tmp_path: Path) -> None:
    import holdfast

    source = str(Path(holdfast.__file__).parent.parent)
    (tmp_path / "requests").write_bytes(b"a\nb\n")
    with open(tmp_path / "requests", "rb") as requests:
        done = subprocess.run(
            [sys.executable, "-c", SERVES],
            stdin=requests,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": source},
            timeout=30,
            check=True,
        )
    assert done.stdout == b"echo a\necho b\n"
    assert done.stderr == b"stray output\nstray output\n"
