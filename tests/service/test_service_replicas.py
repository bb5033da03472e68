"""Two replicas of the service as processes, on one PostgreSQL: either answers, and one goes on for the other."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import make_url

from tests.service.running_service import (
    PATIENCE_SECONDS,
    RunningService,
    ServiceHome,
    new_home,
    running_service,
    until,
)
from tests.support.postgres import Cluster

LEASE_SECONDS = 2.0


@pytest.fixture
def home() -> Iterator[ServiceHome]:
    with new_home() as made:
        yield made


def text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


def test_errors_of_the_database_show_callers_an_id_alone(
    home: ServiceHome, postgres: Cluster, postgres_url: str
) -> None:
    url = make_url(postgres_url)
    with running_service(home, "--store", postgres_url) as service:
        session_id = service.call("CreateSession", service.operator)["sessionId"]
        postgres.stop("fast")
        try:
            for method in ("GetSession", "CloseSession", "ListAudit"):
                status, reply = service.post(method, service.operator, sessionId=session_id)
                assert (status, reply["code"]) == (503, "unavailable"), reply
                shown = json.dumps(reply)
                assert not [each for each in (url.query["host"], url.database) if str(each) in shown]
                error_id = reply["details"][0]["debug"]["metadata"]["error_id"]
                assert error_id in reply["message"]
                (line,) = [each for each in service.log().splitlines() if f"error_id={error_id}" in each]
                assert str(url.database) in line
        finally:
            postgres.resume()


def test_a_session_outlives_the_replica_that_made_it(home: ServiceHome, postgres_url: str) -> None:
    settings = {"HOLDFAST_SERVICE_LEASE_SECONDS": str(LEASE_SECONDS)}
    with (
        running_service(home, "--store", postgres_url, **settings) as first,
        running_service(home, "--store", postgres_url, **settings) as second,
    ):
        token = first.operator or second.operator
        assert bool(first.operator) != bool(second.operator)
        session_id = first.call("CreateSession", token)["sessionId"]
        for number, service in enumerate((first, second)):
            ran = service.call("RunCommand", token, sessionId=session_id, command=f"echo at-{number}")
            assert text(ran["stdout"]).splitlines() == [f"at-{number}"]
        first.process.kill()
        first.process.wait(PATIENCE_SECONDS)
        ran = second.call("RunCommand", token, sessionId=session_id, command="echo still")
        assert text(ran["stdout"]).splitlines() == ["still"]
        # The follower of the first one is gone: a close waits for the second one to take its place.
        closed = second.post("CloseSession", token, sessionId=session_id)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while closed[0] != 200 and time.monotonic() < deadline:
            closed = second.post("CloseSession", token, sessionId=session_id)
        assert closed[1]["finalState"] == "CLOSED"
        rows = second.call("ListAudit", token, sessionId=session_id, pageSize=1000)["records"]
    assert [int(row["seq"]) for row in rows] == list(range(1, len(rows) + 1))
    ended = [json.loads(row["body"]) for row in rows if row["kind"] == "command_ended"]
    assert [each["output"].strip() for each in ended] == ["at-0", "at-1", "still"]
    verified = home.verb("audit", "verify", "--store", postgres_url)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_every_replica_returns_what_a_session_uses(home: ServiceHome, postgres_url: str) -> None:
    settings = {"HOLDFAST_SERVICE_MONITOR_INTERVAL": "0.2"}
    with (
        running_service(home, "--store", postgres_url, **settings) as first,
        running_service(home, "--store", postgres_url, **settings) as second,
    ):
        token = first.operator or second.operator
        session_id = first.call("CreateSession", token, kind="SHELL")["sessionId"]
        for service in (first, second):
            until(lambda service=service: "usage" in found(service, token, session_id))  # type: ignore[misc]
            usage = found(service, token, session_id)["usage"]
            assert int(usage["memoryBytes"]) > 0
            assert usage["processCount"] >= 1
        listed = second.call("ListSessions", token)["sessions"]
        assert [each["metadata"]["usage"]["processCount"] >= 1 for each in listed] == [True]


def found(service: RunningService, token: str, session_id: str) -> dict[str, Any]:
    status, reply = service.post("GetSession", token, sessionId=session_id)
    assert status == 200, reply
    metadata: dict[str, Any] = reply["metadata"]
    return metadata
