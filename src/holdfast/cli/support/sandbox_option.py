"""The `--sandbox` option, and how a verb gets at the processes of the sandbox that it names.

Verbs work on `ExecApi`, the interface that every sandbox has; the client is loaded when the first verb asks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Final

import typer

from holdfast.exec_api import ExecApi

LOCAL: Final = "local"
#: As the verbs name themselves to a server.
CLIENT_NAME: Final = "holdfast-cli"

SandboxOption = Annotated[
    str,
    typer.Option(
        "--sandbox",
        envvar="HOLDFAST_SANDBOX",
        metavar="ADDR",
        help="Where: local (this machine's server), docker:NAME, podman:NAME, kubernetes:NAMESPACE/POD, "
        "ssh:USER@HOST, bwrap:DIRECTORY, unix:PATH, ws://HOST:PORT.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@asynccontextmanager
async def open_exec(address: str) -> AsyncIterator[ExecApi]:
    """The processes of the sandbox at `address`; `local` starts this machine's server if none runs."""
    from holdfast.client.sandbox import open_exec as open_api

    api = await open_api(address, client_name=CLIENT_NAME)
    try:
        yield api
    finally:
        await api.aclose()


def is_this_machine(address: str) -> bool:
    """Whether our own working directory and environment mean something there."""
    return address in (LOCAL, "inprocess")
