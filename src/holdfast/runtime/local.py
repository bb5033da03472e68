"""The exec interface in this process: no server, no wire. Owns the processes, their spool and their retention.

`LocalExec` is what `connect("inprocess")` gives and what the server offers to its connections.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import platform
import pwd
import resource
import socket
import termios
import time
from collections.abc import Mapping
from typing import Final

from holdfast import __version__
from holdfast.config import ExecServerConfig
from holdfast.errors import (
    DuplicateProcess,
    Forbidden,
    InvalidParams,
    InvalidRequest,
    LimitReached,
    ResourceExhausted,
    ShuttingDown,
    TimeoutError,
    UnknownProcess,
)
from holdfast.exec_api import EventStream
from holdfast.model import (
    Closed,
    EnvironmentInfo,
    ExitStatus,
    ProcessEvent,
    ProcessInfo,
    ProcessSpec,
    ReadResult,
    ServerStatus,
    ShellInfo,
    Snapshot,
    TerminalSize,
)
from holdfast.runtime.cgroup import JOIN_AFTER_SECONDS, Cgroups
from holdfast.runtime.environment import build_environment, resolve_cwd, resolve_user
from holdfast.runtime.libc import become_subreaper
from holdfast.runtime.orphans import OrphanReaper
from holdfast.runtime.output_log import Spool
from holdfast.runtime.process import ManagedProcess, set_terminal_size
from holdfast.runtime.process_table import TableReader, new_mark
from holdfast.runtime.process_tree import Tree
from holdfast.runtime.reader import Reader
from holdfast.runtime.signals import parse_signal
from holdfast.runtime.spawn import Command, StandardStreams, encode_variables, find_program, spawn

#: The environment variable that marks descendants where the rlimit cannot.
MARK_VARIABLE: Final = "HOLDFAST_MARK"
MAX_ID_CHARACTERS: Final = 256
DEFAULT_READ_BYTES: Final = 1024 * 1024
#: Between two attempts to connect to a port: no event tells that somebody listens.
_PORT_RETRY: Final = (0.005, 0.25)


class LocalExec:
    """Processes of this machine, by logical id. Create it inside a running event loop."""

    def __init__(
        self,
        config: ExecServerConfig | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        adopt_orphans: bool = False,
        open_files: int | None = None,
    ) -> None:
        """`adopt_orphans` makes us the parent of descendants whose parent died: right for a server, not in
        somebody's program. `open_files` is the descriptor limit to give to processes if ours was raised."""
        self.config = config or ExecServerConfig()
        self._environ = dict(os.environ if environ is None else environ)
        #: Most processes get just this: encoded once.
        self._variables = encode_variables(self._environ)
        self._spool = Spool(self.config.spool_directory)
        self._processes: dict[str, ManagedProcess] = {}
        #: Starts that are under way, by id: a repeated start joins the first.
        self._starting: dict[str, asyncio.Future[ManagedProcess]] = {}
        #: The pids of those that run.
        self._leaders: set[int] = set()
        #: Ended processes in the order of their end.
        self._ended: dict[str, ManagedProcess] = {}
        self._tables = TableReader()
        self._soft_limits = {} if open_files is None else {resource.RLIMIT_NOFILE: open_files}
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._cgroups = Cgroups.open() if self.config.cgroup == "auto" else None
        self._joining: set[asyncio.Task[None]] = set()
        self._orphans: OrphanReaper | None = None
        if adopt_orphans:
            become_subreaper()
            self._orphans = OrphanReaper(lambda: self._leaders)
        self._closing = False
        self._started_at = time.monotonic()
        self._retention_timer: asyncio.TimerHandle | None = None

    # --- starting --------------------------------------------------------------------------------------------

    async def start(self, spec: ProcessSpec) -> ProcessInfo:
        return (await self.start_process(spec)).info()

    async def start_process(self, spec: ProcessSpec) -> ManagedProcess:
        """Start it, or find the one that an earlier attempt with the same `start_id` has started."""
        self._check(spec)
        existing = self._processes.get(spec.process_id)
        if existing is None and spec.process_id in self._starting:
            existing = await asyncio.shield(self._starting[spec.process_id])
        if existing is not None:
            if spec.start_id is not None and spec.start_id == existing.spec.start_id:
                return existing
            raise DuplicateProcess(f"process id {spec.process_id!r} is taken")
        attempt: asyncio.Future[ManagedProcess] = asyncio.get_running_loop().create_future()
        self._starting[spec.process_id] = attempt
        try:
            process = await self._spawn(spec)
        except BaseException as error:
            attempt.set_exception(error)
            attempt.exception()  # nobody may be waiting
            raise
        finally:
            del self._starting[spec.process_id]
        self._processes[spec.process_id] = process
        self._leaders.add(process.pid)
        if self._cgroups is not None:
            asyncio.get_running_loop().call_later(JOIN_AFTER_SECONDS, self._join_cgroup, process)
        attempt.set_result(process)
        return process

    def _check(self, spec: ProcessSpec) -> None:
        """What can be said before anything is tried."""
        if self._closing:
            raise ShuttingDown("the server is shutting down: it starts nothing new")
        if spec.kind == "direct" and not self.config.allow_direct_exec:
            raise Forbidden("direct starts are switched off here (allow_direct_exec)")
        if spec.kind == "prepared" and not self.config.allow_prepared_exec:
            raise Forbidden("prepared starts are switched off here (allow_prepared_exec)")
        if not 0 < len(spec.process_id) <= MAX_ID_CHARACTERS:
            raise InvalidParams(f"processId must have 1 to {MAX_ID_CHARACTERS} characters")
        if not spec.argv:
            raise InvalidParams("argv is empty: there is nothing to run")
        for index, argument in enumerate(spec.argv):
            if "\0" in argument:
                raise InvalidParams(f"argv[{index}] holds a NUL character")
        if spec.arg0 is not None and "\0" in spec.arg0:
            raise InvalidParams("arg0 holds a NUL character")
        variables = {**(spec.env or {}), **(spec.env_policy.set if spec.env_policy else {})}
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise InvalidParams(f"environment variable {name!r}: an empty name, a '=' in it, or a NUL")
        if spec.size is not None and not spec.tty:
            raise InvalidParams("size goes with tty")

    async def _spawn(self, spec: ProcessSpec) -> ManagedProcess:
        account = resolve_user(spec.user) if spec.user is not None else None
        cwd = resolve_cwd(spec.cwd)
        environment = build_environment(spec, self._environ, account)
        mark = new_mark()
        soft_limits = dict(self._soft_limits)
        if mark is not None:
            soft_limits[resource.RLIMIT_RTTIME] = mark
        else:
            environment = {**environment, MARK_VARIABLE: spec.process_id}
        command = Command(
            path=find_program(spec.argv[0], environment, cwd),
            argv=spec.argv if spec.arg0 is None else (spec.arg0, *spec.argv[1:]),
            variables=self._variables if environment is self._environ else encode_variables(environment),
            cwd=cwd,
            account=account,
            limits=spec.limits,
        )
        ours: list[int] = []
        theirs: list[int] = []
        try:
            if spec.tty:
                streams = self._open_terminal(spec.size or TerminalSize(), account and account.uid, ours, theirs)
            else:
                streams = self._open_pipes(spec.pipe_stdin, ours, theirs)
            pid = await spawn(command, streams, soft_limits)
        except OSError as error:
            _close_all(ours)
            raise ResourceExhausted(f"cannot start {spec.argv[0]!r}: {error.strerror}") from None
        except BaseException:
            _close_all(ours)
            raise
        finally:
            _close_all(theirs)
        # Not before the caller has its answer: the child is busy loading its program.
        asyncio.get_running_loop().call_soon(self._raise_oom_score, pid)
        if spec.tty:
            outputs, stdin = {2: ours[0]}, ours[0]
        else:
            outputs, stdin = {0: ours[0], 1: ours[1]}, ours[2] if spec.pipe_stdin else -1
        return ManagedProcess(
            spec,
            cwd=cwd,
            tree=Tree(pid, mark, self._tables),
            outputs=outputs,
            stdin=stdin,
            spool=self._spool,
            config=self.config,
            on_exit=self._process_ended,
            on_growth=self._spool_grew,
        )

    def _join_cgroup(self, process: ManagedProcess) -> None:
        if self._cgroups is None or not process.running or self._closing:
            return
        process.tree.cgroup = self._cgroups.new()
        task = asyncio.get_running_loop().create_task(self._cgroups.join(process.tree.cgroup, process.pid))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def _open_pipes(self, pipe_stdin: bool, ours: list[int], theirs: list[int]) -> StandardStreams:
        for _ in ("stdout", "stderr"):
            read, write = os.pipe2(os.O_CLOEXEC)
            ours.append(read)
            theirs.append(write)
            os.set_blocking(read, False)
        stdin = self._null
        if pipe_stdin:
            stdin, write = os.pipe2(os.O_CLOEXEC)
            theirs.append(stdin)
            ours.append(write)
            os.set_blocking(write, False)
        return StandardStreams(stdin, theirs[0], theirs[1])

    def _open_terminal(
        self, size: TerminalSize, owner: int | None, ours: list[int], theirs: list[int]
    ) -> StandardStreams:
        try:
            master, slave = os.openpty()
        except OSError as error:
            raise ResourceExhausted(f"no terminal can be opened: {error.strerror}") from None
        ours.append(master)
        theirs.append(slave)
        set_terminal_size(master, size)
        os.set_blocking(master, False)
        _use_utf8(slave)
        if owner is not None and owner != os.geteuid():
            os.fchown(slave, owner, -1)
        return StandardStreams(terminal=os.ttyname(slave))

    def _raise_oom_score(self, pid: int) -> None:
        """The kernel takes a job before it takes us. Refused in some containers: then the kernel decides."""
        if not self.config.oom_score_adj:
            return
        try:
            fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.write(fd, b"%d" % self.config.oom_score_adj)
        except OSError:
            return
        finally:
            os.close(fd)

    # --- one process -----------------------------------------------------------------------------------------

    def process(self, process_id: str) -> ManagedProcess:
        try:
            return self._processes[process_id]
        except KeyError:
            raise UnknownProcess(f"no process has the id {process_id!r}") from None

    async def read(
        self, process_id: str, *, after_seq: int = 0, max_bytes: int | None = None, wait: float = 0.0
    ) -> ReadResult:
        process = self.process(process_id)
        if wait > 0 and process.journal.last_seq <= after_seq and not process.closed:
            try:
                async with asyncio.timeout(wait):
                    await process.wait_news(after_seq)
            except builtins.TimeoutError:
                pass
        return process.read(after_seq, DEFAULT_READ_BYTES if max_bytes is None else max_bytes)

    def events(self, process_id: str, *, after_seq: int = 0, window: int | None = None) -> EventStream:
        return LocalEvents(self.process(process_id), after_seq)

    async def start_streaming(
        self, spec: ProcessSpec, window: int | None = None
    ) -> tuple[ProcessInfo, EventStream]:
        """Start and read from the beginning, in one step."""
        process = await self.start_process(spec)
        return process.info(), LocalEvents(process, 0)

    async def write(self, process_id: str, data: bytes, *, write_id: str | None = None) -> None:
        await self.process(process_id).input.write(data, write_id)

    async def close_stdin(self, process_id: str) -> None:
        self.process(process_id).input.close()

    async def resize(self, process_id: str, size: TerminalSize) -> None:
        self.process(process_id).resize(size)

    async def signal(self, process_id: str, signal: str) -> None:
        number = parse_signal(signal)
        self.process(process_id).send_signal(number)

    async def terminate(self, process_id: str, *, grace: float = 5.0, force: bool = False) -> bool:
        process = self.process(process_id)
        was_running = process.running
        await self._end(process, 0.0 if force else grace)
        self._reap_orphans()
        return was_running

    async def wait(self, process_id: str, *, timeout: float | None = None) -> ExitStatus | None:
        process = self.process(process_id)
        try:
            async with asyncio.timeout(timeout):
                return await process.wait_exit()
        except builtins.TimeoutError:
            return None

    async def snapshot(self, process_id: str) -> Snapshot:
        return self.process(process_id).snapshot()

    async def describe(self, process_id: str) -> ProcessInfo:
        return self.process(process_id).info()

    async def list(self) -> tuple[ProcessInfo, ...]:
        return tuple(process.info() for process in self._processes.values())

    async def forget(self, process_id: str) -> None:
        process = self.process(process_id)
        if process.running:
            raise InvalidRequest(f"process {process_id!r} still runs: terminate it first")
        self._drop(process)

    # --- the machine -----------------------------------------------------------------------------------------

    async def wait_for_port(self, port: int, *, host: str = "127.0.0.1", timeout: float = 30.0) -> None:
        if not 0 < port < 65536:
            raise InvalidParams(f"port {port}: must be 1 to 65535")
        pause, longest = _PORT_RETRY
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        _, writer = await asyncio.open_connection(host, port)
                    except socket.gaierror as error:
                        raise InvalidParams(f"host {host!r}: {error.strerror}") from None
                    except OSError:
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, longest)
                    else:
                        writer.close()
                        return
        except builtins.TimeoutError:
            raise TimeoutError(f"nothing listens on {host}:{port} after {timeout:g} s") from None

    async def info(self) -> EnvironmentInfo:
        account = resolve_user(str(os.geteuid()))
        shell = account.shell if os.access(account.shell, os.X_OK) else "/bin/sh"
        features = ["process", "tty", "exec_remote"]
        return EnvironmentInfo(
            shell=ShellInfo(os.path.basename(shell), shell),
            cwd=os.getcwd(),
            user=_user_name(),
            home=account.home,
            hostname=socket.gethostname(),
            os=f"{platform.system()} {platform.release()}",
            arch=platform.machine(),
            version=__version__,
            features=tuple(features),
        )

    async def status(self) -> ServerStatus:
        running = sum(process.running for process in self._processes.values())
        return ServerStatus(
            version=__version__,
            pid=os.getpid(),
            uptime=time.monotonic() - self._started_at,
            processes_running=running,
            processes_kept=len(self._processes) - running,
            sessions=0,
            spool=self._spool.path,
            spool_bytes=self._spool.used,
            containment=(*(() if self._cgroups is None else (self._cgroups.kind,)), "mark", "tree"),
        )

    @property
    def running(self) -> int:
        """How many processes run now."""
        return len(self._processes) - len(self._ended)

    def child_ended(self) -> None:
        """For the handler of SIGCHLD: orphans that we adopted may be among the ended."""
        if self._orphans is not None:
            self._orphans.child_ended()

    # --- ending ----------------------------------------------------------------------------------------------

    async def shutdown(self, grace: float) -> None:
        """End everything and everybody, then let go. Nothing starts any more."""
        self._closing = True
        processes = list(self._processes.values())
        await asyncio.gather(*(self._end(process, grace) for process in processes))
        if self._retention_timer is not None:
            self._retention_timer.cancel()
        for process in processes:
            process.discard()
        self._processes.clear()
        self._ended.clear()
        if self._cgroups is not None:
            await asyncio.gather(*self._joining)
            self._cgroups.close()
        self._reap_orphans()
        os.close(self._null)
        self._spool.remove()

    async def aclose(self) -> None:
        if not self._closing:
            await self.shutdown(self.config.shutdown_grace_period_ms / 1000)

    def _reap_orphans(self) -> None:
        if self._orphans is not None:
            self._orphans.reap()

    async def _end(self, process: ManagedProcess, grace: float) -> None:
        """The whole tree, and then the news of it: when this returns the exit is in the journal."""
        # A blocking process must be able to end though nobody reads: its reader gets what fits.
        process.stop_blocking()
        await process.tree.end(self._leaders, grace)
        await process.wait_exit()

    def _process_ended(self, process: ManagedProcess) -> None:
        self._leaders.discard(process.pid)
        self._ended[process.spec.process_id] = process
        while len(self._ended) > self.config.max_exited_processes:
            self._drop(next(iter(self._ended.values())))
        if self._retention_timer is None:
            self._schedule_retention(self.config.exited_retention_seconds)

    def _schedule_retention(self, seconds: float) -> None:
        self._retention_timer = asyncio.get_running_loop().call_later(seconds, self._drop_old)

    def _drop_old(self) -> None:
        self._retention_timer = None
        now = time.time()
        for process in list(self._ended.values()):
            assert process.exited_at is not None
            left = process.exited_at + self.config.exited_retention_seconds - now
            if left > 0:
                self._schedule_retention(left)
                return
            self._drop(process)

    def _drop(self, process: ManagedProcess) -> None:
        process.discard()
        self._processes.pop(process.spec.process_id, None)
        self._ended.pop(process.spec.process_id, None)

    def _spool_grew(self) -> None:
        """Over the total, ended processes lose their output first, oldest first; then the largest keeps less."""
        limit = self.config.retained_output_bytes_total
        if self._spool.used <= limit:
            return
        for process in list(self._ended.values()):
            self._drop(process)
            if self._spool.used <= limit:
                return
        logs = [log for process in self._processes.values() for log in process.logs.values()]
        max(logs, key=lambda log: log.kept_bytes).shrink()

    def is_known(self, process_id: str) -> bool:
        return process_id in self._processes

    def is_running(self, process_id: str) -> bool:
        process = self._processes.get(process_id)
        return process is not None and process.running

    def check_room(self, running: int) -> None:
        """Refuse a session's next process when it has enough of them."""
        if running >= self.config.max_processes_per_connection:
            raise LimitReached(f"{running} processes run in this session: that is max_processes_per_connection")


class LocalEvents:
    """An in-process reader: waits on the process, reads from its log, ends after `Closed`."""

    def __init__(self, process: ManagedProcess, after_seq: int) -> None:
        self._news = asyncio.Event()
        self._reader: Reader | None = Reader(process, after_seq, self._news.set)

    def __aiter__(self) -> LocalEvents:
        return self

    async def __anext__(self) -> ProcessEvent:
        while self._reader is not None:
            self._news.clear()
            event = self._reader.next_event()
            if event is None:
                if self._reader.at_end:
                    break
                await self._news.wait()
                continue
            if isinstance(event, Closed):
                await self.aclose()
            return event
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            self._news.set()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _use_utf8(terminal: int) -> None:
    """Erasing a character in line mode must erase all its bytes."""
    mode = termios.tcgetattr(terminal)
    mode[0] |= 0o040000  # IUTF8, which the termios module does not name
    termios.tcsetattr(terminal, termios.TCSANOW, mode)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
