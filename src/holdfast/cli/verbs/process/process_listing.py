"""The table and the JSON of `holdfast ps`, from processes and terminals as on the wire; pure.

Shared by `ps` and by `quick`, which must start in tens of milliseconds: standard library only.
"""

from __future__ import annotations

import shlex

from holdfast.cli.support.running_server import is_helper
from holdfast.cli.support.text import age, amount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    #: A `ProcessInfo` or a `TerminalStatus` as JSON.
    Wire = Mapping[str, Any]

HEADER = ("ID", "PID", "STATE", "AGE", "EXIT", "OUTPUT", "COMMAND")


class Listing:
    """The processes of a server at one moment, and the terminals among them by id.

    `holdfast` is the server's own command for the verbs, which identifies the processes that Holdfast runs for
    itself.
    """

    def __init__(
        self, processes: Sequence[Wire] = (), terminals: Sequence[Wire] = (), holdfast: Sequence[str] = ()
    ) -> None:
        self.terminals = {status["terminalId"]: status for status in terminals}
        self.processes = [self._as_requested(info) for info in processes]
        self.holdfast = holdfast

    def rows(self, *, all: bool, now: float) -> list[tuple[str, ...]]:
        """Return the rows of the table, oldest process first."""
        return [
            (
                info["processId"],
                str(info["pid"]),
                self._state(info),
                age((info["exitedAt"] or now) - info["startedAt"]),
                "-" if info["exitCode"] is None else str(info["exitCode"]),
                amount(info["stdoutBytes"] + info["stderrBytes"] + info["ptyBytes"]),
                shlex.join(info["argv"]),
            )
            for info in self._chosen(all)
            if all or not is_helper(info["argv"], self.holdfast)
        ]

    def objects(self, *, all: bool) -> list[dict[str, Any]]:
        """Return the objects for `--json`, with Holdfast's own processes marked."""
        return [self._object(info) for info in self._chosen(all)]

    def _object(self, info: Wire) -> dict[str, Any]:
        terminal = self.terminals.get(info["processId"])
        state = {} if terminal is None else {"terminalState": terminal["state"]}
        internal = {"internal": True} if is_helper(info["argv"], self.holdfast) else {}
        return {**info, **state, **internal}

    def _as_requested(self, info: Wire) -> Wire:
        """Return a terminal's process with the requested command, without the arguments for prompt marks."""
        terminal = self.terminals.get(info["processId"])
        return info if terminal is None else {**info, "argv": terminal["argv"]}

    def _chosen(self, all: bool) -> list[Wire]:
        chosen = [info for info in self.processes if all or not info["closed"]]
        return sorted(chosen, key=lambda info: (info["startedAt"], info["processId"]))

    def _state(self, info: Wire) -> str:
        terminal = self.terminals.get(info["processId"])
        if info["running"] and terminal is not None and terminal["state"] in ("IDLE", "BUSY"):
            return str(terminal["state"]).lower()
        return "running" if info["running"] else "ended" if info["closed"] else "closing"
