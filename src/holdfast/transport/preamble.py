"""The lines that a command prints before its first message, between the channel to the command and the receiver.

The same for every way to run a command: pipes, an exec of an engine, an exec of a cluster. Touches nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from holdfast.errors import ConnectionLost, HoldfastError
from holdfast.transport.channel import Receiver
from holdfast.transport.stream import StreamChannel
from holdfast.wire.framing import Oversized

#: The tail of the command's stderr that is held: enough for a traceback.
STDERR_TAIL_BYTES: Final = 64 * 1024
#: The part of it in the error: the last lines have the reason.
STDERR_SHOWN_BYTES: Final = 2_000
#: The long query of a URL. It may have lost its end, and with it the closing quotation mark.
_QUERY: Final = re.compile(r"\?[^\s\"'?]*=[^\s\"'?]{60,}")

#: Makes the input for a command that printed a request, from that line.
Reply = Callable[[bytes], AsyncIterator[bytes]]


class Preamble:
    """Passes messages on to the receiver, and keeps the lines before the first one for the error of the end.

    Without `explain` every line is a message. With a `report`, messages begin after that line.
    """

    def __init__(
        self,
        receiver: Receiver,
        *,
        name: str,
        explain: Callable[[ConnectionLost], Exception] | None,
        report: bytes | None,
        request: bytes | None = None,
    ) -> None:
        self._receiver = receiver
        self._name = name
        self._explain = explain
        self._report = report
        self._request = request
        loop = asyncio.get_running_loop()
        #: Set when the report has come; an error if the command ended before it.
        self.reported: asyncio.Future[None] = loop.create_future()
        if report is None:
            self.reported.set_result(None)
        #: The first line before the report that begins with `request`.
        self.requested: asyncio.Future[bytes] = loop.create_future()
        #: Whether the first message has arrived. Lines before it are passed to `explain`.
        self._receiving = explain is None
        self._tail = bytearray()

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
                self.keep(bytes(message) + b"\n")
                return
            self._receiving = True
        self._receiver.message_received(message)

    def keep(self, data: bytes) -> None:
        """Keep error output of the command."""
        self._tail += data
        del self._tail[:-STDERR_TAIL_BYTES]

    def ended(self, how: str, exit_code: int, *, closed_by_us: bool, cause: Exception | None = None) -> None:
        """Report the end of the command: to the caller that waits for the report, or to the receiver."""
        if not self.reported.done():
            self.reported.set_exception(self._failure(how, exit_code, cause))
        else:
            self._receiver.connection_lost(None if closed_by_us else self._failure(how, exit_code, cause))

    def _failure(self, how: str, exit_code: int, cause: Exception | None) -> Exception:
        text = without_queries(self._tail.decode(errors="replace")).strip()[-STDERR_SHOWN_BYTES:]
        message = f"{self._name}: the command {how}" + (f": {text}" if text else "")
        lost = ConnectionLost(message, exit_code=exit_code, words=text)
        lost.__cause__ = cause
        return lost if self._explain is None else self._explain(lost)


async def await_report(channel: StreamChannel, preamble: Preamble, reply: Reply | None) -> None:
    """Wait for the report of a command, and reply to its request before that. Closes the channel on an error."""
    try:
        if reply is not None:
            either: set[asyncio.Future[Any]] = {preamble.reported, preamble.requested}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if preamble.requested.done():
                await _send_reply(channel, preamble, reply(preamble.requested.result()))
        await preamble.reported
    except BaseException:
        preamble.reported.cancel()
        channel.close()
        raise


async def _send_reply(channel: StreamChannel, preamble: Preamble, pieces: AsyncIterator[bytes]) -> None:
    try:
        async for piece in pieces:
            await channel.send_raw(piece)
    except ConnectionLost:
        return  # the command exits before it has read all: its exit has the reason
    except HoldfastError:
        # The command sees the end of its input, and removes what it has prepared.
        channel.close()
        await asyncio.wait([preamble.reported])
        preamble.reported.exception()
        raise


def without_queries(text: str) -> str:
    """The output of a program without the long queries of URLs.

    `kubectl exec` prints the URL that it could not reach, which contains the whole command.
    """
    return _QUERY.sub("?…", text)
