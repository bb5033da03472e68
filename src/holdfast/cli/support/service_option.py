"""The options that name a session service, and `with_service`, which adds them to a verb.

The client imports gRPC when it is made, so `--help` needs no gRPC.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final

import typer

from holdfast.cli.support.typed_verb import give_signature, run_async
from holdfast.service.client.endpoint import ADDRESS_VARIABLE, DEFAULT_ADDRESS, token_from_file
from holdfast.service.client.service_client import ServiceClient
from holdfast.service.problems import Unavailable

#: How long a verb retries an unreachable service: a person waits. Streams use the client's longer default.
RETRY_SECONDS: Final = 5.0

_Work = Callable[..., Coroutine[Any, Any, int]]


def _options(
    service: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR",
            envvar="HOLDFAST_SERVICE",
            help="The service: https://HOST:PORT, http://HOST:PORT or unix:PATH (gRPC).",
        ),
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="A file with the token (default: HOLDFAST_SERVICE_TOKEN).")
    ] = None,
    tls_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="The authority of the service's certificate.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Our own certificate.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its key.")] = None,
) -> None: ...


_SERVICE_PARAMETERS: Final = tuple(inspect.signature(_options).parameters.values())


def with_service(retry_seconds: float = RETRY_SECONDS) -> Callable[[_Work], Callable[..., int]]:
    """Make a verb of a coroutine function with a client as its first parameter; the verb has the options above."""

    def decorate(work: _Work) -> Callable[..., int]:
        def command(**values: Any) -> int:
            service = {each.name: values.pop(each.name) for each in _SERVICE_PARAMETERS}

            # gRPC prints failed handshakes on stderr; their error has the reason.
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")

            async def run() -> int:
                async with _client(retry_seconds=retry_seconds, **service) as client:
                    try:
                        return await work(client, **values)
                    except Unavailable as problem:
                        from holdfast.service.client.rpc import NO_REPLY

                        if problem.reason != NO_REPLY:
                            raise
                        where = service["service"] or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
                        raise Unavailable(
                            f"{where}: no service replies here ({problem}); start it with `holdfast service`, "
                            "or name another address with --service",
                            reason=problem.reason,
                        ) from None

            return run_async(run())

        return give_signature(command, work, "service", _options)

    return decorate


def _client(
    *,
    service: str | None,
    token_file: str | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    retry_seconds: float,
) -> ServiceClient:
    return ServiceClient(
        service,
        token=None if token_file is None else token_from_file(token_file),
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        retry_seconds=retry_seconds,
    )
