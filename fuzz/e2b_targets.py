"""Properties of the E2B server's parsers: envelopes, messages, bodies, multipart, host names, tokens, templates.

Targets as in `targets`. A wrong input is a `Problem` or `InvalidParams`, which clients get as an error.
"""

from __future__ import annotations

import re
import shlex

from starlette.datastructures import Headers

from fuzz.target import Target, cut_at, places_of, target
from holdfast.errors import InvalidParams
from holdfast.integrations.e2b.application import parse_host, target_of
from holdfast.integrations.e2b.control import builds, requests, routes
from holdfast.integrations.e2b.control.templates import parse_templates
from holdfast.integrations.e2b.envd import connect_protocol as connect, messages
from holdfast.integrations.e2b.envd.api import user_of
from holdfast.integrations.e2b.envd.multipart import MultipartEvents, PartBegin, PartData, PartEnd, boundary_of
from holdfast.integrations.e2b.envd.watchers import translate
from holdfast.integrations.e2b.open_sandbox import deadline_of, process_id, tag_of
from holdfast.integrations.e2b.ports import interpreter
from holdfast.integrations.e2b.problems import Problem
from holdfast.service.fronts.previews.proxy import passed_headers
from holdfast.types import WatchEvent

_LIMIT = 256
_MESSAGES = (
    messages.StartRequest,
    messages.ProcessRequest,
    messages.SendInputRequest,
    messages.SendSignalRequest,
    messages.StreamInputRequest,
    messages.UpdateRequest,
    messages.PathRequest,
    messages.ListDirRequest,
    messages.MoveRequest,
    messages.WatchRequest,
    messages.WatcherRequest,
)
_BODIES = (
    requests.NewSandbox,
    requests.Connect,
    requests.Fork,
    requests.NetworkUpdate,
    requests.Pause,
    requests.Snapshot,
    requests.Timeout,
    interpreter.Execute,
    builds.NewBuild,
    builds.StartBuild,
)


def targets() -> dict[str, Target]:
    """Every target of this module by its name."""
    return {each.name: each for each in globals().values() if isinstance(each, Target)}


@target(
    b"\x02\x05\x09" + connect.envelope({"start": {"process": {"pid": 1}}}) + connect.end_of_stream(None),
    b"\x00" + b"\x01\x00\x00\x00\x02{}",
    b"\x01\x03\x00\xff\xff\xff\xff",
)
def e2b_envelopes(data: bytes) -> None:
    """The messages of a stream do not depend on how it was cut, and none is larger than the limit."""
    locations, stream = places_of(data)

    def read(pieces: list[bytes]) -> list[bytes] | str:
        envelopes, found = connect.Envelopes(_LIMIT), []
        try:
            for piece in pieces:
                found += envelopes.feed(piece)
            envelopes.close()
        except Problem as problem:
            return problem.code
        return found

    whole = read([stream])
    assert read(cut_at(stream, locations)) == whole
    assert isinstance(whole, str) or all(len(each) <= _LIMIT for each in whole)


@target(
    b'{"process":{"cmd":"/bin/bash","args":["-l","-c","true"],"envs":{"A":"b"},"cwd":"/"},"stdin":false,"tag":"t"}',
    b'{"process":{"pid":"12"},"input":{"stdin":"aGk="}}',
    b'{"process":{"pid":1},"signal":"SIGNAL_SIGKILL","pty":{"size":{"cols":80,"rows":24}}}',
    b'{"path":"~/a","depth":3,"recursive":true,"watcherId":"0"}',
)
def e2b_messages(data: bytes) -> None:
    """A message is read, or refused as an argument that is wrong."""
    for kind in _MESSAGES:
        try:
            found = connect.decode(data, kind)
            if isinstance(found, messages.SendSignalRequest):
                assert found.name() in ("TERM", "KILL")
            if isinstance(found, messages.ProcessRequest):
                found.selector()
            if isinstance(found, messages.UpdateRequest | messages.StartRequest) and found.pty is not None:
                size = found.pty.checked_size()
                assert 0 < size.rows <= messages.MAX_SIDE
        except Problem as problem:
            assert problem.code == "invalid_argument"


@target(
    b'{"templateID":"base","timeout":60,"metadata":{"a":"b"},"network":{"allowOut":["a.b"],"denyOut":["0.0.0.0/0"]}}',
    b'{"templateID":"x","allow_internet_access":false,"network":{"denyOut":["10.0.0.0/8"]}}',
    b'{"fromImage":"e2bdev/base","steps":[{"type":"RUN","args":["true"],"force":false}]}',
    b'{"timeout":1,"count":2,"memory":true,"name":"n"}',
)
def e2b_bodies(data: bytes) -> None:
    """A body is read or refused; a network is never more than that of the template."""
    for kind in _BODIES:
        try:
            found = requests.parse_body(data, kind)
            if isinstance(found, requests.NewSandbox):
                internet = found.allow_internet_access
                assert requests.effective_network(found.network, internet, "none") == "none"
                allowed = requests.effective_network(found.network, internet, ("a.b",))
                assert allowed == "none" or set(allowed or ()) <= {"a.b"}
        except Problem as problem:
            assert problem.status == 400


_PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="/tmp/%22x"\r\n\r\ndata\r\n'


@target(b"\x02\x05\x09" + _PART + _PART + b"--b--\r\n", b"\x00--b\r\n\r\n\r\n--b", b"\x01\x02--b--")
def e2b_multipart(data: bytes) -> None:
    """The parts of a body do not depend on how it was cut; each begins, has data and ends."""
    locations, stream = places_of(data)

    def read(pieces: list[bytes]) -> list[object] | str:
        events, found = MultipartEvents(b"b"), []
        try:
            for piece in pieces:
                found += events.feed(piece)
            events.close()
        except Problem as problem:
            return problem.code
        joined: list[object] = []
        for event in found:
            if isinstance(event, PartData) and joined and isinstance(joined[-1], bytes):
                joined[-1] += event.data
            elif isinstance(event, PartData):
                joined.append(event.data)
            else:
                joined.append(event)
        return joined

    whole = read([stream])
    # Beyond an error the parser may have seen more or less of the body.
    cut = read(cut_at(stream, locations))
    assert isinstance(whole, str) or isinstance(cut, str) or cut == whole
    if not isinstance(whole, str):
        inside = False
        for event in whole:
            assert isinstance(event, PartBegin) != inside
            inside = not isinstance(event, PartEnd)


@target(b"multipart/form-data; boundary=abc", b'multipart/form-data; boundary="a b"; x=', b"text/plain", b';;=;"')
def e2b_content_types(data: bytes) -> None:
    """A content type has a boundary or none."""
    boundary = boundary_of(data.decode("latin-1"))
    if boundary is not None:
        try:
            MultipartEvents(boundary)
        except Problem as problem:
            assert problem.code == "invalid_argument"


@target(
    b"8080-holdfast-abcdefghijklmnop.e2b.test",
    b"49983-x.e2b.test:443",
    b"65536-a.e2b.test",
    b"1-.e2b.test",
    b"\xff",
)
def e2b_hosts(data: bytes) -> None:
    """A host name is that of a port of a sandbox, or of none."""
    text = data.decode("latin-1")
    named = Headers({"e2b-sandbox-id": "x", "e2b-sandbox-port": text})
    for found in (parse_host(text, "e2b.test"), target_of(named, "")):
        assert found is None or (0 < found.port < 65_536 and re.fullmatch(r"[a-z0-9-]+", found.id))
    assert parse_host(text, "") is None


@target(b"Basic dXNlcjo=", b"Basic !", b"Bearer x", b"basic AA==", b"Connect-Timeout-Ms: 1000")
def e2b_headers(data: bytes) -> None:
    """Headers with a user, times and hop-by-hop names are read or refused."""
    text = data.decode("latin-1")
    headers = {"authorization": text, "connect-timeout-ms": text, "keepalive-ping-interval": text}
    try:
        assert "\0" not in user_of(headers)
        seconds = connect.timeout_of(headers)
        assert seconds is None or 0 <= seconds < 10_000_000
    except Problem as problem:
        assert problem.code in ("unauthenticated", "invalid_argument")
    assert (connect.keepalive_of(headers) or 1) >= 1
    pairs = [(b"Connection", data), (b"x-a", b"1"), (b"Upgrade", b"h2c")]
    assert all(name == b"x-a" for name, _ in passed_headers(pairs, frozenset()))


def _parse_token(text: str) -> None:
    routes.paged((), 1, text, "asc")


@target(b"a=b&c=%25d", b"2026-01-01T00:00:00+00:00", b"100", b"MTIuNSBob2xkZmFzdC1h", b"\xff=")
def e2b_queries(data: bytes) -> None:
    """Query parameters are read, or refused as wrong arguments."""
    text = data.decode("latin-1")
    parsers = (routes.parse_metadata, routes.parse_moment, routes.parse_seconds, routes.parse_limit, _parse_token)
    for parse in parsers:
        try:
            parse(text)
        except Problem as problem:
            assert problem.status == 400


@target(b"e2b-18f0-00112233-dGFn", b"e2b--", b"e2b-zz-1-\xff", process_id(1.5, "tag").encode(), b"x")
def e2b_process_ids(data: bytes) -> None:
    """The deadline and the tag of an id, which another program may have chosen."""
    text = data.decode("latin-1")
    deadline_of(text)
    tag_of(text)
    tag = text[:20]
    if tag:
        assert tag_of(process_id(1.0, tag)) == tag
    for event in (WatchEvent(1, "moved", text, old_name=text), WatchEvent(1, "created", text)):
        assert all(name == text for _, name in translate(event))


@target(
    b'[base]\nimage = "x"\n',
    b"[base]\nlifetime = 5\n",
    b"base = 1\n",
    b"[a]\nmemory = '1G'\nnetwork = ['h']\n",
    b"\xff",
)
def e2b_templates(data: bytes) -> None:
    """A file of templates is read, or InvalidParams names it."""
    try:
        parse_templates(data, "file")
    except InvalidParams as error:
        assert error.message.startswith("file")


@target(b"app/*.py", b"./a b", b"$(x);[!a]?", b"'")
def e2b_copy_patterns(data: bytes) -> None:
    """The pattern of a COPY step contains no shell syntax beside the wildcards."""
    pattern = builds._pattern(data.decode("latin-1").replace("\0", ""))
    assert len(shlex.split(pattern)) == 1
