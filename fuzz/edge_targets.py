"""Properties of parsers of untrusted input: policies, requests of the service, proxies, names, screens.

Targets as in `targets`. The service's requests go through the real HTTP application with a handler over fake
sessions; nothing listens and nothing is started.
"""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import json
import os
from collections.abc import AsyncIterator
from typing import Any, Final
from unicodedata import combining, east_asian_width
from urllib.parse import parse_qsl

import h11
import msgspec

from fuzz.target import Target, cut_at, places_of, target
from holdfast.client.files.local_tree import check_name, stays_inside
from holdfast.client.screen.pyte import PyteEmulator
from holdfast.errors import FileError, Forbidden, HoldfastError, InvalidParams
from holdfast.proxies.egress.proxy import MAX_HEAD_BYTES, RequestRefused, requested_host
from holdfast.proxies.egress.rules import DEFAULT_PORTS, EgressRules, HostPattern, normal, parse_pattern
from holdfast.runtime.shell.dialect import is_complete, parse_answer
from holdfast.sandboxes.kubernetes import read_status
from holdfast.sandboxes.registry import KINDS, target_at
from holdfast.server.sandbox_policy import read_policy
from holdfast.service.access.admission import Admission
from holdfast.service.access.rates import Rates
from holdfast.service.access.tokens import Access, hash_token
from holdfast.service.audit.redaction import Redactor
from holdfast.service.clock import SystemClock
from holdfast.service.fronts.connect import connect_application
from holdfast.service.fronts.handler import Handler, methods
from holdfast.service.fronts.http import HttpSettings, _Guard, no_such_method
from holdfast.service.fronts.web_guard import rebindable
from holdfast.service.positions import Position, read_token, write_token
from holdfast.service.problems import BadToken, NotFound
from holdfast.service.settings import ServiceSettings
from holdfast.service.types import Role
from holdfast.sizes import parse_size
from holdfast.wire.codec import Codec
from holdfast.wire.messages import Empty, Encoding
from holdfast.wire.paths import decode_path, encode_path
from holdfast.wire.peer import Peer
from holdfast.wire.table import methods as wire_methods


def targets() -> dict[str, Target]:
    """Every target of this module by its name."""
    return {each.name: each for each in globals().values() if isinstance(each, Target)}


# --- policies of clients ------------------------------------------------------------------------------------------


def _policy(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    file_system = {"type": "restricted", "entries": list(entries)}
    return {"permissions": {"type": "managed", "file_system": file_system, "network": "restricted"}, **more}


_WRITE_ROOTS: Final = {
    "path": {"type": "special", "value": {"kind": "project_roots", "subpath": "a"}},
    "access": "write",
}


@target(
    json.dumps(_policy({"path": {"type": "path", "path": "file:///a"}, "access": "read"})).encode(),
    json.dumps(_policy(_WRITE_ROOTS, cwd="/w", workspaceRoots=["/w"], temporaryDirectories=["/t"])).encode(),
    json.dumps(_policy(_WRITE_ROOTS, policyContext={"cwd": "/w"})).encode(),
    b'{"permissions": {"type": "disabled"}}',
    b'{"permissions": {"type": "external", "network": "enabled"}, "sandboxOverride": null}',
    b'{"permissions": ' + b"[" * 500,
)
def codex_policy(data: bytes) -> None:
    """A policy is read or Forbidden; its paths are absolute; with one member that is not known it is Forbidden."""
    try:
        sandbox = json.loads(data)
    except (ValueError, RecursionError):
        return
    if sandbox is None:
        return
    try:
        policy = read_policy(sandbox, "/tmp")
    except Forbidden:
        return
    permissions = sandbox["permissions"]
    restricts = permissions["type"] == "managed" and permissions["file_system"]["type"] == "restricted"
    assert (policy.rights is not None) == restricts
    assert policy.network == (permissions["type"] == "disabled" or permissions.get("network") == "enabled")
    for right in policy.rights or ():
        assert os.path.isabs(right.path)
        assert ".." not in right.path.split("/")
        assert "\0" not in right.path
    for inner in (sandbox, permissions):
        inner["restricts something new"] = True
        try:
            read_policy(sandbox, "/tmp")
        except Forbidden:
            del inner["restricts something new"]
        else:
            raise AssertionError("a member that is not known was ignored")


@target(b"/a/b", b"file:///a%20b", b"file://localhost/%ff", b"file://elsewhere/x", "file:%2F%2Fä".encode(), b"\xff")
def file_paths(data: bytes) -> None:
    """A path on the wire is one of this machine or refused; what is read can be written and read again."""
    try:
        path = decode_path(data.decode(errors="replace"))
    except InvalidParams:
        return
    assert decode_path(encode_path(path)) == path
    raw = data.decode(errors="surrogateescape")
    assert decode_path(encode_path(raw)) == raw


# --- the filtering proxy ------------------------------------------------------------------------------------------


@target(
    b"\x02\x05\x09CONNECT a.example:443 HTTP/1.1\r\nHost: x\r\n\r\nahead",
    b"\x00GET http://a.example/path?q=1 HTTP/1.1\r\nHost: b.example\r\n\r\n",
    b"\x00GET http://u:p@[::1]:80/ HTTP/1.1\r\nHost: b\r\n\r\n",
    b"\x00CONNECT a.example:" + b"9" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00POST http://a.example\\@b.example:1/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
)
def egress_head(data: bytes) -> None:
    """A head names one host and port or is refused, wherever it is cut; only the listed host passes."""
    locations, stream = places_of(data)
    whole = _head([stream])
    assert _head(cut_at(stream, locations)) == whole
    if whole is None:
        return
    host, port, path = whole
    assert host
    assert 0 < port < 65536
    assert b"\r" not in path
    assert b"\n" not in path
    allowed = not EgressRules(["a.example"]).refuses_name(host, port)
    assert allowed == (host.strip("[]").rstrip(".").lower() == "a.example" and port in DEFAULT_PORTS)


def _head(pieces: list[bytes]) -> tuple[str, int, bytes] | None:
    inside = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    try:
        event = inside.next_event()
        for piece in pieces:
            if piece and event is h11.NEED_DATA:
                inside.receive_data(piece)
                event = inside.next_event()
        return requested_host(event) if isinstance(event, h11.Request) else None
    except (h11.RemoteProtocolError, RequestRefused):
        return None


@target(
    b"a.example", b"*.a.example:8443", b"[::1]:*", b"10.0.0.1:80", b"::ffff:127.0.0.1", b"a:" + b"9" * 5000, b"*.*"
)
def egress_patterns(data: bytes) -> None:
    """A pattern is read or refused; an address that is not public passes only if it is named itself."""
    text = data.decode(errors="replace")
    try:
        pattern = parse_pattern(text)
    except InvalidParams:
        return
    assert pattern.ports is None or all(0 < port < 65536 for port in pattern.ports)
    rules = EgressRules([text])
    host = f"x.{pattern.host}" if pattern.below else pattern.host
    port = pattern.ports[0] if pattern.ports else 1
    assert not rules.refuses_name(host, port) or not _is_name(pattern)
    if host != "localhost":
        refused = rules.refuses_address(host, port, "127.0.0.1")
        assert bool(refused) == (pattern.below or normal(pattern.host) != "127.0.0.1")


def _is_name(pattern: HostPattern) -> bool:
    """Whether a request could name the host of this pattern: a pattern such as `a]` names nothing."""
    return normal(pattern.host) == pattern.host


@target(
    b"evil.example", b"evil.example:80", b"127.0.0.1:7401", b"[::1]:7401", b"localhost.", b"x.localhost", b"a@b.c"
)
def host_header(data: bytes) -> None:
    """A `Host` is an address, a name without a dot, or one that must be allowed."""
    host = data.decode("latin-1")
    name = host.strip().lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        assert not rebindable(host)
    if "." not in host:
        assert not rebindable(host)
    assert rebindable("evil.example:" + "".join(each for each in host if each in "0123456789"))


# --- the service --------------------------------------------------------------------------------------------------

_TOKEN: Final = "hf_" + "t" * 43
_METHODS: Final = methods()
_JSON_SEEDS: Final = (
    {
        "agentId": "anna",
        "kind": "SHELL",
        "labels": {"a": "b"},
        "environment": {"A": "b"},
        "policy": {"require": ["network"]},
    },
    {"sessionId": "s", "data": "bHMK", "actions": [{"type": "RESIZE", "cols": 80, "rows": 24}], "requestId": "r"},
    {"sessionId": "s", "since": {"value": "t"}, "maxBytes": 5, "waitTimeoutMs": 1},
    {"create": {"policy": {"resources": {"cpuCores": 0.5}}}, "command": "ls", "timeoutMs": 5},
    {"since": "2026-01-01T00:00:00Z", "until": "9999-12-31T23:59:59Z", "kinds": ["a"], "pageSize": 4294967295},
    {"approvalId": "x", "approve": True, "comment": "c"},
)


class _Agent:
    agent_id = "anna"
    role: Role = "agent"
    token_hash = hash_token(_TOKEN)
    disabled = False


class _Agents:
    async def find_agent(self, token_hash: str) -> _Agent | None:
        return _Agent() if token_hash == _Agent.token_hash else None


class _NoSessions:
    """Every call that the handler lets through finds nothing."""

    def __getattr__(self, name: str) -> Any:
        async def missing(*_: Any, **__: Any) -> Any:
            raise NotFound("none", reason="SESSION_NOT_FOUND")

        async def missing_stream(*_: Any, **__: Any) -> AsyncIterator[Any]:
            raise NotFound("none", reason="SESSION_NOT_FOUND")
            yield

        return missing_stream if name in ("stream_output", "events") else missing


_TYPES: Final = (
    b"application/json",
    b"application/proto",
    b"application/connect+json",
    b"application/connect+proto",
    b"application/json; charset=\xff",
    b"text/plain",
)
_ENCODINGS: Final = (b"", b"identity", b"gzip", b"br", b"zstd", b"x")


def _http_seeds() -> list[bytes]:
    seeds = []
    for index, method in enumerate(_METHODS):
        for fields in _JSON_SEEDS:
            body = json.dumps(fields).encode()
            enveloped = b"\0" + len(body).to_bytes(4, "big") + body
            seeds.append(bytes((index, 2, 0, 0)) + enveloped if method.stream else bytes((index, 0, 0, 0)) + body)
    bomb = gzip.compress(b" " * 200_000)
    return [*seeds, bytes((0, 0, 2, 1)) + bomb, bytes((3, 2, 2, 0)) + b"\x01\xff\xff\xff\xff" + bomb]


@target(*_http_seeds())
def service_requests(data: bytes) -> None:
    """A request is answered or refused as the caller's error, and never fails as a bug of ours."""
    if len(data) < 4:
        return
    index, kind, encoding, more = data[:4]
    method = _METHODS[index % len(_METHODS)]
    headers = [(b"host", b"x"), (b"authorization", f"Bearer {_TOKEN}".encode())]
    headers.append((b"content-type", _TYPES[kind % len(_TYPES)]))
    if name := _ENCODINGS[encoding % len(_ENCODINGS)]:
        headers.append((b"connect-content-encoding" if method.stream else b"content-encoding", name))
    if more % 2:
        headers.append((b"connect-timeout-ms", data[4:14]))
    if more % 4 > 1:
        headers.append((b"connect-protocol-version", data[4:6]))
    status, reply = asyncio.run(_post(method.path, headers, data[4:]))
    assert 200 <= status < 500 or status == 501, (status, reply)
    # Connect itself answers so where an envelope is marked as compressed and no header names the compression.
    assert b'"internal"' not in reply.replace(b'"internal", "message": "protocol error', b""), reply


async def _post(path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[int, bytes]:
    clock = SystemClock()
    admission = Admission(Access(_Agents(), clock), Rates(ServiceSettings(), clock))
    settings = HttpSettings(max_request_bytes=64 * 1024)
    handler = Handler(_NoSessions())
    app = _Guard(connect_application(handler, admission, settings.max_request_bytes), settings)
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    pending = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return pending.pop() if pending else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    assert admission.under_way == 0
    written = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    return sent[0]["status"], written


@target(b"/holdfast.session.v1.SessionService/CreateSesion", b"/x/y", b"//", b"/\xff/" + b"a" * 1000)
def unknown_methods(data: bytes) -> None:
    """A path that is no method is answered with a short error."""
    reply = no_such_method(data.decode(errors="replace"))
    assert reply.status_code == 404
    assert len(bytes(reply.body)) < 4_000


@target(
    write_token("s", Position(1, 2, 3, 4)).encode(),
    write_token("other", Position()).encode(),
    b"0" * 50,
    b"",
    "٣".encode() * 50,
)
def position_tokens(data: bytes) -> None:
    """A token is a position of its session, and writes as itself; or it is refused."""
    text = data.decode(errors="replace")
    try:
        position = read_token("s", text)
    except BadToken:
        return
    assert not text or write_token("s", position) == text


_REDACTOR: Final = Redactor()
_SECRETS: Final = (
    "export API_KEY=hunter2hunter2",
    "PASSWORD='a'\"hunter2\"hunter2",
    "curl -u a:b -u c:hunter2 x",
    "mysql -pa -phunter2 x",
    "https://u:hunter2@h/",
)


@target(
    b"curl -u a:secret https://u:p@h/ && export API_KEY=abc",
    b'{"password": "x", "token": "y"}',
    b"mysql -psecret; sshpass -p secret ssh h",
    b"-" * 3000 + b"token" * 500,
    b"Authorization: Bearer " + b"a" * 4000,
)
def redaction(data: bytes) -> None:
    """Any text is redacted in little time, and hides no secret of a known form that stands in a line below it."""
    text = data.decode(errors="replace")
    if "hunter2" in text:
        return
    for line in _SECRETS:
        assert "hunter2" not in _REDACTOR(f"{text}\n{line}\n{text}")


# --- sandboxes ----------------------------------------------------------------------------------------------------


@target(
    b"\0010:hB:7:130:last\0/cwd\0/old\0\n", b"0::::\0/\0/\0\n", b"trap -- 'x' EXIT\n\0000:::0:\0/\0/\0\n", b"\n"
)
def shell_answers(data: bytes) -> None:
    """Bytes that code in a shell writes to its control socket are an answer or refused by ValueError."""
    is_complete(data)
    try:
        answer = parse_answer(data)
    except ValueError:
        return
    assert set(answer.traps) <= {"EXIT", "DEBUG", "ERR", "RETURN"}


def _reply_seeds(encoding: Encoding) -> tuple[bytes, ...]:
    encode = msgspec.json.encode if encoding == "json" else msgspec.msgpack.encode
    results: tuple[Any, ...] = (
        {},
        {"processId": "p", "chunks": [{"seq": 1, "stream": "stdout", "chunk": "YQ=="}], "nextSeq": 2},
        {"cwd": "/", "shell": {"name": "bash", "path": "/bin/bash"}},
        {"exitCode": 0, "output": "x"},
    )
    error = {"code": -32000, "message": "m", "data": {"a": 1}}
    return (encode({"id": 1, "error": error}), *(encode({"id": 1, "result": each}) for each in results))


@target(*_reply_seeds("json"), b'{"id":1,"result":{"a":"\\ud800"}}', b'{"id":1,"error":{"code":1e400,"message":1}}')
def replies_json(data: bytes) -> None:
    """A reply of a server in the sandbox is a result of its method, or an error of ours."""
    _replies(data, "json")


@target(*_reply_seeds("msgpack"))
def replies_msgpack(data: bytes) -> None:
    """The same in MessagePack."""
    _replies(data, "msgpack")


def _replies(data: bytes, encoding: Encoding) -> None:
    for row in wire_methods().values():
        peer = Peer(Codec(encoding))
        got: list[Any] = []

        def answered(result: Any, error: Any, got: list[Any] = got) -> None:
            got.append(error if error is not None else result)

        peer.call(row, Empty(), answered)
        try:
            peer.receive(data)
        except HoldfastError:
            continue
        assert len(got) + peer.pending == 1
        assert all(isinstance(each, HoldfastError | row.result) for each in got)


@target(
    b'{"metadata": {"uid": "u"}, "spec": {"containers": [{"name": "c"}]}, "status": {"phase": "Running", '
    b'"containerStatuses": [{"name": "c", "ready": true, "state": {"terminated": {"exitCode": 1}}}]}}',
    b'{"metadata": {"uid": "u"}}',
    b"[" * 2000,
    b"\xff",
)
def pod_status(data: bytes) -> None:
    """The answer of `kubectl` is a status or none."""
    found = read_status(data.decode(errors="replace"), None)
    assert found is None or isinstance(found.why, str)


@target(
    b"docker:web?user=app&bundle=no",
    b"kubernetes:ns/pod/c?context=x&wait_ready=1e400",
    b"ssh:user@host?port=" + b"9" * 5000,
    b"bwrap:/x?network=yes&writable=/a&writable=/b",
    b"podman:-x?arguments=--privileged",
)
def sandbox_addresses(data: bytes) -> None:
    """An address is a place or refused by an error of ours; no option beyond the listed ones gets in."""
    address = data.decode(errors="replace")
    kind = KINDS.get(address.partition(":")[0])
    if kind is None or not kind.target:
        return
    try:
        target_at(address)
    except HoldfastError:
        return
    given = {name for name, _ in parse_qsl(address.partition("?")[2], keep_blank_values=True)}
    assert not given & {"arguments", "program", "options"}


@target(b"a\0b\0../../x", b"a\0/etc/passwd", b"a\0b\0..", b"a\0b/../../..", b"..")
def download_names(data: bytes) -> None:
    """A name of a downloaded tree is one component; a link that stays inside resolves to a path of the tree."""
    *names, link = data.decode(errors="surrogateescape").split("\0")
    for name in names:
        try:
            checked = check_name(name)
        except FileError:
            return
        assert checked not in ("", ".", "..")
        assert "/" not in checked
    if names and stays_inside(tuple(names), link):
        resolved = os.path.normpath(os.path.join("/tree", *names[:-1], link))
        assert resolved == "/tree" or resolved.startswith("/tree/")


@target(b"512M", b"1.5 GiB", b"9" * 18 + b"T", b"9" * 5000, "٣".encode(), b"1iB")
def sizes(data: bytes) -> None:
    """A size is a number of bytes, or ValueError."""
    try:
        size = parse_size(data.decode(errors="replace"))
    except ValueError:
        return
    assert 0 <= size < 10**18 * 1024**4


@target(
    b"\x02\x05\x09text\r\n\x1b[2J\x1b[5;5H\x1b[?1049h\x1b7\x1b8\x1b[1;3r\x1bM",
    b"\x00\x1b]0;title\x07\x1b[38;2;1;2;3m\xf0\x9f\x98\x80\x1b[999999999;999999999H\x1b[99999L",
    b"\x01\x03\x1b[" + b"9" * 300 + b"@\x1b(0lqk\x1b(B\x1b#8\x1bc\x1b[!p",
)
def screen(data: bytes) -> None:
    """Output of any kind draws a screen of its size; `restore` draws it again if every character takes one cell."""
    locations, stream = places_of(data)
    rows, cols = 5, 12
    emulator = PyteEmulator(rows, cols)
    for piece in cut_at(stream[:2_000], locations):
        emulator.feed(piece)
    shown = emulator.screen()
    assert len(shown.lines) == rows
    assert 0 <= shown.cursor_row < rows
    assert 0 <= shown.cursor_col < cols
    again = PyteEmulator(rows, cols)
    again.feed(emulator.restore())
    assert len(again.screen().lines) == rows
    # pyte keeps half of a wide character that an erasure cuts, and wraps before a combining character at the edge.
    if not any(east_asian_width(each) in "WF" or combining(each) for line in shown.lines for each in line):
        assert again.screen().lines == shown.lines
