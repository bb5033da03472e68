"""The E2B server's decisions that need no sandbox: tokens, networks, hosts, bodies, errors."""

from __future__ import annotations

import asyncio
import errno
import zlib
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from holdfast import errors
from holdfast.fleet.template import Template
from holdfast.integrations.e2b.application import Target, _RequestBody, parse_host
from holdfast.integrations.e2b.control.records import PUBLIC
from holdfast.integrations.e2b.control.requests import NewSandbox, effective_network, parse_body
from holdfast.integrations.e2b.control.templates import load_templates, parse_templates
from holdfast.integrations.e2b.envd import connect_protocol as connect, processes
from holdfast.integrations.e2b.envd.files import _bounded, _unzipped
from holdfast.integrations.e2b.envd.messages import ProcessConfig, StartRequest
from holdfast.integrations.e2b.envd.processes import _ended
from holdfast.integrations.e2b.open_sandbox import deadline_of, process_id, tag_of
from holdfast.integrations.e2b.ports.api import Ports
from holdfast.integrations.e2b.problems import Problem, problem_of
from holdfast.integrations.e2b.server import serving
from holdfast.integrations.e2b.settings import KEY_VARIABLE, E2BSettings, Keyring, load_key
from holdfast.service.fronts.previews.proxy import passed_headers
from holdfast.service.problems import Invalid
from holdfast.types import Exited, ExitStatus, ProcessSpec


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for each in data:
        yield each


async def read_all(body: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in body])


def receiver(messages: Iterable[dict[str, Any]]) -> Any:
    """A client that sends these messages, and then nothing."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if left:
            return left.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    return receive


def test_a_token_is_that_of_one_sandbox_and_one_use() -> None:
    keys, other = Keyring("e2b_" + "1" * 40), Keyring("e2b_" + "2" * 40)
    tokens = {keys.token(kind, id) for kind in ("envd", "traffic", "upload") for id in ("a", "b")}
    assert len(tokens) == 6
    assert keys.accepts_token("envd", "a", keys.token("envd", "a"))
    for wrong in (None, "", "é", keys.token("traffic", "a"), keys.token("envd", "b"), other.token("envd", "a")):
        assert not keys.accepts_token("envd", "a", wrong)
    assert not keys.accepts_key(None)
    assert not keys.accepts_key("e2b_\udcff")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:3000", "example.org:3000"])
async def test_nothing_listens_beyond_loopback_in_plain_text(address: str) -> None:
    with pytest.raises(Invalid, match="reachable from other machines"):
        async with serving(E2BSettings(listen=address)):
            raise AssertionError


@pytest.mark.parametrize(
    ("listen", "public", "admitted"),
    [
        ("0.0.0.0:0", None, False),
        ("0.0.0.0:0", "false", False),
        ("127.0.0.1:0", "false", False),
        ("0.0.0.0:0", "true", True),
        ("127.0.0.1:0", None, True),
    ],
)
async def test_a_port_beyond_loopback_needs_the_traffic_token(
    listen: str, public: str | None, admitted: bool
) -> None:
    opened: Any = SimpleNamespace(ref=SimpleNamespace(labels={} if public is None else {PUBLIC: public}))

    class Sandboxes:
        async def open(self, _: str) -> Any:
            return opened

    keys = Keyring("e2b_" + "1" * 40)
    sandboxes: Any = Sandboxes()
    ports = Ports(sandboxes, keys, E2BSettings(listen=listen, allow_plaintext=True))
    token = {"e2b-traffic-access-token": keys.token("traffic", "a")}
    wrong = {"e2b-traffic-access-token": keys.token("traffic", "b")}
    assert await ports._open("a", 8000, Headers(token)) is opened
    for given in ({}, wrong):
        if admitted:
            assert await ports._open("a", 8000, Headers(given)) is opened
            continue
        with pytest.raises(Problem, match="E2B-Traffic-Access-Token"):
            await ports._open("a", 8000, Headers(given))


def test_a_short_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(errors.InvalidParams, match=KEY_VARIABLE):
        load_key()


@pytest.mark.parametrize(
    ("body", "template", "network"),
    [
        ("{}", "host", "host"),
        ("{}", None, None),
        ('{"allow_internet_access":true}', None, None),
        ('{"allow_internet_access":false}', "host", "none"),
        ('{"network":{"allowOut":["a.b"]}}', "host", "host"),
        ('{"network":{"denyOut":["0.0.0.0/0"],"allowOut":["a.b","8.8.8.8/32"]}}', "host", ("a.b", "8.8.8.8")),
        ('{"allow_internet_access":false,"network":{"allowOut":["a.b"]}}', ("a.b", "c.d"), ("a.b",)),
        ('{"network":{"denyOut":["0.0.0.0/0"],"allowOut":["a.b"]}}', None, "none"),
    ],
)
def test_a_request_restricts_the_network_of_its_template(body: str, template: Any, network: Any) -> None:
    wanted = parse_body(body.replace("{", '{"templateID":"base",', 1).replace(",}", "}").encode(), NewSandbox)
    assert effective_network(wanted.network, wanted.allow_internet_access, template) == network


@pytest.mark.parametrize(
    "network",
    [
        '{"denyOut":["10.0.0.0/8"]}',
        '{"denyOut":["0.0.0.0/0"],"allowOut":["10.0.0.0/8"]}',
        '{"rules":{"a.b":[]}}',
        '{"dnsServers":["1.1.1.1"]}',
        '{"httpsPorts":[443]}',
        '{"maskRequestHost":"x"}',
        '{"unknown":1}',
    ],
)
def test_a_restriction_that_cannot_be_enforced_is_refused(network: str) -> None:
    with pytest.raises(Problem) as raised:  # noqa: PT012 - either step may refuse it
        wanted = parse_body(f'{{"templateID":"base","network":{network}}}'.encode(), NewSandbox)
        effective_network(wanted.network, None, "host")
    assert raised.value.status == 400


def test_a_host_name_is_that_of_a_port() -> None:
    assert parse_host("8080-holdfast-abc.e2b.test:443", "e2b.test") == Target("holdfast-abc", 8080)
    for other in ("api.e2b.test", "8080-x.other.test", "0-x.e2b.test", "99999-x.e2b.test", "8080-x.y.e2b.test", ""):
        assert parse_host(other, "e2b.test") is None


def test_templates_of_a_file_have_names_fields_and_defaults() -> None:
    found = parse_templates(b'[base]\nimage = "debian:12"\nmemory = "1GiB"\n', "file")
    assert found == {"base": Template(image="debian:12", memory="1GiB")}
    assert set(load_templates(None)) == {"base", "code-interpreter-v1"}
    for wrong, named in (
        (b"[base]\nimages = 'x'\n", "images"),
        (b"[base]\nlifetime = 5\n", "lifetime"),
        (b"base = 5\n", "base"),
        (b"[base", "TOML"),
    ):
        with pytest.raises(errors.InvalidParams, match=named):
            parse_templates(wrong, "file")


def test_the_id_of_a_process_has_its_deadline_and_its_tag() -> None:
    id = process_id(60.0, "a tag / é")
    assert tag_of(id) == "a tag / é"
    assert deadline_of(id) is not None
    assert (tag_of(process_id(None, None)), deadline_of(process_id(None, None))) == (None, None)
    assert (tag_of("another"), deadline_of("e2b-x")) == (None, None)


def test_a_proxy_passes_on_neither_hop_by_hop_headers_nor_those_they_name() -> None:
    headers = [(b"Connection", b"X-Private, close"), (b"X-Private", b"1"), (b"TE", b"trailers"), (b"X-Kept", b"2")]
    assert passed_headers(headers, frozenset()) == [(b"x-kept", b"2")]


async def test_a_body_is_bounded_in_size_and_in_silence() -> None:
    big = receiver([{"type": "http.request", "body": b"x" * 11, "more_body": True}])
    with pytest.raises(Problem) as raised:
        await connect.whole_body(big, 10, 60.0)
    assert raised.value.status == 413
    silent = receiver([{"type": "http.request", "body": b"x", "more_body": True}])
    with pytest.raises(Problem) as raised:
        await connect.whole_body(silent, 10, 0.01)
    assert raised.value.status == 408
    with pytest.raises(Problem) as raised:
        await connect.whole_body(receiver([{"type": "http.disconnect"}]), 10, 60.0)
    assert raised.value.code == "canceled"


async def test_a_refusal_is_sent_after_the_body_that_it_refuses() -> None:
    """The client of an upload of 32 MiB, of which half was read, gets the reply and no broken connection."""
    unread = [
        {"type": "http.request", "body": bytes(1024 * 1024), "more_body": number < 15} for number in range(16)
    ]
    left: list[int] = []

    async def receive() -> dict[str, Any]:
        return unread.pop(0)

    async def send(_: Any) -> None:
        left.append(len(unread))

    body = _RequestBody(receive, send)
    await body.send({"type": "http.response.start", "status": 507, "headers": []})
    assert left == [0]


async def test_an_upload_is_bounded_after_its_decompression() -> None:
    bomb = zlib.compress(bytes(50_000_000), wbits=31)
    size = 0
    with pytest.raises(Problem, match="more than 1000000 bytes"):  # noqa: PT012
        async for piece in _bounded(_unzipped(pieces(bomb)), 1_000_000):
            size += len(piece)
            assert len(piece) <= 1024 * 1024
    assert size <= 1_000_000
    with pytest.raises(Problem, match="ends within"):
        await read_all(_unzipped(pieces(bomb[:100])))
    with pytest.raises(Problem, match="not gzip"):
        await read_all(_unzipped(pieces(b"plain")))


def test_the_end_of_a_process_names_its_reason() -> None:
    assert _ended(ExitStatus(0)) == {"exitCode": 0, "exited": True, "status": "exit status 0"}
    assert _ended(ExitStatus(3))["error"] == "exit status 3"
    assert _ended(ExitStatus(143, "SIGTERM"))["error"] == "signal: terminated"
    assert _ended(ExitStatus(137, "SIGKILL", oom=True))["error"] == "signal: killed (out of memory)"
    assert _ended(ExitStatus(137, oom=True))["error"] == "exit status 137 (out of memory)"


def test_errors_have_the_status_by_which_the_sdks_choose_a_class() -> None:
    for error, status, code in (
        (errors.FileNotFound("x"), 404, "not_found"),
        (errors.UnknownUser("x"), 401, "unauthenticated"),
        (errors.ResourceExhausted("x", errno=errno.ENOSPC), 507, "resource_exhausted"),
        (errors.InvalidParams("x"), 400, "invalid_argument"),
        (errors.ConnectionLost("x"), 502, "unavailable"),
        (errors.SandboxError("x"), 500, "internal"),
    ):
        problem = problem_of(error)
        assert (problem.status, problem.code) == (status, code)
    # The SDKs recognize a sandbox that has ended by these words.
    assert "was not found" in problem_of(errors.SandboxGone("x"), "id").message


@pytest.mark.parametrize("milliseconds", ["1", "60000"])
async def test_a_command_that_is_killed_at_its_deadline_has_timed_out(
    monkeypatch: pytest.MonkeyPatch, milliseconds: str
) -> None:
    """The kill may end the command before the timer of its stream ends the stream."""

    async def killed_at_once(opened: Any, spec: ProcessSpec) -> tuple[Any, AsyncIterator[Any]]:
        async def events() -> AsyncIterator[Any]:
            await asyncio.sleep(0.01)  # beyond a deadline of one millisecond
            yield Exited(1, ExitStatus(137, "SIGKILL"))

        return SimpleNamespace(id=spec.process_id, pid=7), events()

    async def path(given: str, user: str) -> str:
        return "/"

    monkeypatch.setattr(processes, "_start", killed_at_once)
    box = SimpleNamespace(variables={}, default_user=None)
    opened: Any = SimpleNamespace(
        box=box, ref=SimpleNamespace(id="a"), path=path, run_as=str, remember=id, ended=id
    )
    request = StartRequest(process=ProcessConfig(cmd="sleep"))
    stream = processes.start(opened, request, "user", Headers({"connect-timeout-ms": milliseconds}))
    if milliseconds == "1":
        with pytest.raises(Problem) as raised:
            [message async for message in stream]
        assert raised.value.code == "deadline_exceeded"
    else:
        last = [message async for message in stream][-1]
        assert last.message["event"]["end"]["status"] == "signal: killed"
