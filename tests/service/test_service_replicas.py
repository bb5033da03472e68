"""Two replicas of the service as processes, on one PostgreSQL: either answers, and one goes on for the other."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator

import pytest

from service.running_service import PATIENCE_SECONDS, Place, new_place, running_service

LEASE_SECONDS = 2.0


@pytest.fixture
def place() -> Iterator[Place]:
    with new_place() as made:
        yield made


def text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


def test_a_session_outlives_the_replica_that_made_it(place: Place, postgres_url: str) -> None:
    settings = {"HOLDFAST_SERVICE_LEASE_SECONDS": str(LEASE_SECONDS)}
    with (
        running_service(place, "--store", postgres_url, **settings) as first,
        running_service(place, "--store", postgres_url, **settings) as second,
    ):
        token = first.operator or second.operator
        assert bool(first.operator) != bool(second.operator)
        session_id = first.post("CreateSession", token)[1]["sessionId"]
        for number, service in enumerate((first, second)):
            ran = service.post("RunCommand", token, sessionId=session_id, command=f"echo at-{number}")[1]
            assert text(ran["stdout"]).splitlines() == [f"at-{number}"]
        first.process.kill()
        first.process.wait(PATIENCE_SECONDS)
        ran = second.post("RunCommand", token, sessionId=session_id, command="echo still")[1]
        assert text(ran["stdout"]).splitlines() == ["still"]
        # The follower of the first one is gone: who closes waits for the second one to take its place.
        closed = second.post("CloseSession", token, sessionId=session_id)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while closed[0] != 200 and time.monotonic() < deadline:
            closed = second.post("CloseSession", token, sessionId=session_id)
        assert closed[1]["finalState"] == "CLOSED"
        rows = second.post("ListAudit", token, sessionId=session_id, pageSize=1000)[1]["records"]
    assert [int(row["seq"]) for row in rows] == list(range(1, len(rows) + 1))
    ended = [json.loads(row["body"]) for row in rows if row["kind"] == "command_ended"]
    assert [each["output"].strip() for each in ended] == ["at-0", "at-1", "still"]
    verified = place.verb("audit", "verify", "--store", postgres_url)
    assert verified.returncode == 0, verified.stdout + verified.stderr
