"""`ChannelConnection` and `RemoteExec` against a scripted server at the other end of a wire in memory."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from holdfast.client.connection.channel_connection import ChannelConnection
from holdfast.client.connection.connection import CLEAN_UP_SECONDS, MAX_CLEAN_UPS
from holdfast.client.process import Process
from holdfast.client.remote import RemoteExec
from holdfast.client.sandbox import Sandbox
from holdfast.client.shell import Shell
from holdfast.client.terminal import Terminal
from holdfast.errors import (
    ConnectionLost,
    HandshakeFailed,
    HoldfastError,
    InvalidRequest,
    LimitReached,
    MessageTooLarge,
    StdinClosed,
    Unauthorized,
    UnknownProcess,
)
from holdfast.testing import FakeClock
from holdfast.testing.clock import settle
from holdfast.transport.channel import Channel, Receiver
from holdfast.types import (
    FILE_PIECE_BYTES,
    WRITE_PIECE_BYTES,
    Closed,
    CommandEnded,
    CommandEvent,
    CommandSpec,
    Exited,
    ExitStatus,
    OutputChunk,
    OutputGap,
    ProcessEvent,
    ProcessInfo,
    ProcessSpec,
    ShellStatus,
    TerminalSize,
    TerminalStatus,
)
from holdfast.wire import host_call_messages as h, messages as m
from holdfast.wire.framing import Oversized
from holdfast.wire.peer import IncomingNotification, IncomingRequest, Peer
from holdfast.wire.table import methods
from tests.support.memory_channel import MemoryWire, memory_pair

Notification = tuple[str, Any]

_ENDED = CommandEnded(0, "/", 0.0)


class Log:
    """The output of a process, as the server has it: (seq, stream, offset, data), then exit and close."""

    def __init__(self) -> None:
        self.records: list[tuple[int, str, int, bytes]] = []
        self.offsets = {"stdout": 0, "stderr": 0}
        self.ended = False

    def print(self, data: bytes, stream: str = "stdout") -> None:
        self.records.append((len(self.records) + 1, stream, self.offsets[stream], data))
        self.offsets[stream] += len(data)

    def end(self) -> None:
        self.ended = True


class Reader:
    """A subscription: where it is, and how much it may still send."""

    def __init__(self, process_id: str, seq: int, credit: int | None) -> None:
        self.process_id = process_id
        self.seq = seq
        self.credit = credit


class ServerEnd:
    """One connection at the server."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.peer = Peer()
        self.channel: Channel
        self.readers: dict[str, Reader] = {}
        self.open = True

    def message_received(self, message: bytes | Oversized) -> None:
        assert not isinstance(message, Oversized)
        item = self.peer.receive(message)
        if isinstance(item, IncomingRequest):
            self.server.requests.append((item.method, item.id))
            self.request(item)
        elif isinstance(item, IncomingNotification) and item.method == "process/credit":
            credit = self.peer.codec.decode_body(item.params, m.CreditParams, item.method)
            self.server.credits.append(credit)
            reader = self.readers.get(credit.subscription)
            if reader is not None and reader.credit is not None:
                reader.credit += credit.bytes
            self.channel.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False

    def body(self, item: IncomingRequest, kind: Any) -> Any:
        return self.peer.codec.decode_body(item.params, kind, item.method)

    def answer(self, item: IncomingRequest, result: object) -> None:
        self.channel.send(self.peer.codec.result(item.id, result))

    def refuse(self, item: IncomingRequest, error: HoldfastError) -> None:
        self.channel.send(self.peer.codec.failure(item.id, error))

    def request(self, item: IncomingRequest) -> None:
        server = self.server
        if item.method in server.poison:
            server.wires[-1].cut()
            return
        if item.method in server.once:
            server.silent.add(item.method)
            self.answer(item, server.once.pop(item.method))
            return
        if item.method in server.silent:
            return
        if item.method in server.garbage:
            garbage = server.garbage[item.method]
            self.channel.send(garbage.replace(b"%d", str(item.id).encode()))
            return
        if item.method == "initialize":
            if server.refusal is not None:
                self.refuse(item, server.refusal)
                return
            params = self.body(item, m.InitializeParams)
            server.resumed.append(params.resume_session_id)
            encoding = server.encoding or params.encoding
            self.answer(item, m.InitializeResult("session", encoding, "0", 1, params.resume_session_id is not None))
            if encoding == "msgpack":
                self.peer.codec.encoding = encoding
                self.channel.use_lengths()
        elif item.method == "process/start":
            start = self.body(item, m.StartParams)
            server.starts.append(start.start_id)
            server.logs.setdefault(start.process_id, Log())
            if isinstance(start.subscribe, m.SubscribeSpec):
                spec = start.subscribe
                self.readers[spec.subscription] = Reader(start.process_id, spec.after_seq, spec.window)
            info = ProcessInfo(start.process_id, 7, start.argv, "/", False, True, False, 0.0)
            self.answer(item, m.StartResult(start.process_id, 7, info))
            self.channel.wake()
        elif item.method == "process/subscribe":
            subscribe = self.body(item, m.SubscribeParams)
            server.subscribes.append(subscribe)
            if subscribe.process_id not in server.logs:
                self.refuse(item, UnknownProcess(f"no process {subscribe.process_id!r}"))
                return
            self.readers[subscribe.subscription] = Reader(
                subscribe.process_id, subscribe.after_seq, subscribe.window
            )
            self.answer(item, m.Empty())
            self.channel.wake()
        elif item.method == "process/unsubscribe":
            self.readers.pop(self.body(item, m.UnsubscribeParams).subscription, None)
            self.answer(item, m.Empty())
        elif item.method == "process/write":
            write = self.body(item, m.WriteParams)
            if write.write_id not in server.writes:
                server.writes[write.write_id] = write.chunk
            self.answer(item, m.WriteResult(server.write_status))
        else:
            self.answer(item, m.Empty())

    def next_frame(self) -> bytes | None:
        for id, reader in self.readers.items():
            log = self.server.logs[reader.process_id]
            if reader.seq < len(log.records):
                if reader.credit is not None and reader.credit <= 0:
                    continue
                seq, stream, offset, data = log.records[reader.seq]
                reader.seq = seq
                if seq in self.server.dropped:
                    return self.next_frame()
                if reader.credit is not None:
                    reader.credit -= len(data)
                self.server.sent_bytes += len(data)
                return self.peer.codec.notification(
                    "process/output",
                    m.OutputParams(
                        process_id=reader.process_id,
                        seq=seq,
                        stream=stream,  # type: ignore[arg-type]
                        offset=offset,
                        subscription=id,
                        chunk=data,
                    ),
                )
            if log.ended and reader.seq == len(log.records):
                reader.seq += 1
                exited = m.ExitedParams(3, process_id=reader.process_id, seq=reader.seq, subscription=id)
                return self.peer.codec.notification("process/exited", exited)
            if log.ended and reader.seq == len(log.records) + 1:
                reader.seq += 1
                closed = m.ClosedParams(reader.process_id, reader.seq, id)
                return self.peer.codec.notification("process/closed", closed)
        return None


class FakeServer:
    """Answers by script, and records the requests."""

    def __init__(self) -> None:
        self.logs: dict[str, Log] = {}
        self.requests: list[tuple[str, Any]] = []
        self.resumed: list[str | None] = []
        self.starts: list[str | None] = []
        self.subscribes: list[m.SubscribeParams] = []
        self.writes: dict[str | None, bytes] = {}
        self.credits: list[m.CreditParams] = []
        self.dropped: set[int] = set()
        self.silent: set[str] = set()
        #: Requests that break the connection.
        self.poison: set[str] = set()
        #: Requests answered with these bytes; `%d` in them is the request's id.
        self.garbage: dict[str, bytes] = {}
        #: Answers to the first request of a method; further ones wait.
        self.once: dict[str, object] = {}
        self.refusal: HoldfastError | None = None
        self.encoding: m.Encoding | None = None
        self.write_status: Any = "accepted"
        self.sent_bytes = 0
        self.ends: list[ServerEnd] = []
        self.wires: list[MemoryWire] = []
        self.dials = 0
        self.unreachable: Exception | None = None
        #: Called with each new wire, to arrange for its end.
        self.on_dial: Callable[[MemoryWire], None] = lambda wire: None

    async def dial(self, receiver: Receiver) -> Channel:
        self.dials += 1
        if self.unreachable is not None:
            raise self.unreachable
        end = ServerEnd(self)
        client, channel, wire = memory_pair(receiver, end, capacity=1)
        end.channel = channel
        channel.set_source(end)
        self.ends.append(end)
        self.wires.append(wire)
        self.on_dial(wire)
        return client

    def requested(self, method: str) -> int:
        return sum(name == method for name, _ in self.requests)

    def wake(self) -> None:
        for end in self.ends:
            if end.open:
                end.channel.wake()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def connection(server: FakeServer, clock: FakeClock) -> AsyncIterator[ChannelConnection]:
    connection = ChannelConnection(server.dial, address="memory", clock=clock, rng=random.Random(1))
    yield connection
    await connection.aclose()


async def collect(stream: AsyncIterator[ProcessEvent]) -> list[ProcessEvent]:
    return [event async for event in stream]


# --- the handshake -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_the_server_chooses_the_encoding(
    server: FakeServer, connection: ChannelConnection, encoding: m.Encoding
) -> None:
    server.encoding = encoding
    await connection.open()
    assert await connection.call(m.PING, m.Empty()) == m.Empty()
    assert server.ends[0].peer.codec.encoding == encoding
    assert connection.server is not None
    assert connection.server.encoding == encoding


async def test_a_refused_handshake_is_told_as_it_is_and_not_tried_again(
    server: FakeServer, connection: ChannelConnection
) -> None:
    server.refusal = Unauthorized("a wrong token")
    with pytest.raises(Unauthorized, match="a wrong token"):
        await connection.open()
    assert server.dials == 1


async def test_a_server_that_does_not_answer_initialize(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    server.silent.add("initialize")
    opening = asyncio.create_task(connection.open())
    await clock.advance(9.9)
    assert not opening.done()
    await clock.advance(0.2)
    with pytest.raises(HandshakeFailed, match="initialize"):
        await opening


async def test_an_unreachable_server_is_told_at_once_with_its_address(
    server: FakeServer, connection: ChannelConnection
) -> None:
    server.unreachable = ConnectionRefusedError(111, "Connection refused")
    with pytest.raises(ConnectionLost, match=r"memory: .*Connection refused"):
        await connection.open()


# --- when it breaks ----------------------------------------------------------------------------------------------


async def test_unanswered_calls_are_sent_again_and_answered_once(
    server: FakeServer, connection: ChannelConnection
) -> None:
    await connection.open()
    server.silent.add("process/write")
    api = RemoteExec(connection)
    writing = [asyncio.create_task(api.write("p", b"x" * n, write_id=f"w{n}")) for n in (1, 2)]
    await settle()
    assert server.requested("process/write") == 2
    server.silent.clear()
    server.wires[0].cut()
    await asyncio.gather(*writing)
    assert server.resumed == [None, "session"]
    assert server.writes == {"w1": b"x", "w2": b"xx"}
    assert len({id for name, id in server.requests if name == "process/write"}) == 2


async def test_calls_made_while_it_is_down_wait_for_it(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    await connection.open()
    await connection.call(m.PING, m.Empty())
    server.unreachable = ConnectionRefusedError(111, "refused")
    server.wires[0].cut()
    await settle()
    assert not connection.connected
    call = asyncio.create_task(connection.call(m.PING, m.Empty()))
    await clock.advance(3)
    assert not call.done()
    server.unreachable = None
    await clock.advance(6)
    assert await call == m.Empty()


async def test_waits_between_attempts_double_up_to_a_limit(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    await connection.open()
    await connection.call(m.PING, m.Empty())
    server.unreachable = ConnectionRefusedError(111, "refused")
    server.wires[0].cut()
    await settle()
    waits = []
    for _ in range(10):
        (wait,) = clock.pending
        waits.append(wait)
        await clock.advance(wait)
    longest = [min(5.0, 0.05 * 2**n) for n in range(10)]
    assert all(top / 2 <= wait <= top for wait, top in zip(waits, longest, strict=True))
    assert server.dials == 12


async def test_after_the_deadline_everyone_is_told_the_address_and_the_cause(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    await connection.open()
    server.logs["p"] = Log()
    stream = RemoteExec(connection).events("p")
    server.logs["p"].print(b"kept")
    reading = asyncio.create_task(collect(stream))
    server.silent.add("ping")
    call = asyncio.create_task(connection.call(m.PING, m.Empty()))
    await settle()
    server.unreachable = ConnectionRefusedError(111, "nobody there")
    server.wires[0].cut()
    await clock.advance(54)
    assert not call.done()
    await clock.advance(7)
    for waiting in (call, reading):
        with pytest.raises(ConnectionLost, match=r"memory: .*60 s.*nobody there"):
            await waiting
    with pytest.raises(ConnectionLost, match="nobody there"):
        await connection.call(m.PING, m.Empty())
    with pytest.raises(ConnectionLost, match="nobody there"):
        await collect(RemoteExec(connection).events("p"))


async def test_without_a_deadline_a_break_is_told_at_once(server: FakeServer) -> None:
    connection = ChannelConnection(server.dial, address="memory", reconnect_deadline=0)
    await connection.open()
    server.silent.add("ping")
    call = asyncio.create_task(connection.call(m.PING, m.Empty()))
    await settle()
    server.wires[0].cut()
    with pytest.raises(ConnectionLost, match="cut"):
        await call
    assert server.dials == 1
    await connection.aclose()


async def test_a_refusal_on_the_way_back_is_final(server: FakeServer, connection: ChannelConnection) -> None:
    await connection.open()
    server.silent.add("ping")
    call = asyncio.create_task(connection.call(m.PING, m.Empty()))
    await settle()
    server.refusal = Unauthorized("the token was changed")
    server.wires[0].cut()
    with pytest.raises(Unauthorized, match="the token was changed"):
        await call
    assert server.dials == 2


async def test_a_request_that_breaks_every_channel_does_not_go_on_for_ever(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    await connection.open()
    server.poison.add("environment/info")
    call = asyncio.create_task(connection.call(m.ENVIRONMENT_INFO, m.Empty()))
    await clock.advance(120)
    with pytest.raises(ConnectionLost, match="60 s"):
        await call
    assert server.dials < 40


async def test_a_cancelled_call_is_forgotten_and_not_sent_again(
    server: FakeServer, connection: ChannelConnection
) -> None:
    await connection.open()
    server.silent.add("environment/info")
    call = asyncio.create_task(connection.call(m.ENVIRONMENT_INFO, m.Empty()))
    await settle()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    server.wires[0].cut()
    await connection.call(m.PING, m.Empty())
    assert server.requested("environment/info") == 1
    assert connection._peer.pending == 0


async def test_closing_tells_whoever_waits(server: FakeServer, connection: ChannelConnection) -> None:
    await connection.open()
    server.silent.add("ping")
    call = asyncio.create_task(connection.call(m.PING, m.Empty()))
    await settle()
    await connection.aclose()
    with pytest.raises(ConnectionLost, match="closed"):
        await call
    await settle()
    assert not server.ends[0].open


async def test_a_message_over_the_limit_fails_alone(server: FakeServer) -> None:
    connection = ChannelConnection(server.dial, address="memory", max_message_bytes=1000)
    await connection.open()
    with pytest.raises(MessageTooLarge, match=r"process/write.*1000"):
        await RemoteExec(connection).write("p", b"x" * 2000)
    assert await connection.call(m.PING, m.Empty()) == m.Empty()
    await connection.aclose()


async def test_garbage_breaks_the_channel_and_not_the_call(
    server: FakeServer, connection: ChannelConnection
) -> None:
    await connection.open()
    server.silent.add("ping")
    call = asyncio.create_task(connection.call(m.PING, m.Empty()))
    await settle()
    server.silent.clear()
    server.ends[0].channel.send(b"\xc1\xc1\xc1")
    assert await call == m.Empty()
    assert server.dials == 2


@pytest.mark.parametrize(
    "reply",
    [
        b'{"jsonrpc":"2.0","id":%d,"result":{"os":"\\ud800"}}',
        b'{"jsonrpc":"2.0","id":%d,"error":{"code":-32603,"message":"\\udc80"}}',
        b'{"jsonrpc":"2.0","id":%d,"result":{"os":7}}',
        b'{"jsonrpc":"2.0","id":%d,"result":[]}',
        b'{"jsonrpc":"2.0","id":%d,"error":"no"}',
    ],
)
async def test_an_undecodable_reply_fails_its_call_and_keeps_the_channel(
    server: FakeServer, connection: ChannelConnection, reply: bytes
) -> None:
    server.encoding = "json"
    server.garbage["environment/info"] = reply
    server.silent.add("process/wait")
    await connection.open()
    other = asyncio.create_task(RemoteExec(connection).wait("p"))
    call = asyncio.create_task(connection.call(m.ENVIRONMENT_INFO, m.Empty()))
    await settle()
    assert call.done()
    with pytest.raises(HandshakeFailed, match=r"^memory: the reply to environment/info"):
        await call
    assert not other.done()
    assert server.dials == 1
    other.cancel()
    await asyncio.wait([other])


async def test_a_call_that_is_answered_with_garbage_every_time_ends(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    await connection.open()
    server.garbage["environment/info"] = b"\xc1\xc1\xc1"
    call = asyncio.create_task(connection.call(m.ENVIRONMENT_INFO, m.Empty()))
    await clock.advance(10)
    assert call.done()
    with pytest.raises(HandshakeFailed, match=r"^memory: .*environment/info was sent 3 times"):
        await call
    assert server.dials == 4
    assert await connection.call(m.PING, m.Empty()) == m.Empty()


async def test_a_reader_whose_events_are_garbage_every_time_ends_though_calls_are_answered(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    await connection.open()
    server.logs["p"] = Log()
    server.garbage["process/subscribe"] = b"\xc1\xc1\xc1"
    reading = asyncio.create_task(collect(RemoteExec(connection).events("p")))
    for _ in range(20):
        await connection.call(m.PING, m.Empty())
        await clock.advance(1)
    assert reading.done()
    with pytest.raises(HandshakeFailed, match=r"^memory: .*process 'p' was read 3 times"):
        await reading
    assert server.dials < 10


@pytest.mark.parametrize(
    "last", [b"", b'{"method":"news"}', b'{"id":4711,"result":{}}'], ids=["nothing", "news", "unknown-id"]
)
async def test_a_server_that_closes_after_every_handshake_is_dialled_ever_more_rarely(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock, last: bytes
) -> None:
    server.encoding = "json"
    await connection.open()
    server.silent.add("ping")
    call = asyncio.create_task(connection.call(m.PING, m.Empty()))
    await settle()

    def close_soon(wire: MemoryWire) -> None:
        end = server.ends[-1]

        def close() -> None:
            if last and end.open:
                end.channel.send(last)
            clock.call_later(0.001, wire.cut)

        clock.call_later(0.001, close)

    server.on_dial = close_soon
    server.wires[0].cut()
    await clock.advance(10)
    assert 2 < server.dials < 15
    await clock.advance(60)
    with pytest.raises(ConnectionLost, match=r"^memory: .*60 s"):
        await call


async def test_a_server_that_answers_a_little_and_closes_is_dialled_at_a_bounded_rate(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    log = server.logs["p"] = Log()
    await connection.open()
    reading = asyncio.create_task(collect(RemoteExec(connection).events("p")))
    await settle()

    def print_and_close(wire: MemoryWire) -> None:
        def step() -> None:
            log.print(b"x")
            server.wake()
            clock.call_later(0.001, wire.cut)

        clock.call_later(0.001, step)

    server.on_dial = print_and_close
    server.wires[0].cut()
    await clock.advance(30)
    assert not reading.done()
    assert 30 < server.dials < 100 + 4 * 30
    reading.cancel()
    await asyncio.wait([reading])


# --- keepalive ---------------------------------------------------------------------------------------------------


async def test_an_idle_connection_is_pinged_and_stays(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    await connection.open()
    await clock.advance(100)
    assert 2 <= server.requested("ping") <= 7
    assert server.dials == 1


async def test_two_pings_without_an_answer_are_a_broken_connection(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    await connection.open()
    server.wires[0].hold()
    await clock.advance(44)
    assert server.dials == 1
    await clock.advance(2)
    assert server.dials == 2
    assert connection.connected


# --- readers -----------------------------------------------------------------------------------------------------


async def test_events_in_order_with_exact_gaps(server: FakeServer, connection: ChannelConnection) -> None:
    log = server.logs["p"] = Log()
    for stream, data in (
        ("stdout", b"aa"),
        ("stdout", b"bbb"),
        ("stderr", b"E"),
        ("stdout", b"c"),
        ("stderr", b"F"),
    ):
        log.print(data, stream)
    log.end()
    server.dropped = {2, 3}
    await connection.open()
    assert await collect(RemoteExec(connection).events("p")) == [
        OutputChunk("stdout", 0, b"aa", 1),
        OutputGap("stdout", 2, 3),
        OutputChunk("stdout", 5, b"c", 4),
        OutputGap("stderr", 0, 1),
        OutputChunk("stderr", 1, b"F", 5),
        Exited(6, ExitStatus(3)),
        Closed(7),
    ]
    # From the middle of a stream its earlier output is not known.
    assert await collect(RemoteExec(connection).events("p", after_seq=3)) == [
        OutputChunk("stdout", 5, b"c", 4),
        OutputChunk("stderr", 1, b"F", 5),
        Exited(6, ExitStatus(3)),
        Closed(7),
    ]


async def test_an_unknown_process_fails_its_reader(server: FakeServer, connection: ChannelConnection) -> None:
    await connection.open()
    with pytest.raises(UnknownProcess, match="nobody"):
        await collect(RemoteExec(connection).events("nobody"))


async def test_start_streaming_takes_one_round_trip(server: FakeServer, connection: ChannelConnection) -> None:
    await connection.open()
    log = server.logs["p"] = Log()
    log.print(b"hello")
    log.end()
    info, stream = await RemoteExec(connection).start_streaming(ProcessSpec("p", ("true",)))
    assert info.pid == 7
    assert [type(event) for event in await collect(stream)] == [OutputChunk, Exited, Closed]
    assert [name for name, _ in server.requests] == ["initialize", "process/start"]


@pytest.mark.parametrize("seed", range(40))
async def test_cuts_at_random_places_lose_and_repeat_nothing(server: FakeServer, seed: int) -> None:
    """Every channel breaks after a random number of bytes; what is read in the end is exact."""
    rng = random.Random(seed)
    connection = ChannelConnection(server.dial, address="memory", rng=rng, reconnect_deadline=600)
    await connection.open()
    api = RemoteExec(connection)
    cuts = 60

    def arrange(wire: MemoryWire) -> None:
        nonlocal cuts
        if cuts:
            cuts -= 1
            wire.cut_after(rng.randrange(300, 4000))

    server.on_dial = arrange
    printed = {"stdout": b"", "stderr": b""}
    log = server.logs["p"] = Log()
    for _ in range(200):
        stream = rng.choice(["stdout", "stderr"])
        data = rng.randbytes(rng.randrange(1, 400))
        log.print(data, stream)
        printed[stream] += data
    log.end()
    server.wires[0].cut_after(rng.randrange(0, 2000))
    _, stream_ = await api.start_streaming(ProcessSpec("p", ("x",)), window=rng.choice([500, 5000, 50_000]))
    got = {"stdout": b"", "stderr": b""}
    last = 0
    async for event in stream_:
        assert not isinstance(event, OutputGap)
        assert event.seq == last + 1
        last = event.seq
        if isinstance(event, OutputChunk):
            assert event.offset == len(got[event.stream])
            got[event.stream] += event.data
        if rng.random() < 0.3:
            await settle(2)
        if rng.random() < 0.05:
            await api.write("p", b"input", write_id=f"w{last}")
    assert got == printed
    assert last == 202
    assert len(set(server.starts)) == 1
    assert server.dials > 5
    await connection.aclose()


async def test_a_joined_chunk_that_overlaps_is_cut_to_what_is_new(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    await connection.open()
    log = server.logs["p"] = Log()
    log.print(b"abc")
    stream = RemoteExec(connection).events("p", window=100)
    assert await anext(stream) == OutputChunk("stdout", 0, b"abc", 1)
    end = server.ends[0]
    joined = m.OutputParams(
        process_id="p", seq=3, stream="stdout", offset=0, subscription=stream.id, first_seq=1, chunk=b"abcdef"
    )
    end.channel.send(end.peer.codec.notification("process/output", joined))
    end.channel.send(end.peer.codec.notification("process/output", joined))
    assert await anext(stream) == OutputChunk("stdout", 3, b"def", 3)
    waiting = asyncio.create_task(anext(stream))
    await clock.advance(1)
    # Everything that the server sent is credited, the repeated bytes too: 3, then 6, then 6 that were dropped.
    assert sum(credit.bytes for credit in server.credits) == 15
    waiting.cancel()
    await asyncio.wait([waiting])


# --- credit ------------------------------------------------------------------------------------------------------


async def test_a_reader_that_does_not_read_holds_a_window_and_delays_nobody(
    server: FakeServer, connection: ChannelConnection
) -> None:
    await connection.open()
    for name in ("flood", "quiet"):
        server.logs[name] = Log()
    for _ in range(100):
        server.logs["flood"].print(b"x" * 100)
    api = RemoteExec(connection)
    flood = api.events("flood", window=1000)
    await anext(flood)
    await settle()
    assert server.sent_bytes == 1000
    server.logs["quiet"].print(b"hello")
    quiet = api.events("quiet")
    assert await anext(quiet) == OutputChunk("stdout", 0, b"hello", 1)
    for _ in range(3):
        await anext(flood)
    assert server.credits == []
    await anext(flood)
    await settle()
    assert server.credits == [m.CreditParams(flood.id, 5, 500)]
    assert server.sent_bytes == 1505


async def test_what_is_held_stays_bounded_over_many_breaks(
    server: FakeServer, connection: ChannelConnection
) -> None:
    await connection.open()
    log = server.logs["p"] = Log()
    for _ in range(200):
        log.print(b"x" * 100)
    log.end()
    stream = RemoteExec(connection).events("p", window=1000)
    await anext(stream)
    for _ in range(20):
        server.wires[-1].cut()
        await connection.call(m.PING, m.Empty())
        await settle()
        assert stream._buffered <= 1500
    rest = await collect(stream)
    assert sum(len(event.data) for event in rest if isinstance(event, OutputChunk)) == 199 * 100


async def test_credit_comes_late_for_little_but_it_comes(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock
) -> None:
    await connection.open()
    log = server.logs["p"] = Log()
    log.print(b"x" * 10)
    stream = RemoteExec(connection).events("p", window=1000)
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await settle()
    assert server.credits == []
    await clock.advance(0.05)
    assert server.credits == [m.CreditParams(stream.id, 1, 10)]
    log.print(b"y")
    server.wake()
    assert await waiting == OutputChunk("stdout", 10, b"y", 2)


# --- the end of readers ------------------------------------------------------------------------------------------


async def test_aclose_unsubscribes_and_ends_the_iteration(
    server: FakeServer, connection: ChannelConnection
) -> None:
    await connection.open()
    server.logs["p"] = Log()
    stream = RemoteExec(connection).events("p")
    reading = asyncio.create_task(collect(stream))
    await settle()
    assert len(server.ends[0].readers) == 1
    await stream.aclose()
    assert await reading == []
    await settle()
    assert server.ends[0].readers == {}


async def test_a_reader_that_is_dropped_unsubscribes(server: FakeServer, connection: ChannelConnection) -> None:
    await connection.open()
    server.logs["p"] = Log()
    server.logs["p"].print(b"one")
    async for event in RemoteExec(connection).events("p"):
        assert isinstance(event, OutputChunk)
        break
    gc.collect()
    await settle()
    assert server.ends[0].readers == {}
    assert len(connection.readers) == 0


# --- writing -----------------------------------------------------------------------------------------------------


async def test_large_input_goes_in_ordered_pieces(server: FakeServer, connection: ChannelConnection) -> None:
    await connection.open()
    data = random.Random(0).randbytes(2 * WRITE_PIECE_BYTES + 5)
    await RemoteExec(connection).write("p", data, write_id="w")
    assert list(server.writes) == ["w.0", "w.1", "w.2"]
    assert b"".join(server.writes.values()) == data


@pytest.mark.parametrize(("status", "error"), [("unknownProcess", UnknownProcess), ("stdinClosed", StdinClosed)])
async def test_refused_input_is_an_error(
    server: FakeServer, connection: ChannelConnection, status: str, error: type[HoldfastError]
) -> None:
    await connection.open()
    server.write_status = status
    with pytest.raises(error, match="'p'"):
        await RemoteExec(connection).write("p", b"x")


# --- cancelling while the server is out of reach ------------------------------------------------------------------


def _process(api: RemoteExec) -> Process:
    return Process(api, ProcessInfo("p", 7, ("x",), "/", False, True, False, 0.0))


async def _exec(api: RemoteExec) -> None:
    await Sandbox(api).exec(["sleep", "1000"])


async def _exec_with_input(api: RemoteExec) -> None:
    await Sandbox(api).exec(["cat"], input=b"x" * 3_000_000)


async def _open_shell(api: RemoteExec) -> None:
    await Sandbox(api).shell()


async def _stream(api: RemoteExec) -> None:
    async for _ in Sandbox(api).exec_remote(["sleep", "1000"]):
        pass


async def _stream_in_a_block(api: RemoteExec) -> None:
    async with Sandbox(api).exec_remote(["sleep", "1000"]):
        await asyncio.Event().wait()


async def _shell_run(api: RemoteExec) -> None:
    await Shell(api, ShellStatus("s", "/bin/sh", 7, "idle", "/", 0.0)).run("sleep 1000")


async def _shell_in_a_block(api: RemoteExec) -> None:
    async with Shell(api, ShellStatus("s", "/bin/sh", 7, "idle", "/", 0.0)):
        await asyncio.Event().wait()


def _terminal(api: RemoteExec) -> Terminal:
    status = TerminalStatus("t", 7, ("sh",), "IDLE", TerminalSize(24, 80), "/", 0.0, 0, 0)
    return Terminal(api, status, lambda work: asyncio.get_running_loop().create_task(work))


async def _terminal_run(api: RemoteExec) -> None:
    await _terminal(api).run("sleep 1000")


async def _terminal_in_a_block(api: RemoteExec) -> None:
    async with _terminal(api):
        await asyncio.Event().wait()


async def _output(api: RemoteExec) -> None:
    async for _ in _process(api).output():
        pass


async def _communicate(api: RemoteExec) -> None:
    await _process(api).communicate(b"x" * 3_000_000)


async def _process_in_a_block(api: RemoteExec) -> None:
    async with _process(api):
        await asyncio.Event().wait()


async def _write_file(api: RemoteExec) -> None:
    await Sandbox(api).write_file("/f", b"x" * 3 * FILE_PIECE_BYTES)


async def _read_file(api: RemoteExec) -> None:
    await Sandbox(api).read_file("/f")


async def _offer(api: RemoteExec) -> None:
    async def answer(method: str, body: bytes) -> bytes:
        return b""

    async with Sandbox(api).offer("s", answer):
        await asyncio.Event().wait()


Operation = Callable[[RemoteExec], Coroutine[Any, Any, None]]
#: Each with the request that cleans up behind it, if one must.
OPERATIONS: list[tuple[Operation, str]] = [
    (_exec, "process/terminate"),
    (_exec_with_input, "process/terminate"),
    (_open_shell, "shell/close"),
    (_stream, "process/terminate"),
    (_stream_in_a_block, "process/terminate"),
    (_shell_run, "shell/interrupt"),
    (_shell_in_a_block, "shell/close"),
    (_terminal_run, "terminal/withdraw"),
    (_terminal_in_a_block, "terminal/close"),
    (_output, ""),
    (_communicate, ""),
    (_process_in_a_block, "process/terminate"),
    (_write_file, "file/abandon"),
    (_read_file, ""),
    (_offer, "service/withdraw"),
]
NEVER_ANSWERED = ("shell/open", "shell/run", "terminal/run", "process/write", "file/read", "file/write")


async def _cancelled_out_of_reach(
    server: FakeServer, connection: ChannelConnection, operation: Operation
) -> tuple[asyncio.Task[None], list[dict[str, Any]]]:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    await connection.open()
    server.logs["p"] = Log()
    server.silent.update(name for name in methods() if name.startswith(NEVER_ANSWERED))
    server.once["service/offer"] = h.HostOfferResult("epoch", ())
    task = asyncio.create_task(operation(RemoteExec(connection)))
    await settle()
    assert not task.done()
    server.unreachable = ConnectionRefusedError(111, "refused")
    server.wires[-1].cut()
    await settle()
    assert not connection.connected
    task.cancel()
    await settle()
    return task, logged


@pytest.mark.parametrize(("operation", "request_name"), OPERATIONS, ids=lambda each: getattr(each, "__name__", ""))
async def test_a_cancelled_call_returns_at_once_and_cleans_up_when_the_server_is_back(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock, operation: Operation, request_name: str
) -> None:
    task, logged = await _cancelled_out_of_reach(server, connection, operation)
    assert task.done()
    assert task.cancelled()
    server.unreachable = None
    await clock.advance(10)
    assert connection.connected
    assert not request_name or server.requested(request_name) >= 1
    assert not connection._cleaning
    del task
    gc.collect()
    assert logged == []


@pytest.mark.parametrize(("operation", "request_name"), OPERATIONS, ids=lambda each: getattr(each, "__name__", ""))
async def test_closing_gives_up_clean_ups_of_a_server_that_stays_away(
    server: FakeServer,
    connection: ChannelConnection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: Operation,
    request_name: str,
) -> None:
    monkeypatch.setattr("holdfast.client.connection.connection.CLEAN_UP_SECONDS", 0.01)
    task, logged = await _cancelled_out_of_reach(server, connection, operation)
    assert task.done()
    await connection.aclose()
    assert not request_name or "1 clean-ups of cancelled calls" in caplog.text
    await settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    del task
    gc.collect()
    assert logged == []


@pytest.mark.parametrize(("operation", "request_name"), OPERATIONS, ids=lambda each: getattr(each, "__name__", ""))
async def test_closing_waits_for_clean_ups_of_a_server_that_comes_back(
    server: FakeServer, connection: ChannelConnection, clock: FakeClock, operation: Operation, request_name: str
) -> None:
    await _cancelled_out_of_reach(server, connection, operation)
    closing = asyncio.create_task(connection.aclose())
    await settle()
    server.unreachable = None
    await clock.advance(CLEAN_UP_SECONDS)
    await closing
    assert not request_name or server.requested(request_name) >= 1


async def test_a_cancelled_call_returns_when_the_connection_is_lost_while_it_cleans_up(
    server: FakeServer, connection: ChannelConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await connection.open()
    server.silent.add("process/terminate")
    task = asyncio.create_task(_exec(RemoteExec(connection)))
    await settle()
    task.cancel()
    await settle()
    assert server.requested("process/terminate") == 1
    assert not task.done()
    server.unreachable = ConnectionRefusedError(111, "refused")
    server.wires[-1].cut()
    await settle()
    assert task.done()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert "unreachable" in caught.value.__notes__[0]
    monkeypatch.setattr("holdfast.client.connection.connection.CLEAN_UP_SECONDS", 0.01)
    await connection.aclose()


async def test_no_more_than_so_many_wait_to_be_cleaned_up(
    server: FakeServer, connection: ChannelConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await connection.open()
    server.unreachable = ConnectionRefusedError(111, "refused")
    server.wires[-1].cut()
    await settle()
    for _ in range(MAX_CLEAN_UPS):
        assert not await connection.clean_up(connection.call(m.PING, m.Empty()))
    with pytest.raises(LimitReached, match=r"^memory: .*1000"):
        await connection.clean_up(connection.call(m.PING, m.Empty()))
    monkeypatch.setattr("holdfast.client.connection.connection.CLEAN_UP_SECONDS", 0.01)
    await connection.aclose()


# --- commands in shells ------------------------------------------------------------------------------------------


async def test_a_short_command_opens_no_reader(server: FakeServer, connection: ChannelConnection) -> None:
    await connection.open()
    server.once["shell/run"] = m.ShellRunResult(_ENDED, stdout=b"one\n")
    stream = RemoteExec(connection).run_in_shell("s", CommandSpec("c", "echo one"))
    assert list(connection.readers) == []
    assert [event async for event in stream] == [OutputChunk("stdout", 0, b"one\n", 1), _ENDED]
    assert (list(connection.readers), connection.expected) == ([], {})


@pytest.mark.parametrize("overtaken", [False, True])
async def test_pushed_output_of_a_command_opens_its_reader(
    server: FakeServer, connection: ChannelConnection, overtaken: bool
) -> None:
    """A reply may overtake the output that was pushed before it."""
    await connection.open()
    server.silent.add("shell/run")
    log = server.logs["c"] = Log()
    log.print(b"a lot")
    stream = RemoteExec(connection).run_in_shell("s", CommandSpec("c", "seq 99999"))
    reading = asyncio.create_task(collect_command(stream))
    await settle()
    end, (_, request) = server.ends[0], server.requests[-1]
    if overtaken:
        end.channel.send(end.peer.codec.result(request, m.ShellRunResult(_ENDED, pushed=True)))
        await settle()
    end.readers["1"] = Reader("c", 0, None)
    server.wake()
    await settle()
    assert list(connection.readers) == ["1"]
    log.end()
    server.wake()
    if not overtaken:
        end.channel.send(end.peer.codec.result(request, m.ShellRunResult(_ENDED, pushed=True)))
    assert await reading == [OutputChunk("stdout", 0, b"a lot", 1), _ENDED]
    assert (list(connection.readers), connection.expected) == ([], {})


async def test_a_command_that_is_given_up_unsubscribes(server: FakeServer, connection: ChannelConnection) -> None:
    """Its output may be on its way: the server has opened the reader, which this side has not made."""
    await connection.open()
    server.silent.add("shell/run")
    stream = RemoteExec(connection).run_in_shell("s", CommandSpec("c", "cat"))
    reading = asyncio.create_task(collect_command(stream))
    await settle()
    with pytest.raises(InvalidRequest, match="two readers"):
        await anext(stream)
    await stream.aclose()
    assert await reading == []
    await settle()
    assert server.requested("process/unsubscribe") == 1
    assert connection.expected == {}


async def test_a_command_without_a_reader_leaves_nothing(server: FakeServer, connection: ChannelConnection) -> None:
    await connection.open()
    server.once["shell/run"] = m.ShellRunResult(_ENDED)
    RemoteExec(connection).run_in_shell("s", CommandSpec("c", "true"))
    await settle()
    assert connection.expected == {}


async def collect_command(stream: AsyncIterator[CommandEvent]) -> list[CommandEvent]:
    return [event async for event in stream]
