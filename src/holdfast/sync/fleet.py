"""The blocking `Fleet` and `Pool`, and `create`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Final, overload

from holdfast.client.opening import RECONNECT_DEADLINE
from holdfast.errors import InvalidParams
from holdfast.fleet import fleet, pool
from holdfast.fleet.engine import Engine, Progress
from holdfast.fleet.record import SandboxRef
from holdfast.fleet.template import Template
from holdfast.sync.facade import Attribute, Blocking, Closing, LoopThread
from holdfast.sync.sandbox import Sandbox, opened


class FleetSandbox(Sandbox):
    """A `Sandbox` that a fleet made. `ref` is its reference."""

    _inner: fleet.FleetSandbox
    ref = Attribute[SandboxRef]()


class Fleet(Closing[fleet.Fleet]):
    """`holdfast.Fleet`, blocking, for use from any number of threads.

    `close`, or the end of its `with` block, closes the connections that `connect` returned. Sandboxes stay.
    `progress` callbacks run in the thread of the event loop.
    """

    def __init__(self, engine: str | Engine, *, max_creates: int = fleet.MAX_CREATES, **options: Any) -> None:
        inner = fleet.Fleet(engine, max_creates=max_creates, **options)
        super().__init__(LoopThread(), inner)
        self._connected: weakref.WeakSet[FleetSandbox] = weakref.WeakSet()
        self._closed = False

    engine = Attribute[Engine]()
    creating = Attribute[int]()
    list = Blocking(fleet.Fleet.list)
    get = Blocking(fleet.Fleet.get)
    activity = Blocking(fleet.Fleet.activity)
    extend = Blocking(fleet.Fleet.extend)
    pause = Blocking(fleet.Fleet.pause)
    resume = Blocking(fleet.Fleet.resume)
    remove = Blocking(fleet.Fleet.remove)
    prune = Blocking(fleet.Fleet.prune)

    def create(
        self, template: Template | None = None, *, progress: Progress | None = None, **fields: Any
    ) -> SandboxRef:
        """Make a sandbox and return its reference; see `holdfast.Fleet.create`."""
        return self._loop.run(self._inner.create(template, progress=progress, **fields))

    def fork(self, id: str, **fields: Any) -> SandboxRef:
        """Make a sandbox with the files of another one; see `holdfast.Fleet.fork`."""
        return self._loop.run(self._inner.fork(id, **fields))

    def connect(self, id: str, *, reconnect_deadline: float = RECONNECT_DEADLINE) -> FleetSandbox:
        """Connect to a sandbox of this fleet, until `close` or for the length of a `with` block."""
        inner = self._loop.run(self._inner.connect(id, reconnect_deadline=reconnect_deadline))
        box = FleetSandbox(self._loop, inner, inner, owns_loop=False)
        self._connected.add(box)
        return box

    @contextmanager
    def block(
        self, template: Template | None = None, *, progress: Progress | None = None, **fields: Any
    ) -> Iterator[FleetSandbox]:
        """A sandbox for the length of a `with` block; see `holdfast.Fleet.block`."""
        with _entered(self._loop, self._inner.block(template, progress=progress, **fields)) as box:
            yield box

    @contextmanager
    def forked(self, id: str, **fields: Any) -> Iterator[FleetSandbox]:
        """A fork for the length of a `with` block; see `holdfast.Fleet.forked`."""
        with _entered(self._loop, self._inner.forked(id, **fields)) as box:
            yield box

    def close(self) -> None:
        """Close the connections to sandboxes and the event loop. Sandboxes stay. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        try:
            for box in tuple(self._connected):
                box.close()
            self._loop.run(self._inner.aclose())
        finally:
            self._loop.close()


class Pool(Closing[pool.Pool]):
    """`holdfast.Pool`, blocking, for use from any number of threads. Open from its construction until `close`."""

    def __init__(
        self,
        engine: str | Engine,
        template: Template | None = None,
        *,
        warm: int = 1,
        max: int = 10,
        name: str | None = None,
        reuse: pool.Reuse = "never",
        shrink_after: float = pool.SHRINK_SECONDS,
        health_interval: float = pool.HEALTH_SECONDS,
        **fields: Any,
    ) -> None:
        inner = pool.Pool(
            engine,
            template,
            warm=warm,
            max=max,
            name=name,
            reuse=reuse,
            shrink_after=shrink_after,
            health_interval=health_interval,
            **fields,
        )
        super().__init__(LoopThread(), inner)
        self._closed = False
        try:
            self._loop.run(inner.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    name = Attribute[str]()
    template = Attribute[Template]()
    status = Attribute[pool.PoolStatus](pool.Pool.status)
    ready = Blocking(pool.Pool.ready)

    @contextmanager
    def take(self, *, timeout: float = pool.TAKE_SECONDS) -> Iterator[FleetSandbox]:
        """A sandbox for a `with` block; `ResourceExhausted` if none is free within `timeout` seconds."""
        with _entered(self._loop, self._inner.take(timeout=timeout)) as box:
            yield box

    def close(self) -> None:
        """Remove every sandbox of the pool, those in use included. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.run(self._inner.aclose())
        finally:
            self._loop.close()


@contextmanager
def _entered(loop: LoopThread, context: AbstractAsyncContextManager[fleet.FleetSandbox]) -> Iterator[FleetSandbox]:
    """The sandbox of an asynchronous block, for the length of a blocking one."""
    inner = loop.run(context.__aenter__())
    try:
        yield FleetSandbox(loop, inner, owns_loop=False)
    finally:
        loop.run(context.__aexit__(None, None, None))


#: Keywords of `holdfast.sandboxes.docker.create` that are not fields of a template.
_CONTAINER_KEYWORDS: Final = frozenset({"name", "pids", "volumes", "read_only", "arguments", "reconnect_deadline"})


@overload
def create(engine: str, template: str, **options: Any) -> Sandbox: ...


@overload
def create(
    engine: str | Engine, template: Template | None = None, *, progress: Progress | None = None, **fields: Any
) -> FleetSandbox: ...


def create(
    engine: str | Engine, template: Template | str | None = None, *, progress: Progress | None = None, **fields: Any
) -> Sandbox:
    """A new sandbox, until `close` or for the length of a `with` block; see `holdfast.create`.

    Deprecated: the image as second argument, and the keywords of `holdfast.sandboxes.docker.create` that are not
    fields of `Template`. They make a container without a record.
    """
    network = fields.get("network")
    named_network = isinstance(network, str) and network not in ("none", "host")
    if engine in ("docker", "podman") and (
        isinstance(template, str) or named_network or _CONTAINER_KEYWORDS & fields.keys()
    ):
        from holdfast.sandboxes import containers

        image = template if isinstance(template, str) else fields.pop("image", "")
        return opened(containers.create(image, engine="podman" if engine == "podman" else "docker", **fields))
    if isinstance(template, str):
        raise InvalidParams(f"create: {template!r} is not a Template; give an image as image={template!r}")
    loop = LoopThread()
    try:
        context = fleet.create(engine, template, progress=progress, **fields)
        return FleetSandbox(loop, loop.run(context.__aenter__()), context)
    except BaseException:
        loop.close()
        raise
