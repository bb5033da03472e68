"""`holdfast forward`: makes ports of a sandbox reachable on this machine, until it is interrupted."""

from __future__ import annotations

import json
import resource
from contextlib import AsyncExitStack
from typing import Annotated

import typer

from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.support.typed_verb import run_async
from holdfast.client.ports.ports import UNIX_PREFIX, PortForward, parse_address
from holdfast.client.remote import RemoteExec
from holdfast.errors import InvalidParams


def command(
    ports: Annotated[list[str], typer.Argument(metavar="PORT[:LOCAL]...")],
    sandbox: SandboxOption = LOCAL,
    as_json: JsonOption = False,
) -> int:
    """Make ports of a sandbox reachable on this machine, until Ctrl-C.

    PORT is a port of the sandbox's loopback, HOST:PORT as seen from the sandbox, or unix:/PATH; LOCAL is the port
    on 127.0.0.1 here, by default a free one. The sandbox needs no network.
    """
    return run_async(_forward(sandbox, [split_local(each) for each in ports], as_json))


def split_local(text: str) -> tuple[str, int]:
    """Split `PORT[:LOCAL]`, `HOST:PORT[:LOCAL]` or `unix:PATH[:LOCAL]` into the target and the local port."""
    target, _, last = text.rpartition(":")
    has_local = ":" in target or target.isdecimal()
    if not (has_local and last.isascii() and last.isdecimal() and target != UNIX_PREFIX.rstrip(":")):
        return text, 0
    if len(last) > 5:
        raise InvalidParams(f"{text!r}: {last} is not a port")
    return target, int(last)


async def _forward(sandbox: str, wanted: list[tuple[str, int]], as_json: bool) -> int:
    # Each connection needs two descriptors, and the usual soft limit is 1,024.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    addresses = [(parse_address(target), target, local) for target, local in wanted]
    async with open_exec(sandbox) as api, AsyncExitStack() as stack:
        if not isinstance(api, RemoteExec):
            raise InvalidParams(f"{sandbox}: ports need a server; choose another sandbox")
        for address, target, local in addresses:
            host, port = await stack.enter_async_context(PortForward(api.connection, address, local))
            shown = {"port": target, "address": f"{host}:{port}"}
            print(json.dumps(shown) if as_json else f"{host}:{port} -> {target}", flush=True)
        raise await api.connection.wait_failed()
