"""The allow-list of a confined process, with a real proxy outside of its network and real servers behind it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import holdfast
from holdfast.client.process import Process
from holdfast.client.sandbox import Sandbox
from holdfast.client.shell import Shell
from holdfast.proxies.egress.proxy import SOCKETS_BEFORE_SWEEP
from holdfast.runtime.confine.features import detect_features
from holdfast.types import Confinement
from tests.support.servers import RunningServer, running_server

OFFERED = {feature.word.partition(":")[0]: feature.missing for feature in detect_features()}
PYTHON = "/usr/bin/python3"
missing = [f"{word}: {OFFERED[word]}" for word in ("bubblewrap", "network", "egress") if OFFERED[word]]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason="; ".join(missing)),
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason=f"{PYTHON} is not here: it is the client"),
]


class Site(BaseHTTPRequestHandler):
    """Answers with the request's target, and with its body."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(f"{self.command} {self.path} host={self.headers['host']}".encode())

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["content-length"])))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the terminal of the tests."""


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


class Session(NamedTuple):
    shell: Shell
    proxy: Process
    site: int

    async def python(self, program: str) -> holdfast.CommandResult:
        return await self.shell.run(f"{PYTHON} - <<'END'\n{program}\nEND", timeout=60)

    async def fetch(self, url: str) -> str:
        program = f"""
import urllib.error, urllib.request
try: print(urllib.request.urlopen({url!r}, timeout=60).read().decode())
except urllib.error.HTTPError as error: print(error.code, error.read().decode().strip())
except OSError as error: print('failed', error)
"""
        return (await self.python(program)).stdout.strip()

    async def decisions(self) -> list[dict[str, Any]]:
        printed = (await self.proxy.snapshot()).stdout.splitlines()
        return [fact for fact in map(json.loads, printed) if fact["event"] == "decision"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture
async def box(server: RunningServer) -> AsyncIterator[Sandbox]:
    async with holdfast.connect(server.address("unix")) as box:
        yield box


@pytest.fixture(params=["bubblewrap", "landlock"])
async def session(
    request: pytest.FixtureRequest, box: Sandbox, site: int, tmp_path: Path
) -> AsyncIterator[Session]:
    if OFFERED[request.param]:
        pytest.skip(f"no {request.param} here: {OFFERED[request.param]}")
    work = tmp_path / "work"
    work.mkdir()
    path = str(tmp_path / "egress.sock")
    allowed = ("example.com", f"127.0.0.1:{site}", "localtest.invalid:*")
    command = [*(await box.info()).holdfast, "egress", "--socket", path]
    proxy = await box.start([*command, *(word for host in allowed for word in ("--allow", host))])
    await proxy.wait_for_output('"ready"', timeout=60)
    confinement = Confinement(mode=request.param, writable=(str(work),), network="proxy", proxy=path)
    async with await box.shell(cwd=str(work), confinement=confinement) as shell:
        yield Session(shell, proxy, site)
    await proxy.terminate()
    assert (await proxy.wait(30)).exit_code == 0


async def test_a_host_on_the_list_is_reached_and_others_are_not(session: Session, site: int) -> None:
    answer = await session.fetch(f"http://127.0.0.1:{site}/path?query")
    assert answer == f"GET /path?query host=127.0.0.1:{site}"
    assert (await session.fetch("http://example.org/")).startswith("403 holdfast egress: example.org:80 is not on")
    assert (await session.fetch("http://example.com:8080/")).startswith("403")
    assert (await session.fetch("https://example.org/")) == (
        "failed <urlopen error Tunnel connection failed: 403 Forbidden>"
    )
    facts = await session.decisions()
    assert [(fact["allowed"], fact["method"], fact["host"], fact["port"]) for fact in facts] == [
        (True, "GET", "127.0.0.1", site),
        (False, "GET", "example.org", 80),
        (False, "GET", "example.com", 8080),
        (False, "CONNECT", "example.org", 443),
    ]
    assert facts[0]["address"] == "127.0.0.1"
    assert "is not on the list" in facts[1]["reason"]


async def test_an_address_inside_must_be_named(session: Session, site: int) -> None:
    """The address of a name on the list does not count, nor does another way to write the address."""
    for host in ("127.0.0.2", "localhost", "2130706433", "[::1]", "[::ffff:127.0.0.2]", "169.254.169.254"):
        assert (await session.fetch(f"http://{host}:{site}/")).startswith("403"), host
    assert (await session.fetch("http://127.0.0.1:1/")).startswith("403")


async def test_a_tunnel_carries_bytes_both_ways(session: Session, site: int) -> None:
    program = f"""
import socket
line = socket.create_connection(('127.0.0.1', 3128), 20)
line.sendall(b'CONNECT 127.0.0.1:{site} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')
head = line.recv(4096)
body = b'x' * 1_000_000
line.sendall(b'POST / HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n')
line.sendall(b'Content-Length: %d\\r\\n\\r\\n' % len(body) + body)
answer = b''
while piece := line.recv(65536): answer += piece
print(head.split(b'\\r\\n')[0].decode(), answer.endswith(b'\\r\\n\\r\\n' + body))
"""
    assert (await session.python(program)).stdout == "HTTP/1.1 200 Connection established True\n"


async def test_a_body_is_passed_on(session: Session, site: int) -> None:
    program = f"""
import urllib.request
data = b'y' * 300_000
assert urllib.request.urlopen('http://127.0.0.1:{site}/', data, timeout=60).read() == data
print('same')
"""
    done = await session.python(program)
    assert done.stdout == "same\n", done.stderr


async def test_there_is_no_way_around_the_proxy(session: Session, site: int) -> None:
    program = f"""
import socket
for kind, target in (('tcp', ('127.0.0.1', {site})), ('out', ('192.0.2.1', 80))):
    try: socket.create_connection(target, 5)
    except OSError: print(kind, 'refused')
try: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))
except OSError: print('udp refused')
try: socket.getaddrinfo('example.com', 80)
except OSError: print('dns refused')
"""
    assert (await session.python(program)).stdout == "tcp refused\nout refused\nudp refused\ndns refused\n"


async def test_what_is_no_http_is_answered_or_dropped(session: Session) -> None:
    program = """
import socket
for said in (b'\\x16\\x03\\x01', b'GET /path HTTP/1.1\\r\\nHost: x', b'CONNECT nowhere HTTP/1.1\\r\\nHost: x'):
    line = socket.create_connection(('127.0.0.1', 3128), 20)
    line.sendall(said + b'\\r\\n\\r\\n')
    print(line.recv(4096).split(b'\\r\\n')[0].decode())
"""
    answers = (await session.python(program)).stdout.splitlines()
    assert [answer.split()[1] for answer in answers] == ["400", "400", "400"]


async def test_a_network_that_nobody_is_in_any_more_is_left(session: Session, site: int) -> None:
    for number in range(SOCKETS_BEFORE_SWEEP + 1):
        process = await session.shell.start("true")
        assert (await process.wait(30)).exit_code == 0, number
    sockets = await asyncio.to_thread(open_sockets, session.proxy.pid)
    assert sockets < SOCKETS_BEFORE_SWEEP
    assert (await session.fetch(f"http://127.0.0.1:{site}/still")).startswith("GET /still")


def open_sockets(pid: int) -> int:
    links = (os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd"))
    return sum(link.startswith("socket:") for link in links)


async def test_the_socket_is_gone_when_the_proxy_ends(box: Sandbox, tmp_path: Path) -> None:
    path = str(tmp_path / "egress.sock")
    command = [*(await box.info()).holdfast, "egress", "--socket", path]
    proxy = await box.start(command)
    await proxy.wait_for_output('"ready"', timeout=60)
    assert socket.AF_UNIX in _family_and_mode(path)
    taken = await box.start(command)
    assert (await taken.wait(30)).exit_code == 2
    assert b"Address already in use" in (await taken.snapshot()).stderr
    await proxy.terminate()
    assert not await asyncio.to_thread(os.path.exists, path)


def _family_and_mode(path: str) -> tuple[int, int]:
    mode = os.stat(path).st_mode
    assert mode & 0o777 == 0o600
    return socket.AF_UNIX, mode
