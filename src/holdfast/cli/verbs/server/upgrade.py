"""`holdfast upgrade`: put this version's server in the place of the one that runs; its processes notice nothing.

The server leaves them to its keeper, which starts this version's, with the former one's arguments. If that does not
come up the keeper holds everything, and waits.
"""

from __future__ import annotations

import json

from holdfast.cli.support import stateless
from holdfast.cli.support.exit_codes import NO_SERVER
from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.stopping import leave
from holdfast.cli.support.text import complain
from holdfast.launch.keeper_client import find
from holdfast.launch.local_server import connect_running, hold_start_lock, socket_path, start_locked


def command(as_json: JsonOption = False) -> int:
    """Put this version's server in the place of the one that runs.

    Processes, terminals and connections go on. Exit code 3 if no server runs and no keeper waits.
    """
    former = "none"
    # Nobody else starts one in between.
    with hold_start_lock():
        connection = connect_running()
        if connection is not None:
            with connection:
                former = leave(connection).version
        elif (waiting := find(socket_path())) is not None:
            waiting.close()
        else:
            complain(f"no server runs at {socket_path()}")
            return NO_SERVER
        with start_locked() as connection:
            now = stateless.call(connection, "environment/status", {}).message["result"]
    if as_json:
        told = {"from": former, "to": now["version"], "pid": now["pid"], "keeperPid": now["keeperPid"]}
        print(json.dumps({**told, "processesRunning": now["processesRunning"]}))
    else:
        print(f"{former} -> {now['version']}: pid {now['pid']}, {now['processesRunning']} processes run")
    return 0
