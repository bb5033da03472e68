"""An agent of the OpenAI Agents SDK works in a jail with files, terminals and ports, and resumes elsewhere."""

from __future__ import annotations

import asyncio
import io
import json
import runpy
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agents import Runner
from agents.run import RunConfig
from agents.run_config import SandboxRunConfig
from agents.sandbox import (
    ExecTimeoutError,
    ExposedPortUnavailableError,
    LocalSnapshotSpec,
    Manifest,
    SandboxAgent,
    SandboxPathGrant,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.entries import File
from agents.sandbox.errors import InvalidManifestPathError, PtySessionNotFoundError
from agents.sandbox.session.sandbox_session import SandboxSession
from agents.testing import ScriptedModel, assistant_message, function_call

import holdfast
from holdfast.errors import InvalidParams
from holdfast.integrations.openai_agents import Client, ClientOptions

EXAMPLES = Path(__file__).parents[3] / "examples" / "integrations"
NO_TRACES = {"tracing_disabled": True}


@pytest.fixture
async def session() -> AsyncIterator[SandboxSession]:
    client = Client("bwrap", exposed_ports=(8000,))
    session = await client.create()
    await session.start()
    yield session
    await client.delete(session)


async def sandbox_ids() -> list[str]:
    async with holdfast.Fleet("bwrap") as fleet:
        return [ref.id for ref in await fleet.list()]


def scripted(*calls: tuple[str, dict[str, Any]]) -> ScriptedModel:
    steps = [[function_call(name, given, call_id=f"c{number}")] for number, (name, given) in enumerate(calls)]
    return ScriptedModel([*steps, [assistant_message("done")]])


def tool_outputs(result: Any) -> list[str]:
    return [str(item.output) for item in result.new_items if item.type == "tool_call_output_item"]


async def test_an_agent_runs_commands_writes_files_and_types() -> None:
    model = scripted(
        ("exec_command", {"cmd": "pwd; cat task.txt; echo made > by-shell.txt; exit 3"}),
        ("exec_command", {"cmd": "python3 -q", "tty": True, "yield_time_ms": 300}),
        ("write_stdin", {"session_id": 2, "chars": "print(6 * 7)\nexit()\n", "yield_time_ms": 10_000}),
        ("write_stdin", {"session_id": 2, "chars": "x"}),
    )
    manifest = Manifest(entries={"task.txt": File(content=b"the task\n")}, environment={"value": {"PLACE": "here"}})
    config = RunConfig(sandbox=SandboxRunConfig(client=Client("bwrap"), manifest=manifest), **NO_TRACES)

    result = await Runner.run(SandboxAgent(name="worker", model=model), "go", run_config=config)

    first, opened, typed, ended = tool_outputs(result)
    assert "/workspace\nthe task\n" in first
    assert "exited with code 3" in first
    assert "session ID 2" in opened
    assert "42" in typed
    assert "exited with code 0" in typed
    assert "write_stdin failed" in ended
    assert await sandbox_ids() == []


async def test_files_stay_in_the_workspace(session: SandboxSession) -> None:
    await session.write(Path("deep/file"), io.BytesIO(b"\0bytes\xff"))
    assert (await session.read(Path("deep/file"))).read() == b"\0bytes\xff"
    assert await session.read_bounded(Path("/workspace/deep/file"), max_bytes=3) == b"\0by"
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("missing"))
    with pytest.raises(InvalidManifestPathError):
        await session.read(Path("/etc/passwd"))
    await session.exec("ln -s /etc escape")
    with pytest.raises(InvalidManifestPathError):
        await session.read(Path("escape/passwd"))
    with pytest.raises(WorkspaceArchiveWriteError):
        await session.write(Path("deep"), io.BytesIO(b""))
    await session.mkdir("a/b", parents=True)
    await session.mv("deep/file", "a/b/moved")
    assert [entry.path for entry in await session.ls("a/b")] == ["/workspace/a/b/moved"]
    await session.rm("a", recursive=True)
    assert not (await session.exec("test -e a")).ok()


async def test_patches_are_applied(session: SandboxSession) -> None:
    await session.write(Path("code.py"), io.BytesIO(b"a = 1\nb = 2\n"))
    await session.apply_patch({"type": "update_file", "path": "code.py", "diff": "@@\n a = 1\n-b = 2\n+b = 3\n"})

    assert (await session.read(Path("code.py"))).read() == b"a = 1\nb = 3\n"


async def test_commands(session: SandboxSession) -> None:
    result = await session.exec("echo out; echo err >&2; exit 4")
    assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 4)
    assert (await session.exec("id", "-un", user="nobody")).stdout == b"nobody\n"
    assert (await session.exec("no-such-program", shell=False)).exit_code == 127
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 1000", timeout=0.2)


async def test_terminals(session: SandboxSession) -> None:
    assert session.supports_pty()
    opened = await session.pty_exec_start("cat", tty=True, user="nobody", yield_time_s=0.25)
    assert opened.exit_code is None
    assert opened.process_id is not None
    ended = await session.pty_write_stdin(session_id=opened.process_id, chars="echo\n\x04", yield_time_s=30)
    assert (ended.exit_code, ended.process_id) == (0, None)
    assert ended.output.startswith(b"echo\r\necho\r\n")
    with pytest.raises(PtySessionNotFoundError):
        await session.pty_write_stdin(session_id=opened.process_id, chars="")

    piped = await session.pty_exec_start("sleep 1000", yield_time_s=0.25)
    with pytest.raises(RuntimeError, match=r"^stdin is not available for this process$"):
        await session.pty_write_stdin(session_id=piped.process_id, chars="x")
    await session.pty_terminate_all()
    assert not (await session.exec("pgrep -x sleep")).ok()


async def test_output_of_a_terminal_is_cut_to_tokens(session: SandboxSession) -> None:
    update = await session.pty_exec_start("seq 20000", max_output_tokens=50)

    assert update.exit_code == 0
    assert update.original_token_count is not None
    assert update.original_token_count > 10_000
    assert len(update.output) < 1_000


async def test_a_kill_for_memory_is_in_the_result() -> None:
    client = Client("bwrap", memory="128M")
    session = await client.create()
    try:
        await session.start()
        hog = "exec python3 -c \"held = [bytearray(b'x' * (8 << 20)) for _ in range(64)]\""
        result = await session.exec(hog, shell=["sh", "-c"])
        assert result.exit_code == 137
        assert result.stderr.endswith(b"Killed: out of memory\n")
        update = await session.pty_exec_start(hog, shell=["sh", "-c"], yield_time_s=30)
        assert update.output.endswith(b"Killed: out of memory\n")
    finally:
        await client.delete(session)


async def test_ports(session: SandboxSession) -> None:
    await session.write(Path("index.html"), io.BytesIO(b"from the sandbox"))
    await session.pty_exec_start("python3 -m http.server --bind 127.0.0.1 8000", yield_time_s=0.25)
    await session._inner.box.wait_for_port(8000)
    endpoint = await session.resolve_exposed_port(8000)
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write(b"GET /index.html HTTP/1.0\r\n\r\n")
    assert (await reader.read()).endswith(b"from the sandbox")
    writer.close()

    with pytest.raises(ExposedPortUnavailableError):
        await session.resolve_exposed_port(9000)


CONTINUE = """
import asyncio, io, json, sys
from pathlib import Path
from holdfast.integrations.openai_agents import Client

async def main():
    client = Client("bwrap")
    state = client.deserialize_session_state(json.loads(sys.stdin.read()))
    session = await client.resume(state)
    await session.start()
    content = (await session.read(Path("file"))).read().decode()
    print(content, (await session.exec("pgrep -xc sleep")).stdout.decode())
    await client.delete(session)

asyncio.run(main())
"""


async def in_another_process(state: dict[str, object]) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONTINUE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate(json.dumps(state).encode())
    assert process.returncode == 0
    return output.decode()


async def test_another_process_continues_in_the_same_sandbox() -> None:
    client = Client("bwrap")
    session = await client.create()
    await session.start()
    await session.write(Path("file"), io.BytesIO(b"kept"))
    await session._inner.box.start(["sleep", "1000"])

    assert (await in_another_process(client.serialize_session_state(session.state))).split() == ["kept", "1"]
    assert await sandbox_ids() == []
    await session.shutdown()


async def test_another_process_restores_the_snapshot_of_a_removed_sandbox(tmp_path: Path) -> None:
    client = Client("bwrap")
    manifest = Manifest(entries={"secret": File(content=b"", ephemeral=True)})
    session = await client.create(snapshot=LocalSnapshotSpec(base_path=tmp_path), manifest=manifest)
    async with session:
        await session.write(Path("file"), io.BytesIO(b"archived"))
    await client.delete(session)
    assert await sandbox_ids() == []

    assert (await in_another_process(client.serialize_session_state(session.state))).split() == ["archived", "0"]
    assert await sandbox_ids() == []


async def test_a_run_resumes_from_the_state_of_an_earlier_run(tmp_path: Path) -> None:
    def config(**more: Any) -> RunConfig:
        sandbox = SandboxRunConfig(client=Client("bwrap"), snapshot=LocalSnapshotSpec(base_path=tmp_path), **more)
        return RunConfig(sandbox=sandbox, **NO_TRACES)

    writes = SandboxAgent(name="worker", model=scripted(("exec_command", {"cmd": "echo 1 > count"})))
    first = await Runner.run(writes, "go", run_config=config())
    state = json.loads(first.to_state().to_string())
    payload = state["sandbox"]["session_state"]
    reads = SandboxAgent(name="worker", model=scripted(("exec_command", {"cmd": "cat count"})))
    resumed = Client("bwrap").deserialize_session_state(payload)
    second = await Runner.run(reads, "go on", run_config=config(session_state=resumed))

    assert tool_outputs(second)[0].endswith("1\n")


async def test_parts_of_a_manifest_that_are_not_supported_are_refused() -> None:
    grant = SandboxPathGrant(path="/data", host_path="/srv")
    with pytest.raises(InvalidParams, match="host_path /srv"):
        await Client("bwrap").create(manifest=Manifest(extra_path_grants=(grant,)))
    assert await sandbox_ids() == []


async def test_options_choose_ports() -> None:
    client = Client("bwrap", exposed_ports=(1,))
    session = await client.create(options=ClientOptions(exposed_ports=(2, 3)))
    assert session.state.exposed_ports == (2, 3)
    await client.delete(session)


async def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "openai_agents_agent.py"), run_name="example")
    await example["main"](scripted(("exec_command", {"cmd": "uname -s"})))

    assert capsys.readouterr().out == "done\n"
