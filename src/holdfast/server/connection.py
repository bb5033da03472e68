"""One connection of a client: handshake, requests to their handlers, replies, and the outbox for pushed output.

Requests run concurrently, so a long poll delays no other request; replies are sent as they are ready. Once
`max_queued_reply_bytes` of replies are unread, the connection stops reading requests. `dispatch` has the methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING

from holdfast import __version__
from holdfast.errors import (
    ConnectionLost,
    HoldfastError,
    InternalError,
    InvalidRequest,
    LimitReached,
    MessageTooLarge,
    MethodNotFound,
)
from holdfast.server.clients import ResumePoint
from holdfast.server.deferred_reply import CANCELLED_BY_CALLER, DeferredReply
from holdfast.server.outbox import Outbox
from holdfast.transport.multiplexer import AlternatingSource, StreamLimits, StreamMultiplexer
from holdfast.wire.codec import Codec, Id
from holdfast.wire.framing import Oversized
from holdfast.wire.messages import (
    INITIALIZE,
    INITIALIZED,
    PROCESS_CREDIT,
    REQUEST_CANCEL,
    Empty,
    InitializeParams,
    InitializeResult,
)
from holdfast.wire.methods import PROTOCOL_VERSION, Notification, P
from holdfast.wire.peer import IncomingNotification, IncomingRequest, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.server.clients import ClientRegistry, ClientState
    from holdfast.server.dispatch import Dispatcher
    from holdfast.server.served_exec import ServedExec
    from holdfast.transport.channel import Channel

log = logging.getLogger(__name__)

_EMPTY = Empty()


class ServerConnection:
    """The receiver of one channel. Call `open` with the channel before the first message arrives."""

    channel: Channel
    outbox: Outbox
    streams: StreamMultiplexer
    client: ClientState | None = None
    #: The OS pid of the peer, where the transport reports one.
    peer_pid: int | None = None

    def __init__(
        self,
        exec_: ServedExec,
        dispatcher: Dispatcher,
        clients: ClientRegistry,
        on_close: Callable[[ServerConnection], None],
    ) -> None:
        self._exec = exec_
        self._dispatcher = dispatcher
        self._clients = clients
        #: Called once when the connection has ended.
        self._on_close = on_close
        self._peer = Peer(Codec("json"))
        self._background: set[asyncio.Task[None]] = set()
        #: Unanswered requests by id.
        self._tasks: dict[Id, asyncio.Task[None] | DeferredReply] = {}
        self._close = self._end_for_takeover  # one bound method, so that the registry can compare it
        self._catching_up: asyncio.Task[None] | None = None
        #: Messages that had been read when reading stopped; handled once the queue is drained.
        self._unhandled: deque[bytes | Oversized] = deque()

    def open(self, channel: Channel) -> None:
        self.channel = channel
        self.outbox = Outbox(channel, self._peer.codec)
        config = self._exec.config
        limits = StreamLimits(config.max_streams, config.stream_window_bytes, config.max_stream_bytes)
        self.streams = StreamMultiplexer(channel, self._peer.codec, limits)
        channel.set_source(AlternatingSource(self.outbox, self.streams))

    @property
    def expects_uris(self) -> bool:
        """Whether the current request is from the Codex CLI, which reads each path as a `file:` URI."""
        return self._peer.codec.leaves_out_version

    # --- Receiver --------------------------------------------------------------------------------------------

    def message_received(self, message: bytes | Oversized) -> None:
        if self._catching_up is not None:
            self._unhandled.append(message)
            return
        if isinstance(message, Oversized):
            text = f"a message of {message.size} bytes: max_message_bytes is {message.limit}"
            self._fail(None, MessageTooLarge(text))
            return
        try:
            incoming = self._peer.receive(message)
        except HoldfastError as error:
            self._fail(None, error)
            return
        if isinstance(incoming, IncomingRequest):
            self._request(incoming)
        elif isinstance(incoming, IncomingNotification):
            self._notified(incoming)

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            log.info("%s: connection lost: %s", self.channel.description, error)
        for task in (*self._tasks.values(), *self._background):
            task.cancel()
        if self.client is not None:
            self._clients.detach(self.client, self._close, self._resume_point())
            self.client = None
        self.outbox.close()
        self.streams.close()
        self._dispatcher.host_calls.connection_lost(self)
        self._on_close(self)

    def _end_for_takeover(self) -> ResumePoint:
        """Close, because the client has reconnected; returns where its new connection continues."""
        left = self._resume_point()
        self.streams.close()  # at once, because the new connection may listen on the same ports
        self.channel.close()
        return left

    def _resume_point(self) -> ResumePoint:
        return ResumePoint(self.outbox.positions(), self.outbox.release_readers())

    # --- requests --------------------------------------------------------------------------------------------

    def _request(self, request: IncomingRequest) -> None:
        try:
            if request.method == INITIALIZE.name:
                self._initialize(request)
                return
            if self.client is None:
                raise InvalidRequest(f"{request.method} before initialize")
            row = self._dispatcher.methods.get(request.method)
            if row is None:
                raise MethodNotFound(f"no method {request.method!r}")
            if len(self._tasks) >= self._exec.config.max_pending_requests:
                raise LimitReached(f"{len(self._tasks)} requests are unanswered: that is max_pending_requests")
            method, handler = row
            self._clients.note_call(method.name)
            params = self._peer.codec.decode_body(request.params, method.params, f"params of {method.name}")
            answer = handler(self, params)
        except HoldfastError as error:
            self._fail(request.id, error)
        except Exception as error:  # noqa: BLE001 - a bug fails this request and not the connection
            self._fail_unexpectedly(request.id, error)
        else:
            if isinstance(answer, DeferredReply):
                self._tasks[request.id] = answer
                answer.start(partial(self._reply, request.id))
                return
            if not isinstance(answer, CoroutineType):
                self._succeed(request.id, answer)
                return
            task = asyncio.get_running_loop().create_task(self._answer(request.id, answer))
            self._tasks[request.id] = task
            task.add_done_callback(lambda _: self._answered(request.id, answer))

    def _answered(self, id: Id, answer: Coroutine[None, None, object]) -> None:
        # A coroutine that was cancelled before its first step was never started, and Python warns about those.
        answer.close()
        self._tasks.pop(id, None)

    def _reply(self, id: Id, answer: object) -> None:
        self._tasks.pop(id, None)
        if isinstance(answer, HoldfastError):
            self._fail(id, answer)
        else:
            self._succeed(id, answer)

    async def _answer(self, id: Id, answer: Coroutine[None, None, object]) -> None:
        try:
            result = await answer
        except HoldfastError as error:
            self._fail(id, error)
        except Exception as error:  # noqa: BLE001 - as in `_request`
            self._fail_unexpectedly(id, error)
        else:
            self._succeed(id, result)

    def _initialize(self, request: IncomingRequest) -> None:
        codec = self._peer.codec
        params = codec.decode_body(request.params, InitializeParams, "params of initialize")
        if self.client is not None:
            raise InvalidRequest("initialize a second time")
        client, resumed = self._clients.open(
            params.client_name, params.resume_session_id, self._close, self.peer_pid
        )
        self.client = client
        result = InitializeResult(
            session_id=client.id,
            encoding=params.encoding,
            server_version=__version__,
            protocol=PROTOCOL_VERSION,
            resumed=resumed,
            max_message_bytes=self._exec.config.max_message_bytes,
        )
        self._send(codec.result(request.id, result))
        if params.encoding == "msgpack":
            codec.encoding = "msgpack"
            self.channel.use_lengths()
        self.outbox.hold(client.resume.readers)
        for process_id, seq in client.resume.positions.items():
            with contextlib.suppress(HoldfastError):  # dropped from retention meanwhile
                self.outbox.subscribe(self._exec.recorded(process_id), after_seq=seq)
        client.resume = ResumePoint()

    def _notified(self, notice: IncomingNotification) -> None:
        codec = self._peer.codec
        try:
            if notice.method == PROCESS_CREDIT.name:
                credit = codec.decode_body(notice.params, PROCESS_CREDIT.params, notice.method)
                self.outbox.give_credit(credit.subscription, credit.seq, credit.bytes)
            elif notice.method == REQUEST_CANCEL.name:
                cancelled = codec.decode_body(notice.params, REQUEST_CANCEL.params, notice.method)
                task = self._tasks.get(cancelled.id)
                if task is not None:  # else the reply was sent already
                    if isinstance(task, DeferredReply):
                        del self._tasks[cancelled.id]  # an ended task removes itself
                    task.cancel(CANCELLED_BY_CALLER)
            elif notice.method.startswith("stream/") and self.client is not None:
                self._clients.note_call(notice.method)
                self.streams.receive(notice)
            elif notice.method != INITIALIZED.name:
                log.info("%s: ignored notification %s", self.channel.description, notice.method)
        except HoldfastError as error:
            log.warning("%s: %s", self.channel.description, error)

    # --- replies ---------------------------------------------------------------------------------------------

    def _succeed(self, id: Id, result: object) -> None:
        self._send(self._peer.codec.result(id, _EMPTY if result is None else result))

    def _fail(self, id: Id, error: HoldfastError) -> None:
        self._send(self._peer.codec.failure(id, error))

    def _fail_unexpectedly(self, id: Id, error: Exception) -> None:
        """Report a bug: the caller gets one line, the log the traceback."""
        log.error("%s: a request failed", self.channel.description, exc_info=error)
        self._fail(id, InternalError(f"{type(error).__name__}: {error}"))

    def notify(self, notification: Notification[P], params: P) -> None:
        """Send a notification."""
        self._send(self._peer.codec.notification(notification.name, params))

    def run_in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run work that follows a reply; it is cancelled when the connection ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _send(self, message: bytes) -> None:
        self.channel.send(message)
        if self._catching_up is None and self.channel.queued_bytes > self._exec.config.max_queued_reply_bytes:
            self.channel.pause_reading()
            self._catching_up = asyncio.get_running_loop().create_task(self._catch_up())

    async def _catch_up(self) -> None:
        with contextlib.suppress(ConnectionLost):
            await self.channel.drain()
            self._catching_up = None
            while self._unhandled and self._catching_up is None:
                self.message_received(self._unhandled.popleft())
            if self._catching_up is None:
                self.channel.resume_reading()
            return
        self._catching_up = None
