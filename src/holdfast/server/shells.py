"""The `shell/*` methods: little output goes with a command's reply, much through a subscription.

Translates between the method table and the runtime's shells; touches nothing else.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from holdfast.model import CommandSpec, ProcessInfo, ShellSpec, ShellStatus
from holdfast.runtime.reader import Reader
from holdfast.wire import messages as m

if TYPE_CHECKING:
    from holdfast.runtime.local import LocalExec
    from holdfast.runtime.shell_command import ShellCommand
    from holdfast.server.connection import ServerConnection
    from holdfast.server.sessions import Sessions

#: Output that waits for the reply: one message instead of several for nearly every command.
INLINE_BYTES: Final = 64 * 1024
#: The reason that a cancelled request is cancelled with, as opposed to a connection that broke.
CANCELLED_BY_CALLER: Final = "request/cancel"


class _Output:
    """One command's output on one connection: held for the reply, until it becomes too much for that."""

    def __init__(self, connection: ServerConnection, command: ShellCommand, params: m.ShellRunParams) -> None:
        self._connection = connection
        self._command = command
        self._wanted = params.subscribe
        self.pushed = False
        #: Keeps the command from dropping what was not sent.
        self._reader = Reader(command, 0, self._grew)
        if params.live:
            self._push()
        else:
            self._grew()

    def _grew(self) -> None:
        logs = self._command.logs
        if not self.pushed and logs[0].end + logs[1].end > INLINE_BYTES:
            self._push()

    def _push(self) -> None:
        if self._wanted is not None:
            self.pushed = True
            self._connection.outbox.subscribe(
                self._command, name=self._wanted.subscription, window=self._wanted.window
            )
            self.close()

    def close(self) -> None:
        self._reader.close()


class ShellMethods:
    """The handlers, shared by all connections."""

    def __init__(self, exec_: LocalExec, sessions: Sessions) -> None:
        self._exec = exec_
        self._sessions = sessions

    async def open(self, connection: ServerConnection, params: ShellSpec) -> ShellStatus:
        status = await self._exec.open_shell(params)
        if connection.session is not None and params.lifetime == "connection":
            connection.session.shells.add(params.shell_id)
        return status

    async def run(self, connection: ServerConnection, params: m.ShellRunParams) -> m.ShellRunResult:
        command = self._exec.shells.run(params.shell_id, _spec(params))
        output = _Output(connection, command, params)
        try:
            ended = await command.wait_ended()
        except asyncio.CancelledError as cancelled:
            # A connection that broke comes back and asks again: the command goes on.
            if cancelled.args == (CANCELLED_BY_CALLER,):
                self._exec.shells.withdraw(command)
            raise
        finally:
            if not output.pushed:
                output.close()
        if output.pushed:
            return m.ShellRunResult(ended, pushed=True)
        logs = command.logs
        return m.ShellRunResult(
            ended,
            stdout=logs[0].contents() if logs[0].end else b"",
            stderr=logs[1].contents() if logs[1].end else b"",
            truncated=logs[0].truncated or logs[1].truncated,
        )

    async def start(self, connection: ServerConnection, params: m.ShellStartParams) -> ProcessInfo:
        info = await self._exec.start_in_shell(params.shell_id, params.command, params.process_id)
        if connection.session is not None:
            self._sessions.started(connection.session, params.process_id, bound=False)
        return info

    async def interrupt(self, connection: ServerConnection, params: m.ShellParams) -> m.ShellInterruptResult:
        return m.ShellInterruptResult(await self._exec.interrupt_shell(params.shell_id))

    async def close(self, connection: ServerConnection, params: m.ShellCloseParams) -> m.Empty:
        await self._exec.close_shell(params.shell_id, keep=params.keep, grace=params.grace_ms / 1000)
        return m.Empty()

    def describe(self, connection: ServerConnection, params: m.ShellParams) -> ShellStatus:
        return self._exec.shells.shell(params.shell_id).info()

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
    )
