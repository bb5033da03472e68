"""The tools, called by a client of the official SDK."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import ConnectMode
from mcp_types import ElicitResult

from holdfast.client.tools.tool_formats import definitions
from holdfast.client.tools.unified_exec import ToolOutput
from holdfast.integrations.mcp.exec_tools import _output

from .connections import call, failed, in_process


async def test_a_command_a_session_and_its_process(tmp_path: Path) -> None:
    async with in_process(tmp_path) as client:
        reported: list[str | None] = []

        async def progress(progress: float, total: float | None, message: str | None) -> None:
            reported.append(message)

        result = await client.call_tool(
            "exec_command",
            {"cmd": "echo first; sleep 1.5; echo out; echo err >&2; exit 3"},
            progress_callback=progress,
        )
        assert result.structured_content is not None
        assert result.structured_content["exit_code"] == 3
        assert sorted(result.structured_content["output"].split()) == ["err", "first", "out"]
        assert json.loads(result.content[0].text) == result.structured_content  # type: ignore[union-attr]
        assert "first" in reported

        began = await call(client, "exec_command", cmd="read line; echo got $line", tty=True, yield_time_ms=250)
        assert (began["exit_code"], isinstance(began["session_id"], int)) == (None, True)
        ended = await call(
            client, "write_stdin", session_id=began["session_id"], chars="it\n", yield_time_ms=10_000
        )
        assert (ended["exit_code"], ended["session_id"], "got it" in ended["output"]) == (0, None, True)
        assert "no session" in await failed(client, "write_stdin", session_id=began["session_id"])

        listed = (await call(client, "list_processes"))["processes"]
        entry = next(each for each in listed if each["process_id"] == ended["process_id"])
        assert (entry["running"], entry["exit_code"], entry["tty"]) == (False, 0, True)
        log = await client.read_resource(entry["log"])
        assert "got it" in log.contents[0].text  # type: ignore[union-attr]


async def test_a_command_runs_with_and_without_the_profile(tmp_path: Path) -> None:
    async with in_process(tmp_path) as client:
        shown = "shopt -q login_shell && echo login || echo plain"
        assert (await call(client, "exec_command", cmd=shown))["output"] == "login\n"
        assert (await call(client, "exec_command", cmd=shown, login=False))["output"] == "plain\n"


def test_a_kill_for_memory_is_in_the_result() -> None:
    ended = ToolOutput(None, 137, "", b"", 0, 0.5, oom=True)
    assert _output(ended, "p").oom is True


async def test_a_process_by_its_id(tmp_path: Path) -> None:
    async with in_process(tmp_path) as client:
        began = await call(client, "exec_command", cmd="echo ready; exec sleep 600", yield_time_ms=250)
        id = began["process_id"]
        output = began["output"]
        if not output:  # printed after the yield time
            output = (await call(client, "write_stdin", session_id=began["session_id"], yield_time_ms=5_000))[
                "output"
            ]
        assert output == "ready\n"
        read = await call(client, "read_output", process_id=id)
        assert (read["output"], read["running"]) == ("ready\n", True)
        assert (await call(client, "read_output", process_id=id, since=read["next_position"]))["output"] == ""
        assert (await call(client, "wait_process", process_id=id, timeout_seconds=0))["running"] is True
        assert await call(client, "kill_process", process_id=id, force=True) == {"was_running": True}
        end = await call(client, "wait_process", process_id=id)
        assert end == {"running": False, "exit_code": 137, "signal": "SIGKILL", "oom": False}
        assert "no process has the id" in await failed(client, "kill_process", process_id="absent")


async def test_files(tmp_path: Path) -> None:
    async with in_process(tmp_path) as client:
        path = str(tmp_path / "new" / "file.py")
        text = "".join(f"line {number}\n" for number in range(1, 6))
        assert await call(client, "write_file", path=path, content=text) == {"path": path, "size": len(text)}
        read = await call(client, "read_file", path=path, offset=2, limit=2)
        assert (read["content"], read["first_line"], read["truncated"]) == ("line 2\nline 3\n", 2, True)
        assert (await call(client, "read_file", path=path))["truncated"] is False
        await call(client, "edit_file", path=path, old_text="line 4", new_text="changed")
        assert "changed\n" in (await call(client, "read_file", path=path))["content"]
        assert "line" in await failed(client, "edit_file", path=path, old_text="line", new_text="x")
        (tmp_path / "new" / "bytes").write_bytes(b"\0\xff")
        assert (await call(client, "read_file", path=str(tmp_path / "new" / "bytes")))["content"] == "AP8="
        listed = await call(client, "list_directory", path=str(tmp_path / "new"))
        assert [each["name"] for each in listed["entries"]] == ["bytes", "file.py"]
        hits = await call(client, "search_files", path=str(tmp_path / "new"), pattern="chan?ged$", glob="*.py")
        assert hits == {"hits": [{"path": path, "line": 4, "text": "changed"}], "truncated": False}
        assert "grep" in await failed(client, "search_files", path=str(tmp_path / "new"), pattern="(")
        assert "no such file" in await failed(client, "read_file", path=str(tmp_path / "absent"))


async def test_a_terminal(tmp_path: Path) -> None:
    async with in_process(tmp_path) as client:
        opened = await call(client, "terminal_open", command="cat -u", rows=5, cols=40)
        id = opened["terminal_id"]
        shown = await call(client, "terminal_keys", terminal_id=id, text="hello", keys=["Enter"], wait_seconds=10)
        assert shown["lines"] == ["hello", "hello"]
        assert (await call(client, "terminal_screen", terminal_id=id))["rows"] == 5
        recording = await client.read_resource(f"holdfast://main/terminals/{id}/recording")
        header = json.loads(recording.contents[0].text.splitlines()[0])  # type: ignore[union-attr]
        assert (header["width"], header["height"]) == (40, 5)
        await call(client, "terminal_close", terminal_id=id)
        assert "closed" in await failed(client, "terminal_keys", terminal_id=id, text="x")


async def test_what_a_client_reads_of_the_tools(tmp_path: Path) -> None:
    async with in_process(tmp_path) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert not [name for name in tools if name.startswith("sandbox_")]
        for format in definitions("json-schema"):
            tool = tools[format["name"]]
            assert tool.description == format["description"]
            assert tool.input_schema["required"] == format["parameters"]["required"]
            for name, parameter in format["parameters"]["properties"].items():
                found = tool.input_schema["properties"][name]
                assert {key: found.get(key) for key in parameter} == parameter
        for tool in tools.values():
            assert tool.output_schema is not None
            assert tool.output_schema["type"] == "object"
            assert tool.annotations is not None
            assert tool.input_schema["additionalProperties"] is False
        assert tools["read_file"].annotations.read_only_hint is True  # type: ignore[union-attr]
        assert tools["exec_command"].annotations.destructive_hint is True  # type: ignore[union-attr]
        assert tools["write_file"].annotations.idempotent_hint is True  # type: ignore[union-attr]


async def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    async with in_process(tmp_path) as client:
        assert "no argument bogus" in await failed(client, "exec_command", cmd="true", bogus=1)
        assert "cmd" in await failed(client, "exec_command")
        assert "max_output_bytes" in await failed(client, "exec_command", cmd="true", max_output_bytes=0)
        assert "no sandbox 's2'" in await failed(client, "exec_command", cmd="true", sandbox="s2")
        assert "timeout_seconds" in await failed(client, "wait_process", process_id="x", timeout_seconds=600)


async def test_a_cancelled_call_kills_its_command(tmp_path: Path) -> None:
    async with in_process(tmp_path) as client:
        beginning: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def progress(progress: float, total: float | None, message: str | None) -> None:
            if message and not beginning.done():
                beginning.set_result(None)

        script = "echo running; exec sleep 600"
        calling = asyncio.create_task(
            client.call_tool("exec_command", {"cmd": script, "yield_time_ms": 30_000}, progress_callback=progress)
        )
        await beginning
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        listed = (await call(client, "list_processes"))["processes"]
        (id,) = [each["process_id"] for each in listed if script in each["command"]]
        # A client of the SDK that is cancelled sends the notification by itself; another one may not.
        end = await call(client, "wait_process", process_id=id)
        assert (end["running"], end["signal"]) == (False, "SIGKILL")


RULES = """
[profiles.default.commands]
default = "ask"
rules = [
  { verdict = "allow", program = "echo" },
  { verdict = "deny", program = "rm", reason = "nothing is removed here" },
]
"""


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_approvals_by_elicitation(tmp_path: Path, mode: ConnectMode) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    questions: list[str] = []
    answers: list[Any] = [{"approve": True}, {"approve": False}, None]

    async def requested(context: Any, params: Any) -> ElicitResult:
        questions.append(params.message)
        answer = answers.pop(0)
        return ElicitResult(action="accept", content=answer) if answer else ElicitResult(action="decline")

    async with in_process(tmp_path, str(rules), mode=mode, elicitation_callback=requested) as client:
        assert (await call(client, "exec_command", cmd="echo free"))["output"] == "free\n"
        assert "nothing is removed here" in await failed(client, "exec_command", cmd="rm -r /")
        assert questions == []
        assert (await call(client, "exec_command", cmd="printf yes"))["output"] == "yes"
        assert "printf yes" in questions[0]
        assert "refused" in await failed(client, "exec_command", cmd="printf no")
        assert "decline" in await failed(client, "terminal_open", command="cat")
        assert len(questions) == 3
    async with in_process(tmp_path, str(rules), mode=mode) as client:
        assert (await call(client, "exec_command", cmd="echo free"))["output"] == "free\n"
        assert "elicitation" in await failed(client, "exec_command", cmd="printf yes")
        assert "elicitation" in await failed(client, "terminal_keys", terminal_id="t", text="x")
