"""Which event loop a sandbox belongs to: its connection, readers and calls live in the loop that made them."""

from __future__ import annotations

import asyncio

from holdfast.errors import InvalidRequest


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def check_loop(owner: asyncio.AbstractEventLoop | None) -> None:
    """Refuse a call that comes from another loop than `owner`: its reply would never reach the caller."""
    if owner is None or (running := running_loop()) is owner:
        return
    raise InvalidRequest(
        f"this Sandbox belongs to another event loop: it was connected in {owner!r} and is used "
        f"{'without one' if running is None else f'in {running!r}'}; connect in the loop that uses it, "
        "or use holdfast.sync"
    )
