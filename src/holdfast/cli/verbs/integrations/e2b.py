"""`holdfast e2b`: a server for the E2B SDKs. Its packages are an extra and are imported when it runs."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from holdfast import __version__
from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.typed_verb import needs_extra, run_async

if TYPE_CHECKING:
    from holdfast.integrations.e2b.server import Started


def command(
    engine: Annotated[str, typer.Option(metavar="ENGINE", help="The engine of the sandboxes.")] = "bwrap",
    listen: Annotated[str, typer.Option(metavar="ADDR", help="HOST:PORT.")] = "127.0.0.1:3000",
    domain: Annotated[
        str, typer.Option(metavar="NAME", help="Host names PORT-ID.NAME lead to ports of sandboxes.")
    ] = "",
    templates: Annotated[str | None, typer.Option(metavar="FILE", help="A TOML file with templates.")] = None,
    max_sandboxes: Annotated[int, typer.Option(metavar="N", help="Sandboxes at a time.")] = 500,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="The certificate.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    allow_plaintext: Annotated[
        bool, typer.Option("--allow-plaintext", help="Listen beyond this machine without TLS, behind a proxy.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Serve the E2B SDKs until it is stopped; sandboxes continue, and the next start finds them.

    The first start makes an API key and prints it, once. HOLDFAST_E2B_API_KEY sets another one.
    """
    with needs_extra("e2b"):
        from holdfast.integrations.e2b.server import run_server
        from holdfast.integrations.e2b.settings import E2BSettings
        from holdfast.service.fronts.listening import TlsFiles
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key: give both, or none.")
    settings = E2BSettings(
        engine=engine,
        listen=listen,
        domain=domain.strip(".").lower(),
        templates=templates,
        max_sandboxes=max_sandboxes,
        tls=None if tls_cert is None or tls_key is None else TlsFiles(tls_cert, tls_key),
        allow_plaintext=allow_plaintext,
    )
    return run_async(run_server(settings, _announce_json if as_json else _announce))


def _announce(started: Started) -> None:
    print(f"holdfast e2b {__version__}")
    print(f"listen    {started.url}")
    print(f"engine    {started.engine}")
    print(f"templates {', '.join(started.templates)}")
    print(f"API key   {started.key_source}")
    key = started.new_key or (
        "$HOLDFAST_E2B_API_KEY" if not started.key_source.startswith("/") else f"$(cat {started.key_source})"
    )
    print(f"\nexport E2B_API_URL={started.url} E2B_SANDBOX_URL={started.url} E2B_API_KEY={key}", flush=True)


def _announce_json(started: Started) -> None:
    print(json.dumps({"ready": True, "pid": os.getpid(), **msgspec.to_builtins(started)}), flush=True)
