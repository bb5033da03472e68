"""Whether this replica should get requests, part by part, and who wants to know when that changes; pure.

`/readyz` and the gRPC health service say the same because they ask the same object.
"""

from __future__ import annotations

import asyncio


class Readiness:
    """Ready once every part that was ever named is. What is not ready says why in a few words for outsiders."""

    def __init__(self) -> None:
        self._waiting: dict[str, str] = {"service": "starting"}
        self._changed = asyncio.Event()

    def set(self, part: str, *, why_not: str = "") -> None:
        """The part is ready, or it is not, and why. `service` is the whole: starting, and later stopping."""
        if why_not:
            self._waiting[part] = why_not
        else:
            self._waiting.pop(part, None)
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        return not self._waiting

    def waiting_for(self) -> dict[str, str]:
        """What is not ready, and why."""
        return dict(self._waiting)

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next `set`. Take it before looking, so that nothing happens in between."""
        return self._changed
