"""The table and the JSON of `holdfast ps`, from processes and terminals as on the wire; pure.

Shared by `ps` and by `quick`, which must start in tens of milliseconds: standard library only.
"""

from __future__ import annotations

import fnmatch
import shlex

from holdfast.cli.support.running_server import is_helper
from holdfast.cli.support.text import age, amount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    #: A `ProcessInfo` or a `TerminalStatus` as JSON.
    Wire = Mapping[str, Any]

HEADER = ("ID", "PID", "STATE", "AGE", "EXIT", "OUTPUT", "COMMAND")
_STATES = ("running", "closing", "ended", "idle", "busy")
_KINDS = ("process", "terminal")


class Filters:
    """The conditions of `--filter KEY=VALUE`: of one key any must hold, and of the keys all.

    Raises `ValueError` for a key or a value that is not known: a filter that is ignored would list more processes
    than the caller expects, and the next command may end them.
    """

    KEYS = ("id", "state", "exit", "command", "user", "kind")
    #: The keys of `docker ps`, and the value of one of them.
    DOCKER_KEYS: Mapping[str, str] = {"name": "id", "status": "state", "exited": "exit"}

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self._values: dict[str, list[str]] = {}
        for text in texts:
            key, equals, value = text.partition("=")
            if key == "status" and value == "exited":
                value = "ended"
            key = self.DOCKER_KEYS.get(key, key)
            if not equals or key not in self.KEYS:
                raise ValueError(f"--filter {text}: write KEY=VALUE; the keys are {', '.join(self.KEYS)}")
            allowed = {"state": _STATES, "kind": _KINDS}.get(key)
            if allowed is not None and value not in allowed:
                raise ValueError(f"--filter {text}: {key} is one of {', '.join(allowed)}")
            if key == "exit" and not value.isdecimal():
                raise ValueError(f"--filter {text}: an exit code is a number")
            self._values.setdefault(key, []).append(value)

    @property
    def wants_ended(self) -> bool:
        """Whether the filters select ended processes, which are then listed without `--all`."""
        return "exit" in self._values or "ended" in self._values.get("state", ())

    def accept(self, info: Wire, state: str, kind: str) -> bool:
        found: dict[str, Callable[[str], bool]] = {
            "id": lambda value: fnmatch.fnmatchcase(info["processId"], value),
            "state": lambda value: value == state,
            "exit": lambda value: info["exitCode"] is not None and int(value) == info["exitCode"],
            "command": lambda value: value in shlex.join(info["argv"]),
            "user": lambda value: value == info["user"],
            "kind": lambda value: value == kind,
        }
        return all(any(map(found[key], values)) for key, values in self._values.items())


class Listing:
    """The processes of a server at one moment, and the terminals among them by id.

    `holdfast` is the server's own command for the verbs, which identifies the processes that Holdfast runs for
    itself.
    """

    def __init__(
        self,
        processes: Sequence[Wire] = (),
        terminals: Sequence[Wire] = (),
        holdfast: Sequence[str] = (),
        filters: Filters | None = None,
    ) -> None:
        self._filters = filters or Filters()
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

    def ids(self, *, all: bool) -> list[str]:
        """Return the ids of the table."""
        return [row[0] for row in self.rows(all=all, now=0.0)]

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
        all = all or self._filters.wants_ended
        chosen = [info for info in self.processes if (all or not info["closed"]) and self._accepted(info)]
        return sorted(chosen, key=lambda info: (info["startedAt"], info["processId"]))

    def _accepted(self, info: Wire) -> bool:
        kind = "terminal" if info["processId"] in self.terminals else "process"
        return self._filters.accept(info, self._state(info), kind)

    def _state(self, info: Wire) -> str:
        terminal = self.terminals.get(info["processId"])
        if info["running"] and terminal is not None and terminal["state"] in ("IDLE", "BUSY"):
            return str(terminal["state"]).lower()
        return "running" if info["running"] else "ended" if info["closed"] else "closing"
