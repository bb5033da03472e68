"""`holdfast call NAME METHOD [JSON|-]`: a call of a service that the host offers, from inside the sandbox.

The pieces of the answer are printed as they come. Exit code 0 for an answer, 1 for an error in its place, 2 for
wrong usage or trouble on the way. Standard library only; whatever ends it calls the call off, since the server sees
the connection go.
"""

from __future__ import annotations

import base64
import os
import sys

from holdfast.cli.support import stateless
from holdfast.launch.local_server import connect_running, socket_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

_USAGE = """usage: holdfast call [--instance I] NAME METHOD [BODY|-]

Call METHOD of the service NAME that the host offers to this sandbox, and print the answer as it comes. BODY is sent
as it is, JSON as a rule; `-` sends what stdin holds, and without one the body is empty. The instance, which the
host tells, is taken from HOLDFAST_SERVICE_INSTANCE if it is not given. HOLDFAST_SOCKET names the socket of this
sandbox's server, if that is not where it usually is.
Exit code: 0 for an answer, 1 for an error in its place, 2 for wrong usage or trouble on the way.
"""

#: How long one request waits for pieces: it is made again at once.
_WAIT_MS = 30_000
_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    instance = os.environ.get("HOLDFAST_SERVICE_INSTANCE", "")
    rest = list(arguments)
    if rest and rest[0].startswith("--instance"):
        flag = rest.pop(0)
        if flag.startswith("--instance="):
            instance = flag.partition("=")[2]
        elif flag == "--instance" and rest:
            instance = rest.pop(0)
        else:
            return _trouble("--instance needs the instance of a service")
    if len(rest) not in (2, 3) or rest[0].startswith("--"):
        return _trouble("call takes the name of a service, a method and at most one body; `holdfast call --help`")
    if not instance:
        return _trouble("call: no instance; give --instance or set HOLDFAST_SERVICE_INSTANCE")
    try:
        body = sys.stdin.buffer.read() if rest[2:] == ["-"] else os.fsencode("".join(rest[2:]))
        params = {"service": rest[0], "instance": instance, "method": rest[1], "waitMs": _WAIT_MS}
        with _connected() as connection:
            return _call(connection, {**params, "body": base64.b64encode(body).decode()})
    except stateless.Refused as error:
        return _trouble(f"call: the server refused: {error}")
    except BrokenPipeError:
        # Nobody reads the answer; what Python would flush at its end has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _trouble("call: nobody reads the answer")
    except OSError as error:
        return _trouble(f"call: {error}")
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        # `holdfast.errors` is loaded only when something went wrong: each call would pay for it.
        from holdfast.errors import HoldfastError

        if isinstance(error, HoldfastError):
            return _trouble(f"call: {error}")
        raise


def _connected() -> socket.socket:
    """The server's socket. None is started: a server that does not run has no host that offers anything."""
    chosen = os.environ.get("HOLDFAST_SOCKET")
    if not chosen:
        running = connect_running()
        if running is None:
            raise FileNotFoundError(f"no server runs at {socket_path()}")
        return running
    import socket

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(chosen)
    except OSError as error:
        connection.close()
        raise OSError(f"{chosen}: {error.strerror}") from None
    return connection


def _call(connection: socket.socket, params: dict[str, Any]) -> int:
    reply = stateless.call(connection, "service/call", params)
    while True:
        if reply.is_error:
            sys.stderr.write(f"holdfast: {reply.message['error']['message']}\n")
            return 1
        got = reply.message["result"]
        for piece in got.get("pieces", ()):
            sys.stdout.buffer.write(base64.b64decode(piece))
        sys.stdout.buffer.flush()
        if got.get("ended"):
            return 0
        further = {"callId": got["callId"], "afterSeq": got["seq"], "waitMs": _WAIT_MS}
        reply = stateless.call(connection, "service/receive", further, greet=False)


def _trouble(message: str) -> int:
    sys.stderr.write(f"holdfast: {message}\n")
    return 2
