"""The event loop in a thread, and descriptors that make blocking methods of asynchronous ones.

A facade holds an asynchronous object; its methods run in the loop while the calling thread waits. Parameters, types
and docstrings are those of the asynchronous method, so a new parameter needs no change here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from holdfast.client.loops import run_in
from holdfast.errors import InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F")
R_co = TypeVar("R_co", covariant=True)


class LoopThread:
    """An event loop in its own thread, and calls into it from other threads."""

    def __init__(self) -> None:
        ready: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._stopped = threading.Event()
        # A daemon, so that a program can exit without closing its sandbox.
        self._thread = threading.Thread(target=self._main, args=(ready,), name="holdfast-sync", daemon=True)
        self._thread.start()
        self._loop = ready.result()

    def _main(self, ready: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        async def main() -> None:
            self._stop = asyncio.Event()
            ready.set_result(asyncio.get_running_loop())
            await self._stop.wait()

        asyncio.run(main())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and wait for its result; see `run_in`."""
        if self._stopped.is_set():
            work.close()
            raise InvalidRequest("the sandbox is closed")
        return run_in(self._loop, work)

    @property
    def closed(self) -> bool:
        return self._stopped.is_set()

    def close(self) -> None:
        """Stop the loop and its thread."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


class ClosableIterator(Protocol[R_co]):
    """An async iterator that can be closed before its end."""

    def __aiter__(self) -> AsyncIterator[R_co]: ...

    def __anext__(self) -> Awaitable[R_co]: ...

    def aclose(self) -> Coroutine[Any, Any, None]: ...


class Facade(Generic[T]):
    """An asynchronous object and its event loop."""

    def __init__(self, loop: LoopThread, inner: T) -> None:
        self._loop = loop
        self._inner = inner


class Attribute(Generic[R]):
    """An attribute of the asynchronous object, read in the calling thread."""

    def __init__(self, original: object = None) -> None:
        self.__doc__ = original.__doc__ if isinstance(original, property) else None

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, facade: Facade[Any], owner: type | None = None) -> R:
        value: R = getattr(facade._inner, self._name)
        return value


class Handle(Facade[T]):
    """A facade with a `with` block, which ends as that of the asynchronous handle."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        inner: Any = self._inner
        self._loop.run(inner.__aexit__(kind, error, trace))


class Closing(Facade[T]):
    """A facade with a `with` block, at the end of which `close` is called."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        facade: Any = self
        facade.close()


class Blocking(Generic[P, R]):
    """A coroutine method as a blocking method with the same parameters."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, facade: Facade[Any], owner: type | None = None) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return facade._loop.run(self._method(facade._inner, *args, **kwargs))

        call.__doc__ = self.__doc__
        return call


class ReturningHandle(Generic[P, T, F]):
    """A coroutine method that returns a handle, as a blocking method that returns the blocking handle."""

    def __init__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], facade: Callable[[LoopThread, T], F]
    ) -> None:
        self._method = method
        self._facade = facade
        self.__doc__ = method.__doc__

    def __get__(self, facade: Facade[Any], owner: type | None = None) -> Callable[P, F]:
        def call(*args: P.args, **kwargs: P.kwargs) -> F:
            return self._facade(facade._loop, facade._loop.run(self._method(facade._inner, *args, **kwargs)))

        call.__doc__ = self.__doc__
        return call


class Streaming(Generic[P, R]):
    """A method that returns an async iterator, as one that returns an iterator."""

    def __init__(self, method: Callable[Concatenate[Any, P], ClosableIterator[R]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, facade: Facade[Any], owner: type | None = None) -> Callable[P, Stream[R]]:
        def call(*args: P.args, **kwargs: P.kwargs) -> Stream[R]:
            async def begin() -> ClosableIterator[R]:
                return self._method(facade._inner, *args, **kwargs)

            return Stream(facade._loop, facade._loop.run(begin()))

        call.__doc__ = self.__doc__
        return call


def next_item(loop: LoopThread, iterator: AsyncIterator[R]) -> R:
    async def step() -> tuple[R, ...]:
        # A future cannot carry StopAsyncIteration, so the end is an empty tuple.
        try:
            return (await anext(iterator),)
        except StopAsyncIteration:
            return ()

    for item in loop.run(step()):
        return item
    raise StopIteration


class Stream(Closing[ClosableIterator[R]], Iterator[R]):
    """A blocking iterator. Close it, or leave its `with` block, if it is not read to its end."""

    def __next__(self) -> R:
        return next_item(self._loop, self._inner)

    def close(self) -> None:
        self._loop.run(self._inner.aclose())


async def read_in_threads(pieces: Iterable[T]) -> AsyncIterator[T]:
    iterator = iter(pieces)
    while (piece := await asyncio.to_thread(next, iterator, None)) is not None:
        yield piece
