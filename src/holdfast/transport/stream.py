"""A channel on two descriptors: a socket, or the two pipes of a command. Touches descriptors and the event loop.

It works on the descriptors directly rather than through asyncio's transports, for two reasons: large messages are
read in place (`FrameReader.writable`), and output leaves by sendfile without passing through Python.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from holdfast.errors import ConnectionLost
from holdfast.transport.channel import Receiver, Source, SpoolFrame
from holdfast.types import MAX_MESSAGE_BYTES
from holdfast.wire.framing import LENGTH_BYTES, FrameReader, Oversized, frame_line

#: The size of a read while no large message is being received. The part of a large message in such a read is copied
#: once more, so this is much smaller than a large message.
READ_SIZE: Final = 64 * 1024
#: The size of a copy where sendfile cannot be used; bytes that the socket does not accept are read once more.
COPY_SIZE: Final = 256 * 1024
#: Bytes moved in one turn of the event loop: about half a millisecond.
TURN_BYTES: Final = 1024 * 1024
#: The requested buffer size of sockets, so that a 1 MiB frame is one write and one read; the kernel may give less.
SOCKET_BUFFER_BYTES: Final = 1024 * 1024

#: Descriptors in one message; the kernel accepts 253.
MAX_PASSED: Final = 128

#: The errors of sendfile for a descriptor that it does not support.
_NO_SENDFILE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSOCK, errno.EOPNOTSUPP})


class StreamChannel:
    """`Channel` on a byte stream. Owns its descriptors, which may be one and the same, and closes them.

    A started `SpoolFrame` is finished before anything else is sent. Its file must stay open, and its bytes
    unchanged, until the channel requests the next frame, the source calls `hold_frame`, or the connection is lost.

    With `lend`, the receiver gets large messages as memoryviews that are valid until it returns (see
    `FrameReader.wrote`); otherwise as bytes, which costs a copy.
    """

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        receiver: Receiver,
        *,
        description: str,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        lend: bool = False,
        passes_descriptors: bool = False,
    ) -> None:
        self.description = description
        self.passes_descriptors = passes_descriptors
        #: The Unix socket that was dialled, for a second connection to the same server.
        self.path: str | None = None
        #: Descriptors that leave with the next bytes.
        self._passing: deque[int] = deque()
        self._loop = asyncio.get_running_loop()
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._receiver = receiver
        self._lend = lend
        self._frames = FrameReader(max_message_bytes)
        self._lengths = False
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        #: The rest of the frame in flight: first bytes, then a piece of a file.
        self._rest: bytes | memoryview = b""
        self._rest_is_control = False
        self._spool: SpoolFrame | None = None
        self._source: Source | None = None
        #: Whether the source had no frame, and has not woken this channel since.
        self._source_is_empty = False
        self._pumping = False
        self._armed = False
        #: Whether the kernel supports sendfile to this descriptor, as far as known.
        self._sendfile = True
        self._closed = False
        self._lost = False
        self._write_error: Exception | None = None
        self._drained: list[asyncio.Future[None]] = []
        self._read_turn: asyncio.Handle | None = None
        self._write_turn: asyncio.Handle | None = None
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._reading = False
        self.resume_reading()

    # --- Channel -----------------------------------------------------------------------------------------------

    @property
    def takes_spool_frames(self) -> bool:
        return self._lengths

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def pass_descriptor(self, fd: int) -> None:
        if self._closed or self._write_error is not None:
            os.close(fd)
        else:
            self._passing.append(fd)

    def send(self, message: bytes) -> None:
        if self._closed or self._write_error is not None:
            return
        frame = self._framed(message)
        if self._armed or self._pumping or self._passing:
            self._queue.append(frame)
            self._queued_bytes += len(frame)
            if not self._armed:
                self._pump()
        else:
            self._send_now(frame)

    def set_source(self, source: Source | None) -> None:
        self._source = source
        self.wake()

    def wake(self) -> None:
        self._source_is_empty = False
        if not self._armed and self._source is not None and self._write_error is None:
            self._pump()

    def use_lengths(self) -> None:
        self._lengths = True
        self._frames.use_lengths()

    def hold_frame(self) -> None:
        if self._spool is not None:
            self._rest = bytes(self._rest) + self._read_spool(self._spool, self._spool.length)
            self._spool = None

    def pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._read_fd)
            if self._read_turn is not None:
                self._read_turn.cancel()
                self._read_turn = None

    def resume_reading(self) -> None:
        if self._reading or self._closed:
            return
        self._reading = True
        try:
            self._loop.add_reader(self._read_fd, self._readable)
        except PermissionError:
            # epoll refuses regular files, which are always readable: `holdfast serve --listen stdio < requests`.
            self._read_turn = self._loop.call_soon(self._read_always)

    async def drain(self) -> None:
        while self._queued_bytes:
            if self._lost or self._closed or self._write_error is not None:
                raise ConnectionLost(f"{self.description}: {self._write_error or 'the connection is closed'}")
            waiter = self._loop.create_future()
            self._drained.append(waiter)
            await waiter

    async def send_raw(self, data: bytes) -> None:
        """Send bytes that are no message, and wait until all of them are written."""
        if not self._closed and self._write_error is None:
            self._queue.append(data)
            self._queued_bytes += len(data)
            if not self._armed:
                self._pump()
        await self.drain()

    def close(self) -> None:
        if self._closed:
            return
        self._source = None
        if self._queued_bytes and self._write_error is None:
            self._pump()
        self._release()
        self._loop.call_soon(self._lose, None)

    # --- reading -----------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        deliver = self._receiver.message_received
        budget = TURN_BYTES
        while budget > 0 and self._reading:
            room = self._frames.writable()
            requested = READ_SIZE if room is None else len(room)
            data = b""
            try:
                if room is None:
                    data = os.read(self._read_fd, requested)
                    count = len(data)
                else:
                    count = os.readv(self._read_fd, [room])
            except (BlockingIOError, InterruptedError):
                count = -1
            except OSError as error:
                self._ended(self._write_error or error)
                return
            if count == 0 or (count < 0 and self._write_error is not None):
                self._ended(self._write_error)
                return
            if count < 0:
                return
            if room is None:
                whole = self._frames.whole(data)
                for message in self._frames.feed(data) if whole is None else (whole,):
                    deliver(message)
                    if self._closed:
                        return
            else:
                self._deliver_bulk(count, deliver)
            budget -= count
            if count < requested and self._write_error is None:
                # The socket is empty; another read would only return EAGAIN.
                return

    def _deliver_bulk(self, count: int, deliver: Callable[[bytes | Oversized], None]) -> None:
        message = self._frames.wrote(count)
        if message is not None:
            # The interface has bytes; a receiver with `lend` also accepts views.
            deliver(cast(bytes, message) if self._lend else bytes(message))

    def _read_always(self) -> None:
        self._readable()
        if self._reading and not self._closed:
            self._read_turn = self._loop.call_soon(self._read_always)

    # --- writing -----------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send until nothing is left, the connection accepts no more, or the budget of this turn is used."""
        if self._pumping or self._closed:
            return
        self._pumping = True
        budget = TURN_BYTES
        try:
            while budget > 0 and not self._closed:
                if self._rest:
                    budget -= self._write_rest()
                elif self._spool is not None:
                    budget -= self._write_spool(self._spool)
                elif self._queue:
                    self._rest, self._rest_is_control = self._next_control(), True
                elif self._source_is_empty or not self._pull():
                    self._disarm()
                    return
            self._arm()
        except (BlockingIOError, InterruptedError):
            self._arm()
        except OSError as error:
            self._write_failed(error)
        finally:
            self._pumping = False
            if self._drained and not self._queued_bytes:
                self._wake_drained()

    def _send_now(self, frame: bytes) -> None:
        """Send a control message on an idle channel, on which no other bytes wait: the last pump sent all."""
        try:
            written = os.write(self._write_fd, frame)
        except (BlockingIOError, InterruptedError):
            written = 0
        except OSError as error:
            self._write_failed(error)
            return
        if written < len(frame):
            self._rest, self._rest_is_control = memoryview(frame)[written:], True
            self._queued_bytes += len(frame) - written
            self._arm()

    def _next_control(self) -> bytes:
        """The next control message, joined with the following ones if they are small, for a single write."""
        if len(self._queue) == 1 or self._queued_bytes > READ_SIZE:
            return self._queue.popleft()
        joined = b"".join(self._queue)
        self._queue.clear()
        return joined

    def _pull(self) -> bool:
        """Take the source's next frame to send, or several small ones; False if there are none."""
        frames: list[bytes] = []
        size = 0
        while self._source is not None and self._spool is None and size < READ_SIZE:
            self._source_is_empty = True  # before the call, in which the source may wake this channel
            frame = self._source.next_frame()
            if frame is None:
                break
            self._source_is_empty = False
            if isinstance(frame, SpoolFrame):
                self._spool = frame if frame.length else None
                frames.append((len(frame.header) + frame.length).to_bytes(LENGTH_BYTES, "big") + frame.header)
            else:
                frames.append(self._framed(frame))
            size += len(frames[-1])
        self._rest, self._rest_is_control = b"".join(frames), False
        return bool(frames)

    def _framed(self, message: bytes) -> bytes:
        # `frame_length`, without the call: each message passes here.
        return len(message).to_bytes(LENGTH_BYTES, "big") + message if self._lengths else frame_line(message)

    def _write_rest(self) -> int:
        rest = self._rest
        if self._spool is not None and isinstance(rest, bytes) and self._spool.length <= READ_SIZE:
            # For a short piece of output, one write of header and data saves a system call, most of its cost.
            rest += self._read_spool(self._spool, self._spool.length)
            self._rest, self._spool = rest, None
        written = os.write(self._write_fd, rest) if not self._passing else self._write_with_descriptors(rest)
        self._rest = b"" if written == len(rest) else memoryview(rest)[written:]
        if self._rest_is_control:
            self._queued_bytes -= written
        return written

    def _write_with_descriptors(self, rest: bytes | memoryview) -> int:
        """Write with descriptors, each of which arrives with or before its message."""
        sock = socket.socket(fileno=self._write_fd)
        leaving = list(self._passing)[:MAX_PASSED]
        if len(leaving) < len(self._passing):
            rest = rest[:1]  # the others leave with the next byte
        try:
            written = socket.send_fds(sock, [rest], leaving)
        finally:
            sock.detach()
        for fd in leaving:
            self._passing.popleft()
            os.close(fd)
        return written

    def _write_spool(self, frame: SpoolFrame) -> int:
        if self._sendfile and frame.lends_pages:
            try:
                sent = os.sendfile(self._write_fd, frame.fd, frame.offset, frame.length)
            except OSError as error:
                if error.errno not in _NO_SENDFILE:
                    raise
                self._sendfile = False
                return 0
            if sent == 0:
                raise OSError(errno.EIO, f"the spool ends {frame.length} bytes before its frame")
        else:
            sent = os.write(self._write_fd, self._read_spool(frame, min(frame.length, COPY_SIZE)))
        left = frame.length - sent
        self._spool = frame._replace(header=b"", offset=frame.offset + sent, length=left) if left else None
        return sent

    def _read_spool(self, frame: SpoolFrame, count: int) -> bytes:
        data = os.pread(frame.fd, count, frame.offset)
        if len(data) < count:
            raise OSError(errno.EIO, f"the spool ends {count - len(data)} bytes before its frame")
        return data

    def _arm(self) -> None:
        if self._armed or self._closed:
            return
        self._armed = True
        try:
            self._loop.add_writer(self._write_fd, self._pump)
        except PermissionError:
            self._write_turn = self._loop.call_soon(self._write_always)

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            self._loop.remove_writer(self._write_fd)
            self._write_turn = None

    def _write_always(self) -> None:
        """Replaces a writer on a regular file, which epoll refuses and which is always writable."""
        self._pump()
        if self._write_turn is not None and not self._closed:
            self._write_turn = self._loop.call_soon(self._write_always)

    def _write_failed(self, error: OSError) -> None:
        """Stop sending after an error, and read the last messages of the peer, which often have the reason."""
        self._write_error = error
        self._disarm()
        self._queue.clear()
        self._queued_bytes = 0
        self._rest, self._spool = b"", None
        if self._reading:
            self._loop.call_soon(self._read_rest)
        else:
            self._loop.call_soon(self._ended, error)

    def _read_rest(self) -> None:
        if self._reading and not self._closed:
            self._readable()

    # --- the end -----------------------------------------------------------------------------------------------

    def _ended(self, error: Exception | None) -> None:
        if not self._closed:
            self._release()
            self._lose(error)

    def _release(self) -> None:
        self.pause_reading()
        self._disarm()
        self._closed = True
        while self._passing:
            os.close(self._passing.popleft())
        os.close(self._read_fd)
        if self._write_fd != self._read_fd:
            os.close(self._write_fd)
        self._wake_drained()

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._source = None
            self._receiver.connection_lost(error)

    def _wake_drained(self) -> None:
        waiters, self._drained = self._drained, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def from_socket(
    sock: socket.socket,
    receiver: Receiver,
    *,
    description: str,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    lend: bool = False,
) -> StreamChannel:
    """A channel on a connected socket, which the channel then owns."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    is_unix = sock.family == socket.AF_UNIX
    fd = sock.detach()
    return StreamChannel(
        fd,
        fd,
        receiver,
        description=description,
        max_message_bytes=max_message_bytes,
        lend=lend,
        passes_descriptors=is_unix,
    )
