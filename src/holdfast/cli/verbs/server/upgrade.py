"""`holdfast upgrade`: replaces the running server by this version, without an effect on its processes.

The server leaves its processes to the keeper, which starts this version with the former arguments. A server whose
records this version cannot read is not stopped. If the new server does not start, the keeper holds the processes
and waits.
"""

from __future__ import annotations

import json
from contextlib import suppress
from socket import socket

from holdfast import __version__
from holdfast.cli.support import stateless
from holdfast.cli.support.exit_codes import NO_SERVER
from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.text import complain
from holdfast.cli.verbs.inside.stopping import detach
from holdfast.errors import SandboxError
from holdfast.launch.keeper_client import find
from holdfast.launch.local_server import connect_running, hold_start_lock, socket_path, start_locked
from holdfast.runtime.durability.durability import LEDGER_NAME
from holdfast.runtime.durability.ledger import check_ledger
from holdfast.server.client_session_records import ClientSessionReplay


def command(as_json: JsonOption = False) -> int:
    """Replace the running server by this version.

    Processes, terminals and connections continue. Exit code 3 if no server runs and no keeper waits.
    """
    former = "none"
    # No other process may start a server in between.
    with hold_start_lock():
        if (connection := connect_running()) is not None:
            # On a connection of its own: a server accepts one handshake on each.
            with connection:
                _check_records(connection)
        if (connection := connect_running()) is not None:
            with connection:
                former = detach(connection).version
        elif (waiting := find(socket_path())) is not None:
            waiting.close()
        else:
            complain(f"no server runs at {socket_path()}")
            return NO_SERVER
        with start_locked() as connection:
            now = stateless.call(connection, "environment/status", {}).message["result"]
    if as_json:
        shown = {"from": former, "to": now["version"], "pid": now["pid"], "keeperPid": now["keeperPid"]}
        print(json.dumps({**shown, "processesRunning": now["processesRunning"]}))
    else:
        print(f"{former} -> {now['version']}: pid {now['pid']}, {now['processesRunning']} processes run")
    return 0


def _check_records(connection: socket) -> None:
    """Raise if this version cannot read the records of the running server, before the server is stopped."""
    with suppress(stateless.HandshakeRefused):  # `detach` reports it
        status = stateless.call(connection, "environment/status", {}).message.get("result", {})
        # Without access to the spool, the start of this version's server decides.
        with suppress(OSError, KeyError):
            try:
                check_ledger(f"{status['spool']}/{LEDGER_NAME}", ClientSessionReplay.KINDS)
            except SandboxError as error:
                reason = f"holdfast {__version__} cannot take over from it: {error.message}"
                raise SandboxError(f"the running server continues, and {reason}") from None
