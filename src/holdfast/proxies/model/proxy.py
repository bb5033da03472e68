"""The model proxy: an HTTP server inside the sandbox that makes each request a call of a service of the host.

It is independent of models, keys and dialects: it packs a request, relays the answer as it arrives, and returns an
error if the host is unreachable. Touches 127.0.0.1 and the socket of the sandbox's own server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import signal
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from holdfast.client.connection.channel_connection import ChannelConnection
from holdfast.client.host_call import CallbackCall, call_host
from holdfast.errors import (
    HoldfastError,
    InvalidParams,
    LimitReached,
    MessageTooLarge,
    ResourceExhausted,
    ShuttingDown,
    TransportError,
    UnknownService,
)
from holdfast.proxies.model.http_connection import Answering, BadAnswer, HttpConnection, ProxyState
from holdfast.transport import unix
from holdfast.transport.channel import Channel, Receiver
from holdfast.wire.host_call_keys import PING, check_instance
from holdfast.wire.http_messages import HTTP_METHOD, MODEL_SERVICE, HttpHead, HttpRequest, pack_request, unpack_head

log = logging.getLogger(__name__)

#: Environment variables.
PORT: Final = "BRIDGE_MODEL_SERVICE_PORT"
INSTANCE: Final = "BRIDGE_MODEL_SERVICE_INSTANCE"
MAX_CONNECTIONS: Final = "BRIDGE_MODEL_SERVICE_MAX_CONNECTIONS"
MAX_BODY_BYTES: Final = "BRIDGE_MODEL_SERVICE_MAX_BODY_BYTES"

#: For the host's answer to `/health`.
HEALTH_SECONDS: Final = 2.0
#: Descriptors that are not connections of clients.
SPARE_DESCRIPTORS: Final = 64
#: Connections that are not accepted yet.
BACKLOG: Final = 1024

_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
#: Transient errors: the client may retry.
_TRANSIENT: Final = (UnknownService, LimitReached, ResourceExhausted, ShuttingDown, TransportError)


class ProxySettings(msgspec.Struct, frozen=True):
    """The settings of the proxy, from its environment."""

    #: The instance of the host's service, which authorises calls.
    instance: str
    #: 0 chooses a free port.
    port: int = 13131
    #: Connections at a time: an agent has a few, a hundred agents in one sandbox several hundred.
    max_connections: int = 1_024
    #: The largest body, equal to the host's limit. It may contain images and documents as base64.
    max_body_bytes: int = 50 * 1024 * 1024


def settings_from(environ: Mapping[str, str]) -> ProxySettings:
    """Read the settings; an error names the invalid variable."""
    instance = environ.get(INSTANCE, "")
    if not instance:
        raise InvalidParams(f"{INSTANCE} is not set: the host that offers the model service provides it")
    check_instance(instance)
    defaults = ProxySettings(instance)
    return ProxySettings(
        instance,
        _number(environ, PORT, defaults.port, most=65_535),
        _number(environ, MAX_CONNECTIONS, defaults.max_connections, least=1),
        _number(environ, MAX_BODY_BYTES, defaults.max_body_bytes),
    )


def _number(environ: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int = 2**31) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise InvalidParams(f"{name}={text!r}: must be a number from {least} to {most}")
    return int(text)


class HostLink:
    """The connection to the sandbox's server; a broken one is replaced by the next request.

    It does not reconnect by itself: its requests have failed, and repeating them is the decision of the client.
    """

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._connection: ChannelConnection | None = None
        self._opening = asyncio.Lock()

    @property
    def opened(self) -> ChannelConnection | None:
        """The connection, if it is open."""
        connection = self._connection
        return connection if connection is not None and connection.connected else None

    async def connection(self) -> ChannelConnection:
        """Return the open connection. Raises `TransportError` if the server does not run."""
        async with self._opening:
            if self._connection is None or not self._connection.connected:
                await self.aclose()
                connection = ChannelConnection(
                    self._dial,
                    address=f"unix:{self._path}",
                    client_name="holdfast-model-proxy",
                    reconnect_deadline=0,
                )
                await connection.open()
                self._connection = connection
            return self._connection

    async def _dial(self, receiver: Receiver) -> Channel:
        return await unix.dial(self._path, receiver, lend=True)

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()


class ModelProxy:
    """Relays requests over a link to the host."""

    def __init__(self, link: HostLink, instance: str) -> None:
        self._link = link
        self._instance = instance

    def answer(self, request: HttpRequest, client: HttpConnection) -> Answering | None:
        if request.path == "/health" and request.method in ("GET", "HEAD"):
            return client.run(self._health(client))
        if request.method not in _METHODS:
            client.fail(405, f"{request.method}: this method is not forwarded")
            return None
        connection = self._link.opened
        if connection is None:
            return client.run(self._open_and_relay(request, client))
        return _Relay(connection, self._instance, request, client)

    async def _open_and_relay(self, request: HttpRequest, client: HttpConnection) -> None:
        try:
            connection = await self._link.connection()
        except HoldfastError as error:
            client.fail(_status_of(error), error.message)
        else:
            client.continue_with(_Relay(connection, self._instance, request, client))

    async def _health(self, client: HttpConnection) -> None:
        host = "answers" if await self._host_answers() else "does not answer"
        client.respond(200, json.dumps({"status": "ok", "host": host}).encode())

    async def _host_answers(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                connection = await self._link.connection()
                answer = call_host(connection, MODEL_SERVICE, self._instance, PING, b"")
                async with contextlib.aclosing(answer) as pieces:
                    async for _ in pieces:
                        pass
        except (HoldfastError, TimeoutError):
            return False
        return True


class _Relay:
    """One request on its way to the host, and the answer on its way back."""

    def __init__(
        self, connection: ChannelConnection, instance: str, request: HttpRequest, client: HttpConnection
    ) -> None:
        self._client = client
        self._call = CallbackCall(connection, self._pass_on, self._fail)
        try:
            self._call.start(MODEL_SERVICE, instance, HTTP_METHOD, pack_request(request))
        except HoldfastError as error:
            self._fail(error)

    def cancel(self) -> None:
        self._call.cancel()

    def _pass_on(self, pieces: tuple[bytes, ...], ended: bool) -> None:
        client = self._client
        try:
            for piece in pieces:
                if client.has_begun:
                    client.send(piece)
                else:
                    head = _head(piece)
                    client.begin(head.status, head.headers)
            if ended:
                if not client.has_begun:
                    raise BadAnswer("the host's answer is empty")
                client.end()
            else:
                client.flush()
                client.when_writable(self._call.receive)
        except Exception as error:  # noqa: BLE001 - a bug fails this request and not the connection
            self._call.cancel()
            client.fail_unexpectedly(error)

    def _fail(self, error: HoldfastError) -> None:
        if self._client.has_begun:
            log.warning("%s: aborted: %s", self._client.what, error.message)
        self._client.fail(_status_of(error), error.message)


def _head(piece: bytes) -> HttpHead:
    try:
        return unpack_head(piece)
    except msgspec.DecodeError as error:
        raise BadAnswer(f"the host's answer does not begin with a head: {error}") from None


def _status_of(error: HoldfastError) -> int:
    if isinstance(error, MessageTooLarge):
        return 413
    return 503 if isinstance(error, _TRANSIENT) else 502


async def run(settings: ProxySettings, socket_path: str, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` is called with the URL once the proxy listens."""
    loop = asyncio.get_running_loop()
    _allow_descriptors(settings.max_connections + SPARE_DESCRIPTORS)
    link = HostLink(socket_path)
    proxy = ModelProxy(link, settings.instance)
    state = ProxyState(
        proxy.answer, max_connections=settings.max_connections, max_body_bytes=settings.max_body_bytes
    )
    try:
        server = await loop.create_server(
            lambda: HttpConnection(state), "127.0.0.1", settings.port, backlog=BACKLOG
        )
    except OSError as error:
        raise InvalidParams(f"127.0.0.1:{settings.port}: {error.strerror or error}; set {PORT}") from None
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    announce(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        with contextlib.suppress(HoldfastError):  # the first request retries, and reports the error to its client
            await link.connection()
        await stopped.wait()
    finally:
        server.close()
        # First, because the server cancels the calls of a closed connection.
        await link.aclose()
        for connection in tuple(state.connections):
            connection.abort()


def _allow_descriptors(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
