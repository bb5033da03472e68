"""All that the real Codex CLI does in a remote environment, over WebSocket and stdio, with the traffic recorded."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.errors import MethodNotFound
from holdfast.wire.table import methods, notifications
from tests.support.parts import needs
from tests.support.servers import RunningServer, server_environment

from .real_agents import ALL_CHECKS
from .recording_relay import RECEIVED, SENT, Traffic, WebSocketRelay
from .test_codex_client import Script, codex, command, program, server, workspace

__all__ = ["codex", "server", "workspace"]

pytest.importorskip("h11", reason="the model proxy needs h11: install holdfast[bridge]")
pytest.importorskip("websockets", reason="the relay needs websockets: install holdfast[websocket]")
pytestmark = needs("bwrap")

PATCH = """*** Begin Patch
*** Add File: added
+hello
*** Update File: given
@@
-read me
+changed
*** End Patch"""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


#: One red pixel.
PNG = (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    + chunk(b"IDAT", zlib.compress(b"\0\xff\0\0"))
    + chunk(b"IEND", b"")
)


def call(tool: str, arguments: object) -> str:
    return f"text(await tools.{tool}({json.dumps(arguments)}))"


def home_with(where: str, directory: Path) -> Path:
    """A home of Codex in which the server is the only environment."""
    home = directory / "codex"
    home.mkdir()
    text = f'default = "box"\ninclude_local = false\n[[environments]]\nid = "box"\n{where}\n'
    (home / "environments.toml").write_text(text)
    return home


@pytest.fixture
async def relay(server: RunningServer, tmp_path: Path) -> AsyncIterator[WebSocketRelay]:
    async with WebSocketRelay(server.address("ws"), tmp_path / "traffic").running() as relay:
        yield relay


@pytest.fixture(params=["websocket", "stdio"] if ALL_CHECKS else ["websocket"])
def home(request: pytest.FixtureRequest, relay: WebSocketRelay, tmp_path: Path) -> Path:
    if request.param == "websocket":
        return home_with(f"url = {json.dumps(relay.url)}", tmp_path)
    directory = tmp_path / "server"
    directory.mkdir()
    own = {"HOLDFAST_DIRECTORY": str(directory), "PYTHONPATH": server_environment()["PYTHONPATH"]}
    env = ", ".join(f"{name} = {json.dumps(value)}" for name, value in own.items())
    relaying = [str(Path(__file__).with_name("recording_relay.py")), str(tmp_path / "traffic"), sys.executable]
    args = [*relaying, "-m", "holdfast", "serve", "--listen", "stdio", "--spool-directory", str(directory)]
    return home_with(
        f"program = {json.dumps(sys.executable)}\nargs = {json.dumps(args)}\nenv = {{ {env} }}", tmp_path
    )


async def run(
    codex: list[str], server: RunningServer, home: Path, workspace: Path, policy: str, calls: list[str], *words: str
) -> list[str]:
    """The results of the calls as the model got them."""
    script = Script(calls)
    run = [*words, "exec", "--skip-git-repo-check", "-s", policy, "-C", str(workspace), "go"]
    async with program(codex, server, home, script, *run) as process:
        printed, _ = await process.communicate(b"")
    assert process.returncode == 0, printed.decode()
    assert len(script.results) == len(calls), printed.decode()
    return script.results


def check(traffic: Traffic) -> None:
    """Every method that the client calls is in the table, and none was refused as unknown."""
    known = {*methods(), *notifications()}
    assert traffic.called() <= known
    assert [error for error in traffic.errors() if error["code"] == MethodNotFound.code] == []


async def test_everything_in_a_workspace(
    codex: list[str], server: RunningServer, home: Path, workspace: Path, tmp_path: Path
) -> None:
    (workspace / "given").write_text("read me\n")
    (workspace / "pixel.png").write_bytes(PNG)
    (workspace / ".git").mkdir()
    typed = """
        const cat = await tools.exec_command({cmd: "cat; echo $?", login: false, tty: true, yield_time_ms: 300});
        text(await tools.write_stdin({session_id: cat.session_id, chars: "typed\\n", yield_time_ms: 1000}));
        text(await tools.write_stdin({session_id: cat.session_id, chars: "\\u0003", yield_time_ms: 5000}));
    """
    denied = PATCH.replace("added", ".git/denied").partition("*** Update")[0] + "*** End Patch"
    results = await run(
        *(codex, server, home, workspace, "workspace-write"),
        [
            command("cat given"),
            call("apply_patch", PATCH),
            call("apply_patch", denied),
            call("view_image", {"path": str(workspace / "pixel.png")}),
            typed,
        ],
    )
    assert "read me" in results[0]
    assert (workspace / "added").read_text() == "hello\n"
    assert (workspace / "given").read_text() == "changed\n"
    assert "Script failed" in results[2]
    assert os.listdir(workspace / ".git") == []
    assert "data:" in results[3]
    assert "typed" in results[4]
    traffic = Traffic(tmp_path / "traffic")
    check(traffic)
    assert {"process/start", "process/write", "fs/writeFile", "fs/readFile"} <= traffic.called()
    assert "environmentConfig/read" in traffic.called()
    written = [each for each in traffic.messages(SENT) if each.get("method") == "fs/writeFile"]
    # The client has left the decision to the server, which refused the last one.
    assert all(each["params"]["sandbox"]["permissions"]["type"] == "managed" for each in written)


@pytest.mark.skipif(not ALL_CHECKS, reason="only in `make agents`")
async def test_nothing_is_written_under_read_only(
    codex: list[str], server: RunningServer, home: Path, workspace: Path, tmp_path: Path
) -> None:
    (workspace / "given").write_text("read me\n")
    (workspace / "pixel.png").write_bytes(PNG)
    calls = [
        call("view_image", {"path": str(workspace / "pixel.png")}),
        call("apply_patch", PATCH),
        command("echo x > given"),
    ]
    results = await run(codex, server, home, workspace, "read-only", calls)
    assert "data:" in results[0]
    assert "Script failed" in results[1]
    assert "Read-only file system" in results[2]
    assert (workspace / "given").read_text() == "read me\n"
    check(Traffic(tmp_path / "traffic"))


async def test_a_connection_that_breaks_is_resumed(
    codex: list[str], server: RunningServer, relay: WebSocketRelay, workspace: Path, tmp_path: Path
) -> None:
    home = home_with(f"url = {json.dumps(relay.url)}", tmp_path)
    # The server's message with the first line is lost with its connection; the second one is printed later.
    relay.cut_at = b'"Zmlyc3QK"'
    script = "echo first; until [ -e go ]; do sleep 0.1; done; echo second"
    go = "const run = await tools.exec_command({cmd: %s, login: false, yield_time_ms: 20000}); text(run);"
    results = await run(
        *(codex, server, home, workspace, "danger-full-access"),
        [go % json.dumps(f"(sleep 1; touch go) & {script}")],
    )
    assert "first\\nsecond" in results[0]
    assert relay.connections >= 2
    traffic = Traffic(tmp_path / "traffic")
    check(traffic)
    resumed = [
        each["params"].get("resumeSessionId")
        for each in traffic.messages(SENT)
        if each.get("method") == "initialize"
    ]
    assert resumed[0] is None
    assert resumed[1] is not None
    assert any(each.get("result", {}).get("sessionId") == resumed[1] for each in traffic.messages(RECEIVED))


@pytest.mark.skipif(not ALL_CHECKS, reason="only in `make agents`")
@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_an_mcp_server_in_the_environment(
    codex: list[str], server: RunningServer, relay: WebSocketRelay, workspace: Path, tmp_path: Path, transport: str
) -> None:
    """The CLI starts it by `process/start`, or reaches it by `http/request`, and never from its own machine."""
    pytest.importorskip("mcp", reason="holdfast mcp needs mcp: install holdfast[mcp]")
    from tests.mcp.connections import TOKEN, http_server, variables

    home = home_with(f"url = {json.dumps(relay.url)}", tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        env = ", ".join(f"{name} = {json.dumps(value)}" for name, value in variables(tmp_path).items())
        settings = {
            "environment_id": '"box"',
            "required": "true",
            "startup_timeout_sec": "100",
        }
        if transport == "stdio":
            settings["command"] = json.dumps(sys.executable)
            settings["args"] = json.dumps(["-m", "holdfast", "mcp", "--sandbox", "inprocess"])
            settings["cwd"] = json.dumps(str(workspace))
            settings["env"] = f"{{ {env} }}"
        else:
            url = await stack.enter_async_context(http_server(tmp_path, "--sandbox", "inprocess"))
            settings["url"] = json.dumps(url)
            settings["http_headers"] = f'{{ Authorization = "Bearer {TOKEN}" }}'
        words = [word for name, value in settings.items() for word in ("-c", f"mcp_servers.inner.{name}={value}")]
        results = await run(
            *(codex, server, home, workspace, "danger-full-access"),
            [call("mcp__inner__exec_command", {"cmd": "echo from-the-$((40 + 2))"})],
            *words,
        )
    assert "from-the-42" in results[0]
    traffic = Traffic(tmp_path / "traffic")
    check(traffic)
    used = "process/write" if transport == "stdio" else "http/request"
    assert used in traffic.called()
