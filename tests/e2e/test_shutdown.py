"""The end of a server, of its clients, and of their children: no process and no file is left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import HoldfastError
from tests.support.servers import (
    MARK_VARIABLE,
    Conversation,
    conversation,
    is_alive,
    marked_processes,
    running_server,
    server_command,
    server_environment,
)
from tests.support.signalling import send_signal

#: Leaves word of its TERM, and of the KILL that it does not survive by having written nothing more.
POLITE = "trap 'echo polite >> {log}; exit 0' TERM; echo ready; while :; do sleep 0.01; done"
STUBBORN = "trap 'echo stubborn >> {log}' TERM; echo ready; while :; do sleep 0.01; done"
ESCAPED = "setsid sh -c 'trap \"\" TERM; echo $$ > {log}.pid; echo ready; while :; do sleep 1; done' & exit 0"


async def start_ready(talk: Conversation, id: str, script: str, **more: Any) -> int:
    started = await talk.result("process/start", processId=id, argv=["sh", "-c", script], **more)
    await talk.notice("process/output", processId=id)
    return int(started["pid"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_everything_in_order(number: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_server(["unix", "ws"], settings={"shutdown_grace_period_ms": 500}) as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            pids = [
                await start_ready(talk, "polite", POLITE.format(log=log)),
                await start_ready(talk, "stubborn", STUBBORN.format(log=log)),
                await start_ready(talk, "terminal", "echo ready; exec cat", tty=True),
            ]
            await start_ready(talk, "escaped", ESCAPED.format(log=log))
            pids.append(int(await asyncio.to_thread(Path(f"{log}.pid").read_text)))
            assert all(is_alive(pid) for pid in pids)
            code = await asyncio.to_thread(server.stop, number)
            assert code == 0
            assert not [pid for pid in pids if is_alive(pid)]
            assert server.leftovers() == []
            # TERM came to both listeners, and one of them had to be killed.
            assert set(log.read_text().split()) == {"polite", "stubborn"}
            assert await _exits_until_the_end(talk) == {"polite": 0, "stubborn": 137, "terminal": 143, "escaped": 0}


async def _exits_until_the_end(talk: Conversation) -> dict[str, int]:
    """The last notifications, until the server closes the connection."""
    reported: dict[str, int] = {}
    try:
        while True:
            exited = await talk.notice("process/exited")
            reported[exited["processId"]] = exited["exitCode"]
    except ConnectionError:
        return reported


async def test_nothing_new_starts_while_it_shuts_down(tmp_path: Path) -> None:
    with running_server(settings={"shutdown_grace_period_ms": 60_000}) as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            script = (
                f"trap 'echo told; read x < {tmp_path}/go; exit 0' TERM; echo ready; while :; do sleep 0.01; done"
            )
            os.mkfifo(tmp_path / "go")
            await start_ready(talk, "slow", script)
            server.process.send_signal(signal.SIGTERM)
            await talk.notice("process/output", processId="slow")
            code, message = await talk.error("process/start", processId="late", argv=["true"])
            assert (code, "shutting down" in message) == (-32025, True)
            await asyncio.to_thread((tmp_path / "go").write_text, "\n")
            assert (await talk.notice("process/exited", processId="slow"))["exitCode"] == 0
            assert await asyncio.to_thread(server.process.wait, 60) == 0


async def test_a_client_may_ask_for_the_end() -> None:
    with running_server() as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            pid = await start_ready(talk, "stubborn", "trap '' TERM; echo ready; while :; do sleep 1; done")
            assert await talk.result("server/shutdown", graceMs=0) == {}
            assert await asyncio.to_thread(server.process.wait, 60) == 0
            assert not is_alive(pid)


async def test_stdio_ends_with_its_input() -> None:
    command = server_command(["stdio"], {"shutdown_grace_period_ms": 100})
    async with conversation(command) as talk:
        await talk.initialize()
        pid = await start_ready(talk, "stubborn", "trap '' TERM; echo ready; while :; do sleep 1; done")
    assert not is_alive(pid)


async def test_leaving_a_sandbox_on_stdio_leaves_nobody_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits for its server, which gives a process that does not listen its 5 s before the KILL."""
    monkeypatch.setenv("PYTHONPATH", server_environment()["PYTHONPATH"])
    monkeypatch.setenv(MARK_VARIABLE, "leaving-a-sandbox")
    async with holdfast.connect(server_command(["stdio"])) as box:
        process = await box.start(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"])
        await process.wait_for_output("ready")
        assert process.pid in marked_processes("leaving-a-sandbox")
    assert marked_processes("leaving-a-sandbox") == []


CLIENT = """
import asyncio, sys, holdfast
async def main():
    async with holdfast.connect(sys.argv[1]) as box:
        await box.start(["sleep", "1000"], id="free")
        await box.start(["sleep", "1000"], id="bound", lifetime="connection")
        flood = await box.start(["yes"], id="flood", overflow="block")
        reader = flood.events()
        await anext(reader)
        print("ready", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.parametrize("scheme", ["unix", "ws"])
async def test_a_client_that_is_killed_takes_only_what_was_bound_to_it(scheme: str) -> None:
    with running_server(["unix", "ws"], settings={"detached_session_seconds": 0.05}) as server:
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CLIENT, server.address(scheme)),
            stdout=asyncio.subprocess.PIPE,
            env=server_environment(),
        )
        assert client.stdout is not None
        assert await client.stdout.readline() == b"ready\n"
        client.kill()
        await client.communicate()
        async with holdfast.connect(server.address("unix")) as box:
            bound = await box.process("bound")
            assert (await bound.wait()).signal == "SIGTERM"
            assert (await (await box.process("free")).describe()).running
            # The flood waits for a reader, and the next one gets it from the beginning.
            flood = await box.process("flood")
            assert (await flood.describe()).running
            assert (await flood.read(max_bytes=10)).chunks[0].offset == 0
            assert await flood.terminate(force=True)


async def test_a_server_without_a_keeper_that_is_killed_is_told_to_its_clients() -> None:
    with running_server(settings={"keeper": False}, exit_code=None) as server:
        async with holdfast.connect(server.address("unix"), reconnect_deadline=0.05) as box:
            process = await box.start(["cat"], stdin="open", lifetime="connection")
            waiting = asyncio.create_task(process.wait())
            await process.describe()
            server.process.kill()
            with pytest.raises(HoldfastError, match="connection"):
                await waiting
        # Nothing cleans up after a KILL; the leftovers are ours to end here.
        for pid in marked_processes(server.mark):
            send_signal(pid, signal.SIGKILL)
        await asyncio.to_thread(server.process.wait)
        for left in server.leftovers():
            if left == server.socket:
                os.unlink(left)
            elif left.startswith(server.spool):
                shutil.rmtree(left)


async def test_a_server_with_nothing_to_do_ends_by_itself() -> None:
    with running_server(settings={"idle_shutdown_seconds": 0.05}) as server:
        assert await asyncio.to_thread(server.process.wait, 60) == 0
    with running_server(settings={"idle_shutdown_seconds": 0.05}) as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            await talk.result("process/start", processId="p", argv=["cat"], pipeStdin=True)
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            await talk.result("process/closeStdin", processId="p")
            assert (await talk.result("process/wait", processId="p"))["exitCode"] == 0
        assert await asyncio.to_thread(server.process.wait, 60) == 0
