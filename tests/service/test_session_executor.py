"""The shim against a service that answers by script: its retries, and when it makes another session."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

import holdfast
from holdfast.errors import HandshakeFailed, InvalidParams
from holdfast.service import problems
from holdfast.service.client import endpoint, rpc
from holdfast.service.client.rpc import problem_of
from holdfast.service.fronts.status_details import status_of
from holdfast.service.shim import bash_executor, session_executor
from holdfast.session.v1 import session_pb2 as pb
from tests.service.certificates import Certificates, make_certificates
from tests.service.fake_sessions import OverHttp

Answer = Message | grpc.StatusCode
REQUESTS: dict[str, type[Message]] = {
    "CreateSession": pb.CreateSessionRequest,
    "RunCommand": pb.RunCommandRequest,
    "GetSession": pb.GetSessionRequest,
    "CloseSession": pb.CloseSessionRequest,
}


class ScriptedService(grpc.GenericRpcHandler):
    """Answers each call with the next line of the script for its method, and records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.tokens: set[str] = set()
        self.script: dict[str, list[Answer]] = {}

    def requested(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        name = handler_call_details.method.rpartition("/")[2]
        self.tokens.add(str(dict(handler_call_details.invocation_metadata)["authorization"]))

        def answer(request: Any, context: grpc.ServicerContext) -> Message:
            self.calls.append((name, request))
            scripted = self.script[name].pop(0)
            if isinstance(scripted, grpc.StatusCode):
                context.abort(scripted, f"said {scripted.name}")
            return scripted

        def as_bytes(reply: Message) -> bytes:
            return reply.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer, REQUESTS[name].FromString, as_bytes)


@pytest.fixture
def scripted() -> Iterator[tuple[ScriptedService, str]]:
    handler = ScriptedService()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield handler, f"127.0.0.1:{port}"
    server.stop(None).wait()


def created(session_id: str) -> pb.CreateSessionResponse:
    return pb.CreateSessionResponse(session_id=session_id, state=pb.IDLE)


def printed(text: str, **fields: Any) -> pb.RunCommandResponse:
    return pb.RunCommandResponse(stdout=text.encode(), state=fields.pop("state", pb.IDLE), **fields)


def closed() -> list[Answer]:
    return [pb.CloseSessionResponse(final_state=pb.CLOSED)]


def test_one_session_serves_all_commands_and_is_closed_in_the_end(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    service.script = {
        "CreateSession": [created("s1")],
        "RunCommand": [printed("a"), printed("b", exit_code=3, duration_ms=1500)],
        "CloseSession": closed(),
    }
    with holdfast.BashExecutor(address, token="hf_x", cwd="/srv", env={"A": "1"}, profile="ci") as bash:
        assert bash.run("echo a").stdout == "a"
        result = bash.run("echo b; exit 3", timeout=2.5)
    assert (result.stdout, result.exit_code, result.duration, result.success) == ("b", 3, 1.5, False)
    create = service.requested("CreateSession")[0]
    assert (create.initial_cwd, dict(create.environment), create.kind) == ("/srv", {"A": "1"}, pb.SHELL)
    assert create.policy.profile == "ci"
    assert [(run.session_id, run.command, run.timeout_ms) for run in service.requested("RunCommand")] == [
        ("s1", "echo a", 0),
        ("s1", "echo b; exit 3", 2500),
    ]
    assert service.requested("CloseSession")[0].session_id == "s1"
    assert service.tokens == {"Bearer hf_x"}


async def test_the_same_on_an_event_loop(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    service.script = {
        "CreateSession": [created("s1")],
        "RunCommand": [printed("a"), printed("", timed_out=True, exit_code=143)],
        "CloseSession": closed(),
    }
    async with holdfast.BashExecutor(address, token="hf_x") as bash:
        assert (await bash.run_async("echo a")).stdout == "a"
        late = await bash.run_async("sleep 100", timeout=0.1)
    assert (late.timed_out, late.exit_code) == (True, 124)
    assert len(service.requested("CloseSession")) == 1


def test_a_session_that_died_is_made_again_and_the_command_runs(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    service.script = {
        "CreateSession": [created("s1"), created("s2")],
        "RunCommand": [printed("a"), grpc.StatusCode.FAILED_PRECONDITION, printed("b")],
        "GetSession": [pb.GetSessionResponse(state=pb.ERROR)],
        "CloseSession": closed(),
    }
    with holdfast.BashExecutor(address, token="hf_x") as bash:
        bash.run("echo a")
        assert bash.run("echo b").stdout == "b"
    first, second = service.requested("CreateSession")
    assert first.request_id != second.request_id
    assert [run.session_id for run in service.requested("RunCommand")] == ["s1", "s1", "s2"]
    assert service.requested("CloseSession")[0].session_id == "s2"


def test_a_command_that_ends_its_session_has_its_exit_code_and_the_next_gets_another(
    scripted: tuple[ScriptedService, str],
) -> None:
    service, address = scripted
    service.script = {
        "CreateSession": [created("s1"), created("s2")],
        "RunCommand": [printed("", exit_code=3, state=pb.CLOSED), printed("b")],
        "CloseSession": closed(),
    }
    with holdfast.BashExecutor(address, token="hf_x") as bash:
        assert bash.run("exit 3").exit_code == 3
        assert bash.run("echo b").stdout == "b"
    assert [run.session_id for run in service.requested("RunCommand")] == ["s1", "s2"]


def test_a_refusal_of_a_living_session_is_told_and_not_repeated(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    service.script = {
        "CreateSession": [created("s1")],
        "RunCommand": [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED],
        "GetSession": [pb.GetSessionResponse(state=pb.IDLE)],
        "CloseSession": closed(),
    }
    with holdfast.BashExecutor(address, token="hf_x") as bash:
        with pytest.raises(problems.NotNow, match="said FAILED_PRECONDITION"):
            bash.run("true")
        with pytest.raises(problems.Denied, match="said PERMISSION_DENIED"):
            bash.run("rm -rf /")
    assert len(service.requested("CreateSession")) == 1


def test_a_service_that_is_away_is_asked_again_with_the_same_ids(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    away = grpc.StatusCode.UNAVAILABLE
    service.script = {
        "CreateSession": [away, created("s1")],
        "RunCommand": [away, away, printed("a")],
        "CloseSession": closed(),
    }
    with holdfast.BashExecutor(address, token="hf_x") as bash:
        assert bash.run("echo a").stdout == "a"
    assert len({create.request_id for create in service.requested("CreateSession")}) == 1
    assert len({run.request_id for run in service.requested("RunCommand")}) == 1


def test_a_service_that_stays_away_is_told_once_the_time_is_up() -> None:
    executor = session_executor.SessionExecutor(endpoint.ServiceEndpoint("unused", "hf_x"))
    steps = executor.steps("true", None)
    step, waited = next(steps), 0.0
    with pytest.raises(problems.Unavailable):  # noqa: PT012 - it is raised at one of many steps
        while True:
            if isinstance(step, rpc.Pause):
                waited += step.seconds
                step = next(steps)
            else:
                step = steps.throw(problems.Unavailable("away", reason="AWAY"))
    assert rpc.CONNECT_SECONDS <= waited < rpc.CONNECT_SECONDS + 10


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls") / "made")


@pytest.fixture
def tls_port(certificates: Certificates, request: pytest.FixtureRequest) -> Iterator[str]:
    """A gRPC port with TLS; with the parameter "clients" it wants certificates of clients, too."""
    key, chain = certificates.key.read_bytes(), certificates.certificate.read_bytes()
    ca = certificates.authority.read_bytes() if getattr(request, "param", "") == "clients" else None
    server = grpc.server(ThreadPoolExecutor(2), handlers=[ScriptedService()])
    credentials = grpc.ssl_server_credentials([(key, chain)], ca, require_client_auth=ca is not None)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


async def refused_at_once(executor: holdfast.BashExecutor, monkeypatch: pytest.MonkeyPatch) -> str:
    """The errors of either driver before it pauses for the first time."""

    class NoPause:
        def __init__(self, seconds: float) -> None:
            raise AssertionError("it tried again")

    monkeypatch.setattr(rpc, "Pause", NoPause)
    with pytest.raises(HandshakeFailed) as blocking:
        executor.run("true")
    with pytest.raises(HandshakeFailed) as awaited:
        await executor.run_async("true")
    assert awaited.value.message == blocking.value.message
    executor.close()
    await executor.aclose()
    return blocking.value.message


@pytest.mark.parametrize("tls_port", ["", "clients"], indirect=True)
async def test_plain_text_to_a_tls_port_is_told_at_once(tls_port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = await refused_at_once(holdfast.BashExecutor(tls_port, token="hf_x"), monkeypatch)
    assert f"{tls_port} uses TLS" in message
    assert "tls_ca=" in message


async def test_tls_to_a_plain_text_port_is_told_at_once(
    scripted: tuple[ScriptedService, str], certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = holdfast.BashExecutor(scripted[1], token="hf_x", tls_ca=str(certificates.authority))
    message = await refused_at_once(executor, monkeypatch)
    assert f"{scripted[1]} uses plain text" in message
    assert "tls_ca=" in message


async def test_a_certificate_that_is_not_accepted_is_told_at_once(
    tls_port: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An authority, but not the one that signed the service's certificate.
    wrong = str(certificates.client_certificate)
    message = await refused_at_once(holdfast.BashExecutor(tls_port, token="hf_x", tls_ca=wrong), monkeypatch)
    assert f"certificate of {tls_port} is not accepted" in message


@pytest.mark.parametrize("tls_port", ["clients"], indirect=True)
async def test_a_missing_client_certificate_is_told_at_once(
    tls_port: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = holdfast.BashExecutor(tls_port, token="hf_x", tls_ca=str(certificates.authority))
    assert "set tls_cert= and tls_key=" in await refused_at_once(executor, monkeypatch)


async def test_the_http_port_is_told_at_once() -> None:
    async with OverHttp() as fronts:
        address = fronts.http.url.removeprefix("http://")
        executor = holdfast.BashExecutor(address, token="hf_x")
        with pytest.raises(HandshakeFailed, match=f"{address} answers with HTTP/1.1"):
            await executor.run_async("true")
        await executor.aclose()


def test_a_port_that_is_not_there_is_tried_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        line = endpoint.ServiceEndpoint(f"127.0.0.1:{taken.getsockname()[1]}", "hf_x")
        assert line.explain_failure() == ""
        assert endpoint.ServiceEndpoint("unix:/nowhere", "hf_x").explain_failure() == ""


def test_without_persistence_each_command_brings_its_own_session(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    service.script = {"RunCommand": [printed("a"), printed("b")]}
    with holdfast.BashExecutor(address, token="hf_x", persistent=False, sandbox="docker:x") as bash:
        bash.run("echo a")
        bash.run("echo b")
    assert [(run.session_id, run.create.sandbox) for run in service.requested("RunCommand")] == [
        ("", "docker:x")
    ] * 2


def test_closing_a_session_that_is_over_is_no_error(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    service.script = {
        "CreateSession": [created("s1")],
        "RunCommand": [printed("a")],
        "CloseSession": [grpc.StatusCode.NOT_FOUND],
    }
    with holdfast.BashExecutor(address, token="hf_x") as bash:
        bash.run("echo a")
    assert len(service.requested("CloseSession")) == 1


# --- the flag --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "argument", "wanted"), [("on", None, True), ("off", None, False), ("on", False, False)]
)
def test_the_flag_decides_and_the_argument_comes_first(
    word: str, argument: bool | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bash_executor.FLAG, word)
    assert holdfast.BashExecutor(token="hf_x", sessions=argument).sessions is wanted


def test_a_flag_of_another_word_and_a_missing_token_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bash_executor.FLAG, "maybe")
    with pytest.raises(InvalidParams, match="HOLDFAST_SESSION_EXECUTOR='maybe': on or off"):
        holdfast.BashExecutor()
    monkeypatch.setenv(bash_executor.FLAG, "on")
    monkeypatch.delenv(endpoint.TOKEN_VARIABLE, raising=False)
    with pytest.raises(InvalidParams, match="HOLDFAST_SERVICE_TOKEN"):
        holdfast.BashExecutor()


# --- statuses --------------------------------------------------------------------------------------------------


class Failed(grpc.RpcError):
    """A call as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: bytes = b"") -> None:
        self._code, self._trailer = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "what happened"

    def trailing_metadata(self) -> Any:
        return (("grpc-status-details-bin", self._trailer),)


def test_a_status_with_error_info_becomes_the_problem_with_its_reason() -> None:
    status = status_pb2.Status(code=8, message="what happened")
    status.details.add().Pack(error_details_pb2.RetryInfo())
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="SESSION_LIMIT", domain="holdfast"))
    problem = problem_of(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, status.SerializeToString()))
    assert isinstance(problem, problems.Exhausted)
    assert (problem.reason, problem.message) == ("SESSION_LIMIT", "what happened")


@pytest.mark.parametrize(
    "details", [b"", b"\x1a", b"\x1a\xff\xff\xff\xff\xff", b"\x09nonsense", b"\x1a\x02\x0a\x00"]
)
def test_details_that_are_none_leave_the_code_as_the_reason(details: bytes) -> None:
    problem = problem_of(Failed(grpc.StatusCode.NOT_FOUND, details))
    assert isinstance(problem, problems.NotFound)
    assert problem.reason == "NOT_FOUND"


def test_what_the_service_writes_is_what_clients_read() -> None:
    raised = problems.Denied("what happened", reason="POLICY_DENIED", rule="rules.toml:14", field="command")
    problem = problem_of(Failed(grpc.StatusCode.PERMISSION_DENIED, status_of(raised).SerializeToString()))
    assert isinstance(problem, problems.Denied)
    assert (problem.reason, problem.details) == ("POLICY_DENIED", {"rule": "rules.toml:14", "field": "command"})


def test_every_code_of_the_service_has_its_class_and_others_the_root() -> None:
    kinds: list[Callable[..., problems.Problem]] = list(problems.Problem.__subclasses__())
    assert len(kinds) == 11
    assert type(problem_of(Failed(grpc.StatusCode.DATA_LOSS))) is problems.Problem
