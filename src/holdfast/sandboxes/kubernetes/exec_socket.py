"""A command in a container over the API's `pods/exec`: a WebSocket with the protocol `v5.channel.k8s.io`.

Each message begins with the number of its stream. The client closes the command's input by a message of its own, so
that a command may read to the end of its input and reply; the last message of the server is the command's outcome.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, NegotiationError
from websockets.typing import Subprotocol

from holdfast.errors import ConnectionLost, HandshakeFailed
from holdfast.sandboxes.kubernetes.api import ApiStatus, ClusterApi, api_error

PROTOCOL: Final = Subprotocol("v5.channel.k8s.io")
STDIN: Final = 0
STDOUT: Final = 1
STDERR: Final = 2
ERROR: Final = 3
CLOSE: Final = 255

#: The server's messages have 32 KiB; a larger one is an error of the server.
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
#: Input is sent in messages of this size, so that one control message does not wait behind megabytes.
INPUT_BYTES: Final = 256 * 1024
#: Bytes in our buffer before a sender waits.
WRITE_LIMIT: Final = 1024 * 1024
READ_AHEAD: Final = 32
#: Bytes of one read of TLS. 32 KiB took a third more processor time than 64, and with 64 an idle connection takes
#: more than 100 KB.
TLS_BUFFER_BYTES: Final = 48 * 1024
OPEN_SECONDS: Final = 20.0
#: Keeps the connection in the tables of load balancers, which forget an idle one after a minute or more. A missing
#: answer is not an error here: the server may be busy with our input, and the connection above has its own pings.
PING_SECONDS: Final = 25.0
CLOSE_SECONDS: Final = 2.0
_NO_PROTOCOL: Final = re.compile(r"subprotocol|negotiate protocol")


class Ended(msgspec.Struct, frozen=True):
    """The outcome of a command: its exit code, and the cluster's message if it could not be run."""

    exit_code: int
    message: str = ""


#: The exit code of a command whose connection broke before its outcome came.
CUT: Final = -1


class ExecSocket:
    """One command that runs. `receive` until it returns None; then `ended` has the outcome."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.ended: Ended | None = None

    async def receive(self) -> tuple[int, memoryview] | None:
        """The next output and the number of its stream; None at the end."""
        while True:
            try:
                message = await self._connection.recv(decode=False)
            except ConnectionClosed as closed:
                self.ended = self.ended or Ended(CUT, f"the connection was cut: {closed}")
                return None
            except OSError as error:
                self.ended = self.ended or Ended(CUT, f"the connection was cut: {error}")
                return None
            if len(message) < 2:
                continue  # the server announces a stream by an empty message
            if message[0] == ERROR:
                self.ended = read_ended(message[1:])
            elif message[0] in (STDOUT, STDERR):
                return message[0], memoryview(message)[1:]

    async def send(self, data: bytes | memoryview) -> None:
        """Send input; waits while the connection accepts no more. `ConnectionLost` if it has ended."""
        try:
            for start in range(0, len(data), INPUT_BYTES):
                await self._connection.send(b"\x00" + bytes(data[start : start + INPUT_BYTES]))
        except (ConnectionClosed, OSError) as closed:
            raise ConnectionLost(f"the connection was cut: {closed}") from None

    async def close_input(self) -> None:
        try:
            await self._connection.send(bytes((CLOSE, STDIN)))
        except (ConnectionClosed, OSError) as closed:
            raise ConnectionLost(f"the connection was cut: {closed}") from None

    async def close(self) -> None:
        await self._connection.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._connection.transport.abort()


def read_ended(data: bytes) -> Ended:
    """The outcome in a message of the error stream."""
    try:
        status = msgspec.json.decode(data, type=ApiStatus)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Ended(CUT, bytes(data[:500]).decode(errors="replace"))
    if status.status == "Success":
        return Ended(0)
    for cause in (status.details or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode" and str(cause.get("message", "")).isdecimal():
            return Ended(int(cause["message"]))
    return Ended(1, status.message)


async def open_exec(
    api: ClusterApi, namespace: str, pod: str, container: str | None, argv: Sequence[str]
) -> ExecSocket:
    """Run a command; `ApiError` if the cluster refuses, `ConnectionLost` if it does not answer."""
    query = [*(("command", word) for word in argv), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
    query += [] if container is None else [("container", container)]
    path = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}/exec?{urlencode(query)}"
    secure = api.config.server.startswith("https:")
    options: dict[str, Any] = {}
    if secure:
        options = {"ssl": api.credentials.tls}
        if api.config.tls_server_name is not None:
            options["server_hostname"] = api.config.tls_server_name
    url = f"ws{api.config.server.removeprefix('http')}{path}"
    for attempt in (1, 2):
        api.requests += 1
        try:
            connection = await connect(
                url,
                subprotocols=[PROTOCOL],
                additional_headers=await api.credentials.headers(),
                user_agent_header=None,
                compression=None,
                proxy=api.credentials.proxy,
                max_size=MAX_MESSAGE_BYTES,
                max_queue=READ_AHEAD,
                write_limit=WRITE_LIMIT,
                open_timeout=OPEN_SECONDS,
                ping_interval=PING_SECONDS,
                ping_timeout=None,
                close_timeout=CLOSE_SECONDS,
                **options,
            )
        except InvalidStatus as refused:
            status = refused.response.status_code
            if status == 401 and attempt == 1 and api.credentials.refused():
                continue
            error = api_error(status, bytes(refused.response.body or b""))
            raise _too_old(api) if _NO_PROTOCOL.search(error.message) else error from None
        except NegotiationError:
            raise _too_old(api) from None
        except (InvalidHandshake, InvalidURI) as error:
            raise HandshakeFailed(f"{api.config.server}: pods/exec: {error}") from None
        except (OSError, TimeoutError, EOFError) as error:
            raise ConnectionLost(f"{api.config.server}: {error or 'no answer'}") from None
        if connection.subprotocol != PROTOCOL:
            await connection.close()
            raise _too_old(api)
        _shrink_buffer(connection.transport)
        sock = connection.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ExecSocket(connection)
    raise AssertionError("the second attempt returns or raises")


def _shrink_buffer(transport: Any) -> None:
    """Give back most of the buffer that asyncio holds for each TLS connection, 256 KiB from the first byte on.

    It is no part of asyncio's interface: where it is missing, the channel only takes more memory.
    """
    protocol: Any = getattr(transport, "_ssl_protocol", None)
    if hasattr(protocol, "_ssl_buffer_view") and getattr(protocol, "max_size", 0) > TLS_BUFFER_BYTES:
        protocol.max_size = TLS_BUFFER_BYTES
        protocol._ssl_buffer = bytearray(TLS_BUFFER_BYTES)
        protocol._ssl_buffer_view = memoryview(protocol._ssl_buffer)


def _too_old(api: ClusterApi) -> HandshakeFailed:
    return HandshakeFailed(
        f"{api.config.server}: pods/exec has no {PROTOCOL}, which Kubernetes has since 1.30: "
        "add ?via=kubectl to the address",
        final=True,
    )
