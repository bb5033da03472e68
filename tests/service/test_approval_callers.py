"""An approval ends with the `RunCommand` that waits for it, over both front ends and when a replica is killed."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from holdfast.session.v1 import session_pb2 as pb, session_pb2_grpc
from tests.service.running_service import (
    API,
    PATIENCE_SECONDS,
    RunningService,
    ServiceHome,
    new_home,
    running_service,
    until,
)

RULES = """
[profiles.default.sandbox]
mode = "none"
user = "server"
[profiles.default.commands]
rules = [{ verdict = "ask", program = "touch" }]
"""
LEASE_SECONDS = "2"


@pytest.fixture
def home() -> Iterator[ServiceHome]:
    with new_home() as made:
        with open(os.path.join(made.directory, "rules.toml"), "w") as file:
            file.write(RULES)
        yield made


@contextmanager
def service_at(home: ServiceHome, *arguments: str) -> Iterator[RunningService]:
    rules = os.path.join(home.directory, "rules.toml")
    with running_service(
        home, "--rules", rules, *arguments, HOLDFAST_SERVICE_LEASE_SECONDS=LEASE_SECONDS
    ) as service:
        yield service


def waiting(service: RunningService, token: str) -> list[dict[str, Any]]:
    status, reply = service.post("ListApprovals", token)
    assert status == 200, reply
    found: list[dict[str, Any]] = reply["approvals"]
    return found


def one_waiting(service: RunningService, token: str) -> str:
    until(lambda: len(waiting(service, token)) == 1)
    return str(waiting(service, token)[0]["approvalId"])


@contextmanager
def over_http(service: RunningService, token: str, session_id: str) -> Iterator[None]:
    """A `RunCommand` on a connection that is closed at the end, without reading the reply."""
    where = urlsplit(service.http)
    body = json.dumps({"sessionId": session_id, "command": "touch it"})
    with socket.create_connection((where.hostname, where.port), PATIENCE_SECONDS) as connection:
        head = f"POST {API}RunCommand HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(f"{head}{body}".encode())
        yield


@contextmanager
def over_grpc(service: RunningService, token: str, session_id: str) -> Iterator[None]:
    """The same as a call that is cancelled at the end."""
    with grpc.insecure_channel(service.grpc) as channel:
        stub: Any = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.RunCommandRequest(session_id=session_id, command="touch it")
        call = stub.RunCommand.future(request, metadata=(("authorization", f"Bearer {token}"),))
        yield
        call.cancel()


def refuse_late_answer(service: RunningService, approval_id: str, session_id: str) -> str:
    """The message that an approver of this approval reads."""
    token = service.operator
    status, reply = service.post("AnswerApproval", token, approvalId=approval_id, approve=True)
    assert (status, reply["code"]) == (400, "failed_precondition"), reply
    assert approval_id in reply["message"]
    assert reply["details"][0]["debug"]["reason"] == "APPROVAL_ABANDONED"
    rows = service.call("ListAudit", token, sessionId=session_id, pageSize=1000)["records"]
    outcomes = [json.loads(row["body"])["outcome"] for row in rows if row["kind"] == "approval_answered"]
    assert outcomes[-1] == "abandoned"
    assert not [row for row in rows if row["kind"] == "command"]
    ended = service.call("ListApprovals", token, sessionId=session_id, ended=True)["approvals"]
    assert (ended[0]["approvalId"], ended[0]["outcome"]) == (approval_id, "abandoned")
    return str(reply["message"])


@pytest.mark.parametrize("leaving", [over_http, over_grpc])
def test_an_approval_ends_with_a_caller_that_disconnects(home: ServiceHome, leaving: Any) -> None:
    with service_at(home) as service:
        token = home.new_agent("agent")
        session_id = service.call("CreateSession", token, kind="SHELL")["sessionId"]
        with leaving(service, token, session_id):
            approval_id = one_waiting(service, service.operator)
        until(lambda: waiting(service, service.operator) == [])
        assert "disconnected" in refuse_late_answer(service, approval_id, session_id)


def test_an_approval_ends_with_the_deadline_of_its_call(home: ServiceHome) -> None:
    with service_at(home) as service, grpc.insecure_channel(service.grpc) as channel:
        stub: Any = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
        metadata = (("authorization", f"Bearer {service.operator}"),)
        session_id = service.call("CreateSession", service.operator, kind="SHELL")["sessionId"]
        request = pb.RunCommandRequest(session_id=session_id, command="touch it")
        latest: list[dict[str, Any]] = []
        for seconds in (1, 5, 30):
            # On a busy machine the deadline may pass before the approval is requested.
            with pytest.raises(grpc.RpcError) as late:
                stub.RunCommand(request, metadata=metadata, timeout=seconds)
            assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if latest := service.call("ListApprovals", service.operator, ended=True)["approvals"]:
                break
        until(lambda: waiting(service, service.operator) == [])
        refuse_late_answer(service, latest[0]["approvalId"], session_id)


def test_an_approval_ends_with_a_service_that_was_killed(home: ServiceHome) -> None:
    """On SQLite: the service that is started next ends it."""
    with service_at(home) as service:
        operator = service.operator
        session_id = service.call("CreateSession", operator, kind="SHELL")["sessionId"]
        with over_http(service, operator, session_id):
            approval_id = one_waiting(service, operator)
            service.process.kill()
            service.process.wait(PATIENCE_SECONDS)
    with service_at(home) as again:
        again.operator = operator
        until(lambda: waiting(again, operator) == [])
        assert "replica" in refuse_late_answer(again, approval_id, session_id)


def test_an_approval_ends_with_the_replica_that_was_killed(home: ServiceHome, postgres_url: str) -> None:
    with (
        service_at(home, "--store", postgres_url) as first,
        service_at(home, "--store", postgres_url) as second,
    ):
        operator = second.operator = first.operator or second.operator
        session_id = first.call("CreateSession", operator, kind="SHELL")["sessionId"]
        with over_http(first, operator, session_id):
            approval_id = one_waiting(second, operator)
            first.process.kill()
            first.process.wait(PATIENCE_SECONDS)
        until(lambda: waiting(second, operator) == [])
        assert "replica" in refuse_late_answer(second, approval_id, session_id)


def test_an_answer_at_another_replica_reaches_the_caller(home: ServiceHome, postgres_url: str) -> None:
    with (
        service_at(home, "--store", postgres_url) as first,
        service_at(home, "--store", postgres_url) as second,
    ):
        operator = first.operator or second.operator
        session_id = first.call("CreateSession", operator, kind="SHELL")["sessionId"]
        ran: list[tuple[int, dict[str, Any]]] = []
        path = os.path.join(home.directory, "made")
        fields = {"sessionId": session_id, "command": f"touch {path}"}
        run = threading.Thread(target=lambda: ran.append(first.post("RunCommand", operator, **fields)))
        run.start()
        approval_id = one_waiting(second, operator)
        assert second.post("AnswerApproval", operator, approvalId=approval_id, approve=True)[0] == 200
        run.join(PATIENCE_SECONDS)
        assert (ran[0][0], ran[0][1].get("exitCode"), ran[0][1]["approvalId"]) == (200, 0, approval_id)
        assert os.path.exists(path)
