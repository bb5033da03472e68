"""A reply that is lost with its connection: the call is repeated, and its caller does not notice."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from holdfast.client.connection.channel_connection import ChannelConnection
from holdfast.client.remote import RemoteExec
from holdfast.client.sandbox import Sandbox
from holdfast.errors import UnknownProcess
from holdfast.runtime.local import LocalExec
from holdfast.server.app import Server
from holdfast.transport.channel import Channel, Receiver
from holdfast.types import ProcessSpec
from tests.support.memory_channel import MemoryWire, memory_pair


class Ways:
    """Dials a server in this process, and knows every wire that it has laid."""

    def __init__(self, exec_: LocalExec) -> None:
        self.server = Server(exec_)
        self.wires: list[MemoryWire] = []

    async def dial(self, receiver: Receiver) -> Channel:
        connection = self.server.connect()
        client, channel, wire = memory_pair(receiver, connection)
        connection.open(channel)
        self.wires.append(wire)
        return client


@asynccontextmanager
async def cut_after(exec_: LocalExec, method: str) -> AsyncIterator[RemoteExec]:
    """A client with a connection that breaks once the server has done this, before its reply is on the wire."""
    ways = Ways(exec_)
    do = getattr(exec_, method)

    async def do_and_cut(*arguments: Any, **more: Any) -> Any:
        result = await do(*arguments, **more)
        if len(ways.wires) == 1:
            ways.wires[0].cut()
        return result

    setattr(exec_, method, do_and_cut)
    connection = ChannelConnection(ways.dial, address="memory")
    await connection.open()
    api = RemoteExec(connection)
    yield api
    assert len(ways.wires) == 2, "the reply was lost, and the call was repeated"
    await api.aclose()


async def test_to_forget_twice_is_to_forget(make_exec: Callable[..., LocalExec]) -> None:
    async with cut_after(make_exec(), "forget") as api:
        await api.start(ProcessSpec("short", ("true",)))
        await api.wait("short")
        await api.forget("short")
        with pytest.raises(UnknownProcess):
            await api.forget("short")


async def test_what_the_first_attempt_has_ended_was_running(make_exec: Callable[..., LocalExec]) -> None:
    async with cut_after(make_exec(), "terminate") as api:
        await api.start(ProcessSpec("long", ("sleep", "1000")))
        assert await api.terminate("long", force=True)
        assert not await api.terminate("long", force=True)


async def test_a_command_that_was_killed_by_the_first_attempt_is_timed_out(
    make_exec: Callable[..., LocalExec],
) -> None:
    async with cut_after(make_exec(), "terminate") as api:
        with pytest.raises(TimeoutError, match="not ended within"):
            await Sandbox(api).exec(["sleep", "1000"], timeout=0.01, timeout_retry=False)


async def test_a_request_whose_connection_breaks_before_its_turn_leaves_no_trace(
    make_exec: Callable[..., LocalExec],
) -> None:
    exec_ = make_exec()
    connection = Server(exec_).connect()
    _, channel, _ = memory_pair(connection, connection)
    connection.open(channel)
    for id, method, params in (
        (1, "initialize", {"clientName": "test"}),
        (2, "process/forget", {"processId": "x"}),
    ):
        connection.message_received(json.dumps({"id": id, "method": method, "params": params}).encode())
    connection.connection_lost(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()  # a coroutine that was never awaited would be reported now, as an error
    assert not connection._tasks
