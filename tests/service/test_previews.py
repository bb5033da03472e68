"""Previews of sessions' ports: a real service, real jails, and a hostile server in them."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from msgspec.structs import replace
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from holdfast import ServiceClient
from holdfast.__main__ import main
from holdfast.fleet.template import Template
from holdfast.service.api import (
    AuditFilter,
    CreateRequest,
    PolicyRequest,
    Preview,
    PreviewRequest,
    RunRequest,
)
from holdfast.service.assembly import ServiceReplica
from holdfast.service.policy.engine import resolve
from holdfast.service.policy.rules import RulesInvalid, load_rules
from holdfast.service.previews.previews import why_unreachable
from holdfast.service.previews.urls import PreviewUrls, split_path
from holdfast.service.problems import Denied, Exhausted, Invalid, NotFound, NotNow
from holdfast.service.settings import ServiceSettings
from holdfast.service.types import Caller
from holdfast.testing import FakeClock
from tests.service.session_records import record as make_record
from tests.support.parts import needs

ANN, BOB = Caller("ann"), Caller("bob")
RULES = """
[profiles.default]
sandbox.mode = "none"
sandbox.user = "server"
network.mode = "host"
directories.writable = ["/tmp"]
sandbox.engines = ["local", "bwrap"]
previews.ports = [8000, "9000-9001"]

[profiles.closed]
extends = "default"
previews.ports = []

[profiles.private]
extends = "default"
network.mode = "none"

[agents."*"]
profiles = ["closed", "private"]
"""
#: A server that returns each request, with headers that a hostile page would set, and echoes WebSockets.
HOSTILE = r"""
import base64, hashlib, http.server, json, struct
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    posts = 0
    def log_message(self, *_): pass
    def do_GET(self):
        seen = json.dumps({"path": self.path, "headers": {k.lower(): v for k, v in self.headers.items()}})
        if self.headers.get("Upgrade") == "websocket":
            magic = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(magic.encode()).digest()).decode()
            self.wfile.write(b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n")
            self.wfile.write(f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode())
            head = self.rfile.read(6)
            data = bytes(b ^ head[2 + i % 4] for i, b in enumerate(self.rfile.read(head[1] & 127)))
            reply = data + b" " + seen.encode()
            self.wfile.write(struct.pack(">BBH", 0x81, 126, len(reply)) + reply)
            self.rfile.read(1)
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        Handler.posts += self.command == "POST"
        reply = json.dumps({**json.loads(seen), "size": len(body), "posts": self.posts}).encode()
        if self.path == "/page":
            reply = b"<!doctype html><title>hostile</title>"
        self.send_response(203)
        self.send_header("Content-Type", "text/html" if self.path == "/page" else "application/json")
        self.send_header("Content-Length", str(len(reply)))
        for name, value in [
            ("Set-Cookie", "own=1"), ("Set-Cookie", "wide=1; Domain=localhost"),
            ("Set-Cookie", "holdfast_preview=forged"), ("Service-Worker-Allowed", "/"),
            ("Clear-Site-Data", '"*"'), ("Access-Control-Allow-Origin", "null"), ("Referrer-Policy", "unsafe-url"),
            ("Strict-Transport-Security", "max-age=1"),
        ]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply)
    do_POST = do_GET
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
print("listening", flush=True)
server.serve_forever()
"""
SERVE = (
    f"printf %s {shlex.quote(HOSTILE)} >/tmp/hostile.py && mkfifo /tmp/ready && "
    "{ python3 /tmp/hostile.py >/tmp/ready 2>&1 & } && head -n 1 /tmp/ready"
)


# --- rules and URLs --------------------------------------------------------------------------------------------


def test_rules_allow_no_port_by_default_and_refuse_what_is_not_one() -> None:
    rules = load_rules(RULES, "rules")
    assert load_rules("", "rules").profiles["default"].previews.ports == ()
    assert rules.profiles["default"].previews.ports == ("8000", "9000-9001")
    for wrong in ('"8000-"', "0", "70000", '"9100-9000"', "true", "1.5", '"http"', "-1"):
        with pytest.raises(RulesInvalid, match=r"previews.ports.0: .* is not a port from 1 to 65535"):
            load_rules(f"[profiles.default]\npreviews.ports = [{wrong}]", "rules")
    with pytest.raises(RulesInvalid, match="no such key"):
        load_rules("[profiles.default]\npreviews.port = [1]", "rules")


def test_a_request_only_narrows_the_ports() -> None:
    rules = load_rules(RULES, "rules")
    assert resolve(rules, "ann", PolicyRequest()).ports == ("8000", "9000-9001")
    assert resolve(rules, "ann", PolicyRequest(ports=("9001",))).ports == ("9001",)
    for wider in ("8001", "9000-9002", "7999-8000"):
        with pytest.raises(Denied, match=r"previews\.ports"):
            resolve(rules, "ann", PolicyRequest(ports=(wider,)))
    with pytest.raises(Invalid):
        resolve(rules, "ann", PolicyRequest(ports=("x",)))


def test_urls_name_one_preview() -> None:
    urls = PreviewUrls("https://p.example.com:8443")
    url, path_url = urls.of("cafe", "ses-1", 8000, "T")
    assert url == "https://cafe.p.example.com:8443/?holdfast_ticket=T"
    assert path_url == "https://p.example.com:8443/preview/ses-1/8000/?holdfast_ticket=T"
    assert urls.preview_id("CAFE.p.example.com:8443") == "cafe"
    assert [urls.preview_id(host) for host in ("p.example.com:8443", "evil.com", "xp.example.com", "")] == [
        None
    ] * 4
    assert (
        PreviewUrls("http://127.0.0.1:80").of("cafe", "s", 1, "T")[0].startswith("http://127.0.0.1:80/preview/s/1/")
    )
    assert split_path(b"/preview/ses-1/8000/a%2Fb") == ("ses-1", 8000, b"/a%2Fb")
    for other in (b"/", b"/preview/", b"/preview/a/b/c", b"/preview//1/", b"/preview/../1x/", b"//preview/a/1/"):
        assert split_path(other) is None
    for wrong in ("ftp://x", "localhost:1", "http://x/path"):
        with pytest.raises(Invalid):
            PreviewUrls(wrong)


def test_only_a_network_of_the_sandbox_of_the_session_is_dialled() -> None:
    """A preview elsewhere would reach a port of the machine, or of another session."""
    record = make_record("ses-1")
    jail = replace(record, sandbox="bwrap:holdfast-x", policy=replace(record.policy, network="host"))
    assert why_unreachable(jail, Template()) == ""
    assert why_unreachable(jail, Template(network=["example.com"])) == ""
    assert "not made for this session" in why_unreachable(jail, None)
    assert "not made for this session" in why_unreachable(replace(jail, sandbox="local"), None)
    assert "network of their machine" in why_unreachable(replace(jail, sandbox="local:holdfast-x"), Template())
    assert "ports of the machine" in why_unreachable(jail, Template(network="host"))
    assert "options.arguments" in why_unreachable(jail, Template(options={"arguments": ["--network=host"]}))
    for network in ("none", "allow-list"):
        confined = replace(jail, policy=replace(jail.policy, network=network))
        assert "network of its own" in why_unreachable(confined, Template())


# --- whole -----------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> ServiceSettings:
    monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", str(tmp_path_factory.mktemp("f")))
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    return ServiceSettings(
        listen_grpc="127.0.0.1:0",
        listen_http="",
        listen_preview="127.0.0.1:0",
        store=f"sqlite:///{tmp_path}/service.db",
        rules=str(rules),
        sandbox="inprocess",
        previews_per_session=8,
        preview_request_bytes=1000,
    )


@pytest.fixture
async def service(settings: ServiceSettings) -> AsyncIterator[ServiceReplica]:
    replica = ServiceReplica(settings)
    await replica.start()
    yield replica
    await stop(replica)


async def stop(replica: ServiceReplica) -> None:
    """Stop the service, and remove the sandboxes of its sessions."""
    operator = Caller("root", "operator")
    found, _ = await replica._manager.find(operator)
    for view in found:
        await replica._manager.close(operator, view.record.session_id, "force")
    await replica._sandboxes.remove_ended()
    await replica.stop()


class Visit(NamedTuple):
    """Requests to the port for previews, with any `Host`."""

    client: httpx.AsyncClient
    port: int

    async def __call__(self, url: str, method: str = "GET", **options: Any) -> httpx.Response:
        parts = urlsplit(url)
        headers = {"host": parts.netloc, **options.pop("headers", {})}
        target = f"http://127.0.0.1:{self.port}{parts.path}" + (f"?{parts.query}" if parts.query else "")
        self.client.cookies.clear()
        return await self.client.request(method, target, headers=headers, **options)

    def socket(self, url: str, **headers: str) -> Any:
        return connect(
            url.replace("http:", "ws:"), host="127.0.0.1", port=self.port, additional_headers=headers, proxy=None
        )


@pytest.fixture
async def visit(service: ServiceReplica) -> AsyncIterator[Visit]:
    assert service._preview is not None
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        yield Visit(client, int(service._preview.url.rpartition(":")[2]))


async def opened(service: ServiceReplica, caller: Caller = ANN, sandbox: str = "bwrap:new", **policy: Any) -> str:
    """A session, in a sandbox of its own with the hostile server."""
    request = CreateRequest(kind="shell", sandbox=sandbox, policy=PolicyRequest(**policy))
    session_id = (await service._manager.create(caller, request)).view.record.session_id
    if sandbox == "bwrap:new":
        ran = await service._manager.run_command(caller, RunRequest(SERVE, session_id, timeout=60))
        assert ran.stdout == b"listening\n", ran
    return session_id


async def preview(
    service: ServiceReplica, session_id: str, caller: Caller = ANN, port: int = 8000, **more: Any
) -> Preview:
    assert service._previews is not None
    return await service._previews.create_preview(caller, PreviewRequest(session_id, port, **more))


async def rows(service: ServiceReplica, session_id: str) -> list[tuple[str, dict[str, Any]]]:
    found, _ = await service._store.rows(AuditFilter(session_id=session_id))
    return [(row.kind, json.loads(row.body)) for row in found if row.kind.startswith("preview_")]


def without_ticket(url: str) -> str:
    return url.partition("?")[0]


async def cookie_of(visit: Visit, url: str) -> str:
    """The cookie that a browser gets for the ticket."""
    reply = await visit(url)
    assert reply.status_code == 303
    return reply.headers["set-cookie"].partition(";")[0]


@needs("bwrap")
async def test_a_hostile_page_gets_no_secret_and_no_right(service: ServiceReplica, visit: Visit) -> None:
    """The ticket, our cookie and tokens stay here; headers of the sandbox have no effect beyond its page."""
    session_id = await opened(service)
    made = await preview(service, session_id)
    token = {"authorization": "Bearer hf_secret", "x-forwarded-for": "10.0.0.1"}

    for url, shared in ((made.url, False), (made.path_url, True)):
        reply = await visit(url.replace("/?", "//evil.com/\\x?a=1&") + "&b=2")
        assert (reply.status_code, reply.headers["cache-control"]) == (303, "no-store")
        prefix = f"/preview/{session_id}/8000" if shared else ""
        assert reply.headers["location"] == f"{prefix}/evil.com/%5Cx?a=1&b=2"
        attributes = reply.headers["set-cookie"].split("; ")[1:]
        assert {"HttpOnly", "SameSite=Lax", f"Path={prefix}/"} <= set(attributes)
        cookie = reply.headers["set-cookie"].partition(";")[0]

        headers = {**token, "cookie": f"own=1; {cookie}; other=2"}
        reply = await visit(without_ticket(url) + "page?q=1", headers=headers)
        assert reply.status_code == 203
        seen = reply.json()
        assert seen["path"] == "/page?q=1"
        assert not {"authorization", "x-forwarded-for"} & seen["headers"].keys()
        assert seen["headers"].get("cookie") == (None if shared else "own=1; other=2")
        assert seen["headers"].get("x-forwarded-prefix") == (prefix or None)
        secrets = (cookie.partition("=")[2], url.partition("holdfast_ticket=")[2])
        assert not any(secret in reply.text for secret in secrets)

        assert reply.headers.get_list("set-cookie") == ([] if shared else ["own=1"])
        for name in ("service-worker-allowed", "clear-site-data", "strict-transport-security"):
            assert name not in reply.headers
        assert ("access-control-allow-origin" in reply.headers) is not shared
        assert reply.headers.get_list("referrer-policy") == ["no-referrer"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        added = reply.headers.get_list("content-security-policy")[-1]
        assert ("sandbox allow-scripts allow-forms" in added) is shared
        assert "allow-same-origin" not in added

        # A body that is larger than the limit is refused on its way.
        post = {"headers": {"cookie": cookie}} if not shared else {}
        target = without_ticket(url) if not shared else url
        assert (await visit(target, "POST", content=b"x" * 900, **post)).json()["size"] == 900
        assert (await visit(target, "POST", content=b"x" * 1100, **post)).status_code == 413
    text = json.dumps(await rows(service, session_id))
    assert made.url.rpartition("=")[2] not in text


@needs("bwrap")
async def test_a_preview_is_reached_only_with_its_own_secret(service: ServiceReplica, visit: Visit) -> None:
    first, second = await opened(service), await opened(service, BOB)
    mine, theirs = await preview(service, first), await preview(service, second, BOB)
    with pytest.raises(NotFound):
        await preview(service, second, ANN)
    host = urlsplit(without_ticket(mine.url)).netloc
    cookie = await cookie_of(visit, mine.url)
    ticket = mine.url.partition("?")[2]

    for url in (mine.url, mine.path_url):
        assert (await visit(without_ticket(url))).status_code == 401
        assert (await visit(without_ticket(url) + "?holdfast_ticket=guess")).status_code == 403
    for url in (theirs.url, theirs.path_url, f"http://{'0' * 32}.localhost/"):
        base = without_ticket(url)
        assert (await visit(f"{base}?{ticket}")).status_code == 403
        assert (await visit(base, headers={"cookie": cookie})).status_code == 401
    # A ticket is for one port.
    assert (await visit(mine.path_url.replace("/8000/", "/9000/"))).status_code == 403
    assert (await visit(f"http://localhost/?{ticket}")).status_code == 404

    # The cookie alone does not let a page of another origin in, where a browser sends it.
    own = without_ticket(mine.url)
    foreign: list[tuple[str, dict[str, str]]] = [
        ("POST", {"origin": "http://evil.localhost"}),
        ("POST", {"origin": "null"}),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}),
    ]
    for method, headers in foreign:
        assert (await visit(own, method, headers={"cookie": cookie, **headers})).status_code == 403
    allowed = {"cookie": cookie, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert (await visit(own, "POST", headers=allowed)).status_code == 203
    link = {"cookie": cookie, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await visit(own, headers=link)).status_code == 203
    # Below the path, the pages of all previews have one origin.
    shared = {"cookie": await cookie_of(visit, mine.path_url)}
    assert (await visit(without_ticket(mine.path_url), headers=shared)).status_code == 203
    assert (await visit(without_ticket(mine.path_url), "POST", headers=shared)).status_code == 403


@needs("bwrap")
async def test_websockets_and_the_end_with_the_session(service: ServiceReplica, visit: Visit) -> None:
    session_id = await opened(service)
    made = await preview(service, session_id)
    base = without_ticket(made.url)
    cookie = await cookie_of(visit, made.url)
    host = urlsplit(base).netloc
    for url, headers in (
        (made.url, {}),
        (made.path_url, {}),
        (base, {"cookie": cookie, "origin": f"http://{host}"}),
    ):
        async with visit.socket(url, **headers, authorization="Bearer hf_secret") as there:
            await there.send("hello")
            greeting, _, seen = (await there.recv()).partition(" ")
            assert greeting == "hello"
            assert json.loads(seen)["path"] == "/"
            assert not {"cookie", "authorization"} & json.loads(seen)["headers"].keys()
    shared = await cookie_of(visit, made.path_url)
    for url, headers in (
        (base, {}),
        (base, {"cookie": cookie, "origin": "http://evil.localhost"}),
        (without_ticket(made.path_url), {"cookie": shared}),
    ):
        with pytest.raises(InvalidStatus):
            async with visit.socket(url, **headers):
                pass

    assert (await visit(base, headers={"cookie": cookie})).status_code == 203
    assert b"holdfast_previews 1.0" in service._render_metrics()[0]
    async with asyncio.timeout(60), visit.socket(made.url) as there:
        await service._manager.close(ANN, session_id, "force")
        with pytest.raises(ConnectionClosed):
            await there.recv()
    assert (await visit(made.url)).status_code == 403
    assert (await visit(base, headers={"cookie": cookie})).status_code == 401
    assert b"holdfast_previews 0.0" in service._render_metrics()[0]
    with pytest.raises(NotNow):
        await preview(service, session_id)
    assert service._previews is not None
    await service._previews.stop()
    found = await rows(service, session_id)
    assert [kind for kind, _ in found] == ["preview_opened", "preview_closed"]
    assert (found[0][1]["port"], found[0][1]["by"], found[1][1]["reason"]) == (8000, "ann", "session over")


@needs("bwrap")
async def test_policy_network_and_limits_refuse_by_name(service: ServiceReplica, visit: Visit) -> None:
    """Off unless the profile allows the port; never where the port would be one of the machine."""
    session_id = await opened(service)
    with pytest.raises(Denied, match=r"previews\.ports"):
        await preview(service, session_id, port=8001)
    assert [(kind, body["port"]) for kind, body in await rows(service, session_id)] == [("preview_refused", 8001)]
    with pytest.raises(Invalid, match="preview_seconds"):
        await preview(service, session_id, lifetime=3601.0)
    # Nothing listens there.
    assert (await visit((await preview(service, session_id, port=9000)).path_url, "POST")).status_code == 502
    for _ in range(7):
        await preview(service, session_id)
    with pytest.raises(Exhausted, match="previews_per_session"):
        await preview(service, session_id)
    private = await service._manager.create(
        ANN, CreateRequest(kind="shell", sandbox="bwrap:new", policy=PolicyRequest(profile="private"))
    )
    with pytest.raises(Denied, match="network of its own"):
        await preview(service, private.view.record.session_id)
    # The rules as they are now count as well.
    service._rulebook.rules = load_rules(RULES.replace("[8000,", "[8001,"), "rules")
    with pytest.raises(Denied, match=r"previews\.ports"):
        await preview(service, session_id)


@needs("bwrap")
async def test_a_preview_over_the_protocol_and_by_the_verb(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = ServiceReplica(settings)
    started = await service.start()
    try:
        session_id = await opened(service)
        token = started.operator_token
        async with ServiceClient(started.grpc, token=token) as client:
            made = await client.create_preview(session_id, 8000, lifetime=60)
            assert (made.session_id, made.port) == (session_id, 8000)
            assert 0 < made.expires_at - time.time() <= 61
            with pytest.raises(Denied, match=r"previews\.ports"):
                await client.create_preview(session_id, 22)
            with pytest.raises(Invalid, match="port"):
                await client.create_preview(session_id, 0)
            assert (await client.get_session(session_id)).policy.ports == ("8000", "9000-9001")
        monkeypatch.setenv("HOLDFAST_SERVICE_TOKEN", token)
        verb = ("session", "preview", session_id, "8000", "--service", started.grpc)
        assert await asyncio.to_thread(main, (*verb, "--json")) == 0
        printed = json.loads(capsys.readouterr().out)
        ours = started.preview.replace("//", f"//{printed['previewId']}.")
        assert printed["url"].startswith(f"{ours}/?holdfast_ticket=")
        assert await asyncio.to_thread(main, verb) == 0
        assert capsys.readouterr().out.partition("?")[2].startswith("holdfast_ticket=")
    finally:
        await stop(service)


async def test_without_a_port_previews_are_off(settings: ServiceSettings) -> None:
    assert ServiceSettings().listen_preview == ""
    replica = ServiceReplica(replace(settings, listen_preview=""))
    started = await replica.start()
    try:
        async with ServiceClient(started.grpc, token=started.operator_token) as client:
            with pytest.raises(NotNow, match="listen_preview"):
                await client.create_preview("ses-1", 8000)
    finally:
        await replica.stop()
    for wrong in ({"listen_preview": "unix:/tmp/x"}, {"listen_preview": "0.0.0.0:0", "allow_plaintext": True}):
        with pytest.raises(Invalid, match="listen_preview"):
            await ServiceReplica(replace(settings, **wrong)).start()


async def test_a_sandbox_with_the_network_of_the_machine_is_refused(service: ServiceReplica) -> None:
    """`inprocess` here stands for `local`: sandboxes that were not made for the session."""
    for sandbox, why in (("inprocess", "not made for this session"), ("local:new", "network of their machine")):
        session_id = await opened(service, sandbox=sandbox)
        with pytest.raises(Denied, match=why) as refused:
            await preview(service, session_id)
        assert refused.value.reason == "PREVIEW_UNREACHABLE"
        assert [kind for kind, _ in await rows(service, session_id)] == ["preview_refused"]
    session_id = await opened(service, sandbox="local:new", profile="closed")
    with pytest.raises(Denied, match=r"profiles\.closed\.previews\.ports"):
        await preview(service, session_id)


@needs("bwrap")
async def test_a_preview_expires(service: ServiceReplica, visit: Visit) -> None:
    previews = service._previews
    assert previews is not None
    session_id = await opened(service)
    clock = previews._clock = FakeClock(time.time())
    made = await preview(service, session_id, lifetime=60.0)
    assert made.expires_at == clock.time() + 60
    base, cookie = without_ticket(made.url), await cookie_of(visit, made.url)
    assert (await visit(base, headers={"cookie": cookie})).status_code == 203
    async with visit.socket(made.url) as there:
        await clock.advance(61.0)
        with pytest.raises(ConnectionClosed):
            await there.recv()
    reply = await visit(made.url)
    assert (reply.status_code, "expired" in reply.text) == (403, True)
    assert (await visit(base, headers={"cookie": cookie})).status_code == 401
    # A session that ends in another replica is found at the next request.
    made = await preview(service, session_id)
    previews.forget(session_id)
    await service._store.update_session(session_id, state="CLOSING")
    assert (await visit(made.url)).status_code == 410
    await previews.stop()
    closed = [body["reason"] for kind, body in await rows(service, session_id) if kind == "preview_closed"]
    assert closed == ["expired", "session over"]


@needs("bwrap")
async def test_a_request_at_another_replica_gets_the_name_of_the_right_one(
    service: ServiceReplica, visit: Visit
) -> None:
    made = await preview(service, await opened(service))
    cookie = await cookie_of(visit, made.url)
    service._manager.replica, right = "the other one", service._manager.replica
    previews = service._previews
    assert previews is not None
    previews._by_ticket.clear()
    previews._by_cookie.clear()
    for reply in (await visit(made.url), await visit(without_ticket(made.url), headers={"cookie": cookie})):
        assert reply.status_code == 421
        assert f"opened by replica '{right}'" in reply.text
    forged = await visit(f"{without_ticket(made.url)}?holdfast_ticket=x.%3Cscript%3E")
    assert (forged.status_code, "script" in forged.text) == (403, False)
