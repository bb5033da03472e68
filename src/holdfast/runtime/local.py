"""The exec interface in this process: no server, no wire. Owns the processes, shells, terminals and their spool.

`connect("inprocess")` returns `LocalExec`, and the server serves it to its connections.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from holdfast import __version__
from holdfast.config import ExecServerConfig
from holdfast.errors import (
    ResourceExhausted,
    ShellClosed,
    StdinClosed,
    UnknownProcess,
)
from holdfast.exec_api import CommandStream, EventStream
from holdfast.runtime.confine.features import Feature, available, detect_features
from holdfast.runtime.durability.durability import Durability, NullDurability
from holdfast.runtime.files.confined_files import ConfinedFiles, Jails
from holdfast.runtime.files.local_files import LocalFiles
from holdfast.runtime.machine import environment_info, wait_for_port
from holdfast.runtime.output.job import Job
from holdfast.runtime.output.local_events import LocalCommand, LocalEvents
from holdfast.runtime.output.output_log import Spool
from holdfast.runtime.output.poller import Poller
from holdfast.runtime.process.checks import check_bytes
from holdfast.runtime.process.input import InputQueue
from holdfast.runtime.process.oom import OomCounter
from holdfast.runtime.process.registry import Processes
from holdfast.runtime.process.signals import parse_signal
from holdfast.runtime.process.spawn import write_all
from holdfast.runtime.shell.registry import Shells
from holdfast.runtime.terminal.read_until import read_terminal
from holdfast.runtime.terminal.registry import Terminals
from holdfast.runtime.tree.table_reader import TableReader
from holdfast.runtime.tree.usage import ForegroundActivity, UsageQuery, UsageSampler
from holdfast.types import (
    TERMINAL_OUTPUT_BYTES,
    CloseMode,
    CommandSpec,
    Confinement,
    EndedProcesses,
    EnvironmentInfo,
    ExitStatus,
    JobsAtClose,
    ProcessInfo,
    ProcessSpec,
    ReadResult,
    ReadUntil,
    ServerStatus,
    ShellSpec,
    ShellStatus,
    Snapshot,
    TerminalCommandEnded,
    TerminalRead,
    TerminalSize,
    TerminalSpec,
    TerminalStatus,
    TerminalWait,
    UsageSample,
)

log = logging.getLogger(__name__)

DEFAULT_READ_BYTES: Final = 1024 * 1024


class LocalExec:
    """Processes of this machine, by logical id. Create it inside a running event loop."""

    def __init__(
        self,
        config: ExecServerConfig | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        adopt_orphans: bool = False,
        open_files: int | None = None,
        durability: Durability | None = None,
    ) -> None:
        """`adopt_orphans` makes this process the subreaper of its descendants: right for a server, not in a user's
        program. `open_files` is the descriptor limit of processes, if the server's own was raised. With
        `durability`, processes outlive this process."""
        self.config = config or ExecServerConfig()
        environ = os.environ if environ is None else environ
        tables, oom = TableReader(), OomCounter()
        with contextlib.ExitStack() as opened:
            if durability is None:
                spool = Spool(self.config.spool_directory, wanted_bytes=self.config.spool_minimum_bytes)
                opened.callback(spool.remove)
                durability = NullDurability(spool, self.config)
            self._durability = durability
            self._spool = durability.spool
            try:
                self._poller = Poller()
                opened.callback(self._poller.close)
                self.processes = Processes(
                    config=self.config,
                    environ=environ,
                    open_files=open_files,
                    adopt_orphans=adopt_orphans,
                    durability=durability,
                    poller=self._poller,
                    tables=tables,
                    oom=oom,
                    other_jobs=lambda: self.shells.logged(),
                    on_forget=lambda process_id: self.terminals.forget(process_id),
                )
            except OSError as error:
                raise ResourceExhausted(f"processes cannot be watched: {error.strerror}") from None
            opened.pop_all()
        self._sampler = UsageSampler(durability.keeper_pid)
        #: The features of this machine; detected once, at the first request.
        self._features: asyncio.Future[tuple[Feature, ...]] | None = None
        self._closed = asyncio.Event()
        self._started_at = time.monotonic()
        self.files = LocalFiles(self.config)
        starter = self.processes.starter
        self._jails = Jails(self.config, starter.spawn_helper, starter.newborn.discard)
        self.shells = Shells(
            config=self.config,
            poller=self._poller,
            tables=tables,
            environ=environ,
            start_process=self.processes.start_on,
            end_process=self.processes.end,
            on_growth=self.processes.retention.spool_grew,
            oom=oom,
            durability=durability,
        )
        self.terminals = Terminals(
            config=self.config,
            spool=self._spool,
            environ=environ,
            start_process=self.processes.start_on,
            end_process=self.processes.end,
            existing=self.processes.get,
            ledger=durability.ledger,
        )

    # --- processes -------------------------------------------------------------------------------------------

    async def start(self, spec: ProcessSpec) -> ProcessInfo:
        return (await self.processes.start(spec)).info()

    def recorded(self, id: str) -> Job:
        """The job with this id: a process, a command of a shell, or a shell's own output."""
        found = self.processes.get(id) or self.shells.recorded(id)
        if found is None:
            raise UnknownProcess(f"no process has the id {id!r}")
        return found

    async def read(
        self,
        process_id: str,
        *,
        after_seq: int = 0,
        max_bytes: int | None = None,
        wait: float = 0.0,
        reader: str | None = None,
        timing: bool = False,
    ) -> ReadResult:
        """As `ExecApi.read`; with the name of a `reader`, the process is held back for its next poll."""
        process = self.recorded(process_id)
        if reader is not None:
            process.polled(reader, after_seq)
        if wait > 0 and process.journal.last_seq <= after_seq and not process.closed:
            with contextlib.suppress(builtins.TimeoutError):
                async with asyncio.timeout(wait):
                    await process.wait_news(after_seq)
        else:
            # A caller that reads in a loop must not keep the event loop from the streams that it waits for.
            await asyncio.sleep(0)
        return process.read(after_seq, DEFAULT_READ_BYTES if max_bytes is None else max_bytes, timing=timing)

    def events(self, process_id: str, *, after_seq: int = 0, window: int | None = None) -> EventStream:
        return LocalEvents(self.recorded(process_id), after_seq)

    async def start_streaming(
        self, spec: ProcessSpec, window: int | None = None
    ) -> tuple[ProcessInfo, EventStream]:
        """Start and read from the beginning, in one step."""
        process = await self.processes.start(spec)
        return process.info(), LocalEvents(process, 0)

    async def write(self, process_id: str, data: bytes, *, write_id: str | None = None) -> None:
        await self.input(process_id).write(data, write_id)

    async def close_stdin(self, process_id: str) -> None:
        self.input(process_id).close()

    def input(self, process_id: str) -> InputQueue:
        """The stdin of a process, or of a command in a shell."""
        process = self.processes.get(process_id)
        if process is not None:
            return process.input
        command = self.shells.command(process_id)
        if command is None:
            raise UnknownProcess(f"no process has the id {process_id!r}")
        if command.input is None:
            raise StdinClosed(f"command {process_id!r} was run without an open stdin")
        return command.input

    async def resize(self, process_id: str, size: TerminalSize) -> None:
        self.processes.process(process_id).resize(size)

    async def signal(self, process_id: str, signal: str, *, signal_id: str | None = None) -> None:
        number = parse_signal(signal)
        self.processes.process(process_id).send_signal(number, signal_id)

    async def terminate(self, process_id: str, *, grace: float = 5.0, force: bool = False) -> bool:
        process, terminal = self.processes.process(process_id), self.terminals.get(process_id)
        was_running = process.running
        if terminal is not None:
            await terminal.close("force" if force else "graceful", "kill", grace)
        else:
            await self.processes.end(process, 0.0 if force else grace)
        self.processes.reap_orphans()
        return was_running

    async def wait(self, process_id: str, *, timeout: float | None = None) -> ExitStatus | None:
        process = self.processes.process(process_id)
        try:
            async with asyncio.timeout(timeout):
                return await process.wait_exit()
        except builtins.TimeoutError:
            return None

    async def ended(self, *, after: int | None = None, wait: float = 0.0) -> EndedProcesses:
        return await self.processes.ended.read(after, wait)

    async def snapshot(self, process_id: str) -> Snapshot:
        return self.recorded(process_id).snapshot()

    async def describe(self, process_id: str) -> ProcessInfo:
        return self.processes.process(process_id).info()

    async def list(self) -> tuple[ProcessInfo, ...]:
        return tuple(process.info() for process in self.processes.all() if not process.internal)

    async def usage(self, process_ids: Sequence[str], *, members: bool = False) -> UsageSample:
        found = (self._usage_query(process_id) for process_id in dict.fromkeys(process_ids))
        return await self._sampler.sample(
            [each for each in found if each is not None],
            leaders=self.processes.leaders,
            known_marks=lambda: {process.tree.mark for process in self.processes.all()},
            list_members=members,
        )

    def _usage_query(self, process_id: str) -> UsageQuery | None:
        process = self.processes.get(process_id)
        if process is None:
            shell = self.shells.get(process_id)
            return None if shell is None else shell.usage_query()
        terminal = self.terminals.get(process_id)
        printed = sum(log.end for log in process.logs.values())
        activity = ForegroundActivity() if terminal is None or not process.running else terminal.activity()
        return UsageQuery(process_id, (process.tree,), process.running, printed, activity, process.own_pids)

    async def forget(self, process_id: str) -> None:
        self.processes.forget(process_id)

    # --- shells ----------------------------------------------------------------------------------------------

    async def open_shell(self, spec: ShellSpec) -> ShellStatus:
        self.processes.check_open()
        return (await self.shells.open(spec)).info()

    def run_in_shell(
        self, shell_id: str, command: CommandSpec, *, live: bool = False, window: int | None = None
    ) -> CommandStream:
        return LocalCommand(self.shells, self.shells.run(shell_id, command))

    async def start_in_shell(
        self,
        shell_id: str,
        command: str,
        process_id: str,
        *,
        start_id: str | None = None,
        pipe_stdin: bool = False,
    ) -> ProcessInfo:
        started = self.processes.get(process_id)
        if started is not None and start_id is not None and started.spec.start_id == start_id:
            return started.info()  # by an earlier attempt; the shell may be closed since
        spec, script = await self.shells.background(shell_id, command, process_id, start_id, pipe_stdin=pipe_stdin)
        existing = self.processes.existing(spec)
        if existing is not None:
            return existing.info()
        try:
            fd = os.memfd_create("holdfast-script")
        except OSError as error:
            raise ResourceExhausted(f"the script of {process_id!r} cannot be stored: {error.strerror}") from None
        try:
            write_all(fd, script)
            os.lseek(fd, 0, os.SEEK_SET)
            return (await self.processes.start_on(spec, fd)).info()
        finally:
            os.close(fd)

    async def interrupt_shell(self, shell_id: str, *, interrupt_id: str | None = None) -> bool:
        return await self.shells.shell(shell_id).interrupt(interrupt_id)

    async def close_shell(self, shell_id: str, *, keep: bool = False, grace: float = 5.0) -> None:
        with contextlib.suppress(ShellClosed):  # by the end of an earlier server's shell
            shell = await self.shells.opened(shell_id)
            await shell.close(keep=keep, grace=grace)
        self.processes.reap_orphans()

    async def describe_shell(self, shell_id: str) -> ShellStatus:
        return self.shells.describe(shell_id)

    async def list_shells(self) -> tuple[ShellStatus, ...]:
        return tuple(shell.info() for shell in self.shells.all())

    # --- terminals -------------------------------------------------------------------------------------------

    async def open_terminal(self, spec: TerminalSpec) -> TerminalStatus:
        self.processes.check_open()
        return (await self.terminals.open(spec)).status()

    async def read_terminal(
        self,
        terminal_id: str,
        *,
        since: int = 0,
        max_bytes: int | None = None,
        wait: float = 0.0,
        timing: bool = False,
        marks: bool = False,
        until: ReadUntil | None = None,
        gather: float = 0.0,
    ) -> TerminalRead:
        terminal = self.terminals.terminal(terminal_id)
        check_bytes(max_bytes or 0)
        size = DEFAULT_READ_BYTES if max_bytes is None else max_bytes
        if wait <= 0 or terminal.token > since:
            await asyncio.sleep(0)  # as in `read`
        return await read_terminal(
            terminal, since, size, wait, timing=timing, marks=marks, until=until, gather=gather
        )

    async def run_in_terminal(
        self,
        terminal_id: str,
        command: str,
        *,
        timeout: float | None = None,
        max_bytes: int = TERMINAL_OUTPUT_BYTES,
        run_id: str | None = None,
    ) -> TerminalCommandEnded:
        run_id = run_id or secrets.token_hex(8)
        try:
            return await self.terminals.run(
                terminal_id, command, timeout=timeout, max_bytes=max_bytes, run_id=run_id
            )
        except asyncio.CancelledError:
            self.terminals.withdraw(terminal_id, run_id)
            raise

    async def press_keys(self, terminal_id: str, keys: Sequence[str], *, write_id: str | None = None) -> None:
        terminal = self.terminals.terminal(terminal_id)
        terminal.press(keys, write_id)
        await terminal.process.input.wait_for_room()

    async def wait_terminal(
        self, terminal_id: str, until: TerminalWait, *, timeout: float | None = None, changes: int = 0
    ) -> tuple[bool, TerminalStatus]:
        terminal = self.terminals.terminal(terminal_id)
        reached = await terminal.wait(until, timeout, changes)
        return reached, terminal.status()

    async def close_terminal(
        self, terminal_id: str, *, mode: CloseMode = "graceful", jobs: JobsAtClose = "kill", grace: float = 5.0
    ) -> TerminalStatus:
        terminal = await self.terminals.opened(terminal_id)
        await terminal.close(mode, jobs, grace)
        self.processes.reap_orphans()
        return terminal.status()

    async def describe_terminal(self, terminal_id: str, *, look: bool = True) -> TerminalStatus:
        return self.terminals.terminal(terminal_id).status(look=look)

    async def list_terminals(self) -> tuple[TerminalStatus, ...]:
        return tuple(terminal.status() for terminal in self.terminals.all())

    # --- the machine -----------------------------------------------------------------------------------------

    async def wait_for_port(self, port: int, *, host: str = "127.0.0.1", timeout: float = 30.0) -> None:
        await wait_for_port(port, host, timeout)

    async def info(self) -> EnvironmentInfo:
        if self._features is None:
            self._features = asyncio.ensure_future(asyncio.to_thread(detect_features))
        return environment_info(available(await asyncio.shield(self._features)))

    async def status(self) -> ServerStatus:
        processes = [process for process in self.processes.all() if not process.internal]
        running = sum(process.running for process in processes)
        link = None if self._durability.link.lost else self._durability.link
        return ServerStatus(
            version=__version__,
            pid=os.getpid(),
            uptime=time.monotonic() - self._started_at,
            processes_running=running,
            processes_kept=len(processes) - running,
            shells=sum(shell.state != "closed" for shell in self.shells.all()),
            terminals=sum(not terminal.is_over for terminal in self.terminals.all()),
            sessions=0,
            spool=self._spool.path,
            spool_bytes=self._spool.used,
            spool_limit=self.processes.retention.spool_limit,
            spool_free=self._spool.free,
            spool_file_system=self._spool.file_system.kind,
            containment=self.processes.containment,
            keeper_pid=None if link is None else link.pid,
            keeper_uptime=None if link is None else time.monotonic() - link.started_at,
            restarts=0 if link is None else link.restarts,
            lost=self._durability.lost,
        )

    # --- ending ----------------------------------------------------------------------------------------------

    async def shutdown(self, grace: float) -> None:
        """Refuse new starts, end everything, and close every descriptor."""
        repeated = self.processes.closing
        await self.processes.finish_starts()
        await asyncio.gather(self.shells.close_all(grace), self.terminals.close_all(grace))
        await self.processes.end_all(grace)
        if repeated:
            await self._closed.wait()
            return
        await self.files.aclose()
        self.processes.close()
        self._poller.close()
        self._spool.remove()
        self._closed.set()

    async def aclose(self) -> None:
        if not self.processes.closing:
            await self.shutdown(self.config.shutdown_grace_period_ms / 1000)

    async def write_in_place(self, path: str, file_id: str, offset: int, data: bytes) -> None:
        """Write into an existing file; `FileNotFound` if it is another file than `file_id`."""
        await self.files.write_at(path, data, offset=offset, file_id=file_id)

    def confined_files(self, confinement: Confinement) -> AbstractAsyncContextManager[ConfinedFiles]:
        """The files under a confinement, for the length of a block."""
        return self._jails.files(confinement)
