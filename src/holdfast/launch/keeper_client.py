"""A keeper that waits without a server: where it is found, what it tells, how it gets the next server's command.

Used by whoever starts a server, before it starts a keeper of its own. Standard library only, and little of it:
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

#: The keeper's socket has the name of the server's with this behind it; it is there only while a keeper waits.
SUFFIX = ".keeper"
#: The keeper answers in microseconds; one that does not is stopped.
ANSWER_SECONDS = 10.0
_ANSWER_BYTES = 65_536


def door_of(socket_path: str) -> str:
    """Where a keeper waits for the next server at this socket."""
    return os.path.abspath(socket_path) + SUFFIX


def find(socket_path: str) -> WaitingKeeper | None:
    """The keeper that waits for the next server at this socket, if one does."""
    door = door_of(socket_path)
    if not os.path.lexists(door):
        return None  # nearly always
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # By the directory's descriptor: its own path may be longer than a socket's address.
        directory = os.open(os.path.dirname(door), os.O_PATH | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{directory}/{os.path.basename(door)}")
        finally:
            os.close(directory)
    except OSError as error:
        connection.close()
        if isinstance(error, ConnectionRefusedError):
            with suppress(FileNotFoundError):
                os.unlink(door)  # of a keeper that was killed while it waited
        return None
    keeper = WaitingKeeper(connection)
    if keeper.uid not in (os.geteuid(), 0):
        keeper.close()  # it would be given our environment
        return None
    return keeper


def find_at(addresses: Sequence[str]) -> WaitingKeeper | None:
    """The keeper that waits at the first of these addresses that has one."""
    for address in addresses:
        if address.startswith("unix:") and (keeper := find(address.removeprefix("unix:"))) is not None:
            return keeper
    return None


class WaitingKeeperStatus:
    """The command of its last server, why it waits for another, and how many processes it holds."""

    __slots__ = ("children", "command", "why")

    def __init__(self, command: list[str], why: str, children: int) -> None:
        self.command = command
        self.why = why
        self.children = children


class WaitingKeeper:
    """One connection to it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_SECONDS)
        self._connection = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, self.uid, _ = struct.unpack("3i", credentials)

    def close(self) -> None:
        self._connection.close()

    def about(self) -> WaitingKeeperStatus:
        """What it says of itself, once; the answer of a later version may have more."""
        self._connection.send(marshal.dumps(("STATUS",), 2))
        _, command, why, children, *_ = self._hear() or (0, [], "it does not say why", 0)
        return WaitingKeeperStatus(command, why, children)

    def give(self, command: Sequence[str], ready_fd: int | None) -> None:
        """This is the server's command from now on, with our environment, directory, and standard descriptors."""
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
        """Wait for the end of that server, or only until it serves; the exit code, and what went wrong.

        Signals that end a server are the keeper's: it passes them on.
        """
        import signal

        pidfd = os.pidfd_open(self.pid)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
                signal.signal(number, lambda number, _: signal.pidfd_send_signal(pidfd, number))
        self._connection.settimeout(None)
        while True:
            match self._hear():
                case ("UP", *_):
                    if unattended:
                        return 0, ""
                case ("ENDED", int(code), str(why), *_):
                    return code, why
                case _:
                    return 1, f"the keeper, pid {self.pid}, is gone, or gave the server to another"

    def _hear(self) -> Any:
        try:
            packet = self._connection.recv(_ANSWER_BYTES)
        except OSError:
            return None
        return marshal.loads(packet) if packet else None
