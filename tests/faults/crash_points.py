"""Places in the server at which it is made to die: between steps that belong together, where a clock rarely hits.

A script that Python reads at its start wraps the functions named here; the next one in line kills its process,
once. Makes directories that name the places still to come.
"""

from __future__ import annotations

import contextlib
import os
import random
from typing import Final

#: Module, class (or none), function; each touches the ledger, the keeper, the spool, a child or a connection.
POINTS: Final = (
    ("holdfast.runtime.durability.ledger", "Ledger", "write"),
    ("holdfast.runtime.durability.ledger", "Ledger", "_compact"),
    ("holdfast.runtime.durability.ledger", "Ledger", "_switch_file"),
    ("holdfast.runtime.durability.keeper_link", "KeeperLink", "_send"),
    ("holdfast.runtime.durability.keeper_link", "KeeperLink", "_receive"),
    ("holdfast.runtime.durability.durability", "Durability", "begin"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "started"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "reap"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "closed"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "let_go"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "forgotten"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "close_input"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "open_input"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "let_go_of_input"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "read_terminal"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "output_stored"),
    ("holdfast.runtime.durability.recorder", "ProcessRecorder", "printed"),
    ("holdfast.runtime.durability.recorder", "DurableOutputLog", "move_from"),
    ("holdfast.runtime.durability.recorder", "DurableOutputLog", "append"),
    ("holdfast.runtime.durability.recorder", "DurableOutputLog", "_losing"),
    ("holdfast.runtime.durability.input_log", "DurableInput", "_store"),
    ("holdfast.runtime.durability.input_log", "DurableInput", "_move"),
    ("holdfast.runtime.output.output_log", "OutputLog", "close"),
    ("holdfast.runtime.output.output_log", "OutputLog", "_punch"),
    ("holdfast.runtime.durability.recovery", "ProcessRecovery", "resume"),
    ("holdfast.runtime.durability.recovery", "ProcessRecovery", "_restore_input"),
    ("holdfast.runtime.durability.recovery", "Recovery", "release"),
    ("holdfast.runtime.process.start", "Starter", "start"),
    ("holdfast.server.clients", "ClientRegistry", "open"),
    ("holdfast.server.clients", "ClientRegistry", "started"),
    ("holdfast.server.clients", "ClientRegistry", "detach"),
    ("holdfast.server.connection", "ServerConnection", "_request"),
    ("holdfast.server.connection", "ServerConnection", "_send"),
    ("os", "", "posix_spawn"),
    ("os", "", "waitpid"),
    ("os", "", "splice"),
    ("os", "", "unlink"),
)
#: At which of its calls, at most; a server that began a moment ago counts anew.
MOST_CALLS: Final = (1, 5, 50, 300)
#: Servers that die like this in one round, at most.
CRASHES: Final = 3

#: The server's own process and no other: the programs that it starts may be Python, too.
SCRIPT: Final = """
import os, signal, sys
if "--kept" in sys.orig_argv:
    import importlib
    def arm(module, owner, name, call, before, flag):
        place = importlib.import_module(module)
        place = getattr(place, owner) if owner else place
        real = getattr(place, name)
        count = 0
        def counted(*arguments, **more):
            nonlocal count
            count += 1
            if count == call and before:
                die()
            result = real(*arguments, **more)
            if count == call and not before:
                die()
            return result
        def die():
            if os.path.exists(flag):
                os.rmdir(flag)
                os.kill(os.getpid(), signal.SIGKILL)
        setattr(place, name, counted)
"""


class CrashPoints:
    """Some places, drawn for one round. `struck` counts those that have had their turn."""

    def __init__(self, directory: str, rng: random.Random) -> None:
        self._flags: list[str] = []
        self.named: list[str] = []
        script = SCRIPT
        for number, (module, owner, name) in enumerate(rng.sample(POINTS, CRASHES)):
            flag = os.path.join(directory, f"crash-{number}")
            call, before = rng.randint(1, rng.choice(MOST_CALLS)), rng.random() < 0.5
            script += f"    arm({module!r}, {owner!r}, {name!r}, {call}, {before}, {flag!r})\n"
            self._flags.append(flag)
            self.named.append(f"{'before' if before else 'after'} call {call} of {module}.{owner}.{name}")
        self.script = script
        self._armed: list[str] = []

    def arm(self) -> None:
        """From now on."""
        for flag in self._flags:
            os.mkdir(flag)
        self._armed = self._flags

    def disarm(self) -> None:
        """Functions that are not next in line do nothing."""
        struck = [flag for flag in self._armed if not os.path.exists(flag)]
        for flag in set(self._armed) - set(struck):
            with contextlib.suppress(FileNotFoundError):  # its turn came at this moment
                os.rmdir(flag)
        self._armed = struck

    def struck(self) -> int:
        """How many have had their turn."""
        return sum(not os.path.exists(flag) for flag in self._armed)
