"""`holdfast egress`: runs the filtering proxy of confined processes, outside of their network.

The session service starts it in the sandbox. Needs h11, which the bundle contains.
"""

from __future__ import annotations

from holdfast.cli.support.text import fail

USAGE = """usage: holdfast egress --socket PATH [--allow PATTERN]...

Let confined processes reach some hosts over HTTP and HTTPS, and no others. A process that is confined with the
network `proxy` and this PATH passes its listening socket here when it starts.
  --socket PATH     the Unix socket to create
  --allow PATTERN   HOST, *.DOMAIN or an address, with :PORT or :* appended; the default is the ports 80 and 443
Prints a line of JSON when it is ready and for every decision, and ends on SIGTERM. Exit code: 2 for an error.
"""


def main(arguments: list[str]) -> int:
    path, patterns, rest = "", [], list(arguments)
    while rest:
        option, *rest = rest
        if option not in ("--socket", "--allow") or not rest:
            return fail(f"egress: {option}: not an option, or its value is missing. See `holdfast egress --help`.")
        value, *rest = rest
        if option == "--socket":
            path = value
        else:
            patterns.append(value)
    if not path:
        return fail("egress needs --socket. See `holdfast egress --help`.")
    import asyncio

    try:
        from holdfast.proxies.egress import proxy
        from holdfast.proxies.egress.rules import EgressRules
    except ModuleNotFoundError as error:
        return fail(f"egress needs {error.name}, which is not installed here; install h11")
    asyncio.run(proxy.run(path, EgressRules(patterns)))
    return 0
