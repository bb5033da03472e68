"""A thousand processes at once, and that what they used is given back."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Closed, OutputChunk, Process, Sandbox, TerminalSize
from tests.contract.ways import end_everything, open_box
from tests.support.servers import RunningServer, conversation, is_alive

MANY = 1_000


@pytest.mark.parametrize("way", ["inprocess", "unix"])
async def test_a_thousand_processes_at_once(way: str, server: RunningServer, many_descriptors: None) -> None:
    async with open_box(way, server, {"max_exited_processes": MANY}) as box:
        processes = await asyncio.gather(*(box.start(["cat"], id=f"p{n}", stdin="open") for n in range(MANY)))
        assert len({process.pid for process in processes}) == MANY
        assert sum(info.running for info in await box.api.list()) == MANY
        answers = await asyncio.gather(*(_say(process) for process in processes))
        assert answers == [f"hello {n}\n".encode() for n in range(MANY)]
        # Half end by themselves, half are killed.
        for process in processes[: MANY // 2]:
            await process.close_stdin()
        await asyncio.gather(*(process.terminate(force=True) for process in processes[MANY // 2 :]))
        codes = [status.exit_code for status in await asyncio.gather(*(process.wait() for process in processes))]
        assert codes == [0] * (MANY // 2) + [137] * (MANY // 2)
        assert not [process.pid for process in processes if is_alive(process.pid)]


async def _say(process: Process) -> bytes:
    await process.write(f"hello {process.id[1:]}\n")
    reader = process.events()
    event = await anext(reader)
    await reader.aclose()
    assert isinstance(event, OutputChunk)
    return event.data


@pytest.mark.parametrize("way", ["unix", "ws"])
async def test_every_descriptor_is_given_back(way: str, server: RunningServer) -> None:
    async def use(box: Sandbox) -> None:
        for tty in (None, TerminalSize()):
            process = await box.start(["cat"], stdin="open", tty=tty)
            reader = process.events()
            await process.write("x\n")
            await anext(reader)
            await process.terminate(force=True)
            assert [event async for event in reader][-1].__class__ is Closed
            await process.forget()

    async with open_box(way, server, {}) as box:
        await use(box)
    async with conversation(server.address("unix")) as talk:
        # Its reply comes after the server has seen that the sandbox is gone.
        await talk.initialize()
        before = server.open_descriptors()
        async with open_box(way, server, {}) as box:
            for _ in range(5):
                await use(box)
        while (await talk.result("environment/status"))["sessions"] > 1:
            pass
        assert server.open_descriptors() == before
    await end_everything(server)
