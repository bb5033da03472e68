"""Methods of the Codex CLI that no other client has: policies on files, walks, blocks, HTTP requests and others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.parts import needs
from tests.support.servers import RunningServer

from .test_foreign_client import client, read_only, server, under, workspace, workspace_write

__all__ = ["server", "workspace"]


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@needs("bwrap")
async def test_a_policy_on_files_is_enforced(server: RunningServer, workspace: Path) -> None:
    (workspace / ".git").mkdir()
    file = workspace / "file"
    file.write_text("before")
    (workspace / "link").symlink_to("/etc/hf-denied")
    writing, reading = under(workspace_write(), workspace), under(read_only(), workspace)
    async with client(server) as (codex, _):

        async def write(path: Path, sandbox: dict[str, Any]) -> dict[str, Any]:
            return {"path": path.as_uri(), "dataBase64": encoded(b"after"), "sandbox": sandbox}

        read = await codex.request("fs/readFile", {"path": file.as_uri(), "sandbox": reading})
        assert base64.b64decode(read["dataBase64"]) == b"before"
        for path, policy in (
            (file, reading),
            (workspace / ".git" / "denied", writing),
            (Path("/etc/hf-denied"), writing),
            (workspace / "link", writing),
        ):
            error = await codex.refused("fs/writeFile", await write(path, policy))
            assert error["message"].endswith(("read-only file system", "permission denied")), error
        assert file.read_text() == "before"
        assert "hf-denied" not in os.listdir("/etc")
        await codex.request("fs/writeFile", await write(file, writing))
        assert file.read_text() == "after"
        made = {"path": (workspace / "a" / "b").as_uri(), "recursive": True, "sandbox": writing}
        await codex.request("fs/createDirectory", made)
        found = await codex.request("fs/getMetadata", {"path": made["path"], "sandbox": reading})
        assert found["isDirectory"] is True
        listed = await codex.request("fs/readDirectory", {"path": workspace.as_uri(), "sandbox": reading})
        assert {entry["fileName"] for entry in listed["entries"]} == {".git", "a", "file", "link"}
        error = await codex.refused("fs/remove", {"path": file.as_uri(), "sandbox": reading})
        assert error["message"].endswith(("read-only file system", "permission denied")), error
        copied = {
            "sourcePath": file.as_uri(),
            "destinationPath": (workspace / "copied").as_uri(),
            "sandbox": writing,
        }
        await codex.request("fs/copy", copied)
        await codex.request("fs/remove", {"path": copied["destinationPath"], "sandbox": writing})
        missing = {"path": (workspace / "none").as_uri(), "sandbox": reading}
        assert (await codex.refused("fs/readFile", missing))["code"] == -32004
        opened = {"handleId": "h", "path": file.as_uri(), "sandbox": reading}
        assert "sandboxedFileStreaming" in (await codex.refused("fs/open", opened))["message"]


async def test_a_walk(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("z", "a/f", "a/b/g"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "fifo")
    async with client(server) as (codex, _):

        async def walk(path: Path = tmp_path, **options: Any) -> tuple[list[str], bool]:
            limits = {"maxDepth": 9, "maxDirectories": 9, "maxEntries": 99, "followDirectorySymlinks": False}
            found = await codex.request("fs/walk", {"path": path.as_uri(), "options": {**limits, **options}})
            assert found["errors"] == []
            entries = [entry["path"].removeprefix(tmp_path.as_uri()) for entry in found["entries"]]
            return entries, found["truncated"]

        assert await walk() == (["/a", "/z", "/a/b", "/a/f", "/a/b/g"], False)
        followed = await walk(followDirectorySymlinks=True)
        assert followed == (["/a", "/link", "/z", "/a/b", "/a/f", "/a/b/g"], False)
        assert await walk(maxDepth=0) == (["/a", "/z"], False)
        assert await walk(maxDirectories=1) == (["/a", "/z"], True)
        assert await walk(maxEntries=1) == (["/a"], True)
        assert await walk(tmp_path / "z") == ([], False)
        wide = {"maxDepth": 65, "maxDirectories": 1, "maxEntries": 1}
        error = await codex.refused("fs/walk", {"path": tmp_path.as_uri(), "options": wide})
        assert "at most 64" in error["message"]
        limits = {"maxDepth": 1, "maxDirectories": 1, "maxEntries": 1}
        missing = {"path": (tmp_path / "none").as_uri(), "options": limits}
        assert (await codex.refused("fs/walk", missing))["code"] == -32004


async def test_a_file_written_in_blocks(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    async with client(server) as (codex, _):
        await codex.request("fs/open", {"handleId": "w", "path": file.as_uri(), "mode": "replace"})
        assert file.read_bytes() == b""
        await codex.request("fs/writeBlock", {"handleId": "w", "offset": 2, "chunk": encoded(b"ter")})
        await codex.request("fs/writeBlock", {"handleId": "w", "offset": 0, "chunk": encoded(b"af")})
        assert file.read_bytes() == b"after"
        for wrong in ({"offset": -1, "chunk": encoded(b"x")}, {"offset": 0, "chunk": ""}):
            assert (await codex.refused("fs/writeBlock", {"handleId": "w", **wrong}))["code"] == -32602
        await codex.request("fs/open", {"handleId": "r", "path": file.as_uri()})
        error = await codex.refused("fs/writeBlock", {"handleId": "r", "offset": 0, "chunk": encoded(b"x")})
        assert "'read'" in error["message"]
        file.rename(tmp_path / "other")
        file.write_text("another")
        error = await codex.refused("fs/writeBlock", {"handleId": "w", "offset": 0, "chunk": encoded(b"x")})
        assert error["code"] == -32004
        assert file.read_text() == "another"
        await codex.request("fs/close", {"handleId": "w"})
        error = await codex.refused("fs/writeBlock", {"handleId": "w", "offset": 0, "chunk": encoded(b"x")})
        assert error["code"] == -32004


async def test_the_environment(server: RunningServer, tmp_path: Path) -> None:
    async with client(server) as (codex, _):
        capabilities = (await codex.request("environment/info", None))["capabilities"]
        assert {name for name, there in capabilities.items() if there} == {
            "environmentConfigRead",
            "fileWriteStreaming",
            "linuxRootWritePreservesDevices",
        }
        paths = {"configPaths": [["mcp_servers"]], "requirementsPaths": []}
        config = await codex.request("environmentConfig/read", {"cwd": tmp_path.as_uri(), **paths})
        assert config["config"] == config["requirements"] == {"layers": [], "cloudInsertionIndex": 0}
        assert config["userHomeDir"].startswith("file:///")
        root = {"id": "a", "path": tmp_path.as_uri()}
        (found,) = (await codex.request("capabilityRoots/discoverV1", {"roots": [root]}))["roots"]
        assert (found["id"], found["skills"], "does not search for plugins" in found["error"]) == ("a", [], True)
        found = await codex.request("capabilities/discoverV2", {"cwd": tmp_path.as_uri()})
        assert (found["plugins"], found["skills"]) == ([], [])
        watch = {"watchId": 1, "missing": [tmp_path.as_uri()]}
        assert await codex.request("fs/watchMissing", watch) == {"watching": False}


# --- HTTP requests ------------------------------------------------------------------------------------------------


class Site:
    """A web server by hand: it answers by the path, and keeps the heads of its requests."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.go_on = asyncio.Event()
        self.url = ""
        self._answering: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Site]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.go_on.set()
            await asyncio.gather(*self._answering)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answering.add(asyncio.create_task(self._answer(reader, writer)))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        path = head.split()[1]
        length = next((int(line[15:]) for line in head.lower().splitlines() if line[:15] == "content-length:"), 0)
        body = await reader.readexactly(length)
        if path == "/moved":
            writer.write(b"HTTP/1.1 302 Found\r\nLocation: /echo?x=1\r\nContent-Length: 0\r\n\r\n")
        elif path.startswith("/echo"):
            writer.write(b"HTTP/1.1 200 OK\r\nX-A: 1\r\nX-A: 2\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        elif path == "/slow":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
            await writer.drain()
            await self.go_on.wait()
            writer.write(b"6\r\nsecond\r\n0\r\n\r\n")
        elif path == "/cut":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nfirst")
        else:
            await self.go_on.wait()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_http_requests(server: RunningServer) -> None:
    async with client(server) as (codex, _), Site().running() as site:

        async def request(path: str, **more: Any) -> dict[str, Any]:
            return {"method": "GET", "url": site.url + path, "requestId": path, **more}

        sent = await request("/echo", method="POST", bodyBase64=encoded(b"hello"))
        reply = await codex.request("http/request", {**sent, "headers": [{"name": "X-Given", "value": "v"}]})
        assert (reply["status"], base64.b64decode(reply["bodyBase64"])) == (200, b"hello")
        assert [each["value"] for each in reply["headers"] if each["name"] == "x-a"] == ["1", "2"]
        assert "X-Given: v\r\n" in site.heads[-1]
        assert (await codex.request("http/request", await request("/moved")))["status"] == 200
        assert site.heads[-1].startswith("GET /echo?x=1 ")
        stopped = await codex.request("http/request", await request("/moved", redirectPolicy="stop"))
        assert stopped["status"] == 302
        for wrong in ({"url": "ftp://host/"}, {"url": "http://"}, {"url": "http://h/a b"}, {"method": "G T"}):
            error = await codex.refused("http/request", {**(await request("/echo")), **wrong})
            assert error["code"] == -32602, error
        split = [{"name": "A", "value": "x\r\nB: y"}]
        assert (await codex.refused("http/request", await request("/echo", headers=split)))["code"] == -32602
        error = await codex.refused("http/request", await request("/silent", timeoutMs=50))
        assert "no answer" in error["message"]
        error = await codex.refused("http/request", {**(await request("/")), "url": "http://127.0.0.1:1/"})
        assert "refused" in error["message"].lower()


async def test_a_streamed_body(server: RunningServer) -> None:
    async with client(server) as (codex, _), Site().running() as site:

        async def stream(path: str) -> None:
            params = {"method": "GET", "url": site.url + path, "requestId": path, "streamResponse": True}
            reply = await codex.request("http/request", params)
            assert (reply["status"], reply["bodyBase64"]) == (200, "")

        await stream("/slow")
        (first,) = await codex.until("/slow", "http/request/bodyDelta")
        assert first["params"] == {
            "requestId": "/slow",
            "seq": 1,
            "deltaBase64": encoded(b"first"),
            "done": False,
            "error": None,
        }
        site.go_on.set()
        while not codex.events["/slow"][-1]["params"]["done"]:
            await codex._next()
        deltas = [event["params"] for event in codex.events["/slow"]]
        assert [each["seq"] for each in deltas] == list(range(1, len(deltas) + 1))
        assert b"".join(base64.b64decode(each["deltaBase64"]) for each in deltas) == b"firstsecond"
        await stream("/cut")
        await codex.until("/cut", "http/request/bodyDelta")
        while not codex.events["/cut"][-1]["params"]["done"]:
            await codex._next()
        assert "95 bytes are missing" in codex.events["/cut"][-1]["params"]["error"]


async def test_a_lost_connection_ends_its_streams(server: RunningServer) -> None:
    async with Site().running() as site:
        async with client(server) as (codex, _):
            params = {"method": "GET", "url": f"{site.url}/slow", "requestId": "a", "streamResponse": True}
            await codex.request("http/request", params)
        # A new one is served, and the server is not held up by the old one.
        async with client(server) as (codex, _):
            params = {"method": "GET", "url": f"{site.url}/echo", "requestId": "b"}
            assert (await codex.request("http/request", params))["status"] == 200


@pytest.mark.parametrize("field", ["networkProxy", "managedNetwork"])
async def test_a_network_that_the_server_does_not_have_is_refused(server: RunningServer, field: str) -> None:
    from .test_foreign_client import FORBIDDEN, start_params

    async with client(server) as (codex, _):
        params = start_params("p-network", ["true"], **{field: {"proxy": {}}})
        assert (await codex.refused("process/start", params))["code"] == FORBIDDEN
