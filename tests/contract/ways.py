"""The ways to a sandbox, and how a test opens one: the same `Sandbox` whatever lies between it and processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, cast

import holdfast
from holdfast import ExecServerConfig, Process, Sandbox, TerminalSize
from holdfast.client.connection.channel_connection import ChannelConnection
from holdfast.client.dial import dialer, open_connection
from holdfast.client.remote import RemoteExec
from holdfast.errors import UnknownProcess
from holdfast.types import StdinMode, Stream
from holdfast.wire.messages import Encoding
from tests.support.servers import RunningServer, server_command, server_environment
from tests.support.signalling import send_signal

#: Where the server is, and its protocol. JSON over stdio is sent by hand: see `BY_HAND`.
WAYS: Final = ("inprocess", "unix", "unix-json", "stdio", "ws", "ws-json")
#: Those over which a connection can be lost while the server stays.
REMOTE_WAYS: Final = ("unix", "unix-json", "ws", "ws-json")
#: Transports of a `Conversation`; it sends JSON.
BY_HAND: Final = ("unix", "stdio", "ws")

#: Settings that are small enough to be met by a test.
SMALL: Final[dict[str, Any]] = {
    "retained_output_bytes_per_process": 2 * 1024 * 1024,
    "detached_session_seconds": 0.05,
    "max_processes_per_connection": 5,
    "max_exited_processes": 8,
    "stdin_buffer_bytes": 64 * 1024,
}


def address_of(way: str, server: RunningServer, settings: Mapping[str, Any]) -> str | list[str]:
    """The address to connect to. Over stdio every connection has a server of its own."""
    scheme = way.partition("-")[0]
    if scheme == "stdio":
        return server_command(["stdio"], {"spool_directory": server.spool, **settings})
    return server.address(scheme)


@contextlib.asynccontextmanager
async def open_box(way: str, server: RunningServer, settings: Mapping[str, Any]) -> AsyncIterator[Sandbox]:
    """A sandbox over `way`. `server` runs with `settings`; the ways that do not use it run with the same."""
    if way == "inprocess":
        config = ExecServerConfig(**{"spool_directory": server.spool, **settings})
        async with holdfast.connect("inprocess", config=config) as box:
            yield box
        return
    _, _, encoding = way.partition("-")
    connection = ChannelConnection(
        dialer(address_of(way, server, settings), env=server_environment()),
        address=way,
        encoding=cast(Encoding, encoding or "msgpack"),
    )
    await connection.open()
    box = Sandbox(RemoteExec(connection))
    try:
        yield box
    finally:
        await box.aclose()


async def end_everything(server: RunningServer) -> None:
    """Leave a shared server as it was found."""
    api = RemoteExec(await open_connection(server.address("unix")))
    try:
        for info in await api.list():
            if not info.closed:
                await api.terminate(info.process_id, force=True)
            with contextlib.suppress(UnknownProcess):  # the oldest ended ones are dropped by count
                await api.forget(info.process_id)
    finally:
        await api.aclose()


# --- processes that tests start -----------------------------------------------------------------------------------


class Starter:
    """Starts shell commands on pipes or on a terminal, and knows what each prints on."""

    def __init__(self, box: Sandbox, kind: str) -> None:
        self.box = box
        self.tty = kind == "pty"
        self.stream: Stream = "pty" if self.tty else "stdout"

    async def sh(self, script: str, *, stdin: StdinMode = "closed") -> Process:
        return await self.box.start(["sh", "-c", script], tty=TerminalSize() if self.tty else None, stdin=stdin)

    def lines(self, text: bytes) -> bytes:
        """The bytes that arrive when `text` is printed: a terminal turns LF into CR LF."""
        return text.replace(b"\n", b"\r\n") if self.tty else text


async def printed(process: Process, since: int = 0) -> bytes:
    """All output of a process with streams that must hold no gaps."""
    parts = []
    async for chunk in process.output(since):
        assert isinstance(chunk, holdfast.OutputChunk), chunk
        parts.append(chunk.data)
    return b"".join(parts)


async def line_of(process: Process, start: str = "") -> str:
    """The first line that begins with `start`, once it is printed whole; what follows `start`."""
    seen = ""
    async for chunk in process.output():
        assert isinstance(chunk, holdfast.OutputChunk), chunk
        seen += chunk.data.decode()
        for line in seen.split("\n")[:-1]:
            if line.startswith(start):
                return line.removeprefix(start).strip()
    raise AssertionError(f"no line begins with {start!r} in {seen!r}")


@contextlib.contextmanager
def fifo(directory: str, name: str) -> Any:
    """A named pipe by which a test lets a child go on: the child reads it, the test writes to it."""
    path = os.path.join(directory, name)
    os.mkfifo(path)
    # Opened for both so that neither side waits for the other to come.
    fd = os.open(path, os.O_RDWR)
    try:
        yield path, fd
    finally:
        os.close(fd)


def kill_quietly(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        send_signal(pid, signal.SIGKILL)
