"""`holdfast model_proxy` and `holdfast call` as real processes: requests to the host and back, and how they end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

import pytest

pytest.importorskip("h11", reason="h11 is not installed (extra `bridge`)")

import holdfast
from holdfast.client.host_call import HostService
from holdfast.wire.http_messages import HttpHead, HttpRequest, pack_head, unpack_request
from tests.support.servers import RunningServer, running_server, server_environment
from tests.support.signalling import send_signal

SERVER_SENT = (("content-type", "text/event-stream"),)


class Host:
    """Answers by the path."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.called = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, method: str, body: bytes) -> bytes | AsyncIterator[bytes]:
        if method != "http":
            return method.encode() + b":" + body
        request = unpack_request(body)
        self.requests.append(request)
        self.called.set()
        if request.path == "/nonsense":
            return b"this is no head"
        if request.path == "/bug":
            raise ValueError("a secret")
        if request.path == "/nothing":
            return b""
        return self._answer(request)

    async def _answer(self, request: HttpRequest) -> AsyncIterator[bytes]:
        if request.path == "/size":
            body = b"%d" % len(request.body)
            yield pack_head(HttpHead(200, (("content-length", str(len(body))),)))
            yield body
            return
        if request.path == "/late":
            await self._wait()
        yield pack_head(HttpHead(201, SERVER_SENT))
        yield b"data: 1\n\n"
        if request.path == "/wait":
            await self._wait()
        if request.path == "/broken":
            raise ValueError("a secret")
        yield b"data: 2\n\n"

    async def _wait(self) -> None:
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Proxy:
    """A proxy process that listens."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    async def open(self, path: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\n" % path.encode())
        writer.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return reader, writer

    async def post(self, path: str, body: bytes = b"") -> tuple[int, bytes]:
        reader, writer = await self.open(path, body)
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head[9:12]), answer

    async def health(self) -> object:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200 ")
        return json.loads(answer)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@asynccontextmanager
async def offering(server: RunningServer, host: Host) -> AsyncIterator[HostService]:
    async with holdfast.connect(server.address("unix")) as box, box.offer("model", host) as service:
        yield service


@asynccontextmanager
async def proxy_for(server: RunningServer, instance: str, **environ: str) -> AsyncIterator[Proxy]:
    """A proxy on a port of its own; at the end SIGTERM, and it has exited with 0 and printed nothing."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast", "model_proxy"),
        env=server_environment(
            HOLDFAST_DIRECTORY=server.directory,
            BRIDGE_MODEL_SERVICE_PORT="0",
            BRIDGE_MODEL_SERVICE_INSTANCE=instance,
            **environ,
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    assert url.startswith("http://127.0.0.1:")
    try:
        yield Proxy(process, int(url.rpartition(":")[2]))
    finally:
        process.terminate()
        _, message = await process.communicate()
    assert process.returncode == 0, message
    assert b"Traceback" not in message, message
    assert b"secret" not in message


async def test_requests_and_their_answers_pass_as_they_come(server: RunningServer) -> None:
    host = Host()
    async with offering(server, host) as service, proxy_for(server, service.instance) as proxy:
        assert await proxy.health() == {"status": "ok", "host": "answers"}
        assert host.requests == []
        reader, writer = await proxy.open("/wait?alt=sse", b'{"model":"m"}')
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 201 ")
        assert b"content-type: text/event-stream\r\n" in head
        assert await reader.readexactly(14) == b"9\r\ndata: 1\n\n\r\n"
        host.go_on.set()
        assert await reader.read() == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
        writer.close()
        assert host.requests == [HttpRequest("POST", "/wait", "alt=sse", (), b'{"model":"m"}')]
        status, answer = await proxy.post("/size", b"x" * 20_000_000)
        assert (status, answer) == (200, b"20000000")


async def test_what_goes_wrong_is_told_and_the_proxy_goes_on(server: RunningServer) -> None:
    host = Host()
    async with offering(server, host) as service, proxy_for(server, service.instance) as proxy:
        for path in ("/nonsense", "/bug", "/nothing"):
            status, answer = await proxy.post(path)
            assert status == 502
            assert json.loads(answer)["type"] == "error"
            assert b"secret" not in answer
        status, answer = await proxy.post("/broken")
        assert status == 201
        assert not answer.endswith(b"0\r\n\r\n"), "an answer that was broken off must not look whole"
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"TRACE / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 405 ")
        writer.close()
        assert await proxy.post("/size", b"on") == (200, b"2")


@pytest.mark.parametrize("path", ["/late", "/wait"])
async def test_a_client_that_goes_cancels_its_call_on_the_host(server: RunningServer, path: str) -> None:
    host = Host()
    async with offering(server, host) as service, proxy_for(server, service.instance) as proxy:
        _, writer = await proxy.open(path)
        await host.called.wait()
        writer.close()
        await host.cancelled.wait()


async def test_sigterm_ends_it_while_a_stream_is_open(server: RunningServer) -> None:
    host = Host()
    async with offering(server, host) as service:
        async with proxy_for(server, service.instance) as proxy:
            reader, writer = await proxy.open("/wait")
            await reader.readuntil(b"data: 1")
        assert b"0\r\n\r\n" not in await reader.read()
        writer.close()
        await host.cancelled.wait()


async def test_without_a_host_it_answers_itself(server: RunningServer) -> None:
    host = Host()
    async with offering(server, host) as service:
        proxying = proxy_for(server, service.instance)
        proxy = await proxying.__aenter__()
        assert await proxy.post("/size", b"1") == (200, b"1")
    try:
        status, answer = await proxy.post("/size")
        assert status == 503
        assert "no host offers" in json.loads(answer)["error"]["message"]
        assert await proxy.health() == {"status": "ok", "host": "does not answer"}
    finally:
        await proxying.__aexit__(None, None, None)


async def test_it_finds_a_server_that_was_restarted() -> None:
    host = Host()
    with running_server() as server:
        async with (
            holdfast.connect(server.address("unix")) as box,
            box.offer("model", host) as service,
            proxy_for(server, service.instance) as proxy,
        ):
            waiting = asyncio.create_task(proxy.post("/late"))
            await host.called.wait()
            send_signal(server.pid, signal.SIGKILL)
            status, _ = await waiting
            assert status == 503
            await host.cancelled.wait()  # the host has the new server
            server.pid = (await box.status()).pid
            assert await proxy.post("/size", b"again") == (200, b"5")


async def test_limits_are_set_by_the_environment(server: RunningServer) -> None:
    host = Host()
    limits = {"BRIDGE_MODEL_SERVICE_MAX_CONNECTIONS": "1", "BRIDGE_MODEL_SERVICE_MAX_BODY_BYTES": "10"}
    async with offering(server, host) as service, proxy_for(server, service.instance, **limits) as proxy:
        assert (await proxy.post("/size", b"x" * 11))[0] == 413
        reader, writer = await proxy.open("/wait", b"x" * 10)
        await reader.readuntil(b"data: 1")
        assert (await proxy.post("/size"))[0] == 503
        host.go_on.set()
        await reader.read()
        writer.close()


async def run(
    server: RunningServer, *arguments: str, environ: Mapping[str, str] = MappingProxyType({}), given: bytes = b""
) -> tuple[int, bytes, bytes]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast", *arguments),
        env=server_environment(**{"HOLDFAST_DIRECTORY": server.directory, **environ}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(given)
    assert process.returncode is not None
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, b"BRIDGE_MODEL_SERVICE_INSTANCE is not set"),
        ({"BRIDGE_MODEL_SERVICE_INSTANCE": "../x"}, b"instance '../x'"),
        ({"BRIDGE_MODEL_SERVICE_INSTANCE": "0" * 32, "BRIDGE_MODEL_SERVICE_PORT": "70000"}, b"65535"),
    ],
)
async def test_wrong_settings_are_named(server: RunningServer, environ: dict[str, str], message: bytes) -> None:
    code, out, err = await run(server, "model_proxy", environ=environ)
    assert (code, out) == (2, b"")
    assert message in err


async def test_a_port_that_is_taken_is_named(server: RunningServer) -> None:
    taken = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = str(taken.sockets[0].getsockname()[1])
    environ = {"BRIDGE_MODEL_SERVICE_INSTANCE": "0" * 32, "BRIDGE_MODEL_SERVICE_PORT": port}
    code, _, err = await run(server, "model_proxy", environ=environ)
    taken.close()
    assert code == 2
    assert f"127.0.0.1:{port}".encode() in err


async def test_call_prints_the_answer(server: RunningServer) -> None:
    host = Host()
    async with offering(server, host) as service:
        flag = f"--instance={service.instance}"
        environ = {"HOLDFAST_SERVICE_INSTANCE": service.instance}
        assert await run(server, "call", flag, "model", "m", '{"a":1}') == (0, b'm:{"a":1}', b"")
        assert await run(server, "call", "model", "m", environ=environ) == (0, b"m:", b"")
        assert await run(server, "call", "model", "m", "-", environ=environ, given=b"\xff\x00") == (
            0,
            b"m:\xff\x00",
            b"",
        )
        where = {"HOLDFAST_SOCKET": server.socket, "HOLDFAST_DIRECTORY": "/nowhere"}
        assert await run(server, "call", "model", "m", environ={**environ, **where}) == (0, b"m:", b"")
        code, out, err = await run(server, "call", "models", "m", environ=environ)
        assert (code, out) == (1, b"")
        assert b"no host offers service 'models'" in err
        code, _, err = await run(server, "call", "model", "m")
        assert (code, b"HOLDFAST_SERVICE_INSTANCE" in err) == (2, True)
        code, _, err = await run(server, "call", "model")
        assert (code, b"a method" in err) == (2, True)


async def test_ctrl_c_calls_it_off(server: RunningServer) -> None:
    called, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(method: str, body: bytes) -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"begun\n"
            called.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        return pieces()

    async with holdfast.connect(server.address("unix")) as box, box.offer("tool", handler) as service:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast", "call", "--instance", service.instance, "tool", "m"),
            env=server_environment(HOLDFAST_DIRECTORY=server.directory),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        await cancelled.wait()
