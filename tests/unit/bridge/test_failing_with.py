"""The block of a bridge when a part that it depends on ends: the error that is raised, and the cancellation.

The order of callbacks is the whole matter, so the events are futures of the test and not a server's.
"""

from __future__ import annotations

import asyncio

import pytest

from holdfast.bridge.agent_bridge import _failing_with
from holdfast.errors import ProcessError, SandboxGone


async def turns() -> None:
    """More turns of the loop than a queued callback and its cancellation take."""
    for _ in range(5):
        await asyncio.sleep(0)


async def watch(event: asyncio.Future[None]) -> None:
    await event


async def watching(event: asyncio.Future[None]) -> asyncio.Task[None]:
    """A task that waits for the event already: it is woken before everything that waits for it from now on."""
    task = asyncio.create_task(watch(event))
    await asyncio.sleep(0)
    return task


def new_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_one_event_that_ends_the_block_and_a_watched_task_cancels_nothing() -> None:
    """The task's callback is queued, not yet run, when the block ends with the error of the same event."""
    gone = new_future()
    task = await watching(gone)
    asyncio.get_running_loop().call_soon(gone.set_exception, SandboxGone("docker:x: the container does not run"))
    with pytest.raises(SandboxGone, match="docker:x"):
        async with _failing_with(task):
            await gone
    await turns()
    assert cancelling() == 0


async def test_a_block_that_ends_in_the_turn_of_a_watched_task_cancels_nothing() -> None:
    gone, done = new_future(), new_future()
    task = await watching(gone)

    def both() -> None:
        gone.set_exception(ProcessError("the proxy"))
        done.set_result(None)

    asyncio.get_running_loop().call_soon(both)
    async with _failing_with(task):
        await done
    await turns()
    assert cancelling() == 0


async def test_a_watched_task_that_ends_cancels_the_block_and_its_error_is_raised() -> None:
    gone = new_future()
    task = await watching(gone)
    asyncio.get_running_loop().call_soon(gone.set_exception, SandboxGone("docker:x"))
    with pytest.raises(SandboxGone):
        async with _failing_with(task):
            await asyncio.Event().wait()
    await turns()
    assert cancelling() == 0


async def test_a_cancellation_that_the_block_swallows_or_requests_again_ends_with_it() -> None:
    """A TaskGroup with children that fail, too, requests its parent's cancellation again (Python 3.13)."""
    gone = new_future()
    task = await watching(gone)
    asyncio.get_running_loop().call_soon(gone.set_exception, SandboxGone("docker:x"))

    async def work() -> None:
        owner = asyncio.current_task()
        assert owner is not None
        async with _failing_with(task):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                owner.uncancel()
                owner.cancel()
                raise OSError("the agent lost its model") from None

    with pytest.raises(SandboxGone) as raised:
        await work()
    assert isinstance(raised.value.__cause__, OSError)
    await turns()
    assert cancelling() == 0


async def test_the_callers_cancellation_goes_first() -> None:
    gone = new_future()
    inside = asyncio.Event()

    async def work() -> None:
        async with _failing_with(await watching(gone)):
            inside.set()
            await asyncio.Event().wait()

    caller = asyncio.create_task(work())
    await inside.wait()
    gone.set_exception(SandboxGone("docker:x"))
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_a_cancellation_by_the_caller_while_ours_is_withdrawn_is_kept() -> None:
    gone = new_future()

    async def work() -> None:
        owner = asyncio.current_task()
        assert owner is not None
        async with _failing_with(await watching(gone)):
            gone.set_exception(SandboxGone("docker:x"))
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                # Runs in the turn in which the bridge withdraws its own.
                asyncio.get_running_loop().call_soon(owner.cancel)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
