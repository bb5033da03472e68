"""Properties of the parsers for agents: `holdfast mcp` over HTTP and its results, HTTP requests of the Codex CLI.

Targets as in `targets`. The MCP server runs on an event loop without a socket, and without a sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import itertools
import json
from typing import Any, Final

from fuzz.target import Target, cut_at, places_of, target
from holdfast.errors import InvalidParams
from holdfast.integrations.mcp.file_tools import _hit, _LineWindow
from holdfast.integrations.mcp.http import TokenGuard, http_app
from holdfast.integrations.mcp.results import MAX_RESULT_BYTES
from holdfast.integrations.mcp.server import SandboxServer
from holdfast.integrations.mcp.sources import ExistingSandbox
from holdfast.server.methods.http_requests import _Exchange
from holdfast.service.fronts.listening import parse_address
from holdfast.wire.codex_messages import HttpHeader, HttpRequestParams

_TOKEN: Final = "a-token-of-the-fuzzer"
_INITIALIZE: Final = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "f", "version": "1"}},
}


def targets() -> dict[str, Target]:
    """Every target of this module by its name."""
    return {each.name: each for each in globals().values() if isinstance(each, Target)}


# --- holdfast mcp -------------------------------------------------------------------------------------------------


@target(
    b"\x00" + json.dumps(_INITIALIZE).encode(),
    b"\x01" + json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}).encode(),
    b"\x01" + json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "x"}}).encode(),
    b"\x00[]",
    b"\x01" + b"[" * 5000,
    b'\x00{"jsonrpc":"2.0","method":"notifications/initialized"}',
)
def mcp_requests(data: bytes) -> None:
    """Any body of either era has a reply, and none is an error of the server."""
    era, body = data[:1], data[1:]
    status = asyncio.run(_post(body, modern=bool(era and era[0] % 2)))
    assert 200 <= status < 500, status


@functools.cache
def _server() -> SandboxServer:
    return SandboxServer(ExistingSandbox("inprocess"))


async def _post(body: bytes, *, modern: bool) -> int:
    app, sessions = http_app(_server(), parse_address("127.0.0.1:1"), _TOKEN)
    headers = [
        (b"host", b"127.0.0.1:1"),
        (b"authorization", f"Bearer {_TOKEN}".encode()),
        (b"content-type", b"application/json"),
        (b"accept", b"application/json, text/event-stream"),
        *([(b"mcp-protocol-version", b"2026-07-28")] if modern else []),
    ]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/mcp",
        "raw_path": b"/mcp",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": headers,
        "client": ("127.0.0.1", 2),
        "server": ("127.0.0.1", 1),
    }
    waiting = asyncio.Event()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    status: list[int] = []

    async def receive() -> Any:
        try:
            return next(messages)
        except StopIteration:
            await waiting.wait()
            return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])
        elif not message.get("more_body", False):
            waiting.set()

    async with sessions.run():
        async with asyncio.timeout(5):
            await app(scope, receive, send)
    return status[0]


@target(b"Bearer " + _TOKEN.encode(), b"bearer  " + _TOKEN.encode(), b"Bearer", b"Basic x", b"\xff\xfe")
def mcp_tokens(data: bytes) -> None:
    """A header permits exactly the token, with any case of the scheme and spaces around the token."""
    guard = TokenGuard(_no_app, _TOKEN)
    given = data.decode("latin-1")
    words = given.split(None, 1)
    exact = len(words) == 2 and words[0].lower() == "bearer" and words[1].strip() == _TOKEN
    permitted = guard._permits([given])
    assert not permitted or exact
    assert not guard._permits([])
    assert not guard._permits([given, given])


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("the application is not called")


@target(b"\x02\x05\x09\x02\x03line 1\nline 2\nline 3", b"\x00\x01\xff\n\n\n", b"\x00\x09\x01a\xff\x00", b"")
def mcp_lines_of_a_file(data: bytes) -> None:
    """The window of a file in pieces has the lines of the whole file, as text or as base64."""
    locations, rest = places_of(data)
    first, count, content = (rest[0] % 8 + 1, rest[1] % 8 + 1, rest[2:]) if len(rest) > 2 else (1, 8, rest)
    window = _LineWindow(first, count)
    for piece in cut_at(content, locations):
        if window.feed(piece):
            break
    found = window.content(len(content))
    lines = content.split(b"\n")
    whole = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    wanted = b"".join(itertools.islice(whole, first - 1, first - 1 + count))[:MAX_RESULT_BYTES]
    shown = found.content.encode() if found.encoding == "utf-8" else base64.b64decode(found.content)
    assert shown == wanted
    assert found.truncated == (len(whole) > first - 1 + count)


@target(b"./a.py:12:text: more", b"Binary file x matches", b"a:b:c", b":1:", "ä:9:ß".encode(), b"x:\xc2\xb2:y")
def mcp_search_lines(data: bytes) -> None:
    """A line of grep is a hit with its number, or none."""
    line = data.decode(errors="replace")
    hit = _hit(line)
    if hit is not None:
        assert line.startswith(f"{hit.path}:")
        assert hit.line >= 0


# --- the Codex CLI -----------------------------------------------------------------------------------------------


@target(
    b"GET\nhttp://a.example/\nX: y",
    b"POST\nhttps://u:p@[::1]:8443/a?b#c\nAccept: */*",
    b"GET\nhttp://a.example:99999/\n",
    b"GET\nhttp://a\r\nb/\n",
    "GET\nhttp://ä.example/ß\n".encode(),
)
def codex_http_requests(data: bytes) -> None:
    """A request is refused, or nothing of it can end a line of HTTP."""
    parts = data.decode(errors="replace").split("\n", 2)
    method, url, header = (*parts, "", "")[:3]
    name, _, value = header.partition(": ")
    headers = (HttpHeader(name, value),) if header else ()
    try:
        exchange = _Exchange(HttpRequestParams(method=method, url=url, request_id="a", headers=headers))
    except InvalidParams:
        return
    assert exchange._url.scheme in ("http", "https")
    assert exchange._url.hostname
    for text in (method, exchange._url.path, exchange._url.query, exchange._url.netloc, name, value):
        assert not {"\r", "\n", "\0"} & set(text)
    assert " " not in exchange._url.path + exchange._url.query + exchange._url.netloc
