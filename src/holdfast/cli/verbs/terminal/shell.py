"""`holdfast shell`: opens a terminal of the sandbox on ours; its sub-verbs are for live shells.

A live shell belongs to the server as a process does: any number of programs can use it by its id, and its state
persists. `shell_run` runs a command in one.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
import typer

from holdfast.cli.support.command_request import STDERR, STDIN, STDOUT, environment, generated_id
from holdfast.cli.support.foreground import ClientDetached, SignalQueue
from holdfast.cli.support.own_terminal import terminal_size
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, is_this_machine, open_exec
from holdfast.cli.support.terminal_view import TerminalForeground, report_detached, show_detach_key
from holdfast.cli.support.text import show_table
from holdfast.cli.support.typed_verb import run_async
from holdfast.cli.verbs.process.logs import print_output
from holdfast.cli.verbs.terminal.shell_run import ShellArgument, run
from holdfast.launch.local_server import is_running
from holdfast.types import EnvPolicy, ShellSpec, ShellStatus, TerminalSize, TerminalSpec

#: If this program has no terminal of its own.
DEFAULT_TERM: Final = "xterm-256color"
HEADER: Final = ("ID", "PID", "STATE", "QUEUED", "CWD", "COMMAND")
#: Characters of a command in the table, because a command may be a large script. `--json` has all of it.
_SHOWN_CHARACTERS: Final = 60

EnvOption = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable.")]
UserOption = Annotated[str | None, typer.Option(metavar="USER", help="Run it as this user.")]
CwdOption = Annotated[
    str | None, typer.Option(metavar="DIR", help="Working directory (default here: the current one).")
]
IdOption = Annotated[str | None, typer.Option(metavar="ID", help="Its id (default: generated).")]
ShellOption = Annotated[
    str | None, typer.Option(metavar="PROGRAM", help="A name or a path (default: bash, or else sh).")
]


def command(
    sandbox: SandboxOption = LOCAL,
    shell: ShellOption = None,
    id: IdOption = None,
    cwd: CwdOption = None,
    env: EnvOption = None,
    user: UserOption = None,
    record_input: Annotated[
        bool, typer.Option("--record-input", help="Record typed input, except passwords, for `replay --save`.")
    ] = False,
    no_marks: Annotated[
        bool, typer.Option("--no-marks", help="Do not have bash and zsh mark their prompts.")
    ] = False,
) -> int:
    """Open an interactive login shell on a terminal in the sandbox and exit with its code.

    The terminal gets our size, also when it changes. Ctrl-\\ d leaves it running, `holdfast attach ID` reattaches.
    The sub-verbs are for shells without a terminal, which run command after command and report the output and the
    exit code of each.
    """
    here = is_this_machine(sandbox)
    variables = environment(env or [], here=here, tty=True) or {}
    named = {assignment.partition("=")[0] for assignment in env or []}
    for name in {"LINES", "COLUMNS"} - named:
        variables.pop(name, None)  # they would be wrong after the first change of the size
    spec = TerminalSpec(
        terminal_id=id or generated_id(shell or "terminal"),
        argv=None if shell is None else (shell,),
        size=terminal_size(STDIN, STDOUT, STDERR) or TerminalSize(),
        cwd=cwd if cwd is not None else os.getcwd() if here else None,
        env=variables,
        # Elsewhere than on this machine, the variables of --env are added to the sandbox's environment.
        env_policy=None if here else EnvPolicy(ignore_default_excludes=True),
        user=user,
        term=variables.get("TERM") or DEFAULT_TERM,
        integration=not no_marks,
        record_input=record_input,
        start_id=secrets.token_hex(8),
    )
    return run_async(_interactive(sandbox, spec))


async def _interactive(sandbox: str, spec: TerminalSpec) -> int:
    signals = SignalQueue()
    with signals.listening():
        async with open_exec(sandbox) as api:
            status = await api.open_terminal(spec)
            show_detach_key(spec.terminal_id)
            foreground = TerminalForeground(api, status, signals=signals, owner=True)
            try:
                return await foreground.follow(forward_input=True)
            except ClientDetached:
                report_detached(f"`holdfast attach {spec.terminal_id}` reattaches")
                return 0


def open_one(
    sandbox: SandboxOption = LOCAL,
    shell: ShellOption = None,
    id: IdOption = None,
    cwd: CwdOption = None,
    env: EnvOption = None,
    user: UserOption = None,
    login: Annotated[bool, typer.Option("--login", help="Read the profile files, as after a login.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Open a live shell and print its id.

    It stays until it is closed, or a command in it ends it. On this machine it gets our environment and working
    directory; elsewhere the sandbox's, changed by --env and --cwd. --json describes it.
    """
    here = is_this_machine(sandbox)
    spec = ShellSpec(
        shell_id=id or generated_id(shell or "shell"),
        shell=shell,
        cwd=cwd if cwd is not None else os.getcwd() if here else None,
        env=environment(env or [], here=here, tty=False),
        # Elsewhere than on this machine, the variables of --env are added to the sandbox's environment.
        env_policy=None if here else EnvPolicy(ignore_default_excludes=True),
        user=user,
        login=login,
        start_id=secrets.token_hex(8),
    )
    return run_async(_open(sandbox, spec, as_json))


async def _open(sandbox: str, spec: ShellSpec, as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        status = await api.open_shell(spec)
    print(msgspec.json.encode(status).decode() if as_json else status.shell_id)
    return 0


def start(
    shell_id: ShellArgument,
    command: Annotated[str, typer.Argument(metavar="COMMAND")],
    sandbox: SandboxOption = LOCAL,
    id: IdOption = None,
    as_json: JsonOption = False,
) -> int:
    """Start a command in the background with the shell's state, and print its id.

    It is a process of its own: `logs`, `wait`, `kill` and `attach` take its id. It begins with the shell's
    directory, variables and functions, and changes nothing in the shell. --json describes it.
    """
    process_id = id or generated_id((command.split() or [""])[0])
    return run_async(_start(sandbox, shell_id, command, process_id, as_json))


async def _start(sandbox: str, shell_id: str, command: str, process_id: str, as_json: bool) -> int:
    async with open_exec(sandbox, ids=[shell_id]) as api:
        info = await api.start_in_shell(shell_id, command, process_id)
    print(msgspec.json.encode(info).decode() if as_json else info.process_id)
    return 0


def list_them(
    sandbox: SandboxOption = LOCAL,
    all: Annotated[bool, typer.Option("--all", "-a", help="Also closed ones that are retained.")] = False,
    as_json: JsonOption = False,
) -> int:
    """List live shells.

    STATE is idle, running or closed; COMMAND is what runs, and of a closed shell why it is closed. --json prints
    one array.
    """
    if sandbox == LOCAL and not is_running():
        # Without a server there are no shells; listing must not start one.
        return _show((), all, as_json)
    return run_async(_list(sandbox, all, as_json))


async def _list(sandbox: str, all: bool, as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        return _show(await api.list_shells(), all, as_json)


def _show(shells: tuple[ShellStatus, ...], all: bool, as_json: bool) -> int:
    chosen = sorted(
        (status for status in shells if all or status.state != "closed"),
        key=lambda status: (status.started_at, status.shell_id),
    )
    if as_json:
        print(msgspec.json.encode(chosen).decode())
    else:
        show_table(HEADER, [row(status) for status in chosen])
    return 0


def row(status: ShellStatus) -> tuple[str, ...]:
    """Return a row of the table."""
    closed = status.state == "closed"
    shown = status.reason if closed else _one_line(status.command) if status.command else "-"
    pid = "-" if closed else str(status.pid)
    return (status.shell_id, pid, status.state, str(status.queued), status.cwd, shown)


def _one_line(command: str) -> str:
    first, *more = command.strip().splitlines() or [""]
    if len(first) > _SHOWN_CHARACTERS or more:
        return f"{first[:_SHOWN_CHARACTERS]} …"
    return first


def interrupt(shell_id: ShellArgument, sandbox: SandboxOption = LOCAL, as_json: JsonOption = False) -> int:
    """End the command that runs in a shell, and all it started in the foreground.

    The shell and its state stay. Prints the shell's id if a command ran; an idle shell is no error.
    """
    return run_async(_interrupt(sandbox, shell_id, as_json))


async def _interrupt(sandbox: str, shell_id: str, as_json: bool) -> int:
    async with open_exec(sandbox, ids=[shell_id]) as api:
        ran = await api.interrupt_shell(shell_id)
    _report(shell_id, "wasRunning", ran, as_json)
    return 0


def output(
    shell_id: ShellArgument,
    sandbox: SandboxOption = LOCAL,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the shell is closed.")] = False,
    since: Annotated[int, typer.Option(metavar="N", min=0, help="Only output after event number N.")] = 0,
    as_json: JsonOption = False,
) -> int:
    """Print the output of a shell's background jobs after the end of their command.

    Their stdout on stdout, their stderr on stderr, the exact bytes. With --json a line for each event, with its
    number for --since; bytes are base64.
    """
    return run_async(_output(sandbox, shell_id, follow, since, as_json))


async def _output(sandbox: str, shell_id: str, follow: bool, since: int, as_json: bool) -> int:
    async with open_exec(sandbox, ids=[shell_id]) as api:
        status = await api.describe_shell(shell_id)
        ends = {"stdout": status.stdout_bytes, "stderr": status.stderr_bytes}
        await print_output(api, shell_id, None if follow else ends, since=since, as_json=as_json)
    return 0


def close(
    shell_id: ShellArgument,
    sandbox: SandboxOption = LOCAL,
    keep: Annotated[bool, typer.Option("--keep", help="Leave its background jobs running.")] = False,
    grace: Annotated[float, typer.Option(metavar="S", min=0, help="Time between TERM and KILL.")] = 5.0,
    as_json: JsonOption = False,
) -> int:
    """Close a shell and end everything it started.

    Its EXIT trap runs. Prints the shell's id if it was open; a closed shell is no error.
    """
    return run_async(_close(sandbox, shell_id, keep, grace, as_json))


async def _close(sandbox: str, shell_id: str, keep: bool, grace: float, as_json: bool) -> int:
    async with open_exec(sandbox, ids=[shell_id]) as api:
        was_open = (await api.describe_shell(shell_id)).state != "closed"
        # Also a closed one: if the shell ended by itself, its background jobs may still run.
        await api.close_shell(shell_id, keep=keep, grace=grace)
    _report(shell_id, "wasOpen", was_open, as_json)
    return 0


def _report(shell_id: str, what: str, was: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"shellId": shell_id, what: was}))
    elif was:
        print(shell_id)


#: In the order in which the help lists them.
SUB_VERBS: Final[dict[str, Callable[..., int]]] = {
    "open": open_one,
    "run": run,
    "start": start,
    "list": list_them,
    "interrupt": interrupt,
    "output": output,
    "close": close,
}
