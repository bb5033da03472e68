"""The handlers of the method table: each translates one method to the served exec and does nothing else.

A handler that returns a result, or None for an empty one, is answered in the same turn of the event loop; one that
has to wait returns a coroutine, which becomes a task, or a `DeferredReply`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.errors import Forbidden, StdinClosed, UnknownProcess
from holdfast.runtime.confine.rights import confinement_for
from holdfast.runtime.process.start import starts_at_once
from holdfast.server.methods.codex import CodexMethods
from holdfast.server.methods.exec_remote import ExecRemoteMethods
from holdfast.server.methods.files import FileMethods
from holdfast.server.methods.fs import FsMethods
from holdfast.server.methods.host_calls import HostCallMethods
from holdfast.server.methods.http_requests import HttpRequestMethods
from holdfast.server.methods.shells import ShellMethods
from holdfast.server.methods.streams import StreamMethods
from holdfast.server.methods.terminals import TerminalMethods
from holdfast.server.sandbox_policy import read_policy
from holdfast.types import (
    EndedProcesses,
    EnvironmentInfo,
    ProcessInfo,
    ReadResult,
    ServerStatus,
    Snapshot,
    TerminalSize,
    UsageSample,
)
from holdfast.wire import messages as m
from holdfast.wire.codex_messages import CodexCapabilities
from holdfast.wire.paths import encode_uri
from holdfast.wire.table import methods

if TYPE_CHECKING:
    from holdfast.runtime.process.input import InputQueue
    from holdfast.runtime.process.process import ManagedProcess
    from holdfast.server.clients import ClientRegistry
    from holdfast.server.connection import ServerConnection
    from holdfast.server.served_exec import ServedExec

R = TypeVar("R")
Waiting = Coroutine[None, None, R]
Handler = Callable[["ServerConnection", Any], Any]

_ACCEPTED = m.WriteResult("accepted")
_CAPABILITIES = msgspec.to_builtins(CodexCapabilities())


class Dispatcher:
    """The handlers of one server, shared by its connections. `ShellMethods.run` handles `shell/run`, and so on."""

    def __init__(
        self,
        exec_: ServedExec,
        clients: ClientRegistry,
        *,
        listening: Callable[[], tuple[str, ...]],
        shutdown: Callable[[float | None, bool], None] | None,
    ) -> None:
        self.host_calls = HostCallMethods(exec_.config)
        server = ServerMethods(exec_, clients, listening, shutdown)
        families: dict[str, object] = {
            **dict.fromkeys(("ping", "environment", "server", "port"), server),
            "process": ProcessMethods(exec_, clients),
            "shell": ShellMethods(exec_, clients),
            "terminal": TerminalMethods(exec_, clients),
            "file": FileMethods(exec_),
            "fs": FsMethods(exec_),
            "http": HttpRequestMethods(),
            **dict.fromkeys(("environmentConfig", "capabilityRoots", "capabilities"), CodexMethods()),
            "service": self.host_calls,
            "stream": StreamMethods(),
            "exec_remote": ExecRemoteMethods(exec_),
        }
        rows = [method for method in methods().values() if method.name != m.INITIALIZE.name]
        self.methods = {method.name: (method, _handler(families, method.name)) for method in rows}


def _handler(families: dict[str, object], name: str) -> Handler:
    family, _, verb = name.replace("exec_remote_", "exec_remote/").partition("/")
    handler: Handler = getattr(families[family], re.sub("([A-Z])", r"_\1", verb or family).lower())
    return handler


class ServerMethods:
    """The handlers about the server itself and its machine."""

    def __init__(
        self,
        exec_: ServedExec,
        clients: ClientRegistry,
        listening: Callable[[], tuple[str, ...]],
        shutdown: Callable[[float | None, bool], None] | None,
    ) -> None:
        self._exec = exec_
        self._clients = clients
        self._listening = listening
        self._shutdown = shutdown

    def ping(self, connection: ServerConnection, params: m.Empty) -> None:
        """Answer, which shows that the connection is alive."""

    def info(self, connection: ServerConnection, params: m.Empty) -> Waiting[EnvironmentInfo]:
        return self._info_for_codex() if connection.expects_uris else self._exec.info()

    async def _info_for_codex(self) -> EnvironmentInfo:
        info = await self._exec.info()
        return msgspec.structs.replace(info, cwd=encode_uri(info.cwd), capabilities=_CAPABILITIES)

    async def status(self, connection: ServerConnection, params: m.Empty) -> ServerStatus:
        status = await self._exec.status()
        return msgspec.structs.replace(
            status,
            sessions=self._clients.attached,
            listening=self._listening(),
            clients=self._clients.clients(without=connection.client),
            idle_seconds=self._clients.idle_seconds,
        )

    def shutdown(self, connection: ServerConnection, params: m.ShutdownParams) -> None:
        if self._shutdown is None:
            raise Forbidden("this server does not accept shutdown requests from clients")
        self._shutdown(None if params.grace_ms is None else params.grace_ms / 1000, params.keep)

    async def wait(self, connection: ServerConnection, params: m.WaitForPortParams) -> None:
        await self._exec.wait_for_port(params.port, host=params.host, timeout=params.timeout_ms / 1000)


class ProcessMethods:
    """The handlers of `process/*`."""

    def __init__(self, exec_: ServedExec, clients: ClientRegistry) -> None:
        self._exec = exec_
        self._clients = clients

    def start(self, connection: ServerConnection, params: m.StartParams) -> m.StartResult | Waiting[m.StartResult]:
        assert connection.client is not None
        self._exec.check_room(self._clients.running(connection.client))
        params = _with_policy(params)
        if starts_at_once(params):
            return self._started(connection, params, self._exec.start_now(params))
        return self._start_through_launcher(connection, params)

    async def _start_through_launcher(self, connection: ServerConnection, params: m.StartParams) -> m.StartResult:
        return self._started(connection, params, await self._exec.start_process(params))

    def _started(
        self, connection: ServerConnection, params: m.StartParams, process: ManagedProcess
    ) -> m.StartResult:
        if connection.client is not None:  # else the connection broke while the launcher started the process
            bound = params.lifetime == "connection"
            pushed = params.subscribe is True
            self._clients.started(connection.client, params.process_id, bound=bound, pushed=pushed)
            if pushed:
                connection.outbox.subscribe(process)
            elif isinstance(params.subscribe, m.SubscribeSpec):
                connection.outbox.open_reader(process, params.subscribe)
        return m.StartResult(process_id=params.process_id, pid=process.pid, process=process.info())

    def read(self, connection: ServerConnection, params: m.ReadParams) -> Waiting[ReadResult]:
        return self._exec.read(
            params.process_id,
            after_seq=params.after_seq or 0,
            max_bytes=params.max_bytes,
            wait=(params.wait_ms or 0) / 1000,
            reader=params.reader,
            timing=params.timing,
        )

    def write(self, connection: ServerConnection, params: m.WriteParams) -> m.WriteResult | Waiting[m.WriteResult]:
        try:
            queue = self._exec.input(params.process_id)
            queue.put(params.chunk, params.write_id)
        except UnknownProcess:
            return m.WriteResult("unknownProcess")
        except StdinClosed:
            return m.WriteResult("stdinClosed")
        return _ACCEPTED if queue.has_room else self._accept_when_room(queue)

    async def _accept_when_room(self, queue: InputQueue) -> m.WriteResult:
        await queue.wait_for_room()
        return _ACCEPTED

    def close_stdin(self, connection: ServerConnection, params: m.ProcessParams) -> None:
        self._exec.input(params.process_id).close()

    def resize(self, connection: ServerConnection, params: m.ResizeParams) -> None:
        self._exec.process(params.process_id).resize(TerminalSize(params.rows, params.cols))

    async def signal(self, connection: ServerConnection, params: m.SignalParams) -> None:
        await self._exec.signal(params.process_id, params.signal, signal_id=params.signal_id)

    async def terminate(self, connection: ServerConnection, params: m.TerminateParams) -> m.TerminateResult:
        try:
            running = await self._exec.terminate(
                params.process_id, grace=params.grace_ms / 1000, force=params.force
            )
        except UnknownProcess:
            running = False
        return m.TerminateResult(running)

    async def wait(self, connection: ServerConnection, params: m.WaitParams) -> m.WaitResult:
        timeout = None if params.timeout_ms is None else params.timeout_ms / 1000
        status = await self._exec.wait(params.process_id, timeout=timeout)
        if status is None:
            return m.WaitResult(running=True)
        return m.WaitResult(running=False, **msgspec.structs.asdict(status))

    async def ended(self, connection: ServerConnection, params: m.EndedParams) -> EndedProcesses:
        return await self._exec.ended(after=params.after, wait=params.wait_ms / 1000)

    def snapshot(self, connection: ServerConnection, params: m.ProcessParams) -> Snapshot:
        return self._exec.recorded(params.process_id).snapshot()

    def describe(self, connection: ServerConnection, params: m.ProcessParams) -> ProcessInfo:
        return self._exec.process(params.process_id).info()

    async def list(self, connection: ServerConnection, params: m.Empty) -> m.ListResult:
        return m.ListResult(await self._exec.list())

    def usage(self, connection: ServerConnection, params: m.UsageParams) -> Waiting[UsageSample]:
        return self._exec.usage(params.process_ids, members=params.members)

    async def forget(self, connection: ServerConnection, params: m.ProcessParams) -> None:
        await self._exec.forget(params.process_id)

    def subscribe(self, connection: ServerConnection, params: m.SubscribeParams) -> None:
        connection.outbox.subscribe(
            self._exec.recorded(params.process_id),
            after_seq=params.after_seq,
            name=params.subscription,
            window=params.window,
        )

    def unsubscribe(self, connection: ServerConnection, params: m.UnsubscribeParams) -> None:
        connection.outbox.unsubscribe(params.subscription)


def _with_policy(params: m.StartParams) -> m.StartParams:
    """The parameters with the confinement that their policy requires."""
    if params.enforce_managed_network or params.managed_network is not None or params.network_proxy is not None:
        raise Forbidden("this server has no managed network: `enforceManagedNetwork` and its details are refused")
    policy = read_policy(params.sandbox, os.environ.get("TMPDIR"))
    confinement = confinement_for(policy.rights, network=policy.network)
    if confinement is None:
        return params
    if params.confinement is not None:
        raise Forbidden("`sandbox` and `confinement` both restrict the process: send one of them")
    return msgspec.structs.replace(params, sandbox=None, confinement=confinement)
