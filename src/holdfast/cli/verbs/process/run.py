"""`holdfast run`: starts a command, streams its output byte for byte, and exits with its code.

The command is a process of the server, not a child of this program: it survives a hangup and a detach.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli.support.command_request import STDERR, STDIN, STDOUT, environment, forwards_stdin, generated_id
from holdfast.cli.support.exit_codes import OURS
from holdfast.cli.support.foreground import ClientDetached, Foreground, SignalQueue
from holdfast.cli.support.own_terminal import DETACH_NAME, terminal_size
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, is_this_machine, open_exec
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.errors import InvalidParams
from holdfast.sizes import EXPECTED, parse_size
from holdfast.types import EnvPolicy, Limits, ProcessSpec, TerminalSize


def command(
    argv: Annotated[list[str], typer.Argument(metavar="CMD...", help="The command and its arguments.")],
    sandbox: SandboxOption = LOCAL,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Start it, print its id and leave.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="End it after S seconds; exit code 124.")
    ] = None,
    grace: Annotated[
        float, typer.Option(metavar="S", min=0, help="Time between TERM and KILL after the timeout.")
    ] = 5.0,
    tty: Annotated[
        bool, typer.Option("--tty", "-t", help=f"Give it a terminal; {DETACH_NAME} leaves it running.")
    ] = False,
    stdin: Annotated[
        bool | None,
        typer.Option(
            "--stdin/--no-stdin",
            help="Forward our stdin (default: if it is no terminal); with --detach, keep its stdin open.",
        ),
    ] = None,
    cwd: Annotated[
        str | None, typer.Option(metavar="DIR", help="Working directory (default here: the current one).")
    ] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable.")] = None,
    id: Annotated[str | None, typer.Option(metavar="ID", help="Its id (default: generated).")] = None,
    user: Annotated[str | None, typer.Option(metavar="USER", help="Run it as this user.")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help=f"Limit a resource; K, M, G allowed. Names: {', '.join(Limits.__struct_fields__)}.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Run a command, stream its output, exit with its code.

    The exit code is the command's, 128+n after signal n, 124 after the timeout, 126 if it cannot be executed, 127
    if it is not found, and 125 if holdfast or the connection failed. The first Ctrl-C interrupts the command, the
    second ends it with everything it started. When the terminal is hung up, the command continues.
    --json is for --detach.
    """
    if detach and timeout is not None:
        raise InvalidParams("--timeout cannot be used with --detach, which does not wait")
    if as_json and not detach:
        raise InvalidParams("--json is for --detach: the output is the command's own")
    here = is_this_machine(sandbox)
    spec = ProcessSpec(
        process_id=id or generated_id(argv[0]),
        argv=tuple(argv),
        cwd=cwd if cwd is not None else os.getcwd() if here else None,
        env=environment(env or [], here=here, tty=tty),
        # Elsewhere than on this machine, the variables of --env are added to the sandbox's environment.
        env_policy=None if here else EnvPolicy(ignore_default_excludes=True),
        tty=tty,
        size=(terminal_size(STDIN, STDOUT, STDERR) or TerminalSize()) if tty else None,
        pipe_stdin=bool(stdin) if detach else forwards_stdin(stdin, tty=tty),
        user=user,
        # In the foreground the command blocks until our stdout is read, as on any pipe.
        overflow="follow" if detach else "block",
        limits=limits(limit) if limit else None,
        start_id=secrets.token_hex(8),
    )
    if detach:
        return run_async(_start(sandbox, spec, as_json))
    return run_async(_run(sandbox, spec, forwards_stdin(stdin, tty=tty), timeout, grace))


def start_again(params: Mapping[str, Any]) -> int:
    """Repeat `run --detach` of a command that may have started, under the same `startId`."""
    return run_async(_start(LOCAL, msgspec.convert(params, ProcessSpec), as_json=False))


def follow_again(
    params: Mapping[str, Any], *, forward_input: bool, after_seq: int, written: Mapping[str, int], caught: int
) -> int:
    """Continue a command that `quick` has started, after event `after_seq` and `written` bytes of each stream.

    `caught` is a pipe with the numbers of the signals received so far.
    """
    spec = msgspec.convert(params, ProcessSpec)
    return run_async(_run(LOCAL, spec, forward_input, None, 0.0, after_seq, written, caught))


async def _start(sandbox: str, spec: ProcessSpec, as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        info = await api.start(spec)
    print(msgspec.json.encode(info).decode() if as_json else info.process_id)
    return 0


async def _run(
    sandbox: str,
    spec: ProcessSpec,
    forward_input: bool,
    timeout: float | None,
    grace: float,
    after_seq: int = 0,
    written: Mapping[str, int] = MappingProxyType({}),
    caught: int | None = None,
) -> int:
    signals = SignalQueue()
    with signals.listening(caught):
        async with open_exec(sandbox) as api:
            await api.start(spec)
            foreground = Foreground(api, spec.process_id, tty=spec.tty, signals=signals, written=written)
            try:
                return await foreground.follow(
                    after_seq=after_seq, forward_input=forward_input, timeout=timeout, grace=grace
                )
            except ClientDetached:
                complain(f"detached; `holdfast attach {spec.process_id}` reattaches")
                return 0 if spec.tty else OURS


def limits(assignments: list[str]) -> Limits:
    """Parse `memory_bytes=2G`, `open-files=64` ... into `Limits`."""
    values: dict[str, int] = {}
    for assignment in assignments:
        name, _, amount = assignment.partition("=")
        field = name.replace("-", "_")
        if field not in Limits.__struct_fields__:
            raise InvalidParams(f"--limit {name}: unknown; there are {', '.join(Limits.__struct_fields__)}")
        # Some limits are not sizes: nice=-5.
        sign, digits = (-1, amount[1:]) if amount.startswith("-") else (1, amount)
        try:
            values[field] = sign * parse_size(digits)
        except ValueError:
            raise InvalidParams(f"--limit {assignment}: {amount!r} is not {EXPECTED}") from None
    return Limits(**values)
