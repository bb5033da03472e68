"""Sockets that a server passes: one for each reply, in order; anything else than a stream socket is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from holdfast.client.ports.descriptor_link import DescriptorLink
from holdfast.errors import ConnectionLost, PortUnavailable
from holdfast.wire.stream_messages import StreamAddress

ADDRESS = StreamAddress(port=1)
HANDSHAKE = {"sessionId": "s", "encoding": "json", "serverVersion": "1", "protocol": 1, "resumed": False}
#: Returns the reply without its id, and the descriptors to send with it.
Answer = Callable[[], tuple[dict[str, object], list[int]]]


@contextlib.asynccontextmanager
async def linked(path: str, *answers: Answer) -> AsyncIterator[DescriptorLink]:
    """A link to a server that gives these answers to `stream/dial`, one after the other."""
    loop = asyncio.get_running_loop()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.setblocking(False)

    async def serve() -> None:
        peer, _ = await loop.sock_accept(listener)
        pending = list(answers)
        with peer:
            rest = b""
            while data := await loop.sock_recv(peer, 65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    reply: dict[str, object] = {"result": HANDSHAKE}
                    fds: list[int] = []
                    if request["method"] != "initialize":
                        if not pending:
                            return
                        reply, fds = pending.pop(0)()
                    message = json.dumps({"id": request["id"], **reply}).encode() + b"\n"
                    socket.send_fds(peer, [message], fds)
                    for fd in fds:
                        os.close(fd)

    serving = asyncio.ensure_future(serve())
    link = DescriptorLink(path)
    try:
        await link.connect()
        yield link
    finally:
        link.close()
        await serving
        listener.close()


def stream() -> tuple[dict[str, object], list[int]]:
    near, far = socket.socketpair()
    far.sendall(b"hello")
    far.close()
    return {"result": {}}, [near.detach()]


def refused() -> tuple[dict[str, object], list[int]]:
    return {"error": {"code": PortUnavailable.code, "message": "127.0.0.1:1: refused", "data": {}}}, []


async def test_each_reply_has_its_socket(tmp_path: Path) -> None:
    async with linked(str(tmp_path / "s"), stream, refused, stream) as link:
        with await link.dial(ADDRESS) as sock:
            assert sock.recv(5) == b"hello"
        with pytest.raises(PortUnavailable, match="refused"):
            await link.dial(ADDRESS)
        with await link.dial(ADDRESS) as sock:
            assert sock.recv(5) == b"hello"


async def test_anything_but_a_stream_socket_is_refused_and_closed(tmp_path: Path) -> None:
    def file() -> tuple[dict[str, object], list[int]]:
        return {"result": {}}, [os.open("/dev/null", os.O_RDONLY)]

    def datagrams() -> tuple[dict[str, object], list[int]]:
        return {"result": {}}, [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach()]

    def nothing() -> tuple[dict[str, object], list[int]]:
        return {"result": {}}, []

    def too_many() -> tuple[dict[str, object], list[int]]:
        return {"result": {}}, [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]

    before = len(os.listdir("/proc/self/fd"))
    async with linked(str(tmp_path / "s"), file, datagrams, nothing, too_many) as link:
        for reason in ("not a socket", "not a stream socket", "has no descriptor", "not a socket"):
            with pytest.raises(ConnectionLost, match=reason):
                await link.dial(ADDRESS)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_server_that_ends_fails_the_calls(tmp_path: Path) -> None:
    async with linked(str(tmp_path / "s")) as link:
        with pytest.raises(ConnectionLost, match="closed by the server"):
            await link.dial(ADDRESS)
        assert not link.open
