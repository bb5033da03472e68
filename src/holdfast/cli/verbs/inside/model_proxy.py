"""`holdfast model_proxy`: serves models of the host to the programs in this sandbox, at 127.0.0.1.

The host's bridge starts it, with the port and the instance in the environment. Needs h11, which the bundle
contains.
"""

from __future__ import annotations

import os
import sys

from holdfast.cli.support.text import fail

USAGE = """usage: holdfast model_proxy

Serve HTTP on 127.0.0.1 and forward every request to the host that offers its model service here. Prints its URL
when it listens, and ends on SIGTERM. The proxy itself answers `/health`.
Environment: BRIDGE_MODEL_SERVICE_INSTANCE (set by the host), BRIDGE_MODEL_SERVICE_PORT (13131; 0 chooses one),
BRIDGE_MODEL_SERVICE_MAX_CONNECTIONS (1024), BRIDGE_MODEL_SERVICE_MAX_BODY_BYTES (52428800), HOLDFAST_SOCKET (the
socket of this sandbox's server). Exit code: 2 for an error.
"""


def main(arguments: list[str]) -> int:
    if arguments:
        return fail(f"model_proxy takes no arguments, not {arguments[0]!r}")
    import asyncio

    from holdfast.launch.local_server import socket_path

    try:
        from holdfast.proxies.model import proxy
    except ModuleNotFoundError as error:
        return fail(f"model_proxy needs {error.name}, which is not installed here; install h11")
    settings = proxy.settings_from(os.environ)
    asyncio.run(proxy.run(settings, os.environ.get("HOLDFAST_SOCKET") or socket_path(), _announce))
    return 0


def _announce(url: str) -> None:
    sys.stdout.write(url + "\n")
    sys.stdout.flush()
