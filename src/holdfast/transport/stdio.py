"""A command's stdin and stdout as a channel, from outside (`dial`) and from inside (`serve`).

`dial` starts, watches and ends the command, which may be `docker exec -i … holdfast connect` or
`ssh … holdfast connect`; `serve` takes over the standard descriptors of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from holdfast.errors import CommandNotFound, ConnectionLost, InvalidParams
from holdfast.transport.channel import Receiver
from holdfast.transport.child_exit import call_after_exit
from holdfast.transport.preamble import STDERR_TAIL_BYTES, Preamble, Reply, await_report
from holdfast.transport.stream import StreamChannel
from holdfast.types import MAX_MESSAGE_BYTES
from holdfast.wire.framing import Oversized

#: The default capacity of a pipe, and the capacity of the command's stdout after a read of a full pipe: fewer and
#: larger reads. Not before, because the kernel limits the capacity of all pipes of a user together.
PIPE_BYTES: Final = 64 * 1024
GROWN_PIPE_BYTES: Final = 1024 * 1024
#: The time for the command after the end of its input, and again after TERM. A server gives its processes 5 s
#: between TERM and KILL; if it were killed during that time, they would be left behind.
GRACE_SECONDS: Final = 10.0


class _Command:
    """The command between channel and receiver. The receiver gets the end once the command is reaped."""

    def __init__(self, process: subprocess.Popen[bytes], preamble: Preamble, grace: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._preamble = preamble
        self.message_received = preamble.message_received
        self._grace = grace
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
        call_after_exit(process, self._reaped)

    # --- Receiver of the channel -------------------------------------------------------------------------------

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
        code = self._process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._preamble.ended(how, code, closed_by_us=self._closed_by_us, cause=self._error)

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
            self._preamble.keep(data)
            if len(data) < STDERR_TAIL_BYTES:
                return


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
    reply: Reply | None = None,
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
    preamble = Preamble(receiver, name=name, explain=explain, report=report, request=request)
    command = _Command(process, preamble, grace)
    channel = CommandChannel(process, command, name, max_message_bytes, lend)
    await await_report(channel, preamble, reply)
    return channel


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
