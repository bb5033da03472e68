"""Calls into an event loop from other threads and other loops. Pure asyncio; starts no thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, TypeVar

from holdfast.client.connection.connection import running_loop
from holdfast.errors import InvalidRequest

T = TypeVar("T")


def run_in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in `loop`, which another thread runs, and wait for its result.

    Ctrl-C cancels the work and waits for its end, so that a command is killed before `KeyboardInterrupt` is raised;
    a second Ctrl-C does not wait.
    """
    if running_loop() is loop:
        work.close()
        raise InvalidRequest("called from inside its own event loop")
    _check_open(loop, work)
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    tasks: list[asyncio.Task[T]] = []

    def begin() -> None:
        task = loop.create_task(work)
        tasks.append(task)
        task.add_done_callback(finish)

    def finish(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            cancelled()
        elif (error := task.exception()) is not None:
            done.set_exception(error)
        else:
            done.set_result(task.result())

    def cancelled() -> None:
        done.cancel()
        # `concurrent.futures.wait` ignores a cancelled future before this call.
        done.set_running_or_notify_cancel()

    def interrupt() -> None:
        if tasks:
            tasks[0].cancel()
        else:
            # The interrupt came before the work started.
            work.close()
            cancelled()

    try:
        loop.call_soon_threadsafe(begin)
        return done.result()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(interrupt)
        concurrent.futures.wait((done,))
        raise


async def await_in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which runs in `loop`: the running loop or another thread's. A cancellation reaches it."""
    if running_loop() is loop:
        return await work
    _check_open(loop, work)
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def _check_open(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> None:
    if loop.is_closed():
        work.close()
        raise InvalidRequest("the event loop of the sandbox is closed")
