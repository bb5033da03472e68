"""Calls into an event loop from other threads and loops."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.client.loops import await_in, run_in
from holdfast.errors import InvalidRequest
from holdfast.sync import LoopThread


async def answer() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def test_work_runs_in_the_given_loop() -> None:
    own, thread = asyncio.get_running_loop(), LoopThread()
    other = thread.run(answer())
    try:
        assert await await_in(own, answer()) is own
        assert await await_in(other, answer()) is other
        assert await asyncio.to_thread(run_in, own, answer()) is own
        assert run_in(other, answer()) is other
    finally:
        thread.close()


async def test_a_cancellation_reaches_another_loop() -> None:
    thread = LoopThread()
    begun, ended = asyncio.Event(), asyncio.Event()
    own = asyncio.get_running_loop()

    async def work() -> None:
        own.call_soon_threadsafe(begun.set)
        try:
            await asyncio.Event().wait()
        finally:
            own.call_soon_threadsafe(ended.set)

    waiting = asyncio.ensure_future(await_in(thread.run(answer()), work()))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await ended.wait()
    thread.close()


async def test_a_call_that_would_wait_for_itself_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="its own event loop"):
        run_in(asyncio.get_running_loop(), answer())


async def test_a_closed_loop_is_refused() -> None:
    thread = LoopThread()
    loop = thread.run(answer())
    thread.close()

    with pytest.raises(InvalidRequest, match="closed"):
        await await_in(loop, answer())
    with pytest.raises(InvalidRequest, match="closed"):
        run_in(loop, answer())
