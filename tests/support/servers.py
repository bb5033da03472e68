"""Real servers for tests: started as a process of their own, known ready by their ready line, ended and searched.

It touches a directory of its own under /tmp, one under the spool's usual place, and the processes that it starts.
`Conversation` sends the protocol by hand, so that a test can send messages which the client never would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import holdfast
from holdfast.errors import error_from_wire

#: Every process of a test server inherits this variable, unless it is given an exact environment.
MARK_VARIABLE: Final = "HOLDFAST_TEST_SERVER"
#: Nothing here takes long; this only turns a hang into a failure.
PATIENCE_SECONDS: Final = 60.0
#: The longest message that a `Conversation` reads: a frame of output as base64 fits many times.
MAX_LINE_BYTES: Final = 64 * 1024 * 1024


def server_command(listen: Sequence[str], settings: Mapping[str, object] | None = None) -> list[str]:
    """The command that serves on these addresses, with each setting as a flag."""
    command = [sys.executable, "-m", "holdfast", "serve"]
    for address in listen:
        command += ["--listen", address]
    for name, value in (settings or {}).items():
        shown = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        command += ["--" + name.replace("_", "-"), shown]
    return command


def server_environment(**more: str) -> dict[str, str]:
    """Our environment, in which `python -m holdfast` finds the package that is running here."""
    source = os.path.dirname(os.path.dirname(os.path.abspath(holdfast.__file__)))
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


class RunningServer:
    """A server that listens. `directory` holds its socket and its log; `spool` is where it keeps output."""

    def __init__(self, process: subprocess.Popen[bytes], directory: str, spool: str, mark: str) -> None:
        self.process = process
        self.directory = directory
        self.spool = spool
        self.mark = mark
        self.listening: list[str] = []
        #: The server's own, which is not that of `process` if that is its keeper.
        self.pid = process.pid

    @property
    def socket(self) -> str:
        return os.path.join(self.directory, "server.sock")

    def address(self, scheme: str) -> str:
        """Where it listens for `unix` or `ws`."""
        return next(address for address in self.listening if address.startswith(f"{scheme}:"))

    def log(self) -> str:
        with open(os.path.join(self.directory, "server.log"), encoding="utf-8", errors="replace") as file:
            return file.read()

    def private_bytes(self) -> int:
        """Memory that is the server's alone; output that it keeps on tmpfs is not part of it."""
        with open(f"/proc/{self.pid}/status") as file:
            line = next(line for line in file if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024

    def open_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send it a signal and wait for its end; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)

    def leftovers(self) -> list[str]:
        """Leftovers of an ended server: processes, its socket, its spool."""
        found = [f"process {pid}" for pid in marked_processes(self.mark)]
        if os.path.lexists(self.socket):
            found.append(self.socket)
        found += [os.path.join(self.spool, name) for name in os.listdir(self.spool)]
        return found


@contextlib.contextmanager
def running_server(
    listen: Sequence[str] = ("unix",),
    *,
    settings: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    exit_code: int | None = 0,
) -> Iterator[RunningServer]:
    """A server for the length of a `with` block. `listen` may be `unix` or `ws` for an address of its own.

    At the end it gets SIGTERM. An exit code other than `exit_code` (None: whatever it was), and anything that it
    left behind, is an AssertionError with its log.
    """
    # Short: a socket's path has 107 bytes.
    directory = tempfile.mkdtemp(prefix="hf-", dir="/tmp")
    memory = "/dev/shm"
    spool = tempfile.mkdtemp(prefix="hf-", dir=memory if os.access(memory, os.W_OK | os.X_OK) else "/tmp")
    mark = secrets.token_hex(8)
    own = {"unix": f"unix:{directory}/server.sock", "ws": "ws://127.0.0.1:0"}
    addresses = [own.get(address, address) for address in listen]
    flags = [*arguments, *(["--no-auth"] if "ws" in listen else [])]
    ready, tell = os.pipe()
    try:
        with open(os.path.join(directory, "server.log"), "wb") as log:
            process = subprocess.Popen(
                [
                    *server_command(addresses, {"spool_directory": spool, **(settings or {})}),
                    *flags,
                    *("--ready-fd", str(tell)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env={**server_environment(HOLDFAST_DIRECTORY=directory), MARK_VARIABLE: mark, **(environ or {})},
                pass_fds=(tell,),
            )
        os.close(tell)
        tell = -1
        server = RunningServer(process, directory, spool, mark)
        try:
            _await_ready(ready, server)
            yield server
        finally:
            code = server.stop()
        left = server.leftovers()
        if left or (exit_code is not None and code != exit_code):
            raise AssertionError(f"the server ended with {code} and left {left}; its log:\n{server.log()}")
    finally:
        os.close(ready)
        if tell >= 0:
            os.close(tell)
        shutil.rmtree(directory)
        shutil.rmtree(spool)


def _await_ready(ready: int, server: RunningServer) -> None:
    reported = b""
    poller = select.poll()
    poller.register(ready, select.POLLIN)
    while not reported.endswith(b"\n"):
        if not poller.poll(PATIENCE_SECONDS * 1000):
            raise AssertionError(f"the server did not get ready; its log:\n{server.log()}")
        data = os.read(ready, 65_536)
        if not data:
            raise AssertionError(f"the server ended before it was ready; its log:\n{server.log()}")
        reported += data
    message = json.loads(reported)
    server.pid, server.listening = message["pid"], message["listening"]


def marked_processes(mark: str) -> list[int]:
    """The living processes with the mark of a test server in their environment."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and is_alive(int(name)):
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- the protocol by hand ---------------------------------------------------------------------------------------


class Line(Protocol):
    """A carrier of JSON messages both ways."""

    async def write(self, message: bytes) -> None: ...

    async def read(self) -> bytes:
        """The next message; empty at the end."""
        ...

    async def close(self) -> None: ...


class Conversation:
    """A client by hand: messages in, messages out, nothing repeated, nothing hidden.

    Notifications that arrive while a reply is awaited are kept in `notices` in their order.
    """

    def __init__(self, line: Line, patience: float = PATIENCE_SECONDS) -> None:
        self.line = line
        self._patience = patience
        self.notices: list[dict[str, Any]] = []
        self.replies: dict[int, dict[str, Any]] = {}
        self.session_id = ""
        self._last_id = 0

    async def initialize(self, **params: Any) -> dict[str, Any]:
        result = await self.result("initialize", **{"clientName": "by-hand", **params})
        await self.tell("initialized")
        self.session_id = result["sessionId"]
        return result

    async def ask(self, method: str, /, **params: Any) -> int:
        """Send a request without waiting; returns its id."""
        self._last_id += 1
        await self.say({"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params})
        return self._last_id

    async def tell(self, method: str, /, **params: Any) -> None:
        await self.say({"jsonrpc": "2.0", "method": method, "params": params})

    async def say(self, message: object) -> None:
        await self.line.write(json.dumps(message).encode())

    async def hear(self) -> dict[str, Any]:
        """The next message, whatever it is. `ConnectionError` at the end."""
        async with asyncio.timeout(self._patience):
            data = await self.line.read()
        if not data:
            raise ConnectionError("the server closed the connection")
        message: dict[str, Any] = json.loads(data)
        return message

    async def reply(self, id: int) -> dict[str, Any]:
        """The reply to one request, keeping what comes before it."""
        while id not in self.replies:
            await self._take()
        return self.replies.pop(id)

    async def result(self, method: str, /, **params: Any) -> dict[str, Any]:
        reply = await self.reply(await self.ask(method, **params))
        if "error" in reply:
            raise error_from_wire(reply["error"]["code"], reply["error"]["message"], reply["error"].get("data"))
        result: dict[str, Any] = reply["result"]
        return result

    async def error(self, method: str, /, **params: Any) -> tuple[int, str]:
        """The code and the message with which a request is refused."""
        reply = await self.reply(await self.ask(method, **params))
        return reply["error"]["code"], reply["error"]["message"]

    async def notice(self, method: str | None = None, **members: Any) -> dict[str, Any]:
        """The params of the next notification, of this method and with these members if given."""
        seen = 0
        while True:
            for index in range(seen, len(self.notices)):
                notice = self.notices[index]
                if method in (None, notice["method"]) and members.items() <= notice["params"].items():
                    del self.notices[index]
                    params: dict[str, Any] = notice["params"]
                    return params
            seen = len(self.notices)
            await self._take()

    async def _take(self) -> None:
        message = await self.hear()
        if "method" in message:
            self.notices.append(message)
        else:
            self.replies[message["id"]] = message

    async def close(self) -> None:
        await self.line.close()


class StreamLine:
    """JSON lines on a socket or on a command's pipes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def write(self, message: bytes) -> None:
        self.writer.write(message + b"\n")
        await self.writer.drain()

    async def read(self) -> bytes:
        line = await self.reader.readline()
        return line if line.endswith(b"\n") else b""  # half a message is none

    async def close(self) -> None:
        self.writer.close()
        # The order in which the two ends close does not matter.
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class _WebSocketLine:
    """JSON messages, each a text frame."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket

    async def write(self, message: bytes) -> None:
        await self.socket.send(message, text=True)

    async def read(self) -> bytes:
        from websockets.exceptions import ConnectionClosed

        try:
            data: bytes = await self.socket.recv(decode=False)
        except ConnectionClosed:
            return b""
        return data

    async def close(self) -> None:
        # Without the closing handshake: the other end may have megabytes to send before it would answer.
        self.socket.transport.abort()
        await self.socket.wait_closed()


@contextlib.asynccontextmanager
async def conversation(
    address: str | Sequence[str], patience: float = PATIENCE_SECONDS
) -> AsyncIterator[Conversation]:
    """Talk to `unix:PATH`, `ws://...`, or a command; not initialized yet. A command has ended on return.

    `patience` is the longest that the next message may take.
    """
    if not isinstance(address, str):
        command = await asyncio.create_subprocess_exec(
            *address,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=server_environment(),
            limit=MAX_LINE_BYTES,
        )
        assert command.stdin is not None
        assert command.stdout is not None
        line: Line = StreamLine(command.stdout, command.stdin)
    elif address.startswith("unix:"):
        command = None
        line = StreamLine(*await asyncio.open_unix_connection(address.removeprefix("unix:"), limit=MAX_LINE_BYTES))
    else:
        from websockets.asyncio.client import connect

        command = None
        line = _WebSocketLine(await connect(address, compression=None, max_size=MAX_LINE_BYTES, proxy=None))
    talk = Conversation(line, patience)
    try:
        yield talk
    finally:
        await talk.close()
        if command is not None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await command.wait()
