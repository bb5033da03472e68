"""A keeper whose first server is a fork of a process that has the server's modules loaded.

For the first process of a container and for the zygote of jails: each start of Python costs as much as making the
sandbox. Runs in sandboxes: standard library and `msgspec` only.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any, NoReturn

from holdfast.config import load_config
from holdfast.runtime.durability import keeper
from holdfast.server import app


class ForkingKeeper(keeper.Keeper):
    """A keeper whose first server is a fork of this process; a later one is started as usual."""

    _has_forked = False

    def _spawn(self, command: list[str]) -> int:
        if self._has_forked:
            return super()._spawn(command)
        self._has_forked = True
        pid = os.fork()
        if pid == 0:
            in_child(self._serve, command)
        return pid

    def _serve(self, command: list[str]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (*keeper.STOPPING, keeper.BELL, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        options = list(itertools.pairwise(command))
        listen = [value for name, value in options if name == "--listen"]
        kept = next(int(value) for name, value in options if name == "--kept")
        ready = next(int(value) for name, value in options if name == "--ready-fd")
        adopted = {int(address.removeprefix("fd:")) for address in listen if address.startswith("fd:")}
        close_all_but({0, 1, 2, kept, ready, *adopted})
        os._exit(app.run_server(load_config(), listen, ready_fd=ready, keeper_fd=kept))


def in_child(work: Any, *arguments: Any) -> NoReturn:
    code = 1
    try:
        work(*arguments)
        code = 0
    except OSError as error:
        os.write(2, f"holdfast: {error.strerror or error}\n".encode())
    finally:
        os._exit(code)


def close_all_but(kept: set[int | None]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue  # the descriptor of the listing itself
