"""Copies bytes between pairs of connected sockets, in a thread of its own. Touches the sockets that it is given.

A turn of an asyncio loop costs more than the system calls of a small message, so the thread waits on its own epoll.
Per direction it holds at most one piece: while a socket accepts no more, nothing is read from the other one.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from typing import Final

from holdfast.transport.sockets import reset

#: Bytes of one read. Larger pieces are no faster, and each pair with a slow reader holds one.
PIECE_BYTES: Final = 256 * 1024


class _End:
    """One of two sockets, and the bytes that it has not accepted yet."""

    __slots__ = ("closed", "ended", "fd", "mask", "other", "recv_into", "send", "shut", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.recv_into, self.send = sock.recv_into, sock.send
        self.other: _End = self
        self.unsent: memoryview | None = None
        self.mask = select.EPOLLIN
        #: Its program sends no more; and the other program's end was passed on to it.
        self.ended = False
        self.shut = False
        self.closed = False


class SocketRelay:
    """Pairs of sockets. `add` gives it a pair, which it then owns; `close` resets all pairs that are left."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._new: deque[tuple[socket.socket, socket.socket]] = deque()
        self._ends: dict[int, _End] = {}
        self._closing = False
        #: Pieces that were copied.
        self.moved = 0
        # A daemon, so that a program can exit without closing its forward.
        self._thread = threading.Thread(target=self._run, name="holdfast-relay", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._ends) // 2 + len(self._new)

    def add(self, near: socket.socket, far: socket.socket) -> None:
        """Copy between two connected sockets until both directions have ended, or one is reset."""
        self._new.append((near, far))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Reset every pair and end the thread."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._epoll.close()
            os.close(self._wake)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ends, poll, room = self._ends, self._epoll.poll, memoryview(bytearray(PIECE_BYTES))
        while not self._closing:
            for fd, events in poll():
                end = ends.get(fd)
                if end is None:
                    if fd == self._wake:
                        os.eventfd_read(fd)
                        self._take_new()
                    continue
                try:
                    if events & select.EPOLLOUT:
                        self._flush(end)
                    if events & ~select.EPOLLOUT and not end.closed:
                        self._copy(end, room)
                except (BlockingIOError, InterruptedError):
                    continue
                except OSError:
                    self._drop(end, orderly=False)
        for end in list(ends.values()):
            self._drop(end, orderly=False)
        while self._new:
            for sock in self._new.popleft():
                reset(sock)

    def _take_new(self) -> None:
        while self._new and not self._closing:
            pair = self._new.popleft()
            near, far = map(_End, pair)
            near.other, far.other = far, near
            for end in (near, far):
                self._ends[end.fd] = end
                self._epoll.register(end.fd, end.mask)

    def _copy(self, end: _End, room: memoryview) -> None:
        other = end.other
        if end.ended or other.unsent is not None:
            # An error or a hang-up while nothing is read: epoll reports these always.
            if end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or other.closed:
                self._drop(end, orderly=False)
            else:
                self._listen(end)
            return
        count = end.recv_into(room)
        self.moved += 1
        if not count:
            end.ended = True
            self._end_writing(other)
            return
        try:
            sent = other.send(room[:count])
        except BlockingIOError:
            sent = 0
        if sent < count:
            other.unsent = memoryview(bytes(room[sent:count]))
            self._listen(end)
            self._listen(other)

    def _flush(self, end: _End) -> None:
        if end.unsent is not None:
            rest = end.unsent[end.send(end.unsent) :]
            end.unsent = rest or None
        if end.unsent is None:
            self._listen(end)
            self._listen(end.other)
            if end.other.ended:
                self._end_writing(end)

    def _end_writing(self, end: _End) -> None:
        """Pass an end of file on, after the bytes that are still held."""
        if end.unsent is None and not end.shut:
            end.shut = True
            end.sock.shutdown(socket.SHUT_WR)
        if end.shut and end.other.shut:
            self._drop(end, orderly=True)
        else:
            self._listen(end.other)

    def _listen(self, end: _End) -> None:
        """Watch for exactly the events that can be handled now."""
        if end.closed:
            return
        mask = 0 if end.ended or end.other.unsent is not None else select.EPOLLIN
        mask |= 0 if end.unsent is None else select.EPOLLOUT
        if mask != end.mask:
            # An end that needs nothing is removed, because epoll reports a hang-up even if it was not requested.
            if not mask:
                self._epoll.unregister(end.fd)
            elif not end.mask:
                self._epoll.register(end.fd, mask)
            else:
                self._epoll.modify(end.fd, mask)
            end.mask = mask

    def _drop(self, end: _End, *, orderly: bool) -> None:
        for each in (end, end.other):
            if each.closed:
                continue
            each.closed = True
            del self._ends[each.fd]
            if each.mask:
                self._epoll.unregister(each.fd)
            if orderly:
                each.sock.close()
            else:
                reset(each.sock)
