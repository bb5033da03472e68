"""The readiness of a replica, by part; pure.

`/readyz` and the gRPC health service read the same object, so their results agree.
"""

from __future__ import annotations

import asyncio


class Readiness:
    """Ready if every part is ready. A part that is not ready has a reason, which needs no token to read."""

    def __init__(self) -> None:
        self._waiting: dict[str, str] = {"service": "starting"}
        self._changed = asyncio.Event()

    def set(self, part: str, *, why_not: str = "") -> None:
        """Mark a part as ready, or as not ready with a reason. `service` is the whole replica."""
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
        """Return the parts that are not ready, with their reasons."""
        return dict(self._waiting)

    @property
    def changed(self) -> asyncio.Event:
        """An event for the next `set`. Read it before `ready`, so that no change is missed."""
        return self._changed
