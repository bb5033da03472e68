"""Requests to Docker's engine: make an exec, start it, read its exit code. Touches the engine's Unix socket.

https://docs.docker.com/reference/api/engine/ has the requests. Starting an exec turns its connection into the
stdin and the output of the command.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote

import h11
import msgspec

T = TypeVar("T")

#: Replies to these requests have less than a kilobyte, except for errors that repeat the command.
MAX_BODY_BYTES: Final = 1024 * 1024
_READ_BYTES: Final = 64 * 1024
#: The limit for reading an exit code: the connection above waits for it before it dials again.
EXIT_CODE_SECONDS: Final = 10.0
#: The engine closes the output of a command before it records the exit code. Waits before the code is read again.
_EXIT_CODE_WAITS: Final = (0.0, 0.02, 0.05, 0.1, 0.3)


class EngineError(Exception):
    """The engine refused a request, or does not answer; the message is the engine's own, or names its socket."""


class _Created(msgspec.Struct):
    Id: str


class _ExecState(msgspec.Struct):
    Running: bool
    ExitCode: int | None = None


class _Error(msgspec.Struct):
    message: str = ""


class Exec(msgspec.Struct, frozen=True):
    """A started command: its id, its connection, and output that came with the engine's reply."""

    id: str
    connection: socket.socket
    output: bytes


class _Http:
    """One HTTP/1.1 connection to the engine, for one request after the other."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._parser = h11.Connection(h11.CLIENT)
        self.socket: socket.socket | None = None
        #: The prefix of paths, with the version of the engine's API.
        self._version = ""

    async def connect(self) -> None:
        """Connect, and read the version: a path without one is deprecated, and no one version suits all engines."""
        _, headers, _ = await self.request("GET", "/_ping")
        version = headers.get(b"api-version", b"").decode("ascii", "replace")
        self._version = f"/v{version}" if version else ""

    async def _connected(self) -> socket.socket:
        """Return the connection, ready for a request; a new one if the last reply closed it."""
        if self.socket is not None and self._parser.our_state is self._parser.their_state is h11.DONE:
            self._parser.start_next_cycle()
            return self.socket
        self.close()
        self._parser = h11.Connection(h11.CLIENT)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        await self._loop.sock_connect(self.socket, self._path)
        return self.socket

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()

    async def request(
        self, method: str, path: str, body: Any = None, *, upgrade: bool = False
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Send a request; return status, headers and body. A status of 400 or more is an `EngineError`.

        After the status 101, which `upgrade` requests, the body is what arrived behind the reply.
        """
        content = b"" if body is None else msgspec.json.encode(body)
        headers = [("Host", "docker"), ("User-Agent", "holdfast"), ("Content-Length", str(len(content)))]
        headers += [] if body is None else [("Content-Type", "application/json")]
        headers += [("Connection", "Upgrade"), ("Upgrade", "tcp")] if upgrade else []
        try:
            connection = await self._connected()
            parser = self._parser
            sent = [parser.send(h11.Request(method=method, target=self._version + path, headers=headers))]
            sent += [parser.send(h11.Data(data=content))] if content else []
            sent += [parser.send(h11.EndOfMessage())]
            await self._loop.sock_sendall(connection, b"".join(part or b"" for part in sent))
            return await self._reply(connection)
        except OSError as error:
            raise EngineError(f"{self._path}: {_advice(error)}") from error
        except h11.ProtocolError as error:
            raise EngineError(f"{self._path}: no reply of a Docker engine: {error}") from error

    async def _reply(self, connection: socket.socket) -> tuple[int, dict[bytes, bytes], bytes]:
        status, headers, body = 0, {}, bytearray()
        while True:
            event = self._parser.next_event()
            if event is h11.NEED_DATA:
                self._parser.receive_data(await self._loop.sock_recv(connection, _READ_BYTES))
            elif isinstance(event, h11.InformationalResponse | h11.Response):
                status, headers = event.status_code, dict(event.headers)
                if status == 101:
                    return status, headers, self._parser.trailing_data[0]
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_BODY_BYTES:
                    raise EngineError(f"{self._path}: the reply is longer than {MAX_BODY_BYTES} bytes")
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                raise EngineError(f"{self._path}: the engine closed the connection")
        if status >= 400:
            raise EngineError(_message(bytes(body)) or f"{self._path}: status {status}")
        return status, headers, bytes(body)


async def start_exec(path: str, container: str, argv: Sequence[str], user: str | None) -> Exec:
    """Start a command in a container, with its stdin and output attached."""
    config: dict[str, Any] = {"AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Cmd": list(argv)}
    if user is not None:
        config["User"] = user
    http = _Http(path)
    try:
        await http.connect()
        _, _, reply = await http.request("POST", f"/containers/{quote(container, safe='')}/exec", config)
        id = _decode(path, reply, _Created).Id
        start = {"Detach": False, "Tty": False}
        status, _, output = await http.request("POST", f"/exec/{quote(id, safe='')}/start", start, upgrade=True)
        if status != 101 or http.socket is None:
            raise EngineError(f"{path}: the engine did not give its connection to the command (status {status})")
    except BaseException:
        http.close()
        raise
    return Exec(id, http.socket, output)


async def exit_code(path: str, id: str) -> int | None:
    """Return the exit code of an exec; None if it still runs, or the engine does not know it any more."""
    http = _Http(path)
    try:
        async with asyncio.timeout(EXIT_CODE_SECONDS):
            await http.connect()
            for wait in _EXIT_CODE_WAITS:
                await asyncio.sleep(wait)
                _, _, reply = await http.request("GET", f"/exec/{quote(id, safe='')}/json")
                state = _decode(path, reply, _ExecState)
                if not state.Running and state.ExitCode is not None:
                    return state.ExitCode
    except (EngineError, TimeoutError):
        return None
    finally:
        http.close()
    return None


def _decode(path: str, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{path}: no reply of a Docker engine: {error}") from error


def _message(body: bytes) -> str:
    """The reason in the reply of the engine."""
    try:
        return msgspec.json.decode(body, type=_Error).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:500].decode(errors="replace")


def _advice(error: OSError) -> str:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{reason}: run as root, or as a user in the group of the socket (usually `docker`)"
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
        return f"{reason}: does the Docker engine run?"
    return f"the engine closed the connection: {reason}" if isinstance(error, ConnectionError) else reason
