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
from holdfast.transport.preamble import Preamble
from holdfast.transport.queued import TaskChannel
from holdfast.types import MAX_MESSAGE_BYTES
from holdfast.wire.framing import FrameReader, frame_length, frame_line

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
        self.preamble = Preamble(receiver, name=name, explain=explain, report=report)
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
                    self.preamble.keep(bytes(data))
                if not self._may_read.is_set():
                    await self._may_read.wait()
        finally:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writer
            await self._socket.close()
            self._lose()

    def _feed(self, data: memoryview) -> None:
        for message in self._frames.feed_lent(data):
            if self._closing:
                return
            # Lent: the interface has bytes, and the receiver on this side also accepts views.
            self.preamble.message_received(cast(bytes, message))

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
        ended = self._socket.ended or Ended(CUT)
        if ended.message:
            self.preamble.keep(ended.message.encode())
        how = "was cut off" if ended.exit_code < 0 else f"ended with exit code {ended.exit_code}"
        self.preamble.ended(how, ended.exit_code, closed_by_us=closed_by_us)


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
        await channel.preamble.reported
    except BaseException:
        channel.close()
        raise
    return channel
