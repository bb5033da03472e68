"""Docker's engine without its client program: which socket, its replies, and the channel on an exec."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from holdfast.errors import ConnectionLost, InvalidParams, SandboxError
from holdfast.sandboxes.containers import Container
from holdfast.sandboxes.docker_api.api import EngineError, Exec, exit_code, start_exec
from holdfast.sandboxes.docker_api.endpoint import engine_socket
from holdfast.sandboxes.docker_api.exec_channel import ExecChannel, _Ending
from holdfast.sandboxes.docker_api.output_frames import NoOutput, OutputFrames
from holdfast.sandboxes.registry import target_at
from holdfast.transport.preamble import Preamble
from tests.unit.transport.test_stream import Frames, Recorder

MIB = 1024 * 1024
#: Turns a hang into a failure.
PATIENCE = 60.0


def frame(data: bytes, stream: int = 1) -> bytes:
    return struct.pack(">BxxxL", stream, len(data)) + data


# --- which socket ------------------------------------------------------------------------------------------------


@pytest.fixture
def listening(tmp_path: Path) -> str:
    """The path of a Unix socket."""
    path = str(tmp_path / "docker.sock")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
    return path


@pytest.mark.parametrize(
    ("variables", "config", "reason"),
    [
        ({}, None, ""),
        ({}, "{}", ""),
        ({"DOCKER_CONTEXT": "default"}, '{"currentContext": "far"}', ""),
        ({}, '{"currentContext": "default"}', ""),
        ({"DOCKER_HOST": "unix://"}, '{"currentContext": "far"}', ""),
        ({"DOCKER_CONTEXT": "far"}, None, "the context far is selected"),
        ({}, '{"currentContext": "far"}', "the context far is selected"),
        ({"DOCKER_HOST": "tcp://far:2376"}, None, "DOCKER_HOST is tcp://far:2376"),
        ({"DOCKER_HOST": "ssh://far"}, None, "DOCKER_HOST is ssh://far"),
        ({"DOCKER_TLS_VERIFY": "1"}, None, "DOCKER_TLS_VERIFY is set"),
        ({"DOCKER_CUSTOM_HEADERS": "a=b"}, None, "DOCKER_CUSTOM_HEADERS is set"),
        ({}, '{"HttpHeaders": {"Meta": "1"}}', "HttpHeaders"),
        ({}, "no JSON", "config.json"),
        ({}, "[]", "config.json"),
    ],
)
def test_the_engines_socket_is_that_of_the_client_program(
    variables: dict[str, str], config: str | None, reason: str, tmp_path: Path, listening: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    found = engine_socket({"DOCKER_CONFIG": str(tmp_path), **variables}, default=listening)
    assert reason in found.reason
    assert (found.path, bool(found.reason)) == (("", True) if reason else (listening, False))


def test_the_configuration_in_the_home_directory(tmp_path: Path, listening: str) -> None:
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text('{"currentContext": "far"}')
    assert "far" in engine_socket({"HOME": str(tmp_path)}, default=listening).reason
    assert engine_socket({"HOME": str(tmp_path), "DOCKER_CONFIG": "/nowhere"}, default=listening).path == listening


def test_a_default_socket_that_is_not_there(tmp_path: Path) -> None:
    variables = {"DOCKER_CONFIG": str(tmp_path)}
    assert "No such file" in engine_socket(variables, default=str(tmp_path / "docker.sock")).reason
    (tmp_path / "file").touch()
    assert "is no socket" in engine_socket(variables, default=str(tmp_path / "file")).reason
    # A socket that is named is used, and its absence is an error.
    assert engine_socket({**variables, "DOCKER_HOST": "unix:///nowhere"}).path == "/nowhere"


def test_via_in_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///somewhere")
    target = target_at("docker:web?via=api")
    assert isinstance(target, Container)
    assert target.via == "api"
    with pytest.raises(InvalidParams, match="docker:web: via=pipe: api or client"):
        target_at("docker:web?via=pipe")
    with pytest.raises(InvalidParams, match="podman:web: via=api: podman has another API"):
        target_at("podman:web?via=api")
    monkeypatch.setenv("DOCKER_HOST", "ssh://far")
    with pytest.raises(InvalidParams, match="docker:web: via=api: DOCKER_HOST is ssh://far, no Unix socket"):
        target_at("docker:web?via=api")


async def test_an_engine_that_moved_behind_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///somewhere")
    target = Container("docker", "web", via="api")
    monkeypatch.setenv("DOCKER_HOST", "ssh://far")
    with pytest.raises(SandboxError, match="docker:web: via=api: DOCKER_HOST is ssh://far"):
        await target.start_channel(["true"], Recorder(), None)


# --- replies of the engine ---------------------------------------------------------------------------------------


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def engine(path: Path, *replies: bytes) -> AsyncIterator[list[bytes]]:
    """Listens in place of an engine, and gives these replies, one for each request; gives the requests."""
    requests: list[bytes] = []
    left = list(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
                requests.append(head + await reader.readexactly(size))
                writer.write(left.pop(0))
                await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(serve, path)
    try:
        async with asyncio.timeout(PATIENCE):
            yield requests
    finally:
        server.close()
        await server.wait_closed()


def reply(body: bytes, status: str = "200 OK", *headers: bytes) -> bytes:
    head = [b"HTTP/1.1 " + status.encode(), b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


PING = reply(b"OK", "200 OK", b"Api-Version: 1.41")
CREATED = reply(b'{"Id": "abc"}', "201 Created")
UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


async def test_an_exec_is_three_requests_on_one_connection(tmp_path: Path) -> None:
    async with engine(tmp_path / "e", PING, CREATED, UPGRADED + frame(b"early")) as requests:
        running = await start_exec(str(tmp_path / "e"), "a b", ["echo", "é"], "me")
        running.connection.close()
        assert (running.id, running.output) == ("abc", frame(b"early"))
        lines = [request.split(b"\r\n")[0] for request in requests]
        assert lines == [
            b"GET /_ping HTTP/1.1",
            b"POST /v1.41/containers/a%20b/exec HTTP/1.1",
            b"POST /v1.41/exec/abc/start HTTP/1.1",
        ]
        assert json.loads(requests[1].partition(b"\r\n\r\n")[2]) == {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Cmd": ["echo", "é"],
            "User": "me",
        }
        assert b"\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n" in requests[2]


async def test_an_engine_that_closes_after_each_reply(tmp_path: Path) -> None:
    """A proxy before the engine may do so."""
    ping = reply(b"OK", "200 OK", b"Api-Version: 1.41", b"Connection: close")
    created = reply(b'{"Id": "abc"}', "201 Created", b"Connection: close")
    async with engine(tmp_path / "e", ping, created, UPGRADED) as requests:
        running = await start_exec(str(tmp_path / "e"), "web", ["true"], None)
        running.connection.close()
        assert [request.split(b" ")[1] for request in requests][1:] == [
            b"/v1.41/containers/web/exec",
            b"/v1.41/exec/abc/start",
        ]


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ([PING, reply(b'{"message": "No such container: web"}', "404 Not Found")], "No such container: web"),
        ([PING, reply(b"proxy error", "502 Bad Gateway")], "proxy error"),
        ([PING, reply(b"", "500 Oops")], "status 500"),
        ([PING, CREATED, reply(b'{"message": "is paused"}', "409 Conflict")], "is paused"),
        ([PING, CREATED, reply(b"{}")], r"did not give its connection to the command \(status 200\)"),
        ([PING, reply(b"no JSON", "201 Created")], "no reply of a Docker engine"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "no reply of a Docker engine"),
        ([PING], "the engine closed the connection|no reply of a Docker engine"),
        ([PING, b"HTTP/1.1 200 OK\r\n\r\n" + bytes(2 * MIB)], "longer than"),
    ],
)
async def test_an_engine_that_refuses(tmp_path: Path, replies: list[bytes], reason: str) -> None:
    async with engine(tmp_path / "e", *replies):
        with pytest.raises(EngineError, match=reason):
            await start_exec(str(tmp_path / "e"), "web", ["true"], None)


async def test_an_engine_that_does_not_listen(tmp_path: Path, listening: str) -> None:
    with pytest.raises(EngineError, match="No such file or directory: does the Docker engine run"):
        await start_exec(str(tmp_path / "nothing"), "web", ["true"], None)
    with pytest.raises(EngineError, match="Connection refused: does the Docker engine run"):
        await start_exec(listening, "web", ["true"], None)


async def test_a_socket_of_another_user(listening: str) -> None:
    os.chmod(listening, 0)
    is_root = os.geteuid() == 0
    if is_root:
        os.chmod(os.path.dirname(listening), 0o755)
        os.seteuid(65534)
    try:
        with pytest.raises(EngineError, match=r"Permission denied: run as root, or .*group of the socket"):
            await start_exec(listening, "web", ["true"], None)
    finally:
        if is_root:
            os.seteuid(0)


async def test_the_exit_code_of_a_command_whose_end_is_not_recorded_yet(tmp_path: Path) -> None:
    states = (b'{"Running": true, "ExitCode": null}', b'{"Running": false, "ExitCode": 127, "ID": "abc"}')
    async with engine(tmp_path / "e", PING, *map(reply, states)):
        assert await exit_code(str(tmp_path / "e"), "abc") == 127
    async with engine(tmp_path / "f", PING, reply(b'{"message": "No such exec instance"}', "404 Not Found")):
        assert await exit_code(str(tmp_path / "f"), "abc") is None
    assert await exit_code(str(tmp_path / "nothing"), "abc") is None


# --- frames of output --------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.binary(max_size=40)), max_size=12),
    st.lists(st.integers(min_value=1, max_value=17), min_size=1),
)
def test_frames_that_are_split_anywhere(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    sent = b"".join(frame(data, stream) for stream, data in frames)
    output = OutputFrames()
    got: dict[int, bytes] = {1: b"", 2: b"", 3: b""}
    turn = 0
    while sent:
        size = cuts[turn % len(cuts)]
        for stream, piece in output.split(memoryview(sent[:size])):
            got[stream] += bytes(piece)
        sent, turn = sent[size:], turn + 1
    assert got == {number: b"".join(data for stream, data in frames if stream == number) for number in got}


def test_bytes_that_are_no_output_of_an_engine() -> None:
    with pytest.raises(NoOutput, match="stream 72"):
        list(OutputFrames().split(memoryview(b"HTTP/1.1")))


# --- the channel -------------------------------------------------------------------------------------------------


class Engine:
    """The engine's end of a channel."""

    def __init__(self, *, output: bytes = b"", report: bytes | None = None) -> None:
        ours, self.socket = socket.socketpair()
        ours.setblocking(False)
        self.socket.setblocking(False)
        self.recorder = Recorder()
        self.preamble = Preamble(self.recorder, name="docker:web", explain=lambda lost: lost, report=report)
        self.channel = ExecChannel(
            Exec("abc", ours, output), _Ending(self.preamble, "/nowhere", "abc"), name="docker:web"
        )
        self.loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.loop.sock_sendall(self.socket, data)

    async def read(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.loop.sock_recv(self.socket, MIB)

    def send_until_full(self, data: bytes) -> int:
        """Bytes that the connection accepts without a reader."""
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += self.socket.send(data)
        return sent


@pytest.fixture
async def peer() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    engine.socket.close()
    engine.channel.close()
    await engine.recorder.until_lost()


async def test_messages_and_errors_on_two_streams(peer: Engine) -> None:
    sent = b"".join([frame(b'{"a"'), frame(b"a warning\n", 2), frame(b': 1}\n{"b": 2}'), frame(b""), frame(b"\n")])
    for byte in sent:
        await peer.send(bytes([byte]))
    await peer.recorder.until_messages(2)
    assert peer.recorder.messages == [b'{"a": 1}', b'{"b": 2}']
    peer.socket.close()
    lost = await peer.recorder.until_lost()
    assert isinstance(lost, ConnectionLost)
    assert str(lost) == "docker:web: the command was cut off: a warning"


@pytest.mark.parametrize("size", [100, 32 * 1024, 3 * MIB + 1])
async def test_large_messages_in_frames_of_any_size(peer: Engine, size: int) -> None:
    await peer.send(frame(b"{}\n"))
    await peer.recorder.until_messages(1)
    peer.channel.use_lengths()
    messages = [os.urandom(size) for _ in range(3)]
    stream = b"".join(len(message).to_bytes(4, "big") + message for message in messages)
    step = 32 * 1024 - 7
    await peer.send(b"".join(frame(stream[at : at + step]) for at in range(0, len(stream), step)))
    await peer.recorder.until_messages(4)
    assert peer.recorder.messages[1:] == messages


async def test_output_that_came_with_the_reply() -> None:
    engine = Engine(output=frame(b"hello\n") + frame(b"rep"), report=b"report")
    await engine.send(frame(b"ort\n") + frame(b"{}\n"))
    async with asyncio.timeout(PATIENCE):
        await engine.preamble.reported
    await engine.recorder.until_messages(1)
    engine.socket.close()
    assert "hello" in str(await engine.recorder.until_lost())


async def test_a_paused_channel_holds_no_output(peer: Engine) -> None:
    peer.channel.pause_reading()
    line = frame(b'{"x": "' + b"x" * 4096 + b'"}\n')
    sent = peer.send_until_full(line)
    for _ in range(3):
        await asyncio.sleep(0)
    assert (peer.recorder.messages, peer.send_until_full(line)) == ([], 0)
    assert sent < 4 * MIB
    peer.channel.resume_reading()
    await peer.recorder.until_messages(sent // len(line))


async def test_input_that_is_not_read_stays_in_its_source(peer: Engine) -> None:
    source = Frames([b"x" * MIB for _ in range(100)])
    peer.channel.set_source(source)
    peer.channel.send(b"control")
    for _ in range(3):
        await asyncio.sleep(0)
    assert source.given < 10
    received = bytearray()
    while b"control" not in received:
        received += await peer.read()
    # At most the frame that was being sent is before it.
    assert len(received) < 10 * MIB


async def test_closing_is_the_end_of_input_and_waits_for_the_command(peer: Engine) -> None:
    peer.channel.send(b"last")
    peer.channel.close()
    assert await peer.read() == b"last\n"
    assert await peer.read() == b""
    # The command may still print; its messages are not read.
    await peer.send(frame(b"{}\n" * 100_000))
    assert (peer.recorder.messages, peer.recorder.lost) == ([], [])
    peer.socket.close()
    assert await peer.recorder.until_lost() is None
    assert peer.recorder.messages == []


async def test_bytes_that_are_no_frames_end_the_channel(peer: Engine) -> None:
    await peer.send(b"HTTP/1.1 500 Internal Server Error\r\n\r\n")
    lost = await peer.recorder.until_lost()
    assert isinstance(lost, ConnectionLost)
    assert "stream 72" in str(lost.__cause__)
