"""No call waits for another client's long poll or flood: shown by the order of replies, not by a clock.

Sent by hand, so that the test decides when the connection is read and when it is not.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any

import pytest

from holdfast import Sandbox
from tests.contract.ways import SMALL, address_of
from tests.support.servers import Conversation, RunningServer, conversation, is_alive, running_server

#: The bytes that the kernel and the libraries may hold of an unread connection, both ends together.
IN_FLIGHT = 14_000_000


async def start(talk: Conversation, id: str, script: str, **more: Any) -> dict[str, Any]:
    argv = ["sh", "-c", script]
    return await talk.result("process/start", processId=id, argv=argv, **{"subscribe": False, **more})


async def test_a_long_poll_delays_no_other_request(talk: Conversation) -> None:
    await start(talk, "silent", "read x; echo $x", pipeStdin=True)
    polls = [await talk.ask("process/read", processId="silent", waitMs=30_000) for _ in range(5)]
    waits = [await talk.ask("process/wait", processId="silent") for _ in range(5)]
    ports = await talk.ask("port/wait", port=1, timeoutMs=30_000)
    requested = await talk.ask("process/list")
    first = await talk.hear()
    assert first["id"] == requested
    assert [process["processId"] for process in first["result"]["processes"]] == ["silent"]
    await talk.result("process/write", processId="silent", chunk=base64.b64encode(b"word\n").decode())
    for id in polls:
        result = (await talk.reply(id))["result"]
        assert base64.b64decode(result["chunks"][0]["chunk"]) == b"word\n"
    for id in waits:
        ended = (await talk.reply(id))["result"]
        assert (ended["running"], ended["exitCode"], ended["signal"]) == (False, 0, None)
    assert ports not in talk.replies


async def test_requests_wait_for_nothing_in_the_client_either(box: Sandbox) -> None:
    process = await box.start(["cat"], stdin="open")
    polls = [asyncio.create_task(process.read(wait=30)) for _ in range(3)]
    waiting = asyncio.create_task(process.wait())
    assert len(await box.processes()) == 1
    assert not any(task.done() for task in (*polls, waiting))
    await process.close_stdin()
    assert (await waiting).exit_code == 0
    assert {(await poll).exited for poll in polls} <= {True}


async def test_control_overtakes_a_flood_that_is_not_read(talk: Conversation) -> None:
    total, cycle = 64_000_000, b"0123456789abcdef\n"
    script = f"yes 0123456789abcdef | head -c {total}"
    await start(talk, "flood", script, subscribe=True, overflow="block")
    # The process waits for its reader, so most of the flood is still to come when the request is sent.
    first = await talk.notice("process/output")
    requested = await talk.ask("process/list")
    listed = await talk.reply(requested)
    assert [process["running"] for process in listed["result"]["processes"]] == [True]
    assert {notice["method"] for notice in talk.notices} <= {"process/output"}
    before = sum(len(base64.b64decode(notice["params"]["chunk"])) for notice in talk.notices)
    assert before < IN_FLIGHT
    # The flood goes on behind the reply, to its end, and nothing of it is lost.
    position = 0
    while position < total:
        params = first if position == 0 else await talk.notice("process/output")
        data = base64.b64decode(params["chunk"])
        assert params["offset"] == position
        assert (cycle * (len(data) // 17 + 2))[position % 17 :].startswith(data)
        position += len(data)
    await talk.notice("process/exited", processId="flood")
    await talk.notice("process/closed", processId="flood")
    assert position == total


async def test_terminate_works_while_the_client_does_not_read(talk: Conversation) -> None:
    pid = (await talk.result("process/start", processId="flood", argv=["yes"], overflow="block"))["pid"]
    requested = await talk.ask("process/terminate", processId="flood", force=True)
    assert (await talk.reply(requested))["result"] == {"running": True}
    assert not is_alive(pid)
    exited = await talk.notice("process/exited", processId="flood")
    assert (exited["exitCode"], exited["signal"]) == (137, "SIGKILL")


@pytest.mark.parametrize("way", ["unix", "ws"])
async def test_a_connection_that_never_reads_costs_the_server_little(way: str) -> None:
    with running_server((way,), settings={"reader_stall_seconds": 0.1}) as server:
        await never_read(address_of(way, server, {}), server)


async def never_read(address: str | list[str], server: RunningServer) -> None:
    async with conversation(address) as deaf, conversation(address) as talk:
        await talk.initialize()
        await deaf.initialize()
        before = server.private_bytes()
        for number in range(4):
            await deaf.ask(
                "process/start", processId=f"flood-{number}", argv=["sh", "-c", "yes | head -c 100000000"]
            )
        # Their starts are not answered in an order that is known here, so search for them.
        while len((await talk.result("process/list"))["processes"]) < 4:
            pass
        for number in range(4):
            assert (await talk.result("process/wait", processId=f"flood-{number}"))["exitCode"] == 0
        await start(talk, "other", "seq 100000", subscribe=True)
        await talk.notice("process/closed", processId="other")
        assert sum(len(base64.b64decode(n["params"].get("chunk", ""))) for n in talk.notices) == 588_895
        assert server.private_bytes() - before < 24_000_000


async def test_a_deaf_client_that_asks_for_much_is_not_read_on(server: RunningServer) -> None:
    """Unread replies are bounded too: requests wait in the socket once enough replies are queued."""
    async with conversation(server.address("unix")) as deaf, conversation(server.address("unix")) as talk:
        await talk.initialize()
        await deaf.initialize()
        await start(talk, "large", "yes | head -c 16000000")
        assert (await talk.result("process/wait", processId="large"))["exitCode"] == 0
        before = server.private_bytes()
        # Each reply is 21 MB of base64; none is read.
        requested = [await deaf.ask("process/snapshot", processId="large") for _ in range(200)]
        assert (await talk.result("ping")) == {}
        assert server.private_bytes() - before < 150_000_000
        reply = await deaf.reply(requested[0])
        assert len(base64.b64decode(reply["result"]["stdout"])) == 16_000_000


# --- windows -----------------------------------------------------------------------------------------------------


async def test_a_window_is_respected_and_credit_moves_it(talk: Conversation) -> None:
    window, chunk_limit = 200_000, 64 * 1024
    subscribe = {"subscription": "s", "window": window}
    script = "seq -f %07.0f 0 124999"
    await start(talk, "counted", script, subscribe=subscribe, overflow="block")
    received, credited, digest, last_seq = 0, 0, hashlib.sha256(), 0

    async def take() -> int:
        nonlocal received, last_seq
        notice = await talk.notice("process/output", subscription="s")
        data = base64.b64decode(notice["chunk"])
        assert notice["offset"] == received
        assert notice.get("firstSeq", notice["seq"]) == last_seq + 1
        last_seq = notice["seq"]
        digest.update(data)
        received += len(data)
        assert received <= credited + window + chunk_limit
        return len(data)

    while received < window:
        await take()
    # All is printed, and nothing more comes: not in as many round trips as one likes.
    for _ in range(5):
        await talk.result("ping")
    assert talk.notices == []
    while received < 1_000_000:
        amount = received - credited
        credited = received
        await talk.tell("process/credit", subscription="s", seq=last_seq, bytes=amount)
        await take()
    expected = b"".join(b"%07d\n" % i for i in range(125_000))
    assert digest.hexdigest() == hashlib.sha256(expected).hexdigest()
    await talk.tell("process/credit", subscription="s", seq=last_seq, bytes=received - credited)
    exited = await talk.notice("process/exited", subscription="s")
    closed = await talk.notice("process/closed", subscription="s")
    assert (exited["seq"], closed["seq"]) == (last_seq + 1, last_seq + 2)


async def test_exit_and_close_use_no_window(talk: Conversation) -> None:
    subscribe = {"subscription": "s", "window": 1}
    await start(talk, "short", "echo more than the window; exit 4", subscribe=subscribe)
    output = await talk.notice("process/output", subscription="s")
    assert base64.b64decode(output["chunk"]) == b"more than the window\n"
    assert (await talk.notice("process/exited", subscription="s"))["exitCode"] == 4
    assert (await talk.notice("process/closed", subscription="s"))["seq"] == output["seq"] + 2


async def test_one_window_that_is_full_stops_no_other(talk: Conversation) -> None:
    await start(talk, "full", "yes", subscribe={"subscription": "full", "window": 1000}, overflow="block")
    await talk.notice("process/output", subscription="full")
    await start(talk, "other", "seq 1000", subscribe={"subscription": "other", "window": 1_000_000})
    await talk.notice("process/closed", subscription="other")
    data = b"".join(
        base64.b64decode(n["params"]["chunk"])
        for n in talk.notices
        if n["method"] == "process/output" and n["params"]["subscription"] == "other"
    )
    assert data == b"".join(b"%d\n" % i for i in range(1, 1001))
    assert (await talk.result("process/terminate", processId="full", force=True)) == {"running": True}


async def test_an_unsubscribed_reader_gets_no_more(talk: Conversation) -> None:
    await start(talk, "echo", "cat", pipeStdin=True, subscribe={"subscription": "a"})
    await talk.result("process/subscribe", processId="echo", subscription="b")
    word = base64.b64encode(b"1\n").decode()
    await talk.result("process/write", processId="echo", chunk=word)
    await talk.notice("process/output", subscription="a")
    await talk.notice("process/output", subscription="b")
    await talk.result("process/unsubscribe", subscription="a")
    await talk.result("process/write", processId="echo", chunk=word)
    assert (await talk.notice("process/output"))["subscription"] == "b"
    await talk.result("process/closeStdin", processId="echo")
    await talk.notice("process/closed", subscription="b")
    assert not [n for n in talk.notices if n["params"]["subscription"] == "a"]


@pytest.mark.parametrize("way", ["unix", "ws", "stdio"])
async def test_a_session_has_a_number_of_processes(way: str, small_server: RunningServer) -> None:
    async with conversation(address_of(way, small_server, SMALL)) as talk:
        await talk.initialize()
        for number in range(5):
            await start(talk, f"one-{number}", "exec sleep 1000")
        code, message = await talk.error("process/start", processId="six", argv=["true"])
        assert code == -32023
        assert "max_processes_per_connection" in message
        await talk.result("process/terminate", processId="one-0", force=True)
        assert (await start(talk, "six", "exit 0"))["processId"] == "six"
