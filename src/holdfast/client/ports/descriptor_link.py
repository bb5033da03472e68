"""A second connection to a server on this machine, over which the server passes sockets that it has connected.

A forwarded connection then needs no hop through the server and no frames. Only over a Unix socket: descriptors
cannot cross a machine. Touches its own socket and the sockets that it gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import deque
from typing import Final

from holdfast.client.connection.connection import CLIENT_NAME
from holdfast.errors import ConnectionLost, HoldfastError
from holdfast.wire import messages as m, stream_messages as s
from holdfast.wire.codec import Codec
from holdfast.wire.framing import FrameReader, Oversized, frame_line
from holdfast.wire.methods import P, R, WireMethod
from holdfast.wire.peer import Peer

#: Replies are a line each; a longer one is no reply.
MAX_REPLY_BYTES: Final = 64 * 1024
#: Descriptors in one read; the kernel passes at most 253 with one message.
MAX_DESCRIPTORS: Final = 253


class DescriptorLink:
    """A connection that carries `stream/dial` alone. It does not reconnect: its owner opens another one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._peer = Peer(Codec("json"), f"unix:{path}")
        self._frames = FrameReader(MAX_REPLY_BYTES)
        self._sock: socket.socket | None = None
        self._unsent = bytearray()
        self._descriptors: deque[int] = deque()
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def open(self) -> bool:
        return self._sock is not None

    async def connect(self) -> None:
        """Connect and shake hands; `HoldfastError` or `OSError` if the server does not take part."""
        sock = self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, self._path)
            self._loop.add_reader(sock, self._readable)
            await self._call(m.INITIALIZE, m.InitializeParams(f"{CLIENT_NAME} ports"))
        except BaseException:
            self.close()
            raise

    async def dial(self, address: s.StreamAddress) -> socket.socket:
        """A socket that the server has connected. `PortUnavailable` if it cannot; `ConnectionLost` without one."""
        # The server attaches the descriptor to the reply, so replies and descriptors have the same order.
        passed: list[int] = []
        await self._call(s.STREAM_DIAL, s.StreamDialParams(address), passed)
        if not passed:
            raise ConnectionLost(f"unix:{self._path}: the reply has no descriptor")
        return _checked(passed[0])

    async def _call(self, method: WireMethod[P, R], params: P, passed: list[int] | None = None) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def replied(result: object, error: HoldfastError | None) -> None:
            if passed is not None and error is None and self._descriptors:
                passed.append(self._descriptors.popleft())
            if done.done():
                for fd in passed or ():
                    os.close(fd)
            elif error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        _, message = self._peer.call(method, params, replied)
        self._send(frame_line(message))
        self._waiting.add(done)
        try:
            await done
        finally:
            self._waiting.discard(done)

    def _send(self, data: bytes) -> None:
        if self._sock is None:
            raise ConnectionLost(f"unix:{self._path}: closed")
        idle = not self._unsent
        self._unsent += data
        if idle:
            self._writable()

    def _writable(self) -> None:
        assert self._sock is not None
        try:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                del self._unsent[: self._sock.send(self._unsent)]
        except OSError as error:
            self._fail(error)
            return
        if self._unsent:
            self._loop.add_writer(self._sock, self._writable)
        else:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            data, passed, _, _ = socket.recv_fds(self._sock, MAX_REPLY_BYTES, MAX_DESCRIPTORS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        for fd in passed:
            os.set_inheritable(fd, False)
        self._descriptors.extend(passed)
        if not data:
            self._fail("closed by the server")
            return
        try:
            for message in self._frames.feed(data):
                if isinstance(message, Oversized):
                    raise ConnectionLost(f"a reply of {message.size} bytes")
                self._peer.receive(message)
        except HoldfastError as error:
            self._fail(error)
        if not self._peer.pending:
            self._close_descriptors()

    def _fail(self, reason: object) -> None:
        waiting, self._waiting = self._waiting, set()
        self.close()
        for each in waiting:
            if not each.done():
                each.set_exception(ConnectionLost(f"unix:{self._path}: {reason}"))

    def _close_descriptors(self) -> None:
        """Close descriptors that belong to no call."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            sock.close()
        self._close_descriptors()


def _checked(fd: int) -> socket.socket:
    """The socket behind a descriptor. A server in a sandbox is not trusted: it may have sent any kind of file."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConnectionLost("the descriptor is not a socket")
    sock = socket.socket(fileno=fd)
    if sock.type != socket.SOCK_STREAM:
        sock.close()
        raise ConnectionLost("the descriptor is not a stream socket")
    sock.setblocking(False)
    return sock
