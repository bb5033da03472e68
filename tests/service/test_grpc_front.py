"""The gRPC port with real clients: generated stubs, reflection without any, health checks, TLS."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from holdfast.service.api import Chunk, RunRequest, RunResult
from holdfast.service.fronts.grpc import GrpcSettings, peer_of
from holdfast.service.fronts.listening import TlsFiles
from holdfast.service.problems import Exhausted, Invalid, NotNow, Problem
from holdfast.service.settings import ServiceSettings
from holdfast.session.v1 import session_pb2 as pb, session_pb2_grpc

from .certificates import make_certificates
from .fake_sessions import ANNA, BEN, OLGA, OverGrpc, Seen, bearer, chunk, for_ever, no_end

SERVICE = "holdfast.session.v1.SessionService"


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The details of a status, by the generated classes of googleapis."""
    trailers = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    found: dict[str, Any] = {}
    for packed in status.details:
        message = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
        assert packed.Unpack(message)
        found[message.DESCRIPTOR.name] = message
    return found


async def test_a_stub_creates_types_reads_and_closes() -> None:
    async with OverGrpc() as fronts, fronts.stub() as stub:
        made = await stub.CreateSession(pb.CreateSessionRequest(labels={"a": "b"}), metadata=bearer(ANNA))
        assert (made.session_id, made.prompt, made.metadata.agent_id) == ("s1", "$ ", "anna")
        sent = await stub.SendInput(pb.SendInputRequest(session_id="s1", data=b"ls\n"), metadata=bearer(ANNA))
        assert sent.accepted
        read = await stub.ReadOutput(pb.ReadOutputRequest(session_id="s1"), metadata=bearer(ANNA))
        assert [each.payload for each in read.chunks] == [b"hello"]
        closed = await stub.CloseSession(pb.CloseSessionRequest(session_id="s1"), metadata=bearer(ANNA))
        assert closed.final_state == pb.CLOSED
        assert [caller.agent_id for _, caller, _ in fronts.sessions.calls] == ["anna"] * 4


async def test_a_stream_goes_on_from_a_token() -> None:
    async with OverGrpc() as fronts, fronts.stub() as stub:
        request = pb.StreamOutputRequest(session_id="s1")
        whole = [each async for each in stub.StreamOutput(request, metadata=bearer(ANNA))]
        assert [each.payload for each in whole] == [b"line 0\n", b"line 1\n", b"line 2\n"]
        request.since.CopyFrom(whole[0].token)
        rest = [each.payload async for each in stub.StreamOutput(request, metadata=bearer(ANNA))]
        assert rest == [b"line 1\n", b"line 2\n"]
        events = stub.SubscribeSessionEvents(pb.SubscribeSessionEventsRequest(), metadata=bearer(ANNA))
        assert [each.detail async for each in events] == ["idle for 540 s"]


async def test_a_call_is_built_by_reflection_with_no_generated_code() -> None:
    async with OverGrpc() as fronts:

        def use() -> tuple[list[str], dict[str, Any], list[dict[str, Any]]]:
            with grpc.insecure_channel(fronts.grpc.address) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                services = sorted(database.get_services())
                service = DescriptorPool(database).FindServiceByName(SERVICE)

                def call(name: str, request: dict[str, Any]) -> tuple[Any, Any]:
                    method = service.FindMethodByName(name)
                    requested = message_factory.GetMessageClass(method.input_type)()
                    json_format.ParseDict(request, requested)
                    make = channel.unary_stream if method.server_streaming else channel.unary_unary
                    reply = message_factory.GetMessageClass(method.output_type)
                    function = make(
                        f"/{SERVICE}/{name}",
                        request_serializer=type(requested).SerializeToString,
                        response_deserializer=reply.FromString,
                    )
                    return function, requested

                function, requested = call("RunCommand", {"sessionId": "s1", "command": "make"})
                ran = json_format.MessageToDict(function(requested, metadata=bearer(ANNA)))
                function, requested = call("StreamOutput", {"sessionId": "s1"})
                streamed = [json_format.MessageToDict(each) for each in function(requested, metadata=bearer(ANNA))]
                return services, ran, streamed

        services, ran, streamed = await asyncio.to_thread(use)
    assert services == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", SERVICE]
    assert (ran["stdout"], ran["cwd"], ran["state"]) == ("b3V0Cg==", "/work", "IDLE")
    assert [each["payload"] for each in streamed] == ["bGluZSAwCg==", "bGluZSAxCg==", "bGluZSAyCg=="]


async def test_no_token_and_wrong_tokens_are_unauthenticated_and_reach_nothing() -> None:
    async with OverGrpc() as fronts, fronts.stub() as stub:
        for metadata, reason in (((), "TOKEN_MISSING"), (bearer("hf_wrong"), "TOKEN_UNKNOWN")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert details_of(refused.value)["ErrorInfo"].reason == reason
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.StreamOutput(pb.StreamOutputRequest(session_id="s1"), metadata=metadata).read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert fronts.sessions.calls == []
        assert fronts.access.failed == 4


async def test_other_agents_sessions_read_as_not_found_and_an_operator_sees_them() -> None:
    async with OverGrpc() as fronts, fronts.stub() as stub:
        for token, code in ((ANNA, grpc.StatusCode.NOT_FOUND), (BEN, None), (OLGA, None)):
            calls = [
                stub.GetSession(pb.GetSessionRequest(session_id="s2"), metadata=bearer(token)),
                stub.SendInput(pb.SendInputRequest(session_id="s2", data=b"x"), metadata=bearer(token)),
                stub.ReadOutput(pb.ReadOutputRequest(session_id="s2"), metadata=bearer(token)),
                stub.CloseSession(pb.CloseSessionRequest(session_id="s2"), metadata=bearer(token)),
                stub.RunCommand(pb.RunCommandRequest(session_id="s2", command="ls"), metadata=bearer(token)),
                stub.StreamOutput(pb.StreamOutputRequest(session_id="s2"), metadata=bearer(token)).read(),
            ]
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert [each.code() if isinstance(each, grpc.aio.AioRpcError) else None for each in ended] == [code] * 6


async def test_problems_arrive_with_their_details() -> None:
    async with OverGrpc() as fronts, fronts.stub() as stub:
        fronts.sessions.answers["create"] = Exhausted(
            "anna has 5 sessions", reason="SESSION_LIMIT", retry_after=1.25, limit="max_sessions_per_agent", value=5
        )
        with pytest.raises(grpc.aio.AioRpcError) as limited:
            await stub.CreateSession(pb.CreateSessionRequest(), metadata=bearer(ANNA))
        assert limited.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        found = details_of(limited.value)
        assert (found["ErrorInfo"].reason, found["ErrorInfo"].domain) == ("SESSION_LIMIT", "holdfast.session.v1")
        assert dict(found["ErrorInfo"].metadata) == {"limit": "max_sessions_per_agent", "value": "5"}
        assert found["RetryInfo"].retry_delay.ToMilliseconds() == 1250

        with pytest.raises(grpc.aio.AioRpcError) as invalid:
            await stub.CreateSession(
                pb.CreateSessionRequest(policy=pb.SessionPolicy(network="some")), metadata=bearer(ANNA)
            )
        assert invalid.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        [violation] = details_of(invalid.value)["BadRequest"].field_violations
        assert violation.field == "policy.network"


@pytest.mark.parametrize("kind", Problem.__subclasses__())
async def test_every_problem_has_its_status(kind: type[Problem]) -> None:
    async with OverGrpc() as fronts, fronts.stub() as stub:
        fronts.sessions.answers["get"] = kind("no " + "é" * 9_000, reason="WHY", text="x" * 9_000)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=bearer(ANNA))
        assert refused.value.code().name == kind.status
        assert details_of(refused.value)["ErrorInfo"].reason == "WHY"


async def test_a_bug_of_ours_is_told_by_its_id_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with OverGrpc() as fronts, fronts.stub() as stub:
        fronts.sessions.answers["get"] = RuntimeError("the secret is swordfish")
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=bearer(ANNA))
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert "swordfish" not in f"{failed.value.details()} {failed.value.trailing_metadata()}"
    error_id = details_of(failed.value)["ErrorInfo"].metadata["error_id"]
    assert f"GetSession failed by a bug, error_id={error_id}" in caplog.text
    assert "the secret is swordfish" in caplog.text
    assert ANNA not in caplog.text


async def test_bytes_that_are_no_request_are_the_callers_error() -> None:
    async with OverGrpc() as fronts, grpc.aio.insecure_channel(fronts.grpc.address) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/GetSession")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"\x0a\x02\xc3\x28", metadata=bearer(ANNA))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(refused.value)["ErrorInfo"].reason == "MALFORMED_REQUEST"


async def test_a_request_that_is_too_large_is_refused_before_it_is_read_and_the_largest_goes_through() -> None:
    async with OverGrpc() as fronts, fronts.stub(max_send_message_length=-1) as stub:
        largest = pb.SendInputRequest(session_id="s1", data=b"x" * 4 * 2**20)
        assert (await stub.SendInput(largest, metadata=bearer(ANNA))).accepted
        fronts.sessions.calls.clear()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.SendInput(pb.SendInputRequest(session_id="s1", data=b"x" * 5 * 2**20), metadata=bearer(ANNA))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert fronts.sessions.calls == []


async def test_a_deadline_and_a_client_that_leaves_cancel_the_call() -> None:
    async with OverGrpc() as fronts, fronts.stub() as stub:
        sessions = fronts.sessions
        sessions.answers["run_command"] = for_ever
        run = pb.RunCommandRequest(session_id="s1", command="sleep 1000")
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.RunCommand(run, metadata=bearer(ANNA), timeout=0.2)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await sessions.until_open(0)

        sessions.chunks = no_end
        stream = stub.StreamOutput(pb.StreamOutputRequest(session_id="s1"), metadata=bearer(ANNA))
        assert (await stream.read()).payload == b"first"
        assert fronts.rates.running("anna", stream=True) == 1
        stream.cancel()
        await sessions.until_open(0)
        assert (sessions.open, fronts.rates.running("anna", stream=True)) == (0, 0)


async def test_a_client_that_does_not_read_stops_the_reading_of_output(caplog: pytest.LogCaptureFixture) -> None:
    """The bytes under way to it are bounded by the connection, however much there is to read."""
    produced = 0
    moved = asyncio.Event()

    async def flood(since: str) -> AsyncIterator[Chunk]:
        nonlocal produced
        while True:
            produced += 1
            moved.set()
            yield chunk(b"x" * 65_536, f"{produced:08d}")

    async def at_rest() -> int:
        """How much was produced once nothing has moved for a while."""
        while True:
            moved.clear()
            try:
                async with asyncio.timeout(0.5):
                    await moved.wait()
            except TimeoutError:
                return produced

    # The window does not grow with the line's speed, so that the bound is a number.
    async with OverGrpc() as fronts, fronts.stub(**{"http2.bdp_probe": 0}) as stub:
        fronts.sessions.chunks = flood
        stream = stub.StreamOutput(pb.StreamOutputRequest(session_id="s1"), metadata=bearer(ANNA))
        first = await stream.read()
        stalled_at = await at_rest()
        assert stalled_at < 256, "16 MiB on their way to a client that reads nothing"
        # Nothing was lost, and it goes on as soon as the client does.
        tokens = [first.token.value] + [(await stream.read()).token.value for _ in range(stalled_at + 10)]
        assert tokens == [f"{index:08d}" for index in range(1, stalled_at + 12)]
        # Another call of the same agent is answered all the while.
        await at_rest()
        async with asyncio.timeout(60):
            await stub.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=bearer(ANNA))
        stream.cancel()
        await fronts.sessions.until_open(0)
    # A client that leaves in the middle of a write is no bug of ours.
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_a_stop_ends_streams_and_long_polls_with_unavailable_and_lets_commands_finish() -> None:
    async with OverGrpc() as fronts, fronts.stub() as stub:
        sessions = fronts.sessions
        finish = asyncio.Event()

        async def command(request: RunRequest) -> RunResult:
            await finish.wait()
            return RunResult("c1", 0, b"out\n", b"", 0.25, "IDLE")

        sessions.chunks = no_end
        sessions.answers |= {"read_output": for_ever, "run_command": command}
        stream = stub.StreamOutput(pb.StreamOutputRequest(session_id="s1"), metadata=bearer(ANNA))
        await stream.read()
        poll = stub.ReadOutput(pb.ReadOutputRequest(session_id="s1", wait_timeout_ms=60_000), metadata=bearer(ANNA))
        run = stub.RunCommand(pb.RunCommandRequest(session_id="s1", command="make"), metadata=bearer(ANNA))
        calls = [asyncio.ensure_future(each) for each in (poll, run)]
        await sessions.until_open(3)
        stopping = asyncio.create_task(fronts.grpc.stop(30))
        for waiting in (stream.read(), poll):
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await waiting
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            found = details_of(ended.value)
            assert found["ErrorInfo"].reason == "SHUTTING_DOWN"
            assert found["RetryInfo"].retry_delay.seconds == 1
        await sessions.until_open(1)
        finish.set()
        assert (await run).stdout == b"out\n"
        await stopping
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_stop_does_not_wait_for_a_client_that_does_not_read() -> None:
    async def flood(since: str) -> AsyncIterator[Chunk]:
        while True:
            yield chunk(b"x" * 65_536)

    async with OverGrpc() as fronts, fronts.stub() as stub:
        fronts.sessions.chunks = flood
        stream = stub.StreamOutput(pb.StreamOutputRequest(session_id="s1"), metadata=bearer(ANNA))
        await stream.read()
        async with asyncio.timeout(60):
            await fronts.grpc.stop(0.2)
        await fronts.sessions.until_open(0)
        assert fronts.rates.running("anna", stream=True) == 0
        stream.cancel()


async def test_limits_by_agent_hold_over_the_wire() -> None:
    rates = ServiceSettings(calls_per_second=0.001, calls_burst=3, creates_per_second=0.001, creates_burst=1)
    async with OverGrpc(rates=rates) as fronts, fronts.stub() as stub:
        await stub.CreateSession(pb.CreateSessionRequest(), metadata=bearer(ANNA))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.RunCommand(pb.RunCommandRequest(command="ls"), metadata=bearer(ANNA))
        assert details_of(refused.value)["ErrorInfo"].metadata["limit"] == "creates_per_second"
        await stub.RunCommand(pb.RunCommandRequest(command="ls", session_id="s1"), metadata=bearer(ANNA))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=bearer(ANNA))
        assert details_of(refused.value)["ErrorInfo"].metadata["limit"] == "calls_per_second"
        assert details_of(refused.value)["RetryInfo"].retry_delay.seconds > 0
        await stub.GetSession(pb.GetSessionRequest(session_id="s2"), metadata=bearer(BEN))


async def test_streams_at_a_time_are_limited_and_given_back() -> None:
    async with OverGrpc(rates=ServiceSettings(concurrent_streams=1)) as fronts, fronts.stub() as stub:
        fronts.sessions.chunks = no_end
        request = pb.StreamOutputRequest(session_id="s1")
        first = stub.StreamOutput(request, metadata=bearer(ANNA))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.StreamOutput(request, metadata=bearer(ANNA)).read()
        assert details_of(refused.value)["ErrorInfo"].reason == "CONCURRENCY_LIMIT"
        first.cancel()
        await fronts.sessions.until_open(0)
        assert (await stub.StreamOutput(request, metadata=bearer(ANNA)).read()).payload == b"first"


async def test_health_follows_readiness_and_needs_no_token() -> None:
    serving = health_pb2.HealthCheckResponse.ServingStatus
    async with OverGrpc() as fronts, grpc.aio.insecure_channel(fronts.grpc.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == serving.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == serving.SERVING
        fronts.readiness.set("store", why_not="the database does not answer")
        assert (await watch.read()).status == serving.NOT_SERVING
        fronts.readiness.set("store")
        assert (await watch.read()).status == serving.SERVING
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_and_health_can_be_asked_for_a_token() -> None:
    settings = GrpcSettings(listen="127.0.0.1:0", open_services=False)
    async with (
        OverGrpc(grpc_settings=settings) as fronts,
        grpc.aio.insecure_channel(fronts.grpc.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = await stub.Check(health_pb2.HealthCheckRequest(), metadata=bearer(ANNA))
        assert answer.status == health_pb2.HealthCheckResponse.ServingStatus.SERVING
        sessions = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
        await sessions.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=bearer(ANNA))


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7400", "example.org:7400"])
async def test_plain_text_beyond_this_machine_is_refused_unless_told(address: str) -> None:
    fronts = OverGrpc(grpc_settings=GrpcSettings(listen=address))
    with pytest.raises(Invalid) as refused:
        await fronts.grpc.start()
    assert refused.value.reason == "PLAINTEXT_REFUSED"


async def test_plain_text_beyond_this_machine_when_told() -> None:
    settings = GrpcSettings(listen="0.0.0.0:0", allow_plaintext=True)
    async with OverGrpc(grpc_settings=settings) as fronts:
        port = fronts.grpc.address.rpartition(":")[2]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
            found = await stub.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=bearer(ANNA))
            assert found.metadata.session_id == "s1"


async def test_a_port_that_is_in_use_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(NotNow, match=address) as refused:
            await OverGrpc(grpc_settings=GrpcSettings(listen=address)).grpc.start()
        assert refused.value.reason == "ADDRESS_IN_USE"


async def test_a_unix_socket_is_ours_alone_and_one_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    settings = GrpcSettings(listen=f"unix:{path}")
    async with OverGrpc(grpc_settings=settings) as fronts, fronts.stub() as stub:
        assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
        await stub.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=bearer(ANNA))
        with pytest.raises(NotNow) as refused:
            await OverGrpc(grpc_settings=settings).grpc.start()
        assert refused.value.reason == "ADDRESS_IN_USE"


async def test_tls_with_client_certificates_and_a_certificate_that_is_replaced(tmp_path: Path) -> None:
    first = make_certificates(tmp_path / "one")
    second = make_certificates(tmp_path / "two")
    files = TlsFiles(certificate=str(first.certificate), key=str(first.key), client_ca=str(first.authority))
    settings = GrpcSettings(listen="127.0.0.1:0", tls=files)

    async def ask(authority: bytes, *, key: bytes | None = None, certificate: bytes | None = None) -> str:
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        async with grpc.aio.secure_channel(fronts.grpc.address, credentials) as channel:
            stub = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                request = pb.GetSessionRequest(session_id="s1")
                reply = await stub.GetSession(request, metadata=bearer(ANNA), timeout=60)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return str(reply.metadata.session_id)

    async with OverGrpc(grpc_settings=settings) as fronts:
        ours = {"key": first.client_key.read_bytes(), "certificate": first.client_certificate.read_bytes()}
        assert await ask(first.authority.read_bytes(), **ours) == "s1"
        assert await ask(first.authority.read_bytes()) == "UNAVAILABLE"
        theirs = {"key": second.client_key.read_bytes(), "certificate": second.client_certificate.read_bytes()}
        assert await ask(first.authority.read_bytes(), **theirs) == "UNAVAILABLE"

        for old, new in ((first.key, second.key), (first.certificate, second.certificate)):
            os.replace(new, old)
        assert await ask(second.authority.read_bytes(), **ours) == "s1"


async def test_tls_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    files = TlsFiles(certificate=str(tmp_path / "none.pem"), key=str(tmp_path / "none.key"))
    with pytest.raises(Invalid, match=r"none\.(pem|key)"):
        await OverGrpc(grpc_settings=GrpcSettings(tls=files, listen="127.0.0.1:0")).grpc.start()


async def test_every_call_is_observed_once_with_its_status_and_headers() -> None:
    seen = Seen()
    async with OverGrpc(observer=seen) as fronts, fronts.stub() as stub:
        traced = (*bearer(ANNA), ("traceparent", "00-1-2-01"))
        await stub.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=traced)
        assert seen.headers["traceparent"] == "00-1-2-01"
        for metadata, session_id in ((bearer("hf_no"), "s1"), (bearer(ANNA), "s2"), (bearer(ANNA), "")):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetSession(pb.GetSessionRequest(session_id=session_id), metadata=metadata)
        async for _ in stub.StreamOutput(pb.StreamOutputRequest(session_id="s1"), metadata=bearer(ANNA)):
            pass
        assert seen.concerned == {"s1", "s2"}
        await stub.SendInput(pb.SendInputRequest(session_id="s1", data=b"x"), metadata=bearer(ANNA))
        assert seen.concerned == {"s1", "s2", "c1"}
    assert seen.calls == [
        ("grpc", "GetSession", "anna", "OK"),
        ("grpc", "GetSession", "", "UNAUTHENTICATED"),
        ("grpc", "GetSession", "anna", "NOT_FOUND"),
        ("grpc", "GetSession", "anna", "INVALID_ARGUMENT"),
        ("grpc", "StreamOutput", "anna", "OK"),
        ("grpc", "SendInput", "anna", "OK"),
    ]


def test_peers_are_told_apart_by_address_and_not_by_port() -> None:
    assert peer_of("ipv4:127.0.0.1:5000") == peer_of("ipv4:127.0.0.1:6000") == "127.0.0.1"
    assert peer_of("ipv6:%5B::1%5D:5000") == "::1"
    assert peer_of("unix:") == "unix"


@pytest.fixture(autouse=True)
def _collect() -> Any:
    """Channels that a test dropped are closed while its loop is there."""
    yield
    gc.collect()
