"""The cost of `holdfast mcp`: a command through the tool `exec_command`, beside the same command by `box.exec`.

Both go to one server of this machine. The client is that of the official SDK, on stdio, as agents start it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from time import perf_counter

import holdfast
from bench.measure import Row, Scale, Target, compare, interleave_samples, latencies, one
from bench.servers import BenchmarkError
from tests.support.servers import running_server, server_environment


async def exec_command(scale: Scale) -> list[Row]:
    """`true` by the tool, which runs a login shell, beside `true` in a login shell and `true` itself."""
    from mcp import Client, StdioServerParameters

    @contextlib.asynccontextmanager
    async def connected(address: str) -> AsyncIterator[Client]:
        arguments = ["-m", "holdfast", "mcp", "--sandbox", address]
        server = StdioServerParameters(command=sys.executable, args=arguments, env=server_environment())
        async with Client(server) as client:
            yield client

    # An empty home: a profile there would be the larger part of the figures.
    with tempfile.TemporaryDirectory() as home, running_server(["unix"], environ={"HOME": home}) as server:
        address = server.address("unix")
        async with holdfast.connect(address) as box, connected(address) as client:
            shell = (await box.info()).shell.path

            async def by_exec(argv: list[str]) -> float:
                began = perf_counter()
                result = await box.exec(argv)
                if result.exit_code != 0:
                    raise BenchmarkError(f"{argv}: {result.stderr}")
                return perf_counter() - began

            async def by_tool() -> float:
                began = perf_counter()
                result = await client.call_tool("exec_command", {"cmd": "true"})
                if result.is_error or (result.structured_content or {}).get("exit_code") != 0:
                    raise BenchmarkError(f"exec_command: {result}")
                return perf_counter() - began

            taken = await interleave_samples(
                scale.rounds,
                scale.starts,
                {
                    "exec": one(lambda: by_exec(["true"])),
                    "shell": one(lambda: by_exec([shell, "-lc", "true"])),
                    "tool": one(by_tool),
                },
            )
    shown = latencies(taken["shell"]).median
    return [
        compare(
            "mcp-true",
            "`exec_command` of `true` over MCP on stdio, in a login shell",
            "ms",
            baseline_what='`box.exec(["true"])`',
            baseline=latencies(taken["exec"]),
            measured=latencies(taken["tool"]),
            target=Target("ratio at most", 3.0),
            note=f"`box.exec` of the login shell alone {shown:.1f} ms; {os.path.basename(shell)}",
        )
    ]
