"""The transports of `holdfast mcp`: whole programs on stdio and HTTP, sandboxes for a connection, and bad input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import ConnectMode

from holdfast.errors import InvalidParams
from holdfast.fleet.record import is_id
from holdfast.integrations.mcp.events import RecentEvents
from holdfast.integrations.mcp.http import MAX_REQUEST_BYTES, http_app
from holdfast.integrations.mcp.server import SandboxServer
from holdfast.integrations.mcp.sources import ExistingSandbox
from holdfast.service.fronts.listening import parse_address
from tests.support.parts import needs

from .connections import TOKEN, call, failed, http_server, over_http, over_stdio, variables

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory for the sandboxes of one test; its path is short enough for their sockets."""
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        yield Path(directory)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_commands_over_stdio_and_http(tmp_path: Path, mode: ConnectMode) -> None:
    async with over_stdio(tmp_path, "--sandbox", "inprocess", mode=mode) as client:
        assert (await call(client, "exec_command", cmd="pwd"))["output"] == f"{tmp_path}\n"
    async with http_server(tmp_path, "--sandbox", "inprocess") as url, over_http(url, mode=mode) as client:
        began = await call(client, "exec_command", cmd="read line; echo got $line", tty=True, yield_time_ms=250)
        ended = await call(
            client, "write_stdin", session_id=began["session_id"], chars="it\n", yield_time_ms=10_000
        )
        assert (ended["exit_code"], "got it" in ended["output"]) == (0, True)


async def test_the_end_of_a_connection_ends_its_commands(tmp_path: Path) -> None:
    async with over_stdio(tmp_path, "--sandbox", "local") as client:
        began = await call(client, "exec_command", cmd="exec sleep 600", yield_time_ms=250)
    async with over_stdio(tmp_path, "--sandbox", "local") as client:
        end = await call(client, "wait_process", process_id=began["process_id"])
        assert end["running"] is False
        await call(client, "exec_command", cmd="kill $PPID")


@needs("bwrap")
async def test_a_sandbox_for_the_life_of_a_connection(tmp_path: Path) -> None:
    async with over_stdio(tmp_path, "--create", "bwrap", "--network", "none") as client:
        await call(client, "write_file", path="note", content="first")
        made = await call(client, "sandbox_fork")
        assert made["state"] == "ready"
        await call(client, "write_file", path="note", content="second", sandbox=made["sandbox"])
        first = await call(client, "read_file", path="note")
        second = await call(client, "read_file", path="note", sandbox=made["sandbox"])
        assert (first["content"], second["content"]) == ("first", "second")
        other = (await call(client, "sandbox_create"))["sandbox"]
        assert "no such file" in await failed(client, "read_file", path="note", sandbox=other)
        left = await call(client, "sandbox_remove", sandbox=other)
        assert [each["sandbox"] for each in left["sandboxes"]] == ["main", made["sandbox"]]
        assert "lives as long as" in await failed(client, "sandbox_remove", sandbox="main")
        assert len(made_in(tmp_path)) == 2
    assert made_in(tmp_path) == []


@needs("bwrap")
async def test_each_session_over_http_has_a_sandbox_of_its_own(tmp_path: Path) -> None:
    async with http_server(tmp_path, "--create", "bwrap") as url:
        async with over_http(url) as one, over_http(url) as other:
            await call(one, "write_file", path="note", content="first")
            assert "no such file" in await failed(other, "read_file", path="note")
            assert len(made_in(tmp_path)) == 2
        async with over_http(url) as last:
            assert "no such file" in await failed(last, "read_file", path="note")
    assert made_in(tmp_path) == []


def made_in(directory: Path) -> list[str]:
    """The directories of sandboxes that exist."""
    return [each.name for each in directory.glob("fleet/*/*") if is_id(each.name)]


# --- bad input ---------------------------------------------------------------------------------------------------


class Reply:
    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers


async def post(url: str, body: bytes = b"", **headers: str) -> Reply:
    """Send a request as it is given, and return the head of the response."""
    host, _, port = url.removeprefix("http://").removesuffix("/mcp").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sent = {
        "host": f"{host}:{port}",
        "authorization": f"Bearer {TOKEN}",
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "content-length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items() if value)
    try:
        writer.write(f"POST /mcp HTTP/1.1\r\n{head}\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return Reply(int(lines[0].split()[1]), fields)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with http_server(tmp_path, "--sandbox", "inprocess") as url:
        yield url


async def test_requests_that_are_refused(url: str) -> None:
    body = json.dumps(INITIALIZE).encode()
    assert (await post(url, body)).status == 200
    for wrong in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe9"):
        refused = await post(url, body, authorization=wrong)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "bearer")
    assert (await post(url, body, host="evil.example.com")).status == 421
    assert (await post(url, body, origin="http://evil.example.com")).status == 403
    assert (await post(url, content_length=str(MAX_REQUEST_BYTES + 1))).status == 413
    assert (await post(url, b"{")).status == 400
    assert (await post(url, b"[" * 100_000)).status == 400
    assert (await post(url, body, mcp_session_id="absent")).status == 404
    # Before a byte of its body is there.
    assert (await post(url, authorization="", content_length="1000000")).status == 401
    assert (await post(url, body)).status == 200


async def test_a_message_that_is_too_long_ends_stdio(tmp_path: Path) -> None:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast", "mcp", "--sandbox", "inprocess"),
        env=variables(tmp_path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(b"not json\n" + json.dumps(INITIALIZE).encode() + b"\n")
    replies: list[dict[str, Any]] = []
    while not any(reply.get("id") == 1 for reply in replies):
        replies.append(json.loads(await server.stdout.readline()))
    with contextlib.suppress(ConnectionError):
        server.stdin.write(b"x" * (MAX_REQUEST_BYTES + 2))
        await server.stdin.drain()
    assert await server.wait() == 0


@needs("bwrap")
async def test_a_signal_removes_the_sandbox(tmp_path: Path) -> None:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast", "mcp", "--create", "bwrap"),
        env=variables(tmp_path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    calling = {"name": "exec_command", "arguments": {"cmd": "true"}}
    server.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
    await server.stdout.readline()
    for message in (
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": calling},
    ):
        server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    assert json.loads(await server.stdout.readline())["id"] == 2
    assert len(made_in(tmp_path)) == 1
    server.send_signal(signal.SIGTERM)
    assert await server.wait() == 0
    assert made_in(tmp_path) == []


def test_nothing_listens_beyond_loopback_without_a_token() -> None:
    server = SandboxServer(ExistingSandbox("inprocess"))
    with pytest.raises(InvalidParams, match="a token is needed"):
        http_app(server, parse_address("0.0.0.0:0"), None)
    with pytest.raises(InvalidParams, match="at least 16"):
        http_app(server, parse_address("0.0.0.0:0"), "short")


async def test_recent_events_are_bounded_and_replayed_by_stream() -> None:
    from mcp_types import JSONRPCNotification

    def message(text: str) -> JSONRPCNotification:
        return JSONRPCNotification(jsonrpc="2.0", method=text)

    events, sent = RecentEvents(max_events=3), []

    async def take(event: Any) -> None:
        sent.append(event.message.method)

    first = await events.store_event("one", None)
    await events.store_event("two", message("other"))
    await events.store_event("one", message("second"))
    assert await events.replay_events_after(first, take) == "one"
    assert sent == ["second"]
    await events.store_event("one", message("third"))
    assert await events.replay_events_after(first, take) is None
    small = RecentEvents(max_bytes=10)
    assert await small.replay_events_after(await small.store_event("one", message("large")), take) is None
