"""The peer: replies find their calls, errors arrive as their class, and a stray reply is ignored."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from holdfast.errors import (
    HandshakeFailed,
    HoldfastError,
    InvalidRequest,
    ParseError,
    ProcessError,
    TimeoutError,
    UnknownProcess,
    error_classes,
)
from holdfast.wire.codec import Codec
from holdfast.wire.messages import (
    PING,
    PROCESS_CLOSE_STDIN,
    PROCESS_WAIT,
    Empty,
    Encoding,
    ProcessParams,
    WaitParams,
    WaitResult,
)
from holdfast.wire.peer import IncomingNotification, IncomingRequest, Peer


class Caller:
    """A peer that records replies by call."""

    def __init__(self, encoding: Encoding = "json") -> None:
        self.peer = Peer(Codec(encoding))
        self.replies: dict[int, object] = {}

    def call(self) -> int:
        number = 0

        def on_reply(result: object, error: HoldfastError | None) -> None:
            assert number not in self.replies
            self.replies[number] = result if error is None else error

        number, _ = self.peer.call(PROCESS_WAIT, WaitParams("web"), on_reply)
        return number


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_a_call_goes_over_and_its_result_comes_back(encoding: Encoding) -> None:
    caller, server = Caller(encoding), Peer(Codec(encoding))
    number, message = caller.peer.call(PROCESS_WAIT, WaitParams("web", 5), lambda *_: None)
    request = server.receive(message)
    assert isinstance(request, IncomingRequest)
    assert (request.id, request.method) == (number, "process/wait")
    assert server.codec.decode_body(request.params, WaitParams, "params") == WaitParams("web", 5)
    second = caller.call()
    assert caller.peer.receive(server.codec.result(second, WaitResult(False, 3))) is None
    assert caller.replies == {second: WaitResult(False, 3)}


@given(st.lists(st.sampled_from(["call", "reply", "give_up", "stray"]), max_size=30), st.randoms())
def test_replies_in_any_order_find_their_calls(actions: list[str], random: st.random.Random) -> None:  # type: ignore[name-defined]
    caller, server = Caller(), Codec()
    waiting: list[int] = []
    answered: dict[int, object] = {}
    given_up: list[int] = []
    for action in actions:
        if action == "call":
            waiting.append(caller.call())
        elif action == "stray":
            id = random.choice([10**6, "text", None, *given_up])
            assert caller.peer.receive(server.result(id, WaitResult(True))) is None
        elif waiting:
            number = waiting.pop(random.randrange(len(waiting)))
            if action == "reply":
                answered[number] = WaitResult(False, number)
                assert caller.peer.receive(server.result(number, answered[number])) is None
            else:
                given_up.append(number)
                caller.peer.give_up(number)
        assert caller.replies == answered
        assert caller.peer.pending == len(waiting)


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("cls", error_classes().values(), ids=lambda cls: cls.__name__)
def test_an_error_arrives_as_the_class_that_left(cls: type[HoldfastError], encoding: Encoding) -> None:
    caller = Caller(encoding)
    number = caller.call()
    caller.peer.receive(Codec(encoding).failure(number, cls("what was wrong", path="/x")))
    error = caller.replies[number]
    assert type(error) is cls
    assert error.message == "what was wrong"
    assert error.details == {"path": "/x"}


def test_an_error_of_an_unknown_code_keeps_it() -> None:
    caller = Caller()
    number = caller.call()
    caller.peer.receive(b'{"id":%d,"error":{"code":-1,"message":"odd","data":{"code":9,"self":1}}}' % number)
    error = caller.replies[number]
    assert isinstance(error, HoldfastError)
    assert error.details["code"] == -1


@pytest.mark.parametrize("data", [b"null", b"7", b"[1]", b'{"message":"m","self":1,"code":2,"fault":3,"stdout":4}'])
@pytest.mark.parametrize("code", [-32002, -32042, -32603, 5])
def test_whatever_an_error_carries_fails_one_call_and_nothing_else(code: int, data: bytes) -> None:
    caller = Caller()
    number = caller.call()
    caller.peer.receive(b'{"id":%d,"error":{"code":%d,"message":"what","data":%s}}' % (number, code, data))
    error = caller.replies[number]
    assert isinstance(error, HoldfastError)
    assert error.message == "what"


def test_a_result_of_the_wrong_shape_fails_its_call_only() -> None:
    caller = Caller()
    first, second = caller.call(), caller.call()
    assert caller.peer.receive(b'{"id":%d,"result":{"running":"yes"}}' % first) is None
    error = caller.replies.pop(first)
    assert isinstance(error, HandshakeFailed)
    assert "result of process/wait" in error.message
    assert caller.peer.pending == 1
    caller.peer.receive(b'{"id":%d,"result":{"running":true}}' % second)
    assert caller.replies == {second: WaitResult(True)}


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_a_reply_with_half_a_surrogate_pair_fails_its_call_only(encoding: Encoding) -> None:
    caller = Caller(encoding)
    first, second = caller.call(), caller.call()
    if encoding == "json":
        reply = b'{"id":%d,"error":{"code":-32603,"message":"\\ud800"}}' % first
    else:
        reported = {"id": first, "error": {"code": -32603, "message": "XXX"}}
        reply = msgspec.msgpack.encode(reported).replace(b"XXX", b"\xed\xa0\x80")
    assert caller.peer.receive(reply) is None
    error = caller.replies.pop(first)
    assert isinstance(error, HandshakeFailed)
    assert "process/wait" in error.message
    caller.peer.receive(caller.peer.codec.result(second, WaitResult(True)))
    assert caller.replies == {second: WaitResult(True)}


@pytest.mark.parametrize("message", [b'{"id":1,"method":"m","params":"\\ud800"}', b'{"id":1,"result":'])
def test_what_is_no_reply_fails_no_call(message: bytes) -> None:
    caller = Caller()
    assert caller.call() == 1
    with pytest.raises(ParseError):
        caller.peer.receive(message)
    assert caller.replies == {}


def test_a_null_result_is_an_empty_one() -> None:
    seen: list[object] = []
    peer = Peer()
    number, _ = peer.call(PING, Empty(), lambda result, error: seen.append(error or result))
    peer.receive(b'{"id":%d,"result":null}' % number)
    assert seen == [Empty()]


def test_requests_and_notices_are_told_apart() -> None:
    peer = Peer()
    assert isinstance(peer.receive(b'{"method":"initialized"}'), IncomingNotification)
    request = peer.receive(b'{"method":"m","id":null}')
    assert isinstance(request, IncomingRequest)
    assert request.id is None


@pytest.mark.parametrize("message", [b"{}", b'{"id":1}', b'{"result":1}', b"[]", b"7", b'{"id":1.5,"method":"m"}'])
def test_what_is_neither_is_an_invalid_request(message: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Peer().receive(message)


def test_what_is_not_json_is_a_parse_error() -> None:
    with pytest.raises(ParseError):
        Peer().receive(b"GET / HTTP/1.1")


def test_a_call_that_cannot_be_encoded_is_not_pending() -> None:
    peer = Peer(Codec("msgpack"))
    with pytest.raises(TypeError):
        peer.call(PROCESS_CLOSE_STDIN, ProcessParams(object()), lambda *_: None)  # type: ignore[arg-type]
    assert peer.pending == 0


def test_a_timeout_is_pythons_own_too() -> None:
    assert issubclass(TimeoutError, ProcessError)
    caller = Caller()
    number = caller.call()
    caller.peer.receive(Codec().failure(number, TimeoutError("took too long", stdout="so far")))
    error = caller.replies[number]
    assert isinstance(error, TimeoutError)
    assert error.stdout == "so far"
    assert not isinstance(error, UnknownProcess)
