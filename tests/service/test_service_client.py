"""`ServiceClient` against real services over gRPC: every method, retries, resumed streams, TLS, errors."""

from __future__ import annotations

import asyncio
import builtins
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

import holdfast
import holdfast.sync
from holdfast.bridge.record import CallRecord
from holdfast.bridge.types import TokenUsage
from holdfast.errors import HandshakeFailed, InvalidParams
from holdfast.service import problems
from holdfast.service.api import Chunk, Control, CreateRequest, PolicyRequest
from holdfast.service.client import endpoint
from holdfast.service.client.service_client import ServiceClient
from holdfast.service.fronts.grpc import GrpcSettings
from holdfast.service.fronts.listening import TlsFiles
from holdfast.service.problems import NotNow, Unavailable
from holdfast.session.v1 import session_pb2 as pb
from tests.service.certificates import make_certificates
from tests.service.fake_sessions import ANNA, OLGA, OverGrpc, chunk
from tests.service.running_service import RunningService, new_home, running_service

ASK = """
[[profiles.default.commands.rules]]
verdict = "ask"
program = "touch"
"""
SOME_TIME = Timestamp(seconds=1_700_000_000)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with new_home() as home:
        with open(f"{home.directory}/rules.toml", "w") as file:
            file.write(ASK)
        with running_service(home, "--rules", f"{home.directory}/rules.toml") as started:
            yield started


# --- a real service ----------------------------------------------------------------------------------------------


async def test_a_session_from_its_creation_to_its_audit(service: RunningService) -> None:
    async with holdfast.ServiceClient(f"http://{service.grpc}", token=service.operator) as client:
        made = await client.create_session(
            labels={"task": "17"}, policy=PolicyRequest(idle_timeout=60), cols=100, request_id="one"
        )
        assert (await client.create_session(request_id="one")).session_id == made.session_id
        assert (made.kind, made.cols, made.labels, made.policy.idle_timeout) == (
            "terminal",
            100,
            {"task": "17"},
            60,
        )
        assert made.created_at > 1_700_000_000
        assert made.closed_at is None
        id = made.session_id
        assert (await client.send_input(id, "X=1; cd /usr\n")).accepted
        ran = await client.run_command('echo "$X in $PWD"; (exit 3)', id, timeout=30, request_id="run")
        assert (ran.exit_code, ran.stdout, ran.cwd, ran.success) == (3, b"1 in /usr\r\n", "/usr", False)
        assert (await client.run_command('echo "$X in $PWD"; (exit 3)', id, request_id="run")).stdout == ran.stdout
        await client.send_input(id, b"", Control("RESIZE", 90, 30), "CTRL_C")
        read = await client.read_output(id, wait=1)
        assert b"1 in /usr" in b"".join(each.payload for each in read.chunks)
        listed = await client.list_sessions(labels={"task": "17"}, states=["BUSY", "IDLE"])
        assert [each.session_id for each in listed] == [id]
        assert (await client.close_session(id)).state == "CLOSED"
        assert (await client.close_session(id, force=True)).state == "CLOSED"
        found = await client.get_session(id)
        assert (found.over, found.cols, found.rows) == (True, 90, 30)
        assert found.closed_at is not None
        rows = [row async for row in client.audit(id)]
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
        assert sum(row.kind == "command" for row in rows) == 1, "the repeated call ran twice"
        assert [row.seq async for row in client.audit(id, newest_first=True, limit=2)] == [len(rows), len(rows) - 1]
        whole = b"".join([each.payload async for each in client.stream_output(id)])
        assert b"1 in /usr" in whole


async def test_an_approval_is_listed_answered_and_reported_as_an_event(service: RunningService) -> None:
    async with ServiceClient(service.grpc, token=service.operator) as client:
        made = await client.create_session()
        sent = await client.send_input(made.session_id, "touch approved\n")
        assert (sent.accepted, bool(sent.approval_id)) == (False, True)
        (waiting,) = await client.list_approvals(made.session_id)
        assert (waiting.approval_id, waiting.command, waiting.outcome) == (sent.approval_id, "touch approved", "")
        assert await client.answer_approval(sent.approval_id, True, comment="fine") == "approved"
        with pytest.raises(problems.NotNow):
            await client.answer_approval(sent.approval_id, False)
        assert (await client.list_approvals(made.session_id, ended=True))[0].comment == "fine"
        events = client.events(types=["SESSION_CLOSED"])
        first = asyncio.create_task(anext(events))
        # The subscription begins with its call; sessions are closed until one of them is an event of it.
        while not first.done():
            await client.close_session((await client.create_session(kind="shell")).session_id, force=True)
        assert (await first).type == "SESSION_CLOSED"
        await events.aclose()
        await client.close_session(made.session_id, force=True)


async def test_the_calls_of_a_bridge_are_recorded_in_a_session(service: RunningService) -> None:
    async with holdfast.ServiceClient(service.grpc, token=service.operator) as client:
        session = (await client.create_session(kind="shell")).session_id
        usage = TokenUsage(input=1200, output=34, cached=1000)
        async with client.recording_model_calls(session) as record:
            for number in range(1, 151):
                record(
                    CallRecord(number, 1.5, "POST", "/v1/messages", model="m", status=200, usage=usage, money=0.5)
                )
            record(CallRecord(151, 2.5, "POST", "/v1/messages", model="m", cancelled=True))
        rows = [row async for row in client.audit(session, kinds=["model_call"])]
        assert len({row.command_id for row in rows}) == len(rows) == 151
        body = json.loads(rows[0].body)
        assert (body["model"], body["input_tokens"], body["cached_tokens"], body["money"]) == ("m", 1200, 1000, 0.5)
        assert (body["by"], body["status"]) == ("operator", 200)
        await client.close_session(session)
        with pytest.raises(NotNow, match="CLOSED"):
            async with client.recording_model_calls(session) as record:
                record(CallRecord(1, 1.5, "POST", "/v1/messages"))


def test_the_blocking_client_does_the_same(service: RunningService) -> None:
    with holdfast.sync.ServiceClient(service.grpc, token=service.operator) as client:
        ran = client.run_command(
            "echo $A; echo err >&2", create=CreateRequest(kind="shell", environment={"A": "1"})
        )
        assert (ran.stdout, ran.stderr, ran.success) == (b"1\n", b"err\n", True)
        shell = client.create_session(kind="shell")
        client.run_command("echo streamed", shell.session_id)
        with client.stream_output(shell.session_id) as output:
            assert next(each.payload for each in output if each.payload) == b"streamed\n"
        assert client.close_session(shell.session_id).state == "CLOSED"
        assert [row.kind for row in client.audit(shell.session_id, limit=1)] == ["session_created"]
        with pytest.raises(problems.NotFound) as missing:
            client.get_session("none")
        assert missing.value.reason == "SESSION_NOT_FOUND"
    client.close()


# --- retries and resumed streams ---------------------------------------------------------------------------------


async def test_a_stream_resumes_after_its_last_item() -> None:
    """The service ends the stream with UNAVAILABLE after each chunk, as one that is stopped."""
    begun: list[str] = []

    async def one_chunk(since: str) -> AsyncIterator[Chunk]:
        begun.append(since)
        number = int(since or "0") + 1
        if number > 3:
            return
        yield chunk(b"%d" % number, f"{number:08}")
        raise Unavailable("stops", reason="STOPPING")

    async with OverGrpc() as fronts, ServiceClient(fronts.grpc.address, token=ANNA) as client:
        fronts.sessions.chunks = one_chunk
        assert [each.payload async for each in client.stream_output("s1")] == [b"1", b"2", b"3"]
    assert begun == ["", "00000001", "00000002", "00000003"]


class Lossy:
    """A service that acts, and whose first replies are lost as by a broken connection."""

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.requests: list[Any] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        name = details.method.rpartition("/")[2]

        def answer(request: Any, context: grpc.ServicerContext) -> Message:
            self.requests.append(request)
            if len(self.requests) <= self.lost:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the reply is lost")
            if name == "AnswerApproval":
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it was answered")
            if name == "ListApprovals":
                ended = pb.Approval(approval_id="a1", outcome="approved", comment="ok")
                ended.asked_at.CopyFrom(SOME_TIME)
                ended.expires_at.CopyFrom(SOME_TIME)
                return pb.ListApprovalsResponse(approvals=[ended])
            return getattr(pb, f"{name}Response")(state=pb.IDLE)  # type: ignore[no-any-return]

        request = getattr(pb, f"{name}Request")
        return grpc.unary_unary_rpc_method_handler(
            answer, request.FromString, lambda reply: reply.SerializeToString()
        )


@pytest.fixture
def lossy() -> Iterator[tuple[Lossy, str]]:
    handler = Lossy(2)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])  # type: ignore[list-item]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield handler, f"127.0.0.1:{port}"
    server.stop(None).wait()


async def test_a_repeated_call_has_the_same_request_id(lossy: tuple[Lossy, str]) -> None:
    service, address = lossy
    async with ServiceClient(address, token="hf_x") as client:
        await client.run_command("make")
        await client.send_input("s1", "ls\n")
    runs, (sent,) = service.requests[:3], service.requests[3:]
    assert len({(run.request_id, run.create.request_id) for run in runs}) == 1
    assert runs[0].request_id
    assert sent.request_id not in ("", runs[0].request_id)


async def test_a_lost_reply_to_an_answer_is_found_in_the_ended_approvals(lossy: tuple[Lossy, str]) -> None:
    service, address = lossy
    async with ServiceClient(address, token="hf_x") as client:
        assert await client.answer_approval("a1", True, comment="ok") == "approved"
        with pytest.raises(problems.NotNow):
            await client.answer_approval("a1", False)
    assert service.lost == 2


async def test_a_service_that_stays_away_is_reported_after_the_retries() -> None:
    async with ServiceClient("unix:/nowhere/at/all", token="hf_x", retry_seconds=0) as client:
        with pytest.raises(problems.Unavailable):
            await client.get_session("s1")
        with pytest.raises(problems.Unavailable):
            await anext(client.stream_output("s1"))


# --- addresses, TLS, the extra -----------------------------------------------------------------------------------


async def test_tls_with_certificates_of_both_sides_and_a_unix_socket(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "made")
    tls = TlsFiles(str(made.certificate), str(made.key), str(made.authority))
    async with OverGrpc(grpc_settings=GrpcSettings(listen="127.0.0.1:0", tls=tls)) as fronts:
        address = f"https://{fronts.grpc.address}"
        async with ServiceClient(
            address,
            token=ANNA,
            tls_ca=made.authority,
            tls_cert=made.client_certificate,
            tls_key=made.client_key,
        ) as client:
            assert (await client.get_session("s1")).agent_id == "anna"
        async with ServiceClient(f"http://{fronts.grpc.address}", token=ANNA) as plain:
            with pytest.raises(HandshakeFailed, match="uses TLS"):
                await plain.get_session("s1")
    socket = f"unix:{tmp_path}/s"
    async with OverGrpc(grpc_settings=GrpcSettings(listen=socket)), ServiceClient(socket, token=OLGA) as client:
        assert (await client.get_session("s1")).agent_id == "anna"


@pytest.mark.parametrize("address", ["ftp://h:1", "https://h", "https://a@h:1", "h", "unix:", "http://h:1/p", ":1"])
def test_a_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidParams, match="service address"):
        ServiceClient(address, token="hf_x")


def test_contradicting_options_and_a_missing_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(endpoint.TOKEN_VARIABLE, raising=False)
    with pytest.raises(InvalidParams, match="plain text"):
        ServiceClient("http://h:1", token="hf_x", tls_ca="ca.pem")
    with pytest.raises(InvalidParams, match="tls_cert"):
        ServiceClient("https://h:1", token="hf_x", tls_key="key.pem")
    with pytest.raises(InvalidParams, match="HOLDFAST_SERVICE_TOKEN"):
        ServiceClient("https://h:1")
    with pytest.raises(InvalidParams, match="line break"):
        ServiceClient("https://h:1", token="hf_x\n")


async def test_a_name_that_is_not_known_is_refused_before_the_call() -> None:
    unknown: Any = "unheard-of"
    async with ServiceClient("http://127.0.0.1:1", token="hf_x", retry_seconds=0) as client:
        with pytest.raises(InvalidParams, match=r"^kind 'unheard-of': one of terminal, shell$"):
            await client.create_session(kind=unknown)
        with pytest.raises(InvalidParams, match=r"^control 'unheard-of': one of CTRL_C, CTRL_D, "):
            await client.send_input("s1", "", unknown)
        with pytest.raises(InvalidParams, match=r"^state 'unheard-of': one of .*IDLE"):
            await client.list_sessions(states=[unknown])
        with pytest.raises(InvalidParams, match=r"^type 'unheard-of': one of .*SESSION_CREATED"):
            await anext(client.events(types=[unknown]))


def test_without_grpc_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name == "holdfast.service.client" and "rpc" in (rest[2] or ()):
            raise ModuleNotFoundError("No module named 'grpc'", name="grpc")
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(InvalidParams, match=r"needs grpc: pip install 'holdfast\[service\]'"):
        ServiceClient("h:1", token="hf_x")
