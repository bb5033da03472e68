"""Connections to a provider: against real sockets, with a provider that a test scripts by hand."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="Upstream needs httpx: install holdfast[bridge]")
pytest.importorskip("h11", reason="connections to a provider need h11: install holdfast[bridge]")

from holdfast.bridge import provider_transport  # noqa: E402
from holdfast.bridge.provider_transport import ProviderTransport, request_head, with_body  # noqa: E402
from holdfast.bridge.upstream import ProviderClient, Upstream  # noqa: E402
from holdfast.wire.http_messages import HttpRequest  # noqa: E402

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Scripted:
    """A provider on 127.0.0.1. It counts its connections."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.connections = 0
        self.url = ""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class Transport(httpx.AsyncBaseTransport):  # type: ignore[misc, name-defined, unused-ignore]
    """The connections of the bridge, for a client of httpx."""

    def __init__(self, trusted: ssl.SSLContext) -> None:
        self._inner = ProviderTransport(trusted)

    async def handle_async_request(self, request: Any) -> Any:
        content = await request.aread()
        headers = [pair for pair in request.headers.raw if pair[0].lower() != b"content-length"]
        head = request_head(request.method, request.url.raw_path, headers)
        limits = request.extensions["timeout"]
        (status, returned), body = await self._inner.exchange(
            request.url,
            request.method,
            with_body(head, content) if content else head,
            connect=limits["connect"],
            silence=limits["read"],
        )
        return httpx.Response(status, headers=returned, stream=body)

    async def aclose(self) -> None:
        await self._inner.aclose()


@contextlib.asynccontextmanager
async def scripted(script: Script, timeout: Any = None) -> AsyncIterator[tuple[Scripted, Any]]:
    provider = Scripted(script)
    server = await asyncio.start_server(provider.connected, "127.0.0.1", 0)
    provider.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    transport = Transport(httpx.create_ssl_context())
    async with httpx.AsyncClient(transport=transport, timeout=timeout) as client, asyncio.timeout(60):
        yield provider, client
    server.close()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    """The head of a request, and its body, which it does not return."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0))
    return head


def make_certificate(directory: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl")
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([openssl, *made, *names], cwd=directory, check=True, capture_output=True)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_a_connection_is_used_again() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await head_of(reader):
            writer.write(WHOLE)

    async with scripted(script) as (provider, client):
        for number in range(3):
            assert (await client.post(provider.url, content=b"x" * number)).content == b"hello"
        assert provider.connections == 1


async def test_the_head_of_a_request_depends_on_all_of_it_but_the_body() -> None:
    received: list[tuple[list[bytes], bytes]] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            received.append((head.split(b"\r\n"), await reader.readexactly(length)))
            writer.write(WHOLE)

    async with scripted(script) as (provider, _):
        client = ProviderClient(Upstream(provider.url, "sk-0123456789abcdef"))

        async def sent(
            method: str = "POST",
            path: str = "/a",
            value: str = "1",
            body: bytes = b"",
            dialect: str = "openai_chat",
        ) -> list[bytes]:
            request = HttpRequest(method, path, "", (("accept", value),), body)
            async with contextlib.aclosing(await client.send(request, dialect)) as answer:
                assert await answer.whole() == b"hello"
            head, got = received[-1]
            assert got == body
            lengths = [line for line in head if line.lower().startswith(b"content-length")]
            assert lengths == ([] if method == "GET" else [b"content-length: %d" % len(body)])
            return head

        try:
            first = await sent(body=b"one")
            assert (first[0], b"accept: 1" in first) == (b"POST /a HTTP/1.1", True)
            assert b"authorization: Bearer sk-0123456789abcdef" in first
            assert await sent(body=b"two") == first
            for body in (b"three", b""):
                await sent(body=body)
            assert (await sent(path="/b"))[0] == b"POST /b HTTP/1.1"
            assert (await sent("PUT"))[0] == b"PUT /a HTTP/1.1"
            assert (await sent("GET"))[0] == b"GET /a HTTP/1.1"
            changed = await sent(value="2")
            assert (b"accept: 2" in changed, b"accept: 1" in changed) == (True, False)
            assert b"x-api-key: sk-0123456789abcdef" in await sent(dialect="anthropic")
            assert await sent(body=b"one") == first
        finally:
            await client.aclose()


@pytest.mark.parametrize(
    ("name", "value"), [(b"x", b"1\nx-api-key: 2"), (b"x y", b"1"), (b"transfer-encoding", b"chunked")]
)
def test_a_head_that_http_does_not_allow_is_not_written(name: bytes, value: bytes) -> None:
    with pytest.raises(httpx.LocalProtocolError):
        request_head("POST", b"/a", [(b"host", b"h"), (name, value)])


async def test_calls_at_a_time_have_a_connection_each() -> None:
    here = asyncio.Barrier(5)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        await here.wait()
        writer.write(WHOLE)

    async with scripted(script) as (provider, client):
        answers = await asyncio.gather(*(client.get(provider.url) for _ in range(5)))
        assert [answer.content for answer in answers] == [b"hello"] * 5


async def test_a_connection_that_its_provider_closed_is_not_used() -> None:
    closed = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(WHOLE)
        writer.write_eof()
        await reader.read()
        closed.set()

    async with scripted(script) as (provider, client):
        for _ in range(2):
            closed.clear()
            assert (await client.get(provider.url)).content == b"hello"
            await closed.wait()
        assert provider.connections == 2


async def test_an_answer_that_says_more_than_it_should_ends_its_connection() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await head_of(reader):
            writer.write(WHOLE + b"more")

    async with scripted(script) as (provider, client):
        for _ in range(2):
            assert (await client.get(provider.url)).content == b"hello"
        assert provider.connections == 2


@pytest.mark.parametrize(
    "reply_bytes",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nconnection: Close, x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    ],
    ids=["close", "close-and-more", "http-1.0"],
)
async def test_a_connection_that_its_provider_will_close_is_not_used(reply_bytes: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await head_of(reader):
            writer.write(reply_bytes)

    async with scripted(script) as (provider, client):
        for _ in range(2):
            assert (await client.get(provider.url)).content == b"hello"
        assert provider.connections == 2


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_without_a_body_ends_with_its_head(status: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await head_of(reader):
            writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n")

    async with scripted(script) as (provider, client):
        for _ in range(2):
            assert (await client.get(provider.url)).content == b""
        assert provider.connections == 1


async def test_each_piece_is_there_before_the_next_is_made() -> None:
    seen = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(CHUNKED)
        for number in range(3):
            seen.clear()
            writer.write(chunk(b"%d" % number))
            await seen.wait()
        writer.write(b"0\r\n\r\n")

    async with scripted(script) as (provider, client), client.stream("GET", provider.url) as answer:
        pieces = []
        async for piece in answer.aiter_raw():
            pieces.append(piece)
            seen.set()
        assert pieces == [b"0", b"1", b"2"]


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    async with scripted(script) as (provider, client):
        assert (await client.get(provider.url)).content == b"all of it"


@pytest.mark.parametrize(
    "reply_bytes",
    [b"", b"HTTP/1.1 200 O", CHUNKED + chunk(b"half"), WHOLE[:-1], b"not HTTP at all\r\n\r\n"],
    ids=["nothing", "half-a-head", "no-last-chunk", "a-byte-less", "nonsense"],
)
async def test_an_answer_that_breaks_off_is_an_error(reply_bytes: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(reply_bytes)

    async with scripted(script) as (provider, client):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(provider.url)


async def test_an_answer_that_is_left_breaks_its_connection_off() -> None:
    left = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(CHUNKED + chunk(b"one"))
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        left.set()

    async with scripted(script) as (provider, client):
        async with client.stream("GET", provider.url) as answer:
            assert await anext(answer.aiter_raw()) == b"one"
        await left.wait()


async def test_a_call_that_is_cancelled_breaks_its_connection_off() -> None:
    requested, left = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        requested.set()
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        left.set()

    async with scripted(script) as (provider, client):
        call = asyncio.create_task(client.get(provider.url))
        await requested.wait()
        call.cancel()
        await left.wait()
        with pytest.raises(asyncio.CancelledError):
            await call


@pytest.mark.parametrize("reply_bytes", [b"", CHUNKED + chunk(b"one")], ids=["at-its-beginning", "in-its-middle"])
async def test_a_provider_that_is_silent_for_too_long_is_an_error(reply_bytes: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(reply_bytes)
        await reader.read(1)

    async with scripted(script, timeout=httpx.Timeout(60, read=0.05)) as (provider, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.get(provider.url)


async def test_a_large_answer_waits_for_its_reader_and_arrives_whole() -> None:
    size = 64 * provider_transport.HELD_BYTES
    blocked = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        blocked.set()
        await writer.drain()

    async with scripted(script) as (provider, client), client.stream("GET", provider.url) as answer:
        await blocked.wait()
        total, largest = 0, 0
        async for piece in answer.aiter_raw():
            total += len(piece)
            largest = max(largest, len(piece))
        assert total == size
        assert largest < 4 * provider_transport.HELD_BYTES


async def test_a_large_request_arrives_whole() -> None:
    sent = bytes(range(256)) * 65_536
    got: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        got.append(await reader.readexactly(len(sent)))
        writer.write(WHOLE)

    async with scripted(script) as (provider, client):
        assert (await client.post(provider.url, content=sent)).content == b"hello"
        assert got == [sent]


async def test_a_word_before_the_answer_is_passed_over() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + WHOLE)

    async with scripted(script) as (provider, client):
        answer = await client.get(provider.url)
        assert (answer.status_code, answer.content) == (200, b"hello")


async def test_nobody_who_listens_is_an_error() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("nobody asks it")

    async with scripted(script) as (provider, client):
        url = provider.url
    async with httpx.AsyncClient(transport=Transport(httpx.create_ssl_context())) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)


async def test_a_refusal_before_all_is_read_is_told() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        await done.wait()

    done = asyncio.Event()
    async with scripted(script) as (provider, client):
        assert (await client.post(provider.url, content=b"x" * 16_000_000)).status_code == 413
        done.set()


@pytest.mark.parametrize("trusts", [True, False], ids=["trusted", "not-trusted"])
async def test_tls_is_spoken_with_whom_we_trust(tmp_path: Path, *, trusts: bool) -> None:
    make_certificate(tmp_path)
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(WHOLE)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=own)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}/"
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem") if trusts else None)
    async with httpx.AsyncClient(transport=Transport(trusted)) as client, asyncio.timeout(60):
        if trusts:
            assert (await client.get(url)).content == b"hello"
        else:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(url)
    server.close()


async def test_a_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append((await head_of(reader)).partition(b"\r\n")[0])
        writer.write(WHOLE)

    async with scripted(script) as (provider, _):
        proxied(monkeypatch, provider.url, not_for="")
        assert await answer_of("http://a.invalid") == b"hello"
        assert lines == [b"GET http://a.invalid/v1/models HTTP/1.1"]


async def test_who_is_named_as_without_a_proxy_is_asked_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append((await head_of(reader)).partition(b"\r\n")[0])
        writer.write(WHOLE)

    async with scripted(script) as (provider, _):
        proxied(monkeypatch, "http://a.invalid", not_for="127.0.0.1")
        assert await answer_of(provider.url) == b"hello"
        assert lines == [b"GET /v1/models HTTP/1.1"]


def proxied(monkeypatch: pytest.MonkeyPatch, proxy: str, *, not_for: str) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HTTP_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", not_for)


async def answer_of(base_url: str) -> bytes:
    client = ProviderClient(Upstream(base_url))
    try:
        request = HttpRequest("GET", "/v1/models", "", (), b"")
        async with contextlib.aclosing(await client.send(request, "openai_chat")) as answer:
            return await answer.whole()
    finally:
        await client.aclose()
