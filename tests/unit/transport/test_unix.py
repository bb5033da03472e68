"""Permissions to listen and to connect, and the files that are left behind."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from pathlib import Path

import pytest

from holdfast.errors import ConnectionLost, Forbidden, InvalidParams
from holdfast.transport import unix
from holdfast.wire.framing import Oversized


class Echo:
    """Answers each message with itself."""

    def __init__(self, sock: socket.socket) -> None:
        from holdfast.transport.stream import from_socket

        self.channel = from_socket(sock, self, description="echo")

    def message_received(self, message: bytes | Oversized) -> None:
        assert not isinstance(message, Oversized)
        self.channel.send(message)

    def connection_lost(self, error: Exception | None) -> None:
        pass


class Client:
    def __init__(self) -> None:
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def message_received(self, message: bytes | Oversized) -> None:
        assert not isinstance(message, Oversized)
        self.message.set_result(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)


def accept(sock: socket.socket) -> None:
    Echo(sock)


async def test_a_conversation(tmp_path: Path) -> None:
    path = str(tmp_path / "private" / "s.sock")
    listener = unix.listen(path, accept)
    assert stat.S_IMODE(os.stat(tmp_path / "private").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    client = Client()
    channel = await unix.dial(path, client)
    channel.send(b"hello")
    assert await client.message == b"hello"
    channel.close()
    assert await client.lost is None
    listener.close()
    assert os.listdir(tmp_path / "private") == []


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match="No such file"):
        await unix.dial(str(tmp_path / "none"), Client())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
async def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(Forbidden, match=f"{mode:04o}"):
        unix.listen(str(directory / "s"), accept)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, 12345)
    with pytest.raises(Forbidden, match="uid 12345"):
        unix.listen(str(directory / "s"), accept)


async def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    listener = unix.listen(path, accept)
    channel = await unix.dial(path, Client())
    channel.close()
    listener.close()


async def test_a_live_server_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = unix.listen(path, accept)
    with pytest.raises(InvalidParams, match="already listens"):
        unix.listen(path, accept)
    channel = await unix.dial(path, Client())
    channel.close()
    first.close()


async def test_a_plain_file_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(InvalidParams, match="not a socket"):
        unix.listen(str(tmp_path / "s"), accept)
    assert (tmp_path / "s").read_text() == "precious"


async def test_a_path_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match="107"):
        unix.listen(str(tmp_path / ("x" * 120)), accept)


async def test_closing_leaves_the_socket_of_a_successor(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = unix.listen(path, accept)
    os.unlink(path)
    second = unix.listen(path, accept)
    first.close()
    assert os.listdir(tmp_path) == ["s"]
    second.close()
    assert os.listdir(tmp_path) == []


async def test_another_users_process_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    path = str(tmp_path / "s")
    accepted: list[socket.socket] = []
    listener = unix.listen(path, accepted.append, refused=refused.append)
    monkeypatch.setattr(unix, "peer_of", lambda sock: (4242, 12345))
    client = Client()
    await unix.dial(path, client)
    await client.lost
    assert accepted == []
    assert refused == [f"unix:{path}: refused process 4242 of uid 12345"]
    listener.close()


async def test_the_kernel_names_the_peer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert unix.peer_of(ours) == (os.getpid(), os.geteuid())


async def test_running_out_of_descriptors_is_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "s")
    listener = unix.listen(path, accept)
    real = listener._socket

    class Exhausted:
        failures = 1

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

        def fileno(self) -> int:
            return real.fileno()

        def close(self) -> None:
            real.close()

    monkeypatch.setattr(listener, "_socket", Exhausted())
    monkeypatch.setattr(unix, "EXHAUSTED_PAUSE_SECONDS", 0.0)
    client = Client()
    with caplog.at_level(logging.ERROR):
        channel = await unix.dial(path, client)
        channel.send(b"late")
        assert await client.message == b"late"
    assert "Too many open files" in caplog.text
    channel.close()
    listener.close()
