"""`holdfast forward`: makes ports of a sandbox reachable on this machine, until it is interrupted."""

from __future__ import annotations

import json
import resource
import time
from contextlib import AsyncExitStack
from typing import Annotated, Final

import typer

from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.client.ports.ports import UNIX_PREFIX, PortForward, parse_address
from holdfast.client.remote import RemoteExec
from holdfast.errors import HoldfastError, InvalidParams

#: For how long the same reason is not printed again: a browser repeats its connections.
QUIET_SECONDS: Final = 10.0


def command(
    ports: Annotated[list[str], typer.Argument(metavar="PORT[:LOCAL]...")],
    sandbox: SandboxOption = LOCAL,
    as_json: JsonOption = False,
) -> int:
    """Make ports of a sandbox reachable on this machine, until Ctrl-C.

    PORT is a port of the sandbox's loopback, HOST:PORT as seen from the sandbox, or unix:/PATH; LOCAL is the port
    on 127.0.0.1 here, by default a free one. The sandbox needs no network. A connection that fails in the sandbox
    is reported on stderr.
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
            forward = PortForward(api.connection, address, local, _Complaints().add)
            host, port = await stack.enter_async_context(forward)
            shown = {"port": target, "address": f"{host}:{port}"}
            print(json.dumps(shown) if as_json else f"{host}:{port} -> {target}", flush=True)
        raise await api.connection.wait_failed()


class _Complaints:
    """Prints why connections to a port fail, each reason at most once in `QUIET_SECONDS`."""

    def __init__(self) -> None:
        self._reason = ""
        self._printed_at = 0.0

    def add(self, error: HoldfastError) -> None:
        now = time.monotonic()
        if error.message != self._reason or now - self._printed_at >= QUIET_SECONDS:
            self._reason, self._printed_at = error.message, now
            complain(f"a connection failed in the sandbox: {error.message}")
