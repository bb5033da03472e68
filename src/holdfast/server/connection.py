"""One connection: the handshake, requests to their handlers, replies back, the outbox beside them.

Each request runs on its own, so a long poll delays nobody; replies leave as they are ready. A client that does not
read its replies is not read either, once enough of them wait. Knows the wire and the channel; what the methods do
is in `dispatch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import deque
from functools import partial
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
from holdfast.server.client_sessions import Left
from holdfast.server.deferred_reply import CANCELLED_BY_CALLER, Later
from holdfast.server.outbox import Outbox
from holdfast.wire.codec import Codec, Id
from holdfast.wire.framing import Oversized
from holdfast.wire.messages import InitializeParams, InitializeResult
from holdfast.wire.methods import INITIALIZE, INITIALIZED, PROCESS_CREDIT, PROTOCOL_VERSION, REQUEST_CANCEL
from holdfast.wire.peer import Notice, Peer, Request

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from holdfast.runtime.local import LocalExec
    from holdfast.server.client_sessions import Session, Sessions
    from holdfast.server.dispatch import Dispatcher
    from holdfast.transport.channel import Channel

log = logging.getLogger(__name__)


class ServerConnection:
    """Receives for one channel. Give it the channel with `open` before anything arrives."""

    channel: Channel
    outbox: Outbox
    session: Session | None = None
    #: The OS pid of the process at the other end, where the transport has one.
    peer_pid: int | None = None

    def __init__(self, exec_: LocalExec, dispatcher: Dispatcher, sessions: Sessions) -> None:
        self._exec = exec_
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._peer = Peer(Codec("json"))
        #: Requests that wait for something, by their id.
        self._tasks: dict[Id, asyncio.Task[None] | Later] = {}
        self._close = self._hand_over  # one object, so that a session can tell who holds it
        self._catching_up: asyncio.Task[None] | None = None
        #: What had been read already when we stopped reading; it waits like what is still in the socket.
        self._unhandled: deque[bytes | Oversized] = deque()
        #: Called once when the connection is over.
        self.on_close = _nothing

    def open(self, channel: Channel) -> None:
        self.channel = channel
        self.outbox = Outbox(channel, self._peer.codec)

    @property
    def expects_uris(self) -> bool:
        """Whether the request at hand is of a client that reads each path as a `file:` URI: the Codex CLI."""
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
        if isinstance(incoming, Request):
            self._request(incoming)
        elif isinstance(incoming, Notice):
            self._notice(incoming)

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            log.info("%s: connection lost: %s", self.channel.description, error)
        for task in tuple(self._tasks.values()):
            task.cancel()
        if self.session is not None:
            self._sessions.detach(self.session, self._close, self._left())
            self.session = None
        self.outbox.close()
        self._dispatcher.services.connection_lost(self)
        self.on_close()

    def _hand_over(self) -> Left:
        """Our client is back on another connection, which goes on where our pushes had come to."""
        left = self._left()
        self.channel.close()
        return left

    def _left(self) -> Left:
        return Left(self.outbox.positions(), self.outbox.leave())

    # --- requests --------------------------------------------------------------------------------------------

    def _request(self, request: Request) -> None:
        try:
            if request.method == INITIALIZE.name:
                self._initialize(request)
                return
            if self.session is None:
                raise InvalidRequest(f"{request.method} before initialize")
            row = self._dispatcher.methods.get(request.method)
            if row is None:
                raise MethodNotFound(f"no method {request.method!r}")
            if len(self._tasks) >= self._exec.config.max_pending_requests:
                raise LimitReached(f"{len(self._tasks)} requests are unanswered: that is max_pending_requests")
            method, handler = row
            self._dispatcher.note_call(method.name)
            params = self._peer.codec.decode_body(request.params, method.params, f"params of {method.name}")
            answer = handler(self, params)
        except HoldfastError as error:
            self._fail(request.id, error)
        except Exception as error:  # noqa: BLE001 - a bug of ours fails this request and not the connection
            self._fail_unexpectedly(request.id, error)
        else:
            if isinstance(answer, Later):
                self._tasks[request.id] = answer
                answer.start(partial(self._reply, request.id))
                return
            if not inspect.iscoroutine(answer):
                self._send(self._peer.codec.result(request.id, answer))
                return
            task = asyncio.get_running_loop().create_task(self._answer(request.id, answer))
            self._tasks[request.id] = task
            task.add_done_callback(lambda _: self._answered(request.id, answer))

    def _answered(self, id: Id, answer: Coroutine[None, None, object]) -> None:
        # One that was cancelled before its first step has not been begun: Python warns of those.
        answer.close()
        self._tasks.pop(id, None)

    def _reply(self, id: Id, answer: object) -> None:
        self._tasks.pop(id, None)
        if isinstance(answer, HoldfastError):
            self._fail(id, answer)
        else:
            self._send(self._peer.codec.result(id, answer))

    async def _answer(self, id: Id, answer: Coroutine[None, None, object]) -> None:
        try:
            result = await answer
        except HoldfastError as error:
            self._fail(id, error)
        except Exception as error:  # noqa: BLE001 - the same
            self._fail_unexpectedly(id, error)
        else:
            self._send(self._peer.codec.result(id, result))

    def _initialize(self, request: Request) -> None:
        codec = self._peer.codec
        params = codec.decode_body(request.params, InitializeParams, "params of initialize")
        if self.session is not None:
            raise InvalidRequest("initialize a second time")
        session, resumed = self._sessions.open(
            params.client_name, params.resume_session_id, self._close, self.peer_pid
        )
        self.session = session
        result = InitializeResult(
            session_id=session.id,
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
        self.outbox.expect(session.left.readers)
        for process_id, seq in session.left.positions.items():
            with contextlib.suppress(HoldfastError):  # forgotten meanwhile
                self.outbox.subscribe(self._exec.recorded(process_id), after_seq=seq)
        session.left = Left()

    def _notice(self, notice: Notice) -> None:
        codec = self._peer.codec
        try:
            if notice.method == PROCESS_CREDIT.name:
                credit = codec.decode_body(notice.params, PROCESS_CREDIT.params, notice.method)
                self.outbox.give_credit(credit.subscription, credit.seq, credit.bytes)
            elif notice.method == REQUEST_CANCEL.name:
                cancelled = codec.decode_body(notice.params, REQUEST_CANCEL.params, notice.method)
                task = self._tasks.get(cancelled.id)
                if task is not None:  # else its reply is on its way
                    if isinstance(task, Later):
                        del self._tasks[cancelled.id]  # a task takes itself out when it has ended
                    task.cancel(CANCELLED_BY_CALLER)
            elif notice.method != INITIALIZED.name:
                log.info("%s: ignored notification %s", self.channel.description, notice.method)
        except HoldfastError as error:
            log.warning("%s: %s", self.channel.description, error)

    # --- replies ---------------------------------------------------------------------------------------------

    def _fail(self, id: Id, error: HoldfastError) -> None:
        self._send(self._peer.codec.failure(id, error))

    def _fail_unexpectedly(self, id: Id, error: Exception) -> None:
        """A bug of ours: told to the caller in a word, to the log in full."""
        log.error("%s: a request failed", self.channel.description, exc_info=error)
        self._fail(id, InternalError(f"{type(error).__name__}: {error}"))

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


def _nothing() -> None:
    """Until somebody wants to know."""
