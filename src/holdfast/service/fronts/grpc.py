"""The session service over gRPC, with the reflection and health services. Touches the network through grpc.aio.

Handlers are built from the protocol's descriptor and get raw bytes, so a request is parsed after its caller is
authenticated, and a malformed request is an error of the caller and not of the service.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import lru_cache
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from holdfast.service.access.admission import Admission, AdmittedCall
from holdfast.service.access.tokens import Access
from holdfast.service.fronts.connections import ConnectionLimits
from holdfast.service.fronts.handler import SERVICE_NAME, Handler, RpcMethod, methods
from holdfast.service.fronts.listening import (
    TlsFiles,
    bind,
    check_address,
    parse_address,
    private_files,
    remove_stale_socket,
)
from holdfast.service.fronts.readiness import Readiness
from holdfast.service.fronts.requests import KIB, MIB, MOST_INPUT, parse
from holdfast.service.fronts.status_details import status_of
from holdfast.service.problems import Invalid, NotNow, Problem
from holdfast.service.types import ServiceStruct

_log = logging.getLogger("holdfast.service.grpc")
_Context = grpc.aio.ServicerContext[Any, Any]


class GrpcSettings(ServiceStruct, frozen=True):
    """Settings of the gRPC port."""

    listen: str = "127.0.0.1:7400"
    tls: TlsFiles | None = None
    #: Listen beyond this machine without TLS, behind a proxy or a mesh with TLS.
    allow_plaintext: bool = False
    reflection: bool = True
    #: Reflection and health need no token: probes have none, and the protocol is public.
    open_services: bool = True
    #: The largest input and the rest of its request.
    max_request_bytes: int = MOST_INPUT + 64 * KIB
    #: Several times a page of 1,000 audit rows of the usual size.
    max_reply_bytes: int = 16 * MIB
    #: Calls of all agents; further calls are refused before they are read.
    max_concurrent_calls: int = 4_096
    #: Calls on one connection; an agent's own limit comes first.
    max_calls_per_connection: int = 1_024
    #: A connection that is idle for so long gets a ping. Shorter than the idle timeouts of common load balancers
    #: (60 s and more).
    keepalive_seconds: float = 30.0
    keepalive_timeout_seconds: float = 10.0
    #: Connections at a time, and the time for a TLS handshake and the preface of HTTP/2 together. gRPC does not
    #: count by address, nor half-open connections.
    connections: ConnectionLimits = ConnectionLimits()


class GrpcFront:
    """The gRPC server. Call `start`, then `stop` once."""

    def __init__(
        self, handler: Handler, admission: Admission, readiness: Readiness, settings: GrpcSettings
    ) -> None:
        self._handler = handler
        self._admission = admission
        self._readiness = readiness
        self._settings = settings
        self._address = parse_address(settings.listen)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        #: `HOST:PORT` with the actual port, or `unix:PATH`.
        self.address = str(self._address)

    async def start(self) -> None:
        settings = self._settings
        check_address(self._address, settings.tls, allow_plaintext=settings.allow_plaintext)
        server = grpc.aio.server(
            interceptors=[] if settings.open_services else [_ServicesInterceptor(self._admission.access)],
            maximum_concurrent_rpcs=settings.max_concurrent_calls,
            options=[
                ("grpc.max_receive_message_length", settings.max_request_bytes),
                ("grpc.max_send_message_length", settings.max_reply_bytes),
                ("grpc.max_concurrent_streams", settings.max_calls_per_connection),
                # A second service on the same port must fail instead of getting half of the calls.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", round(settings.keepalive_seconds * 1000)),
                ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_seconds * 1000)),
                # Clients may ping as often as the server; by default, two pings in 5 minutes close a connection.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", round(settings.keepalive_seconds * 500)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.server_handshake_timeout_ms", round(settings.connections.head_seconds * 1000)),
                ("grpc.max_allowed_incoming_connections", settings.connections.most),
            ],
        )
        handlers = {method.name: self._rpc_handler(method) for method in methods()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if settings.reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        self._listen(server)
        await self._set_health()
        self._watching = asyncio.create_task(self._follow_readiness())
        await server.start()
        self._server = server

    async def stop(self, grace: float = 5.0) -> None:
        """End streams and long polls with UNAVAILABLE; other calls have `grace` seconds to finish."""
        self._admission.stop()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace)

    def _listen(self, server: grpc.aio.Server) -> None:
        address, tls = self._address, self._settings.tls
        try:
            if address.is_unix:
                remove_stale_socket(address.path)
                with private_files():
                    server.add_insecure_port(f"unix:{address.path}")
                return
            if address.port:
                # Fails with our message for a port in use; gRPC would print its own on stderr.
                bind(address).close()
            port = (
                server.add_insecure_port(str(address))
                if tls is None
                else server.add_secure_port(str(address), _credentials(tls))
            )
        except RuntimeError as error:
            raise NotNow(f"cannot listen on {address}: is it in use?", reason="ADDRESS_IN_USE") from error
        self.address = str(parse_address(f"{str(address).rpartition(':')[0]}:{port}"))

    # --- calls ---------------------------------------------------------------------------------------------------

    def _rpc_handler(self, method: RpcMethod) -> grpc.RpcMethodHandler[Any, Any]:
        make = grpc.unary_stream_rpc_method_handler if method.stream else grpc.unary_unary_rpc_method_handler
        behaviour = self._stream(method) if method.stream else self._unary(method)
        return make(behaviour, request_deserializer=None, response_serializer=method.reply.SerializeToString)

    def _unary(self, method: RpcMethod) -> Callable[[bytes, _Context], Awaitable[Any]]:
        function = self._handler.unary(method)

        async def answer(data: bytes, context: _Context) -> Any:
            call = await self._begin(method, context)
            try:
                with call.explained():
                    request = parse(method.request, data)
                    call.check(request)
                    return call.answered(await function(call.caller, request))
            except Problem as problem:
                return await _abort(context, problem)
            finally:
                call.end()

        return answer

    def _stream(self, method: RpcMethod) -> Callable[[bytes, _Context], Awaitable[None]]:
        function = self._handler.stream(method)

        async def answer(data: bytes, context: _Context) -> None:
            call = await self._begin(method, context)
            try:
                with call.explained():
                    request = parse(method.request, data)
                    call.check(request)
                    # Closed at once, also after a disconnect: the stream's resources in the sandbox must not wait
                    # for the garbage collector.
                    async with aclosing(function(call.caller, request)) as replies:  # type: ignore[type-var]
                        async for reply in replies:
                            # Returns after the transport accepts the reply: back-pressure of a slow client.
                            try:
                                await context.write(reply)
                            except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
                                # The client disconnected during the write; gRPC cancels this task a moment later.
                                _log.debug("%s: the client disconnected: %s", method.name, error)
                                call.status = "CANCELLED"
                                return
            except Problem as problem:
                await _abort(context, problem)
            finally:
                call.end()

        return answer

    async def _begin(self, method: RpcMethod, context: _Context) -> AdmittedCall:
        metadata = context.invocation_metadata() or ()
        headers = {str(key): value for key, value in metadata if isinstance(value, str)}
        try:
            return await self._admission.begin("grpc", method, headers, peer_of(context.peer()))
        except Problem as problem:
            return await _abort(context, problem)

    # --- health --------------------------------------------------------------------------------------------------

    async def _set_health(self) -> None:
        serving = health_pb2.HealthCheckResponse.ServingStatus
        status = serving.SERVING if self._readiness.ready else serving.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def _follow_readiness(self) -> None:
        while True:
            changed = self._readiness.changed
            await self._set_health()
            await changed.wait()


async def _abort(context: _Context, problem: Problem) -> NoReturn:
    await context.abort(*rpc_status.to_status(status_of(problem)))


@lru_cache(1_024)
def peer_of(peer: str) -> str:
    """Return the address in a peer string of gRPC, without the port."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


class _ServicesInterceptor(grpc.aio.ServerInterceptor):
    """Requires a token for reflection and health. The session service authenticates its calls itself."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method.startswith(f"/{SERVICE_NAME}/"):
            return await continuation(handler_call_details)
        headers = {str(key): str(value) for key, value in handler_call_details.invocation_metadata}
        try:
            # gRPC does not give the peer here, so wrong tokens for these services share one bucket.
            await self._access.authenticate(headers.get("authorization"), "grpc services")
        except Problem as problem:
            refusal = problem

            async def refuse(requests: object, context: _Context) -> None:
                await _abort(context, refusal)

            # This kind fits every method: no request is read before the call.
            return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(handler_call_details)


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that reload a changed certificate; an unreadable pair keeps the last one."""
    seen = tls.stamp()

    def configuration() -> grpc.ServerCertificateConfiguration:
        key, certificate, client_ca = tls.read()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # gRPC calls this before each handshake, in a separate thread.
        nonlocal seen
        try:
            now = tls.stamp()
            if now == seen:
                return None
            made = configuration()
        except Invalid as error:
            _log.warning("cannot read the TLS files again, the old certificate stays: %s", error)
            return None
        seen = now
        return made

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        changed,  # type: ignore[arg-type]  # None keeps the certificate, which the stubs do not know
        require_client_authentication=bool(tls.client_ca),
    )
