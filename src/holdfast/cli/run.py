"""`holdfast run`: start a command, stream what it prints byte for byte, exit with its code.

What runs is a process of the server, not a child of ours: when we are hung up or detach, it goes on.
"""

from __future__ import annotations

import os
import re
import secrets
from typing import Annotated

import msgspec
import typer

from holdfast.cli.exit_codes import OURS
from holdfast.cli.foreground import STDERR, STDIN, STDOUT, Detached, Foreground, SignalQueue
from holdfast.cli.own_terminal import DETACH_NAME, terminal_size
from holdfast.cli.sandbox_option import LOCAL, JsonOption, SandboxOption, is_this_machine, open_exec
from holdfast.cli.typed_verb import complain, run_async
from holdfast.errors import InvalidParams
from holdfast.model import EnvPolicy, Limits, ProcessSpec, TerminalSize
from holdfast.sizes import EXPECTED, parse_size


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
            help="Pass our stdin on (default: if it is no terminal); with --detach, keep its stdin open.",
        ),
    ] = None,
    cwd: Annotated[
        str | None, typer.Option(metavar="DIR", help="Working directory (default here: the current one).")
    ] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable.")] = None,
    id: Annotated[str | None, typer.Option(metavar="ID", help="Name it; otherwise a name is made up.")] = None,
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
    """Run a command, stream what it prints, exit with its code.

    The exit code is the command's, 128+n after signal n, 124 after the timeout, 126 if it cannot be executed, 127
    if it is not found, and 125 if holdfast or the way to the sandbox failed. The first Ctrl-C interrupts the
    command, the second ends it with everything it started. When the terminal is hung up, the command goes on.
    --json is for --detach.
    """
    if detach and timeout is not None:
        raise InvalidParams("--timeout needs somebody who waits: it cannot be used with --detach")
    if as_json and not detach:
        raise InvalidParams("--json cannot be used with a command's own output: it is for --detach")
    here = is_this_machine(sandbox)
    spec = ProcessSpec(
        process_id=id or made_up_id(argv[0]),
        argv=tuple(argv),
        cwd=cwd if cwd is not None else os.getcwd() if here else None,
        env=environment(env or [], here=here, tty=tty),
        # Where our own environment means nothing, what is set here is laid over the sandbox's.
        env_policy=None if here else EnvPolicy(ignore_default_excludes=True),
        tty=tty,
        size=(terminal_size(STDIN, STDOUT, STDERR) or TerminalSize()) if tty else None,
        pipe_stdin=bool(stdin) if detach else forwards_stdin(stdin, tty=tty),
        user=user,
        # In the foreground the command waits for the reader of our stdout without a limit, as on any pipe.
        overflow="follow" if detach else "block",
        limits=limits(limit) if limit else None,
        start_id=secrets.token_hex(8),
    )
    if detach:
        return run_async(_start(sandbox, spec, as_json))
    return run_async(_run(sandbox, spec, forwards_stdin(stdin, tty=tty), timeout, grace))


async def _start(sandbox: str, spec: ProcessSpec, as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        info = await api.start(spec)
    print(msgspec.json.encode(info).decode() if as_json else info.process_id)
    return 0


async def _run(sandbox: str, spec: ProcessSpec, forward_input: bool, timeout: float | None, grace: float) -> int:
    signals = SignalQueue()
    with signals.listening():
        async with open_exec(sandbox) as api:
            await api.start(spec)
            foreground = Foreground(api, spec.process_id, tty=spec.tty, signals=signals)
            try:
                return await foreground.follow(forward_input=forward_input, timeout=timeout, grace=grace)
            except Detached:
                complain(f"detached; `holdfast attach {spec.process_id}` comes back")
                return 0 if spec.tty else OURS


def forwards_stdin(asked: bool | None, *, tty: bool) -> bool:
    """Whether our stdin goes to the command: as asked, else with --tty or when it is not a terminal."""
    return asked if asked is not None else tty or not os.isatty(STDIN)


def made_up_id(program: str) -> str:
    """A name that tells what it is and is not taken: the program's, and enough that is random."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", os.path.basename(program)).strip("-.")[:24] or "process"
    return f"{name}-{secrets.token_hex(4)}"


def environment(assignments: list[str], *, here: bool, tty: bool) -> dict[str, str] | None:
    """The command's environment: on this machine ours, elsewhere only what is set; `K=V` on top, `K` takes ours."""
    values = dict(os.environ) if here else {}
    if tty and not here and "TERM" in os.environ:
        values["TERM"] = os.environ["TERM"]
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name:
            raise InvalidParams(f"--env {assignment!r}: write NAME=VALUE")
        if equals:
            values[name] = value
        elif name in os.environ:
            values[name] = os.environ[name]
        else:
            raise InvalidParams(f"--env {name}: not set here; write {name}=VALUE")
    return values


def limits(assignments: list[str]) -> Limits:
    """`memory_bytes=2G`, `open-files=64` ... as `Limits`."""
    values: dict[str, int] = {}
    for assignment in assignments:
        name, _, amount = assignment.partition("=")
        field = name.replace("-", "_")
        if field not in Limits.__struct_fields__:
            raise InvalidParams(f"--limit {name}: unknown; there are {', '.join(Limits.__struct_fields__)}")
        # Some limits are no sizes: nice=-5.
        sign, digits = (-1, amount[1:]) if amount.startswith("-") else (1, amount)
        try:
            values[field] = sign * parse_size(digits)
        except ValueError:
            raise InvalidParams(f"--limit {assignment}: {amount!r} is not {EXPECTED}") from None
    return Limits(**values)
