"""The `--sandbox` option, and `open_exec`, which connects to the sandbox that it names.

Verbs work on `ExecApi`, the interface that every sandbox has; the client is loaded by the first connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Final

import typer

from holdfast.cli.support.near_ids import suggestion
from holdfast.errors import CallerError, UnknownProcess, UnknownShell, UnknownTerminal
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
async def open_exec(address: str, *, ids: Sequence[str] = ()) -> AsyncIterator[ExecApi]:
    """Connect to the sandbox at `address`; `local` starts this machine's server if none runs.

    An error about one of `ids` that is unknown there gets a suggestion.
    """
    from holdfast.client.opening import open_exec as open_api

    api = await open_api(address, client_name=CLIENT_NAME)
    try:
        yield api
    except CallerError as error:
        raise await with_suggestion(api, error, ids) from None
    finally:
        await api.aclose()


async def with_suggestion(api: ExecApi, error: CallerError, ids: Sequence[str]) -> CallerError:
    """Return the error, with the id that the caller may have meant if one of `ids` is unknown."""
    if not ids or not isinstance(error, UnknownProcess | UnknownShell | UnknownTerminal):
        return error
    processes, shells = await asyncio.gather(api.list(), api.list_shells())
    known = {info.process_id for info in processes} | {status.shell_id for status in shells}
    return type(error)(error.message + suggestion(ids, known), **error.details)


def is_this_machine(address: str) -> bool:
    """Whether our own working directory and environment are valid at the address."""
    return address in (LOCAL, "inprocess")
