"""Short requests are answered as all others, in any pieces; requests that differ go to the application."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from holdfast.service.api import RunRequest, RunResult
from holdfast.service.fronts.http import HttpSettings
from holdfast.service.problems import Problem
from holdfast.service.settings import ServiceSettings
from holdfast.session.v1 import session_pb2 as pb

from .fake_sessions import ANNA, BEN, Fronts, OverHttp, Seen, for_ever

PATH = "/holdfast.session.v1.SessionService"
GET_SESSION = b'{"sessionId":"s1"}'


def request(
    method: str = "GetSession",
    body: bytes = GET_SESSION,
    *,
    token: str = ANNA,
    content_type: str = "application/json",
    more: str = "",
) -> bytes:
    head = (
        f"POST {PATH}/{method} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    )
    return head.encode() + body


class Reply:
    def __init__(self, head: str, body: bytes) -> None:
        self.status = int(head.split(" ", 2)[1])
        self.head = head.lower()
        self.body = body

    @property
    def is_short(self) -> bool:
        """Whether `UnaryCalls` answered: the application sends no length."""
        return "\r\ncontent-length: " in self.head


class Connection:
    """A client that counts bytes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, fronts: Fronts) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", int(fronts.http.url.rpartition(":")[2])))

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()

    async def reply(self) -> Reply:
        async with asyncio.timeout(30):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            if found := re.search(r"\r\ncontent-length: (\d+)", head, re.IGNORECASE):
                return Reply(head, await self._reader.readexactly(int(found[1])))
            body = b""
            while size := int(await self._reader.readline(), 16):
                body += (await self._reader.readexactly(size + 2))[:size]
            await self._reader.readline()
            return Reply(head, body)

    async def call(self, *pieces: bytes) -> Reply:
        await self.send(*pieces)
        return await self.reply()

    async def ended(self) -> bool:
        async with asyncio.timeout(30):
            return await self._reader.read() == b""

    def close(self) -> None:
        self._writer.close()


@pytest.mark.parametrize(
    "more",
    [
        "Connect-Timeout-Ms: 60000\r\n",
        "Content-Encoding: identity\r\n",
        "X-Repeated: a\r\nX-Repeated: b\r\n",
        "X-Name: \u00fc\r\n",
    ],
    ids=["deadline", "encoding", "repeated", "not ascii"],
)
async def test_requests_with_more_than_a_call_needs_are_left_to_the_application(more: str) -> None:
    async with OverHttp() as fronts:
        connection = await Connection.to(fronts)
        reply = await connection.call(request(more=more))
        assert (reply.status, reply.is_short) == (200, False)
        assert (await connection.call(request())).is_short
        connection.close()


async def test_long_requests_are_left_to_the_application() -> None:
    async with OverHttp() as fronts:
        connection = await Connection.to(fronts)
        body = b'{"sessionId":"s1"' + b" " * 65_536 + b"}"
        reply = await connection.call(request(body=body))
        assert (reply.status, reply.is_short) == (200, False)
        connection.close()


async def both_ways(fronts: Fronts, **options: Any) -> Reply:
    """The reply to a short request; that of the application, which gets a deadline to make it different, agrees."""
    connection = await Connection.to(fronts)
    short = await connection.call(request(**options))
    other = await connection.call(request(**options, more="Connect-Timeout-Ms: 60000\r\n"))
    connection.close()
    assert (short.is_short, other.is_short) == (True, False)
    assert short.status == other.status
    assert "\r\nx-content-type-options: nosniff" in short.head
    if options.get("content_type") == "application/proto" and short.status == 200:
        assert short.body == other.body
    else:
        ours, theirs = json.loads(short.body), json.loads(other.body)
        assert {**ours, "details": None} == {**theirs, "details": None}
        for one, two in zip(ours.get("details", ()), theirs.get("details", ()), strict=True):
            assert (one["type"], one["value"]) == (two["type"], two["value"])
            assert one["debug"] == two["debug"]
    return short


async def test_replies_and_errors_are_those_of_the_application() -> None:
    async with OverHttp() as fronts:
        reply = await both_ways(fronts)
        assert (reply.status, json.loads(reply.body)["metadata"]["sessionId"]) == (200, "s1")
        binary = pb.GetSessionRequest(session_id="s1").SerializeToString()
        reply = await both_ways(fronts, body=binary, content_type="application/proto")
        assert pb.GetSessionResponse.FromString(reply.body).metadata.session_id == "s1"
        assert (await both_ways(fronts, method="ListSessions", body=b"")).status == 200
        assert (await both_ways(fronts, body=b"\xff", content_type="application/proto")).status == 400
        assert (await both_ways(fronts, body=b"{")).status == 400
        assert (await both_ways(fronts, body=b'{"sesionId": "s1"}')).status == 400
        assert (await both_ways(fronts, token="hf_wrong")).status == 401
        assert (await both_ways(fronts, token=BEN)).status == 404
        assert (await both_ways(fronts, method="SendInput")).status == 400
        for kind in Problem.__subclasses__():
            fronts.sessions.answers["get"] = kind("no ü", reason="WHY", retry_after=1.5, field="a%b")
            await both_ways(fronts)


async def test_a_bug_has_an_id_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with OverHttp() as fronts:
        fronts.sessions.answers["get"] = RuntimeError("swordfish")
        connection = await Connection.to(fronts)
        reply = await connection.call(request())
        connection.close()
    assert (reply.is_short, reply.status, b"swordfish" in reply.body) == (True, 500, False)
    error_id = json.loads(reply.body)["details"][0]["debug"]["metadata"]["error_id"]
    assert error_id in caplog.text


async def test_requests_in_pieces_and_ahead_of_their_turn_are_answered_in_order() -> None:
    seen = Seen()
    async with OverHttp(observer=seen) as fronts:
        begun, finish = asyncio.Event(), asyncio.Event()

        async def command(request: RunRequest) -> RunResult:
            begun.set()
            await finish.wait()
            return RunResult("c1", 0, b"out\n", b"", 0.25, "IDLE")

        fronts.sessions.answers["run_command"] = command
        connection = await Connection.to(fronts)
        whole = request()
        assert (await connection.call(whole[:-18], whole[-18:])).is_short
        assert (await connection.call(whole[:-18], whole[-18:-5], whole[-5:])).is_short
        assert (await connection.call(whole[:30], whole[30:])).status == 200
        assert (await connection.call(whole)).is_short
        await connection.send(request("RunCommand", b'{"sessionId":"s1","command":"make"}'))
        await begun.wait()
        await connection.send(whole, whole[:40])
        finish.set()
        assert json.loads((await connection.reply()).body)["stdout"] == "b3V0Cg=="
        assert (await connection.reply()).status == 200
        await connection.send(whole[40:])
        assert (await connection.reply()).status == 200
        connection.close()
    assert [status for *_, status in seen.calls] == ["OK"] * 7


async def test_the_beginning_of_a_request_that_has_no_end_goes_to_the_application() -> None:
    async with OverHttp(http_settings=HttpSettings(listen="127.0.0.1:0", request_seconds=0.1)) as fronts:
        connection = await Connection.to(fronts)
        assert (await connection.call(request()[:-1])).status == 504
        connection.close()


async def test_a_host_of_another_site_is_refused() -> None:
    async with OverHttp() as fronts:
        connection = await Connection.to(fronts)
        assert (await connection.call(request().replace(b"Host: here", b"Host: evil.example.com"))).status == 421
        connection.close()
        assert fronts.sessions.calls == []


async def test_a_client_that_leaves_cancels_its_call() -> None:
    seen = Seen()
    async with OverHttp(observer=seen) as fronts:
        fronts.sessions.answers["get"] = for_ever
        connection = await Connection.to(fronts)
        await connection.send(request())
        await fronts.sessions.until_open(1)
        connection.close()
        await fronts.sessions.until_open(0)
    assert seen.calls == [("http", "GetSession", "anna", "CANCELLED")]


async def test_a_client_that_leaves_cancels_its_call_before_a_request_that_waits() -> None:
    seen = Seen()
    async with OverHttp(observer=seen) as fronts:
        fronts.sessions.answers["get"] = for_ever
        connection = await Connection.to(fronts)
        # The connection has parsed the second request, and has not begun it.
        await connection.send(request() + request())
        await fronts.sessions.until_open(1)
        connection.close()
        await fronts.sessions.until_open(0)
    assert seen.calls == [("http", "GetSession", "anna", "CANCELLED")]


async def test_a_client_that_leaves_before_the_end_of_its_request_calls_nothing() -> None:
    seen = Seen()
    async with OverHttp(observer=seen) as fronts:
        connection = await Connection.to(fronts)
        await connection.send(request()[:-1])
        await seen.begun.wait()
        connection.close()
        await seen.ended.wait()
        assert fronts.sessions.calls == []
    assert seen.calls == [("http", "GetSession", "anna", "CANCELLED")]


async def test_a_stop_lets_a_call_finish_and_then_closes_its_connection() -> None:
    async with OverHttp() as fronts:
        finish = asyncio.Event()

        async def command(request: RunRequest) -> RunResult:
            await finish.wait()
            return RunResult("c1", 0, b"out\n", b"", 0.25, "IDLE")

        fronts.sessions.answers |= {"run_command": command, "read_output": for_ever}
        running, polling = await Connection.to(fronts), await Connection.to(fronts)
        await running.send(request("RunCommand", b'{"sessionId":"s1","command":"make"}'))
        await polling.send(request("ReadOutput", b'{"sessionId":"s1","waitTimeoutMs":60000}'))
        await fronts.sessions.until_open(2)
        stopping = asyncio.create_task(fronts.http.stop(30))
        assert (await polling.reply()).status == 503
        finish.set()
        reply = await running.reply()
        assert (reply.is_short, reply.status) == (True, 200)
        assert await running.ended()
        await stopping
        running.close()
        polling.close()
        assert fronts.admission.under_way == 0


async def test_a_stop_does_not_wait_for_a_call_that_does_not_end() -> None:
    async with OverHttp() as fronts:
        fronts.sessions.answers["run_command"] = for_ever
        connection = await Connection.to(fronts)
        await connection.send(request("RunCommand", b'{"sessionId":"s1","command":"make"}'))
        await fronts.sessions.until_open(1)
        async with asyncio.timeout(60):
            await fronts.http.stop(0.2)
        await fronts.sessions.until_open(0)
        await connection.ended()
        connection.close()
        assert fronts.admission.under_way == 0


async def test_limits_hold_for_short_requests() -> None:
    async with OverHttp(rates=ServiceSettings(calls_per_second=0.001, calls_burst=2)) as fronts:
        connection = await Connection.to(fronts)
        assert [(await connection.call(request())).status for _ in range(3)] == [200, 200, 429]
        connection.close()
