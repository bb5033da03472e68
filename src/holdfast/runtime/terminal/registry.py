"""All terminals by id: chooses program and environment, starts the process, keeps a closed terminal for a while.

Starts processes through the exec interface that owns it, and writes the files that make a shell mark its prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Final

import msgspec

from holdfast.config import ExecServerConfig
from holdfast.errors import (
    CommandNotFound,
    DuplicateProcess,
    InvalidParams,
    LimitReached,
    NotExecutable,
    UnknownTerminal,
)
from holdfast.runtime.durability.ledger import AnyLedger
from holdfast.runtime.durability.records import RunTyped, TerminalOpening
from holdfast.runtime.output.output_log import Spool
from holdfast.runtime.process.checks import check_run, check_spec
from holdfast.runtime.process.environment import build_environment, resolve_cwd, resolve_user
from holdfast.runtime.process.process import ManagedProcess, check_size
from holdfast.runtime.process.spawn import find_program
from holdfast.runtime.shell.dialect import DIALECTS
from holdfast.runtime.shell.files import ShellFiles
from holdfast.runtime.shell.live import EndProcess, StartProcess
from holdfast.runtime.terminal.live import LiveTerminal
from holdfast.runtime.terminal.run import recover_flight, resume_run, run_typed
from holdfast.runtime.terminal.shell_integration import IntegratedShell, integrate
from holdfast.types import CloseMode, EnvPolicy, ProcessSpec, TerminalCommandEnded, TerminalSpec

#: Results kept for each terminal: a client repeats only the requests without a reply when its connection broke.
KEPT_RUNS: Final = 16
#: The policy of a terminal without variables and without a policy: the whole environment.
_EVERYTHING: Final = EnvPolicy(ignore_default_excludes=True)
_DEFAULT_LOCALE: Final = "C.UTF-8"
#: Programs for which a `-` before their name means a login.
_SHELLS: Final = DIALECTS.keys() | {"fish"}


class Terminals:
    """The terminals of one exec interface. Each is a process, too, under the same id."""

    def __init__(
        self,
        *,
        config: ExecServerConfig,
        spool: Spool,
        environ: Mapping[str, str],
        start_process: StartProcess,
        end_process: EndProcess,
        existing: Callable[[str], ManagedProcess | None],
        ledger: AnyLedger,
    ) -> None:
        self._config = config
        self._ledger = ledger
        #: Commands that were typed under an earlier server: they are not typed again.
        self._typed_before: list[RunTyped] = []
        self._spool = spool
        self._environ = environ
        self._start_process = start_process
        self._end_process = end_process
        self._existing = existing
        self._terminals: dict[str, LiveTerminal] = {}
        self._opening: dict[str, asyncio.Task[LiveTerminal]] = {}

    # --- opening ---------------------------------------------------------------------------------------------

    async def open(self, spec: TerminalSpec) -> LiveTerminal:
        """Open a terminal, or return the one that an earlier attempt with the same `start_id` has opened."""
        known = self._terminals.get(spec.terminal_id)
        if known is not None and spec.start_id is not None and known.spec.start_id == spec.start_id:
            return known
        attempt = self._opening.get(spec.terminal_id)
        if attempt is None:
            if self._existing(spec.terminal_id) is not None:
                raise DuplicateProcess(f"terminal id {spec.terminal_id!r} is taken")
            attempt = self._opening[spec.terminal_id] = asyncio.create_task(self._open(spec))
            attempt.add_done_callback(lambda _: self._opening.pop(spec.terminal_id, None))
        return await asyncio.shield(attempt)

    async def _open(self, spec: TerminalSpec) -> LiveTerminal:
        check_size(spec.size)
        others = {id for id, terminal in self._terminals.items() if not terminal.is_over} | set(self._opening)
        others.discard(spec.terminal_id)
        if len(others) >= self._config.max_terminals:
            raise LimitReached(f"{len(others)} terminals are open: that is max_terminals")
        if spec.argv is not None and not spec.argv:
            raise InvalidParams("argv is empty: there is nothing to run")
        account = None if spec.user is None else resolve_user(spec.user)
        environment = self._environment(spec)
        cwd = resolve_cwd(spec.cwd)
        argv = spec.argv or (_default_shell(environment, cwd),)
        path = find_program(argv[0], environment, cwd)
        directory = f"{self._spool.path}/t{secrets.token_hex(6)}"
        nonce = secrets.token_hex(16)
        integrated = None
        if spec.integration:
            integrated = integrate(
                _real_path(cwd, path),
                argv,
                directory=directory,
                nonce=nonce,
                login=spec.login,
                environment=environment,
            )
        process_spec = _process_spec(spec, argv, environment, integrated, directory)
        check_spec(process_spec)
        files = ShellFiles(directory, account) if integrated is not None else None
        remove_files: Callable[[], None] = (lambda: None) if files is None else files.remove
        terminal = LiveTerminal(
            spec,
            argv,
            integration=integrated.kind if integrated is not None else "",
            nonce=nonce,
            config=self._config,
            end_process=self._end_process,
            # The shell has read them by then.
            on_first_prompt=remove_files,
        )

        def ended(process: ManagedProcess) -> None:
            remove_files()
            terminal.ended(process)

        try:
            if files is not None and integrated is not None:
                for name, content in integrated.files.items():
                    files.write(name, content.encode("utf-8", "surrogateescape"))
            needed = msgspec.structs.replace(spec, env=None, env_policy=None, cwd=None)
            self._ledger.write(TerminalOpening(needed, argv, terminal.integration, nonce, directory))
            process = await self._start_process(process_spec, None, ended)
        except BaseException:
            remove_files()
            raise
        terminal.attach(process)
        self._terminals[spec.terminal_id] = terminal
        return terminal

    def recover(self, opening: TerminalOpening) -> LiveTerminal:
        """Make a terminal that an earlier server had opened; its events and its process are added later."""
        terminal = LiveTerminal(
            opening.spec,
            opening.argv,
            integration=opening.integration,
            nonce=opening.nonce,
            config=self._config,
            end_process=self._end_process,
            on_first_prompt=lambda: shutil.rmtree(opening.directory, ignore_errors=True),
        )
        self._terminals[terminal.id] = terminal
        return terminal

    def remember_runs(self, runs: Iterable[RunTyped]) -> None:
        """Add commands that were typed under an earlier server."""
        self._typed_before.extend(runs)

    def _environment(self, spec: TerminalSpec) -> dict[str, str]:
        exact = spec.env is not None and spec.env_policy is None
        base = ProcessSpec(
            spec.terminal_id,
            ("",),
            env=spec.env,
            env_policy=spec.env_policy or (None if exact else _EVERYTHING),
            confinement=spec.confinement,
            tty=True,
        )
        account = None if spec.user is None else resolve_user(spec.user)
        variables = dict(build_environment(base, self._environ, account))
        if not (exact and "TERM" in variables):
            variables["TERM"] = spec.term
        # They have the size of the terminal on which the server was started.
        for name in ("LINES", "COLUMNS"):
            if name not in (spec.env or {}):
                variables.pop(name, None)
        if spec.locale is not None:
            variables["LANG"] = spec.locale
            variables.pop("LC_ALL", None)
        elif not any(variables.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")):
            variables["LANG"] = _DEFAULT_LOCALE
        return variables

    # --- finding ---------------------------------------------------------------------------------------------

    def terminal(self, terminal_id: str) -> LiveTerminal:
        try:
            return self._terminals[terminal_id]
        except KeyError:
            what = "is a process and no terminal" if self._existing(terminal_id) else "is not the id of a terminal"
            raise UnknownTerminal(f"{terminal_id!r} {what}") from None

    def get(self, terminal_id: str) -> LiveTerminal | None:
        return self._terminals.get(terminal_id)

    async def opened(self, terminal_id: str) -> LiveTerminal:
        """The terminal with this id, after a start that is under way."""
        if (attempt := self._opening.get(terminal_id)) is not None:
            await asyncio.wait((attempt,))
        return self.terminal(terminal_id)

    def all(self) -> tuple[LiveTerminal, ...]:
        return tuple(self._terminals.values())

    def forget(self, terminal_id: str) -> None:
        """Remove a terminal with its process."""
        self._terminals.pop(terminal_id, None)

    # --- commands --------------------------------------------------------------------------------------------

    async def run(
        self, terminal_id: str, command: str, *, timeout: float | None, max_bytes: int, run_id: str
    ) -> TerminalCommandEnded:
        """Type a command and wait for its end; the same `run_id` again is the same command."""
        terminal = self.terminal(terminal_id)
        runs = terminal.runs
        if run_id not in runs:
            check_run(timeout, max_bytes)
            self._begin_run(
                terminal,
                run_id,
                run_typed(
                    terminal, command, timeout=timeout, max_bytes=max_bytes, run_id=run_id, note=self._note_run
                ),
            )
            ended = [id for id, task in runs.items() if task.done()]
            for id in ended[: max(0, len(runs) - KEPT_RUNS)]:
                del runs[id]
        return await asyncio.shield(runs[run_id])

    def _begin_run(
        self, terminal: LiveTerminal, run_id: str, run: Coroutine[None, None, TerminalCommandEnded]
    ) -> None:
        task = terminal.runs[run_id] = asyncio.create_task(run)
        task.add_done_callback(_retrieve)

    def _note_run(self, run: RunTyped) -> None:
        self._ledger.write(run)

    def resume_runs(self, terminal_id: str) -> None:
        """Resume commands that were typed under an earlier server: the last may run, the others have ended.

        Call this after the terminal's input was restored, and before anything more is read from the terminal.
        """
        runs = [run for run in self._typed_before if run.terminal_id == terminal_id]
        self._typed_before = [run for run in self._typed_before if run.terminal_id != terminal_id]
        for run in runs:
            terminal = self._terminals[terminal_id]
            flight = recover_flight(terminal, run)
            if flight is not None and flight.exit_code is None:
                if run is not runs[-1]:
                    flight = None
                else:
                    terminal.in_flight = flight
            self._begin_run(terminal, run.run_id, resume_run(terminal, flight, run))

    def withdraw(self, terminal_id: str, run_id: str) -> None:
        """Interrupt a command for its caller, which gave up."""
        task = self.terminal(terminal_id).runs.pop(run_id, None)
        if task is not None:
            task.cancel()

    # --- ending ----------------------------------------------------------------------------------------------

    async def close_all(self, grace: float) -> None:
        """Close all terminals, by `exit` or a hang-up: an interactive shell ignores TERM."""
        mode: CloseMode = "graceful" if grace > 0 else "force"
        ending = [terminal for terminal in self._terminals.values() if not terminal.is_over]
        await asyncio.gather(*(terminal.close(mode, "kill", grace) for terminal in ending))


def _real_path(cwd: str, path: str) -> str:
    """The file behind a name: `sh` may be a bash."""
    return os.path.realpath(os.path.join(cwd, path))


def _default_shell(environment: Mapping[str, str], cwd: str) -> str:
    if os.access("/bin/bash", os.X_OK):
        return "/bin/bash"
    with contextlib.suppress(CommandNotFound, NotExecutable):
        return find_program("bash", environment, cwd)
    return "/bin/sh"


def _process_spec(
    spec: TerminalSpec,
    argv: tuple[str, ...],
    environment: dict[str, str],
    integrated: IntegratedShell | None,
    directory: str,
) -> ProcessSpec:
    arg0, confinement = None, spec.confinement
    if integrated is not None:
        if confinement is not None:
            # The shell reads the files of its integration there.
            readable = (*confinement.readable, directory)
            confinement = msgspec.structs.replace(confinement, readable=readable)
        argv, environment = integrated.argv, {**environment, **integrated.env}
    elif spec.login and len(argv) == 1 and os.path.basename(argv[0]) in _SHELLS:
        arg0 = f"-{os.path.basename(argv[0])}"
    return ProcessSpec(
        spec.terminal_id,
        argv,
        cwd=spec.cwd,
        env=environment,
        arg0=arg0,
        tty=True,
        size=spec.size,
        user=spec.user,
        # The state comes from the marks in the output: a slow reader must not delay them.
        overflow="drop",
        lifetime=spec.lifetime,
        limits=spec.limits,
        confinement=confinement,
        start_id=spec.start_id,
    )


def _retrieve(task: asyncio.Task[TerminalCommandEnded]) -> None:
    """Take the exception of a command: its caller may be gone."""
    if not task.cancelled():
        task.exception()
