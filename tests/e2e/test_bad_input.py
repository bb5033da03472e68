"""Bad input gets an error with its own code that names the offending thing, and the connection goes on."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import (
    Conversation,
    RunningServer,
    conversation,
    running_server,
    server_command,
)

LIMIT = 100_000


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(
        ["unix", "ws"], settings={"max_message_bytes": LIMIT, "max_pending_requests": 20}
    ) as server:
        yield server


@pytest.fixture(params=["unix", "ws", "stdio"])
async def talk(request: pytest.FixtureRequest, server: RunningServer) -> AsyncIterator[Conversation]:
    """A conversation that must still be good for something when the test is over."""
    settings = {"max_message_bytes": LIMIT, "max_pending_requests": 20, "spool_directory": server.spool}
    address = server_command(["stdio"], settings) if request.param == "stdio" else server.address(request.param)
    async with conversation(address) as talk:
        await talk.initialize()
        yield talk
        assert await talk.result("ping") == {}


async def error_reply(talk: Conversation, raw: bytes) -> tuple[int, str]:
    """Send a message that has no id to answer to."""
    await talk.line.write(raw)
    reply = await talk.hear()
    assert reply["id"] is None
    return reply["error"]["code"], reply["error"]["message"]


async def refused(talk: Conversation, **spec: Any) -> tuple[int, str, str]:
    """Start something impossible; return the code, the message and the side at fault."""
    reply = await talk.reply(await talk.ask("process/start", **{"processId": "bad", **spec}))
    listed = await talk.result("process/list")
    assert "bad" not in [process["processId"] for process in listed["processes"]]
    error = reply["error"]
    return error["code"], error["message"], error["data"]["fault"]


# --- messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"{", b"not json", b'{"jsonrpc": "2.0", "id": 1, "method": }', b"\x00\x01"])
async def test_malformed_json_is_answered(talk: Conversation, raw: bytes) -> None:
    code, message = await error_reply(talk, raw)
    assert (code, "json" in message) == (-32700, True)


async def test_text_that_is_not_utf8_is_answered(server: RunningServer) -> None:
    """On a stream; a WebSocket's text frame with such bytes ends the connection by its own rules."""
    async with conversation(server.address("unix")) as talk:
        await talk.initialize()
        method, parameter = b'{"id": 1, "method": "\xff\xfe"}', b'{"processId": "\xc3"}'
        for raw in (method, b'{"id": 1, "method": "process/read", "params": ' + parameter + b"}"):
            await talk.line.write(raw)
            assert (await talk.hear())["error"]["code"] == -32700
        assert await talk.result("ping") == {}


@pytest.mark.parametrize(
    "raw",
    [b"[]", b"17", b'"text"', b"null", b'{"jsonrpc": "2.0"}', b'{"id": 1}', b'{"id": {}, "method": "ping"}', b"{}"],
)
async def test_what_is_no_request_is_answered(talk: Conversation, raw: bytes) -> None:
    code, _ = await error_reply(talk, raw)
    assert code == -32600


async def test_nesting_without_end_is_answered(talk: Conversation) -> None:
    depth = 20_000
    raw = b'{"id": 1, "method": "ping", "params": ' + b"[" * depth + b"]" * depth + b"}"
    await talk.line.write(raw)
    reply = await talk.hear()
    assert reply["error"]["code"] in (-32700, -32602)


async def test_an_oversized_message_is_named_and_skipped(server: RunningServer) -> None:
    async with conversation(server.address("unix")) as talk:
        await talk.initialize()
        code, message = await error_reply(talk, b'{"id": 1, "method": "' + b"x" * 300_000 + b'"}')
        assert code == -32001
        assert "max_message_bytes" in message
        assert str(LIMIT) in message
        assert await talk.result("ping") == {}


async def test_an_oversized_message_closes_a_websocket_with_a_reason(server: RunningServer) -> None:
    async with conversation(server.address("ws")) as talk:
        await talk.initialize()
        await talk.line.write(b'{"id": 1, "method": "' + b"x" * 300_000 + b'"}')
        with pytest.raises(ConnectionError):
            await talk.hear()
    async with conversation(server.address("ws")) as talk:
        assert (await talk.initialize())["resumed"] is False


async def test_nothing_is_done_before_initialize(server: RunningServer) -> None:
    async with conversation(server.address("unix")) as talk:
        code, message = await talk.error("process/list")
        assert (code, message) == (-32600, "process/list before initialize")
        await talk.initialize()
        code, message = await talk.error("initialize", clientName="again")
        assert (code, "second time" in message) == (-32600, True)
        assert (await talk.result("process/list")) == {"processes": []}


async def test_an_unknown_method_is_named(talk: Conversation) -> None:
    code, message = await talk.error("process/fly")
    assert (code, "'process/fly'" in message) == (-32601, True)


@pytest.mark.parametrize(
    ("method", "params", "named"),
    [
        ("process/start", {"processId": 5, "argv": ["true"]}, "processId"),
        ("process/start", {"processId": "x", "argv": "true"}, "argv"),
        ("process/start", {"processId": "x", "argv": [1]}, "argv"),
        ("process/start", {"processId": "x"}, "argv"),
        ("process/start", {"argv": ["true"]}, "processId"),
        ("process/start", {"processId": "x", "argv": ["true"], "tty": "yes"}, "tty"),
        ("process/start", {"processId": "x", "argv": ["true"], "env": ["A=B"]}, "env"),
        ("process/start", {"processId": "x", "argv": ["true"], "overflow": "spill"}, "overflow"),
        ("process/start", {"processId": "x", "argv": ["true"], "lifetime": "eternal"}, "lifetime"),
        ("process/start", {"processId": "x", "argv": ["true"], "size": {"rows": "many"}, "tty": True}, "rows"),
        ("process/write", {"processId": "x", "chunk": "no base64!"}, "chunk"),
        ("process/write", {"processId": "x"}, "chunk"),
        ("process/read", {"processId": "x", "afterSeq": "one"}, "afterSeq"),
        ("process/read", {}, "processId"),
        ("process/resize", {"processId": "x", "rows": 5}, "cols"),
        ("initialize", {}, "clientName"),
    ],
)
async def test_wrong_types_are_named(talk: Conversation, method: str, params: dict[str, Any], named: str) -> None:
    code, message = await talk.error(method, **params)
    assert code == -32602
    assert method in message
    assert named in message


async def test_params_that_are_no_object_are_refused(talk: Conversation) -> None:
    for params in (["x"], 17, "text"):
        await talk.say({"id": 900, "method": "process/read", "params": params})
        error = (await talk.reply(900))["error"]
        assert (error["code"], "process/read" in error["message"]) == (-32602, True)


async def test_too_many_unanswered_requests_are_refused_one_by_one(server: RunningServer) -> None:
    async with conversation(server.address("unix")) as talk, conversation(server.address("unix")) as other:
        await talk.initialize()
        await other.initialize()
        await talk.result("process/start", processId="silent", argv=["sleep", "1000"], subscribe=False)
        waiting = [await talk.ask("process/wait", processId="silent") for _ in range(20)]
        code, message = await talk.error("process/wait", processId="silent")
        assert (code, "max_pending_requests" in message) == (-32023, True)
        # Another connection has its own count; what waits is answered in the end, and there is room again.
        assert await other.result("process/terminate", processId="silent", force=True) == {"running": True}
        assert {(await talk.reply(id))["result"]["exitCode"] for id in waiting} == {137}
        assert await talk.result("ping") == {}


# --- starts ---------------------------------------------------------------------------------------------------


async def test_an_empty_argv(talk: Conversation) -> None:
    code, message, fault = await refused(talk, argv=[])
    assert (code, fault) == (-32602, "caller")
    assert "argv is empty" in message
    code, message, _ = await refused(talk, argv=[""])
    assert (code, "argv[0]" in message) == (-32602, True)


async def test_a_nul_in_an_argument(talk: Conversation) -> None:
    code, message, fault = await refused(talk, argv=["echo", "fine", "a\0b"])
    assert (code, fault) == (-32602, "caller")
    assert "argv[2]" in message
    assert (await refused(talk, argv=["true"], arg0="a\0b"))[:2] == (-32602, "arg0 holds a NUL character")
    assert (await refused(talk, argv=["true"], cwd="/\0"))[:2] == (-32602, "cwd holds a NUL character")


async def test_impossible_environments(talk: Conversation) -> None:
    for env in ({"A=B": "x"}, {"": "x"}, {"A": "x\0y"}):
        code, message, _ = await refused(talk, argv=["true"], env=env)
        assert (code, repr(next(iter(env))) in message) == (-32602, True)


async def test_a_process_id_that_is_none(talk: Conversation) -> None:
    for id in ("", "x" * 1000):
        code, message, _ = await refused(talk, argv=["true"], processId=id)
        assert (code, "processId" in message) == (-32602, True)


async def test_a_missing_directory(talk: Conversation, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cwd in ("/no/such/place", str(tmp_path / "file"), "file:///no/such/place"):
        code, message, fault = await refused(talk, argv=["true"], cwd=cwd)
        assert (code, fault) == (-32020, "sandbox")
        assert cwd.removeprefix("file://") in message


async def test_a_command_that_is_not_there(talk: Conversation) -> None:
    for name in ("no-such-program", "/no/such/program", "./no-such-program"):
        code, message, fault = await refused(talk, argv=[name])
        assert (code, fault) == (-32040, "process")
        assert name in message


async def test_a_command_that_cannot_be_executed(talk: Conversation, tmp_path: Path) -> None:
    plain, text = tmp_path / "plain", tmp_path / "text"
    plain.write_text("#!/bin/sh\n")
    text.write_text("neither a script nor a program\n")
    text.chmod(stat.S_IRWXU)
    for path in (plain, text, tmp_path):
        code, message, fault = await refused(talk, argv=[str(path)])
        assert (code, fault) == (-32041, "process")
        assert str(path) in message


async def test_an_unknown_user(talk: Conversation) -> None:
    code, message, fault = await refused(talk, argv=["true"], user="no-such-user")
    assert (code, message, fault) == (-32021, "unknown user 'no-such-user'", "sandbox")
    if os.geteuid() == 0:
        code, message, _ = await refused(talk, argv=["true"], user="root:no-such-group")
        assert (code, "'no-such-group'" in message) == (-32021, True)


async def test_arguments_that_are_too_long_for_the_kernel() -> None:
    with running_server() as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            code, message, _ = await refused(talk, argv=["true", "x" * 4_000_000])
            assert (code, "true" in message) == (-32602, True)
            assert await talk.result("ping") == {}


async def test_a_size_without_a_terminal(talk: Conversation) -> None:
    code, message, _ = await refused(talk, argv=["true"], size={"rows": 24, "cols": 80})
    assert (code, message) == (-32602, "size needs tty")
    code, message, _ = await refused(talk, argv=["true"], tty=True, size={"rows": 0, "cols": 80})
    assert (code, "0x80" in message) == (-32602, True)


# --- operations -----------------------------------------------------------------------------------------------


async def test_operations_on_what_is_not_there(talk: Conversation) -> None:
    for method, more in (
        ("process/read", {}),
        ("process/closeStdin", {}),
        ("process/resize", {"rows": 1, "cols": 1}),
        ("process/signal", {"signal": "INT"}),
        ("process/wait", {}),
        ("process/snapshot", {}),
        ("process/describe", {}),
        ("process/forget", {}),
        ("process/subscribe", {"subscription": "s"}),
    ):
        code, message = await talk.error(method, processId="nobody", **more)
        assert (code, "'nobody'" in message) == (-32002, True), method
    chunk = base64.b64encode(b"x").decode()
    written = await talk.result("process/write", processId="nobody", chunk=chunk)
    assert written == {"status": "unknownProcess"}
    assert await talk.result("process/terminate", processId="nobody") == {"running": False}


async def test_operations_that_a_process_does_not_take(talk: Conversation) -> None:
    await talk.result("process/start", processId="pipes", argv=["sleep", "1000"], subscribe=False)
    code, message = await talk.error("process/resize", processId="pipes", rows=24, cols=80)
    assert (code, "'pipes'" in message) == (-32005, True)
    code, message = await talk.error("process/signal", processId="pipes", signal="SIGWHAT")
    assert (code, "'SIGWHAT'" in message) == (-32006, True)
    chunk = base64.b64encode(b"x").decode()
    assert await talk.result("process/write", processId="pipes", chunk=chunk) == {"status": "stdinClosed"}
    code, message = await talk.error("process/forget", processId="pipes")
    assert (code, "'pipes'" in message) == (-32600, True)
    code, message = await talk.error("process/start", processId="pipes", argv=["true"])
    assert (code, "'pipes'" in message) == (-32003, True)
    await talk.result("process/terminate", processId="pipes", force=True)
    code, message = await talk.error("process/signal", processId="pipes", signal="INT")
    assert (code, "'pipes'" in message) == (-32600, True)
    await talk.result("process/forget", processId="pipes")


@pytest.mark.parametrize(
    ("method", "params", "named"),
    [
        ("process/read", {"processId": "some", "afterSeq": -1}, "-1"),
        ("process/subscribe", {"processId": "some", "subscription": "s", "afterSeq": -7}, "-7"),
        ("port/wait", {"port": 70_000}, "70000"),
        ("port/wait", {"port": -1}, "-1"),
        ("port/wait", {"port": 80, "host": "no host"}, "no host"),
        ("exec_remote_poll", {"pid": -5}, "-5"),
    ],
)
async def test_numbers_out_of_range(talk: Conversation, method: str, params: dict[str, Any], named: str) -> None:
    await talk.result("process/start", processId="some", argv=["sleep", "1000"], subscribe=False)
    code, message = await talk.error(method, **params)
    assert code in (-32602, -32002)
    assert named in message
    await talk.result("process/terminate", processId="some", force=True)
    await talk.result("process/forget", processId="some")


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("process/read", {"processId": "some", "afterSeq": 10**15}),
        ("process/read", {"processId": "some", "maxBytes": 0}),
        ("process/read", {"processId": "some", "maxBytes": -1}),
        ("process/read", {"processId": "some", "waitMs": -1}),
        ("process/wait", {"processId": "some", "timeoutMs": -1}),
        ("process/wait", {"processId": "some", "timeoutMs": 0}),
        ("process/subscribe", {"processId": "some", "subscription": "s", "afterSeq": 10**15}),
        ("process/subscribe", {"processId": "some", "subscription": "s", "window": -1}),
        ("process/terminate", {"processId": "some", "graceMs": -1}),
    ],
)
async def test_odd_numbers_are_answered_one_way_or_another(
    talk: Conversation, method: str, params: dict[str, Any]
) -> None:
    await talk.result("process/start", processId="some", argv=["sleep", "1000"], subscribe=False)
    reply = await talk.reply(await talk.ask(method, **params))
    assert reply.get("error", {"code": -32602})["code"] == -32602
    await talk.result("process/terminate", processId="some", force=True)
    await talk.result("process/forget", processId="some")


async def test_notifications_that_make_no_sense_are_ignored(talk: Conversation) -> None:
    await talk.tell("process/credit", subscription="nobody", seq=1, bytes=10**18)
    await talk.tell("process/credit", subscription=5)
    await talk.tell("no/such/notification", x=1)
    await talk.say({"id": 12345, "result": {}})
    assert await talk.result("ping") == {}


# --- settings that forbid -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "kind"), [("allow_direct_exec", "direct"), ("allow_prepared_exec", "prepared")]
)
async def test_a_forbidden_kind_of_start(setting: str, kind: str) -> None:
    other = {"direct": "prepared", "prepared": "direct"}[kind]
    with running_server(settings={setting: False}) as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            code, message, fault = await refused(talk, argv=["true"], kind=kind)
            assert (code, fault) == (-32007, "caller")
            assert setting in message
            started = await talk.result("process/start", processId="x", argv=["true"], kind=other)
            assert started["processId"] == "x"
            if kind == "direct":
                code, message = await talk.error("exec_remote_start", command="true")
                assert (code, setting in message) == (-32007, True)
