"""`sandbox_agent_bridge`: a model for the programs of a sandbox, for the length of a `with` block.

Registers the model as a host call service, runs the proxy in the sandbox through `exec_remote`, watches both, and
removes both on exit. Touches only the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Final

from holdfast.bridge.limits import BridgeLimits, Spent
from holdfast.bridge.model_calls import ModelCalls
from holdfast.bridge.model_choice import Model
from holdfast.bridge.record import CallRecord, CallRecords
from holdfast.client.exec_remote import Completed, ExecRemoteOptions, ExecRemoteProcess, StderrChunk, StdoutChunk
from holdfast.client.host_call import HostService
from holdfast.client.sandbox import Sandbox
from holdfast.errors import HoldfastError, InvalidParams, ProcessError, TimeoutError, UnknownProcess
from holdfast.types import EnvPolicy
from holdfast.wire.http_messages import MODEL_SERVICE

log = logging.getLogger(__name__)

DEFAULT_PORT: Final = 13131
#: Time limit for the proxy to listen: one interpreter start on a busy machine.
START_SECONDS: Final = 30.0
#: Seconds between TERM and KILL. The proxy exits at once unless it is stopped or stuck.
GRACE_SECONDS: Final = 5.0
#: Characters of the proxy's stderr that are kept for the error message.
_STDERR_CHARACTERS: Final = 8_192
#: Client libraries require a key. This value authorises nothing, and its text shows that.
DUMMY_KEY: Final = "holdfast-bridge-no-key"


class Bridge:
    """An open bridge."""

    def __init__(self, port: int, models: ModelCalls) -> None:
        self.port = port
        #: Address of the proxy inside the sandbox.
        self.url = f"http://127.0.0.1:{port}"
        self._models = models

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for the agent that point the providers' client libraries at the bridge."""
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
        """The latest finished calls, oldest first."""
        return self._models.calls

    @property
    def spent(self) -> Spent:
        """Total requests, tokens and money of all calls so far."""
        return self._models.spent


@contextlib.asynccontextmanager
async def sandbox_agent_bridge(
    box: Sandbox,
    model: Model,
    port: int = DEFAULT_PORT,
    *,
    limits: BridgeLimits | None = None,
    on_call: Callable[[CallRecord], None] | None = None,
    start_timeout: float = START_SECONDS,
    grace: float = GRACE_SECONDS,
) -> AsyncIterator[Bridge]:
    """Give the programs in `box` a model at http://127.0.0.1:`port`, as if they had network and keys.

    `model` is an `Upstream`, an async function from a `ModelRequest` to a `ModelReply` or to deltas, or a mapping
    from model names to those, with "*" for all others. `port` 0 chooses a free one. `on_call` is called with the
    record of each finished call. If the proxy exits by itself, or the sandbox is lost, the block is cancelled and
    that error is raised instead of the cancellation. On exit from the block, running calls are cancelled and the
    proxy gets TERM, then KILL after `grace` seconds.
    """
    if not 0 <= port < 65536:
        raise InvalidParams(f"port {port}: must be 0 to 65535; 0 chooses a free one")
    limits = limits or BridgeLimits()
    async with contextlib.AsyncExitStack() as stack:
        models = ModelCalls(model, limits, on_call=on_call)
        stack.push_async_callback(models.aclose)
        service = await stack.enter_async_context(box.offer(MODEL_SERVICE, models.handle))
        proxy = _Proxy(await _start_proxy(box, service, port, limits))
        stack.push_async_callback(lambda: _await_uncancelled(proxy.aclose(box, grace)))
        bound = await proxy.ready(start_timeout)
        serving = asyncio.create_task(service.wait())
        stack.callback(serving.cancel)
        async with _failing_with(proxy.watching, serving):
            yield Bridge(bound, models)


async def _start_proxy(box: Sandbox, service: HostService, port: int, limits: BridgeLimits) -> ExecRemoteProcess:
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
    # The proxy must not outlive this program, and needs none of the secrets in the server's environment.
    options = ExecRemoteOptions(env=env, env_policy=EnvPolicy(), lifetime="connection")
    # Runs as the server's own user and in its directory, not with the connection's defaults for the agent.
    return Sandbox(box.api).exec_remote([*info.holdfast, "model_proxy"], options)


class _Proxy:
    """The proxy process. Its first line of output is its URL; its exit is an error with stderr as the reason."""

    def __init__(self, process: ExecRemoteProcess) -> None:
        self._process = process
        self._listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stderr = ""
        #: Completes only with an error or by cancellation.
        self.watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        output = ""
        async for event in self._process:
            if isinstance(event, StdoutChunk) and not self._listening.done():
                output += event.data
                if "\n" in output:
                    self._listening.set_result(_port_of(output.partition("\n")[0]))
            elif isinstance(event, StderrChunk):
                self._stderr = (self._stderr + event.data)[-_STDERR_CHARACTERS:]
            elif isinstance(event, Completed):
                words = self._stderr.strip() or "nothing on stderr"
                raise ProcessError(f"the model proxy exited with code {event.exit_code}: {words}")
        raise ProcessError("the model proxy was killed")

    async def ready(self, timeout: float) -> int:
        """Return the port once the proxy listens there."""
        await asyncio.wait((self.watching, self._listening), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._listening.done():
            return self._listening.result()
        if self.watching.done():
            self.watching.result()
        raise TimeoutError(f"the model proxy does not listen after {timeout:g} s: {self._stderr.strip()}")

    async def aclose(self, box: Sandbox, grace: float) -> None:
        try:
            await self._process.kill(grace)
            # Forget the process as well, so that nothing of the bridge remains in the sandbox.
            with contextlib.suppress(UnknownProcess):
                await box.api.forget(self._process.id)
        except HoldfastError as error:
            # An unreachable server ends the proxy after the session timeout: its lifetime is the connection.
            log.warning("cannot stop the model proxy: %s", error)
        self.watching.cancel()
        await asyncio.wait((self.watching,))
        if not self.watching.cancelled():
            self.watching.exception()  # reported already, or the result of the kill above


def _port_of(line: str) -> int:
    try:
        return int(line.rpartition(":")[2])
    except ValueError:
        raise ProcessError(f"the model proxy printed {line!r} instead of its URL") from None


@contextlib.asynccontextmanager
async def _failing_with(*watched: asyncio.Task[None]) -> AsyncIterator[None]:
    """Cancel the block as soon as one of the tasks ends, and raise the task's error in its place."""
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
    """Withdraw our cancellation: the block swallowed it, or requested it again as a TaskGroup does."""
    owner.uncancel()
    try:
        await asyncio.sleep(0)  # the next await receives a cancellation that is still pending
    except asyncio.CancelledError:
        if owner.cancelling() > before:
            raise  # the caller's cancellation


def _error_of(task: asyncio.Task[None]) -> HoldfastError:
    error = None if task.cancelled() else task.exception()
    return error if isinstance(error, HoldfastError) else ProcessError("the bridge stopped unexpectedly")


async def _await_uncancelled(work: Coroutine[object, object, None]) -> None:
    """Await `work` through any number of cancellations: it is short, and must not stop half-way."""
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
