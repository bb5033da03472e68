"""`holdfast egress`: the filtering proxy of confined processes, run outside of their network.

Started by the session service in the sandbox. Needs h11, which the bundle has; no typer, since it runs inside.
"""

from __future__ import annotations

import sys

_USAGE = """usage: holdfast egress --socket PATH [--allow PATTERN]...

Let confined processes reach some hosts over HTTP and HTTPS, and no others. A process whose confinement has the
network `proxy` and this PATH brings its socket here when it starts.
  --socket PATH     the Unix socket to be made
  --allow PATTERN   HOST, *.DOMAIN or an address, with :PORT or :* behind it; without one, the ports 80 and 443
Prints a line of JSON when it is ready and for every decision, and ends with SIGTERM. Exit code: 2 for trouble.
"""


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    path, patterns, rest = "", [], list(arguments)
    while rest:
        option, *rest = rest
        if option not in ("--socket", "--allow") or not rest:
            return _trouble(f"egress: {option}: not an option, or its value is missing\n{_USAGE}")
        value, *rest = rest
        if option == "--socket":
            path = value
        else:
            patterns.append(value)
    if not path:
        return _trouble(f"egress needs --socket\n{_USAGE}")
    import asyncio

    from holdfast.errors import HoldfastError

    try:
        from holdfast.proxies.egress import proxy
        from holdfast.proxies.egress.rules import Rules
    except ModuleNotFoundError as error:
        return _trouble(f"egress needs {error.name}, which is not installed here; install h11")
    try:
        asyncio.run(proxy.run(path, Rules(patterns)))
    except HoldfastError as error:
        return _trouble(f"egress: {error}")
    return 0


def _trouble(message: str) -> int:
    sys.stderr.write(f"holdfast: {message}\n")
    return 2
