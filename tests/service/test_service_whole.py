"""The whole service, as a process, over gRPC: approvals, events, profiles, an allow-list, the monitor."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from holdfast.service.client.rpc import problem_of
from holdfast.service.problems import Denied
from holdfast.session.v1 import session_pb2 as pb, session_pb2_grpc
from tests.service.running_service import (
    PATIENCE_SECONDS,
    RunningService,
    ServiceHome,
    needs_curl,
    new_home,
    running_service,
    until,
)

RULES = """
[profiles.default.commands]
rules = [{{ verdict = "ask", program = "rm" }}, {{ verdict = "deny", program = "nc" }}]

[profiles.open]
extends = "default"
[profiles.open.network]
mode = "allow-list"
hosts = ["127.0.0.1:{port}"]

[profiles.small]
[profiles.small.resources]
output_bytes = 100000
"""


class Answering(http.server.BaseHTTPRequestHandler):
    """A host that is on the list."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"let through")

    def log_message(self, format: str, *args: Any) -> None:
        """Not on our stderr."""


@pytest.fixture(scope="module")
def host() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def home() -> Iterator[ServiceHome]:
    with new_home() as made:
        yield made


@pytest.fixture(scope="module")
def service(home: ServiceHome, host: int) -> Iterator[RunningService]:
    rules = os.path.join(home.directory, "rules.toml")
    with open(rules, "w") as file:
        file.write(RULES.format(port=host))
    with running_service(home, "--rules", rules, HOLDFAST_SERVICE_MONITOR_INTERVAL="0.2") as started:
        yield started


class Client:
    """An agent over gRPC."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self._stub: Any = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
        self._caller = (("authorization", f"Bearer {token}"),)

    def call(self, method: str, request: Any) -> Any:
        return getattr(self._stub, method)(request, metadata=self._caller, timeout=PATIENCE_SECONDS)

    def create(self, **fields: Any) -> str:
        return str(self.call("CreateSession", pb.CreateSessionRequest(**fields)).session_id)

    def run(self, session_id: str, command: str, timeout_ms: int = 30_000) -> pb.RunCommandResponse:
        request = pb.RunCommandRequest(session_id=session_id, command=command, timeout_ms=timeout_ms)
        return self.call("RunCommand", request)  # type: ignore[no-any-return]

    def close(self, session_id: str) -> None:
        self.call("CloseSession", pb.CloseSessionRequest(session_id=session_id, mode=pb.FORCE))


@contextmanager
def client(service: RunningService, token: str) -> Iterator[Client]:
    with grpc.insecure_channel(service.grpc) as channel:
        yield Client(channel, token)


@pytest.fixture
def agent(service: RunningService, request: pytest.FixtureRequest) -> Iterator[Client]:
    name = request.node.name.replace("[", "-").rstrip("]")[-60:]
    with client(service, service.home.new_agent(name)) as made:
        yield made


@pytest.fixture
def operator(service: RunningService) -> Iterator[Client]:
    with client(service, service.operator) as made:
        yield made


def test_happy_path_over_grpc(agent: Client) -> None:
    session_id = agent.create()
    stream = agent.call("StreamOutput", pb.StreamOutputRequest(session_id=session_id))
    agent.call("SendInput", pb.SendInputRequest(session_id=session_id, data=b"echo $((6*7))-seen\n"))
    seen = b""
    for chunk in stream:
        seen += chunk.payload
        if b"42-seen" in seen:
            break
    stream.cancel()
    closed = agent.call("CloseSession", pb.CloseSessionRequest(session_id=session_id))
    assert closed.final_state == pb.CLOSED
    assert "1 command" in closed.summary


def test_stop_does_not_end_the_sessions_of_a_service(service: RunningService, agent: Client) -> None:
    session_id = agent.create()
    refused = service.home.holdfast("stop")
    assert refused.returncode == 1
    assert f"holdfast-service (pid {service.process.pid}" in refused.stderr
    assert "nothing was stopped" in refused.stderr
    done = agent.call("RunCommand", pb.RunCommandRequest(session_id=session_id, command="echo $((6*7))"))
    assert done.stdout == b"42\r\n"
    agent.call("CloseSession", pb.CloseSessionRequest(session_id=session_id))


def test_a_command_under_ask_waits_for_an_operator(agent: Client, operator: Client) -> None:
    session_id = agent.create()
    agent.run(session_id, "touch file")
    events = agent.call(
        "SubscribeSessionEvents",
        pb.SubscribeSessionEventsRequest(
            session_id=session_id,
            since="",
            types=[pb.SessionEvent.APPROVAL_REQUESTED, pb.SessionEvent.APPROVAL_ANSWERED],
        ),
    )
    requested = agent.call("SendInput", pb.SendInputRequest(session_id=session_id, data=b"rm file && echo gone\n"))
    assert not requested.accepted
    waiting = operator.call("ListApprovals", pb.ListApprovalsRequest(session_id=session_id)).approvals
    assert [each.approval_id for each in waiting] == [requested.approval_id]
    with pytest.raises(grpc.RpcError) as refused:
        agent.call("AnswerApproval", pb.AnswerApprovalRequest(approval_id=requested.approval_id, approve=True))
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    answer = pb.AnswerApprovalRequest(approval_id=requested.approval_id, approve=True, comment="go on")
    assert operator.call("AnswerApproval", answer).outcome == "approved"
    reported = [next(events), next(events)]
    events.cancel()
    assert [each.type for each in reported] == [
        pb.SessionEvent.APPROVAL_REQUESTED,
        pb.SessionEvent.APPROVAL_ANSWERED,
    ]
    assert {each.approval_id for each in reported} == {requested.approval_id}
    assert agent.run(session_id, "ls file").exit_code != 0
    agent.close(session_id)


def test_a_denied_command_is_refused_with_its_rule_and_written_down(agent: Client) -> None:
    session_id = agent.create(kind=pb.SHELL)
    with pytest.raises(grpc.RpcError) as refused:
        agent.run(session_id, "env FOO=1 nohup nc -l 80 &")
    problem = problem_of(refused.value)
    assert isinstance(problem, Denied)
    assert problem.details["rule"].endswith("rules.toml:3")
    audit = agent.call("ListAudit", pb.ListAuditRequest(session_id=session_id, kinds=["decision"])).records
    assert any("rules.toml:3" in record.body for record in audit)
    agent.close(session_id)


def test_an_agent_has_the_profile_that_it_was_given(service: RunningService) -> None:
    token = service.home.new_agent("listed", "--profile", "open")
    with client(service, token) as agent:
        session_id = agent.create()
        found = agent.call("GetSession", pb.GetSessionRequest(session_id=session_id)).metadata
        assert (found.policy.profile, found.policy.network) == ("open", "allow-list")
        agent.close(session_id)


@needs_curl
def test_an_allow_list_lets_through_what_is_on_it_and_nothing_else(service: RunningService, host: int) -> None:
    token = service.home.new_agent("fetcher", "--profile", "open")
    with client(service, token) as agent:
        session_id = agent.create(kind=pb.SHELL)
        found = agent.call("GetSession", pb.GetSessionRequest(session_id=session_id)).metadata
        if "network" not in found.enforced:
            pytest.skip("this machine cannot make a network namespace: no allow-list")
        reached = agent.run(session_id, f"curl -s -m 10 http://127.0.0.1:{host}/")
        assert reached.stdout == b"let through", reached.stderr
        refused = agent.run(session_id, "curl -s -m 10 -o /dev/null -w '%{http_code}' http://127.0.0.1:9/")
        assert refused.stdout == b"403"
        around = agent.run(session_id, f"curl -s -m 5 --noproxy '*' http://127.0.0.1:{host}/")
        assert around.exit_code != 0
        wanted = pb.ListAuditRequest(session_id=session_id, kinds=["network"])
        until(lambda: len(agent.call("ListAudit", wanted).records) >= 2)
        decisions = [json.loads(row.body) for row in agent.call("ListAudit", wanted).records]
        assert [each.get("allowed") for each in decisions] == [True, False], decisions
        agent.close(session_id)
    until(lambda: f"egress-{session_id}" not in service.home.verb("ps", "--json").stdout)


def test_a_session_over_a_limit_that_nobody_enforces_is_ended_by_the_monitor(service: RunningService) -> None:
    token = service.home.new_agent("noisy", "--profile", "small")
    with client(service, token) as agent:
        session_id = agent.create(kind=pb.TERMINAL)
        events = agent.call("SubscribeSessionEvents", pb.SubscribeSessionEventsRequest(session_id=session_id))
        agent.call(
            "SendInput", pb.SendInputRequest(session_id=session_id, data=b"yes | head -c 300000; sleep 1000\n")
        )
        reported = next(event for event in events if event.type == pb.SessionEvent.POLICY_VIOLATION)
        events.cancel()
        assert "output" in reported.detail.lower()
        agent.close(session_id)


def samples(service: RunningService) -> dict[str, float]:
    _, page = service.get("/metrics")
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_metrics_count_what_happened(service: RunningService, agent: Client) -> None:
    session_id = agent.create(kind=pb.SHELL)
    ended = 'command_latency_seconds_count{kind="shell"}'
    before = samples(service)[ended]
    agent.run(session_id, "echo counted")
    # The follower of the session may not have seen yet that the command has ended.
    until(lambda: samples(service)[ended] > before)
    found = samples(service)
    assert sum(value for name, value in found.items() if name.startswith('sessions_active{kind="shell"')) >= 1
    assert found["holdfast_audit_append_seconds_count"] > 0
    assert found['holdfast_store_seconds_count{operation="find_agent"}'] > 0
    assert found['holdfast_rpc_calls_total{code="OK",front="grpc",method="RunCommand"}'] >= 1
    agent.close(session_id)
