"""A client that shares no code with ours: `websockets`, `json`, the dialect of the Codex CLI.

It leaves out the member `jsonrpc`, names directories by `file:` URIs, sends null for what it
does not use, and counts on numbers without holes. Nothing of holdfast's client or wire is used here.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from tests.support.parts import needs
from tests.support.servers import RunningServer, is_alive, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(["ws"]) as server:
        yield server


class ForeignClient:
    """Requests one after the other; notifications are kept by process or HTTP request."""

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
            params = message["params"]
            self.events.setdefault(params.get("processId") or params["requestId"], []).append(message)
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
    """The members are those of Codex CLI 0.166 without a policy."""
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
            sandbox=None,
            enforceManagedNetwork=False,
            managedNetwork=None,
            envPolicy=policy,
            env={"CODEX_CI": "1", "TERM": "dumb"},
        )
        assert (await codex.request("process/start", params))["processId"] == "12121-2afb54b8"
        events = await codex.until("12121-2afb54b8", "process/closed")
        assert output_of(events, "stdout") == b"1\n0\n"
        assert events[-2]["params"]["exitCode"] == 3
        assert events[-2]["params"]["sandboxDenied"] is False


async def test_files_by_uri(server: RunningServer, tmp_path: Path) -> None:
    """The client's operations on files: each method with the fields that it sends, null for unused ones."""
    file, location = tmp_path / "sub dir" / "a.txt", (tmp_path / "sub dir").as_uri()
    async with client(server) as (codex, _):
        await codex.request("fs/createDirectory", {"path": location, "recursive": True, "sandbox": None})
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
        listed = await codex.request("fs/readDirectory", {"path": location, "sandbox": None})
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
            "sourcePath": location,
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
            assert error["code"] == FORBIDDEN
        for permissions in ({"type": "disabled"}, {"type": "external"}):
            read = await codex.request("fs/readFile", {"path": path, "sandbox": {"permissions": permissions}})
            assert base64.b64decode(read["dataBase64"]) == b"x"
        error = await codex.refused("fs/readFile", {"path": path, "sandbox": None, "followSymlinks": False})
        assert error["code"] == FORBIDDEN
        error = await codex.refused("fs/readFile", {"path": path, "sandbox": None, "onlyIf": "later"})
        assert "`onlyIf`" in error["message"]


async def test_a_file_in_a_missing_directory_is_named_in_the_error(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "none" / "a.txt"
    async with client(server) as (codex, _):
        params = {"path": path.as_uri(), "dataBase64": "eA==", "sandbox": None}
        error = await codex.refused("fs/writeFile", params)
        assert (error["code"], error["message"]) == (-32004, f"{path}: no such file or directory")


async def test_the_place_as_the_client_reads_it(server: RunningServer) -> None:
    async with client(server) as (codex, _):
        info = await codex.request("environment/info", None)
        assert info["cwd"] == PurePath(server.directory).as_uri()
        assert (await codex.request("environment/status", None))["status"] == "ready"


# --- policies --------------------------------------------------------------------------------------------------

FORBIDDEN = -32007


def special(kind: str, access: str, **more: Any) -> dict[str, Any]:
    subpath = {"subpath": more.pop("subpath")} if "subpath" in more else {}
    return {"path": {"type": "special", "value": {"kind": kind, **subpath}}, "access": access, **more}


def managed(*entries: dict[str, Any], network: str = "restricted") -> dict[str, Any]:
    return {"type": "managed", "file_system": {"type": "restricted", "entries": entries}, "network": network}


def read_only() -> dict[str, Any]:
    return managed(special("root", "read"))


def workspace_write(network: str = "restricted") -> dict[str, Any]:
    """As Codex CLI 0.166 sends it for `-s workspace-write`."""
    kept = (".git", ".agents", ".codex", ".aws")
    return managed(
        special("root", "read"),
        special("project_roots", "write"),
        special("slash_tmp", "write"),
        special("tmpdir", "write"),
        *(special("project_roots", "read", subpath=name, missing_path_behavior="skip") for name in kept),
        network=network,
    )


def under(permissions: dict[str, Any], workspace: Path, **more: Any) -> dict[str, Any]:
    """The member `sandbox`, with all that the client puts beside the permissions."""
    uri = workspace.as_uri()
    beside = {
        "windowsSandboxLevel": "disabled",
        "windowsSandboxProxySettingsMode": "reconcile",
        "useLegacyLandlock": False,
    }
    return {"permissions": permissions, "cwd": uri, "workspaceRoots": [uri], **beside, **more}


class Ran:
    """How a command ended under a policy."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        exited = next(event["params"] for event in events if event["method"] == "process/exited")
        self.code: int = exited["exitCode"]
        self.denied: bool = exited["sandboxDenied"]
        self.text = (output_of(events, "stdout") + output_of(events, "stderr")).decode()


async def run_under(codex: ForeignClient, command: str, workspace: Path, permissions: dict[str, Any]) -> Ran:
    name = f"p-{uuid.uuid4()}"
    params = start_params(
        name, ["sh", "-c", command], cwd=workspace.as_uri(), sandbox=under(permissions, workspace)
    )
    await codex.request("process/start", params)
    ran = Ran(await codex.until(name, "process/closed"))
    read = await codex.request("process/read", {"processId": name})
    assert read["sandboxDenied"] is ran.denied
    return ran


@pytest.fixture
def workspace() -> Iterator[Path]:
    """Not below /tmp, which workspace-write gives in any case."""
    with tempfile.TemporaryDirectory(prefix="hf-workspace-", dir="/var/tmp") as directory:
        yield Path(directory).resolve()


@needs("bwrap")
async def test_read_only_keeps_a_command_from_writing(
    server: RunningServer, workspace: Path, tmp_path: Path
) -> None:
    (workspace / "given").write_text("read me\n")
    (tmp_path / "other").write_text("and me\n")
    async with client(server) as (codex, _):
        ran = await run_under(codex, f"cat given {tmp_path}/other", workspace, read_only())
        assert (ran.code, ran.text, ran.denied) == (0, "read me\nand me\n", False)
        for target in ("file", "/tmp/hf-denied", f"{Path.home()}/hf-denied", "/etc/hf-denied"):
            ran = await run_under(codex, f"echo x > {target}", workspace, read_only())
            assert (ran.code != 0, ran.denied, (workspace / target).exists()) == (True, True, False), target
        ran = await run_under(codex, "exit 3", workspace, read_only())
        assert (ran.code, ran.denied) == (3, False)


@needs("bwrap")
async def test_workspace_write_lets_a_command_write_there_and_in_tmp(
    server: RunningServer, workspace: Path, tmp_path: Path
) -> None:
    (workspace / ".git").mkdir()
    async with client(server) as (codex, _):
        ran = await run_under(codex, f"echo x > made && echo y > {tmp_path}/made", workspace, workspace_write())
        assert (ran.code, ran.denied) == (0, False)
        assert (workspace / "made").read_text() + (tmp_path / "made").read_text() == "x\ny\n"
        for target in ("/etc/hf-denied", f"{workspace}-beside", f"{workspace}/.git/config"):
            ran = await run_under(codex, f"touch {target}", workspace, workspace_write())
            assert (ran.code != 0, ran.denied, (workspace / target).exists()) == (True, True, False), target


@needs("bwrap")
async def test_a_policy_without_network_gives_no_sockets_of_others(
    server: RunningServer, workspace: Path, tmp_path: Path
) -> None:
    """Neither by address nor by path: a program that reaches a socket of an unconfined program is not confined."""
    reach = """
import socket, sys
kind, address = sys.argv[1:]
try:
    made = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    made.settimeout(5)
    made.connect(address if kind == "unix" else ("127.0.0.1", int(address)))
except OSError as error:
    raise SystemExit(error.strerror)
print("reached")
"""
    (workspace / "reach.py").write_text(reach)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(workspace / "s"))
        unix.listen()
        port = tcp.getsockname()[1]
        async with client(server) as (codex, _):
            for where in (f"tcp {port}", f"unix {workspace}/s"):
                command = f"{sys.executable} reach.py {where}"
                for permissions in (read_only(), workspace_write(), {"type": "external", "network": "restricted"}):
                    ran = await run_under(codex, command, workspace, permissions)
                    assert (ran.code, "reached" in ran.text) == (1, False), (where, ran.text)
                ran = await run_under(codex, command, workspace, workspace_write("enabled"))
                assert ran.text == "reached\n", where


async def test_what_cannot_be_enforced_is_refused_and_nothing_runs(server: RunningServer, workspace: Path) -> None:
    made = workspace / "made"
    missing = {"path": {"type": "path", "path": (workspace / "none").as_uri()}, "access": "read"}
    glob = {"path": {"type": "glob_pattern", "pattern": "**/*.env"}, "access": "deny"}
    (workspace / "link").symlink_to("/etc")
    link = {"path": {"type": "path", "path": (workspace / "link").as_uri()}, "access": "write"}
    root, roots = special("root", "read"), special("project_roots", "write")
    refused: list[dict[str, Any]] = [
        {"enforceManagedNetwork": True},
        {"managedNetwork": {}},
        {"networkProxy": {"proxy": {}}},
        {"sandbox": {}},
        {"sandbox": "read-only"},
        {"sandbox": under({"type": "new"}, workspace)},
        {"sandbox": under(managed(), workspace)},
        {"sandbox": under(managed(roots), workspace)},
        {"sandbox": under(managed(root, glob), workspace)},
        {"sandbox": under(managed(root, special("minimal", "read")), workspace)},
        {"sandbox": under(managed(root, special("later", "read")), workspace)},
        {"sandbox": under(managed(root, {**roots, "unless": "later"}), workspace)},
        {"sandbox": under(managed(root, {**roots, "missing_path_behavior": "make"}), workspace)},
        {"sandbox": under(managed(root, special("project_roots", "write", subpath="../..")), workspace)},
        {"sandbox": under(managed(root, roots, missing), workspace)},
        {"sandbox": under(managed(root, link), workspace)},
        {"sandbox": under(managed(root, network="allow-listed"), workspace)},
        {"sandbox": under({**read_only(), "process": "restricted"}, workspace)},
        {"sandbox": under(read_only(), workspace, laterRestriction=True)},
        {"sandbox": under(read_only(), workspace, sandboxOverride="require")},
        {"sandbox": under(managed(root, roots), workspace, policyContext={"workspaceRoots": ["file:///srv"]})},
        {"sandbox": under(read_only(), workspace), "confinement": {"mode": "none"}},
    ]
    async with client(server) as (codex, _):
        for number, more in enumerate(refused):
            params = start_params(f"refused-{number}", ["touch", str(made)], **more)
            error = await codex.refused("process/start", params)
            assert error["code"] == FORBIDDEN, (more, error)
        for strict in ({"laterRestriction": True}, {"confinement": {"later": True}}, {"limits": {"later": 1}}):
            error = await codex.refused("process/start", start_params("strict", ["touch", str(made)], **strict))
            assert (error["code"], "unknown field" in error["message"]) == (-32602, True), error
        assert not made.exists()
