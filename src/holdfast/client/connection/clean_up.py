"""Clean-up in a sandbox for a cancelled caller: a kill, a close, an abandoned upload.

A cancelled caller must return soon, and the sandbox may be unreachable for a minute. So the connection owns the
work: it runs in the background, or is cancelled when the connection is closed. Pure asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar, runtime_checkable

from holdfast.errors import HoldfastError

T = TypeVar("T")


@runtime_checkable
class CleansUp(Protocol):
    """An API over a connection, which can be down."""

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> bool: ...


async def clean_up(api: object, work: Coroutine[Any, Any, Any]) -> bool:
    """Run `work` through `api`, and return whether it is done; while the connection is down it is only started.

    A cancellation ends the wait and not the work. Raises the error of `work` while it is awaited.
    """
    if isinstance(api, CleansUp):
        return await api.clean_up(work)
    await shielded(work)
    return True


async def clean_up_cancelled(
    api: object, work: Coroutine[Any, Any, Any], cancelled: asyncio.CancelledError
) -> None:
    """`clean_up` for a cancelled call. A failure becomes a note of the cancellation, which is raised."""
    try:
        if not await clean_up(api, work):
            cancelled.add_note("the sandbox is unreachable: clean-up continues once the connection is restored")
    except HoldfastError as error:
        cancelled.add_note(f"the command could not be killed: {error}")


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which continues if the caller is cancelled; its error is then ignored."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(take_error)
        raise


def take_error(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future that no caller awaits, so that the event loop does not log it."""
    if not future.cancelled():
        future.exception()
