"""A connection without a channel, for sandboxes in which no command may run long: one command for each call.

The command is `holdfast exec`, which sends one JSON-RPC request to the server inside and prints the reply; long
polls read the events that a channel would push. Each call costs the start of a command. The server holds all state,
so a lost reply loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any, Final, TypeVar

from holdfast.client.connection.connection import ClientConnection, PendingCall
from holdfast.client.connection.subscription import Subscription
from holdfast.errors import ConnectionLost, HandshakeFailed, HoldfastError, UnknownProcess
from holdfast.sandboxes.host_command import run_host_command
from holdfast.sandboxes.install.installation import MISSING
from holdfast.sandboxes.target import CommandTarget, environment
from holdfast.types import MAX_MESSAGE_BYTES, OutputChunk, ReadResult
from holdfast.wire import messages as m
from holdfast.wire.codec import Codec
from holdfast.wire.methods import Notification, WireMethod
from holdfast.wire.peer import OnReply, Peer

P = TypeVar("P")
R = TypeVar("R")

#: How long one poll waits for an event. Some engines end a command after half a minute.
POLL_SECONDS: Final = 10.0
#: Bytes that one poll returns: as base64 far below every message limit.
POLL_BYTES: Final = 1024 * 1024
#: How long to wait for the reply of a shell's command before its output is polled as well. The reply carries little
#: output; a command that prints more blocks until it is read.
REPLY_SECONDS: Final = 1.0
#: Exit codes of `holdfast exec` with which it printed a reply.
_REPLIED: Final = (0, 1)
#: Waits before a failed call is repeated, until the deadline.
_WAITS: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class PolledConnection(ClientConnection):
    """A connection over single commands in a sandbox."""

    polls = True

    def __init__(self, target: CommandTarget, *, reconnect_deadline: float) -> None:
        super().__init__(target.address)
        self._target = target
        self._deadline = reconnect_deadline
        self._carrying: dict[PendingCall[Any], asyncio.Task[None]] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._room: dict[str, asyncio.Event] = {}
        self._uncredited: dict[str, int] = {}

    # --- calls -----------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """False: the server sees no cancelled request, so a caller must end what it started by a call."""
        return False

    @property
    def may_answer(self) -> bool:
        """True: there is no channel that could be down."""
        return True

    async def open(self) -> None:
        await self.call(m.PING, m.Empty())

    def begin(self, method: WireMethod[P, R], params: P) -> PendingCall[R]:
        call = self.new_call(method, params)
        task = self._carrying[call] = self.loop.create_task(self._carry(call))
        task.add_done_callback(lambda _: self._carrying.pop(call, None))
        return call

    def give_up(self, call: PendingCall[R]) -> None:
        if (task := self._carrying.get(call)) is not None:
            task.cancel()

    def notify(self, notification: Notification[P], params: P) -> None:
        """Does nothing: a server does not depend on notifications."""

    async def _carry(self, call: PendingCall[Any]) -> None:
        began = self.loop.time()
        while True:
            try:
                result = await self._exchange(call)
            except ConnectionLost as error:
                wait = _WAITS[min(call.sent, len(_WAITS)) - 1]
                if self.loop.time() + wait - began > self._deadline:
                    call.replied(None, error)
                    return
                await asyncio.sleep(wait)
            except HoldfastError as error:
                call.replied(None, error)
                return
            else:
                call.replied(result, None)
                return

    async def _exchange(self, call: PendingCall[Any]) -> Any:
        """Run one command with the request on its stdin; its stdout is the reply."""
        peer = Peer(Codec("json"), self.address)
        replies: list[tuple[Any, HoldfastError | None]] = []
        _, request = peer.call(call.method, call.params, lambda *reply: replies.append(reply))
        call.sent += 1
        argv = self._target.command(await self._target.installation.command(self._target, "exec"))
        done = await run_host_command(
            argv, stdin=request, seconds=float("inf"), env=environment(), kept_bytes=2 * MAX_MESSAGE_BYTES
        )
        if done.exit_code == MISSING or (self._target.lacks_program(done.exit_code, done.error) and call.sent == 1):
            await self._target.installation.install(self._target, done.error)
            return await self._exchange(call)
        if done.exit_code not in _REPLIED or not done.stdout.strip():
            raise self._target.explain(done.error) or ConnectionLost(f"{self.address}: {done.summary}")
        try:
            peer.receive(done.stdout.strip().encode())
        except HoldfastError as malformed:
            raise HandshakeFailed(f"{self.address}: the reply is malformed: {malformed}") from None
        if not replies:
            raise HandshakeFailed(f"{self.address}: the output is no reply to {call.method.name}")
        result, error = replies[0]
        if error is not None:
            raise error
        return result

    # --- polling for events ----------------------------------------------------------------------------------

    def new_reader_id(self) -> str:
        """Unique among all clients of the server, because the id names the reader's polls there."""
        return secrets.token_hex(8)

    def attach(self, reader: Subscription, start: PendingCall[Any] | None = None) -> None:
        self.readers[reader.id] = reader
        if start is None:
            reader.connected()
            return
        reader.opened_by(start)
        self._begin_poll(reader, 0, reader.window, start)

    def subscribe(self, params: m.SubscribeParams, on_reply: OnReply) -> None:
        if (reader := self.readers.get(params.subscription)) is not None:
            self._begin_poll(reader, params.after_seq, reader.window, None)

    def credit(self, id: str, seq: int, count: int) -> None:
        self._uncredited[id] = self._uncredited.get(id, 0) - count
        if (room := self._room.get(id)) is not None:
            room.set()

    def detach(self, id: str) -> None:
        self.ended(id)

    def ended(self, id: str) -> None:
        super().ended(id)
        if (poll := self._polls.get(id)) is not None and poll is not asyncio.current_task():
            poll.cancel()

    def _begin_poll(
        self, reader: Subscription, after_seq: int, window: int, start: PendingCall[Any] | None
    ) -> None:
        id = reader.id
        self._room[id] = asyncio.Event()
        self._uncredited[id] = 0
        task = self._polls[id] = self.loop.create_task(self._poll(reader, after_seq, window, start))

        def forget(_: object) -> None:
            self._polls.pop(id, None)
            self._room.pop(id, None)
            self._uncredited.pop(id, None)

        task.add_done_callback(forget)

    async def _poll(
        self, reader: Subscription, after_seq: int, window: int, start: PendingCall[Any] | None
    ) -> None:
        exit_sent = False
        try:
            await self._until_there(reader, start)
            while True:
                params = m.ReadParams(reader.process_id, after_seq, POLL_BYTES, int(POLL_SECONDS * 1000), reader.id)
                result = await self.call(m.PROCESS_READ, params)
                exit_seq, close_seq = ends_in(result, after_seq, exit_sent=exit_sent)
                for chunk in result.chunks:
                    if exit_seq is not None and not exit_sent and chunk.seq > exit_seq:
                        exit_sent = await self._send_exit(reader, exit_seq, result)
                    reader.output(_as_pushed(reader, chunk))
                if exit_seq is not None and not exit_sent:
                    exit_sent = await self._send_exit(reader, exit_seq, result)
                if close_seq is not None:
                    reader.closed(m.ClosedParams(reader.process_id, close_seq))
                    return
                after_seq = result.after_seq
                self._uncredited[reader.id] += sum(len(chunk.data) for chunk in result.chunks)
                if result.chunks and not result.exited:
                    # Otherwise a program that prints without pause would cost one command after the other.
                    await asyncio.sleep(reader.poll_interval or self._target.poll_interval)
                while self._uncredited[reader.id] >= window:
                    self._room[reader.id].clear()
                    await self._room[reader.id].wait()
        except HoldfastError as error:
            reader.fail(error)

    async def _until_there(self, reader: Subscription, start: PendingCall[Any] | None) -> None:
        """Wait until `start` has made the process, or the command of a shell, that `reader` polls."""
        if start is None:
            return
        if not isinstance(start.params, m.ShellRunParams):
            await asyncio.wait((start.future,))
            return
        pause = self._target.poll_interval if start.params.live else REPLY_SECONDS
        if not start.params.live:
            await asyncio.wait((start.future,), timeout=pause)
        while not start.future.done():
            try:
                await self.call(m.PROCESS_READ, m.ReadParams(reader.process_id, 0, 1))
            except UnknownProcess:
                await asyncio.wait((start.future,), timeout=pause)
            else:
                return

    async def _send_exit(self, reader: Subscription, seq: int, result: ReadResult) -> bool:
        signal = None
        with contextlib.suppress(UnknownProcess):  # a command in a shell, which no signal ends
            signal = (await self.call(m.PROCESS_WAIT, m.WaitParams(reader.process_id, 0))).signal
        code = 255 if result.exit_code is None else result.exit_code
        denied = result.sandbox_denied
        reader.exited(m.ExitedParams(code, signal, process_id=reader.process_id, seq=seq, sandbox_denied=denied))
        return True

    async def aclose(self) -> None:
        await self.end_clean_up()
        tasks = [*self._polls.values(), *self._carrying.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.fail()


def ends_in(result: ReadResult, after_seq: int, *, exit_sent: bool) -> tuple[int | None, int | None]:
    """Return the sequence numbers of the exit and of the close if a read reached them: the last that no chunk has.

    Lost output leaves more such numbers; a read without chunks has reached the end.
    """
    if not result.exited:
        return None, None
    taken = {chunk.seq for chunk in result.chunks}
    free = [seq for seq in range(after_seq + 1, result.next_seq) if seq not in taken]
    close_seq = None
    if result.closed and (exit_sent or len(free) > 1 or not result.chunks):
        close_seq = free.pop() if free else result.next_seq
    exit_seq = None
    if not exit_sent and (free or not result.chunks):
        exit_seq = free[-1] if free else result.next_seq - 1
    return exit_seq, close_seq


def _as_pushed(reader: Subscription, chunk: OutputChunk) -> m.OutputParams:
    return m.OutputParams(
        process_id=reader.process_id, seq=chunk.seq, stream=chunk.stream, offset=chunk.offset, chunk=chunk.data
    )
