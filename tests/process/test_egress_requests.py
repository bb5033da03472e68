"""Requests as the filtering proxy passes them on."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from holdfast.proxies.egress.proxy import serving
from holdfast.proxies.egress.rules import EgressRules


async def test_a_request_with_two_lengths_has_one_behind_the_proxy(tmp_path: Path) -> None:
    """A parser that uses the other one would take the rest of the body for a request of its own."""
    received: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    site = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = site.sockets[0].getsockname()[1]
    path = str(tmp_path / "egress.sock")
    async with serving(path, EgressRules([f"127.0.0.1:{port}"]), lambda fact: None), site:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as door:
            door.connect(path)
            socket.send_fds(door, [b"L"], [listener.fileno()])
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(
                b"POST http://127.0.0.1:%d/ HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" % port
            )
            assert (await reader.read()).endswith(b"ok")
            writer.close()
    assert b"transfer-encoding: chunked" in received[0].lower()
    assert b"content-length" not in received[0].lower()
