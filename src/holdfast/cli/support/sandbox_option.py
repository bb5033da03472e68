"""The `--sandbox` option, and `open_exec`, which connects to the sandbox that it names.

Verbs work on `ExecApi`, the interface that every sandbox has; the client is loaded by the first connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Final

import typer

from holdfast.exec_api import ExecApi
from holdfast.sandboxes.registry import forms

LOCAL: Final = "local"
#: The client name of the verbs, as a server lists it.
CLIENT_NAME: Final = "holdfast-cli"

#: typer reads brackets as markup.
_FORMS: Final = forms().replace("[", "\\[")
SandboxOption = Annotated[
    str,
    typer.Option(
        "--sandbox",
        envvar="HOLDFAST_SANDBOX",
        metavar="ADDR",
        help=f"The sandbox: {_FORMS}; local is this machine's server.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@asynccontextmanager
async def open_exec(address: str) -> AsyncIterator[ExecApi]:
    """Connect to the sandbox at `address`; `local` starts this machine's server if none runs."""
    from holdfast.client.sandbox import open_exec as open_api

    api = await open_api(address, client_name=CLIENT_NAME)
    try:
        yield api
    finally:
        await api.aclose()


def is_this_machine(address: str) -> bool:
    """Whether our own working directory and environment are valid at the address."""
    return address in (LOCAL, "inprocess")
