"""The server itself over bwrap: its kill, its ports, its tokens, its limits, and templates."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import AsyncSandbox, BuildException, NotEnoughSpaceException, Sandbox, Template
from e2b.sandbox_sync.commands.command import Commands
from e2b.sandbox_sync.commands.pty import Pty
from e2b.sandbox_sync.filesystem.filesystem import Filesystem

from tests.integrations.e2b.server_process import DOMAIN, E2BServer, e2b_server

#: A server in a sandbox: it returns the request, and echoes the first message of a WebSocket.
IN_SANDBOX = r"""
import base64, hashlib, http.server, json, struct, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        if self.headers.get("Upgrade") == "websocket":
            magic = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(magic.encode()).digest()).decode()
            self.wfile.write(b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n")
            self.wfile.write(f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode())
            head = self.rfile.read(6)
            data = bytes(b ^ head[2 + i % 4] for i, b in enumerate(self.rfile.read(head[1] & 127)))
            self.wfile.write(struct.pack("BB", 0x81, len(data) + 5) + b"echo " + data)
            self.rfile.read(1)
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        reply = json.dumps({"path": self.path, "headers": dict(self.headers), "body": body.decode()}).encode()
        self.send_response(203)
        self.send_header("Content-Length", str(len(reply)))
        self.send_header("X-From", "sandbox")
        self.end_headers()
        self.wfile.write(reply)
    do_POST = do_GET
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8123), Handler)
print("listening", flush=True)
server.serve_forever()
"""


#: Public names of `Sandbox` that are no calls of this server: constants and addresses; `beta_pause`, an old
#: name of `pause`; `git`, which is made of commands; the gateway for MCP of E2B's cloud.
NOT_CALLED = {
    *("connection_config", "default_mcp_template", "default_sandbox_timeout", "default_template", "envd_api_url"),
    *("envd_direct_url", "sandbox_domain", "beta_pause", "git", "get_mcp_token", "get_mcp_url", "mcp_port"),
}


def until_deadline(seconds: float = 60.0) -> Iterator[None]:
    """Attempts, as long as the time lasts: a loaded machine needs seconds to end a sandbox."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[E2BServer]:
    with e2b_server() as made:
        yield made


def request(
    server: E2BServer, host: str, path: str, method: str = "GET", body: str = "", **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request(method, path, body or None, {"Host": host, **headers})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_every_public_method_of_the_sdk_has_a_check() -> None:
    checks = Path(__file__).with_name("python_checks.py").read_text() + Path(__file__).read_text()
    for kind in (Sandbox, AsyncSandbox, Commands, Pty, Filesystem):
        public = {name for name in dir(kind) if not name.startswith("_")} - NOT_CALLED
        assert {name for name in public if not re.search(rf"\b{name}\b", checks)} == set()


def test_a_client_goes_on_after_the_server_was_killed_in_the_middle_of_a_stream() -> None:
    with e2b_server() as server:
        box = Sandbox.create(timeout=600)
        script = "for n in 1 2 3; do echo line $n; done; read go; for n in 4 5 6; do echo line $n; done; sleep 600"
        handle = box.commands.run(script, background=True, stdin=True, timeout=0)
        stream = iter(handle)
        assert next(stream)[0].startswith("line 1\n")

        server.kill()
        with pytest.raises(Exception, match=r".*"):
            list(stream)
        server.start()

        again = box.commands.connect(handle.pid, timeout=0)
        box.commands.send_stdin(handle.pid, "go\n")
        printed = ""
        for out, _, _ in again:
            printed += out or ""
            if printed.endswith("line 6\n"):
                break
        assert printed == "".join(f"line {n}\n" for n in range(1, 7))
        assert box.commands.kill(handle.pid) is True
        assert [each.sandbox_id for each in Sandbox.list().next_items()] == [box.sandbox_id]


def test_a_port_of_a_sandbox_is_reachable_by_its_host_name(server: E2BServer) -> None:
    box = Sandbox.create()
    box.files.write("/tmp/server.py", IN_SANDBOX)
    handle = box.commands.run("python3 /tmp/server.py", background=True, timeout=0)
    assert next(iter(handle))[0] == "listening\n"
    host = box.get_host(8123)
    assert host == f"8123-{box.sandbox_id}.{DOMAIN}"

    status, text = request(server, host, "/path?query=1", "POST", "body", **{"X-Access-Token": "secret"})
    seen = json.loads(text)
    assert (status, seen["path"], seen["body"]) == (203, "/path?query=1", "body")
    assert seen["headers"]["host"] == host
    assert "x-access-token" not in {name.lower() for name in seen["headers"]}

    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 60) as sock:
        key = base64.b64encode(os.urandom(16)).decode()
        sock.sendall(
            f"GET /socket HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        reader = sock.makefile("rb")
        assert b"101" in reader.readline()
        while reader.readline() != b"\r\n":
            pass
        sock.sendall(struct.pack("BB4s", 0x81, 0x80 | 5, b"\0\0\0\0") + b"hello")
        assert reader.read(12) == b"\x81\x0aecho hello"

    assert request(server, box.get_host(9), "/")[0] == 502
    assert request(server, host.replace(box.sandbox_id, "holdfast-aaaaaaaaaaaaaaaa"), "/")[0] == 502
    box.kill()


def test_a_private_port_needs_the_traffic_token(server: E2BServer) -> None:
    box = Sandbox.create(network={"allow_public_traffic": False})
    host = box.get_host(8123)
    assert request(server, host, "/")[0] == 403
    token = {"E2B-Traffic-Access-Token": box.traffic_access_token or ""}
    assert request(server, host, "/", **token)[0] == 502  # admitted, and nothing listens there
    box.kill()


def test_every_request_needs_its_token(server: E2BServer) -> None:
    box = Sandbox.create()
    for path in ("/files?path=/etc/passwd", "/metrics", "/envs", "/process.Process/List"):
        method = "POST" if "Process" in path else "GET"
        status, text = request(server, f"49983-{box.sandbox_id}.{DOMAIN}", path, method, "{}")
        assert status == 401, path
        assert "passwd" not in text
    assert request(server, "localhost", "/sandboxes")[0] == 401
    assert request(server, "localhost", "/sandboxes", **{"X-API-KEY": "e2b_"})[0] == 401
    assert request(server, f"49999-{box.sandbox_id}.{DOMAIN}", "/contexts")[0] == 401
    assert request(server, f"49983-{box.sandbox_id}.{DOMAIN}", "/health")[0] == 204
    box.kill()


def test_a_sandbox_pauses_at_its_timeout_and_resumes_with_traffic(server: E2BServer) -> None:
    box = Sandbox.create(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.files.write("/tmp/state", "kept")
    box.set_timeout(0)
    # The reaper pauses it; a request to a port resumes it.
    assert any(box.get_info().state.value == "paused" for _ in until_deadline())
    assert box.files.read("/tmp/state") == "kept"
    assert box.get_info().state.value == "running"
    box.kill()


def test_a_sandbox_ends_at_its_timeout(server: E2BServer) -> None:
    box = Sandbox.create(timeout=600)
    handle = box.commands.run("sleep 600", background=True, timeout=0)
    box.set_timeout(0)
    with pytest.raises(Exception, match=r".*"):
        handle.wait()
    assert any(not box.is_running() for _ in until_deadline())
    assert box.kill() is False


def test_a_full_disk_and_a_denied_network_are_those_of_the_sandbox(server: E2BServer) -> None:
    box = Sandbox.create("small")
    with pytest.raises(NotEnoughSpaceException):
        box.files.write("/tmp/large", bytes(32 * 1024 * 1024))
    assert box.files.exists("/tmp/large") is False
    box.kill()

    devices = "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '"
    denied = Sandbox.create("open", allow_internet_access=False)
    assert denied.commands.run(devices).stdout == "lo\n"
    assert denied.get_info().allow_internet_access is False
    denied.kill()
    filtered = Sandbox.create("open", network={"deny_out": ["0.0.0.0/0"], "allow_out": ["example.com"]})
    assert filtered.commands.run(devices).stdout == "lo\n"
    assert "http" in filtered.commands.run("echo $https_proxy").stdout
    network = filtered.get_info().network
    assert network is not None
    assert network["allow_out"] == ["example.com"]
    filtered.kill()


def test_a_template_is_built_from_steps_and_files(server: E2BServer, tmp_path: Path) -> None:
    (tmp_path / "app" / "below").mkdir(parents=True)
    (tmp_path / "app" / "below" / "data").write_text("copied")
    (tmp_path / "single.txt").write_text("one file")
    template = (
        Template(file_context_path=str(tmp_path))
        .from_base_image()
        .set_envs({"BUILT": "yes"})
        .set_workdir("/srv/work")
        .copy("app", "/srv/app")
        .copy("single.txt", "renamed.txt", mode=0o600)
        .run_cmd("pwd > where; echo $BUILT >> where")
    )
    logs: list[str] = []
    Template.build(template, "with-files", on_build_logs=lambda entry: logs.append(entry.message))
    assert any("RUN" in line for line in logs)
    assert Template.exists("with-files") is True
    box = Sandbox.create("with-files")
    assert box.commands.run("cat where; echo $BUILT; pwd").stdout == "/srv/work\nyes\nyes\n/srv/work\n"
    assert box.files.read("/srv/app/below/data") == "copied"
    assert box.files.get_info("/srv/work/renamed.txt").mode == 0o600
    box.kill()

    with pytest.raises(BuildException, match="exit code 9"):
        Template.build(Template().from_base_image().run_cmd("exit 9"), "fails")
    with pytest.raises(BuildException, match=r"engine bwrap: from_image\('debian:12'\)"):
        Template.build(Template().from_image("debian:12"), "image")
    with pytest.raises(BuildException, match="engine bwrap: start and ready commands"):
        Template.build(Template().from_base_image().set_start_cmd("sleep 1", "true"), "starts")
    assert Template.exists("fails") is False


def test_the_first_start_makes_a_key_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.integrations.e2b.settings import load_key

    monkeypatch.delenv("HOLDFAST_E2B_API_KEY", raising=False)
    key, path, made = load_key(str(tmp_path))
    assert made
    assert key.startswith("e2b_")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert load_key(str(tmp_path)) == (key, path, False)
    os.chmod(path, 0o644)
    with pytest.raises(PermissionError):
        load_key(str(tmp_path))
