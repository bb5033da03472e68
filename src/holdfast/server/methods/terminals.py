"""The `terminal/*` methods: translates between the method table and the runtime's terminals; touches nothing else.

A terminal is a process, too: `process/write`, `process/resize` and the other methods take its id.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from holdfast.server.deferred_reply import CANCELLED_BY_CALLER
from holdfast.types import TerminalCommandEnded, TerminalRead, TerminalSpec, TerminalStatus
from holdfast.wire import messages as m

if TYPE_CHECKING:
    from holdfast.server.clients import ClientRegistry
    from holdfast.server.connection import ServerConnection
    from holdfast.server.served_exec import ServedExec


class TerminalMethods:
    """The handlers, shared by all connections."""

    def __init__(self, exec_: ServedExec, clients: ClientRegistry) -> None:
        self._exec = exec_
        self._clients = clients

    async def open(self, connection: ServerConnection, params: TerminalSpec) -> TerminalStatus:
        assert connection.client is not None
        self._exec.processes.check_room(self._clients.running(connection.client))
        status = await self._exec.open_terminal(params)
        if connection.client is not None:  # else the connection broke meanwhile
            self._clients.started(connection.client, params.terminal_id, bound=params.lifetime == "connection")
        return status

    async def read(self, connection: ServerConnection, params: m.TerminalReadParams) -> TerminalRead:
        return await self._exec.read_terminal(
            params.terminal_id,
            since=params.since,
            max_bytes=params.max_bytes,
            wait=params.wait_ms / 1000,
            timing=params.timing,
            marks=params.marks,
            until=params.until,
            gather=params.gather_ms / 1000,
        )

    async def run(self, connection: ServerConnection, params: m.TerminalRunParams) -> TerminalCommandEnded:
        timeout = None if params.timeout_ms is None else params.timeout_ms / 1000
        run_id = params.run_id or secrets.token_hex(8)
        try:
            return await self._exec.terminals.run(
                params.terminal_id, params.command, timeout=timeout, max_bytes=params.max_bytes, run_id=run_id
            )
        except asyncio.CancelledError as cancelled:
            # A client whose connection broke may reconnect and repeat the request: the command continues.
            if CANCELLED_BY_CALLER in cancelled.args:
                self._exec.terminals.withdraw(params.terminal_id, run_id)
            raise

    def withdraw(self, connection: ServerConnection, params: m.TerminalWithdrawParams) -> None:
        self._exec.terminals.withdraw(params.terminal_id, params.run_id)

    async def keys(self, connection: ServerConnection, params: m.TerminalKeysParams) -> None:
        await self._exec.press_keys(params.terminal_id, params.keys, write_id=params.write_id)

    async def wait(self, connection: ServerConnection, params: m.TerminalWaitParams) -> m.TerminalWaitResult:
        timeout = None if params.timeout_ms is None else params.timeout_ms / 1000
        reached, status = await self._exec.wait_terminal(
            params.terminal_id, params.until, timeout=timeout, changes=params.changes
        )
        return m.TerminalWaitResult(reached, status)

    async def close(self, connection: ServerConnection, params: m.TerminalCloseParams) -> TerminalStatus:
        return await self._exec.close_terminal(
            params.terminal_id, mode=params.mode, jobs=params.jobs, grace=params.grace_ms / 1000
        )

    async def describe(self, connection: ServerConnection, params: m.TerminalParams) -> TerminalStatus:
        return await self._exec.describe_terminal(params.terminal_id, look=params.look)

    async def list(self, connection: ServerConnection, params: m.Empty) -> m.TerminalListResult:
        return m.TerminalListResult(await self._exec.list_terminals())
