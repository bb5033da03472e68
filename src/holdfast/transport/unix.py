"""Unix sockets: listening in a private directory, and checking peers. Touches the file system and sockets.

The socket is in a directory that only its owner may enter, and the kernel reports each peer's uid, so a wrong
permission on one of the two does not open the server to other users.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable
from typing import Final

from holdfast.errors import ConnectionLost, Forbidden, InvalidParams
from holdfast.transport.channel import Receiver
from holdfast.transport.stream import StreamChannel, from_socket
from holdfast.types import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

#: `sun_path` has 108 bytes, with the final NUL.
MAX_PATH_BYTES: Final = 107
#: Connections that wait to be accepted. The kernel clamps this to net.core.somaxconn.
BACKLOG: Final = 1024
#: How long new connections wait when descriptors have run out, until some are closed.
EXHAUSTED_PAUSE_SECONDS: Final = 0.2

_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

#: Called with each accepted connection, which it then owns.
Accept = Callable[[socket.socket], None]


class UnixListener:
    """A listening socket at `path`. `close` removes the file if it is still this socket's."""

    def __init__(self, sock: socket.socket, path: str, accept: Accept, refused: Callable[[str], None]) -> None:
        self.path = path
        self._socket = sock
        self._accept = accept
        self._refused = refused
        self._identity = _identity(path)
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        self._exhausted = False
        self._loop.add_reader(sock, self._acceptable)

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._socket)
        if _identity(self.path) == self._identity:
            os.unlink(self.path)
        self._socket.close()

    def _acceptable(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
                self._exhausted = False
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                if not self._exhausted:
                    self._exhausted = True
                    log.error("unix:%s: cannot accept: %s; trying again shortly", self.path, error.strerror)
                self._loop.remove_reader(self._socket)
                self._paused = self._loop.call_later(EXHAUSTED_PAUSE_SECONDS, self._resume)
                return
            self._admit(peer)

    def _admit(self, peer: socket.socket) -> None:
        pid, uid = peer_of(peer)
        if uid not in (os.geteuid(), 0):
            peer.close()
            self._refused(f"unix:{self.path}: refused process {pid} of uid {uid}")
            return
        peer.setblocking(False)
        self._accept(peer)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._socket, self._acceptable)


class AdoptedListener(UnixListener):
    """A listening socket that this process inherited. The permissions of its file control access: the uids of peers
    may belong to another user namespace, so they are not compared."""

    def __init__(self, sock: socket.socket, address: str, accept: Accept) -> None:
        super().__init__(sock, "", accept, log.warning)
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    def _admit(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._accept(peer)


def adopt(address: str, accept: Accept, *, taken: int | None = None) -> AdoptedListener:
    """Listen on the inherited socket `fd:N`, or on `taken`, the descriptor of an earlier server's socket."""
    number = address.removeprefix("fd:")
    if not number.isdecimal():
        raise InvalidParams(f"{address}: not fd:NUMBER")
    try:
        sock = socket.socket(fileno=int(number) if taken is None else taken)
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or sock.family != socket.AF_UNIX:
            raise InvalidParams(f"{address}: not a Unix socket that listens")
    except OSError as error:
        raise InvalidParams(f"{address}: {error.strerror}") from None
    sock.setblocking(False)
    sock.set_inheritable(False)
    return AdoptedListener(sock, address, accept)


def listen(
    path: str, accept: Accept, *, refused: Callable[[str], None] | None = None, taken: int | None = None
) -> UnixListener:
    """Listen at `path`. The file of a dead server is replaced; a running server is an error.

    `refused` is called with a message for every refused peer; the default logs it. `taken` is the descriptor of a
    socket on which an earlier server listened here, with the connections that wait there.
    """
    if taken is not None:
        sock = socket.socket(fileno=taken)
        sock.setblocking(False)
        # Repeated, because SO_PEERCRED gives clients the pid of the last process that called listen().
        sock.listen(BACKLOG)
        return UnixListener(sock, path, accept, refused or log.warning)
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise InvalidParams(f"unix:{path}: the path is longer than {MAX_PATH_BYTES} bytes, the limit of sockets")
    directory = os.path.dirname(os.path.abspath(path))
    prepare_directory(directory)
    # Of two servers that start at once, each could find the old file dead, and the second would remove the new
    # socket of the first. The lock is held only while binding; the kernel releases it if the process dies.
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _require_free(path)
        sock = _bind(path)
    finally:
        os.close(lock)
    return UnixListener(sock, path, accept, refused or log.warning)


async def dial(
    path: str, receiver: Receiver, *, max_message_bytes: int = MAX_MESSAGE_BYTES, lend: bool = False
) -> StreamChannel:
    """Connect to the server at `path`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, path)
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"unix:{path}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    channel = from_socket(
        sock, receiver, description=f"unix:{path}", max_message_bytes=max_message_bytes, lend=lend
    )
    channel.path = path
    return channel


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The pid and the uid of the peer at the time when it connected."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def prepare_directory(directory: str) -> None:
    """Create `directory` for this user alone, or check that it is; `Forbidden` has the reason otherwise."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(directory, mode=0o700)
    # Not lstat: a link to a directory of this user is as good as the directory.
    found = os.stat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidParams(f"{directory}: not a directory")
    if found.st_uid != os.geteuid():
        raise Forbidden(f"{directory}: owned by uid {found.st_uid}; a socket there could be replaced by its owner")
    if found.st_mode & 0o022:
        raise Forbidden(f"{directory}: mode {found.st_mode & 0o777:04o}; others can write there: chmod 700 it")


def _require_free(path: str) -> None:
    """Raise if a server listens at `path`; the socket file of a dead server refuses connections."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidParams(f"unix:{path}: a file that is not a socket is in the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            # The backlog is full, so a server listens.
            pass
    raise InvalidParams(f"unix:{path}: a server already listens there")


def _bind(path: str) -> socket.socket:
    """A listening socket that appears at `path` by a rename, so that no client finds it before it listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = os.path.join(os.path.dirname(path), f".{os.getpid()}")
    try:
        sock.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        sock.bind(temporary)
        os.chmod(temporary, 0o600)
        sock.listen(BACKLOG)
        os.rename(temporary, path)
    except OSError as error:
        sock.close()
        raise InvalidParams(f"unix:{path}: {error.strerror or error}") from error
    return sock


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
