"""`status` and `stop` inside a sandbox, without typer and rich: the same output, as JSON only.

Standard library only.
"""

from __future__ import annotations

import argparse
import json

from holdfast.cli.support import stateless
from holdfast.cli.support.exit_codes import NO_SERVER
from holdfast.cli.support.text import complain, fail
from holdfast.launch.local_server import connect_running, socket_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

_DESCRIPTIONS = {
    "status": "Show the status of this machine's server, as JSON. Exit code: 3 if none runs, 2 for an error.",
    "stop": "Stop this machine's server and everything that runs in it, and wait until it has ended. Prints JSON. "
    "Exit code: 3 if none runs, 1 if other clients are connected, 2 for an error.",
}


def main(verb: str, arguments: list[str]) -> int:
    """Run `status` or `stop`; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"holdfast {verb}", description=_DESCRIPTIONS[verb], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="the default here")
    if verb == "stop":
        parser.add_argument("--grace", type=float, metavar="S", help="time between TERM and KILL")
        parser.add_argument("--keep", action="store_true", help="leave the processes to the keeper")
        parser.add_argument("--force", "-f", action="store_true", help="stop even if other clients are connected")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        return fail(f"{verb}: takes no {unknown[0]!r} here, where typer is not installed")
    if verb == "stop":
        return _stop(options)
    connection = connect_running()
    if connection is None:
        complain(f"no server runs at {socket_path()}")
        return NO_SERVER
    with connection:
        return _status(connection)


def _status(connection: socket.socket) -> int:
    reply = stateless.call(connection, "environment/status", {})
    if reply.is_error:
        return fail(f"status: {reply.message['error']['message']}")
    print(json.dumps({"running": True, **reply.message["result"]}))
    return 0


def _stop(options: argparse.Namespace) -> int:
    from holdfast.cli.verbs.inside.stopping import stop_at

    done = stop_at(socket_path(), grace=options.grace, keep=options.keep, force=options.force)
    if done.report:
        print(json.dumps(done.report))
    if done.complaint:
        complain(done.complaint)
    return done.code
