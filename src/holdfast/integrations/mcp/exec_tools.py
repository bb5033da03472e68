"""Tools for commands: `exec_command` and `write_stdin` of `UnifiedExec`, and processes by id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

from mcp.server.mcpserver import Context, Elicit, ElicitationResult, Resolve
from msgspec.json import schema_components
from pydantic import Field

from holdfast.client.tools.tool_formats import ExecCommandArguments, WriteStdinArguments, definitions
from holdfast.client.tools.unified_exec import ToolOutput
from holdfast.errors import TimeoutError
from holdfast.integrations.mcp.approvals import Approval, check, question
from holdfast.integrations.mcp.hints import READS, SETS, WRITES
from holdfast.integrations.mcp.resources import log_uri
from holdfast.integrations.mcp.results import (
    MAX_RESULT_BYTES,
    CommandOutput,
    Killed,
    ProcessEnd,
    ProcessList,
    ProcessOutput,
    ProcessStatus,
)
from holdfast.integrations.mcp.workspace import RunningCommand, starting
from holdfast.types import ProcessInfo

if TYPE_CHECKING:
    from holdfast.integrations.mcp.server import SandboxServer

#: Between two progress notifications of a call.
PROGRESS_SECONDS: Final = 1.0
#: Processes in one list, the latest ones.
MAX_LISTED: Final = 200
#: The longest wait of one call, as for `UnifiedExec`: clients give up after 60 s.
MAX_WAIT_SECONDS: Final = 30.0
_DESCRIPTIONS: Final = {each["name"]: each["description"] for each in definitions("json-schema")}


def _described(arguments: type[Any], name: str) -> Any:
    """The description and bounds of an argument, which `tool_formats` defines for all formats."""
    _, components = schema_components((arguments,))
    schema = components[arguments.__name__]["properties"][name]
    return Field(description=schema["description"], ge=schema.get("minimum"))


Cmd = Annotated[str, _described(ExecCommandArguments, "cmd")]
Workdir = Annotated[str, _described(ExecCommandArguments, "workdir")]
Tty = Annotated[bool, _described(ExecCommandArguments, "tty")]
Login = Annotated[bool, _described(ExecCommandArguments, "login")]
YieldTime = Annotated[int, _described(ExecCommandArguments, "yield_time_ms")]
MaxOutput = Annotated[int, _described(ExecCommandArguments, "max_output_bytes")]
SessionId = Annotated[int, _described(WriteStdinArguments, "session_id")]
Chars = Annotated[str, _described(WriteStdinArguments, "chars")]
SandboxName = Annotated[str, Field(description="A sandbox of sandbox_create or sandbox_fork; empty for the first.")]
ProcessId = Annotated[str, Field(description="The process_id of exec_command or list_processes.")]
Since = Annotated[int, Field(ge=0, description="The position after which to read: 0, or an earlier next_position.")]
MaxBytes = Annotated[int, Field(ge=1, le=MAX_RESULT_BYTES, description="Bytes of output to return at most.")]
WaitSeconds = Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait at most.")]


# The resolvers are coroutines: the SDK runs a plain function in a thread, which costs more than the decision.
async def _approve_command(ctx: Context[Any, Any], cmd: str, workdir: str) -> Approval | Elicit[Approval]:
    decision = await server_of(ctx).approvals.command(cmd, workdir)
    return question(ctx, decision, "Run this command in the sandbox?", cmd)


async def _approve_chars(ctx: Context[Any, Any], chars: str) -> Approval | Elicit[Approval]:
    return question(ctx, server_of(ctx).approvals.typed(chars), "Type this to a running command?", chars)


def server_of(ctx: Context[Any, Any]) -> SandboxServer:
    """The server of a request."""
    server: SandboxServer = ctx.request_context.lifespan_context
    return server


CommandApproval = Annotated[ElicitationResult[Approval], Resolve(_approve_command)]
CharsApproval = Annotated[ElicitationResult[Approval], Resolve(_approve_chars)]


def add_to(server: SandboxServer) -> None:
    """Add the tools to a server."""

    async def exec_command(
        ctx: Context[Any, Any],
        approval: CommandApproval,
        cmd: Cmd,
        workdir: Workdir = "",
        tty: Tty = False,
        login: Login = True,
        yield_time_ms: YieldTime = 10_000,
        max_output_bytes: MaxOutput = 40_000,
        sandbox: SandboxName = "",
    ) -> CommandOutput:
        check(approval)

        async def run() -> CommandOutput:
            opened = await server.opened(ctx, sandbox)
            running = RunningCommand()
            starting.set(running)
            async with _progress(ctx, lambda: running.tail):
                output = await opened.commands.exec_command(
                    cmd,
                    workdir=workdir or None,
                    tty=tty,
                    login=login,
                    yield_time_ms=yield_time_ms,
                    max_output_bytes=min(max_output_bytes, MAX_RESULT_BYTES),
                )
            return _output(output, running.process_id)

        return await server.call(run())

    async def write_stdin(
        ctx: Context[Any, Any],
        approval: CharsApproval,
        session_id: SessionId,
        chars: Chars = "",
        yield_time_ms: YieldTime = 250,
        max_output_bytes: MaxOutput = 40_000,
    ) -> CommandOutput:
        check(approval)

        async def write() -> CommandOutput:
            opened = server.workspace(ctx).with_session(session_id)
            process_id = opened.commands.sessions()[session_id].id
            running = opened.running.get(session_id, RunningCommand())
            async with _progress(ctx, lambda: running.tail):
                output = await opened.commands.write_stdin(
                    session_id,
                    chars,
                    yield_time_ms=yield_time_ms,
                    max_output_bytes=min(max_output_bytes, MAX_RESULT_BYTES),
                )
            return _output(output, process_id)

        return await server.call(write())

    async def list_processes(ctx: Context[Any, Any], sandbox: SandboxName = "") -> ProcessList:
        """List the processes of the sandbox, the latest first: running ones, and ended ones with kept output."""

        async def found() -> ProcessList:
            opened = await server.opened(ctx, sandbox)
            infos = [process.info for process in await opened.box.processes()]
            infos.sort(key=lambda info: info.started_at, reverse=True)
            return ProcessList(processes=[_status(info, opened.name) for info in infos[:MAX_LISTED]])

        return await server.call(found())

    async def read_output(
        ctx: Context[Any, Any],
        process_id: ProcessId,
        since: Since = 0,
        max_bytes: MaxBytes = 40_000,
        sandbox: SandboxName = "",
    ) -> ProcessOutput:
        """Read kept output of a process from a position on. Takes nothing from write_stdin."""

        async def read() -> ProcessOutput:
            process = await (await server.opened(ctx, sandbox)).box.process(process_id)
            found = await process.read(since, max_bytes)
            data = b"".join(chunk.data for chunk in found.chunks)
            return ProcessOutput(
                output=data.decode("utf-8", "replace"),
                next_position=found.after_seq,
                omitted_bytes=sum(gap.length for gap in found.gap),
                running=not found.exited,
                exit_code=found.exit_code,
            )

        return await server.call(read())

    async def wait_process(
        ctx: Context[Any, Any],
        process_id: ProcessId,
        timeout_seconds: WaitSeconds = MAX_WAIT_SECONDS,
        sandbox: SandboxName = "",
    ) -> ProcessEnd:
        """Wait until a process ends. Returns running=true if it still runs after the time."""

        async def wait() -> ProcessEnd:
            process = await (await server.opened(ctx, sandbox)).box.process(process_id)
            async with _progress(ctx, lambda: ""):
                try:
                    status = await process.wait(timeout=timeout_seconds)
                except TimeoutError:
                    return ProcessEnd(running=True, exit_code=None, signal=None, oom=False)
            return ProcessEnd(running=False, exit_code=status.exit_code, signal=status.signal, oom=status.oom)

        return await server.call(wait())

    async def kill_process(
        ctx: Context[Any, Any],
        process_id: ProcessId,
        force: Annotated[bool, Field(description="KILL at once, without TERM before.")] = False,
        sandbox: SandboxName = "",
    ) -> Killed:
        """End a process and everything that it started."""

        async def kill() -> Killed:
            process = await (await server.opened(ctx, sandbox)).box.process(process_id)
            return Killed(was_running=await process.terminate(force=force))

        return await server.call(kill())

    server.add_tool(exec_command, description=_DESCRIPTIONS["exec_command"], annotations=WRITES)
    server.add_tool(write_stdin, description=_DESCRIPTIONS["write_stdin"], annotations=WRITES)
    server.add_tool(list_processes, annotations=READS)
    server.add_tool(read_output, annotations=READS)
    server.add_tool(wait_process, annotations=READS)
    server.add_tool(kill_process, annotations=SETS)


@contextlib.asynccontextmanager
async def _progress(ctx: Context[Any, Any], tail: Callable[[], str]) -> AsyncIterator[None]:
    """Send progress notifications, with the last line of output, while the block runs."""

    async def report() -> None:
        seconds = 0.0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            seconds += PROGRESS_SECONDS
            lines = tail().splitlines()
            await ctx.report_progress(seconds, message=lines[-1] if lines else None)

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()
        # A client that is gone cannot be notified; the result has the same fate.
        await asyncio.wait((reporting,))


def _output(output: ToolOutput, process_id: str) -> CommandOutput:
    return CommandOutput(
        session_id=output.session_id,
        exit_code=output.exit_code,
        output=output.output,
        omitted_bytes=output.omitted_bytes,
        oom=output.oom,
        wall_time=round(output.wall_time, 3),
        process_id=process_id,
    )


def _status(info: ProcessInfo, sandbox: str) -> ProcessStatus:
    return ProcessStatus(
        process_id=info.process_id,
        command=list(info.argv),
        cwd=info.cwd,
        tty=info.tty,
        running=info.running,
        exit_code=info.exit_code,
        signal=info.signal,
        started_at=info.started_at,
        output_bytes=info.stdout_bytes + info.stderr_bytes + info.pty_bytes,
        log=log_uri(sandbox, info.process_id),
    )
