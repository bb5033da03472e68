"""Pairs of sockets: bytes, half-close, reset and back-pressure in both directions."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from holdfast.transport.relay import PIECE_BYTES, SocketRelay

#: A hang becomes a failure.
PATIENCE = 60


def connected() -> tuple[socket.socket, socket.socket]:
    """A TCP connection: only TCP has resets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=PATIENCE)
        far, _ = listener.accept()
    far.settimeout(PATIENCE)
    return near, far


@contextlib.contextmanager
def relayed() -> Iterator[tuple[socket.socket, socket.socket, SocketRelay]]:
    """Two sockets whose other ends are joined by a relay."""
    client, near = connected()
    server, far = connected()
    for sock in (near, far):
        sock.setblocking(False)
    relay = SocketRelay()
    relay.add(near, far)
    with client, server:
        try:
            yield client, server, relay
        finally:
            relay.close()


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while data := sock.recv(65536):
        parts.append(data)
    return b"".join(parts)


def test_bytes_go_both_ways_and_each_direction_ends_alone() -> None:
    with relayed() as (client, server, relay):
        client.sendall(b"request")
        assert server.recv(100) == b"request"
        client.shutdown(socket.SHUT_WR)
        assert server.recv(100) == b""
        server.sendall(b"an answer after the end of the request")
        server.close()
        assert read_all(client) == b"an answer after the end of the request"
        assert relay.moved >= 4


def test_a_reader_that_stops_blocks_its_writer_and_loses_nothing() -> None:
    data = bytes(range(256)) * 4 * (PIECE_BYTES // 256)
    with relayed() as (client, server, _):
        client.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < 1000 * len(data):
                # A send takes a part of it, and there may be room again.
                sent += client.send(data[sent % 256 :])
        client.settimeout(PATIENCE)
        assert sent < 1000 * len(data), "the writer was never blocked"
        client.shutdown(socket.SHUT_WR)
        received = 0
        while piece := server.recv(PIECE_BYTES):
            assert piece[0] == received % 256
            received += len(piece)
        assert received == sent


def test_a_reset_is_passed_on() -> None:
    with relayed() as (client, server, relay):
        client.sendall(b"x")
        assert server.recv(1) == b"x"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        with pytest.raises(ConnectionResetError):
            server.recv(1)
        assert len(relay) == 0


def test_the_end_of_the_relay_resets_what_is_open() -> None:
    with relayed() as (client, server, relay):
        client.sendall(b"x")
        assert server.recv(1) == b"x"
        relay.close()
        for sock in (client, server):
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
