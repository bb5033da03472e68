"""`holdfast shell run`: runs one command in a live shell, streams its output, and exits with its code.

A signal cancels the command by its own id. An interrupt of the shell could end a command of another client that
began after ours had ended.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import signal
import time
from typing import Annotated, Any, Final, Protocol

import msgspec
import typer

from holdfast.cli.support.byte_streams import ByteSource
from holdfast.cli.support.command_request import STDIN, WINDOW_BYTES, environment
from holdfast.cli.support.exit_codes import INTERRUPTED
from holdfast.cli.support.foreground import OutputCopy
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.client.collect import StreamTails
from holdfast.client.shell import RUN_LIMIT_BYTES
from holdfast.errors import CallerError, InternalError, InvalidParams
from holdfast.exec_api import ExecApi
from holdfast.types import CommandEnded, CommandSpec, Exited, OutputChunk, OutputGap

#: A command's input is one message; a server accepts messages of 96 MiB by default.
MAX_INPUT_BYTES: Final = 64 * 1024 * 1024

#: By the state that the new shell has of the old one; unknown after Ctrl-C.
_RESTORED: Final = {
    "": "",
    "exports": " in the same directory, with its exported variables",
    "state": " with its variables, functions, aliases, options and traps",
}

ShellArgument = Annotated[str, typer.Argument(metavar="ID", help="The shell's id.")]


def run(
    shell_id: ShellArgument,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="One argument, in the shell's language.")],
    sandbox: SandboxOption = LOCAL,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="End it after S seconds; exit code 124.")
    ] = None,
    cwd: Annotated[str | None, typer.Option(metavar="DIR", help="Working directory of this command alone.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable for this command alone.")
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Send our stdin to it; otherwise its stdin is empty.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Run a command in a live shell, stream its output, exit with its code.

    Its changes (directory, variables, functions ...) persist for the next command. The exit code is the command's,
    124 after the timeout, 130 after Ctrl-C, and 125 if holdfast failed or the shell is closed. Ctrl-C ends the
    command and what it started in the foreground; the shell stays. When the terminal is hung up, the command
    continues. --json prints one object at the end instead.
    """
    spec = CommandSpec(
        command_id=secrets.token_hex(8),
        command=command,
        cwd=cwd,
        env=environment(env or [], here=False, tty=False) or None,
        timeout=timeout,
    )
    return run_async(_run(sandbox, shell_id, spec, stdin, as_json))


async def _run(sandbox: str, shell_id: str, spec: CommandSpec, stdin: bool, as_json: bool) -> int:
    task = asyncio.current_task()
    assert task is not None
    # As Ctrl-C, which cancels this task. HUP ends this program only, and the command continues.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if stdin:
        spec = msgspec.structs.replace(spec, input=await _read_input())
    async with open_exec(sandbox, ids=[shell_id]) as api:
        if as_json:
            tails = _Tails()
            ended = await _follow(api, shell_id, spec, tails)
            print(json.dumps(as_object(tails.printed, ended)))
        else:
            copy = OutputCopy(("stdout", "stderr"))
            try:
                ended = await _follow(api, shell_id, spec, copy)
            finally:
                copy.close()
    _note(shell_id, ended, spec.timeout)
    return ended.exit_code


async def _read_input() -> bytes:
    source = ByteSource(STDIN)
    data = bytearray()
    while piece := await source.read():
        data += piece
        if len(data) > MAX_INPUT_BYTES:
            raise InvalidParams(f"--stdin: more than {MAX_INPUT_BYTES} bytes; read a file in the command instead")
    return bytes(data)


class _OutputSink(Protocol):
    """A destination of the output."""

    async def write(self, event: OutputChunk | OutputGap) -> None: ...


class _Tails:
    """Collects the output for the object that is printed at the end."""

    def __init__(self) -> None:
        self.printed = StreamTails(RUN_LIMIT_BYTES)

    async def write(self, event: OutputChunk | OutputGap) -> None:
        self.printed.take(event)


async def _follow(api: ExecApi, shell_id: str, spec: CommandSpec, sink: _OutputSink) -> CommandEnded:
    """Run the command to its end; if this task is cancelled, end the command and read the rest of its output."""
    restarts = (await api.describe_shell(shell_id)).restarts
    began = time.monotonic()
    last_seq = 0
    stream = api.run_in_shell(shell_id, spec, live=True, window=WINDOW_BYTES)
    try:
        async for event in stream:
            if isinstance(event, CommandEnded):
                return event
            if isinstance(event, OutputChunk):
                last_seq = event.seq
            await sink.write(event)
    except asyncio.CancelledError:
        await stream.aclose()
        await _read_rest(api, spec.command_id, last_seq, sink)
        status = await api.describe_shell(shell_id)
        return CommandEnded(
            exit_code=INTERRUPTED,
            cwd=status.cwd,
            duration=time.monotonic() - began,
            shell_restarted=status.restarts > restarts,
            state=status.state,
            reason=status.reason,
        )
    finally:
        await stream.aclose()
    raise InternalError(f"the events of a command in shell {shell_id!r} ended without its exit")


async def _read_rest(api: ExecApi, command_id: str, last_seq: int, sink: _OutputSink) -> None:
    """Copy the output until the command has ended. A second Ctrl-C cancels that."""
    events = api.events(command_id, after_seq=last_seq, window=WINDOW_BYTES)
    # A command that was still queued was removed, and its id is unknown.
    with contextlib.suppress(CallerError):
        async for event in events:
            if isinstance(event, Exited):
                break
            if isinstance(event, OutputChunk | OutputGap):
                await sink.write(event)
    await events.aclose()


def as_object(printed: StreamTails, ended: CommandEnded) -> dict[str, Any]:
    """Return the object of `--json`. Output that is not UTF-8 is also included as base64, without loss."""
    shown: dict[str, Any] = {}
    for name, data in (("stdout", printed.stdout.value()), ("stderr", printed.stderr.value())):
        shown[name] = data.decode("utf-8", "replace")
        if shown[name].encode() != data:
            shown[f"{name}Base64"] = base64.b64encode(data).decode()
    return {**shown, "truncated": printed.truncated, **msgspec.to_builtins(ended)}


def _note(shell_id: str, ended: CommandEnded, timeout: float | None) -> None:
    """Print a timeout, a closed shell or a restart on stderr, which the exit code does not show."""
    if ended.timed_out:
        complain(f"timed out after {timeout or 0:g} s")
    if ended.state == "closed":
        complain(f"shell {shell_id!r} is closed: {ended.reason}")
    elif ended.shell_restarted:
        complain(f"shell {shell_id!r} was restarted{_RESTORED[ended.restored]}")
