"""A reply that is lost with its connection: the call is repeated, and its caller does not notice."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable

import pytest

from holdfast.app import Server
from holdfast.client.connection import Connection
from holdfast.client.remote import RemoteExec
from holdfast.errors import UnknownProcess
from holdfast.model import ProcessSpec
from holdfast.runtime.local import LocalExec
from holdfast.testing.memory import MemoryWire, memory_pair
from holdfast.transport.channel import Channel, Receiver


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


async def test_to_forget_twice_is_to_forget(
    make_exec: Callable[..., LocalExec], monkeypatch: pytest.MonkeyPatch
) -> None:
    exec_ = make_exec()
    ways = Ways(exec_)
    forget = exec_.forget

    async def forget_and_cut(process_id: str) -> None:
        await forget(process_id)
        if len(ways.wires) == 1:
            ways.wires[0].cut()

    monkeypatch.setattr(exec_, "forget", forget_and_cut)
    connection = Connection(ways.dial, address="memory")
    await connection.open()
    api = RemoteExec(connection)
    await api.start(ProcessSpec("short", ("true",)))
    await api.wait("short")
    await api.forget("short")
    assert len(ways.wires) == 2, "the reply was lost, and the call was repeated"
    with pytest.raises(UnknownProcess):
        await api.forget("short")
    await api.aclose()


async def test_a_request_whose_connection_breaks_before_its_turn_leaves_no_trace(
    make_exec: Callable[..., LocalExec],
) -> None:
    exec_ = make_exec()
    connection = Server(exec_).connect()
    _, channel, _ = memory_pair(connection, connection)
    connection.open(channel)
    for id, method, params in ((1, "initialize", {"clientName": "test"}), (2, "process/forget", {"processId": "x"})):
        connection.message_received(json.dumps({"id": id, "method": method, "params": params}).encode())
    connection.connection_lost(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()  # a coroutine that nobody awaited would be told now, as an error
    assert not connection._tasks
