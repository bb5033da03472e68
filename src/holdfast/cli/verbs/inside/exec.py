"""`holdfast exec ['JSON']`: sends one JSON-RPC request to the machine's server, which is started when needed.

The reply is printed as it arrived. Exit code 0 for a result, 1 for an error reply, 2 for wrong usage or a failed
connection. Standard library only, because callers without a long-lived channel pay the start for every call.
"""

from __future__ import annotations

import sys

from holdfast.cli.support import stateless
from holdfast.cli.support.text import fail
from holdfast.launch.local_server import connect_server

USAGE = """usage: holdfast exec ['JSON']

Send one JSON-RPC request, from the argument or from stdin, to this machine's server, which is started when needed,
and print the reply line. The handshake is included.
Exit code: 0 for a result, 1 for an error reply, 2 for wrong usage or a failed connection.
To run a command: holdfast run -- CMD...
"""


def main(arguments: list[str]) -> int:
    if arguments and arguments[0].strip() and arguments[0].lstrip()[0] not in "{[":
        # A command, as `docker exec` takes it. A request begins otherwise, even a malformed one.
        from shlex import join

        return fail(f"exec sends a JSON-RPC request; to run a command: holdfast run -- {join(arguments)}")
    if len(arguments) > 1:
        return fail(f"exec takes one request, not {len(arguments)} arguments")
    request = arguments[0].encode(errors="surrogateescape") if arguments else sys.stdin.buffer.read()
    if not request.strip():
        return fail("exec: the request is empty")
    with connect_server() as connection:
        reply = stateless.exchange(connection, request)
    if reply is None:
        return 0
    sys.stdout.buffer.write(reply.line + b"\n")
    sys.stdout.buffer.flush()
    return 1 if reply.is_error else 0
