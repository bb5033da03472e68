"""The `shell/*` methods. A little output is part of a command's reply; more goes through a subscription.

Translates between the method table and the runtime's shells; touches nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.errors import HoldfastError
from holdfast.server.deferred_reply import CANCELLED_BY_CALLER, DeferredReply
from holdfast.types import CommandSpec, ProcessInfo, ShellSpec, ShellStatus
from holdfast.wire import messages as m

if TYPE_CHECKING:
    from holdfast.runtime.shell.command import ShellCommand
    from holdfast.server.clients import ClientRegistry
    from holdfast.server.connection import ServerConnection
    from holdfast.server.served_exec import ServedExec, ServedShells

#: Output up to this size is sent with the reply: one message instead of several for nearly every command.
INLINE_BYTES: Final = 64 * 1024


class _ShellRunReply(DeferredReply):
    """The reply to `shell/run`. Output is held for the reply until it exceeds `INLINE_BYTES`, then pushed."""

    def __init__(
        self, shells: ServedShells, connection: ServerConnection, command: ShellCommand, params: m.ShellRunParams
    ) -> None:
        self._shells = shells
        self._connection = connection
        self._command = command
        self._wanted = params.subscribe
        self._pushed = False
        self._cancelled = False
        self._closed = False
        command.attach(self)
        if params.subscribe is None:
            command.stop_blocking()  # no reader takes output before the end
        if params.live or (params.subscribe is not None and params.subscribe.after_seq):
            self._push()
        else:
            self.on_ready()

    # --- DeferredReply ---------------------------------------------------------------------------------------

    def start(self, reply: Callable[[m.ShellRunResult | HoldfastError], None]) -> None:
        self._reply = reply
        if self._command.is_done:
            self._over()
        else:
            self._command.add_done_callback(self._over)

    def cancel(self, reason: str = "") -> None:
        self._cancelled = True
        if reason == CANCELLED_BY_CALLER:
            self._shells.withdraw(self._command.process_id)
        elif not self._pushed:
            # A client whose connection broke may reconnect and repeat the request; the subscription holds output.
            self._push()
        self._close()

    def _over(self) -> None:
        if self._cancelled:
            return
        self._close()
        command, logs = self._command, self._command.logs
        truncated = logs[0].truncated or logs[1].truncated
        if truncated and not self._pushed:
            self._push()  # a subscription reports the gaps
        if command.ended is None:
            assert command.error is not None
            self._reply(command.error)
        elif self._pushed:
            self._reply(m.ShellRunResult(command.ended, pushed=True))
        else:
            self._reply(
                m.ShellRunResult(
                    command.ended,
                    stdout=logs[0].contents() if logs[0].end else b"",
                    stderr=logs[1].contents() if logs[1].end else b"",
                    truncated=truncated,
                )
            )

    # --- output ----------------------------------------------------------------------------------------------

    #: Nothing counts as taken before it is sent.
    consumed: Final = (0, 0, 0)

    def on_ready(self) -> None:
        logs = self._command.logs
        # On a full disk, output is pushed so that its room can be freed.
        if not self._pushed and (logs[0].end + logs[1].end > INLINE_BYTES or self._command.lacks_room):
            self._push()

    def _push(self) -> None:
        if self._wanted is not None:
            self._pushed = True
            self._connection.outbox.open_reader(self._command, self._wanted)
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._command.detach(self)


class ShellMethods:
    """The handlers, shared by all connections."""

    def __init__(self, exec_: ServedExec, clients: ClientRegistry) -> None:
        self._exec = exec_
        self._clients = clients

    async def open(self, connection: ServerConnection, params: ShellSpec) -> ShellStatus:
        status = await self._exec.open_shell(params)
        if connection.client is not None:
            self._clients.opened(connection.client, params.shell_id, bound=params.lifetime == "connection")
        return status

    def run(self, connection: ServerConnection, params: m.ShellRunParams) -> _ShellRunReply:
        return _ShellRunReply(
            self._exec.shells, connection, self._exec.shells.run(params.shell_id, _spec(params)), params
        )

    async def start(self, connection: ServerConnection, params: m.ShellStartParams) -> ProcessInfo:
        info = await self._exec.start_in_shell(
            params.shell_id,
            params.command,
            params.process_id,
            start_id=params.start_id,
            pipe_stdin=params.pipe_stdin,
        )
        if connection.client is not None:
            self._clients.started(connection.client, params.process_id, bound=False)
        return info

    async def interrupt(
        self, connection: ServerConnection, params: m.ShellInterruptParams
    ) -> m.ShellInterruptResult:
        if params.command_id is not None:
            return m.ShellInterruptResult(self._exec.shells.withdraw(params.command_id))
        running = await self._exec.interrupt_shell(params.shell_id, interrupt_id=params.interrupt_id)
        return m.ShellInterruptResult(running)

    async def close(self, connection: ServerConnection, params: m.ShellCloseParams) -> None:
        await self._exec.close_shell(params.shell_id, keep=params.keep, grace=params.grace_ms / 1000)

    def describe(self, connection: ServerConnection, params: m.ShellParams) -> ShellStatus:
        return self._exec.shells.describe(params.shell_id)

    async def list(self, connection: ServerConnection, params: m.Empty) -> m.ShellListResult:
        return m.ShellListResult(await self._exec.list_shells())


def _spec(params: m.ShellRunParams) -> CommandSpec:
    return CommandSpec(
        command_id=params.command_id,
        command=params.command,
        cwd=params.cwd,
        env=params.env,
        input=params.input,
        timeout=None if params.timeout_ms is None else params.timeout_ms / 1000,
        pipe_stdin=params.pipe_stdin,
        silence=None if params.silence_ms is None else params.silence_ms / 1000,
    )
