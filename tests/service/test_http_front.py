"""The HTTP port with real clients: curl in JSON, connectrpc's own client, a socket that does not read."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import re
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from connectrpc.client import ConnectClient
from connectrpc.code import Code
from connectrpc.compat import google_protobuf_binary_codec, google_protobuf_json_codec
from connectrpc.errors import ConnectError
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from google.rpc import error_details_pb2

from holdfast.service.api import Chunk, RunRequest, RunResult
from holdfast.service.fronts.connections import ConnectionLimits
from holdfast.service.fronts.handler import methods
from holdfast.service.fronts.http import HttpSettings
from holdfast.service.fronts.listening import TlsFiles, bind, parse_address
from holdfast.service.problems import Exhausted, Invalid, NotNow, Problem
from holdfast.service.settings import ServiceSettings
from holdfast.session.v1 import session_pb2 as pb
from holdfast.testing import FakeClock
from tests.support.parts import needs

from .certificates import make_certificates
from .fake_sessions import ANNA, BEN, OLGA, Fronts, OverHttp, Seen, chunk, curl, for_ever, no_end

SERVICE = "holdfast.session.v1.SessionService"
JSON = ("-H", "Content-Type: application/json")

needs_curl = needs("curl")


def auth(token: str = ANNA) -> tuple[str, str]:
    return "-H", f"Authorization: Bearer {token}"


async def post(fronts: Fronts, method: str, body: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    status, reply = await curl(*JSON, *(arguments or auth()), "-d", body, f"{fronts.http.url}/{SERVICE}/{method}")
    return status, json.loads(reply)


def details(error: dict[str, Any]) -> dict[str, Any]:
    """The details of a Connect error, by the generated classes of googleapis; their `debug` agrees."""
    found = {}
    for each in error["details"]:
        message = getattr(error_details_pb2, each["type"].rpartition(".")[2])()
        message.ParseFromString(base64.b64decode(each["value"] + "==="))
        found[message.DESCRIPTOR.name] = (message, each["debug"])
    return found


def connect_method(name: str) -> MethodInfo[Any, Any]:
    [method] = [each for each in methods() if each.name == name]
    kind = StreamType.SERVER_STREAM if method.stream else StreamType.UNARY
    return MethodInfo(
        name=name,
        service_name=SERVICE,
        input=method.request,
        output=method.reply,
        idempotency_level=IdempotencyLevel.UNKNOWN,
        stream_type=kind,
    )


@needs_curl
async def test_curl_creates_types_reads_and_closes_in_json() -> None:
    async with OverHttp() as fronts:
        status, made = await post(fronts, "CreateSession", '{"labels": {"task": "7"}, "kind": "SHELL"}')
        assert (status, made["sessionId"], made["prompt"], made["state"]) == (200, "s1", "$ ", "IDLE")
        assert made["metadata"]["createdAt"] == "1970-01-01T00:16:40.250Z"
        data = base64.b64encode(b"ls\n\xff").decode()
        status, sent = await post(fronts, "SendInput", json.dumps({"sessionId": "s1", "data": data}))
        assert (status, sent["accepted"], sent["commandId"]) == (200, True, "c1")
        status, read = await post(fronts, "ReadOutput", '{"sessionId": "s1", "waitTimeoutMs": 100}')
        assert (status, base64.b64decode(read["chunks"][0]["payload"])) == (200, b"hello")
        # Fields that hold a default are there all the same, so that scripts need not know the defaults.
        status, ran = await post(fronts, "RunCommand", '{"sessionId": "s1", "command": "true"}')
        assert (status, ran["exitCode"], ran["timedOut"], ran["stdout"]) == (200, 0, False, "b3V0Cg==")
        status, closed = await post(fronts, "CloseSession", '{"sessionId": "s1", "mode": "FORCE"}')
        assert (status, closed["finalState"]) == (200, "CLOSED")
        create, send = fronts.sessions.calls[0], fronts.sessions.calls[1]
        assert (create[2][0].kind, create[2][0].labels) == ("shell", {"task": "7"})
        assert send[2][1] == b"ls\n\xff"


@needs_curl
async def test_an_empty_body_is_an_empty_request_and_names_may_be_as_in_the_proto() -> None:
    async with OverHttp() as fronts:
        status, found = await post(fronts, "ListSessions", "")
        assert (status, [each["metadata"]["sessionId"] for each in found["sessions"]]) == (200, ["s1"])
        status, got = await post(fronts, "GetSession", '{"session_id": "s1"}')
        assert (status, got["metadata"]["usage"]["processCount"]) == (200, 2)


@needs_curl
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "unmarshal"),
        ('{"policy": {"requires": ["filesystem"]}}', "requires"),
        ('{"cols": "many"}', "cols"),
        ('{"environment": {"A": "\\ud800"}}', "unmarshal"),
        ("[" * 100_000, "unmarshal"),
        ('{"kind": "CASTLE"}', "kind"),
    ],
)
async def test_json_that_is_no_request_is_the_callers_error_and_says_where(body: str, says: str) -> None:
    async with OverHttp() as fronts:
        target = f"{fronts.http.url}/{SERVICE}/CreateSession"
        status, reply = await curl(*JSON, *auth(), "--data-binary", "@-", target, input=body.encode())
        error = json.loads(reply)
        assert (status, error["code"]) == (400, "invalid_argument")
        assert says in error["message"]
        assert fronts.sessions.calls == []


@needs_curl
async def test_errors_are_connect_errors_with_details_that_people_can_read() -> None:
    async with OverHttp() as fronts:
        fronts.sessions.answers["create"] = Exhausted(
            "anna has 5 sessions", reason="SESSION_LIMIT", retry_after=1.25, limit="max_sessions", value=5
        )
        status, error = await post(fronts, "CreateSession", "{}")
        assert (status, error["code"], error["message"]) == (429, "resource_exhausted", "anna has 5 sessions")
        info, shown = details(error)["ErrorInfo"]
        assert (info.reason, dict(info.metadata)) == ("SESSION_LIMIT", {"limit": "max_sessions", "value": "5"})
        assert shown["reason"] == "SESSION_LIMIT"
        retry, shown = details(error)["RetryInfo"]
        assert (retry.retry_delay.ToMilliseconds(), shown) == (1250, {"retryDelay": "1.250s"})
        status, error = await post(fronts, "SendInput", '{"sessionId": "s1"}')
        bad, shown = details(error)["BadRequest"]
        assert (status, bad.field_violations[0].field) == (400, "data")
        assert shown["fieldViolations"][0]["field"] == "data"


@needs_curl
async def test_every_problem_has_its_http_status() -> None:
    expected = {
        "INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "ALREADY_EXISTS": 409, "PERMISSION_DENIED": 403,
        "UNAUTHENTICATED": 401, "RESOURCE_EXHAUSTED": 429, "FAILED_PRECONDITION": 400, "OUT_OF_RANGE": 400,
        "DEADLINE_EXCEEDED": 504, "UNAVAILABLE": 503, "INTERNAL": 500,
    }  # fmt: skip
    async with OverHttp() as fronts:
        for kind in Problem.__subclasses__():
            fronts.sessions.answers["get"] = kind("no", reason="WHY")
            status, error = await post(fronts, "GetSession", '{"sessionId": "s1"}')
            assert (status, error["code"]) == (expected[kind.status], kind.status.lower())


@needs_curl
async def test_no_token_and_wrong_tokens_and_other_agents_sessions() -> None:
    async with OverHttp() as fronts:
        for arguments in (("-H", "X: y"), auth("hf_wrong"), ("-H", "Authorization: Basic YTpi")):
            status, error = await post(fronts, "GetSession", '{"sessionId": "s1"}', *arguments)
            assert (status, error["code"]) == (401, "unauthenticated")
            assert "hf_wrong" not in json.dumps(error)
        assert fronts.sessions.calls == []
        assert (await post(fronts, "GetSession", '{"sessionId": "s2"}'))[0] == 404
        assert (await post(fronts, "GetSession", '{"sessionId": "s2"}', *auth(BEN)))[0] == 200
        assert (await post(fronts, "GetSession", '{"sessionId": "s2"}', *auth(OLGA)))[0] == 200


@needs_curl
async def test_a_bug_of_ours_is_told_by_its_id_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with OverHttp() as fronts:
        fronts.sessions.answers["get"] = RuntimeError("the secret is swordfish")
        status, error = await post(fronts, "GetSession", '{"sessionId": "s1"}')
    assert (status, error["code"]) == (500, "internal")
    assert "swordfish" not in error["message"]
    info, _ = details(error)["ErrorInfo"]
    assert info.metadata["error_id"] in caplog.text
    assert "the secret is swordfish" in caplog.text
    assert ANNA not in caplog.text


@needs_curl
async def test_a_body_that_is_too_large_is_refused_and_the_largest_goes_through(tmp_path: Path) -> None:
    async with OverHttp() as fronts:
        target = f"{fronts.http.url}/{SERVICE}/SendInput"
        for size, expected in ((4 * 2**20, 200), (4 * 2**20 + 1, 400), (5 * 2**20, 429)):
            fronts.sessions.calls.clear()
            data = base64.b64encode(b"x" * size).decode()
            body = json.dumps({"sessionId": "s1", "data": data}).encode()
            status, reply = await curl(*JSON, *auth(), "--data-binary", "@-", target, input=body)
            assert status == expected, reply[:200]
            assert len(fronts.sessions.calls) == (1 if status == 200 else 0)
        # The same without a length that could be checked, and as a small body that becomes a large one.
        large = json.dumps({"sessionId": "s1", "data": "A" * 8 * 2**20}).encode()
        chunked = ("-H", "Transfer-Encoding: chunked", "--data-binary", "@-")
        status, _ = await curl(*JSON, *auth(), *chunked, target, input=large)
        assert status == 429
        zipped = ("-H", "Content-Encoding: gzip", "--data-binary", "@-")
        status, _ = await curl(*JSON, *auth(), *zipped, target, input=gzip.compress(large))
        assert status == 429
        assert fronts.sessions.calls == []


@needs_curl
async def test_what_is_no_connect_request_is_told_so() -> None:
    async with OverHttp() as fronts:
        target = f"{fronts.http.url}/{SERVICE}/GetSession"
        for content_type in (
            "text/plain",
            "application/grpc",
            "application/grpc-web+proto",
            "application/x-www-form-urlencoded",
        ):
            status, reply = await curl("-H", f"Content-Type: {content_type}", *auth(), "-d", "{}", target)
            assert (status, "application/json" in json.loads(reply)["message"]) == (415, True)
        assert (await curl(*auth(), target))[0] == 405
        assert (await curl(*JSON, *auth(), "-d", "{}", f"{fronts.http.url}/{SERVICE}/Fly"))[0] == 404
        assert (await curl(f"{fronts.http.url}/nothing"))[0] == 404


async def test_a_header_that_is_not_text_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with OverHttp() as fronts:
        reader, writer = await connect(fronts)
        writer.write(request_head("GetSession", b'{"sessionId":"s1"}', "application/json", b"X-Odd: \xff\xfe\r\n"))
        assert b" 200 " in await reader.readline()
        writer.close()
    assert caplog.records == []


@needs_curl
async def test_probes_and_metrics() -> None:
    async with OverHttp(metrics=lambda: (b"sessions_active 3\n", "text/plain; version=0.0.4")) as fronts:
        url = fronts.http.url
        assert await curl(f"{url}/healthz") == (200, b"ok\n")
        assert (await curl(f"{url}/healthz/"))[0] == 404  # and no redirection to the value of `Host`
        assert await curl(f"{url}/readyz") == (200, b'{"ready":true,"waiting_for":{}}')
        fronts.readiness.set("store", why_not="the database does not answer")
        status, reply = await curl(f"{url}/readyz")
        assert (status, json.loads(reply)["waiting_for"]) == (503, {"store": "the database does not answer"})
        assert await curl(f"{url}/metrics") == (200, b"sessions_active 3\n")
        status, reply = await curl(f"{url}/")
        assert (status, SERVICE.encode() in reply) == (200, True)


@needs_curl
async def test_metrics_can_be_asked_for_a_token() -> None:
    settings = HttpSettings(listen="127.0.0.1:0", open_metrics=False)
    async with OverHttp(http_settings=settings, metrics=lambda: (b"a 1\n", "text/plain")) as fronts:
        assert (await curl(f"{fronts.http.url}/metrics"))[0] == 401
        assert await curl(*auth(), f"{fronts.http.url}/metrics") == (200, b"a 1\n")


@needs_curl
async def test_curl_reads_a_stream_in_json() -> None:
    """Each message is a flag byte, four bytes of length, and JSON; the last one has the flag 2."""
    async with OverHttp() as fronts:
        body = b'{"sessionId":"s1"}'
        status, reply = await curl(
            *auth(), "-H", "Content-Type: application/connect+json", "--data-binary", "@-",
            f"{fronts.http.url}/{SERVICE}/StreamOutput", input=struct.pack(">BI", 0, len(body)) + body,
        )  # fmt: skip
        found = []
        while reply:
            flag, length = struct.unpack(">BI", reply[:5])
            found.append((flag, json.loads(reply[5 : 5 + length])))
            reply = reply[5 + length :]
        assert status == 200
        assert [base64.b64decode(each["payload"]) for flag, each in found if not flag] == [
            b"line 0\n", b"line 1\n", b"line 2\n",
        ]  # fmt: skip
        assert found[-1] == (2, {})


@pytest.mark.parametrize("codec", [google_protobuf_binary_codec, google_protobuf_json_codec])
async def test_connects_own_client_calls_streams_and_goes_on_from_a_token(codec: Callable[[], Any]) -> None:
    headers = {"authorization": f"Bearer {ANNA}"}
    async with OverHttp() as fronts, ConnectClient(fronts.http.url, codec=codec()) as client:
        got = await client.execute_unary(
            request=pb.GetSessionRequest(session_id="s1"), method=connect_method("GetSession"), headers=headers
        )
        assert got.metadata.session_id == "s1"

        async def stream(request: pb.StreamOutputRequest) -> list[Any]:
            found = client.execute_server_stream(
                request=request, method=connect_method("StreamOutput"), headers=headers
            )
            return [each async for each in found]

        whole = await stream(pb.StreamOutputRequest(session_id="s1"))
        assert [each.payload for each in whole] == [b"line 0\n", b"line 1\n", b"line 2\n"]
        rest = await stream(pb.StreamOutputRequest(session_id="s1", since=whole[1].token))
        assert [each.payload for each in rest] == [b"line 2\n"]
        with pytest.raises(ConnectError) as refused:
            await stream(pb.StreamOutputRequest(session_id="s2"))
        assert refused.value.code is Code.NOT_FOUND
        info = error_details_pb2.ErrorInfo.FromString(refused.value.details[0].message_bytes)
        assert info.reason == "SESSION_UNKNOWN"
        events = client.execute_server_stream(
            request=pb.SubscribeSessionEventsRequest(),
            method=connect_method("SubscribeSessionEvents"),
            headers=headers,
        )
        assert [each.detail async for each in events] == ["idle for 540 s"]
        with pytest.raises(ConnectError) as refused:
            await client.execute_unary(
                request=pb.GetSessionRequest(session_id="s1"), method=connect_method("GetSession"), headers={}
            )
        assert refused.value.code is Code.UNAUTHENTICATED


async def test_a_deadline_and_a_client_that_leaves_cancel_the_call() -> None:
    headers = {"authorization": f"Bearer {ANNA}"}
    async with OverHttp() as fronts, ConnectClient(fronts.http.url, codec=google_protobuf_binary_codec()) as client:
        sessions = fronts.sessions
        sessions.answers["run_command"] = for_ever
        run = pb.RunCommandRequest(session_id="s1", command="sleep 1000")
        with pytest.raises(ConnectError) as late:
            await client.execute_unary(
                request=run, method=connect_method("RunCommand"), headers=headers, timeout_ms=200
            )
        assert late.value.code is Code.DEADLINE_EXCEEDED
        await sessions.until_open(0)

        sessions.chunks = no_end
        reader, writer = await raw_stream(fronts)
        await reader.readuntil(b"first")
        await sessions.until_open(1)
        assert fronts.rates.running("anna", stream=True) == 1
        writer.close()
        await sessions.until_open(0)

        _, writer = await connect(fronts)
        writer.write(request_head("RunCommand", b'{"sessionId":"s1","command":"sleep 9"}', "application/json"))
        await sessions.until_open(1)
        writer.close()
        await sessions.until_open(0)


@needs_curl
async def test_every_call_is_observed_once_with_its_status() -> None:
    seen = Seen()
    async with OverHttp(observer=seen) as fronts:
        fronts.sessions.answers["run_command"] = for_ever
        await post(fronts, "GetSession", '{"sessionId": "s1"}', *auth(), "-H", "Traceparent: 00-1-2-01")
        assert seen.headers["traceparent"] == "00-1-2-01"
        await post(fronts, "GetSession", '{"sessionId": "s1"}', *auth("hf_no"))
        await post(fronts, "GetSession", '{"sessionId": "s2"}')
        await post(fronts, "GetSession", "{")
        await post(fronts, "SendInput", '{"sessionId": "s1", "data": "eA=="}')
        assert seen.concerned == {"s1", "s2", "c1"}
        late = ("-H", "Connect-Timeout-Ms: 50")
        await post(fronts, "RunCommand", '{"sessionId": "s1", "command": "make"}', *auth(), *late)
        _, writer = await connect(fronts)
        writer.write(request_head("RunCommand", b'{"sessionId":"s1","command":"make"}', "application/json"))
        await fronts.sessions.until_open(1)
        writer.close()
        await fronts.sessions.until_open(0)
    assert seen.calls == [
        ("http", "GetSession", "anna", "OK"),
        ("http", "GetSession", "", "UNAUTHENTICATED"),
        ("http", "GetSession", "anna", "NOT_FOUND"),
        ("http", "GetSession", "anna", "INVALID_ARGUMENT"),
        ("http", "SendInput", "anna", "OK"),
        ("http", "RunCommand", "anna", "DEADLINE_EXCEEDED"),
        ("http", "RunCommand", "anna", "CANCELLED"),
    ]


async def connect(
    fronts: Fronts, receive_buffer: int | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that reads only on demand."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    port = int(fronts.http.url.rpartition(":")[2])
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=connection, limit=2**16)


def request_head(method: str, body: bytes, content_type: str, more: bytes = b"") -> bytes:
    head = (
        f"POST /{SERVICE}/{method} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {ANNA}\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + more + b"\r\n" + body


async def raw_stream(
    fronts: Fronts, receive_buffer: int | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A `StreamOutput` on such a connection."""
    reader, writer = await connect(fronts, receive_buffer)
    message = pb.StreamOutputRequest(session_id="s1").SerializeToString()
    body = struct.pack(">BI", 0, len(message)) + message
    writer.write(request_head("StreamOutput", body, "application/connect+proto"))
    await writer.drain()
    return reader, writer


async def test_a_client_that_does_not_read_stops_the_reading_of_output() -> None:
    produced = 0
    moved = asyncio.Event()

    async def flood(since: str) -> AsyncIterator[Chunk]:
        nonlocal produced
        while True:
            produced += 1
            moved.set()
            yield chunk(b"x" * 65_536, f"{produced:08d}")

    async def at_rest() -> int:
        while True:
            moved.clear()
            try:
                async with asyncio.timeout(0.5):
                    await moved.wait()
            except TimeoutError:
                return produced

    async with OverHttp() as fronts:
        fronts.sessions.chunks = flood
        reader, writer = await raw_stream(fronts, receive_buffer=65_536)
        await moved.wait()
        stalled_at = await at_rest()
        assert 0 < stalled_at < 256, "16 MiB on their way to a client that reads nothing"
        # It goes on as soon as the client does, and with every chunk.
        seen: list[bytes] = []
        tail = b""
        while len(seen) < stalled_at + 10:
            tail += await reader.read(2**16)
            found = list(re.finditer(rb"[0-9]{8}\x1a", tail))
            seen += [each.group()[:8] for each in found]
            tail = tail[found[-1].end() :] if found else tail[-16:]
        assert seen == [b"%08d" % index for index in range(1, len(seen) + 1)]
        # Others are answered all the while.
        await at_rest()
        status, _ = await curl(f"{fronts.http.url}/healthz")
        assert status == 200
        writer.transport.abort()
        await fronts.sessions.until_open(0)


async def test_a_stop_ends_streams_with_unavailable_and_lets_commands_finish() -> None:
    headers = {"authorization": f"Bearer {ANNA}"}
    async with OverHttp() as fronts, ConnectClient(fronts.http.url, codec=google_protobuf_binary_codec()) as client:
        sessions = fronts.sessions
        finish = asyncio.Event()

        async def command(request: RunRequest) -> RunResult:
            await finish.wait()
            return RunResult("c1", 0, b"out\n", b"", 0.25, "IDLE")

        sessions.chunks = no_end
        sessions.answers |= {"read_output": for_ever, "run_command": command}

        found: list[bytes] = []

        async def stream() -> None:
            async for each in client.execute_server_stream(
                request=pb.StreamOutputRequest(session_id="s1"),
                method=connect_method("StreamOutput"),
                headers=headers,
            ):
                found.append(each.payload)

        async def unary(name: str, request: Any) -> Any:
            return await client.execute_unary(request=request, method=connect_method(name), headers=headers)

        streaming = asyncio.create_task(stream())
        polling = asyncio.create_task(
            unary("ReadOutput", pb.ReadOutputRequest(session_id="s1", wait_timeout_ms=60_000))
        )
        running = asyncio.create_task(unary("RunCommand", pb.RunCommandRequest(session_id="s1", command="make")))
        await sessions.until_open(3)
        stopping = asyncio.create_task(fronts.http.stop(30))
        for waiting in (streaming, polling):
            with pytest.raises(ConnectError) as ended:
                await waiting
            assert ended.value.code is Code.UNAVAILABLE
        assert found == [b"first"]
        await sessions.until_open(1)
        finish.set()
        assert (await running).stdout == b"out\n"
        await stopping


async def test_a_stop_does_not_wait_for_a_client_that_does_not_read() -> None:
    async def flood(since: str) -> AsyncIterator[Chunk]:
        while True:
            yield chunk(b"x" * 65_536)

    async with OverHttp() as fronts:
        fronts.sessions.chunks = flood
        _, writer = await raw_stream(fronts, receive_buffer=65_536)
        await fronts.sessions.until_open(1)
        async with asyncio.timeout(60):
            await fronts.http.stop(0.2)
        await fronts.sessions.until_open(0)
        assert fronts.admission.under_way == 0
        writer.transport.abort()


async def test_a_request_that_does_not_arrive_is_given_up() -> None:
    settings = HttpSettings(listen="127.0.0.1:0", request_seconds=0.2)
    async with OverHttp(http_settings=settings) as fronts:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(fronts.http.url.rpartition(":")[2]))
        writer.write(
            f"POST /{SERVICE}/GetSession HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {ANNA}\r\n"
            "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{".encode()
        )
        async with asyncio.timeout(60):
            assert b" 504 " in await reader.readline()
        writer.close()
        assert fronts.admission.under_way == 0


@needs_curl
async def test_limits_by_agent_hold_over_http() -> None:
    rates = ServiceSettings(calls_per_second=0.001, calls_burst=2)
    async with OverHttp(rates=rates) as fronts:
        for expected in (200, 200, 429):
            status, reply = await post(fronts, "GetSession", '{"sessionId": "s1"}')
            assert status == expected
        info, _ = details(reply)["ErrorInfo"]
        assert info.metadata["limit"] == "calls_per_second"
        assert (await post(fronts, "GetSession", '{"sessionId": "s2"}', *auth(BEN)))[0] == 200


@needs_curl
async def test_a_forged_forwarding_header_does_not_hide_who_guesses_tokens() -> None:
    # The bucket of failures fills up with time, and 22 runs of curl may take a while.
    async with OverHttp(clock=FakeClock()) as fronts:
        statuses = [
            (
                await post(
                    fronts, "GetSession", "{}", *auth(f"hf_{index}"), "-H", f"X-Forwarded-For: 10.0.0.{index}"
                )
            )[0]
            for index in range(22)
        ]
        assert statuses == [401] * 20 + [429] * 2


@needs_curl
async def test_tls_and_client_certificates_by_curl(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "one")
    other = make_certificates(tmp_path / "two")
    files = TlsFiles(certificate=str(made.certificate), key=str(made.key), client_ca=str(made.authority))
    settings = HttpSettings(listen="127.0.0.1:0", tls=files)
    async with OverHttp(http_settings=settings) as fronts:
        assert fronts.http.url.startswith("https://127.0.0.1:")
        target = f"{fronts.http.url}/healthz"
        ours = ("--cert", str(made.client_certificate), "--key", str(made.client_key))
        trusted = ("--cacert", str(made.authority))
        assert await curl(*trusted, *ours, target) == (200, b"ok\n")
        for wrong in (trusted, (*trusted, "--cert", str(other.client_certificate), "--key", str(other.client_key))):
            with pytest.raises(AssertionError):
                await curl(*wrong, target)
        # A renewed certificate is taken up without a restart.
        renewed = ("--cacert", str(other.authority))
        with pytest.raises(AssertionError):
            await curl(*renewed, *ours, target)
        os.replace(other.certificate, made.certificate)
        os.replace(other.key, made.key)
        fronts.http.reload_tls()
        assert await curl(*renewed, *ours, target) == (200, b"ok\n")


async def test_addresses_that_cannot_be_used_are_said_in_one_line(tmp_path: Path) -> None:
    async def refused(**settings: Any) -> str:
        with pytest.raises((Invalid, NotNow)) as error:
            await OverHttp(http_settings=HttpSettings(**settings)).http.start()
        assert isinstance(error.value, Problem)
        return error.value.reason

    assert await refused(listen="0.0.0.0:0") == "PLAINTEXT_REFUSED"
    assert await refused(listen="[::]:7401") == "PLAINTEXT_REFUSED"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert await refused(listen=f"127.0.0.1:{taken.getsockname()[1]}") == "ADDRESS_IN_USE"
    missing = TlsFiles(certificate=str(tmp_path / "none.pem"), key=str(tmp_path / "none.key"))
    assert await refused(listen="127.0.0.1:0", tls=missing) == "TLS_FILES"
    for nonsense in ("7401", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000", "unix:", ":7401"):
        with pytest.raises(Invalid, match=r"HOST:PORT|no socket"):
            OverHttp(http_settings=HttpSettings(listen=nonsense))


@needs_curl
async def test_a_unix_socket_is_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    settings = HttpSettings(listen=f"unix:{path}")
    async with OverHttp(http_settings=settings) as fronts:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        socket_ = ("--unix-socket", str(path))
        assert (await curl(*socket_, "http://holdfast/healthz"))[0] == 200
        call = (*JSON, *auth(), "-d", '{"sessionId":"s1"}', f"http://holdfast/{SERVICE}/GetSession")
        assert (await curl(*socket_, *call))[0] == 200
        with pytest.raises(NotNow):
            await OverHttp(http_settings=settings).http.start()
        assert fronts.http.url == f"unix:{path}"
    assert not path.exists()


@needs_curl
async def test_names_of_a_proxy_are_allowed_by_a_setting(tmp_path: Path) -> None:
    async def statuses(settings: HttpSettings, *options: str) -> list[int]:
        async with OverHttp(http_settings=settings) as fronts:
            url = "http://x" if fronts.http.url.startswith("unix:") else fronts.http.url
            hosts = ("a.example.com:443", "A.Example.Com.", "a.example.org", "10.0.0.1", "localhost")
            return [(await curl(*options, "-H", f"Host: {host}", f"{url}/healthz"))[0] for host in hosts]

    loopback = HttpSettings(listen="127.0.0.1:0")
    named = HttpSettings(listen="127.0.0.1:0", allowed_hosts=("*.example.com",))
    assert await statuses(loopback) == [421, 421, 421, 200, 200]
    assert await statuses(named) == [200, 200, 421, 200, 200]
    # No page reaches a Unix socket.
    socket_ = HttpSettings(listen=f"unix:{tmp_path}/http.sock")
    assert await statuses(socket_, "--unix-socket", f"{tmp_path}/http.sock") == [200] * 5


@needs_curl
async def test_more_connections_than_allowed_are_turned_away() -> None:
    settings = HttpSettings(listen="127.0.0.1:0", connections=ConnectionLimits(most=3))
    async with OverHttp(http_settings=settings) as fronts:
        fronts.sessions.chunks = no_end
        held = [await raw_stream(fronts) for _ in range(2)]
        await fronts.sessions.until_open(2)
        assert (await curl(f"{fronts.http.url}/healthz"))[0] == 503
        for _, writer in held:
            writer.transport.abort()
        await fronts.sessions.until_open(0)
        assert (await curl(f"{fronts.http.url}/healthz"))[0] == 200


@needs_curl
@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        (f"/{SERVICE}/GetSesion", f"no method 'GetSesion'; did you mean /{SERVICE}/GetSession?"),
        (f"/{SERVICE}/runcommand", f"no method 'runcommand'; did you mean /{SERVICE}/RunCommand?"),
        (f"/{SERVICE}/Fly", "no method 'Fly'; holdfast.session.v1.SessionService has CreateSession, SendInput,"),
        (
            "/session.v1.SessionService/GetSession",
            f"no service 'session.v1.SessionService'; did you mean /{SERVICE}/",
        ),
    ],
)
async def test_a_misspelt_method_is_told_with_the_nearest(path: str, suggestion: str) -> None:
    async with OverHttp() as fronts:
        for content_type in ("application/json", "application/proto", "text/plain"):
            header = f"Content-Type: {content_type}"
            status, body = await curl("-H", header, *auth(), "-d", "{}", f"{fronts.http.url}{path}")
            error = json.loads(body)
            assert (status, error["code"]) == (404, "unimplemented")
            assert suggestion in error["message"]
        service, _, name = path.strip("/").rpartition("/")
        info = MethodInfo(
            name=name,
            service_name=service,
            input=pb.GetSessionRequest,
            output=pb.GetSessionResponse,
            idempotency_level=IdempotencyLevel.UNKNOWN,
            stream_type=StreamType.UNARY,
        )
        async with ConnectClient(fronts.http.url, codec=google_protobuf_binary_codec()) as client:
            with pytest.raises(ConnectError, match=re.escape(suggestion)) as refused:
                await client.execute_unary(request=pb.GetSessionRequest(), method=info, headers={})
        assert refused.value.code is Code.UNIMPLEMENTED


def test_a_connection_whose_peer_vanished_is_probed() -> None:
    """A peer without power sends nothing, so its call would last until the kernel's default of two hours."""
    with bind(parse_address("127.0.0.1:0")) as listener:
        listener.listen(1)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 10
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
