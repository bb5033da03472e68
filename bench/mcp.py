"""The cost of `holdfast mcp`: a command through the tool `exec_command`, beside the same command by `box.exec`.

Both go to one server of this machine. The client is that of the official SDK, on stdio, as agents start it. A tool
that does nothing, in a server of the same SDK, shows the part of a call that the SDK takes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any, Final

import holdfast
from bench.measure import Row, Scale, Target, compare, interleave_samples, latencies, one
from bench.servers import BenchmarkError
from tests.support.servers import running_server, server_environment

#: An MCP server with one tool, which has structured output and does nothing.
EMPTY_SERVER: Final = """
from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel
class Output(BaseModel):
    exit_code: int
server = MCPServer("empty")
@server.tool()
async def exec_command(cmd: str) -> Output:
    return Output(exit_code=0)
server.run("stdio")
"""


async def exec_command(scale: Scale) -> list[Row]:
    """`true` by the tool, in a login shell and in a plain one, beside `true` itself."""
    from mcp import Client, StdioServerParameters

    @contextlib.asynccontextmanager
    async def connected(*arguments: str) -> AsyncIterator[Client]:
        server = StdioServerParameters(command=sys.executable, args=list(arguments), env=server_environment())
        async with Client(server) as client:
            yield client

    # An empty home: a profile there would be the larger part of the figures.
    with tempfile.TemporaryDirectory() as home, running_server(["unix"], environ={"HOME": home}) as server:
        address = server.address("unix")
        async with (
            holdfast.connect(address) as box,
            connected("-m", "holdfast", "mcp", "--sandbox", address) as client,
            connected("-c", EMPTY_SERVER) as empty,
        ):
            shell = (await box.info()).shell.path

            async def by_exec(*argv: str) -> float:
                began = perf_counter()
                result = await box.exec(argv)
                if result.exit_code != 0:
                    raise BenchmarkError(f"{argv}: {result.stderr}")
                return perf_counter() - began

            async def by_tool(client: Client, **arguments: Any) -> float:
                began = perf_counter()
                result = await client.call_tool("exec_command", {"cmd": "true", **arguments})
                if result.is_error or (result.structured_content or {}).get("exit_code") != 0:
                    raise BenchmarkError(f"exec_command: {result}")
                return perf_counter() - began

            taken = await interleave_samples(
                scale.rounds,
                scale.starts,
                {
                    "exec": one(lambda: by_exec("true")),
                    "login": one(lambda: by_exec(shell, "-lc", "true")),
                    "plain": one(lambda: by_exec(shell, "-c", "true")),
                    "tool": one(lambda: by_tool(client)),
                    "plain tool": one(lambda: by_tool(client, login=False)),
                    "empty": one(lambda: by_tool(empty)),
                },
            )

    def row(name: str, tool: str, alone: str, what: str) -> Row:
        shells, nothing = latencies(taken[alone]).median, latencies(taken["empty"]).median
        return compare(
            name,
            what,
            "ms",
            baseline_what='`box.exec(["true"])`',
            baseline=latencies(taken["exec"]),
            measured=latencies(taken[tool]),
            target=Target("ratio at most", 3.0),
            note=f"{os.path.basename(shell)} alone by `box.exec` {shells:.1f} ms, an empty tool {nothing:.1f} ms",
        )

    return [
        row("mcp-true", "tool", "login", "`exec_command` of `true` over MCP on stdio, in a login shell"),
        row("mcp-plain", "plain tool", "plain", "`exec_command` of `true` over MCP on stdio, `login=false`"),
    ]
