"""`holdfast call NAME METHOD [JSON|-]`: calls a service that the host offers, from inside the sandbox.

The pieces of the answer are printed as they arrive. Exit code 0 for an answer, 1 for an error answer, 2 for wrong
usage or a failed connection. Standard library only. If this process ends early, the server cancels the call,
because the connection is closed.
"""

from __future__ import annotations

import base64
import os
import sys

from holdfast.cli.support import stateless
from holdfast.cli.support.text import discard_stdout, fail
from holdfast.launch.local_server import connect_running, socket_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

USAGE = """usage: holdfast call [--instance I] NAME METHOD [BODY|-]

Call METHOD of the service NAME that the host offers to this sandbox, and print the answer as it arrives. BODY is
sent as it is, usually JSON; `-` sends stdin, and without BODY an empty body is sent. The host provides the
instance; the default is HOLDFAST_SERVICE_INSTANCE. HOLDFAST_SOCKET is the socket of this sandbox's server, if not
the default. Exit code: 0 for an answer, 1 for an error answer, 2 for wrong usage or a failed connection.
"""

#: How long one request waits for pieces; the next request follows at once.
_WAIT_MS = 30_000


def main(arguments: list[str]) -> int:
    instance = os.environ.get("HOLDFAST_SERVICE_INSTANCE", "")
    rest = list(arguments)
    if rest and rest[0].startswith("--instance"):
        flag = rest.pop(0)
        if flag.startswith("--instance="):
            instance = flag.partition("=")[2]
        elif flag == "--instance" and rest:
            instance = rest.pop(0)
        else:
            return fail("--instance needs the instance of a service")
    if len(rest) not in (2, 3) or rest[0].startswith("--"):
        return fail("call takes the name of a service, a method and at most one body; `holdfast call --help`")
    if not instance:
        return fail("call: no instance; give --instance or set HOLDFAST_SERVICE_INSTANCE")
    try:
        body = sys.stdin.buffer.read() if rest[2:] == ["-"] else os.fsencode("".join(rest[2:]))
        params = {"service": rest[0], "instance": instance, "method": rest[1], "waitMs": _WAIT_MS}
        with _connected() as connection:
            return _call(connection, {**params, "body": base64.b64encode(body).decode()})
    except BrokenPipeError:
        discard_stdout()
        return fail("call: stdout is closed")


def _connected() -> socket.socket:
    """Connect to the running server. None is started, because a new server has no host that offers services."""
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
