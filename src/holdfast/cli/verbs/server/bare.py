"""`status` and `stop` inside a sandbox, where typer and rich are not: the same answers, as JSON alone.

Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys

from holdfast.cli.support import stateless
from holdfast.cli.support.exit_codes import NO_SERVER, USAGE
from holdfast.launch.local_server import connect_running, socket_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

_WHAT = {
    "status": "Tell how this machine's server is, as JSON. Exit code: 3 if none runs, 2 for trouble.",
    "stop": "Stop this machine's server and everything that runs in it, and wait until it is gone. Prints JSON. "
    "Exit code: 3 if none runs, 1 if other clients are connected, 2 for trouble.",
}


def main(verb: str, arguments: list[str]) -> int:
    """Run `status` or `stop`; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"holdfast {verb}", description=_WHAT[verb], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="as it does anyway")
    if verb == "stop":
        parser.add_argument("--grace", type=float, metavar="S", help="time between TERM and KILL")
        parser.add_argument("--keep", action="store_true", help="what runs stays with its keeper")
        parser.add_argument("--force", "-f", action="store_true", help="though other clients are connected")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        return _trouble(f"{verb}: takes no {unknown[0]!r} here, where typer is not installed")
    try:
        if verb == "stop":
            return _stop(options)
        connection = connect_running()
        if connection is None:
            sys.stderr.write(f"holdfast: no server runs at {socket_path()}\n")
            return NO_SERVER
        with connection:
            return _status(connection)
    except (OSError, stateless.Refused) as error:
        return _trouble(f"{verb}: {error}")
    except Exception as error:
        from holdfast.errors import HoldfastError

        if isinstance(error, HoldfastError):
            return _trouble(f"{verb}: {error}")
        raise


def _status(connection: socket.socket) -> int:
    reply = stateless.call(connection, "environment/status", {})
    if reply.is_error:
        return _trouble(f"status: {reply.message['error']['message']}")
    print(json.dumps({"running": True, **reply.message["result"]}))
    return 0


def _stop(options: argparse.Namespace) -> int:
    from holdfast.cli.support.stopping import stop_at

    done = stop_at(socket_path(), grace=options.grace, keep=options.keep, force=options.force)
    if done.report:
        print(json.dumps(done.report))
    if done.complaint:
        sys.stderr.write(f"holdfast: {done.complaint}\n")
    return done.code


def _trouble(message: str) -> int:
    sys.stderr.write(f"holdfast: {message}\n")
    return USAGE
