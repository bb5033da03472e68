"""The channel to a server in a pod: messages on the input and output of a command that `pods/exec` runs.

Two tasks for each channel: one reads, the other sends control messages first and then frames of the source.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, cast

from holdfast.errors import ConnectionLost
from holdfast.sandboxes.kubernetes.exec_socket import CLOSE_SECONDS, CUT, STDOUT, Ended, ExecSocket
from holdfast.transport.channel import Receiver
from holdfast.transport.queued import TaskChannel
from holdfast.transport.stdio import STDERR_SHOWN_BYTES, STDERR_TAIL_BYTES, without_queries
from holdfast.types import MAX_MESSAGE_BYTES
from holdfast.wire.framing import FrameReader, Oversized, frame_length, frame_line

#: Small control messages that wait are sent as one message of the WebSocket, up to this size.
JOINED_BYTES: Final = 64 * 1024


class ExecChannel(TaskChannel):
    """`Channel` on an exec. The receiver gets large messages as views that are valid until it returns."""

    def __init__(
        self,
        socket: ExecSocket,
        receiver: Receiver,
        *,
        name: str,
        explain: Callable[[ConnectionLost], Exception],
        report: bytes | None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        super().__init__(name)
        self._socket = socket
        self._receiver = receiver
        self._explain = explain
        self._report = report
        #: Set when the report has come; an error if the command ended before it.
        self.reported: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if report is None:
            self.reported.set_result(None)
        #: Whether the first message has arrived. Lines before it belong into an error text.
        self._receiving = False
        self._tail = bytearray()
        self._frames = FrameReader(max_message_bytes)
        self._lengths = False
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    def use_lengths(self) -> None:
        self._lengths = True
        self._frames.use_lengths()

    def _framed(self, message: bytes) -> bytes:
        return frame_length(message) if self._lengths else frame_line(message)

    # --- the two tasks -----------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while (received := await self._socket.receive()) is not None:
                stream, data = received
                if stream == STDOUT and not self._closing:
                    self._feed(data)
                elif stream != STDOUT:
                    self._keep(bytes(data))
                if not self._may_read.is_set():
                    await self._may_read.wait()
        finally:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writer
            await self._socket.close()
            self._lose()

    def _feed(self, data: memoryview) -> None:
        while len(data) and not self._closing:
            room = self._frames.writable()
            if room is None:
                for message in self._frames.feed(data):
                    self._deliver(message)
                return
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            if (whole := self._frames.wrote(count)) is not None:
                # Lent: the interface has bytes, and the receiver on this side also accepts views.
                self._deliver(cast(bytes, whole))

    def _deliver(self, message: bytes | Oversized) -> None:
        if self._closing:
            return
        # A shell inside may print a greeting on stdout; it does not begin like a message.
        if not self._receiving and not isinstance(message, Oversized):
            if not self.reported.done() and bytes(message) == self._report:
                self.reported.set_result(None)
                return
            if not self.reported.done() or bytes(message[:64]).lstrip()[:1] != b"{":
                self._keep(bytes(message) + b"\n")
                return
            self._receiving = True
        self._receiver.message_received(message)

    def _keep(self, data: bytes) -> None:
        self._tail += data
        del self._tail[:-STDERR_TAIL_BYTES]

    async def _write(self) -> None:
        # The reader gets the same error, with its reason.
        with contextlib.suppress(ConnectionLost):
            await super()._write()

    async def _transmit(self, data: bytes) -> None:
        await self._socket.send(data)

    def _next_control(self) -> bytes:
        if len(self._queue) == 1 or self._queued_bytes > JOINED_BYTES:
            return self._queue.popleft()
        joined = b"".join(self._queue)
        self._queue.clear()
        return joined

    async def _end(self) -> None:
        """End the command by the end of its input; if it does not exit, its connection is closed."""
        await self._socket.close_input()
        await asyncio.sleep(CLOSE_SECONDS)
        await self._socket.close()

    # --- the end -----------------------------------------------------------------------------------------------

    def _lose(self) -> None:
        closed_by_us = self._lost()
        failure = self._failure()
        if not self.reported.done():
            self.reported.set_exception(failure)
        else:
            self._receiver.connection_lost(None if closed_by_us else failure)

    def _failure(self) -> Exception:
        ended = self._socket.ended or Ended(CUT)
        if ended.message:
            self._keep(ended.message.encode())
        text = without_queries(self._tail.decode(errors="replace")).strip()[-STDERR_SHOWN_BYTES:]
        how = "was cut off" if ended.exit_code < 0 else f"ended with exit code {ended.exit_code}"
        message = f"{self.description}: the command {how}" + (f": {text}" if text else "")
        return self._explain(ConnectionLost(message, exit_code=ended.exit_code, words=text))


async def dial(
    socket: ExecSocket,
    receiver: Receiver,
    *,
    name: str,
    explain: Callable[[ConnectionLost], Exception],
    report: bytes | None,
) -> ExecChannel:
    """Use a running exec as a channel; with a `report`, returns once the command printed that line."""
    channel = ExecChannel(socket, receiver, name=name, explain=explain, report=report)
    try:
        await channel.reported
    except BaseException:
        channel.close()
        raise
    return channel
