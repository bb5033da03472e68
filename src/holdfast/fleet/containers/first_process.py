"""The first process of a container: it starts the server, reaps orphans, and ends on SIGTERM.

With the argument `until-killed` it stays until SIGKILL: the kubelet sends SIGTERM when the grace period of a pod
begins, and the sandbox is used until that period ends.

The server is a fork that loads its modules once. Started by the `connect` of a client instead, it would need three
starts of Python one after the other. Runs in containers: standard library and `msgspec` only.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from holdfast.launch import local_server, self_exec

UNTIL_KILLED: Final = "until-killed"
_SIGNALS: Final = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str] = ()) -> None:
    """Start the server in the background, and reap processes until SIGTERM, or until SIGKILL."""
    # Signals that are blocked and not awaited stay pending.
    awaited = _SIGNALS[:1] if UNTIL_KILLED in arguments else _SIGNALS
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if os.fork() == 0:
        code = 1
        try:
            _start_server()
            code = 0
        finally:
            os._exit(code)
    while signal.sigwait(awaited) == signal.SIGCHLD:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _start_server() -> None:
    """Start the machine's server as a client would. If that fails, the first client starts it, and reports why."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    self_exec.restore_environment()
    # The lock comes before the server's modules, which take most of the time: a client that comes meanwhile waits
    # for this server instead of starting one.
    with local_server.hold_start_lock():
        path = local_server.socket_path()
        if (running := local_server.connect_at(path)) is not None:
            running.close()
            return
        ready, report = os.pipe()
        if os.fork() == 0:
            from holdfast.fleet.forking_keeper import in_child

            in_child(_keep, path, report)
        os.close(report)
        while (data := os.read(ready, 4096)) and b"\n" not in data:
            pass


def _keep(path: str, report: int) -> None:
    """Become the keeper of the server that listens at `path`."""
    from holdfast.fleet.forking_keeper import ForkingKeeper, close_all_but
    from holdfast.runtime.durability import keeper

    os.setsid()
    null, log = os.open(os.devnull, os.O_RDWR), local_server.open_log()
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    close_all_but({0, 1, 2, report})
    os.set_inheritable(report, True)
    command = [*self_exec.holdfast(), "serve", "--listen", f"unix:{path}"]
    keeper.main([str(report), "kill", *command], ForkingKeeper)


if __name__ == "__main__":
    main(sys.argv[1:])
