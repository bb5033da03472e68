"""`holdfast mcp`: serves a sandbox to agents over the Model Context Protocol, on stdio or HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.support.sandbox_option import LOCAL
from holdfast.cli.support.typed_verb import needs_extra, run_async
from holdfast.cli.verbs.fleet.create import Fields, contents, limits, with_options_of
from holdfast.errors import InvalidParams
from holdfast.sandboxes.registry import forms

if TYPE_CHECKING:
    from holdfast.integrations.mcp.server import SandboxServer

TOKEN_VARIABLE: Final = "HOLDFAST_MCP_TOKEN"
_FORMS: Final = forms().replace("[", "\\[")


@with_options_of(contents, limits)
def command(
    fields: Fields,
    sandbox: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_SANDBOX",
            metavar="ADDR",
            help=f"The sandbox: {_FORMS}. Default: this machine's server.",
        ),
    ] = None,
    create: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help="Make a sandbox for each connection: bwrap, docker, podman or local."),
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Listen here instead of serving on stdio.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A Host name of clients over HTTP beside HOST; may be repeated."),
    ] = None,
    approve: Annotated[
        str | None,
        typer.Option(metavar="RULES", help="Rules for commands (docs/policy.md); the client's user approves."),
    ] = None,
) -> int:
    """Serve the commands, terminals and files of a sandbox to an agent over the Model Context Protocol.

    On stdio by default, as agents start it; with --http at http://HOST:PORT/mcp, for clients that send the token
    in HOLDFAST_MCP_TOKEN, or the one that is printed at the start. With --create a sandbox is made for each
    connection and removed after it; the options from --image on describe it, as in `holdfast sandbox create`.
    """
    workdir = fields.pop("workdir", None)
    if create is None and fields:
        raise InvalidParams(f"{', '.join(fields)}: only with --create")
    if create is not None and sandbox is not None:
        raise InvalidParams("--create and --sandbox exclude each other")
    if http is None and allowed_host:
        raise InvalidParams("--allowed-host: only with --http")
    if workdir is not None and create is not None:
        fields["workdir"] = workdir
    with needs_extra("mcp"):
        from holdfast.integrations.mcp.approvals import Approvals
        from holdfast.integrations.mcp.server import SandboxServer
        from holdfast.integrations.mcp.sources import ExistingSandbox, FleetSource, SandboxSource

    # Before the SDK installs a handler of its own. Stdout carries the protocol.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    source: SandboxSource = (
        ExistingSandbox(sandbox or LOCAL, workdir) if create is None else FleetSource(create, **fields)
    )
    server = SandboxServer(source, Approvals.of_file(approve) if approve is not None else None, eager=http is None)
    if http is None:
        return run_async(_until_signal(_stdio(server)))
    given_token = os.environ.pop(TOKEN_VARIABLE, "")
    token = given_token or secrets.token_urlsafe(32)
    return run_async(_until_signal(_http(server, http, token, allowed_host or [], show=not given_token)))


async def _until_signal(work: Any) -> int:
    """Run until the work ends, or a signal cancels it; sandboxes that were made are removed in both cases."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    await asyncio.wait((task,))
    if not task.cancelled():
        task.result()
    return 0


async def _stdio(server: SandboxServer) -> None:
    from holdfast.integrations.mcp.stdio import serve_stdio

    await serve_stdio(server)


async def _http(server: SandboxServer, listen: str, token: str, allowed_hosts: list[str], *, show: bool) -> None:
    from holdfast.integrations.mcp.http import serving_http

    async with serving_http(server, listen, token, allowed_hosts) as url:
        print(url, flush=True)
        if show:
            print(f"Authorization: Bearer {token}", flush=True)
        else:
            print(f"the token is that of {TOKEN_VARIABLE}", file=sys.stderr, flush=True)
        await asyncio.get_running_loop().create_future()
