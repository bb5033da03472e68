"""`sandbox_agent_bridge`: a model for the programs of a sandbox, for the length of a `with` block.

Offers the model as a service of this program, runs the proxy inside through `exec_remote`, watches both, and leaves
nothing behind. It touches nothing but the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Final

from holdfast.bridge.limits import Limits, Spent
from holdfast.bridge.model_choice import Model
from holdfast.bridge.model_service import ModelService
from holdfast.bridge.record import CallRecord, CallRecords
from holdfast.client.exec_remote import Completed, ExecRemoteOptions, ExecRemoteProcess, StderrChunk, StdoutChunk
from holdfast.client.host_call import HostService
from holdfast.client.sandbox import Sandbox
from holdfast.errors import HoldfastError, InvalidParams, ProcessError, TimeoutError, UnknownProcess
from holdfast.types import EnvPolicy
from holdfast.wire.http_messages import MODEL_SERVICE

log = logging.getLogger(__name__)

DEFAULT_PORT: Final = 13131
#: How long the proxy may take to listen: an interpreter's start, on a machine that is busy with others.
START_SECONDS: Final = 30.0
#: What the proxy has between TERM and KILL. It ends at once, unless it is stopped or stuck.
GRACE_SECONDS: Final = 5.0
#: What is kept of its last words.
_STDERR_CHARACTERS: Final = 8_192
#: Clients insist on a key. This one opens nothing, and says so to whoever finds it.
DUMMY_KEY: Final = "holdfast-bridge-no-key"


class Bridge:
    """A bridge that is open."""

    def __init__(self, port: int, service: ModelService) -> None:
        self.port = port
        #: Where the proxy listens, inside the sandbox.
        self.url = f"http://127.0.0.1:{port}"
        self._service = service

    @property
    def env(self) -> dict[str, str]:
        """Variables with which the providers' clients find the bridge: give them to the agent."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": DUMMY_KEY,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": DUMMY_KEY,
            "GOOGLE_GEMINI_BASE_URL": self.url,
            "GEMINI_API_KEY": DUMMY_KEY,
        }

    @property
    def calls(self) -> CallRecords:
        """The latest calls that have ended, oldest first."""
        return self._service.calls

    @property
    def spent(self) -> Spent:
        """What all calls have taken so far."""
        return self._service.spent


@contextlib.asynccontextmanager
async def sandbox_agent_bridge(
    box: Sandbox,
    model: Model,
    port: int = DEFAULT_PORT,
    *,
    limits: Limits | None = None,
    on_call: Callable[[CallRecord], None] | None = None,
    start_timeout: float = START_SECONDS,
    grace: float = GRACE_SECONDS,
) -> AsyncIterator[Bridge]:
    """Give the programs in `box` a model at http://127.0.0.1:`port`, as if they had network and keys.

    `model` is an `Upstream`, an async function from a `ModelRequest` to a `ModelReply` or to deltas, or a mapping
    from model names to those, with "*" for all others. `port` 0 chooses a free one. `on_call` is called with the
    record of each call when it has ended. If the proxy ends by itself, or the sandbox is lost, the block is
    cancelled and that error raised in its place. On leaving, calls are called off and the proxy ends: TERM, up to
    `grace` seconds, KILL.
    """
    if not 0 <= port < 65536:
        raise InvalidParams(f"port {port}: must be 0 to 65535; 0 chooses a free one")
    limits = limits or Limits()
    async with contextlib.AsyncExitStack() as stack:
        models = ModelService(model, limits, on_call=on_call)
        stack.push_async_callback(models.aclose)
        service = await stack.enter_async_context(box.offer(MODEL_SERVICE, models.handle))
        proxy = _Proxy(await _start_proxy(box, service, port, limits))
        stack.push_async_callback(lambda: _to_its_end(proxy.aclose(box, grace)))
        bound = await proxy.ready(start_timeout)
        serving = asyncio.create_task(service.wait())
        stack.callback(serving.cancel)
        async with _failing_with(proxy.watching, serving):
            yield Bridge(bound, models)


async def _start_proxy(box: Sandbox, service: HostService, port: int, limits: Limits) -> ExecRemoteProcess:
    info, status = await asyncio.gather(box.info(), box.status())
    if not info.holdfast:
        raise InvalidParams(f"the server in the sandbox is of version {info.version}, too old for a bridge")
    sockets = [address.partition(":")[2] for address in status.listening if address.startswith("unix:")]
    if not sockets:
        raise InvalidParams("the server in the sandbox has no Unix socket that the proxy could call")
    env = {
        "BRIDGE_MODEL_SERVICE_PORT": str(port),
        "BRIDGE_MODEL_SERVICE_INSTANCE": service.instance,
        "BRIDGE_MODEL_SERVICE_MAX_BODY_BYTES": str(limits.body_bytes),
        "HOLDFAST_SOCKET": sockets[0],
    }
    # Should this program die, the proxy is of no use to anybody.
    # It has no use for secrets that the server has in its environment.
    options = ExecRemoteOptions(env=env, env_policy=EnvPolicy(), lifetime="connection")
    # As the server's own user and in its directory, whatever the connection's defaults are for the agent.
    return Sandbox(box.api).exec_remote([*info.holdfast, "model_proxy"], options)


class _Proxy:
    """The proxy process: its first line is its URL, its end is an error, and its stderr says why."""

    def __init__(self, process: ExecRemoteProcess) -> None:
        self._process = process
        self._listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stderr = ""
        #: Never ends by itself without an error.
        self.watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        said = ""
        async for event in self._process:
            if isinstance(event, StdoutChunk) and not self._listening.done():
                said += event.data
                if "\n" in said:
                    self._listening.set_result(_port_of(said.partition("\n")[0]))
            elif isinstance(event, StderrChunk):
                self._stderr = (self._stderr + event.data)[-_STDERR_CHARACTERS:]
            elif isinstance(event, Completed):
                words = self._stderr.strip() or "it said nothing on stderr"
                raise ProcessError(f"the model proxy ended by itself with exit code {event.exit_code}: {words}")
        raise ProcessError("the model proxy was killed")

    async def ready(self, timeout: float) -> int:
        """The port, once it listens there."""
        await asyncio.wait((self.watching, self._listening), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._listening.done():
            return self._listening.result()
        if self.watching.done():
            self.watching.result()
        raise TimeoutError(f"the model proxy does not listen after {timeout:g} s: {self._stderr.strip()}")

    async def aclose(self, box: Sandbox, grace: float) -> None:
        try:
            await self._process.kill(grace)
            # Its output is of no use any more, and nothing of the bridge should stay.
            with contextlib.suppress(UnknownProcess):
                await box.api.forget(self._process.id)
        except HoldfastError as error:
            # A server out of reach ends it when it has missed us for long enough: its lifetime is the connection.
            log.warning("the model proxy could not be ended: %s", error)
        self.watching.cancel()
        await asyncio.wait((self.watching,))
        if not self.watching.cancelled():
            self.watching.exception()  # told already, or no news: we killed it


def _port_of(line: str) -> int:
    try:
        return int(line.rpartition(":")[2])
    except ValueError:
        raise ProcessError(f"the model proxy said {line!r} where its URL was expected") from None


@contextlib.asynccontextmanager
async def _failing_with(*watched: asyncio.Task[None]) -> AsyncIterator[None]:
    """Cancel the block as soon as one of the tasks ends, and raise its error in the place of the cancellation."""
    owner = asyncio.current_task()
    assert owner is not None
    failed: list[asyncio.Task[None]] = []
    before = owner.cancelling()
    left = False

    def fail(task: asyncio.Task[None]) -> None:
        _error_of(task)  # retrieved, or the loop would log it
        # `remove_done_callback` does not reach a callback that is queued in the loop: when one event ends the block
        # and a watched task, this can run after the block, and a cancellation would hit the caller.
        if left:
            return
        if not failed:
            owner.cancel()
        failed.append(task)

    for task in watched:
        task.add_done_callback(fail)
    try:
        try:
            yield
        finally:
            left = True
            for task in watched:
                task.remove_done_callback(fail)
    except asyncio.CancelledError:
        if not failed or owner.uncancel() > before:
            raise  # the caller's cancellation
        raise _error_of(failed[0]) from None
    except Exception as error:
        if not failed:
            raise
        await _withdraw_cancellation(owner, before)
        raise _error_of(failed[0]) from error
    else:
        if failed:
            await _withdraw_cancellation(owner, before)
            raise _error_of(failed[0])


async def _withdraw_cancellation(owner: asyncio.Task[object], before: int) -> None:
    """Take our cancellation back: the block has swallowed it, or has requested it again, as a TaskGroup does."""
    owner.uncancel()
    try:
        await asyncio.sleep(0)  # the next await receives a cancellation that is still pending
    except asyncio.CancelledError:
        if owner.cancelling() > before:
            raise  # the caller's cancellation


def _error_of(task: asyncio.Task[None]) -> HoldfastError:
    error = None if task.cancelled() else task.exception()
    return error if isinstance(error, HoldfastError) else ProcessError("the bridge ended by itself")


async def _to_its_end(work: Coroutine[object, object, None]) -> None:
    """Await it through any number of cancellations: it is short, and must not be left half done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
