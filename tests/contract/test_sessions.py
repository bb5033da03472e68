"""Detach and resume by hand: what a session keeps when its connection is gone, and for how long."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.contract.ways import SMALL, address_of
from tests.support.servers import Conversation, RunningServer, conversation

#: Over stdio the server ends with its connection; a session can be resumed where the server stays.
WAYS = ("unix", "ws")


def data_of(notice: dict[str, Any]) -> bytes:
    return base64.b64decode(notice["chunk"])


async def type_line(talk: Conversation, process_id: str, text: str) -> None:
    chunk = base64.b64encode(text.encode()).decode()
    result = await talk.result("process/write", processId=process_id, chunk=chunk)
    assert result == {"status": "accepted"}


async def start_echo(talk: Conversation, process_id: str, **more: Any) -> None:
    await talk.result("process/start", processId=process_id, argv=["cat"], pipeStdin=True, **more)


@pytest.mark.parametrize("way", WAYS)
async def test_a_resumed_session_is_pushed_what_it_missed(way: str, server: RunningServer) -> None:
    address = address_of(way, server, {})
    async with conversation(address) as first:
        assert (await first.initialize())["resumed"] is False
        await start_echo(first, "echo")
        await type_line(first, "echo", "before\n")
        reported = await first.notice("process/output", processId="echo")
        assert (data_of(reported), reported["seq"]) == (b"before\n", 1)
    async with conversation(address) as meanwhile:
        await meanwhile.initialize()
        await type_line(meanwhile, "echo", "while away\n")
        read = await meanwhile.result("process/read", processId="echo", afterSeq=1, waitMs=30_000)
        assert data_of(read["chunks"][0]) == b"while away\n"
        assert meanwhile.notices == [], "the process of another session is not pushed"
    async with conversation(address) as second:
        result = await second.initialize(resumeSessionId=first.session_id)
        assert (result["resumed"], result["sessionId"]) == (True, first.session_id)
        missed = await second.notice("process/output", processId="echo")
        assert (data_of(missed), missed["seq"]) == (b"while away\n", 2)
        await type_line(second, "echo", "after\n")
        after = await second.notice("process/output", processId="echo")
        assert (data_of(after), after["seq"]) == (b"after\n", 3)


@pytest.mark.parametrize("way", WAYS)
async def test_what_was_on_its_way_can_be_read_again(way: str, server: RunningServer) -> None:
    address = address_of(way, server, {})
    async with conversation(address) as first:
        await first.initialize()
        argv = ["sh", "-c", "seq 200000"]
        await first.result("process/start", processId="count", argv=argv, overflow="block")
        reported = await first.notice("process/output", processId="count")
        seen, seq = data_of(reported), reported["seq"]
        # Gone here, with most of the output neither read nor, some of it, sent.
    async with conversation(address) as second:
        await second.initialize(resumeSessionId=first.session_id)
        while True:
            read = await second.result("process/read", processId="count", afterSeq=seq, waitMs=30_000)
            for chunk in read["chunks"]:
                assert chunk["seq"] == seq + 1
                seq = chunk["seq"]
                seen += data_of(chunk)
            if read["closed"] and not read["chunks"]:
                break
            seq = read["nextSeq"] - 1
    assert seen == b"".join(b"%d\n" % i for i in range(1, 200_001))


@pytest.mark.parametrize("way", WAYS)
async def test_a_session_that_is_still_held_is_taken_over(way: str, server: RunningServer) -> None:
    address = address_of(way, server, {})
    async with conversation(address) as first:
        await first.initialize()
        await start_echo(first, "echo")
        async with conversation(address) as second:
            result = await second.initialize(resumeSessionId=first.session_id)
            assert result["resumed"] is True
            with pytest.raises(ConnectionError):
                await first.hear()
            await type_line(second, "echo", "here now\n")
            assert data_of(await second.notice("process/output", processId="echo")) == b"here now\n"


@pytest.mark.parametrize("way", WAYS)
async def test_an_unknown_session_is_a_new_one(way: str, server: RunningServer) -> None:
    async with conversation(address_of(way, server, {})) as talk:
        result = await talk.initialize(resumeSessionId="nobody-knows")
        assert result["resumed"] is False
        assert result["sessionId"] != "nobody-knows"


@pytest.mark.parametrize("way", WAYS)
async def test_processes_end_with_their_session_or_live_on(way: str, small_server: RunningServer) -> None:
    """The small server gives a session up after 50 ms."""
    address = address_of(way, small_server, SMALL)
    async with conversation(address) as first:
        await first.initialize()
        await start_echo(first, "bound", lifetime="connection")
        await start_echo(first, "free", lifetime="server")
    async with conversation(address) as second:
        await second.initialize()
        ended = await second.result("process/wait", processId="bound")
        assert (ended["running"], ended["exitCode"], ended["signal"]) == (False, 143, "SIGTERM")
        assert (await second.result("process/describe", processId="free"))["running"] is True
        await type_line(second, "free", "still here\n")
        read = await second.result("process/read", processId="free", waitMs=30_000)
        assert data_of(read["chunks"][0]) == b"still here\n"
        result = await second.reply(
            await second.ask("initialize", clientName="again", resumeSessionId=first.session_id)
        )
        assert result["error"]["code"] == -32600, "a connection has one session"


@pytest.mark.parametrize("way", WAYS)
async def test_a_bound_process_lives_while_its_session_can_be_resumed(way: str, server: RunningServer) -> None:
    address = address_of(way, server, {})
    async with conversation(address) as first:
        await first.initialize()
        await start_echo(first, "bound", lifetime="connection")
    async with conversation(address) as second:
        assert (await second.initialize(resumeSessionId=first.session_id))["resumed"] is True
        await type_line(second, "bound", "alive\n")
        assert data_of(await second.notice("process/output", processId="bound")) == b"alive\n"


async def test_a_start_and_a_write_that_are_sent_again_happen_once(server: RunningServer) -> None:
    request = {"processId": "once", "argv": ["cat"], "pipeStdin": True, "startId": "s-1"}
    write = {"processId": "once", "chunk": base64.b64encode(b"word\n").decode(), "writeId": "w-1"}
    async with conversation(server.address("unix")) as first:
        await first.initialize()
        # Neither reply is waited for: the connection breaks before they are read.
        await first.ask("process/start", **request)
        await first.ask("process/write", **write)
    async with conversation(server.address("unix")) as second:
        await second.initialize(resumeSessionId=first.session_id)
        started = await second.result("process/start", **request)
        assert started["processId"] == "once"
        assert (await second.result("process/write", **write)) == {"status": "accepted"}
        await second.result("process/closeStdin", processId="once")
        assert (await second.result("process/wait", processId="once"))["exitCode"] == 0
        snapshot = await second.result("process/snapshot", processId="once")
        assert base64.b64decode(snapshot["stdout"]) == b"word\n"
        code, message = await second.error("process/start", **{**request, "startId": "s-2"})
        assert (code, "'once'" in message) == (-32003, True)


async def test_json_and_messagepack_meet_at_one_process(server: RunningServer) -> None:
    """One encoding reads what the other writes."""
    import holdfast

    async with conversation(server.address("unix")) as by_hand, holdfast.connect(server.address("ws")) as box:
        await by_hand.initialize()
        await start_echo(by_hand, "shared")
        process = await box.process("shared")
        await process.write(b"\x00\xff binary\n")
        assert data_of(await by_hand.notice("process/output")) == b"\x00\xff binary\n"
        assert (await process.read(wait=30)).chunks[0].data == b"\x00\xff binary\n"
