"""`status` and `stop` inside a sandbox, where typer and rich are not: the same answers, as JSON alone.

Standard library only. Everything else about the two is in their own modules, which are for people.
"""

from __future__ import annotations

import json
import os
import select
import sys

from holdfast.cli import stateless
from holdfast.local_server import connect_running, socket_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

#: What a server has beyond the grace of its processes, whose longest is likely below it too.
_STOP_SECONDS = 60.0
_NO_SERVER = 3
_USAGE = """usage: holdfast {verb}

{what} Exit code: 3 if none runs, 2 for trouble. Without typer this verb takes no options, and prints JSON.
"""
_WHAT = {
    "status": "Tell how this machine's server is.",
    "stop": "Stop this machine's server and everything that runs in it, and wait until it is gone.",
}


def main(verb: str, arguments: list[str]) -> int:
    """Run `status` or `stop`; returns the exit code."""
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE.format(verb=verb, what=_WHAT[verb]))
        return 0
    if arguments not in ([], ["--json"]):
        return _trouble(f"{verb}: takes no {arguments[0]!r} here, where typer is not installed")
    try:
        connection = connect_running()
        if connection is None:
            sys.stderr.write(f"holdfast: no server runs at {socket_path()}\n")
            return _NO_SERVER
        with connection:
            return _status(connection) if verb == "status" else _stop(connection)
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


def _stop(connection: socket.socket) -> int:
    status = stateless.call(connection, "environment/status", {}).message.get("result", {})
    if "pid" not in status:
        return _trouble("stop: the server does not tell its pid; end it by a signal")
    pid = status["pid"]
    # Opened before the server is told, so that it is surely this one and not a later process with its pid.
    watch = os.pidfd_open(status.get("keeperPid") or pid)
    try:
        reply = stateless.call(connection, "server/shutdown", {}, greet=False)
        if reply.is_error:
            return _trouble(f"stop: {reply.message['error']['message']}")
        poller = select.poll()
        poller.register(watch, select.POLLIN)
        if not poller.poll(_STOP_SECONDS * 1000):
            return _trouble(f"stop: the server, pid {pid}, was told to stop and still runs")
    finally:
        os.close(watch)
    print(json.dumps({"pid": pid, "stopped": True}))
    return 0


def _trouble(message: str) -> int:
    sys.stderr.write(f"holdfast: {message}\n")
    return 2
