"""The model bridge for code without an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.sync.facade import Attribute, Facade, LoopThread, read_in_threads
from holdfast.sync.sandbox import Sandbox

if TYPE_CHECKING:
    from holdfast.bridge import agent_bridge
    from holdfast.bridge.function_model import ModelFunction
    from holdfast.bridge.limits import Spent
    from holdfast.bridge.record import CallRecord
    from holdfast.bridge.types import Delta, ModelReply, ModelRequest
    from holdfast.bridge.upstream import Upstream

    #: A blocking model: it runs in a thread for each request, and so does the iterator that it may return.
    BlockingModelFunction = Callable[[ModelRequest], ModelReply | str | Iterable[Delta | str]]
    BlockingModel = Upstream | ModelFunction | BlockingModelFunction


class Bridge(Facade["agent_bridge.Bridge"]):
    """`holdfast.bridge.Bridge`, for code without an event loop."""

    def __init__(self, loop: LoopThread, inner: agent_bridge.Bridge, held: asyncio.Task[None]) -> None:
        super().__init__(loop, inner)
        self._held = held

    port = Attribute[int]()
    url = Attribute[str]()
    env = Attribute[dict[str, str]]()

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """The latest ended calls, oldest first."""

        async def calls() -> tuple[CallRecord, ...]:
            return tuple(self._inner.calls)

        return self._loop.run(calls())

    @property
    def spent(self) -> Spent:
        """The total usage of all calls so far."""

        async def spent() -> Spent:
            return self._inner.spent

        return self._loop.run(spent())

    @property
    def failed(self) -> HoldfastError | None:
        """Why the bridge ended before its block: the proxy exited, or the sandbox is lost."""
        error = self._held.exception() if self._held.done() and not self._held.cancelled() else None
        return error if isinstance(error, HoldfastError) else None


@contextmanager
def sandbox_agent_bridge(
    box: Sandbox, model: BlockingModel | Mapping[str, BlockingModel], port: int | None = None, **options: Any
) -> Iterator[Bridge]:
    """Give the programs in `box` a model, for the length of a `with` block; see `holdfast.bridge`.

    A model may be a plain function: it runs in a thread for each request and returns a reply, text or an iterable
    of deltas. `on_call` is called in the thread of the event loop. A thread cannot be interrupted: the error of a
    failed bridge is raised at the end of the block, and until then is in `failed`.
    """
    from holdfast.bridge import agent_bridge

    models = {name: _blocking_model(each) for name, each in model.items()} if isinstance(model, Mapping) else None
    chosen = _blocking_model(model) if models is None else models
    where = agent_bridge.DEFAULT_PORT if port is None else port
    leave = asyncio.Event()

    async def hold(ready: asyncio.Future[agent_bridge.Bridge]) -> None:
        async with agent_bridge.sandbox_agent_bridge(box._inner, chosen, where, **options) as opened:
            ready.set_result(opened)
            await leave.wait()

    async def begin() -> Bridge:
        ready: asyncio.Future[agent_bridge.Bridge] = asyncio.get_running_loop().create_future()
        held = asyncio.create_task(hold(ready))
        try:
            await asyncio.wait((held, ready), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            held.cancel()
            await asyncio.wait((held,))
            raise
        if not ready.done():
            held.result()
        return Bridge(box._loop, ready.result(), held)

    async def end(held: asyncio.Task[None]) -> None:
        leave.set()
        await asyncio.wait((held,))
        held.result()

    bridge = box._loop.run(begin())
    try:
        yield bridge
    finally:
        box._loop.run(end(bridge._held))


def _blocking_model(model: Any) -> Any:
    """The model for the asynchronous bridge: a plain function runs in a thread, anything else is unchanged."""
    from holdfast.bridge.types import ModelReply

    if not callable(model):
        return model

    async def answer(request: Any) -> Any:
        given = await asyncio.to_thread(model, request)
        if inspect.isawaitable(given):
            given = await given
        if isinstance(given, str | ModelReply | AsyncIterable) or not isinstance(given, Iterable):
            return given
        return read_in_threads(given)

    return answer
