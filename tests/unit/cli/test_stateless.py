"""One request and its reply, against a scripted server: its reply is already in the socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.cli.support import stateless

WELCOME = {"jsonrpc": "2.0", "id": "holdfast-exec/initialize", "result": {"sessionId": "s"}}


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def say(theirs: socket.socket, *messages: dict[str, Any] | bytes) -> None:
    lines = [m if isinstance(m, bytes) else json.dumps(m).encode() for m in messages]
    theirs.sendall(b"".join(line + b"\n" for line in lines))
    theirs.shutdown(socket.SHUT_WR)


def heard(ours: socket.socket, theirs: socket.socket) -> list[bytes]:
    ours.shutdown(socket.SHUT_WR)
    with theirs.makefile("rb") as file:
        return file.read().splitlines()


def test_handshake_and_request_go_out_and_the_reply_comes_back_as_it_is(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    output = {"jsonrpc": "2.0", "method": "process/output", "params": {"chunk": ""}}
    say(theirs, WELCOME, output, b'{"id":7,   "result":{"a":1}}')
    reply = stateless.exchange(ours, b'{"id": 7,\n "method": "ping"\r\n}')
    assert reply is not None
    assert reply.line == b'{"id":7,   "result":{"a":1}}'
    assert not reply.is_error
    lines = heard(ours, theirs)
    assert [json.loads(line)["method"] for line in lines] == ["initialize", "initialized", "ping"]
    assert json.loads(lines[0])["params"] == {"clientName": "holdfast-exec"}


def test_an_error_reply_is_told_apart(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    say(theirs, WELCOME, {"id": 1, "error": {"code": -32601, "message": "no method"}})
    reply = stateless.exchange(ours, b'{"id":1,"method":"fly"}')
    assert reply is not None
    assert reply.is_error


def test_malformed_json_is_forwarded_on_one_line_and_answered(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    say(theirs, WELCOME, {"id": None, "error": {"code": -32700, "message": "malformed"}})
    reply = stateless.exchange(ours, b'{"id": 1,\n oops')
    assert reply is not None
    assert reply.message["error"]["code"] == -32700
    assert heard(ours, theirs)[2:] == [b'{"id": 1,  oops']


def test_a_notification_waits_only_until_it_was_taken(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    say(theirs, WELCOME, {"id": "holdfast-exec/barrier", "result": {}})
    assert stateless.exchange(ours, b'{"method":"process/credit","params":{}}') is None
    methods = [json.loads(line)["method"] for line in heard(ours, theirs)]
    assert methods == ["initialize", "initialized", "process/credit", "ping"]


def test_a_request_to_initialize_is_the_only_one(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    say(theirs, {"id": 5, "result": {"sessionId": "s"}})
    reply = stateless.exchange(ours, b'{"id":5,"method":"initialize","params":{"clientName":"me"}}')
    assert reply is not None
    assert len(heard(ours, theirs)) == 1


def test_a_refused_handshake_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    say(theirs, {"id": "holdfast-exec/initialize", "error": {"code": -32008, "message": "another user"}})
    with pytest.raises(stateless.HandshakeRefused, match="another user"):
        stateless.exchange(ours, b'{"id":1,"method":"ping"}')


def test_a_server_that_goes_first_is_a_connection_error(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    say(theirs, WELCOME)
    with pytest.raises(ConnectionError, match="before it replied"):
        stateless.exchange(ours, b'{"id":1,"method":"ping"}')


def test_a_long_reply_arrives_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * 1024 * 1024)
    text = "x" * 100_000
    say(theirs, WELCOME, {"id": 1, "result": {"text": text}})
    reply = stateless.exchange(ours, b'{"id":1,"method":"ping"}')
    assert reply is not None
    assert reply.message["result"]["text"] == text
