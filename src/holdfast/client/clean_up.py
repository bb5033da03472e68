"""Work that undoes something in a sandbox for a caller that was cancelled: a kill, a close, an upload given up.

A cancelled caller must return soon, and the sandbox may be out of reach for a minute. So the work belongs to the
connection, which runs it to its end in the background or gives it up when it is closed. Pure asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar, runtime_checkable

from holdfast.errors import HoldfastError

T = TypeVar("T")


@runtime_checkable
class CleansUp(Protocol):
    """What reaches a sandbox over a connection, which can be down."""

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> bool: ...


async def clean_up(api: object, work: Coroutine[Any, Any, Any]) -> bool:
    """Do `work` through `api`, and return whether it is done: over a connection that is down it is only begun.

    A cancellation ends the wait and not the work. Raises what `work` raises while it is waited for.
    """
    if isinstance(api, CleansUp):
        return await api.clean_up(work)
    await shielded(work)
    return True


async def clean_up_cancelled(
    api: object, work: Coroutine[Any, Any, Any], cancelled: asyncio.CancelledError
) -> None:
    """`clean_up` on the way out of a cancelled call. A failure becomes a note: the cancellation goes first."""
    try:
        if not await clean_up(api, work):
            cancelled.add_note("the sandbox is out of reach: it is cleaned up once the connection is back")
    except HoldfastError as error:
        cancelled.add_note(f"the command could not be killed: {error}")


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which goes on if the caller is cancelled; its error is then of no interest."""
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
