"""`SandboxPool`: sandboxes for the tasks of a Ray cluster, each on the node of its task.

One actor on each node owns that node's pool. A coordinator on the driver's node makes these actors when a task on
the node first takes a sandbox, so a node that joins later, or replaces a lost one, gets its pool without a call of
the driver. All actors end with the driver. Touches Ray and, through the fleet, the engine of the node.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import holdfast.sync
from holdfast.errors import InvalidParams, ResourceExhausted, SandboxError, SandboxGone
from holdfast.fleet.fleet import Fleet, FleetSandbox
from holdfast.fleet.pool import TAKE_SECONDS, Pool, PoolStatus
from holdfast.fleet.record import Owner, start_time, this_process
from holdfast.fleet.template import Template, make_template

#: How long the pool of a node may take to start: its first sandbox may have to unpack an image.
OPEN_SECONDS: Final = 600.0
#: Added to the deadline of a call, so that the error of the node's pool arrives before the call times out.
_REPLY_SECONDS: Final = 30.0


class PoolSettings(msgspec.Struct, frozen=True):
    """The pool that each node has."""

    engine: str
    template: Template
    warm: int
    max: int
    #: Whether each sandbox is a fork of one base sandbox of the node.
    fork: bool

    def task_resources(self) -> dict[str, Any]:
        """The resources of one sandbox, as Ray accounts for them."""
        cpus, memory = self.template.cpus, self.template.memory
        return {"num_cpus": cpus or 1, **({"memory": memory} if memory else {})}


class SandboxPool:
    """Sandboxes of one template on every node of a Ray cluster, for the tasks that run there.

    Make it in the driver, pass it to tasks as an argument, and call `take` in them. `warm` and `max` count for each
    node. With `fork=True` each sandbox is a fork of a base sandbox on which the setup commands ran once. A task
    declares the cpus and the memory of its sandbox to Ray (`options`); warm sandboxes are idle and declare none.
    """

    def __init__(
        self,
        engine: str,
        template: Template | None = None,
        *,
        warm: int | None = None,
        max: int = 10,
        fork: bool = False,
        **fields: Any,
    ) -> None:
        if fork and warm is not None:
            raise InvalidParams("pool: warm: forks are made when they are taken; leave it out with fork=True")
        ready = 0 if fork else 1 if warm is None else warm
        if not 0 <= ready <= max or max < 1:
            raise InvalidParams(f"pool: warm is {ready} and max is {max}: 0 <= warm <= max, and max is at least 1")
        settings = PoolSettings(engine, make_template(template, fields), ready, max, fork)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        coordinator = ray.remote(Coordinator).options(num_cpus=0, scheduling_strategy=here)
        self._restore(settings, coordinator.remote(settings))

    def _restore(self, settings: PoolSettings, coordinator: Any) -> None:
        self._settings = settings
        self._coordinator = coordinator
        self._node_pools: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._settings, self._coordinator)

    # --- in the driver ---------------------------------------------------------------------------------------

    def options(self, *, retries: int = 0) -> dict[str, Any]:
        """Options for tasks that take sandboxes: `task.options(**pool.options()).remote(pool, ...)`.

        Ray spreads such tasks over the nodes, as many as the cpus and the memory of their sandboxes allow. A task
        runs at most once; with `retries`, Ray runs a task again that its node or its worker lost.
        """
        return {"scheduling_strategy": "SPREAD", "max_retries": retries, **self._settings.task_resources()}

    def ready(self) -> None:
        """Start the pools of all nodes that are alive now, and wait for them."""
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        for starting in [self._coordinator.node_pool.remote(node) for node in nodes]:
            _get(starting, OPEN_SECONDS)

    def status(self) -> dict[str, PoolStatus]:
        """The numbers of the pool of each node, by the id of the node."""
        found: dict[str, PoolStatus] = _get(self._coordinator.status.remote(), _REPLY_SECONDS)
        return found

    def close(self) -> None:
        """Remove every sandbox of the pool, those in use included."""
        _get(self._coordinator.close.remote(), OPEN_SECONDS)
        ray.kill(self._coordinator)

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in a task -------------------------------------------------------------------------------------------

    @contextmanager
    def take(self, *, timeout: float = TAKE_SECONDS) -> Iterator[holdfast.sync.FleetSandbox]:
        """A sandbox on the node of this task, for a `with` block; it is removed at the end, or with this process.

        `ResourceExhausted` if none is free within `timeout` seconds.
        """
        pool, id = self._take(timeout)
        try:
            with _fleet(self._settings.engine).connect(id) as box:
                yield box
        finally:
            _get(pool.give_back.remote(id), _REPLY_SECONDS)

    @asynccontextmanager
    async def take_async(self, *, timeout: float = TAKE_SECONDS) -> AsyncIterator[FleetSandbox]:
        """`take` for tasks with an event loop."""
        pool, id = await asyncio.to_thread(self._take, timeout)
        try:
            async with Fleet(self._settings.engine) as fleet, await fleet.connect(id) as box:
                yield box
        finally:
            await asyncio.shield(asyncio.to_thread(_get, pool.give_back.remote(id), _REPLY_SECONDS))

    def _take(self, timeout: float) -> tuple[Any, str]:
        node = ray.get_runtime_context().get_node_id()
        for last in (False, True):
            pool = self._node_pools.get(node)
            if pool is None:
                pool = self._node_pools[node] = _get(self._coordinator.node_pool.remote(node), OPEN_SECONDS)
            try:
                return pool, _get(pool.take.remote(this_process(), timeout), timeout + _REPLY_SECONDS)
            except SandboxGone:  # the actor of the node ended; the coordinator makes another one
                del self._node_pools[node]
                if last:
                    raise
        raise AssertionError("unreachable")


def _attached(settings: PoolSettings, coordinator: Any) -> SandboxPool:
    pool = SandboxPool.__new__(SandboxPool)
    pool._restore(settings, coordinator)
    return pool


@functools.cache
def _fleet(engine: str) -> holdfast.sync.Fleet:
    """One event loop for all tasks of a worker process."""
    return holdfast.sync.Fleet(engine)


def _get(reference: Any, timeout: float) -> Any:
    """The result of a call, with the errors of Holdfast.

    Not by `ray.get`: a task that waits in it gives its CPU back, and Ray starts a further worker for each.
    """
    try:
        return reference.future().result(timeout)
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise SandboxGone(f"an actor of the sandbox pool has ended: {error}") from error
    except TimeoutError:
        raise ResourceExhausted(f"the sandbox pool did not reply within {timeout:g} s") from None


class Coordinator:
    """The actor on the driver's node that makes the actors of the nodes, and owns them."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._pools: dict[str, Any] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def node_pool(self, node: str) -> Any:
        """The actor of a node, with its pool open."""
        async with self._opening.setdefault(node, asyncio.Lock()):
            for last in (False, True):
                if node not in self._pools:
                    there = NodeAffinitySchedulingStrategy(node, soft=False)
                    actor = ray.remote(NodePool).options(scheduling_strategy=there, num_cpus=0)
                    self._pools[node] = actor.remote(self._settings)
                pool = self._pools[node]
                try:
                    await asyncio.wait_for(pool.open.remote(), OPEN_SECONDS)
                except TimeoutError:
                    self._drop(node)
                    raise SandboxError(
                        f"ray node {node}: the pool of the node did not start within {OPEN_SECONDS:g} s"
                    ) from None
                except RayActorError as error:
                    self._drop(node)
                    if last:
                        raise SandboxGone(f"ray node {node}: its pool has ended: {error}") from None
                except RayTaskError as error:
                    self._drop(node)
                    raise error.cause from None
                else:
                    return pool
        raise AssertionError("unreachable")

    def _drop(self, node: str) -> None:
        ray.kill(self._pools.pop(node))

    async def status(self) -> dict[str, PoolStatus]:
        found: dict[str, PoolStatus] = {}
        for node, pool in tuple(self._pools.items()):
            try:
                found[node] = await pool.status.remote()
            except RayActorError:
                self._pools.pop(node, None)  # with its node
        return found

    async def close(self) -> None:
        closing = [pool.close.remote() for pool in self._pools.values()]
        await asyncio.gather(*closing, return_exceptions=True)
        for node in tuple(self._pools):
            self._drop(node)


class NodePool:
    """The actor of one node: its pool, and a lease for each sandbox in use."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._pool: Pool | None = None
        self._base = ""
        self._forks = asyncio.Semaphore(settings.max)
        self._opening = asyncio.Lock()
        #: The clean-up of each lease, by the id of its sandbox.
        self._leases: dict[str, AsyncExitStack] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        async with self._opening:
            if self._pool is not None:
                return
            its = self._settings
            pool = Pool(its.engine, its.template, warm=its.warm, max=its.max)
            await self._stack.enter_async_context(pool)
            if its.fork:
                base = await self._stack.enter_async_context(pool.fleet.block(its.template))
                self._base = base.ref.id
            else:
                await pool.ready()
            self._pool = pool

    async def take(self, holder: Owner, timeout: float) -> str:
        """Lease a sandbox to a process of this node; the lease ends with that process."""
        assert self._pool is not None
        async with AsyncExitStack() as stack:
            pidfd = _open_pidfd(holder)
            stack.callback(os.close, pidfd)
            if self._base:
                await self._wait_for_slot(timeout)
                stack.callback(self._forks.release)
                box = await stack.enter_async_context(self._pool.fleet.forked(self._base))
            else:
                box = await stack.enter_async_context(self._pool.take(timeout=timeout))
            id = box.ref.id
            asyncio.get_running_loop().add_reader(pidfd, self._holder_ended, id, pidfd)
            stack.callback(asyncio.get_running_loop().remove_reader, pidfd)
            self._leases[id] = stack.pop_all()
            return id

    async def _wait_for_slot(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(self._forks.acquire(), timeout)
        except TimeoutError:
            raise ResourceExhausted(
                f"no sandbox within {timeout:g} s; {self._settings.max} of {self._settings.max} are in use"
            ) from None

    def _holder_ended(self, id: str, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        task = asyncio.ensure_future(self.give_back(id))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def give_back(self, id: str) -> None:
        """End a lease and remove its sandbox. No error if the lease has ended."""
        if (stack := self._leases.pop(id, None)) is not None:
            await stack.aclose()

    async def status(self) -> PoolStatus:
        assert self._pool is not None
        found = self._pool.status
        return found if not self._base else msgspec.structs.replace(found, taken=len(self._leases))

    async def close(self) -> None:
        await asyncio.gather(*(self.give_back(id) for id in tuple(self._leases)))
        await self._stack.aclose()


def _open_pidfd(holder: Owner) -> int:
    """A descriptor that becomes readable when the process ends."""
    here = this_process()
    if (holder.boot, holder.namespace) != (here.boot, here.namespace):
        raise SandboxError("the task runs in another pid namespace than the node's pool, which cannot see its end")
    try:
        pidfd = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        raise SandboxGone(f"the task's process {holder.pid} has ended") from None
    if start_time(holder.pid) != holder.started:
        os.close(pidfd)
        raise SandboxGone(f"the task's process {holder.pid} has ended")
    return pidfd
