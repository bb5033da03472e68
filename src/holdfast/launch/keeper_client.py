"""The client of a keeper that waits without a server: finds it, queries it, passes it the next server's command.

A program that starts a server uses it before it starts a new keeper. Standard library only, and little of it:
`holdfast exec` imports this module. Touches the socket beside the server's, and signals the keeper.
"""

from __future__ import annotations

import marshal
import os
import socket
import struct
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

#: The suffix of the keeper's socket after the name of the server's; it exists only while a keeper waits.
SUFFIX = ".keeper"
#: The keeper replies in microseconds; one that does not is stopped.
ANSWER_SECONDS = 10.0
_ANSWER_BYTES = 65_536


def command_socket_of(socket_path: str) -> str:
    """Return the path of the socket at which a keeper waits for the next server of this socket."""
    return os.path.abspath(socket_path) + SUFFIX


def find(socket_path: str) -> WaitingKeeper | None:
    """Return the keeper that waits for the next server of this socket, or None."""
    path = command_socket_of(socket_path)
    if not os.path.lexists(path):
        return None  # the usual case
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # By the directory's descriptor: the path may be longer than a socket's address.
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        finally:
            os.close(directory)
    except OSError as error:
        connection.close()
        if isinstance(error, ConnectionRefusedError):
            with suppress(FileNotFoundError):
                os.unlink(path)  # of a keeper that was killed while it waited
        return None
    keeper = WaitingKeeper(connection)
    if keeper.uid not in (os.geteuid(), 0):
        keeper.close()  # it would receive this environment
        return None
    return keeper


def find_at(addresses: Sequence[str]) -> WaitingKeeper | None:
    """Return the keeper of the first of these addresses that has one, or None."""
    for address in addresses:
        if address.startswith("unix:") and (keeper := find(address.removeprefix("unix:"))) is not None:
            return keeper
    return None


class WaitingKeeperStatus:
    """The command of the last server, why the keeper waits for another, and the number of its processes."""

    __slots__ = ("children", "command", "why")

    def __init__(self, command: list[str], why: str, children: int) -> None:
        self.command = command
        self.why = why
        self.children = children


class WaitingKeeper:
    """A connection to a waiting keeper."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_SECONDS)
        self._connection = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, self.uid, _ = struct.unpack("3i", credentials)

    def close(self) -> None:
        self._connection.close()

    def about(self) -> WaitingKeeperStatus:
        """Return the keeper's status; call it once. The reply of a later version may have more members."""
        self._connection.send(marshal.dumps(("STATUS",), 2))
        _, command, why, children, *_ = self._receive() or (0, [], "it gives no reason", 0)
        return WaitingKeeperStatus(command, why, children)

    def give(self, command: Sequence[str], ready_fd: int | None) -> None:
        """Pass the server's command, with this process's environment, directory and standard descriptors."""
        order = os.memfd_create("holdfast-command")
        cwd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with open(order, "wb", closefd=False) as file:
                marshal.dump((list(command), dict(os.environb)), file, 2)
            ready = [] if ready_fd is None else [ready_fd]
            socket.send_fds(self._connection, [marshal.dumps(("SERVE",), 2)], [0, 1, 2, cwd, order, *ready])
        finally:
            os.close(order)
            os.close(cwd)

    def attend(self, *, unattended: bool) -> tuple[int, str]:
        """Wait for the end of that server, or if `unattended` until it serves; returns the exit code and the error.

        Signals that end a server are sent to the keeper, which forwards them.
        """
        import signal

        pidfd = os.pidfd_open(self.pid)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
                signal.signal(number, lambda number, _: signal.pidfd_send_signal(pidfd, number))
        self._connection.settimeout(None)
        while True:
            match self._receive():
                case ("UP", *_):
                    if unattended:
                        return 0, ""
                case ("ENDED", int(code), str(why), *_):
                    return code, why
                case _:
                    return 1, f"the keeper, pid {self.pid}, is gone, or accepted another command"

    def _receive(self) -> Any:
        try:
            packet = self._connection.recv(_ANSWER_BYTES)
        except OSError:
            return None
        return marshal.loads(packet) if packet else None
