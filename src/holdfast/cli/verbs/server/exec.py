"""`holdfast exec ['JSON']`: one JSON-RPC request to the machine's server, which is started when needed.

The reply is printed as it came. Exit code 0 for a result, 1 for an error reply, 2 for wrong usage or trouble on the
way. Standard library only: where no long-lived channel is to be had, callers pay this start for every call.
"""

from __future__ import annotations

import sys

from holdfast.cli.support import stateless
from holdfast.launch.local_server import connect_server

_USAGE = """usage: holdfast exec ['JSON']

Send one JSON-RPC request, the argument or what stdin holds, to this machine's server, which is started when needed,
and print the reply line. The handshake is done for you.
Exit code: 0 for a result, 1 for an error reply, 2 for wrong usage or trouble on the way.
To run a command: holdfast run -- CMD...
"""


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if arguments and arguments[0].strip() and arguments[0].lstrip()[0] not in "{[":
        # A command, as `docker exec` takes it. Even malformed, a request begins otherwise.
        from shlex import join

        return _trouble(f"exec sends a JSON-RPC request; to run a command: holdfast run -- {join(arguments)}")
    if len(arguments) > 1:
        return _trouble(f"exec takes one request, not {len(arguments)} arguments")
    try:
        request = arguments[0].encode(errors="surrogateescape") if arguments else sys.stdin.buffer.read()
        if not request.strip():
            return _trouble("exec: the request is empty")
        with connect_server() as connection:
            reply = stateless.exchange(connection, request)
        if reply is None:
            return 0
        sys.stdout.buffer.write(reply.line + b"\n")
        sys.stdout.buffer.flush()
        return 1 if reply.is_error else 0
    except stateless.Refused as error:
        return _trouble(f"exec: the server refused: {error}")
    except OSError as error:
        return _trouble(f"exec: {error}")
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # `holdfast.errors` is loaded only when something went wrong: each call would pay for it.
        from holdfast.errors import HoldfastError

        if isinstance(error, HoldfastError):
            return _trouble(f"exec: {error}")
        raise


def _trouble(message: str) -> int:
    sys.stderr.write(f"holdfast: {message}\n")
    return 2
