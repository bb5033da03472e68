"""Byte streams between sockets and one connection: each socket is a stream with its own number and credit.

Rules. A side sends only as many bytes as the other side has granted, so unread bytes stay in the kernel's buffers
and the program that writes them blocks. The sender holds no data: bytes are read from a socket at the moment at
which the channel accepts a frame, after all control messages. The receiver holds at most its window and grants more
as the socket accepts the bytes. An end of file ends one direction, a reset both. Streams end with their connection.
Touches the sockets that it is given, and the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from holdfast.errors import InvalidParams, LimitReached
from holdfast.transport.channel import Channel, Source, SpoolFrame
from holdfast.transport.sockets import Acceptor, reset
from holdfast.wire import stream_messages as s
from holdfast.wire.codec import Codec
from holdfast.wire.methods import Notification, P
from holdfast.wire.peer import IncomingNotification

log = logging.getLogger(__name__)

#: The largest piece of data in one message; a control message waits behind at most a few.
PIECE_BYTES: Final = 256 * 1024
#: As JSON, with base64, a piece passes through Python several times.
JSON_PIECE_BYTES: Final = 64 * 1024
#: The least window: every stream makes progress, however many there are.
LEAST_WINDOW: Final = 32 * 1024


class StreamLimits(NamedTuple):
    """The bounds of one side of a connection."""

    #: Streams at a time.
    streams: int = 4_096
    #: Bytes that this side accepts on one stream.
    window: int = 1024 * 1024
    #: Bytes that this side accepts on all streams; see `StreamMultiplexer.grant`.
    total: int = 64 * 1024 * 1024


class SocketStream:
    """One stream and its socket, which the stream owns."""

    __slots__ = (
        "_loop",
        "_streams",
        "_taken",
        "_unwritten",
        "closed",
        "credit",
        "id",
        "owner",
        "queued",
        "reading",
        "received_end",
        "room",
        "sent_end",
        "sock",
        "window",
    )

    def __init__(
        self, streams: StreamMultiplexer, id: int, sock: socket.socket, window: int, owner: object
    ) -> None:
        self._streams = streams
        self._loop = streams.loop
        self.id = id
        self.sock = sock
        #: Ends its streams with `fail_owned`.
        self.owner = owner
        self.window = window
        #: Bytes that the peer may still send.
        self.room = window
        #: Bytes that the socket has accepted since the last credit to the peer.
        self._taken = 0
        self._unwritten: deque[bytes | memoryview] = deque()
        #: Bytes that this side may still send.
        self.credit = 0
        self.reading = False
        self.queued = False
        self.sent_end = False
        self.received_end = False
        self.closed = False

    # --- from the socket to the peer -----------------------------------------------------------------------------

    def give_credit(self, count: int) -> None:
        self.credit += max(0, count)
        self.watch()

    def watch(self) -> None:
        """Read from the socket once it is readable, if there is credit."""
        if not (self.reading or self.queued or self.sent_end or self.closed) and self.credit > 0:
            self.reading = True
            self._loop.add_reader(self.sock, self._readable)

    def unwatch(self) -> None:
        if self.reading:
            self.reading = False
            self._loop.remove_reader(self.sock)

    def _readable(self) -> None:
        self._streams.enqueue(self)
        if self.queued:  # the connection accepts no frame now; the reader would be called in every turn
            self.unwatch()

    def next_piece(self, limit: int) -> bytes | None:
        """Read the next bytes to send; empty at the end of file, None if there are none now. Raises `OSError`."""
        if self.sent_end or self.closed or self.credit <= 0:
            self.unwatch()
            return None
        requested = min(self.credit, limit)
        try:
            data = self.sock.recv(requested)
        except (BlockingIOError, InterruptedError):
            self.watch()
            return None
        self.credit -= len(data)
        if not data:
            self.sent_end = True
        if self.credit <= 0 or not data:
            self.unwatch()
        elif len(data) < requested:
            self.watch()  # the socket is empty; another read would only return EAGAIN
        else:
            self._streams.enqueue(self)
        return data

    # --- from the peer to the socket -----------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Write to the socket, or hold the bytes until it accepts them. Raises `OSError`."""
        self.room -= len(data)
        if self._unwritten:
            self._unwritten.append(data)
            return
        sent = self._send(data)
        if sent < len(data):
            self._unwritten.append(memoryview(data)[sent:])
            self._loop.add_writer(self.sock, self._writable)

    def _send(self, data: bytes | memoryview) -> int:
        try:
            sent = self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        self._taken += sent
        if self._taken * 4 >= self.window and not self.received_end:
            self._streams.notify(s.STREAM_CREDIT, s.StreamCreditParams(self.id, self._taken))
            self.room += self._taken
            self._taken = 0
        return sent

    def _writable(self) -> None:
        try:
            while self._unwritten:
                data = self._unwritten[0]
                sent = self._send(data)
                if sent < len(data):
                    self._unwritten[0] = memoryview(data)[sent:]
                    return
                self._unwritten.popleft()
        except OSError as error:
            self._streams.fail(self, str(error))
            return
        self._loop.remove_writer(self.sock)
        if self.received_end:
            self._end_writing()

    def end(self) -> None:
        """The peer sends no more: pass the end of file on, after the bytes that are still held."""
        self.received_end = True
        if not self._unwritten:
            self._end_writing()

    def _end_writing(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            log.debug("stream %d: the socket had ended: %s", self.id, error)
        self._streams.close_if_over(self)

    # --- the end -------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether both directions have ended and every byte is written."""
        return self.sent_end and self.received_end and not self._unwritten

    def close(self, *, orderly: bool) -> None:
        if self.closed:
            return
        self.closed = True
        self.unwatch()
        if self._unwritten:
            self._loop.remove_writer(self.sock)
            self._unwritten.clear()
        if orderly:
            self.sock.close()
        else:
            reset(self.sock)


#: Called with a stream that the peer has accepted, and the bytes that the peer grants.
OnAccepted = Callable[[int, int], None]


class StreamMultiplexer:
    """The streams of one connection; the source of its channel on the client, and one of two on the server."""

    def __init__(self, channel: Channel, codec: Codec, limits: StreamLimits = StreamLimits()) -> None:  # noqa: B008
        self.loop = asyncio.get_running_loop()
        self._channel = channel
        self._codec = codec
        self._limits = limits
        self._streams: dict[int, SocketStream] = {}
        self._ready: dict[SocketStream, None] = {}
        #: Streams that have a number and no socket yet.
        self._opening: set[int] = set()
        self._granted = 0
        self._last_opened = 0
        self._last_accepted = 0
        #: Listeners of this side, for the peer; and of the peer, for this side.
        self._acceptors: dict[str, Acceptor] = {}
        self._on_accepted: dict[str, OnAccepted] = {}
        self.closed = False

    def __len__(self) -> int:
        return len(self._streams) + len(self._opening)

    # --- streams -------------------------------------------------------------------------------------------------

    def new_number(self) -> int:
        """A number for a stream that this side opens."""
        self._last_opened += 1
        return self._last_opened

    def reserve(self, id: int) -> None:
        """Take the number of a stream that has no socket yet; `LimitReached` if there are too many."""
        if id in self._streams or id in self._opening:
            raise InvalidParams(f"stream {id}: the number is taken")
        if len(self) >= self._limits.streams:
            raise LimitReached(f"{len(self)} streams are open on this connection: that is max_streams")
        self._opening.add(id)

    def release(self, id: int, reason: str = "") -> None:
        """Give up a reserved number, and reset the peer's end of the stream if there is a reason."""
        if id in self._opening:
            self._opening.discard(id)
            if reason:
                self.notify(s.STREAM_RESET, s.StreamResetParams(id, reason))

    def attach(self, id: int, sock: socket.socket, *, owner: object = None) -> SocketStream | None:
        """Give a reserved stream its socket; None, and the socket is reset, if the stream has ended meanwhile."""
        if id not in self._opening:
            reset(sock)
            return None
        self._opening.discard(id)
        window = self._window()
        self._granted += window
        stream = self._streams[id] = SocketStream(self, id, sock, window, owner)
        return stream

    def _window(self) -> int:
        """The window of the next stream: a part of the bytes that are not granted yet."""
        left = (self._limits.total - self._granted) // 2
        return max(LEAST_WINDOW, min(self._limits.window, left))

    def fail(self, stream: SocketStream, reason: str) -> None:
        """Reset both ends of a stream."""
        if not stream.closed:
            self._drop(stream, orderly=False)
            self.notify(s.STREAM_RESET, s.StreamResetParams(stream.id, reason))

    def fail_owned(self, owner: object, reason: str) -> None:
        """Reset both ends of the streams of one owner."""
        for stream in [each for each in self._streams.values() if each.owner is owner]:
            self.fail(stream, reason)

    def drop(self, stream: SocketStream) -> None:
        """Reset this end of a stream that the peer does not have."""
        if not stream.closed:
            self._drop(stream, orderly=False)

    def close_if_over(self, stream: SocketStream) -> None:
        if stream.over and not stream.closed:
            self._drop(stream, orderly=True)

    def _drop(self, stream: SocketStream, *, orderly: bool) -> None:
        stream.close(orderly=orderly)
        self._streams.pop(stream.id, None)
        self._ready.pop(stream, None)
        self._granted -= stream.window

    # --- listeners -----------------------------------------------------------------------------------------------

    def listen(self, name: str, sock: socket.socket) -> s.StreamAddress:
        """Open a stream to the peer for each connection that `sock` accepts."""

        def accepted(connection: socket.socket) -> None:
            self._last_accepted -= 1
            try:
                self.reserve(self._last_accepted)
            except LimitReached as error:
                log.warning("a connection to %s is refused: %s", acceptor.address, error)
                reset(connection)
                return
            stream = self.attach(self._last_accepted, connection)
            assert stream is not None
            self.notify(s.STREAM_ACCEPTED, s.StreamAcceptedParams(name, stream.id, stream.window))

        acceptor = self._acceptors[name] = Acceptor(sock, accepted)
        return acceptor.address

    def has_listener(self, name: str) -> bool:
        return name in self._acceptors

    def unlisten(self, name: str) -> None:
        acceptor = self._acceptors.pop(name, None)
        if acceptor is not None:
            acceptor.close()

    @property
    def listeners(self) -> int:
        return len(self._acceptors)

    def on_accepted(self, name: str, call: OnAccepted | None) -> None:
        """Call `call` for each stream of the peer's listener `name`; None stops it."""
        if call is None:
            self._on_accepted.pop(name, None)
        else:
            self._on_accepted[name] = call

    # --- messages ------------------------------------------------------------------------------------------------

    def notify(self, notification: Notification[P], params: P) -> None:
        if not self.closed:
            self._channel.send(self._codec.notification(notification.name, params))

    def receive(self, notice: IncomingNotification) -> bool:
        """Handle a notification of `stream/*`; returns whether it belongs to an open stream or a listener.

        Messages of a stream that has ended here are ignored.
        """
        name = notice.method
        if name == s.STREAM_DATA.name:
            data = self._codec.decode_body(notice.params, s.StreamDataParams, name)
            if (stream := self._streams.get(data.stream)) is not None:
                self._data(stream, data.data)
        elif name == s.STREAM_CREDIT.name:
            credit = self._codec.decode_body(notice.params, s.StreamCreditParams, name)
            if (stream := self._streams.get(credit.stream)) is not None:
                stream.give_credit(credit.bytes)
        elif name == s.STREAM_ENDED.name:
            ended = self._codec.decode_body(notice.params, s.StreamEndedParams, name)
            if (stream := self._streams.get(ended.stream)) is not None:
                stream.end()
        elif name == s.STREAM_RESET.name:
            was_reset = self._codec.decode_body(notice.params, s.StreamResetParams, name)
            self._opening.discard(was_reset.stream)
            if (stream := self._streams.get(was_reset.stream)) is not None:
                log.debug("stream %d was reset: %s", stream.id, was_reset.reason)
                self._drop(stream, orderly=False)
        elif name == s.STREAM_ACCEPTED.name:
            return self._peer_accepted(self._codec.decode_body(notice.params, s.StreamAcceptedParams, name))
        else:
            return False
        return stream is not None

    def _data(self, stream: SocketStream, data: bytes) -> None:
        if len(data) > stream.room or stream.received_end:
            self.fail(stream, "more data than the receiver accepts")
            return
        try:
            stream.write(data)
        except OSError as error:
            self.fail(stream, str(error))

    def _peer_accepted(self, accepted: s.StreamAcceptedParams) -> bool:
        call = self._on_accepted.get(accepted.listener)
        reason = "the listener is closed"
        if call is not None and accepted.stream < 0:
            try:
                self.reserve(accepted.stream)
            except (LimitReached, InvalidParams) as error:
                reason = str(error)
            else:
                call(accepted.stream, accepted.window)
                return True
        self.notify(s.STREAM_RESET, s.StreamResetParams(accepted.stream, reason))
        return False

    # --- Source --------------------------------------------------------------------------------------------------

    def enqueue(self, stream: SocketStream) -> None:
        if not stream.queued:
            stream.queued = True
            self._ready[stream] = None
            self._channel.wake()

    def next_frame(self) -> bytes | None:
        limit = PIECE_BYTES if self._codec.encoding == "msgpack" else JSON_PIECE_BYTES
        while self._ready:
            stream = next(iter(self._ready))
            del self._ready[stream]
            stream.queued = False
            try:
                data = stream.next_piece(limit)
            except OSError as error:
                # Returned and not sent: a channel that pulls sends control messages only at the next wake.
                self._drop(stream, orderly=False)
                params = s.StreamResetParams(stream.id, str(error))
                return self._codec.notification(s.STREAM_RESET.name, params)
            if data:
                return self._codec.notification(s.STREAM_DATA.name, s.StreamDataParams(stream.id, data))
            if data is not None:
                self.close_if_over(stream)
                return self._codec.notification(s.STREAM_ENDED.name, s.StreamEndedParams(stream.id))
        return None

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Reset every stream and close every listener, because the connection has ended."""
        self.closed = True
        for name in list(self._acceptors):
            self.unlisten(name)
        self._on_accepted.clear()
        self._opening.clear()
        for stream in list(self._streams.values()):
            self._drop(stream, orderly=False)


class AlternatingSource:
    """The frames of two sources in turn, so that neither delays the other by more than a frame."""

    def __init__(self, first: Source, second: Source) -> None:
        self._first, self._second = first, second

    def next_frame(self) -> bytes | SpoolFrame | None:
        if (frame := self._first.next_frame()) is None:
            return self._second.next_frame()
        self._first, self._second = self._second, self._first
        return frame
