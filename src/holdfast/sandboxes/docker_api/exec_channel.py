"""The channel to a server in a container: messages on the connection of an exec of Docker's engine.

Input is sent as it is; output arrives in frames (`OutputFrames`). Touches the engine's socket and the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final, cast

from holdfast.errors import ConnectionLost
from holdfast.sandboxes.docker_api.api import Exec, exit_code, start_exec
from holdfast.sandboxes.docker_api.output_frames import STDOUT, NoOutput, OutputFrames
from holdfast.transport.channel import Receiver
from holdfast.transport.preamble import Preamble, Reply, await_report
from holdfast.transport.stream import READ_SIZE, SOCKET_BUFFER_BYTES, TURN_BYTES, StreamChannel
from holdfast.types import MAX_MESSAGE_BYTES

#: The size of a read during a large message. The engine's socket holds about 200 KiB.
BULK_READ_BYTES: Final = 256 * 1024
#: The time for the command after the end of its input; then the connection is closed.
GRACE_SECONDS: Final = 10.0
#: The exit code of a command whose connection broke before its end.
CUT: Final = -1


class _Ending:
    """The receiver of the channel: the receiver behind it gets the end once the exit code is read."""

    def __init__(self, preamble: Preamble, path: str, id: str) -> None:
        self.preamble = preamble
        self.message_received = preamble.message_received
        self._path = path
        self._id = id
        #: The connection after `close`, until the command has ended.
        self._closing: int | None = None
        self._closed_by_us = False
        self._task: asyncio.Task[None] | None = None

    def closed_by_us(self, connection: int | None) -> None:
        self._closed_by_us, self._closing = True, connection

    def connection_lost(self, error: Exception | None) -> None:
        self._task = asyncio.create_task(self._end(error))

    async def _end(self, error: Exception | None) -> None:
        if self._closing is not None:
            await _await_end(self._closing)
        # The reason is of interest even after `close`, if the command had not printed its report.
        unknown = not self._closed_by_us or not self.preamble.reported.done()
        code = await exit_code(self._path, self._id) if unknown else 0
        how = "was cut off" if code is None else f"ended with exit code {code}"
        self.preamble.ended(how, CUT if code is None else code, closed_by_us=self._closed_by_us, cause=error)


async def _await_end(connection: int) -> None:
    """Read the connection to its end, without its output, and close it. Its input has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        try:
            if os.read(connection, READ_SIZE):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass  # the engine ended it
        loop.remove_reader(connection)
        ended.set_result(None)

    loop.add_reader(connection, readable)
    try:
        await asyncio.wait([ended], timeout=GRACE_SECONDS)
    finally:
        loop.remove_reader(connection)
        os.close(connection)


class ExecChannel(StreamChannel):
    """`Channel` on an exec, whose connection it owns. Closing it ends the command by the end of its input."""

    def __init__(
        self, running: Exec, ending: _Ending, *, name: str, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            running.connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        fd = running.connection.detach()
        super().__init__(fd, fd, ending, description=name, max_message_bytes=max_message_bytes, lend=True)
        self._ending = ending
        self._output = OutputFrames()
        if running.output:
            # Before the first read, whose callback the loop adds behind this one.
            self._loop.call_soon(self._take, running.output)

    def _readable(self) -> None:
        budget = TURN_BYTES
        while budget > 0 and self._reading:
            size = READ_SIZE if self._frames.writable() is None else BULK_READ_BYTES
            try:
                data = os.read(self._read_fd, size)
            except (BlockingIOError, InterruptedError):
                if self._write_error is not None:
                    self._ended(self._write_error)
                return
            except OSError as error:
                self._ended(self._write_error or error)
                return
            if not data:
                self._ended(self._write_error)
                return
            self._take(data)
            budget -= len(data)
            if len(data) < size and self._write_error is None:
                return

    def _take(self, data: bytes) -> None:
        try:
            for stream, piece in self._output.split(memoryview(data)):
                if self._closed:
                    return
                if stream == STDOUT:
                    self._feed(piece)
                else:
                    self._ending.preamble.keep(bytes(piece))
        except NoOutput as error:
            self._ended(ConnectionLost(f"{self.description}: {error}"))

    def _feed(self, piece: memoryview) -> None:
        for message in self._frames.feed_lent(piece):
            # Lent: the interface has bytes, and the receiver on this side also accepts views.
            self._receiver.message_received(cast(bytes, message))
            if self._closed:
                return

    def close(self) -> None:
        if self._closed:
            return
        connection: int | None = None
        # Without a descriptor the command ends, too, but `connection_lost` does not wait for that.
        with contextlib.suppress(OSError):
            connection = os.dup(self._write_fd)
        self._ending.closed_by_us(connection)
        super().close()
        if connection is not None:
            sock = socket.socket(fileno=connection)
            with contextlib.suppress(OSError):  # the engine ended it
                sock.shutdown(socket.SHUT_WR)
            sock.detach()


async def dial(
    path: str,
    container: str,
    argv: Sequence[str],
    receiver: Receiver,
    *,
    user: str | None,
    name: str,
    explain: Callable[[ConnectionLost], Exception],
    report: bytes | None,
    request: bytes | None,
    reply: Reply | None,
) -> ExecChannel:
    """Run `argv` in a container of the engine at `path`, and use its stdin and stdout as a channel.

    `report`, `request` and `reply` as for `stdio.dial`; `EngineError` if the engine refuses.
    """
    running = await start_exec(path, container, argv, user)
    preamble = Preamble(receiver, name=name, explain=explain, report=report, request=request)
    channel = ExecChannel(running, _Ending(preamble, path, running.id), name=name)
    await await_report(channel, preamble, reply)
    return channel
