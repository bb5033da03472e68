"""The server's end of the line to its keeper: hands descriptors over, takes them back, asks how a process ended.

Handing over is one system call without an answer: what we say waits in the socket, and the keeper reads it when it
is rung, or when we are dead. Only what a new server asks at its start, and the status of a process that an earlier
server had started, wait for the keeper. Touches one socket, and signals the keeper.
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

#: The keeper answers in microseconds. One that does not is stopped or dead, and there is no going on without it.
ANSWER_SECONDS: Final = 10.0
#: Pids in one packet: a fraction of what a packet may hold.
_PIDS_A_PACKET: Final = 1_000
#: So many may wait before the keeper is rung: a socket holds some 160 of them.
_PACKETS_A_RING: Final = 64
#: Descriptors that the keeper needs for itself, and to start a server.
_KEEPERS_OWN: Final = 32
_SPACE: Final = socket.CMSG_SPACE(PACKET_DESCRIPTORS * array.array("i").itemsize)


class Held(NamedTuple):
    """What the keeper holds under one key: duplicates of ours, and from here on ours."""

    path: str
    fds: list[int]


class KeeperLink:
    """One line to the keeper, for the life of this server."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(ANSWER_SECONDS)
        self.pid = os.getppid()
        #: By the monotonic clock, as the keeper told it at `take`.
        self.started_at = 0.0
        self.restarts = 0
        #: What the keeper understands; it may be of an earlier version than we are.
        self.protocol = 0
        self.lost = False
        self._pidfd = os.pidfd_open(self.pid)
        self._waiting = 0
        #: How many descriptors the keeper holds, by key.
        self._held: dict[str, int] = {}
        self._held_in_all = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def keep(self, key: str, fds: Sequence[int], path: str = "") -> None:
        """Hold duplicates of these descriptors, whatever becomes of us."""
        self._count(key, len(fds))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        self._send(("KEEP", key, path), [rights])

    def require_room(self, count: int) -> None:
        """Raise if the keeper could not hold so many more: it would lose them without a word to us."""
        if self.lost:
            return
        limit = _descriptor_limit(self.pid)
        if limit is not None and self._held_in_all + count + _KEEPERS_OWN > limit:
            raise ResourceExhausted(
                f"the keeper, pid {self.pid}, holds {self._held_in_all} descriptors, and its limit is {limit} "
                "(RLIMIT_NOFILE): what is started now would not survive a restart of the server"
            )

    def _count(self, key: str, count: int) -> None:
        self._held_in_all += count - self._held.pop(key, 0)
        if count:
            self._held[key] = count

    def drop(self, key: str, *, at_once: bool = False) -> None:
        """Let go of what is held; `at_once` if somebody waits for the other end to close."""
        self._count(key, 0)
        self._send(("DROP", key))
        if at_once:
            self.ring()

    def ring(self) -> None:
        """Have the keeper read what we said."""
        self._waiting = 0
        if self.lost:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, BELL)
        except ProcessLookupError:
            self.lost = True

    def take(self) -> dict[str, Held]:
        """Everything that is held, once, at the start."""
        self._send(("TAKE",))
        self.ring()
        held: dict[str, Held] = {}
        try:
            while True:
                key, *rest = self._receive(fds := array.array("i"))
                if key is None:
                    self.started_at, self.restarts, self.protocol = rest[:3]
                    return held
                held[key] = Held(rest[0], list(fds))
                self._count(key, len(fds))
        except BaseException:
            for each in held.values():
                _close(each.fds)
            raise

    def lead(self, pids: Iterable[int]) -> None:
        """These are processes of ours, which the keeper inherited from an earlier server."""
        left = list(pids)
        while left:
            batch, left = left[:_PIDS_A_PACKET], left[_PIDS_A_PACKET:]
            self._send(("LEAD", tuple(batch)))

    def status(self, pid: int) -> tuple[int, int] | None:
        """How such a process ended: `si_code` and `si_status`; None if the keeper cannot tell, or is gone."""
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
        """Its status is noted: it need not be kept."""
        self._send(("FREE", pid))

    def up(self) -> None:
        self._send(("UP",))
        self.ring()

    def stop(self) -> None:
        """We end on purpose."""
        self._send(("STOP",))
        self.ring()

    def wait_for_next(self, path: str) -> str | None:
        """We end and leave everything: the next server's command is brought to this socket. Or why it cannot."""
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
        """Whether the keeper is still there; for when the line can be read and nothing was asked."""
        poll = select.poll()
        poll.register(self._socket, 0)
        self.lost = self.lost or bool(poll.poll(0))  # nothing but a hang-up is waited for
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
                # More descriptors are on their way than we may have open. Once it has answered it has read them.
                self.status(os.getpid())
                self._socket.sendmsg([packet], rights)
        except OSError:
            # The processes go on as long as we do; `check` finds out and the server is told.
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
            raise SandboxError(f"the keeper, pid {self.pid}, does not answer: {error}") from None
        if not packet:
            self.lost = True
            raise SandboxError(f"the keeper, pid {self.pid}, is gone")
        for _, _, data in extra:
            fds.frombytes(data)
        if flags & socket.MSG_CTRUNC:
            # The kernel delivered a part of them. The keeper still holds them all, for the next server.
            _close(fds)
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ResourceExhausted(
                f"the keeper, pid {self.pid}, holds more descriptors than this server may open: its limit is"
                f" {limit} (RLIMIT_NOFILE)"
            )
        return marshal.loads(packet)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _descriptor_limit(pid: int) -> int | None:
    try:
        return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
    except (PermissionError, ProcessLookupError):
        return None  # gone: that is told elsewhere
