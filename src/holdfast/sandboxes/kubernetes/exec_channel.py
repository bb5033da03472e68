"""The channel to a server in a pod: messages on the input and output of a command that `pods/exec` runs.

Two tasks for each channel: one reads, the other sends control messages first and then frames of the source.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from holdfast.errors import ConnectionLost, InvalidRequest
from holdfast.sandboxes.kubernetes.exec_socket import CLOSE_SECONDS, CUT, STDOUT, Ended, ExecSocket
from holdfast.transport.channel import Receiver, Source, SpoolFrame
from holdfast.transport.stdio import STDERR_SHOWN_BYTES, STDERR_TAIL_BYTES, without_queries
from holdfast.types import MAX_MESSAGE_BYTES
from holdfast.wire.framing import FrameReader, Oversized, frame_length, frame_line

#: Small control messages that wait are sent as one message of the WebSocket, up to this size.
JOINED_BYTES: Final = 64 * 1024


class ExecChannel:
    """`Channel` on an exec. The receiver gets large messages as views that are valid until it returns."""

    takes_spool_frames: Final = False
    passes_descriptors: Final = False

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
        self.description = name
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
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._source: Source | None = None
        self._something_to_send = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._closing = False
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    # --- Channel -----------------------------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def send(self, message: bytes) -> None:
        if self._closing:
            return
        frame = frame_length(message) if self._lengths else frame_line(message)
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        self._drained.clear()
        self._something_to_send.set()

    def set_source(self, source: Source | None) -> None:
        self._source = source
        self.wake()

    def wake(self) -> None:
        self._something_to_send.set()

    def use_lengths(self) -> None:
        self._lengths = True
        self._frames.use_lengths()

    def hold_frame(self) -> None:
        """No effect: there are no spool frames."""

    def pass_descriptor(self, fd: int) -> None:
        raise InvalidRequest(f"{self.description}: an exec of a cluster carries no descriptors")

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    async def drain(self) -> None:
        await self._drained.wait()
        if self._queued_bytes:
            raise ConnectionLost(f"{self.description}: the connection is closed")

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._source = None
        # The writer sends the queue and the end of the input, at which the command exits; the reader reports that.
        self._something_to_send.set()
        self._may_read.set()

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
        try:
            while True:
                if self._queue:
                    data = self._next_control()
                    await self._socket.send(data)
                    self._queued_bytes -= len(data)
                    if not self._queued_bytes:
                        self._drained.set()
                elif self._closing:
                    await self._end()
                    return
                elif (frame := self._next_frame()) is not None:
                    await self._socket.send(frame_length(frame) if self._lengths else frame_line(frame))
                else:
                    self._something_to_send.clear()
                    await self._something_to_send.wait()
        except ConnectionLost:
            # The reader notices the same, with the reason.
            return

    def _next_control(self) -> bytes:
        if len(self._queue) == 1 or self._queued_bytes > JOINED_BYTES:
            return self._queue.popleft()
        joined = b"".join(self._queue)
        self._queue.clear()
        return joined

    def _next_frame(self) -> bytes | None:
        frame = None if self._source is None else self._source.next_frame()
        if isinstance(frame, SpoolFrame):
            raise TypeError("an exec takes no spool frames")
        return frame

    async def _end(self) -> None:
        """End the command by the end of its input; if it does not exit, its connection is closed."""
        await self._socket.close_input()
        await asyncio.sleep(CLOSE_SECONDS)
        await self._socket.close()

    # --- the end -----------------------------------------------------------------------------------------------

    def _lose(self) -> None:
        closed_by_us, self._closing = self._closing, True
        self._source = None
        self._drained.set()
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
