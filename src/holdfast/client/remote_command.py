"""A command in a shell over a connection: one call, and a reader that opens only if there is much to read.

Touches only the connection. The call is repeated after a reconnect, and the command runs once all the same.
"""

from __future__ import annotations

import contextlib
from collections import deque

import msgspec

from holdfast.client.clean_up import take_error
from holdfast.client.connection import Call, Connection
from holdfast.client.subscription import Subscription
from holdfast.errors import HoldfastError, InternalError
from holdfast.types import CommandEvent, CommandSpec, Exited, OutputChunk, OutputGap, Stream
from holdfast.wire import messages as m, methods


class RemoteCommand:
    """`CommandStream` over a connection. The command is sent when it is made."""

    def __init__(
        self, connection: Connection, shell_id: str, spec: CommandSpec, *, live: bool, window: int | None
    ) -> None:
        self._connection = connection
        self._reader = connection.reader(spec.command_id, window=window)
        self._over = False
        #: What came with the reply.
        self._last: deque[CommandEvent] = deque()
        self._shell_id = shell_id
        self._params = m.ShellRunParams(
            shell_id,
            spec.command_id,
            spec.command,
            cwd=spec.cwd,
            env=spec.env,
            input=spec.input,
            timeout_ms=None if spec.timeout is None else milliseconds(spec.timeout),
            subscribe=self._reader.spec(),
            live=live,
            pipe_stdin=spec.pipe_stdin,
        )
        self._call: Call[m.ShellRunResult] = connection.begin(methods.SHELL_RUN, self._params)
        self._call.on_reply = self._replied
        self._call.renew = self._renewed
        connection.attach(self._reader, self._call)

    def _renewed(self) -> m.ShellRunParams:
        """The same for another channel: what has arrived need not come again."""
        return msgspec.structs.replace(self._params, subscribe=self._reader.spec())

    def _replied(self, result: m.ShellRunResult | None, error: HoldfastError | None) -> None:
        """The reader waits for this too: it ends with a reply that has everything."""
        if error is not None:
            self._reader.fail(error)
        elif result is not None and not result.pushed:
            self._reader.finish()

    def __aiter__(self) -> RemoteCommand:
        return self

    async def __anext__(self) -> CommandEvent:
        while not self._last:
            if self._over:
                raise StopAsyncIteration
            event = await anext(self._reader, None)
            if isinstance(event, OutputChunk | OutputGap):
                return event
            result = await self._connection.reply(self._call)
            self._over = True
            # Else the two would be a cycle, and one for each command makes work for the collector.
            self._call.on_reply = self._call.renew = None
            if result.pushed and not isinstance(event, Exited):
                raise InternalError("the output of a command ended without its end")
            await self._reader.aclose()
            if result.pushed:
                return result.ended
            self._last.extend(_inline(result, self._reader))
        return self._last.popleft()

    async def aclose(self) -> None:
        """Withdraw it, if it has not ended."""
        if self._call.future.done():
            take_error(self._call.future)  # its reader has told it
        if not self._over:
            self._over = True
            told = self._connection.connected
            self._connection.give_up(self._call)
            if not told and not self._call.future.done():
                # The server does not know the request of a channel that broke: tell it of the command, once it is
                # there again.
                params = m.ShellInterruptParams(self._shell_id, command_id=self._params.command_id)
                with contextlib.suppress(HoldfastError):
                    await self._connection.clean_up(self._connection.call(methods.SHELL_INTERRUPT, params))
        await self._reader.aclose()


def milliseconds(seconds: float) -> int:
    """Rounded up, so that a short time does not become none."""
    return -int(-seconds * 1000 // 1)


def _inline(result: m.ShellRunResult, reader: Subscription) -> list[CommandEvent]:
    """What came with the reply, without what a reader that polls has had before."""
    events: list[CommandEvent] = []
    streams: tuple[tuple[Stream, bytes], ...] = (("stdout", result.stdout), ("stderr", result.stderr))
    for seq, (stream, data) in enumerate(streams):
        start = reader.arrived(stream)
        if len(data) > start:
            events.append(OutputChunk(stream, start, data[start:], seq + 1))
    return [*events, result.ended]
