"""Tools for sandboxes: make another from the connection's template, fork, list and remove.

They exist only where the sandbox of the connection was made for it. None takes an engine, an image or a limit: an
agent could otherwise make itself a sandbox with more rights than its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from mcp.server.mcpserver import Context
from pydantic import Field

from holdfast.integrations.mcp.exec_tools import SandboxName
from holdfast.integrations.mcp.hints import ADDS, READS, SETS
from holdfast.integrations.mcp.results import SandboxList, SandboxStatus
from holdfast.integrations.mcp.workspace import OpenedSandbox

if TYPE_CHECKING:
    from holdfast.integrations.mcp.server import SandboxServer

Removed = Annotated[str, Field(min_length=1, description="A sandbox of sandbox_create or sandbox_fork.")]


def add_to(server: SandboxServer) -> None:
    """Add the tools to a server."""

    async def sandbox_create(ctx: Context[Any, Any]) -> SandboxStatus:
        """Make a further sandbox, as the first one was at its beginning. It is removed with the connection."""

        async def create() -> SandboxStatus:
            return _status(await server.workspace(ctx).create())

        return await server.call(create())

    async def sandbox_fork(ctx: Context[Any, Any], sandbox: SandboxName = "") -> SandboxStatus:
        """Make a sandbox with the files of another one as they are now. Processes are not copied."""

        async def fork() -> SandboxStatus:
            return _status(await server.workspace(ctx).fork(sandbox))

        return await server.call(fork())

    async def sandbox_list(ctx: Context[Any, Any]) -> SandboxList:
        """List the sandboxes of this connection."""
        return SandboxList(sandboxes=[_status(each) for each in server.workspace(ctx).sandboxes().values()])

    async def sandbox_remove(ctx: Context[Any, Any], sandbox: Removed) -> SandboxList:
        """Remove a sandbox with everything in it, and list the others."""

        async def remove() -> SandboxList:
            workspace = server.workspace(ctx)
            await workspace.remove(sandbox)
            return SandboxList(sandboxes=[_status(each) for each in workspace.sandboxes().values()])

        return await server.call(remove())

    server.add_tool(sandbox_create, annotations=ADDS)
    server.add_tool(sandbox_fork, annotations=ADDS)
    server.add_tool(sandbox_list, annotations=READS)
    server.add_tool(sandbox_remove, annotations=SETS)


def _status(opened: OpenedSandbox) -> SandboxStatus:
    return SandboxStatus(sandbox=opened.name, state=opened.state)
