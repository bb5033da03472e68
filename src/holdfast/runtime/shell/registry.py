"""All live shells by id: starts them, finds their programs, keeps closed shells for a while.

Starts processes through the exec interface that owns it; touches nothing else itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Coroutine, Mapping
from typing import Final, TypedDict

import msgspec

from holdfast.config import ExecServerConfig
from holdfast.errors import CommandNotFound, DuplicateProcess, HoldfastError, LimitReached, UnknownShell
from holdfast.runtime.durability.durability import Durability
from holdfast.runtime.durability.shell_recorder import ShellRecorder
from holdfast.runtime.durability.shell_recovery import InheritedShell, ResumedShell
from holdfast.runtime.output.job import Job
from holdfast.runtime.output.output_log import NO_DESCRIPTORS
from holdfast.runtime.output.poller import Poller
from holdfast.runtime.process.checks import check_command
from holdfast.runtime.process.environment import build_environment, resolve_cwd, resolve_user
from holdfast.runtime.process.oom import OomCounter
from holdfast.runtime.process.spawn import SCRIPTED_INPUT_FD, find_program
from holdfast.runtime.shell.command import ShellCommand
from holdfast.runtime.shell.dialect import dialect_for
from holdfast.runtime.shell.files import ShellFiles
from holdfast.runtime.shell.live import EndProcess, LiveShell, StartProcess
from holdfast.runtime.tree.table_reader import TableReader
from holdfast.types import CommandSpec, ProcessSpec, ShellSpec, ShellStatus

log = logging.getLogger(__name__)

#: Closed shells that are kept, with the reason.
KEPT_SHELLS: Final = 100


class ShellDependencies(TypedDict):
    """The constructor arguments that all shells of one exec interface share."""

    start_process: StartProcess
    end_process: EndProcess
    poller: Poller
    config: ExecServerConfig
    tables: TableReader
    on_growth: Callable[[], None]
    oom: OomCounter
    on_closed: Callable[[LiveShell], None]
    on_forget: Callable[[ShellCommand], None]


class Shells:
    """The shells of one exec interface."""

    def __init__(
        self,
        *,
        config: ExecServerConfig,
        poller: Poller,
        tables: TableReader,
        environ: Mapping[str, str],
        start_process: StartProcess,
        end_process: EndProcess,
        on_growth: Callable[[], None],
        oom: OomCounter,
        durability: Durability,
    ) -> None:
        self._config = config
        self._durability = durability
        self._spool = durability.spool
        self._environ = environ
        self._end_process = end_process
        self._dependencies = ShellDependencies(
            start_process=start_process,
            end_process=end_process,
            poller=poller,
            config=config,
            tables=tables,
            on_growth=on_growth,
            oom=oom,
            on_closed=self._closed,
            on_forget=self._forget_command,
        )
        self._shells: dict[str, LiveShell] = {}
        self._opening: dict[str, asyncio.Task[LiveShell]] = {}
        self._commands: dict[str, tuple[LiveShell, ShellCommand]] = {}
        #: Tasks that kill the programs of shells that could not be resumed.
        self._endings: set[asyncio.Task[None]] = set()

    # --- shells ----------------------------------------------------------------------------------------------

    async def open(self, spec: ShellSpec) -> LiveShell:
        """Start a shell, or find the one that an earlier attempt with the same `start_id` has started."""
        existing = self._shells.get(spec.shell_id)
        if existing is not None:
            if spec.start_id is not None and existing.spec.start_id == spec.start_id:
                return existing
            if existing.state != "closed":
                raise DuplicateProcess(f"shell id {spec.shell_id!r} is taken")
            self.forget(spec.shell_id)
        attempt = self._opening.get(spec.shell_id)
        if attempt is None:
            attempt = self._begin_opening(spec.shell_id, self._open(spec))
        return await asyncio.shield(attempt)

    async def _open(self, spec: ShellSpec) -> LiveShell:
        running = sum(shell.state != "closed" for shell in self._shells.values())
        if running >= self._config.max_shells:
            raise LimitReached(f"{running} shells are open: that is max_shells")
        account = None if spec.user is None else resolve_user(spec.user)
        path, real = self._find(spec)
        recorder = self._durability.shell()
        files = ShellFiles(recorder.directory, account)
        try:
            shell = LiveShell(spec, path, dialect_for(real), files, recorder=recorder, **self._dependencies)
            recorder.opening(spec, path, real, shell.started_at)
        except BaseException:
            files.remove()
            recorder.gone()
            raise
        return await self._started(shell, shell.start())

    async def _started(self, shell: LiveShell, start: Coroutine[None, None, None]) -> LiveShell:
        try:
            await start
        except BaseException:
            shell.discard()
            raise
        self._shells[shell.id] = shell
        return shell

    def recover(self, inherited: InheritedShell) -> None:
        """Resume a shell of an earlier server."""
        opening = inherited.shell.opening
        recorder = self._durability.shell(opening.key)
        try:
            account = None if opening.spec.user is None else resolve_user(opening.spec.user)
            files = ShellFiles(opening.directory, account)
            shell = ResumedShell(
                opening.spec,
                opening.path,
                dialect_for(opening.real),
                files,
                recorder=recorder,
                inherited=inherited,
                **self._dependencies,
            )
        except (HoldfastError, OSError) as error:
            if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
                raise  # a short lack: the keeper starts the server again
            # Its user was removed, or its files cannot be made: the other shells are resumed all the same.
            log.error("cannot resume shell %r: %s", opening.spec.shell_id, error)
            self._give_up(inherited, recorder)
            return
        # Before it is resumed: a shell that closes at once is searched by its id.
        self._shells[shell.id] = shell
        start = shell.resume()
        if start is not None:
            del self._shells[shell.id]
            attempt = self._begin_opening(shell.id, self._started(shell, start))
            attempt.add_done_callback(_log_failure)
            return
        for command in shell.commands():
            self._commands[command.process_id] = (shell, command)

    def _give_up(self, inherited: InheritedShell, recorder: ShellRecorder) -> None:
        """End the programs of a shell that cannot be resumed, and release its descriptors and its files."""
        past = inherited.shell
        recorder.gone()
        inputs = (f"{past.current}.stdin", *(f"{key}.input" for key in inherited.inputs))
        recorder.release(
            0 if past.program is None else past.program.number, (*(key for key, _ in inherited.pipes), *inputs)
        )
        inherited.close()
        shutil.rmtree(past.opening.directory, ignore_errors=True)
        for key in (past.key, past.current, *past.finished, *past.queue):
            for kind in (0, 1, "input"):
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._spool.path}/{key}.{kind}")
        for adopt in inherited.programs.values():
            process, streams = adopt(lambda _: None)
            for fd in streams.values():
                os.close(fd)
            ending = asyncio.create_task(self._end_process(process, 0.0))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    def _begin_opening(self, shell_id: str, start: Coroutine[None, None, LiveShell]) -> asyncio.Task[LiveShell]:
        attempt = self._opening[shell_id] = asyncio.create_task(start)
        attempt.add_done_callback(lambda _: self._opening.pop(shell_id, None))
        return attempt

    def _find(self, spec: ShellSpec) -> tuple[str, str]:
        """The path of its program, and the real path."""
        process = ProcessSpec(spec.shell_id, ("",), env=spec.env, env_policy=spec.env_policy)
        environment = build_environment(process, self._environ)
        cwd = resolve_cwd(spec.cwd)
        if spec.shell is not None:
            path = os.path.join(cwd, find_program(spec.shell, environment, cwd))
        else:
            try:
                path = find_program("bash", environment, cwd)
            except CommandNotFound:
                path = find_program("sh", {"PATH": os.defpath}, cwd)
        return path, os.path.realpath(path)

    async def opened(self, shell_id: str) -> LiveShell:
        """The shell with this id, after a start that is under way."""
        if (attempt := self._opening.get(shell_id)) is not None:
            await asyncio.wait((attempt,))
        return self.shell(shell_id)

    def shell(self, shell_id: str) -> LiveShell:
        try:
            return self._shells[shell_id]
        except KeyError:
            raise UnknownShell(f"no shell has the id {shell_id!r}") from None

    def get(self, shell_id: str) -> LiveShell | None:
        return self._shells.get(shell_id)

    def describe(self, shell_id: str) -> ShellStatus:
        return self.shell(shell_id).info()

    def all(self) -> tuple[LiveShell, ...]:
        return tuple(self._shells.values())

    def recorded(self, id: str) -> Job | None:
        """The job with this id: a shell's own output, or a command."""
        if id in self._commands:
            return self._commands[id][1]
        shell = self._shells.get(id)
        return None if shell is None else shell.record

    def logged(self) -> list[Job]:
        """The jobs of all shells and commands, which have output."""
        return [shell.record for shell in self._shells.values()] + [each[1] for each in self._commands.values()]

    # --- commands --------------------------------------------------------------------------------------------

    def run(self, shell_id: str, spec: CommandSpec) -> ShellCommand:
        check_command(spec)
        shell = self.shell(shell_id)
        known = self._commands.get(spec.command_id)
        if known is not None and known[0] is not shell:
            raise DuplicateProcess(f"command id {spec.command_id!r} is taken")
        if known is None:
            self._spool.require_room()
        command = shell.run(spec)
        self._commands[spec.command_id] = (shell, command)
        return command

    async def background(
        self, shell_id: str, command: str, process_id: str, start_id: str | None, *, pipe_stdin: bool
    ) -> tuple[ProcessSpec, bytes]:
        """The spec and the script of a process that begins with the state of a shell.

        A queued command prints the state.
        """
        shell = self.shell(shell_id)
        check_command(CommandSpec(process_id, command))
        dump = self.run(shell_id, CommandSpec(f"{shell_id}:state:{secrets.token_hex(6)}", shell.dialect.dump()))
        try:
            await dump.wait_ended()
        except asyncio.CancelledError:
            shell.withdraw(dump)
            raise
        state = dump.logs[0].contents()
        script = shell.dialect.background(state, command, stdin=SCRIPTED_INPUT_FD if pipe_stdin else None)
        spec = shell.process_spec(process_id, shell.cwd, start_id=start_id)
        return msgspec.structs.replace(spec, pipe_stdin=pipe_stdin), script

    def command(self, command_id: str) -> ShellCommand | None:
        """A command that is queued, runs, or has ended and is still kept."""
        return self._commands.get(command_id, (None, None))[1]

    def withdraw(self, command_id: str) -> bool:
        """Withdraw a command for its caller; returns whether it was queued or ran."""
        shell, command = self._commands.get(command_id, (None, None))
        if shell is None or command is None or command.is_done:
            return False
        shell.withdraw(command)
        return True

    def bound(self) -> list[str]:
        """The open shells that end with the connection that opened them."""
        shells = (shell for shell in self._shells.values() if shell.state != "closed")
        return [shell.id for shell in shells if shell.spec.lifetime == "connection"]

    def is_open(self, shell_id: str) -> bool:
        shell = self._shells.get(shell_id)
        return shell is not None and shell.state != "closed"

    def _forget_command(self, command: ShellCommand) -> None:
        self._commands.pop(command.process_id, None)
        command.forget()

    def _closed(self, shell: LiveShell) -> None:
        closed = [each for each in self._shells.values() if each.state == "closed"]
        for each in closed[: max(0, len(closed) - KEPT_SHELLS)]:
            self.forget(each.id)

    def forget(self, shell_id: str) -> None:
        shell = self._shells.pop(shell_id)
        for id in [id for id, (of, _) in self._commands.items() if of is shell]:
            self._commands.pop(id)
        shell.discard()

    # --- ending ----------------------------------------------------------------------------------------------

    async def close_all(self, grace: float) -> None:
        open_ones = [shell for shell in self._shells.values() if shell.state != "closed"]
        await asyncio.gather(*(shell.close(keep=False, grace=grace) for shell in open_ones))
        for shell_id in list(self._shells):
            self.forget(shell_id)


def _log_failure(attempt: asyncio.Task[LiveShell]) -> None:
    """Log a failed start of an earlier server's shell: its caller repeats the request, or is gone."""
    if not attempt.cancelled() and (error := attempt.exception()) is not None:
        log.warning("a shell that an earlier server was about to open did not start: %s", error)
