"""The handlers of the method table: each translates one method to the served exec and does nothing else.

A handler that returns a result is answered in the same turn of the event loop; one that has to wait returns a
coroutine, which becomes a task, or a `DeferredReply`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.errors import Forbidden, StdinClosed, UnknownProcess
from holdfast.runtime.confine.rights import confinement_for
from holdfast.runtime.process.start import starts_at_once
from holdfast.server.exec_remote import ExecRemote
from holdfast.server.files import FileMethods
from holdfast.server.fs import FsMethods
from holdfast.server.host_calls import HostCallMethods
from holdfast.server.sandbox_policy import read_policy
from holdfast.server.shells import ShellMethods
from holdfast.server.terminals import TerminalMethods
from holdfast.types import (
    EnvironmentInfo,
    ProcessInfo,
    ReadResult,
    ServerStatus,
    Snapshot,
    TerminalSize,
    UsageSample,
)
from holdfast.wire import messages as m, methods as w
from holdfast.wire.paths import encode_uri

if TYPE_CHECKING:
    from holdfast.runtime.process.input import InputQueue
    from holdfast.runtime.process.process import ManagedProcess
    from holdfast.server.clients import ClientRegistry
    from holdfast.server.connection import ServerConnection
    from holdfast.server.deferred_reply import DeferredReply
    from holdfast.server.served_exec import ServedExec

P = TypeVar("P")
R = TypeVar("R")
Waiting = Coroutine[None, None, R]
Handler = Callable[["ServerConnection", Any], Any]

_ACCEPTED = m.WriteResult("accepted")


class Dispatcher:
    """The handlers of one server, shared by its connections."""

    def __init__(
        self,
        exec_: ServedExec,
        clients: ClientRegistry,
        *,
        listening: Callable[[], tuple[str, ...]],
        shutdown: Callable[[float | None, bool], None] | None,
    ) -> None:
        self._exec = exec_
        self._clients = clients
        self._listening = listening
        self._shutdown = shutdown
        self._exec_remote = ExecRemote(exec_)
        self.methods: dict[str, tuple[w.WireMethod[Any, Any], Handler]] = {}
        remote = self._exec_remote
        self._add(w.PING, self._ping)
        self._add(w.ENVIRONMENT_INFO, self._info)
        self._add(w.ENVIRONMENT_STATUS, self._status)
        self._add(w.SERVER_SHUTDOWN, self._stop)
        self._add(w.PROCESS_START, self._start)
        self._add(w.PROCESS_READ, self._read)
        self._add(w.PROCESS_WRITE, self._write)
        self._add(w.PROCESS_CLOSE_STDIN, self._close_stdin)
        self._add(w.PROCESS_RESIZE, self._resize)
        self._add(w.PROCESS_SIGNAL, self._signal)
        self._add(w.PROCESS_TERMINATE, self._terminate)
        self._add(w.PROCESS_WAIT, self._wait)
        self._add(w.PROCESS_SNAPSHOT, self._snapshot)
        self._add(w.PROCESS_DESCRIBE, self._describe)
        self._add(w.PROCESS_LIST, self._list)
        self._add(w.PROCESS_USAGE, self._usage)
        self._add(w.PROCESS_FORGET, self._forget)
        self._add(w.PROCESS_SUBSCRIBE, self._subscribe)
        self._add(w.PROCESS_UNSUBSCRIBE, self._unsubscribe)
        self._add(w.PORT_WAIT, self._wait_for_port)
        shells = ShellMethods(exec_, clients)
        self._add(w.SHELL_OPEN, shells.open)
        self._add(w.SHELL_RUN, shells.run)
        self._add(w.SHELL_START, shells.start)
        self._add(w.SHELL_INTERRUPT, shells.interrupt)
        self._add(w.SHELL_CLOSE, shells.close)
        self._add(w.SHELL_DESCRIBE, shells.describe)
        self._add(w.SHELL_LIST, shells.list)
        terminals = TerminalMethods(exec_, clients)
        self._add(w.TERMINAL_OPEN, terminals.open)
        self._add(w.TERMINAL_READ, terminals.read)
        self._add(w.TERMINAL_RUN, terminals.run)
        self._add(w.TERMINAL_WITHDRAW, terminals.withdraw)
        self._add(w.TERMINAL_KEYS, terminals.keys)
        self._add(w.TERMINAL_WAIT, terminals.wait)
        self._add(w.TERMINAL_CLOSE, terminals.close)
        self._add(w.TERMINAL_DESCRIBE, terminals.describe)
        self._add(w.TERMINAL_LIST, terminals.list)
        self._add_files(FileMethods(exec_), FsMethods(exec_))
        self.host_calls = host_calls = HostCallMethods(exec_.config)
        self._add(w.HOST_OFFER, host_calls.offer)
        self._add(w.HOST_ANSWER, host_calls.answer)
        self._add(w.HOST_WITHDRAW, host_calls.withdraw)
        self._add(w.HOST_CALL, host_calls.call)
        self._add(w.HOST_RECEIVE, host_calls.receive)
        self._add(w.HOST_CANCEL, host_calls.cancel)
        self._add(w.EXEC_REMOTE_START, lambda _, params: remote.start(params))
        self._add(w.EXEC_REMOTE_POLL, lambda _, params: remote.poll(params))
        self._add(w.EXEC_REMOTE_KILL, lambda _, params: remote.kill(params))
        self._add(w.EXEC_REMOTE_WRITE_STDIN, lambda _, params: remote.write_stdin(params))
        self._add(w.EXEC_REMOTE_CLOSE_STDIN, lambda _, params: remote.close_stdin(params))

    def _add_files(self, files: FileMethods, fs: FsMethods) -> None:
        self._add(w.FILE_READ, files.read)
        self._add(w.FILE_WRITE, files.write)
        self._add(w.FILE_COMMIT, files.commit)
        self._add(w.FILE_ABANDON, files.abandon)
        self._add(w.FILE_STAT, files.stat)
        self._add(w.FILE_LIST, files.list)
        self._add(w.FILE_MAKE_DIR, files.make_dir)
        self._add(w.FILE_REMOVE, files.remove)
        self._add(w.FILE_MOVE, files.move)
        self._add(w.FILE_COPY, files.copy)
        self._add(w.FILE_MAKE_LINK, files.make_link)
        self._add(w.FILE_SET_ATTRIBUTES, files.set_attributes)
        self._add(w.FILE_REAL_PATH, files.real_path)
        self._add(w.FS_READ_FILE, fs.read_file)
        self._add(w.FS_WRITE_FILE, fs.write_file)
        self._add(w.FS_CREATE_DIRECTORY, fs.create_directory)
        self._add(w.FS_GET_METADATA, fs.get_metadata)
        self._add(w.FS_CANONICALIZE, fs.canonicalize)
        self._add(w.FS_READ_DIRECTORY, fs.read_directory)
        self._add(w.FS_REMOVE, fs.remove)
        self._add(w.FS_COPY, fs.copy)
        self._add(w.FS_OPEN, fs.open)
        self._add(w.FS_READ_BLOCK, fs.read_block)
        self._add(w.FS_CLOSE, fs.close)

    def _add(
        self, method: w.WireMethod[P, R], handler: Callable[[ServerConnection, P], R | Waiting[R] | DeferredReply]
    ) -> None:
        self.methods[method.name] = (method, handler)

    # --- the environment -------------------------------------------------------------------------------------

    def _ping(self, connection: ServerConnection, params: m.Empty) -> m.Empty:
        return m.Empty()

    def _info(self, connection: ServerConnection, params: m.Empty) -> Waiting[EnvironmentInfo]:
        return self._info_with_uri() if connection.expects_uris else self._exec.info()

    async def _info_with_uri(self) -> EnvironmentInfo:
        info = await self._exec.info()
        return msgspec.structs.replace(info, cwd=encode_uri(info.cwd))

    async def _status(self, connection: ServerConnection, params: m.Empty) -> ServerStatus:
        status = await self._exec.status()
        return msgspec.structs.replace(
            status,
            sessions=self._clients.attached,
            listening=self._listening(),
            clients=self._clients.clients(without=connection.client),
        )

    def _stop(self, connection: ServerConnection, params: m.ShutdownParams) -> m.Empty:
        if self._shutdown is None:
            raise Forbidden("this server does not accept shutdown requests from clients")
        self._shutdown(None if params.grace_ms is None else params.grace_ms / 1000, params.keep)
        return m.Empty()

    async def _wait_for_port(self, connection: ServerConnection, params: m.WaitForPortParams) -> m.Empty:
        await self._exec.wait_for_port(params.port, host=params.host, timeout=params.timeout_ms / 1000)
        return m.Empty()

    # --- processes -------------------------------------------------------------------------------------------

    def _start(self, connection: ServerConnection, params: m.StartParams) -> m.StartResult | Waiting[m.StartResult]:
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

    def _read(self, connection: ServerConnection, params: m.ReadParams) -> Waiting[ReadResult]:
        return self._exec.read(
            params.process_id,
            after_seq=params.after_seq or 0,
            max_bytes=params.max_bytes,
            wait=(params.wait_ms or 0) / 1000,
            reader=params.reader,
        )

    def _write(self, connection: ServerConnection, params: m.WriteParams) -> m.WriteResult | Waiting[m.WriteResult]:
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

    def _close_stdin(self, connection: ServerConnection, params: m.ProcessParams) -> m.Empty:
        self._exec.input(params.process_id).close()
        return m.Empty()

    def _resize(self, connection: ServerConnection, params: m.ResizeParams) -> m.Empty:
        self._exec.process(params.process_id).resize(TerminalSize(params.rows, params.cols))
        return m.Empty()

    async def _signal(self, connection: ServerConnection, params: m.SignalParams) -> m.Empty:
        await self._exec.signal(params.process_id, params.signal, signal_id=params.signal_id)
        return m.Empty()

    async def _terminate(self, connection: ServerConnection, params: m.TerminateParams) -> m.TerminateResult:
        try:
            running = await self._exec.terminate(
                params.process_id, grace=params.grace_ms / 1000, force=params.force
            )
        except UnknownProcess:
            running = False
        return m.TerminateResult(running)

    async def _wait(self, connection: ServerConnection, params: m.WaitParams) -> m.WaitResult:
        timeout = None if params.timeout_ms is None else params.timeout_ms / 1000
        status = await self._exec.wait(params.process_id, timeout=timeout)
        if status is None:
            return m.WaitResult(running=True)
        return m.WaitResult(running=False, exit_code=status.exit_code, signal=status.signal)

    def _snapshot(self, connection: ServerConnection, params: m.ProcessParams) -> Snapshot:
        return self._exec.recorded(params.process_id).snapshot()

    def _describe(self, connection: ServerConnection, params: m.ProcessParams) -> ProcessInfo:
        return self._exec.process(params.process_id).info()

    async def _list(self, connection: ServerConnection, params: m.Empty) -> m.ListResult:
        return m.ListResult(await self._exec.list())

    def _usage(self, connection: ServerConnection, params: m.UsageParams) -> Waiting[UsageSample]:
        return self._exec.usage(params.process_ids)

    async def _forget(self, connection: ServerConnection, params: m.ProcessParams) -> m.Empty:
        await self._exec.forget(params.process_id)
        return m.Empty()

    def _subscribe(self, connection: ServerConnection, params: m.SubscribeParams) -> m.Empty:
        connection.outbox.subscribe(
            self._exec.recorded(params.process_id),
            after_seq=params.after_seq,
            name=params.subscription,
            window=params.window,
        )
        return m.Empty()

    def _unsubscribe(self, connection: ServerConnection, params: m.UnsubscribeParams) -> m.Empty:
        connection.outbox.unsubscribe(params.subscription)
        return m.Empty()


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
