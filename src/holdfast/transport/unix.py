"""Unix sockets: who may listen where, and who may connect. Touches the file system and sockets.

The socket lives in a directory that only its owner may enter, and each peer's uid is asked of the kernel, so a
permission that was set wrong on one of the two does not open the server to other users.
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

#: `sun_path` holds 108 bytes, the last of which the kernel wants for the final NUL.
MAX_PATH_BYTES: Final = 107
#: Connections that wait to be accepted. The kernel clamps it to net.core.somaxconn.
BACKLOG: Final = 1024
#: How long to leave new connections waiting when descriptors have run out: some must be closed meanwhile.
EXHAUSTED_PAUSE_SECONDS: Final = 0.2

_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

#: Gets each connection whose peer may talk to us, and owns it from then on.
Accept = Callable[[socket.socket], None]


class UnixListener:
    """A listening socket at `path`. `close` removes the file if it is still this one."""

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


def listen(
    path: str, accept: Accept, *, refused: Callable[[str], None] | None = None, taken: int | None = None
) -> UnixListener:
    """Listen at `path`. A file left by a server that is gone is replaced; a live server is left alone.

    `refused` is told of every peer that was turned away; the log is, if it is not given. `taken` is the descriptor
    of a socket that an earlier server listened on here: who connected meanwhile waits there.
    """
    if taken is not None:
        sock = socket.socket(fileno=taken)
        sock.setblocking(False)
        # Once more: who connects is told the pid of the process that listened last.
        sock.listen(BACKLOG)
        return UnixListener(sock, path, accept, refused or log.warning)
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise InvalidParams(
            f"unix:{path}: the path is longer than {MAX_PATH_BYTES} bytes, which sockets do not take"
        )
    directory = os.path.dirname(os.path.abspath(path))
    prepare_directory(directory)
    # Two servers that start at once could each find the old file dead, and the second would remove the first's new
    # socket. The lock is held only while we bind; the kernel drops it if we die.
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
    return from_socket(sock, receiver, description=f"unix:{path}", max_message_bytes=max_message_bytes, lend=lend)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The pid and the uid of the process that connected, as the kernel saw them at that moment."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def prepare_directory(directory: str) -> None:
    """Make `directory` for us alone, or see that it is; `Forbidden` says what is wrong with it."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(directory, mode=0o700)
    # Not lstat: a link to a directory of ours is as good as the directory, and the link's owner is checked by what
    # it leads to.
    found = os.stat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidParams(f"{directory}: not a directory")
    if found.st_uid != os.geteuid():
        raise Forbidden(f"{directory}: owned by uid {found.st_uid}; a socket there could be replaced by its owner")
    if found.st_mode & 0o022:
        raise Forbidden(f"{directory}: mode {found.st_mode & 0o777:04o}; others can write there: chmod 700 it")


def _require_free(path: str) -> None:
    """Return if nobody listens at `path`; a socket file whose server is gone refuses connections."""
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
            # Its backlog is full: somebody listens.
            pass
    raise InvalidParams(f"unix:{path}: a server already listens there")


def _bind(path: str) -> socket.socket:
    """A listening socket that appears at `path` when it is ready, in one step: no client meets it half made."""
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
