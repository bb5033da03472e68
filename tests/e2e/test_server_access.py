"""Access to a server: for the owner of its socket and the holder of its token, and for no browser."""

from __future__ import annotations

import http
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

import holdfast
from holdfast.errors import ConnectionLost, HoldfastError, Unauthorized
from tests.support.servers import (
    RunningServer,
    conversation,
    running_server,
    server_command,
    server_environment,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65_534

#: Connects to a socket as another user, sends a line, and prints the answer.
STRANGER = """
import os, socket, sys
os.setgid(65534)
os.setgroups([])
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(60)
try:
    connection.connect(sys.argv[1])
    connection.sendall(b'{"id": 1, "method": "initialize", "params": {"clientName": "stranger"}}\\n')
    print("answer", connection.recv(1000))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def stranger(path: str) -> str:
    command = [sys.executable, "-I", "-S", "-c", STRANGER, path]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def serve_refused(*arguments: str, **environ: str) -> str:
    """Run a server that must not start; return its error."""
    ended = subprocess.run(
        [*server_command([]), *arguments],
        env=server_environment(**environ),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    return ended.stderr


# --- the Unix socket ------------------------------------------------------------------------------


def test_the_socket_and_its_directory_are_the_owners_alone(server: RunningServer) -> None:
    assert stat.S_IMODE(os.stat(server.directory).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(server.socket).st_mode) == 0o600


@needs_root
def test_a_stranger_does_not_get_in_at_the_directory(server: RunningServer) -> None:
    assert stranger(server.socket) == "PermissionError"


@needs_root
async def test_a_stranger_who_got_past_the_permissions_is_refused_by_uid(server: RunningServer) -> None:
    os.chmod(server.directory, 0o711)
    os.chmod(server.socket, 0o666)
    try:
        result = stranger(server.socket)
    finally:
        os.chmod(server.directory, 0o700)
        os.chmod(server.socket, 0o600)
    assert result in ("answer b''", "BrokenPipeError", "ConnectionResetError")
    async with conversation(server.address("unix")) as talk:
        assert (await talk.initialize())["sessionId"]
    # The server logs a refusal before it accepts the next connection.
    assert f"of uid {NOBODY}" in server.log()


@needs_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    location = tmp_path / "theirs"
    location.mkdir(mode=0o700)
    os.chown(location, NOBODY, NOBODY)
    result = serve_refused("--listen", f"unix:{location}/s")
    assert str(location) in result
    assert str(NOBODY) in result


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    location = tmp_path / "open"
    location.mkdir()
    location.chmod(0o777)
    result = serve_refused("--listen", f"unix:{location}/s")
    assert str(location) in result
    assert "0777" in result


def test_a_place_that_is_taken_is_left_alone(server: RunningServer, tmp_path: Path) -> None:
    result = serve_refused("--listen", server.address("unix"))
    assert "already listens" in result
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server.socket)
    (tmp_path / "file").write_text("mine")
    assert "not a socket" in serve_refused("--listen", f"unix:{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_socket_left_by_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with running_server([f"unix:{path}"]) as server, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        assert server.listening == [f"unix:{path}"]
    assert not path.exists()


def test_a_path_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    path = f"{tmp_path}/{'x' * 120}"
    assert "107 bytes" in serve_refused("--listen", f"unix:{path}")


# --- the WebSocket --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text("open-sesame\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def guarded(token_file: str) -> Iterator[RunningServer]:
    with running_server(["ws://127.0.0.1:0"], arguments=["--token-file", token_file]) as server:
        yield server


async def status_of(url: str, **headers: str) -> int | None:
    """The HTTP status with which a WebSocket is refused; None if it is not."""
    try:
        socket = await connect(url, additional_headers=headers, proxy=None)
    except InvalidStatus as error:
        return error.response.status_code
    await socket.close()
    return None


async def test_the_token_opens(guarded: RunningServer) -> None:
    async with holdfast.connect(guarded.address("ws"), token="open-sesame") as box:
        assert (await box.exec(["echo", "in"])).stdout == "in\n"


async def test_no_token_and_a_wrong_one_do_not(guarded: RunningServer) -> None:
    url = guarded.address("ws")
    assert await status_of(url) == http.HTTPStatus.UNAUTHORIZED
    for wrong in ("Bearer wrong", "Bearer ", "Basic open-sesame", "open-sesame", "Bearer open-sesame2"):
        assert await status_of(url, Authorization=wrong) == http.HTTPStatus.UNAUTHORIZED, wrong
    with pytest.raises(Unauthorized, match="401"):
        async with holdfast.connect(url, token="wrong"):
            pass
    assert await status_of(url, Authorization="Bearer open-sesame") is None


async def test_a_browser_is_refused_even_with_the_token(guarded: RunningServer) -> None:
    url = guarded.address("ws")
    for origin in ("http://127.0.0.1", "https://example.org", "null"):
        status = await status_of(url, Origin=origin, Authorization="Bearer open-sesame")
        assert status == http.HTTPStatus.FORBIDDEN


async def test_without_a_token_loopback_wants_no_auth_said() -> None:
    result = serve_refused("--listen", "ws://127.0.0.1:0")
    assert "token" in result
    assert "--no-auth" in result
    with running_server(["ws"]) as server:
        assert await status_of(server.address("ws")) is None
        assert await status_of(server.address("ws"), Origin="http://localhost") == http.HTTPStatus.FORBIDDEN


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "example.invalid"])
def test_listening_beyond_loopback_needs_a_token(host: str) -> None:
    assert "beyond loopback without a token" in serve_refused("--listen", f"ws://{host}:0")
    assert "--no-auth is for loopback only" in serve_refused("--listen", f"ws://{host}:0", "--no-auth")


async def test_beyond_loopback_with_a_token_is_fine(token_file: str) -> None:
    with running_server(["ws://0.0.0.0:0"], arguments=["--token-file", token_file]) as server:
        url = server.address("ws").replace("0.0.0.0", "127.0.0.1")
        assert await status_of(url) == http.HTTPStatus.UNAUTHORIZED
        assert await status_of(url, Authorization="Bearer open-sesame") is None


def test_a_token_file_that_is_no_help_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    assert str(empty) in serve_refused("--listen", "ws://127.0.0.1:0", "--token-file", str(empty))
    missing = tmp_path / "missing"
    assert str(missing) in serve_refused("--listen", "ws://127.0.0.1:0", "--token-file", str(missing))


async def test_a_dead_address_is_told_at_once(tmp_path: Path) -> None:
    for address in (f"unix:{tmp_path}/nobody", "ws://127.0.0.1:1"):
        with pytest.raises(ConnectionLost, match=address):
            async with holdfast.connect(address):
                pass
    with pytest.raises(HoldfastError, match="carrier-pigeon"):
        async with holdfast.connect("carrier-pigeon:coop"):
            pass


async def test_connections_are_bounded() -> None:
    with running_server(["unix", "ws"], settings={"max_connections": 2}) as server:
        async with conversation(server.address("unix")) as one, conversation(server.address("unix")) as two:
            await one.initialize()
            await two.initialize()
            async with conversation(server.address("unix")) as three:
                with pytest.raises(ConnectionError):
                    await three.initialize()
            assert await one.result("ping") == {}
        assert "max_connections" in server.log()
