"""Replicas on a PostgreSQL that takes TLS alone: the certificate is checked, and agents are served under attack.

The flood is bounded by count: anonymous calls, unknown tokens, heads that never end, all on loopback.
"""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from holdfast.service.access.tokens import new_token
from holdfast.service.problems import Invalid, Unavailable
from holdfast.service.store import Store
from tests.service.certificates import Certificates, make_certificates
from tests.service.running_service import RunningService, new_home, running_service
from tests.support.postgres import postgres_programs, running_cluster

FLOOD_CALLS = 30
HALF_HEADS = 20


class Secured(NamedTuple):
    certificates: Certificates
    other: Certificates
    port: int
    database: str

    def url(self, host: str = "localhost", query: str = "") -> str:
        query = query or f"sslmode=verify-full&sslrootcert={self.certificates.authority}"
        return f"postgresql://holdfast@{host}:{self.port}/{self.database}?{query}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    programs = postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL: initdb is neither in /usr/lib/postgresql/*/bin nor in PATH")
    home = tmp_path_factory.mktemp("tls")
    made, other = make_certificates(home / "ours"), make_certificates(home / "theirs")
    with running_cluster(programs) as cluster:
        database = cluster.new_database().partition("@/")[2].partition("?")[0]
        yield Secured(made, other, cluster.listen_with_tls(made.certificate, made.key), database)


async def test_the_certificate_of_the_database_is_checked(secured: Secured) -> None:
    store = await Store.open(secured.url())
    await store.ping()
    await store.close()
    for query in (
        f"sslmode=verify-full&sslrootcert={secured.other.authority}",  # signed by another authority
        "sslmode=disable",  # the server takes TLS alone
    ):
        with pytest.raises(Unavailable):
            await Store.open(secured.url(query=query))


@pytest.mark.parametrize(
    "query", ["sslrootcert=/x", "sslmode=require&sslrootcert=/x", "sslmode=verify-full&sslrootcert=/not/there"]
)
async def test_tls_that_would_not_be_checked_is_refused(secured: Secured, query: str) -> None:
    with pytest.raises(Invalid, match="store: "):
        await Store.open(secured.url(query=query))


def flood(service: RunningService) -> None:
    host, _, port = service.http.removeprefix("http://").rpartition(":")
    half = [socket.create_connection((host, int(port)), timeout=60) for _ in range(HALF_HEADS)]
    try:
        for each in half:
            each.sendall(b"POST / HTTP/1.1\r\nX-Half: ")
        for number in range(FLOOD_CALLS):
            status, _ = service.post("ListSessions", new_token() if number % 2 else "none")
            assert status in (401, 429)
    finally:
        for each in half:
            each.close()


def test_two_replicas_serve_an_agent_under_attack(secured: Secured) -> None:
    with (
        new_home() as home,
        running_service(home, "--store", secured.url()) as first,
        running_service(home, "--store", secured.url()) as second,
    ):
        token = first.operator or second.operator
        floods = [threading.Thread(target=flood, args=(each,)) for each in (first, second)]
        for each in floods:
            each.start()
        session_id = first.call("CreateSession", token, kind="SHELL")["sessionId"]
        for number in range(10):
            service = (first, second)[number % 2]
            ran = service.call("RunCommand", token, sessionId=session_id, command=f"echo {number}")
            assert base64.b64decode(ran["stdout"]).decode().strip() == str(number)
        for each in floods:
            each.join(60)
        second.call("CloseSession", token, sessionId=session_id)
        verified = home.verb("audit", "verify", "--store", secured.url())
        assert verified.returncode == 0, verified.stdout + verified.stderr
