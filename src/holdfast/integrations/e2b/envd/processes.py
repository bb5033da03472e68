"""`process.Process` of envd: start, connect, input, signals, sizes, on the processes of one sandbox.

A stream begins with the pid, then has all output from the first byte on, then the end. A client that connects again
by pid gets the same output again, from the sandbox's own server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final

import msgspec

from holdfast.client.command import check_command, kill_now, start_streaming
from holdfast.client.connection.clean_up import clean_up_cancelled
from holdfast.client.defaults import check_env
from holdfast.client.process import Process
from holdfast.errors import CwdNotFound, UnknownProcess
from holdfast.exec_api import EventStream
from holdfast.integrations.e2b.envd import messages as m
from holdfast.integrations.e2b.envd.connect_protocol import Envelopes, Last, decode, timeout_of
from holdfast.integrations.e2b.open_sandbox import (
    KERNEL_PREFIX,
    MAX_TAG_BYTES,
    OpenSandbox,
    is_late,
    process_id,
    tag_of,
)
from holdfast.integrations.e2b.problems import invalid, not_found, timed_out
from holdfast.types import EnvPolicy, Exited, ExitStatus, OutputChunk, OutputGap, ProcessSpec, TerminalSize

KEEPALIVE: Final[dict[str, Any]] = {"event": {"keepalive": {}}}
#: The words of the kernel's signals in Go's `ProcessState`, which envd reports; others have their name.
_SIGNAL_WORDS: Final = {
    "SIGHUP": "hangup",
    "SIGINT": "interrupt",
    "SIGQUIT": "quit",
    "SIGABRT": "aborted",
    "SIGKILL": "killed",
    "SIGSEGV": "segmentation fault",
    "SIGPIPE": "broken pipe",
    "SIGTERM": "terminated",
}


async def list_processes(opened: OpenSandbox) -> dict[str, Any]:
    """The running processes."""
    processes = [
        process
        for process in await opened.box.processes()
        if process.info.running and not process.id.startswith(KERNEL_PREFIX)
    ]
    return {"processes": [_described(process) for process in processes]}


def _described(process: Process) -> dict[str, Any]:
    info = process.info
    shown: dict[str, Any] = {
        # Variables are not listed: they may be secrets, and the sandbox does not return them.
        "config": {"cmd": info.argv[0], "args": list(info.argv[1:]), "cwd": info.cwd},
        "pid": info.pid,
    }
    tag = tag_of(info.process_id)
    if tag is not None:
        shown["tag"] = tag
    return shown


async def start(
    opened: OpenSandbox, request: m.StartRequest, user: str, headers: Mapping[str, str]
) -> AsyncGenerator[Any, None]:
    """Start a process and stream it. The process continues if the client leaves, until the request's timeout."""
    config = request.process or m.ProcessConfig()
    if not config.cmd:
        raise invalid("process.cmd: empty")
    if request.tag is not None and not 0 < len(request.tag.encode()) <= MAX_TAG_BYTES:
        raise invalid(f"tag: 1 to {MAX_TAG_BYTES} bytes")
    tty = None
    if request.pty is not None:
        size = request.pty.checked_size()
        tty = TerminalSize(size.rows, size.cols)
    spec = ProcessSpec(
        process_id=process_id(timeout_of(headers), request.tag),
        argv=check_command((config.cmd, *config.args)),
        cwd=await opened.path(config.cwd or "", user),
        env={**opened.box.variables, "E2B_SANDBOX_ID": opened.ref.id, **(check_env(config.envs) or {})},
        env_policy=EnvPolicy(inherit="all", ignore_default_excludes=True),
        tty=tty is not None,
        size=tty,
        pipe_stdin=tty is None and request.stdin is not False,
        user=opened.run_as(user) or opened.box.default_user,
        start_id=secrets.token_hex(8),
    )
    try:
        process, events = await _start(opened, spec)
    except CwdNotFound:
        if config.cwd:
            raise
        # The home of a system user need not exist.
        process, events = await _start(opened, msgspec.structs.replace(spec, cwd="/"))
    opened.remember(process)
    async for message in _events(opened, process, events):
        if isinstance(message, Last) and is_late(process.id):
            # The kill at the deadline may be faster than the timer of this stream.
            raise timed_out()
        yield message


async def _start(opened: OpenSandbox, spec: ProcessSpec) -> tuple[Process, EventStream]:
    """Start a process and read it, in one round trip."""
    api = opened.box.api
    try:
        info, events = await start_streaming(api, spec)
    except asyncio.CancelledError as cancelled:
        # The client left before it got the pid, without which the process cannot be found.
        await clean_up_cancelled(api, kill_now(api, spec.process_id), cancelled)
        raise
    return Process(api, info), events


async def connect(opened: OpenSandbox, request: m.ProcessRequest) -> AsyncGenerator[Any, None]:
    """Stream a process from its first byte on; an ended one as long as the sandbox retains it."""
    selector = request.selector()
    process = await opened.process(selector.pid, selector.tag)
    async for message in _events(opened, process, process.events()):
        yield message


async def _events(opened: OpenSandbox, process: Process, stream: EventStream) -> AsyncGenerator[Any, None]:
    async with aclosing(stream) as events:
        yield {"event": {"start": {"pid": process.pid}}}
        async for event in events:
            if isinstance(event, OutputChunk):
                yield {"event": {"data": {event.stream: event.data}}}
            elif isinstance(event, OutputGap) and event.stream != "pty":
                lost = f"\n[{event.length} bytes of {event.stream} are no longer retained]\n".encode()
                yield {"event": {"data": {"stderr": lost}}}
            elif isinstance(event, Exited):
                opened.ended(process.id)
                yield Last({"event": {"end": _ended(event.status)}})
                return


def _ended(status: ExitStatus) -> dict[str, Any]:
    """The end of a process in the words of Go's `ProcessState`, as envd reports it."""
    if status.signal is not None:
        name = status.signal if status.signal.startswith("SIG") else f"SIG{status.signal}"
        words = f"signal: {_SIGNAL_WORDS.get(name, name)}{' (out of memory)' if status.oom else ''}"
        return {"exitCode": -1, "exited": False, "status": words, "error": words}
    words = f"exit status {status.exit_code}{' (out of memory)' if status.oom else ''}"
    ended = {"exitCode": status.exit_code, "exited": True, "status": words}
    return ended if status.exit_code == 0 else {**ended, "error": words}


async def send_input(opened: OpenSandbox, request: m.SendInputRequest) -> None:
    selector = request.selector()
    process = await opened.process(selector.pid, selector.tag, running=True)
    await process.write((request.input or m.Input()).data)


async def stream_input(opened: OpenSandbox, body: AsyncIterator[bytes], limit: int) -> None:
    """Write the messages of a stream to the process that its first message names."""
    envelopes = Envelopes(limit)
    process: Process | None = None
    async for piece in body:
        for data in envelopes.feed(piece):
            message = decode(data, m.StreamInputRequest)
            if message.start is not None:
                selector = message.start.selector()
                process = await opened.process(selector.pid, selector.tag, running=True)
            elif message.data is not None:
                if process is None:
                    raise invalid("the first message of the stream names no process")
                await process.write((message.data.input or m.Input()).data)
    envelopes.close()


async def close_stdin(opened: OpenSandbox, request: m.ProcessRequest) -> None:
    selector = request.selector()
    process = await opened.process(selector.pid, selector.tag, running=True)
    await process.close_stdin()


async def send_signal(opened: OpenSandbox, request: m.SendSignalRequest) -> None:
    """Send TERM to the process's group, or KILL everything that it started."""
    name, selector = request.name(), request.selector()
    try:
        process = await opened.process(selector.pid, selector.tag, running=True)
    except UnknownProcess as error:
        raise not_found(error.message) from None
    if name == "KILL":
        await process.terminate(force=True)
    else:
        await process.signal(name)


async def update(opened: OpenSandbox, request: m.UpdateRequest) -> None:
    selector = request.selector()
    process = await opened.process(selector.pid, selector.tag, running=True)
    if request.pty is not None:
        size = request.pty.checked_size()
        await process.resize(size.rows, size.cols)
