"""The server's end of the socket to its keeper: hands descriptors over, takes them back, queries exit statuses.

To hand over is one system call without a reply: the packet waits in the socket, and the keeper reads it on a
signal, or when the server is dead. Only `take` at the start of a server, and the status of a process that an
earlier server started, wait for the keeper. Touches one socket, and signals the keeper.
"""

from __future__ import annotations

import array
import errno
import marshal
import os
import resource
import select
import signal
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.runtime.durability.keeper import BELL, PACKET_BYTES, PACKET_DESCRIPTORS

#: The keeper replies in microseconds; one that does not is stopped or dead, and the server cannot start without it.
ANSWER_SECONDS: Final = 10.0
#: The first server may have been started beside its keeper, which is an interpreter that starts: on a busy machine
#: that has taken ten seconds. The start of a server has a deadline of its own.
TAKE_SECONDS: Final = 60.0
#: Pids in one packet, far below the largest packet.
_PIDS_A_PACKET: Final = 1_000
#: Unread packets before the keeper is signalled: a socket holds some 160 of them.
_PACKETS_A_RING: Final = 64
#: Descriptors that the keeper needs for itself and to start a server.
_KEEPERS_OWN: Final = 32
_SPACE: Final = socket.CMSG_SPACE(PACKET_DESCRIPTORS * array.array("i").itemsize)


class HeldDescriptors(NamedTuple):
    """The descriptors that the keeper holds under one key; `take` returned duplicates, owned by the caller."""

    path: str
    fds: list[int]


class KeeperLink:
    """The connection to the keeper, for the life of this server."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(ANSWER_SECONDS)
        self.pid = os.getppid()
        #: The keeper's start by the monotonic clock, from `take`.
        self.started_at = 0.0
        self.restarts = 0
        #: The keeper's protocol version; the keeper may be older than the server.
        self.protocol = 0
        self.lost = False
        self._pidfd = os.pidfd_open(self.pid)
        self._waiting = 0
        #: The number of descriptors that the keeper holds, by key.
        self._held: dict[str, int] = {}
        self._held_in_all = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def keep(self, key: str, fds: Sequence[int], path: str = "") -> None:
        """Have the keeper hold duplicates of these descriptors, which survive the server."""
        self._count(key, len(fds))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        self._send(("KEEP", key, path), [rights])

    def require_room(self, count: int) -> None:
        """Raise `ResourceExhausted` if the keeper cannot hold `count` more: it would lose them without an error."""
        if self.lost:
            return
        limit = _descriptor_limit(self.pid)
        if limit is not None and self._held_in_all + count + _KEEPERS_OWN > limit:
            raise ResourceExhausted(
                f"the keeper, pid {self.pid}, holds {self._held_in_all} descriptors, and its limit is {limit} "
                "(RLIMIT_NOFILE): a process that is started now would not survive a restart of the server"
            )

    def _count(self, key: str, count: int) -> None:
        self._held_in_all += count - self._held.pop(key, 0)
        if count:
            self._held[key] = count

    def drop(self, key: str, *, at_once: bool = False) -> None:
        """Have the keeper close what it holds; `at_once` if a process waits for the end of file."""
        self._count(key, 0)
        self._send(("DROP", key))
        if at_once:
            self.ring()

    def ring(self) -> None:
        """Signal the keeper to read its packets."""
        self._waiting = 0
        if self.lost:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, BELL)
        except ProcessLookupError:
            self.lost = True

    def take(self) -> dict[str, HeldDescriptors]:
        """Return everything that the keeper holds; called once, at the start."""
        self._send(("TAKE",))
        self.ring()
        held: dict[str, HeldDescriptors] = {}
        self._socket.settimeout(TAKE_SECONDS)
        try:
            while True:
                key, *rest = self._receive(fds := array.array("i"))
                if key is None:
                    self._socket.settimeout(ANSWER_SECONDS)
                    self.started_at, self.restarts, self.protocol = rest[:3]
                    return held
                held[key] = HeldDescriptors(rest[0], list(fds))
                self._count(key, len(fds))
        except BaseException:
            for each in held.values():
                _close(each.fds)
            raise

    def lead(self, pids: Iterable[int]) -> None:
        """Name the processes of this server that the keeper inherited from an earlier server."""
        left = list(pids)
        while left:
            batch, left = left[:_PIDS_A_PACKET], left[_PIDS_A_PACKET:]
            self._send(("LEAD", tuple(batch)))

    def status(self, pid: int) -> tuple[int, int] | None:
        """Return `si_code` and `si_status` of such a process; None if the keeper has no status, or is gone."""
        self._send(("STATUS", pid))
        self.ring()
        if self.lost:
            return None
        try:
            answer: tuple[int, int] | None = self._receive(array.array("i"))
        except SandboxError:
            return None
        return answer

    def free(self, pid: int) -> None:
        """Have the keeper reap a process with a recorded status."""
        self._send(("FREE", pid))

    def up(self) -> None:
        self._send(("UP",))
        self.ring()

    def stop(self) -> None:
        """Announce that the server ends on purpose."""
        self._send(("STOP",))
        self.ring()

    def wait_for_next(self, path: str) -> str | None:
        """Have the keeper wait at this socket for the next server's command; returns an error, or None."""
        self._send(("WAIT", path))
        self.ring()
        if self.lost:
            return f"the keeper, pid {self.pid}, is gone"
        cannot: str | None = self._receive(array.array("i"))
        return cannot

    def close(self) -> None:
        self._socket.close()
        os.close(self._pidfd)

    def check(self) -> bool:
        """Return whether the keeper lives; for a socket that is readable without a request."""
        poll = select.poll()
        poll.register(self._socket, 0)
        self.lost = self.lost or bool(poll.poll(0))  # polls for a hang-up only
        return not self.lost

    def _send(self, message: tuple[Any, ...], rights: Sequence[tuple[int, int, array.array[int]]] = ()) -> None:
        if self.lost:
            return
        packet = marshal.dumps(message, 2)
        try:
            try:
                self._socket.sendmsg([packet], rights)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                # More descriptors are in flight than this server may open. A reply means that they were read.
                self.status(os.getpid())
                self._socket.sendmsg([packet], rights)
        except OSError:
            # The processes run as long as this server does; `check` reports the loss.
            self.lost = True
            return
        self._waiting += 1
        if self._waiting >= _PACKETS_A_RING:
            self.ring()

    def _receive(self, fds: array.array[int]) -> Any:
        try:
            packet, extra, flags, _ = self._socket.recvmsg(PACKET_BYTES, _SPACE, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            self.lost = True
            raise SandboxError(f"the keeper, pid {self.pid}, does not reply: {error}") from None
        if not packet:
            self.lost = True
            raise SandboxError(f"the keeper, pid {self.pid}, is gone")
        for _, _, data in extra:
            fds.frombytes(data)
        if flags & socket.MSG_CTRUNC:
            # The kernel delivered a part of the descriptors. The keeper still holds them all, for the next server.
            _close(fds)
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ResourceExhausted(
                f"the keeper, pid {self.pid}, holds more descriptors than this server may open: its limit is"
                f" {limit} (RLIMIT_NOFILE)"
            )
        return marshal.loads(packet)


class NullKeeperLink(KeeperLink):
    """The link of a server without a keeper, which behaves as if the keeper were gone."""

    def __init__(self) -> None:
        self.pid = self.restarts = self.protocol = 0
        self.started_at = 0.0
        self.lost = True
        self._held = {}
        self._held_in_all = 0

    def keep(self, key: str, fds: Sequence[int], path: str = "") -> None:
        """Return: the descriptors end with this server."""

    def drop(self, key: str, *, at_once: bool = False) -> None:
        """Return: the link holds no descriptor."""


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _descriptor_limit(pid: int) -> int | None:
    try:
        return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
    except (PermissionError, ProcessLookupError):
        return None  # the keeper is gone: `check` reports it
