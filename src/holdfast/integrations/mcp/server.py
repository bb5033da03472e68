"""Assembly of the MCP server: `SandboxServer` has the tools and resources over the sandboxes of each connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

import holdfast
from holdfast.integrations.mcp import exec_tools, file_tools, resources, sandbox_tools, terminal_tools
from holdfast.integrations.mcp.approvals import Approvals
from holdfast.integrations.mcp.sources import SandboxSource
from holdfast.integrations.mcp.workspace import OpenedSandbox, Workspace, Workspaces

T = TypeVar("T")

_INSTRUCTIONS: Final = (
    "Commands and files of a sandbox. exec_command returns when the command ends or its yield time is over; a "
    "command that still runs has a session_id for write_stdin and a process_id for the other process tools. "
    "terminal_open is for programs that need a screen."
)


class ServerBase(MCPServer[Any]):
    """An MCP server that refuses arguments which a tool does not have, also in tests of the transport."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> Any:
        tool = self._tool_manager.get_tool(name)
        if tool is not None and (unknown := arguments.keys() - tool.parameters.get("properties", {}).keys()):
            raise ToolError(f"{name}: no argument {', '.join(sorted(unknown))}")
        return await super().call_tool(name, arguments, context)


class SandboxServer(ServerBase):
    """The server of `holdfast mcp`."""

    def __init__(self, source: SandboxSource, approvals: Approvals | None = None, *, eager: bool = False) -> None:
        """With `eager` the sandbox is opened before the first call: stdio has one connection for certain."""
        self.workspaces = Workspaces(source)
        self.approvals = approvals or Approvals()
        self.eager = eager
        super().__init__(
            "holdfast",
            title="Holdfast",
            description="Commands, terminals and files of a sandbox",
            instructions=_INSTRUCTIONS,
            version=holdfast.__version__,
            log_level="WARNING",
            lifespan=_running,
        )
        for module in (exec_tools, terminal_tools, file_tools, resources):
            module.add_to(self)
        if source.makes:
            sandbox_tools.add_to(self)
        for tool in self._tool_manager.list_tools():
            tool.parameters["additionalProperties"] = False

    def workspace(self, ctx: Context[Any, Any]) -> Workspace:
        return self.workspaces.of(ctx)

    async def opened(self, ctx: Context[Any, Any], sandbox: str = "") -> OpenedSandbox:
        return await self.workspace(ctx).opened(sandbox)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work of one tool call in time; errors of Holdfast become errors of the tool."""
        return await self.workspaces.call(work)


@asynccontextmanager
async def _running(server: MCPServer[Any]) -> AsyncIterator[SandboxServer]:
    assert isinstance(server, SandboxServer)
    async with server.workspaces.running():
        if server.eager:
            server.workspaces.begin()
        yield server
