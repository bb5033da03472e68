"""MCP over stdin and stdout of this process, with messages of bounded size and no threads.

The streams are moved to private descriptors: children read an empty stdin, and stray output goes to stderr, not
between two messages. A blocked client delays only this process, which still ends on a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any, Final, cast

from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server

from holdfast.errors import InvalidParams
from holdfast.integrations.mcp.http import MAX_REQUEST_BYTES


class Lines:
    """The lines of stdin as text. One that is longer than a message may be ends the connection."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def __aiter__(self) -> AsyncIterator[str]:
        while True:
            try:
                line = await self._reader.readline()
            except (ValueError, ConnectionError):
                return
            if not line:
                return
            yield line.decode("utf-8", "replace")


class _Output:
    """Stdout, in the form of the file that the SDK writes to."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def write(self, text: str) -> None:
        self._writer.write(text.encode())

    async def flush(self) -> None:
        # A client that reads no more closes its end of stdin as well, which ends the connection.
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()


async def serve_stdio(server: MCPServer[Any]) -> None:
    """Serve one connection over stdin and stdout, until stdin ends."""
    lines, output = Lines(await _reader(_taken(0, os.O_RDONLY))), _Output(await _writer(_taken(1, os.O_WRONLY)))
    # The SDK uses an asynchronous iterator of lines, and `write` and `flush`.
    async with stdio_server(cast(Any, lines), cast(Any, output)) as (incoming, outgoing):
        low = server._lowlevel_server
        await low.run(incoming, outgoing, low.create_initialization_options())


_STDERR: Final = 2


def _taken(fd: int, mode: int) -> int:
    """A private duplicate of a standard stream, which itself becomes /dev/null or stderr."""
    private = os.dup(fd)
    if mode == os.O_WRONLY:
        os.dup2(_STDERR, fd)
    else:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, fd)
        os.close(nothing)
    return private


async def _reader(fd: int) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)
    try:
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0))
    except (ValueError, OSError) as error:
        raise InvalidParams(f"stdin: not a pipe, a socket or a terminal ({error})") from None
    return reader


async def _writer(fd: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb", 0)
        )
    except (ValueError, OSError) as error:
        raise InvalidParams(f"stdout: not a pipe, a socket or a terminal ({error})") from None
    return asyncio.StreamWriter(transport, protocol, None, loop)
