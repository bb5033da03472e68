"""`holdfast connect`: copies stdin to the server's socket and the socket to stdout.

This is the long-lived channel of a host that can only execute commands in a sandbox. One thread, poll(2), and
splice(2) wherever one side is a pipe, so that the bytes never enter Python. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat

from holdfast.cli.support.text import fail
from holdfast.launch.local_server import connect_server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

USAGE = """usage: holdfast connect

Connect stdin and stdout to the socket of this machine's server, which is started when needed. End of input closes
that direction alone: output of the server is copied until it closes, or until stdout has accepted nothing for 10 s.
Exit code: 2 for a failed connection.
"""

#: The default capacity of a pipe, and the capacity after a move filled it: fewer, larger moves. Not before, because
#: the kernel limits the capacity of all pipes of a user together.
_PIPE_BYTES = 64 * 1024
_GROWN_PIPE_BYTES = 1024 * 1024
#: Moves of one direction in a turn of the loop, so that a flood does not delay the other direction.
_MOVES_A_TURN = 4
#: A pipe that polls writable accepts this much without blocking (PIPE_BUF); more could block both directions.
_SURE_BYTES = 4_096
#: After end of input, stdout may be held open by an engine that no longer reads it: containerd keeps the pipe of an
#: exec after its client died, so no POLLERR ever comes. A client that closes its end sends TERM after the same
#: time.
_STALLED_SECONDS = 10.0
_SPLICE_F_MOVE = 1
_SPLICE_F_NONBLOCK = 2


class _Direction:
    """One direction: waits for the source or the sink, whichever is not ready, and moves bytes.

    splice(2) blocks on neither, so it is tried once the source is readable. If it moves nothing, the sink is full.
    Copying may block on the sink, so it waits for both.
    """

    def __init__(self, source: int, sink: int, move: Callable[[int, int], int]) -> None:
        self.source = source
        self.sink = sink
        self._move = move
        self.ended = False
        self._readable = False

    @property
    def waits_for(self) -> tuple[int, int]:
        return (self.sink, select.POLLOUT) if self._readable else (self.source, select.POLLIN)

    def ready(self) -> None:
        """Advance after the descriptor of `waits_for` became ready."""
        splices = isinstance(self._move, _Splice) and not self._move.refused
        if not splices and not self._readable:
            self._readable = True
            return
        moved, was_readable, self._readable = 0, self._readable, False
        try:
            while moved < (_MOVES_A_TURN if splices else 1) and not self.ended:
                self.ended = self._move(self.source, self.sink) == 0
                moved += 1
        except BlockingIOError:
            self._readable = splices and not moved and not was_readable


def main(arguments: list[str]) -> int:
    if arguments:
        return fail(f"connect takes no arguments, not {arguments[0]!r}")
    with connect_server() as connection:
        bridge(connection, 0, 1)
    return 0


def bridge(connection: socket.socket, source: int, sink: int) -> None:
    """Copy `source` to the connection and the connection to `sink` until the server closes or `sink` has no reader.

    Once `source` has ended, a sink that accepts nothing for `_STALLED_SECONDS` counts as one without a reader.
    """
    connection.setblocking(False)
    up = _Direction(source, connection.fileno(), _mover(source, connection.fileno()))
    down = _Direction(connection.fileno(), sink, _mover(connection.fileno(), sink))
    poller, polling = select.poll(), dict[int, int]()
    while not down.ended:
        # The sink is polled even without data for it: a pipe polls POLLERR once its reader has closed it.
        wanted = {sink: 0}
        for way in (up, down):
            if not way.ended:
                fd, event = way.waits_for
                wanted[fd] = wanted.get(fd, 0) | event
        if wanted != polling:
            for fd in polling.keys() - wanted.keys():
                poller.unregister(fd)
            for fd, events in wanted.items():
                poller.register(fd, events)
            polling = wanted
        stalled = up.ended and down.waits_for[0] == sink
        polled = dict(poller.poll(_STALLED_SECONDS * 1000 if stalled else None))
        if not polled:
            return
        if polled.get(sink, 0) & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            return
        try:
            for way in (up, down):
                fd, event = way.waits_for
                if not way.ended and polled.get(fd, 0) & (event | select.POLLHUP | select.POLLERR):
                    way.ready()
                    if way is up and up.ended:
                        connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            if not _still_readable(connection):
                return
            # The server reads no more input but may have replied: copy that first.
            up.ended = True


def _still_readable(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def _mover(source: int, sink: int) -> Callable[[int, int], int]:
    """Return a function that moves bytes from `source` to `sink` without blocking on either."""
    pipes = [stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (source, sink)]
    if any(pipes) and hasattr(os, "splice"):
        return _Splice()
    return _copy


class _Splice:
    """splice(2), or plain copying once the kernel has refused it for this pair."""

    def __init__(self) -> None:
        self.refused = False
        self._grown = False

    def __call__(self, source: int, sink: int) -> int:
        if not self.refused:
            try:
                moved = os.splice(source, sink, _GROWN_PIPE_BYTES, flags=_SPLICE_F_MOVE | _SPLICE_F_NONBLOCK)
                if moved >= _PIPE_BYTES and not self._grown:
                    self._grown = True
                    _grow_pipes(source, sink)
                return moved
            except BlockingIOError:
                raise
            except OSError as error:
                import errno

                if error.errno not in (errno.EINVAL, errno.ENOSYS):
                    raise
                self.refused = True
                raise BlockingIOError from None  # copying waits for the sink first
        return _copy(source, sink)


def _grow_pipes(*fds: int) -> None:
    for fd in fds:
        # A socket has no such size; a pipe may be over the user's limit, and the small one works too.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _GROWN_PIPE_BYTES)


def _copy(source: int, sink: int) -> int:
    # The sink polled writable and has no other writer, so it accepts this much at once. The socket may accept a
    # part, and the loop then waits for the rest.
    data = os.read(source, _SURE_BYTES)
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(sink, view) :]
        except BlockingIOError:
            waiter = select.poll()
            waiter.register(sink, select.POLLOUT)
            waiter.poll()
    return len(data)
