"""`holdfast serve`: runs the server, with a flag for each field of `ExecServerConfig`.

Uses argparse, because typer and rich do not exist inside sandboxes, and the server stays in memory for days.
"""

from __future__ import annotations

import argparse
import gc
import os
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

from holdfast.cli.support.text import complain, fail
from holdfast.errors import HoldfastError, InvalidParams, SandboxError
from holdfast.launch import self_exec
from holdfast.launch.keeper_client import find_at

if TYPE_CHECKING:
    from types import ModuleType

    from holdfast.config import ExecServerConfig
    from holdfast.launch.keeper_client import WaitingKeeper

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def main(arguments: list[str]) -> int:
    # Off until the server runs: nearly all objects of a start are of modules, which stay, and the collector would
    # traverse them several times.
    gc.disable()
    try:
        return _start(arguments)
    finally:
        gc.enable()


def _start(arguments: list[str]) -> int:
    from holdfast.config import load_config

    try:
        options = parser().parse_args(arguments)
    except SystemExit as ended:
        # argparse has printed the error or the help.
        return int(ended.code or 0)
    try:
        config = load_config(options.config, **_settings(options))
        listen = options.listen or [f"unix:{_default_socket()}"]
        token = _token(options.token_file)
        if options.kept is None:
            command = [*self_exec.holdfast(), "serve", *_for_server(arguments)]
            with_keeper = config.keeper and "stdio" not in listen
            waiting = find_at(listen)
            if with_keeper and waiting is not None:
                return _take_over(waiting, command, options.ready_fd, unattended=options.unattended)
            if (conflict := _describe_conflict(listen, waiting)) is not None:
                return fail(f"serve: {conflict}")
            if with_keeper and options.unattended:
                options.kept = _fork_server(command, options.ready_fd, config.orphaned_jobs)
            elif with_keeper:
                _execute_keeper(command, options.ready_fd, config.orphaned_jobs)
        return _serve(config, listen, options.ready_fd, token, options.no_auth, options.kept)
    except (HoldfastError, OSError) as error:
        complain(f"serve: {error}")
        return 1


class _Parser(argparse.ArgumentParser):
    """Reports an error as one line, like the other verbs: the usage has fifty."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"holdfast: serve: {message}. See `holdfast serve --help`.\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser: the options of `serve`, and one for each setting."""
    from holdfast.config import ExecServerConfig

    made = _Parser(
        prog="holdfast serve",
        description="Run the server until it is stopped. Settings come from (last wins) their defaults, the "
        "file, HOLDFAST_NAME in the environment, and these flags.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--listen",
        action="append",
        metavar="ADDR",
        help="unix:PATH, ws://HOST:PORT or stdio; may be repeated (default: this machine's own socket)",
    )
    made.add_argument("--config", metavar="FILE", help="a TOML file with settings")
    made.add_argument("--token-file", metavar="FILE", help="the file that holds the bearer token for ws://")
    made.add_argument("--no-auth", action="store_true", help="no token for ws:// on loopback")
    made.add_argument("--ready-fd", type=int, metavar="N", help="write a JSON line to descriptor N once listening")
    # The socket of the keeper, which passes it itself.
    made.add_argument("--kept", type=int, help=argparse.SUPPRESS)
    # Set if the server is started in the background, and no process waits for this one.
    made.add_argument("--unattended", action="store_true", help=argparse.SUPPRESS)
    settings = made.add_argument_group("settings")
    hints = get_type_hints(ExecServerConfig)
    defaults = ExecServerConfig()
    for name in ExecServerConfig.__struct_fields__:
        kind = hints[name]
        choices = get_args(kind)  # the values of a Literal; `load_config` refuses others
        settings.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            type=str if choices else _yes_or_no if kind is bool else kind,
            metavar="|".join(choices) or {bool: "yes|no", int: "N", float: "N"}.get(kind, "TEXT"),
            help=f"default: {_shown(getattr(defaults, name))}",
        )
    return made


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    from holdfast.config import ExecServerConfig

    return {name: getattr(options, name) for name in ExecServerConfig.__struct_fields__}


def _for_server(arguments: list[str]) -> list[str]:
    """Return the arguments without those that are about this start only."""
    others = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    others.add_argument("--ready-fd")
    others.add_argument("--unattended", action="store_true")
    return others.parse_known_args(arguments)[1]


def _fork_server(server: list[str], ready_fd: int | None, orphaned_jobs: str) -> int:
    """Execute the keeper in this process; return in a child, the first server, with its socket to the keeper.

    The modules that are loaded by now need not be loaded again, and the two start side by side. The server of a
    `serve` that is attended is started by its keeper, as every later one is: its command line then shows it.
    """
    import signal
    import socket

    from holdfast.runtime.durability.keeper import BELL, STOPPING

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Pending until the keeper has its handlers: the server's first signal would end it, and a signal for both must
    # reach the server.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, BELL))
    if pid := os.fork():
        ours.set_inheritable(True)
        _execute_keeper(server, ready_fd, orphaned_jobs, f"{pid}:{ours.fileno()}")
    ours.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return theirs.detach()


def _execute_keeper(
    server: list[str], ready_fd: int | None, orphaned_jobs: str, running: str | None = None
) -> NoReturn:
    """Execute the keeper in this process, which starts the server as its child unless a child is `running`."""
    from holdfast.runtime.durability import keeper

    path = os.path.abspath(keeper.__file__)
    # A package in a zip file has no path that Python could run, so its source is passed by `-c`.
    program = [path] if os.path.isfile(path) else ["-c", _source_of(keeper)]
    ready = "-" if ready_fd is None else str(ready_fd)
    python = self_exec.command()
    adopted = [] if running is None else [f"{keeper.RUNNING}{running}"]
    os.execv(python[0], [*python, "-I", "-S", *program, ready, orphaned_jobs, *adopted, *server])


def _source_of(module: ModuleType) -> str:
    import inspect

    return inspect.getsource(module)


def _take_over(keeper: WaitingKeeper, command: list[str], ready_fd: int | None, *, unattended: bool) -> int:
    """Give our command to a keeper that waits without a server; return when a server in this process would have."""
    keeper.give(command, ready_fd)
    if ready_fd is not None:
        os.close(ready_fd)
    code, why = keeper.attend(unattended=unattended)
    if code and why:
        raise SandboxError(
            f"{why}; the keeper, pid {keeper.pid}, holds the processes and waits for another command"
        )
    return code


def _describe_conflict(listen: list[str], waiting: WaitingKeeper | None) -> str | None:
    """Return which server or keeper uses one of these addresses, and the remedy; None if they are free."""
    if waiting is not None:
        return (
            f"a keeper, pid {waiting.pid}, waits there with processes of an earlier server: serve with a keeper to"
            " adopt them, or end them by `holdfast stop`"
        )
    from holdfast.cli.support.running_server import describe_server

    for address in listen:
        found = describe_server(address.removeprefix("unix:")) if address.startswith("unix:") else None
        if found is not None:
            return (
                f"{address}: a server already listens there, {found}; `holdfast upgrade` replaces it by this"
                " version, `holdfast stop --keep` stops it and keeps its processes"
            )
    return None


def _serve(
    config: ExecServerConfig,
    listen: list[str],
    ready_fd: int | None,
    token: str | None,
    no_auth: bool,
    keeper_fd: int | None,
) -> int:
    from holdfast.server.app import run_server

    gc.freeze()  # first, because the collector would otherwise traverse all modules at once
    gc.enable()
    return run_server(config, listen, ready_fd=ready_fd, token=token, no_auth=no_auth, keeper_fd=keeper_fd)


def _token(path: str | None) -> str | None:
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        token = file.read().strip()
    if not token:
        raise InvalidParams(f"--token-file {path}: the file is empty")
    return token


def _default_socket() -> str:
    from holdfast.launch.local_server import socket_path

    return socket_path()


def _yes_or_no(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or "chosen by the server"
