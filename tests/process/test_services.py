"""Services of the host, called by programs at the same server: answers in pieces, isolation, limits, and breaks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest

import holdfast
import holdfast.sync
from holdfast.client.connection.connection import ClientConnection
from holdfast.client.dial import open_connection
from holdfast.client.host_call import Handler, HostService, call_service
from holdfast.errors import (
    ConnectionLost,
    InternalError,
    InvalidParams,
    InvalidRequest,
    LimitReached,
    StdinClosed,
    UnknownService,
)
from holdfast.wire import host_call_messages as h
from holdfast.wire.host_call_keys import PING, instance_of
from tests.support.servers import Conversation, RunningServer, conversation, running_server
from tests.support.signalling import send_signal

KEY = "a-key-that-nobody-guesses"


class Host:
    """A handler that answers with the request, and streams as the test lets it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes]] = []
        self.called = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.made = 0
        #: The stream was left, at its end or before.
        self.closed = asyncio.Event()

    async def __call__(self, method: str, body: bytes) -> bytes | AsyncIterator[bytes]:
        self.calls.append((method, body))
        self.called.set()
        if method == "wait":
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        elif method == "stream":
            return self._stream(int(body))
        elif method == "break":
            return self._break()
        elif method == "refuse":
            raise StdinClosed("not like this")
        elif method == "bug":
            raise ValueError("a secret")
        return method.encode() + b":" + body

    async def _stream(self, count: int) -> AsyncIterator[bytes]:
        try:
            for number in range(count):
                self.made += 1
                yield b"%d\n" % number + b"x" * 65_536 * (count == 1000)
        finally:
            self.closed.set()

    async def _break(self) -> AsyncIterator[bytes]:
        yield b"some"
        raise StdinClosed("no more")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One for all tests that need no settings of their own and leave it running."""
    with running_server() as running:
        yield running


@asynccontextmanager
async def offering(server: RunningServer, handler: Handler) -> AsyncIterator[HostService]:
    async with holdfast.connect(server.address("unix")) as box, box.offer("model", handler) as service:
        yield service


@asynccontextmanager
async def caller_at(server: RunningServer) -> AsyncIterator[ClientConnection]:
    connection = await open_connection(server.address("unix"), reconnect_deadline=0)
    try:
        yield connection
    finally:
        await connection.aclose()


async def ask(connection: ClientConnection, service: HostService, method: str, body: bytes = b"") -> list[bytes]:
    async with aclosing(call_service(connection, service.name, service.instance, method, body)) as pieces:
        return [piece async for piece in pieces]


async def test_answers_come_whole_in_pieces_and_as_errors(server: RunningServer) -> None:
    host = Host()
    async with offering(server, host) as service, caller_at(server) as caller:
        assert await ask(caller, service, "echo", b"\x00\xff") == [b"echo:\x00\xff"]
        assert await ask(caller, service, "stream", b"500") == [b"%d\n" % number for number in range(500)]
        with pytest.raises(StdinClosed, match="not like this"):
            await ask(caller, service, "refuse")
        with pytest.raises(InternalError, match="ValueError") as caught:
            await ask(caller, service, "bug")
        assert "secret" not in str(caught.value)
        broken = call_service(caller, "model", service.instance, "break", b"")
        assert await anext(broken) == b"some"
        with pytest.raises(StdinClosed, match="no more"):
            await anext(broken)
        large = await ask(caller, service, "echo", b"x" * 5_000_000)
        assert b"".join(large) == b"echo:" + b"x" * 5_000_000
        assert len(large) > 1


async def test_a_service_tells_that_its_host_is_there_without_asking_the_handler(server: RunningServer) -> None:
    host = Host()
    async with offering(server, host) as service, caller_at(server) as caller:
        assert await ask(caller, service, PING) == []
    assert host.calls == []


async def test_many_calls_at_once_get_each_its_own_answer(server: RunningServer) -> None:
    async with offering(server, Host()) as service, caller_at(server) as caller:
        answers = await asyncio.gather(*(ask(caller, service, "echo", b"%d" % n) for n in range(300)))
        assert answers == [[b"echo:%d" % n] for n in range(300)]


@pytest.mark.parametrize("way", ["leave", "cancel", "disconnect"])
async def test_a_caller_that_goes_cancels_the_handler(server: RunningServer, way: str) -> None:
    host = Host()
    async with offering(server, host) as service:
        connection = await open_connection(server.address("unix"), reconnect_deadline=0)
        if way == "leave":
            async with aclosing(call_service(connection, "model", service.instance, "stream", b"1000")) as pieces:
                await anext(pieces)
            await host.closed.wait()
            assert host.made < 1000
        else:
            task = asyncio.create_task(ask(connection, service, "wait"))
            await host.called.wait()
            if way == "cancel":
                task.cancel()
            else:
                await connection.aclose()
            await host.cancelled.wait()
            with contextlib.suppress(asyncio.CancelledError, ConnectionLost):
                await task
        await connection.aclose()


async def test_a_call_that_is_called_off_at_once_never_reaches_the_handler(server: RunningServer) -> None:
    host = Host()
    async with (
        offering(server, host) as service,
        caller_at(server) as caller,
        conversation(server.address("unix")) as talk,
    ):
        await talk.initialize(clientName="test")
        params = {"service": "model", "instance": service.instance, "method": "wait", "waitMs": 60_000}
        call = json.dumps({"id": 7, "method": "service/call", "params": params})
        cancel = json.dumps({"method": "request/cancel", "params": {"id": 7}})
        # In one write, so that the server has both before it notifies the host of either.
        await talk.line.write(f"{call}\n{cancel}".encode())
        assert await talk.result("ping") == {}
        assert await ask(caller, service, "echo") == [b"echo:"]
    assert host.calls == [("echo", b"")]


async def test_a_slow_caller_stops_the_host_and_others_go_on() -> None:
    host = Host()
    with running_server(settings={"service_answer_bytes": 1_000_000}) as server:
        await stall_and_go_on(server, host)


async def stall_and_go_on(server: RunningServer, host: Host) -> None:
    async with offering(server, host) as service, caller_at(server) as caller:
        params = h.HostCallParams("model", service.instance, "stream", b"1000", call_id="c" * 16)
        await caller.call(h.HOST_CALL, params)
        made = -1
        while made != host.made or not made:
            # Each is a round trip through host and server, in which the stream could go on.
            made = host.made
            for _ in range(5):
                assert await ask(caller, service, "echo") == [b"echo:"]
        assert made < 100
        received = 0
        got = await caller.call(h.HOST_RECEIVE, h.HostReceiveParams("c" * 16, 0, 60_000))
        while True:
            received += sum(map(len, got.pieces))
            if got.ended:
                break
            got = await caller.call(h.HOST_RECEIVE, h.HostReceiveParams("c" * 16, got.seq, 60_000))
        assert received == sum(len(b"%d\n" % n) + 65_536 for n in range(1000))


async def test_a_slow_host_is_waited_for(server: RunningServer) -> None:
    host = Host()
    async with offering(server, host) as service, caller_at(server) as caller:
        params = h.HostCallParams("model", service.instance, "wait", wait_ms=1, call_id="c" * 16)
        got = await caller.call(h.HOST_CALL, params)
        assert (got.pieces, got.ended) == ((), False)
        got = await caller.call(h.HOST_RECEIVE, h.HostReceiveParams("c" * 16, 0, 1))
        assert (got.pieces, got.ended) == ((), False)
        host.go_on.set()
        got = await caller.call(h.HOST_RECEIVE, h.HostReceiveParams("c" * 16, 0, 60_000))
        assert (got.pieces, got.ended) == ((b"wait:",), True)


async def test_limits_refuse_and_let_go() -> None:
    host = Host()
    limits = {"max_service_calls": 2, "max_service_bytes": 1000, "max_pending_requests": 8}
    with running_server(settings=limits) as server:
        await reach_each_limit(server, host)


async def reach_each_limit(server: RunningServer, host: Host) -> None:
    async with offering(server, host) as service, caller_at(server) as caller:
        with pytest.raises(LimitReached, match="max_service_bytes is 1000"):
            await ask(caller, service, "echo", b"x" * 1001)
        waiting = [asyncio.create_task(ask(caller, service, "wait")) for _ in range(2)]
        while len(host.calls) < 2:
            await host.called.wait()
            host.called.clear()
        with pytest.raises(LimitReached, match="max_service_calls"):
            await ask(caller, service, "echo")
        host.go_on.set()
        assert await asyncio.gather(*waiting) == [[b"wait:"]] * 2
        for _ in range(5):
            assert await ask(caller, service, "echo", b"x" * 900) == [b"echo:" + b"x" * 900]
        # Requests that were called off are not pending, nor are their calls.
        for _ in range(10):
            params = h.HostCallParams("model", service.instance, "wait", wait_ms=60_000)
            caller.give_up(caller.begin(h.HOST_CALL, params))
        assert await ask(caller, service, "echo") == [b"echo:"]


async def test_calls_wait_for_a_host_that_is_away_and_those_who_leave_are_forgotten() -> None:
    with running_server(settings={"max_service_bytes": 1000}) as server:
        async with conversation(server.address("unix")) as host, conversation(server.address("unix")) as caller:
            await host.initialize(clientName="host")
            await caller.initialize(clientName="caller")
            offered = await host.result("service/offer", service="model", key=KEY)
            body = base64.b64encode(b"x" * 900).decode()
            named = {"service": "model", "instance": instance_of("model", KEY), "method": "m", "body": body}
            for number in range(5):
                await caller.result("service/call", **named, callId=f"{number:016}")
                assert await caller.result("service/cancel", callId=f"{number:016}") == {}
            await caller.result("service/call", **named, callId="the-one-that-stays")
            reported = await host.result("service/offer", service="model", key=KEY, epoch=offered["epoch"])
            assert [(event["kind"], event["callId"]) for event in reported["events"]] == [
                ("called", "the-one-that-stays")
            ]
            await caller.result("service/cancel", callId="the-one-that-stays")
            seq = reported["events"][-1]["seq"]
            reported = await host.result(
                "service/offer", service="model", key=KEY, epoch=offered["epoch"], afterSeq=seq, waitMs=60_000
            )
            assert [event["kind"] for event in reported["events"]] == ["cancelled"]
            answered = await host.result("service/answer", callId="the-one-that-stays", key=KEY, seq=1, data="")
            assert answered == {"wanted": False}


async def raises(talk: Conversation, code: int, method: str, /, **params: object) -> None:
    assert (await talk.error(method, **params))[0] == code


async def test_nobody_answers_or_reads_what_is_anothers(server: RunningServer) -> None:
    async with (
        conversation(server.address("unix")) as host,
        conversation(server.address("unix")) as caller,
        conversation(server.address("unix")) as thief,
    ):
        for talk in (host, caller, thief):
            await talk.initialize(clientName="test")
        await host.result("service/offer", service="model", key=KEY)
        instance = instance_of("model", KEY)
        other = instance_of("model", "another-key-that-nobody-guesses")
        called = await caller.result("service/call", service="model", instance=instance, method="m")
        call_id = called["callId"]
        unknown, params = UnknownService.code, InvalidParams.code
        # A caller without the instance, or with that of another service.
        await raises(thief, unknown, "service/call", service="model", instance=other, method="m")
        await raises(thief, unknown, "service/call", service="models", instance=instance, method="m")
        # A caller with the instance is no host: the key cannot be had from it.
        await raises(thief, unknown, "service/answer", callId=call_id, key=instance, seq=1, data="")
        await thief.result("service/offer", service="model", key=instance)
        await raises(thief, unknown, "service/answer", callId=call_id, key=instance, seq=1, data="")
        assert await thief.result("service/withdraw", service="model", key="another-key-nobody-has") == {}
        # Another's call cannot be read, called off or taken over.
        await raises(thief, unknown, "service/receive", callId=call_id)
        assert await thief.result("service/cancel", callId=call_id) == {}
        await raises(thief, params, "service/call", service="model", instance=instance, method="m", callId=call_id)
        # Names that try to be paths.
        for name in ("../model", "a/b", "..", ".hidden", "", "a\n", "x" * 65, "model\u0000"):
            await raises(thief, params, "service/call", service=name, instance=instance, method="m")
            await raises(thief, params, "service/offer", service=name, key=KEY)
        for bad in ("", "..", "../" * 11, "A" * 32, "0" * 31):
            await raises(thief, params, "service/call", service="model", instance=bad, method="m")
        for bad in ("short", "../../../../../../etc", "x" * 129):
            await raises(thief, params, "service/offer", service="model", key=bad)
        for bad in ("short", "../../../../etc/passwd", "x" * 65):
            await raises(thief, params, "service/call", service="model", instance=instance, method="m", callId=bad)
        # All of that changed nothing.
        data = base64.b64encode(b"right").decode()
        assert await host.result("service/answer", callId=call_id, key=KEY, seq=1, data=data, end=True) == {
            "wanted": True
        }
        got = await caller.result("service/receive", callId=call_id, waitMs=60_000)
        assert (got["pieces"], got["ended"]) == ([data], True)


async def test_pieces_are_taken_once_and_in_order(server: RunningServer) -> None:
    async with conversation(server.address("unix")) as host, conversation(server.address("unix")) as caller:
        await host.initialize(clientName="host")
        await caller.initialize(clientName="caller")
        await host.result("service/offer", service="model", key=KEY)
        instance = instance_of("model", KEY)
        id = (await caller.result("service/call", service="model", instance=instance, method="m"))["callId"]
        answer = {"callId": id, "key": KEY}
        await host.result("service/answer", **answer, seq=1, data="MQ==")
        await host.result("service/answer", **answer, seq=1, data="MQ==")
        await raises(host, InvalidRequest.code, "service/answer", **answer, seq=3, data="Mw==")
        await host.result("service/answer", **answer, seq=2, data="Mg==")
        # Until it is acknowledged it is sent again.
        for _ in range(2):
            got = await caller.result("service/receive", callId=id)
            assert (got["seq"], got["pieces"]) == (2, ["MQ==", "Mg=="])
        for _ in range(2):
            await host.result("service/answer", **answer, seq=3, data="Mw==", more=["NA==", "NQ=="])
        await host.result("service/answer", **answer, seq=6, error={"code": StdinClosed.code, "message": "so"})
        got = await caller.result("service/receive", callId=id, afterSeq=1)
        assert (got["seq"], got["pieces"]) == (5, ["Mg==", "Mw==", "NA==", "NQ=="])
        assert await caller.error("service/receive", callId=id, afterSeq=5) == (StdinClosed.code, "so")
        await raises(caller, UnknownService.code, "service/receive", callId=id, afterSeq=5)


async def test_a_host_that_is_gone_fails_its_calls() -> None:
    with running_server(settings={"detached_session_seconds": 0.05}) as server:
        async with caller_at(server) as caller:
            async with holdfast.connect(server.address("unix")) as box, box.offer("model", Host()) as withdrawn:
                waiting = asyncio.create_task(ask(caller, withdrawn, "wait"))
                await ask(caller, withdrawn, "echo")
            with pytest.raises(ConnectionLost, match="gone"):
                await waiting
            with pytest.raises(UnknownService):
                await ask(caller, withdrawn, "echo")
            async with conversation(server.address("unix")) as host:
                await host.initialize(clientName="host")
                await host.result("service/offer", service="model", key=KEY)
                call = h.HostCallParams("model", instance_of("model", KEY), "m", wait_ms=60_000)
                left = caller.begin(h.HOST_CALL, call)
            with pytest.raises(ConnectionLost, match="gone"):
                await caller.reply(left)


async def test_a_server_that_is_restarted_is_offered_the_service_anew() -> None:
    host = Host()
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box, box.offer("model", host) as service:
            async with caller_at(server) as caller:
                waiting = asyncio.create_task(ask(caller, service, "wait"))
                await host.called.wait()
                send_signal(server.pid, signal.SIGKILL)
                with pytest.raises(ConnectionLost):
                    await waiting
            # A handler gets a message that its caller is gone.
            await host.cancelled.wait()
            server.pid = (await box.status()).pid
            async with caller_at(server) as caller:
                assert await ask(caller, service, "echo", b"again") == [b"echo:again"]


def test_blocking_code_offers_services_too(server: RunningServer) -> None:
    def handler(method: str, body: bytes) -> bytes | Iterator[bytes]:
        return iter([b"1\n", b"2\n"]) if method == "stream" else method.encode() + b":" + body

    with (
        holdfast.sync.connect(server.address("unix")) as box,
        box.offer("tool", handler) as service,
    ):
        call = [sys.executable, "-m", "holdfast", "call", "--instance", service.instance, service.name]
        assert box.exec([*call, "echo", "x"]).stdout == "echo:x"
        assert box.exec([*call, "stream"]).stdout == "1\n2\n"


async def test_a_handler_that_never_ends_does_not_keep_the_block_from_ending(server: RunningServer) -> None:
    host = Host()
    async with offering(server, host) as service, caller_at(server) as caller:
        waiting = asyncio.create_task(ask(caller, service, "wait"))
        await host.called.wait()
        await service.aclose()
        assert host.cancelled.is_set()
        with pytest.raises(ConnectionLost):
            await waiting
