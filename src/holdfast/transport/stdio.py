"""A command's stdin and stdout as a channel, from outside (`dial`) and from inside (`serve`).

`dial` starts, watches and ends the command, which may be `docker exec -i … holdfast connect` or
`ssh … holdfast connect`; `serve` takes over the standard descriptors of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

from holdfast.errors import CommandNotFound, ConnectionLost, HoldfastError, InvalidParams
from holdfast.transport.channel import Receiver
from holdfast.transport.stream import StreamChannel
from holdfast.types import MAX_MESSAGE_BYTES
from holdfast.wire.framing import Oversized

#: The default capacity of a pipe, and the capacity of the command's stdout after a read of a full pipe: fewer and
#: larger reads. Not before, because the kernel limits the capacity of all pipes of a user together.
PIPE_BYTES: Final = 64 * 1024
GROWN_PIPE_BYTES: Final = 1024 * 1024
#: The tail of the command's stderr that is held: enough for a traceback.
STDERR_TAIL_BYTES: Final = 64 * 1024
#: The part of it in the error: the last lines have the reason.
STDERR_SHOWN_BYTES: Final = 2_000
#: The long query of a URL. It may have lost its end, and with it the closing quotation mark.
_QUERY: Final = re.compile(r"\?[^\s\"'?]*=[^\s\"'?]{60,}")
#: The time for the command after the end of its input, and again after TERM. A server gives its processes 5 s
#: between TERM and KILL; if it were killed during that time, they would be left behind.
GRACE_SECONDS: Final = 10.0


class _Command:
    """The command between channel and receiver. The receiver gets the end once the command is reaped."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        receiver: Receiver,
        name: str,
        grace: float,
        explain: Callable[[ConnectionLost], Exception] | None,
        report: bytes | None,
        request: bytes | None,
    ) -> None:
        self._explain = explain
        self._report = report
        self._request = request
        self._loop = asyncio.get_running_loop()
        #: Set when the report has come; an error if the command ended before it.
        self.reported: asyncio.Future[None] = self._loop.create_future()
        if report is None:
            self.reported.set_result(None)
        #: The first line before the report that begins with `request`.
        self.requested: asyncio.Future[bytes] = self._loop.create_future()
        self._process = process
        self._receiver = receiver
        self._name = name
        self._grace = grace
        self._tail = bytearray()
        #: Whether the first message has arrived. Lines before it are passed to `explain`.
        self._receiving = explain is None
        self._channel_lost = False
        self._exited = False
        self._error: Exception | None = None
        self._closed_by_us = False
        self._timer: asyncio.TimerHandle | None = None
        assert process.stderr is not None
        self._stderr = os.dup(process.stderr.fileno())
        process.stderr.close()
        os.set_blocking(self._stderr, False)
        self._loop.add_reader(self._stderr, self._stderr_readable)
        self._watch()

    # --- Receiver of the channel -------------------------------------------------------------------------------

    def message_received(self, message: bytes | Oversized) -> None:
        # Engines print their errors and login shells their greetings on stdout; neither begins like a message.
        if not self._receiving and not isinstance(message, Oversized):
            if not self.reported.done() and bytes(message) == self._report:
                self.reported.set_result(None)
                return
            if self._request is not None and not self.requested.done() and bytes(message).startswith(self._request):
                self.requested.set_result(bytes(message))
                return
            if not self.reported.done() or bytes(message[:64]).lstrip()[:1] != b"{":
                self._keep(bytes(message) + b"\n")
                return
            self._receiving = True
        self._receiver.message_received(message)

    def connection_lost(self, error: Exception | None) -> None:
        """The pipes are closed, at which the command should exit; otherwise signals follow."""
        self._channel_lost = True
        self._error = error
        if self._exited:
            self._finish()
        else:
            self._timer = self._loop.call_later(self._grace, self._insist, signal.SIGTERM)

    def closed_by_us(self) -> None:
        self._closed_by_us = True

    # --- the end of the command --------------------------------------------------------------------------------

    def _watch(self) -> None:
        if sys.platform == "linux":
            self._pidfd = os.pidfd_open(self._process.pid)
            self._loop.add_reader(self._pidfd, self._pidfd_readable)
        else:
            threading.Thread(target=self._wait_in_thread, daemon=True).start()

    def _pidfd_readable(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._reaped()

    def _wait_in_thread(self) -> None:
        self._process.wait()
        self._loop.call_soon_threadsafe(self._reaped)

    def _insist(self, number: signal.Signals) -> None:
        self._timer = None
        if not self._exited:
            self._process.send_signal(number)
            if number == signal.SIGTERM:
                self._timer = self._loop.call_later(self._grace, self._insist, signal.SIGKILL)

    def _reaped(self) -> None:
        self._exited = True
        if self._timer is not None:
            self._timer.cancel()
        # While the channel is open there may be unread output; it ends when that has been read, or when a child of
        # the command closes the pipe.
        if self._channel_lost:
            self._finish()

    def _finish(self) -> None:
        self._stderr_readable()
        if self._stderr >= 0:
            self._loop.remove_reader(self._stderr)
            os.close(self._stderr)
            self._stderr = -1
        if self.reported.done():
            self._receiver.connection_lost(None if self._closed_by_us else self._failure())
        else:
            self.reported.set_exception(self._failure())

    def _failure(self) -> Exception:
        code = self._process.returncode
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        text = without_queries(self._tail.decode(errors="replace")).strip()[-STDERR_SHOWN_BYTES:]
        message = f"{self._name}: the command {ended}" + (f": {text}" if text else "")
        lost = ConnectionLost(message, exit_code=code, words=text)
        lost.__cause__ = self._error
        return lost if self._explain is None else self._explain(lost)

    def _stderr_readable(self) -> None:
        while self._stderr >= 0:
            try:
                data = os.read(self._stderr, STDERR_TAIL_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                self._loop.remove_reader(self._stderr)
                os.close(self._stderr)
                self._stderr = -1
                return
            self._keep(data)
            if len(data) < STDERR_TAIL_BYTES:
                return

    def _keep(self, data: bytes) -> None:
        self._tail += data
        del self._tail[:-STDERR_TAIL_BYTES]


class CommandChannel(StreamChannel):
    """The channel to a command. Closing it ends the command: end of input, then TERM, then KILL."""

    def __init__(
        self, process: subprocess.Popen[bytes], command: _Command, name: str, limit: int, lend: bool
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        # The channel owns its descriptors; the file objects of Popen would close them a second time.
        read_fd, write_fd = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        process.stdout.close()
        process.stdin.close()
        super().__init__(read_fd, write_fd, command, description=name, max_message_bytes=limit, lend=lend)
        self._command = command
        self._grown = False

    def _deliver_bulk(self, count: int, deliver: Callable[[bytes | Oversized], None]) -> None:
        if sys.platform == "linux" and count >= PIPE_BYTES and not self._grown:
            self._grown = True
            # Over the user's limit of pipe memory the small pipe works too.
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._read_fd, fcntl.F_SETPIPE_SZ, GROWN_PIPE_BYTES)
        super()._deliver_bulk(count, deliver)

    def close(self) -> None:
        self._command.closed_by_us()
        super().close()


async def dial(
    argv: Sequence[str],
    receiver: Receiver,
    *,
    env: Mapping[str, str] | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    lend: bool = False,
    grace: float = GRACE_SECONDS,
    name: str | None = None,
    explain: Callable[[ConnectionLost], Exception] | None = None,
    report: bytes | None = None,
    request: bytes | None = None,
    reply: Callable[[bytes], AsyncIterator[bytes]] | None = None,
) -> CommandChannel:
    """Run `argv` and use its stdin and stdout as a channel. `env` is its whole environment; None: this process's.

    The error of a lost connection has the end of the command's stderr and `name` (default: the whole command);
    `explain` may replace it. With a `report`, which needs `explain`, the function returns once the command printed
    that line, and raises the error of `explain` if the command exits first. A command that prints a line with the
    prefix `request` before its report gets the bytes of `reply` for this line as its input. The command gets its
    own session, so that a Ctrl-C at the terminal does not end it.
    """
    if not argv:
        raise InvalidParams("a command address needs at least the command's name")
    name = shlex.join(argv) if name is None else name
    try:
        # The fork takes about a millisecond, also through asyncio.
        process = subprocess.Popen(  # noqa: ASYNC220
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandNotFound(f"{argv[0]}: {error.strerror}") from error
    command = _Command(process, receiver, name, grace, explain, report, request)
    channel = CommandChannel(process, command, name, max_message_bytes, lend)
    try:
        if reply is not None:
            either: set[asyncio.Future[Any]] = {command.reported, command.requested}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if command.requested.done():
                await _send_reply(channel, command, reply(command.requested.result()))
        await command.reported
    except BaseException:
        command.reported.cancel()
        channel.close()
        raise
    return channel


async def _send_reply(channel: CommandChannel, command: _Command, pieces: AsyncIterator[bytes]) -> None:
    try:
        async for piece in pieces:
            await channel.send_raw(piece)
    except ConnectionLost:
        return  # the command exits before it has read all: its exit has the reason
    except HoldfastError:
        # The command sees the end of its input, and removes what it has prepared.
        channel.close()
        await asyncio.wait([command.reported])
        command.reported.exception()
        raise


def without_queries(text: str) -> str:
    """The output of a program without the long queries of URLs.

    `kubectl exec` prints the URL that it could not reach, which contains the whole command.
    """
    return _QUERY.sub("?…", text)


def serve(receiver: Receiver, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> StreamChannel:
    """The stdin and stdout of this process as a channel.

    Descriptor 0 becomes /dev/null and 1 a copy of stderr, so that a stray print or a child cannot write into the
    channel.
    """
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return StreamChannel(read_fd, write_fd, receiver, description="stdio", max_message_bytes=max_message_bytes)
