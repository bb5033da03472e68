"""Marks of sandboxes that a pool has handed out: one small file each, on this machine, named by the sandbox.

Records on engines cannot be changed, and a sandbox that was used once is never handed out again. A mark is written
before its sandbox is handed out, and cleared after its sandbox was removed.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final, Literal

from holdfast.fleet.directories import fleet_directory
from holdfast.fleet.record import is_id

Mark = Literal["taken", "kept"]
#: Taken for a block of the pool's process: removed with that process.
TAKEN: Final = "taken"
#: Outlives the process of the pool; the store of a service, for example, has its owner.
KEPT: Final = "kept"


class PoolMarks:
    """The marks of the sandboxes of one engine."""

    def __init__(self, engine: str) -> None:
        self._directory = f"{fleet_directory()}/pools/{engine}"
        os.makedirs(self._directory, mode=0o700, exist_ok=True)

    def put(self, id: str, mark: Mark) -> None:
        with open(f"{self._directory}/{id}", "w") as file:
            file.write(mark)

    def get(self, id: str) -> Mark | None:
        """The mark of a sandbox; an unreadable text counts as taken."""
        try:
            with open(f"{self._directory}/{id}") as file:
                return KEPT if file.read() == KEPT else TAKEN
        except FileNotFoundError:
            return None

    def all(self) -> set[str]:
        """The ids of all marked sandboxes, of every pool of the engine."""
        return {name for name in os.listdir(self._directory) if is_id(name)}

    def clear(self, *ids: str) -> None:
        for id in ids:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._directory}/{id}")
