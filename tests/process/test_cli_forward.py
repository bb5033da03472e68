"""`holdfast forward`: the printed address leads to the port, and an interrupt ends the verb."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys

import pytest

from holdfast.cli.verbs.sandbox.forward import split_local
from tests.support.servers import running_server, server_environment


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("8000", ("8000", 0)),
        ("8000:9000", ("8000", 9000)),
        ("db:5432", ("db:5432", 0)),
        ("db:5432:15432", ("db:5432", 15432)),
        ("unix:/run/a.sock", ("unix:/run/a.sock", 0)),
        ("unix:/run/a.sock:80", ("unix:/run/a.sock", 80)),
    ],
)
def test_a_port_and_its_local_port(text: str, split: tuple[str, int]) -> None:
    assert split_local(text) == split


async def test_the_verb_forwards_until_it_is_interrupted() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    inside = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = inside.sockets[0].getsockname()[1]
    with running_server(["unix"]) as server:
        verb = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "holdfast",
                "forward",
                "--json",
                "--sandbox",
                server.address("unix"),
                str(port),
            ),
            stdout=asyncio.subprocess.PIPE,
            env=server_environment(),
        )
        assert verb.stdout is not None
        shown = json.loads(await verb.stdout.readline())
        assert shown["port"] == str(port)
        host, _, local = shown["address"].partition(":")
        reader, writer = await asyncio.open_connection(host, int(local))
        assert await reader.read(-1) == b"hello"
        writer.close()
        verb.send_signal(signal.SIGINT)
        assert await verb.wait() == 130
    inside.close()


async def test_a_connection_that_fails_inside_is_reported_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running_server(["unix"]) as server:
        arguments = ["forward", "--json", "--sandbox", server.address("unix"), str(port)]
        verb = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=server_environment(),
        )
        assert verb.stdout is not None
        assert verb.stderr is not None
        _, _, local = json.loads(await verb.stdout.readline())["address"].partition(":")
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(local))
            with pytest.raises(ConnectionResetError):
                await reader.read(-1)
            writer.close()
        verb.send_signal(signal.SIGINT)
        reported = (await verb.stderr.read()).decode().splitlines()
        assert await verb.wait() == 130
    assert reported == [f"holdfast: a connection failed in the sandbox: 127.0.0.1:{port}: Connection refused"]
