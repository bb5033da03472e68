"""Tools for terminals: programs that draw a screen, driven by text and keys."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Final

from mcp.server.mcpserver import Context, Elicit, ElicitationResult, Resolve
from pydantic import Field

from holdfast import errors
from holdfast.client.terminal import Terminal
from holdfast.errors import LimitReached, TimeoutError
from holdfast.integrations.mcp.approvals import Approval, check, question
from holdfast.integrations.mcp.exec_tools import SandboxName, WaitSeconds, server_of
from holdfast.integrations.mcp.hints import ADDS, READS, SETS, WRITES
from holdfast.integrations.mcp.results import TerminalClosed, TerminalScreen
from holdfast.integrations.mcp.workspace import OpenedSandbox

if TYPE_CHECKING:
    from holdfast.integrations.mcp.server import SandboxServer

#: Open terminals of one sandbox: each has an emulator with some megabytes.
MAX_TERMINALS: Final = 16
#: Keys in one call.
MAX_KEYS: Final = 100

TerminalId = Annotated[str, Field(description="The terminal_id of terminal_open.")]
Command = Annotated[str, Field(description="The program with its arguments; empty for a login shell.")]
Workdir = Annotated[str, Field(description="The working directory; empty for the default.")]
Rows = Annotated[int, Field(ge=1, le=500)]
Cols = Annotated[int, Field(ge=1, le=500)]
Text = Annotated[str, Field(description="Text to type, before the keys.")]
Keys = Annotated[
    list[str], Field(max_length=MAX_KEYS, description="Keys to press: Enter, C-c, Up, F5, M-x, a character …")
]


async def _approve_open(ctx: Context[Any, Any], command: str, workdir: str) -> Approval | Elicit[Approval]:
    # A shell without a script runs nothing by itself, and all that is typed into it needs an approval.
    decision = await server_of(ctx).approvals.command(command, workdir, interactive=True) if command else None
    return question(ctx, decision, "Open a terminal in the sandbox with this program?", command)


async def _approve_typed(ctx: Context[Any, Any], text: str, keys: list[str]) -> Approval | Elicit[Approval]:
    ending = not text and all(key in ("C-c", "C-d", "C-z") for key in keys)
    decision = None if ending else server_of(ctx).approvals.typed(text + " ".join(keys))
    return question(ctx, decision, "Type this in a terminal of the sandbox?", f"{text} {' '.join(keys)}".strip())


OpenApproval = Annotated[ElicitationResult[Approval], Resolve(_approve_open)]
TypedApproval = Annotated[ElicitationResult[Approval], Resolve(_approve_typed)]


def add_to(server: SandboxServer) -> None:
    """Add the tools to a server."""

    async def terminal_open(
        ctx: Context[Any, Any],
        approval: OpenApproval,
        command: Command = "",
        workdir: Workdir = "",
        rows: Rows = 24,
        cols: Cols = 80,
        sandbox: SandboxName = "",
    ) -> TerminalScreen:
        """Open a terminal with a login shell or a program, and return its first screen."""
        check(approval)

        async def open() -> TerminalScreen:
            opened = await server.opened(ctx, sandbox)
            await _check_room(opened)
            argv = None if not command else ["/bin/sh", "-c", command]
            terminal = await opened.box.terminal(
                argv, cwd=workdir or None, rows=rows, cols=cols, lifetime="connection"
            )
            opened.terminals[terminal.id] = terminal
            return await _screen(terminal)

        return await server.call(open())

    async def terminal_screen(
        ctx: Context[Any, Any], terminal_id: TerminalId, sandbox: SandboxName = ""
    ) -> TerminalScreen:
        """Return the current screen of a terminal."""

        async def screen() -> TerminalScreen:
            async with _terminal(await server.opened(ctx, sandbox), terminal_id) as terminal:
                return await _screen(terminal)

        return await server.call(screen())

    async def terminal_keys(
        ctx: Context[Any, Any],
        approval: TypedApproval,
        terminal_id: TerminalId,
        text: Text = "",
        keys: Keys = [],  # noqa: B006 - read only; the schema shows the default
        wait_seconds: WaitSeconds = 1.0,
        sandbox: SandboxName = "",
    ) -> TerminalScreen:
        """Type text, then press keys, wait until the program awaits input again, and return the screen."""
        check(approval)

        async def type() -> TerminalScreen:
            async with _terminal(await server.opened(ctx, sandbox), terminal_id) as terminal:
                if text:
                    await terminal.send(text)
                if keys:
                    await terminal.send_keys(*keys)
                # Otherwise it still works, or has ended, which the screen shows.
                with contextlib.suppress(TimeoutError, errors.TerminalClosed):
                    await terminal.wait_until_awaiting_input(timeout=wait_seconds)
                return await _screen(terminal)

        return await server.call(type())

    async def terminal_close(
        ctx: Context[Any, Any], terminal_id: TerminalId, sandbox: SandboxName = ""
    ) -> TerminalClosed:
        """Close a terminal and end what runs in it."""

        async def close() -> TerminalClosed:
            opened = await server.opened(ctx, sandbox)
            async with _terminal(opened, terminal_id) as terminal:
                status = await terminal.close()
            opened.terminals.pop(terminal_id, None)
            return TerminalClosed(exit_code=status.exit_code)

        return await server.call(close())

    server.add_tool(terminal_open, annotations=ADDS)
    server.add_tool(terminal_screen, annotations=READS)
    server.add_tool(terminal_keys, annotations=WRITES)
    server.add_tool(terminal_close, annotations=SETS)


async def _check_room(opened: OpenedSandbox) -> None:
    """Forget terminals that have ended; `LimitReached` if too many are left."""
    for id, terminal in list(opened.terminals.items()):
        if (await terminal.describe()).state in ("CLOSED", "ERROR"):
            del opened.terminals[id]
            await terminal.release()
    if len(opened.terminals) >= MAX_TERMINALS:
        raise LimitReached(f"{MAX_TERMINALS} terminals are open; close one: {', '.join(opened.terminals)}")


@contextlib.asynccontextmanager
async def _terminal(opened: OpenedSandbox, terminal_id: str) -> AsyncIterator[Terminal]:
    """A terminal of this connection, or one of the sandbox that another client opened."""
    own = opened.terminals.get(terminal_id)
    terminal = own or await opened.box.attach_terminal(terminal_id)
    try:
        yield terminal
    finally:
        if own is None:
            await terminal.release()


async def _screen(terminal: Terminal) -> TerminalScreen:
    screen, status = await terminal.screen(), await terminal.describe()
    lines = list(screen.lines)
    while lines and not lines[-1]:
        lines.pop()
    return TerminalScreen(
        terminal_id=terminal.id,
        lines=lines,
        cursor_row=screen.cursor_row,
        cursor_col=screen.cursor_col,
        rows=screen.rows,
        cols=screen.cols,
        title=screen.title,
        state=status.state,
        awaiting_input=status.awaiting_input,
    )
