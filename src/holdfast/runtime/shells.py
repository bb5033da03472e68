"""All live shells by id: starts them, finds their programs, keeps those that closed long enough to say why.

Starts processes through the exec interface that owns it; touches nothing else itself.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from holdfast.config import ExecServerConfig
from holdfast.errors import CommandNotFound, DuplicateProcess, LimitReached, ShellClosed, UnknownShell
from holdfast.model import CommandSpec, ProcessSpec, ShellSpec, ShellStatus
from holdfast.runtime.checks import check_command
from holdfast.runtime.environment import build_environment, resolve_cwd, resolve_user
from holdfast.runtime.ledger import Ledger, ShellForgotten, ShellNoted
from holdfast.runtime.output_log import Spool
from holdfast.runtime.poller import Poller
from holdfast.runtime.process_table import TableReader
from holdfast.runtime.recorded import Recorded
from holdfast.runtime.shell import EndProcess, LiveShell, StartProcess
from holdfast.runtime.shell_command import ShellCommand
from holdfast.runtime.shell_dialect import dialect_for
from holdfast.runtime.shell_files import ShellFiles
from holdfast.runtime.spawn import find_program

#: Why a shell is closed that an earlier server had opened.
RESTARTED: Final = "the server was restarted"
#: Closed shells that can still be asked why.
KEPT_SHELLS: Final = 100


class Shells:
    """The shells of one exec interface."""

    def __init__(
        self,
        *,
        config: ExecServerConfig,
        spool: Spool,
        poller: Poller,
        tables: TableReader,
        environ: Mapping[str, str],
        start_process: StartProcess,
        end_process: EndProcess,
        on_growth: Callable[[], None],
        ledger: Ledger | None = None,
    ) -> None:
        self._config = config
        self._ledger = ledger
        #: Shells of an earlier server: they can still be asked why they are closed.
        self._former: dict[str, ShellStatus] = {}
        self._spool = spool
        self._poller = poller
        self._tables = tables
        self._environ = environ
        self._start_process = start_process
        self._end_process = end_process
        self._on_growth = on_growth
        self._shells: dict[str, LiveShell] = {}
        self._opening: dict[str, asyncio.Task[LiveShell]] = {}
        self._commands: dict[str, tuple[LiveShell, ShellCommand]] = {}
        self._made = 0

    # --- shells ----------------------------------------------------------------------------------------------

    async def open(self, spec: ShellSpec) -> LiveShell:
        """Start a shell, or find the one that an earlier attempt with the same `start_id` has started."""
        self._forget_former(spec.shell_id)
        existing = self._shells.get(spec.shell_id)
        if existing is not None:
            if spec.start_id is not None and existing.spec.start_id == spec.start_id:
                return existing
            if existing.state != "closed":
                raise DuplicateProcess(f"shell id {spec.shell_id!r} is taken")
            self.forget(spec.shell_id)
        attempt = self._opening.get(spec.shell_id)
        if attempt is None:
            attempt = self._opening[spec.shell_id] = asyncio.create_task(self._open(spec))
            attempt.add_done_callback(lambda _: self._opening.pop(spec.shell_id, None))
        return await asyncio.shield(attempt)

    async def _open(self, spec: ShellSpec) -> LiveShell:
        running = sum(shell.state != "closed" for shell in self._shells.values())
        if running >= self._config.max_shells:
            raise LimitReached(f"{running} shells are open: that is max_shells")
        account = None if spec.user is None else resolve_user(spec.user)
        path, real = self._find(spec)
        self._made += 1
        files = ShellFiles(f"{self._spool.path}/s{self._made}", account)
        try:
            shell = LiveShell(
                spec,
                path,
                dialect_for(real),
                files,
                start_process=self._start_process,
                end_process=self._end_process,
                spool=self._spool,
                poller=self._poller,
                config=self._config,
                tables=self._tables,
                on_growth=self._on_growth,
                on_closed=self._closed,
                on_forget=self._forget_command,
            )
        except BaseException:
            files.remove()
            raise
        try:
            await shell.start()
        except BaseException:
            shell.discard()
            raise
        self._shells[spec.shell_id] = shell
        self._note(shell)
        return shell

    def _find(self, spec: ShellSpec) -> tuple[str, str]:
        """The path of its program, and what it really is."""
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
        """The same as `shell`, after a start that is under way."""
        if (attempt := self._opening.get(shell_id)) is not None:
            await asyncio.wait((attempt,))
        return self.shell(shell_id)

    def shell(self, shell_id: str) -> LiveShell:
        try:
            return self._shells[shell_id]
        except KeyError:
            if (former := self._former.get(shell_id)) is not None:
                raise ShellClosed(f"shell {shell_id!r} is closed: {former.reason}") from None
            raise UnknownShell(f"no shell has the id {shell_id!r}") from None

    def describe(self, shell_id: str) -> ShellStatus:
        former = self._former.get(shell_id)
        return self.shell(shell_id).info() if former is None else former

    def statuses(self) -> tuple[ShellStatus, ...]:
        return (*self._former.values(), *(shell.info() for shell in self._shells.values()))

    def remember(self, statuses: Iterable[ShellStatus]) -> None:
        """These were the shells of an earlier server. Those that were open are closed: their pipes went with it."""
        for status in statuses:
            if status.state != "closed":
                status = msgspec.structs.replace(status, state="closed", reason=RESTARTED)
            self._former[status.shell_id] = status

    def _forget_former(self, shell_id: str) -> None:
        if self._former.pop(shell_id, None) is not None and self._ledger is not None:
            self._ledger.write(ShellForgotten(shell_id))

    def _note(self, shell: LiveShell) -> None:
        if self._ledger is not None:
            status = shell.info()
            # A directory's name need not be UTF-8.
            cwd = status.cwd.encode(errors="replace").decode()
            self._ledger.write(ShellNoted(msgspec.structs.replace(status, cwd=cwd, command=None)))

    def all(self) -> tuple[LiveShell, ...]:
        return tuple(self._shells.values())

    def recorded(self, id: str) -> Recorded | None:
        """What can be read under this id: a shell's own output, or a command's."""
        if id in self._commands:
            return self._commands[id][1]
        shell = self._shells.get(id)
        return None if shell is None else shell.record

    def logged(self) -> list[Recorded]:
        """Everything that keeps output."""
        return [shell.record for shell in self._shells.values()] + [each[1] for each in self._commands.values()]

    # --- commands --------------------------------------------------------------------------------------------

    def run(self, shell_id: str, spec: CommandSpec) -> ShellCommand:
        check_command(spec)
        shell = self.shell(shell_id)
        known = self._commands.get(spec.command_id)
        if known is not None and known[0] is not shell:
            raise DuplicateProcess(f"command id {spec.command_id!r} is taken")
        command = shell.run(spec)
        self._commands[spec.command_id] = (shell, command)
        return command

    async def background(
        self, shell_id: str, command: str, process_id: str, start_id: str | None
    ) -> tuple[ProcessSpec, bytes]:
        """What to start, and on which input, for a process with all that a shell of this kind can hand on.

        The shell is asked in its turn.
        """
        shell = self.shell(shell_id)
        check_command(CommandSpec(process_id, command))
        asked = self.run(shell_id, CommandSpec(f"{shell_id}:state:{secrets.token_hex(6)}", shell.dialect.dump()))
        try:
            await asked.wait_ended()
        except asyncio.CancelledError:
            shell.withdraw(asked)
            raise
        state = asked.logs[0].contents()
        script = shell.dialect.background(state, command)
        return shell.process_spec(process_id, shell.cwd, start_id=start_id), script

    def withdraw(self, command_id: str) -> bool:
        """Its caller gave up. Returns whether it waited or ran."""
        shell, command = self._commands.get(command_id, (None, None))
        if shell is None or command is None or command.is_over:
            return False
        shell.withdraw(command)
        return True

    def is_open(self, shell_id: str) -> bool:
        shell = self._shells.get(shell_id)
        return shell is not None and shell.state != "closed"

    def _forget_command(self, command: ShellCommand) -> None:
        self._commands.pop(command.process_id, None)
        command.discard()

    def _closed(self, shell: LiveShell) -> None:
        self._note(shell)
        closed = [each for each in self._shells.values() if each.state == "closed"]
        for each in closed[: max(0, len(closed) - KEPT_SHELLS)]:
            self.forget(each.id)

    def forget(self, shell_id: str) -> None:
        shell = self._shells.pop(shell_id)
        if self._ledger is not None:
            self._ledger.write(ShellForgotten(shell_id))
        for id in [id for id, (of, _) in self._commands.items() if of is shell]:
            self._commands.pop(id)
        shell.discard()

    # --- ending ----------------------------------------------------------------------------------------------

    async def close_all(self, grace: float) -> None:
        open_ones = [shell for shell in self._shells.values() if shell.state != "closed"]
        await asyncio.gather(*(shell.close(keep=False, grace=grace) for shell in open_ones))
        for shell_id in list(self._shells):
            self.forget(shell_id)
