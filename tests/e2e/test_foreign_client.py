"""A client that nobody here wrote, as far as a test can be one: `websockets`, `json`, the dialect of the Codex CLI.

It speaks to its exec-server without the member `jsonrpc`, names directories by `file:` URIs, sends null for what it
does not use, and counts on numbers without holes. Nothing of holdfast's client or wire is used here.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from holdfast.testing.servers import RunningServer, is_alive, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(["ws"]) as server:
        yield server


class ForeignClient:
    """Requests one after the other; notifications are kept by process."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.ids = itertools.count(1)
        self.events: dict[str, list[dict[str, Any]]] = {}

    async def request(self, method: str, params: dict[str, Any] | None) -> Any:
        id = next(self.ids)
        await self.socket.send(json.dumps({"id": id, "method": method, "params": params}))
        while True:
            message = await self._next()
            if message.get("id") == id:
                assert "error" not in message, message
                return message["result"]

    async def refused(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        id = next(self.ids)
        await self.socket.send(json.dumps({"id": id, "method": method, "params": params}))
        while (message := await self._next()).get("id") != id:
            pass
        error: dict[str, Any] = message["error"]
        return error

    async def until(self, process_id: str, method: str) -> list[dict[str, Any]]:
        """Every event of a process up to the first of this method."""
        while method not in [event["method"] for event in self.events.get(process_id, [])]:
            await self._next()
        return self.events[process_id]

    async def _next(self) -> dict[str, Any]:
        frame = await self.socket.recv()
        assert isinstance(frame, str), "JSON goes in text frames"
        message: dict[str, Any] = json.loads(frame)
        assert "jsonrpc" not in message, "to a peer that leaves it out, leave it out"
        if "method" in message and "id" not in message:
            self.events.setdefault(message["params"]["processId"], []).append(message)
        return message


@contextlib.asynccontextmanager
async def client(server: RunningServer, **initialize: Any) -> AsyncIterator[tuple[ForeignClient, str]]:
    async with connect(server.address("ws"), proxy=None) as socket:
        foreign = ForeignClient(socket)
        result = await foreign.request("initialize", {"clientName": "codex-environment", **initialize})
        await socket.send(json.dumps({"method": "initialized", "params": {}}))
        yield foreign, result["sessionId"]


def start_params(process_id: str, argv: list[str], **more: Any) -> dict[str, Any]:
    return {
        "processId": process_id,
        "argv": argv,
        "cwd": "file:///",
        "env": {"PATH": "/usr/bin:/bin"},
        "tty": False,
        "pipeStdin": False,
        "arg0": None,
        **more,
    }


def output_of(events: list[dict[str, Any]], stream: str) -> bytes:
    chunks = [e["params"] for e in events if e["method"] == "process/output" and e["params"]["stream"] == stream]
    return b"".join(base64.b64decode(chunk["chunk"]) for chunk in chunks)


async def test_the_handshake_gives_a_session(server: RunningServer) -> None:
    async with client(server, resumeSessionId=None) as (_, session):
        assert session


async def test_a_process_from_start_to_close(server: RunningServer, tmp_path: Path) -> None:
    async with client(server) as (codex, _):
        argv = ["sh", "-c", "pwd; echo problem >&2; echo $ONLY; exit 3"]
        params = start_params("p-1", argv, cwd=tmp_path.as_uri(), env={"ONLY": "this", "PATH": "/usr/bin:/bin"})
        result = await codex.request("process/start", params)
        assert result["processId"] == "p-1"
        events = await codex.until("p-1", "process/closed")
        assert output_of(events, "stdout").decode() == f"{tmp_path}\nthis\n"
        assert output_of(events, "stderr") == b"problem\n"
        assert [event["params"]["seq"] for event in events] == list(range(1, len(events) + 1))
        assert [event["method"] for event in events[-2:]] == ["process/exited", "process/closed"]
        assert events[-2]["params"]["exitCode"] == 3


async def test_numbers_have_no_holes_in_a_long_output(server: RunningServer) -> None:
    async with client(server) as (codex, _):
        await codex.request("process/start", start_params("long", ["seq", "400000"]))
        events = await codex.until("long", "process/closed")
        assert [event["params"]["seq"] for event in events] == list(range(1, len(events) + 1))
        assert output_of(events, "stdout") == b"".join(b"%d\n" % i for i in range(1, 400_001))


async def test_input_on_a_pipe(server: RunningServer) -> None:
    async with client(server) as (codex, _):
        await codex.request("process/start", start_params("cat", ["cat"], pipeStdin=True))
        chunk = base64.b64encode(b"typed\n").decode()
        write = {"processId": "cat", "chunk": chunk, "writeId": "w-1"}
        for _ in range(2):
            assert (await codex.request("process/write", write))["status"] == "accepted"
        events = await codex.until("cat", "process/output")
        assert output_of(events, "stdout") == b"typed\n"
        assert await codex.request("process/terminate", {"processId": "cat"}) == {"running": True}
        assert await codex.request("process/terminate", {"processId": "cat"}) == {"running": False}
        write = {"processId": "cat", "chunk": chunk, "writeId": "w-2"}
        assert (await codex.request("process/write", write))["status"] == "stdinClosed"
        write = {"processId": "nobody", "chunk": chunk, "writeId": "w-3"}
        assert (await codex.request("process/write", write))["status"] == "unknownProcess"


async def test_input_without_a_pipe_is_refused(server: RunningServer) -> None:
    async with client(server) as (codex, _):
        await codex.request("process/start", start_params("deaf", ["sleep", "1000"]))
        write = {"processId": "deaf", "chunk": "eA==", "writeId": "w-1"}
        assert (await codex.request("process/write", write))["status"] == "stdinClosed"
        await codex.request("process/terminate", {"processId": "deaf"})


async def test_a_terminal(server: RunningServer) -> None:
    async with client(server) as (codex, _):
        params = start_params("tty", ["sh", "-c", "test -t 0 && echo terminal; read x; echo got $x"], tty=True)
        await codex.request("process/start", params)
        await codex.until("tty", "process/output")
        write = {"processId": "tty", "chunk": base64.b64encode(b"word\n").decode(), "writeId": "w-1"}
        assert (await codex.request("process/write", write))["status"] == "accepted"
        events = await codex.until("tty", "process/closed")
        assert output_of(events, "pty") == b"terminal\r\nword\r\ngot word\r\n"


async def test_reads_page_through_the_output(server: RunningServer) -> None:
    async with client(server) as (codex, _):
        await codex.request("process/start", start_params("pages", ["seq", "60000"]))
        await codex.until("pages", "process/closed")
        seen, after, pages = b"", None, 0
        while True:
            params = {"processId": "pages", "afterSeq": after, "maxBytes": 65_536, "waitMs": 0}
            result = await codex.request("process/read", params)
            seen += b"".join(base64.b64decode(chunk["chunk"]) for chunk in result["chunks"])
            after = result["nextSeq"] - 1
            pages += 1
            if result["closed"] and not result["chunks"]:
                break
        assert seen == b"".join(b"%d\n" % i for i in range(1, 60_001))
        assert pages > 3
        assert (result["exited"], result["exitCode"], result["failure"]) == (True, 0, None)


async def test_a_read_waits_for_news(server: RunningServer) -> None:
    async with client(server) as (codex, _):
        await codex.request("process/start", start_params("news", ["cat"], pipeStdin=True))
        read = {"id": 1000, "method": "process/read", "params": {"processId": "news", "waitMs": 30_000}}
        await codex.socket.send(json.dumps(read))
        write = {"processId": "news", "chunk": base64.b64encode(b"now\n").decode(), "writeId": "w"}
        await codex.socket.send(json.dumps({"id": 1001, "method": "process/write", "params": write}))
        replies: dict[int, Any] = {}
        while not {1000, 1001} <= replies.keys():
            message = await codex._next()
            if "id" in message:
                replies[message["id"]] = message["result"]
        assert replies[1000]["chunks"][0]["stream"] == "stdout"
        assert base64.b64decode(replies[1000]["chunks"][0]["chunk"]) == b"now\n"
        await codex.request("process/terminate", {"processId": "news"})


async def test_a_taken_id_and_a_missing_program_are_errors(server: RunningServer) -> None:
    async with client(server) as (codex, _):
        await codex.request("process/start", start_params("taken", ["true"]))
        error = await codex.refused("process/start", start_params("taken", ["true"]))
        assert "'taken'" in error["message"]
        error = await codex.refused("process/start", start_params("none", ["no-such-program"]))
        assert "no-such-program" in error["message"]
        assert (await codex.refused("no/such/method", {}))["code"] == -32601


async def test_a_session_is_resumed_after_a_break(server: RunningServer) -> None:
    async with client(server) as (codex, session):
        started = await codex.request("process/start", start_params("stays", ["cat"], pipeStdin=True))
        pid = started["pid"]
    assert is_alive(pid)
    async with client(server, resumeSessionId=session) as (codex, again):
        assert again == session
        write = {"processId": "stays", "chunk": base64.b64encode(b"back\n").decode(), "writeId": "w"}
        assert (await codex.request("process/write", write))["status"] == "accepted"
        events = await codex.until("stays", "process/output")
        assert output_of(events, "stdout") == b"back\n"
        assert await codex.request("process/terminate", {"processId": "stays"}) == {"running": True}
        assert not is_alive(pid)


async def test_a_start_with_all_that_the_real_client_sends(server: RunningServer) -> None:
    """The members are those of Codex CLI 0.166; what the server does not know it ignores."""
    async with client(server) as (codex, _):
        info = await codex.request("environment/info", None)
        assert set(info["shell"]) == {"name", "path"}
        policy = {
            "inherit": "all",
            "ignoreDefaultExcludes": True,
            "exclude": ["HOLD*"],
            "set": {},
            "includeOnly": [],
        }
        params = start_params(
            "12121-2afb54b8",
            ["/bin/bash", "-lc", "echo $CODEX_CI; env | grep -c ^HOLDFAST; exit 3"],
            cwd="file:///tmp",
            metadata={"threadId": "01a1e110", "toolCallId": "c1"},
            envPolicy=policy,
            env={"CODEX_CI": "1", "TERM": "dumb"},
        )
        assert (await codex.request("process/start", params))["processId"] == "12121-2afb54b8"
        events = await codex.until("12121-2afb54b8", "process/closed")
        assert output_of(events, "stdout") == b"1\n0\n"
        assert events[-2]["params"]["exitCode"] == 3
        assert events[-2]["params"]["sandboxDenied"] is False


async def test_files_by_uri(server: RunningServer, tmp_path: Path) -> None:
    """What the client does to files: each method with the fields that it sends, null for those it does not use."""
    file, place = tmp_path / "sub dir" / "a.txt", (tmp_path / "sub dir").as_uri()
    async with client(server) as (codex, _):
        await codex.request("fs/createDirectory", {"path": place, "recursive": True, "sandbox": None})
        content = base64.b64encode(b"hello\xff").decode()
        assert (
            await codex.request("fs/writeFile", {"path": file.as_uri(), "dataBase64": content, "sandbox": None})
            == {}
        )
        assert file.read_bytes() == b"hello\xff"
        read = await codex.request("fs/readFile", {"path": file.as_uri(), "sandbox": None})
        assert read == {"dataBase64": content}
        (file.parent / "link").symlink_to("a.txt")
        metadata = await codex.request("fs/getMetadata", {"path": (file.parent / "link").as_uri(), "sandbox": None})
        assert metadata == {
            "isDirectory": False,
            "isFile": True,
            "isSymlink": True,
            "size": 6,
            "createdAtMs": 0,
            "modifiedAtMs": file.stat().st_mtime_ns // 1_000_000,
        }
        listed = await codex.request("fs/readDirectory", {"path": place, "sandbox": None})
        assert listed["entries"] == [
            {"fileName": "a.txt", "isDirectory": False, "isFile": True},
            {"fileName": "link", "isDirectory": False, "isFile": True},
        ]
        real = await codex.request("fs/canonicalize", {"path": (file.parent / "link").as_uri(), "sandbox": None})
        assert real == {"path": file.as_uri()}
        opened = await codex.request("fs/open", {"handleId": "h", "path": file.as_uri(), "sandbox": None})
        assert opened == {"handleId": "h"}
        block = await codex.request("fs/readBlock", {"handleId": "h", "offset": 1, "len": 3})
        assert (base64.b64decode(block["chunk"]), block["eof"]) == (b"ell", False)
        block = await codex.request("fs/readBlock", {"handleId": "h", "offset": 4, "len": 100})
        assert (base64.b64decode(block["chunk"]), block["eof"]) == (b"o\xff", True)
        assert await codex.request("fs/close", {"handleId": "h"}) == {}
        copy = {
            "sourcePath": place,
            "destinationPath": (tmp_path / "c").as_uri(),
            "recursive": True,
            "sandbox": None,
        }
        await codex.request("fs/copy", copy)
        assert (tmp_path / "c" / "a.txt").read_bytes() == b"hello\xff"
        remove = {"path": (tmp_path / "c").as_uri(), "recursive": True, "force": True, "sandbox": None}
        await codex.request("fs/remove", remove)
        await codex.request("fs/remove", remove)
        assert not (tmp_path / "c").exists()


async def test_a_file_that_is_missing_has_the_code_that_it_knows(server: RunningServer, tmp_path: Path) -> None:
    async with client(server) as (codex, _):
        error = await codex.refused("fs/readFile", {"path": (tmp_path / "none").as_uri(), "sandbox": None})
        assert error["code"] == -32004
        error = await codex.refused("fs/readBlock", {"handleId": "none", "offset": 0, "len": 1})
        assert error["code"] == -32004


async def test_a_policy_that_nobody_enforces_is_refused(server: RunningServer, tmp_path: Path) -> None:
    path = (tmp_path / "a").as_uri()
    (tmp_path / "a").write_text("x")
    async with client(server) as (codex, _):
        for permissions in ({"type": "managed", "fileSystem": {}}, {"type": "new"}, {}):
            error = await codex.refused("fs/readFile", {"path": path, "sandbox": {"permissions": permissions}})
            assert error["code"] == -32007
        for permissions in ({"type": "disabled"}, {"type": "external"}):
            read = await codex.request("fs/readFile", {"path": path, "sandbox": {"permissions": permissions}})
            assert base64.b64decode(read["dataBase64"]) == b"x"
