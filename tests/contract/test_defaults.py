"""Defaults of a connection, paths as objects, merged streams, commands that cannot be started: over every way."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from holdfast import Completed, ExecRemoteOptions, OutputChunk, Sandbox, StdoutChunk
from holdfast.errors import CommandNotFound, InvalidRequest, NotExecutable
from tests.support.servers import RunningServer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


async def test_paths_may_be_objects(box: Sandbox, tmp_path: Path) -> None:
    assert (await box.exec([Path("/bin/pwd")], cwd=tmp_path)).stdout == f"{tmp_path}\n"
    async with await box.shell(Path("/bin/sh"), cwd=tmp_path) as shell:
        assert shell.cwd == str(tmp_path)
        assert (await shell.run("pwd", cwd=Path("/"))).stdout == "/\n"
    async with await box.terminal(Path("/bin/bash"), cwd=tmp_path) as terminal:
        assert (await terminal.run("pwd", timeout=30)).output.strip() == str(tmp_path)
    async with await box.terminal([Path("/bin/cat")]) as program:
        assert program.pid


async def test_everything_begins_at_the_connections_directory(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    own = Sandbox(box.api, cwd=tmp_path, env={"FROM": "connection", "OVER": "connection"})
    script = 'printf "%s %s %s" "$(pwd)" "$FROM" "$OVER"'
    assert (await own.exec(["sh", "-c", script])).stdout == f"{tmp_path} connection connection"
    result = await own.exec(["sh", "-c", script], cwd="sub", env={"OVER": "call"})
    assert result.stdout == f"{tmp_path}/sub connection call"
    async with await own.shell() as shell:
        assert (await shell.run(script)).stdout == f"{tmp_path} connection connection"
    await own.write_file("file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    await own.copy("file", Path("sub/copy"))
    await own.move("sub/copy", "sub/moved")
    assert await own.read_text("sub/moved") == "content"
    assert [entry.name for entry in await own.list_dir()] == ["file", "sub"]
    assert [piece async for piece in own.open_read("file")] == [b"content"]
    await own.make_dir("made")
    assert (await own.stat("made")).type == "directory"
    await own.upload(tmp_path / "sub", "up")
    await own.download("up", tmp_path / "down")
    assert (tmp_path / "down" / "moved").exists()
    await own.remove("up", recursive=True)
    assert not await own.exists("up")
    assert await own.exists(tmp_path / "file")


@needs_root
async def test_everything_is_done_as_the_connections_user(box: Sandbox, tmp_path: Path) -> None:
    own = Sandbox(box.api, user="nobody", cwd="/")
    assert (await own.exec(["id", "-un"])).stdout == "nobody\n"
    assert (await own.exec(["id", "-un"], user="root")).stdout == "root\n"
    assert await (await own.start(["id", "-un"])).communicate() == (b"nobody\n", b"")
    async with await own.terminal(["sh", "-c", "id -un; read wait"]) as terminal:
        await terminal.wait_until_awaiting_input(timeout=30)
        assert "nobody" in (await terminal.screen()).text
    secret = tmp_path / "secret"
    secret.write_bytes(b"s")
    secret.chmod(0o600)
    with pytest.raises(PermissionError):
        await own.read_file(secret)
    assert await own.read_file(secret, user="root") == b"s"


async def test_stderr_in_stdout_is_in_the_order_in_which_it_was_printed(box: Sandbox) -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9; do echo out $i; echo err $i >&2; done"
    expected = "".join(f"out {i}\nerr {i}\n" for i in range(1, 10))
    result = await box.exec(["sh", "-c", script], merge_stderr=True)
    assert (result.stdout, result.stderr) == (expected, "")
    options = ExecRemoteOptions(merge_stderr=True)
    events = [event async for event in box.exec_remote(["sh", "-c", script], options)]
    assert "".join(event.data for event in events if isinstance(event, StdoutChunk)) == expected
    assert events[-1] == Completed(0, expected, "")
    process = await box.start(["sh", "-c", script], merge_stderr=True)
    chunks = [chunk async for chunk in process.output()]
    assert {chunk.stream for chunk in chunks} == {"stdout"}
    assert b"".join(chunk.data for chunk in chunks if isinstance(chunk, OutputChunk)).decode() == expected
    assert await process.communicate() == (expected.encode(), b"")


async def test_a_command_that_cannot_be_started(box: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo no")
    with pytest.raises(FileNotFoundError) as missing:
        await box.exec(["no-such-program"])
    assert isinstance(missing.value, CommandNotFound)
    with pytest.raises(PermissionError) as refused:
        await box.exec([script])
    assert isinstance(refused.value, NotExecutable)
    result = await box.exec(["no-such-program"], start_errors="result")
    assert (result.exit_code, result.stdout, result.stderr) == (127, "", "no-such-program: command not found\n")
    result = await box.exec([script], start_errors="result")
    assert (result.exit_code, result.success) == (126, False)
    assert str(script) in result.stderr


async def test_a_sandbox_of_another_loop_is_named(box: Sandbox, way: str, server: RunningServer) -> None:
    process = await box.start(["cat"], stdin="open")

    async def elsewhere() -> None:
        with pytest.raises(InvalidRequest, match="belongs to another event loop"):
            await box.exec(["true"])
        if way != "inprocess":
            with pytest.raises(InvalidRequest, match="belongs to another event loop"):
                await process.wait()
            with pytest.raises(InvalidRequest, match="belongs to another event loop"):
                process.events()

    await asyncio.to_thread(asyncio.run, elsewhere())
    assert (await box.exec(["true"])).success
    await process.terminate(force=True)
