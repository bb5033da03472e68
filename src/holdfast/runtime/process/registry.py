"""The processes of this machine by id: their starts, take-overs and ends, and the retention of ended ones.

Owns the parts that see every process: the starter, the cgroups and the reaper of orphans.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from holdfast.config import ExecServerConfig
from holdfast.errors import (
    DuplicateProcess,
    Forbidden,
    HoldfastError,
    InvalidRequest,
    LimitReached,
    ResourceExhausted,
    ShuttingDown,
    UnknownProcess,
)
from holdfast.runtime.confine.jail import ProcessJail
from holdfast.runtime.durability.durability import Durability
from holdfast.runtime.output.job import Job, JobHistory
from holdfast.runtime.output.poller import Poller
from holdfast.runtime.process.checks import check_spec
from holdfast.runtime.process.ended import EndedLog
from holdfast.runtime.process.oom import OomCounter
from holdfast.runtime.process.process import ManagedProcess
from holdfast.runtime.process.retention import ProcessRetention
from holdfast.runtime.process.start import SPARE_DESCRIPTORS, StartedProcess, Starter, is_jailed, starts_at_once
from holdfast.runtime.tree.cgroup import Cgroups
from holdfast.runtime.tree.orphans import OrphanReaper
from holdfast.runtime.tree.process_tree import Strays, Tree
from holdfast.runtime.tree.table_reader import TableReader
from holdfast.types import AWAITED_PREFIX, ProcessSpec

log = logging.getLogger(__name__)

#: Processes that a stop ends at a time once descriptors are scarce: a quarter of those that starts leave free.
_ENDED_AT_ONCE: Final = SPARE_DESCRIPTORS // 4

OnExit = Callable[[ManagedProcess], None]


class Processes:
    """The processes of one exec interface. Create it inside a running event loop."""

    def __init__(
        self,
        *,
        config: ExecServerConfig,
        environ: Mapping[str, str],
        open_files: int | None,
        adopt_orphans: bool,
        durability: Durability,
        poller: Poller,
        tables: TableReader,
        oom: OomCounter,
        other_jobs: Callable[[], Iterable[Job]],
        on_forget: Callable[[str], None],
    ) -> None:
        """`other_jobs` returns the jobs of shells, whose output shares the spool; `on_forget` gets the id of a
        process that is dropped."""
        self._config = config
        self._poller = poller
        self._tables = tables
        self._oom = oom
        self._on_forget = on_forget
        self._keeper = durability.keeper_pid
        self._processes: dict[str, ManagedProcess] = {}
        #: Starts that are under way, by id: a repeated start joins the first.
        self._starting: dict[str, asyncio.Task[ManagedProcess]] = {}
        #: The pids of running processes.
        self._leaders: set[int] = set()
        #: Tasks that end processes which printed nothing for too long.
        self._endings: set[asyncio.Task[None]] = set()
        self.ended = EndedLog()
        self.closing = False
        self.retention = ProcessRetention(
            config, durability.spool, jobs=lambda: (*self.all(), *other_jobs()), forget=self._forget
        )
        spare = self.retention.discard_oldest
        self.starter = Starter(environ, open_files, durability, spare, config.oom_score_adj)
        try:
            self._orphans = OrphanReaper(self.leaders, poller) if adopt_orphans else None
        except BaseException:
            self.starter.close()
            raise
        self._cgroups = Cgroups.open(self._keeper) if config.cgroup == "auto" else None
        self.starter.cgroups = self._cgroups
        self.keep_to_ourselves((durability.spool.path,))

    # --- starting --------------------------------------------------------------------------------------------

    async def start(self, spec: ProcessSpec) -> ManagedProcess:
        """Start a process, or return the one that an earlier attempt with the same `start_id` has started."""
        if starts_at_once(spec):
            return self.start_now(spec)
        while spec.process_id in self._starting:
            with contextlib.suppress(HoldfastError):  # then this attempt is the first that counts
                await asyncio.shield(self._starting[spec.process_id])
        if (existing := self.existing(spec)) is not None:
            return existing
        attempt = self._starting[spec.process_id] = asyncio.create_task(self.start_on(spec, None))
        # At its own end, and not at that of its caller: a cancelled caller may repeat the request.
        attempt.add_done_callback(lambda _: self._starting.pop(spec.process_id))
        return await asyncio.shield(attempt)

    def start_now(self, spec: ProcessSpec) -> ManagedProcess:
        """Start a process with a spec that `starts_at_once`, without waiting."""
        return self.existing(spec) or self._manage(spec, self.starter.start(spec))

    def existing(self, spec: ProcessSpec) -> ManagedProcess | None:
        """The process that an earlier attempt has started; an error if the id belongs to another."""
        self._check(spec)
        existing = self._processes.get(spec.process_id)
        taken = existing is not None or spec.process_id in self._starting
        if taken and (existing is None or spec.start_id is None or spec.start_id != existing.spec.start_id):
            raise DuplicateProcess(f"process id {spec.process_id!r} is taken")
        return existing

    def check_open(self) -> None:
        """Raise `ShuttingDown` once `shutdown` has begun."""
        if self.closing:
            raise ShuttingDown("the server is shutting down: it starts nothing new")

    def check_room(self, running: int) -> None:
        """Raise `LimitReached` if a connection has its maximum of processes."""
        if running >= self._config.max_processes_per_connection:
            raise LimitReached(f"{running} processes run in this session: that is max_processes_per_connection")

    def _check(self, spec: ProcessSpec) -> None:
        """Check a spec before anything is tried."""
        self.check_open()
        if spec.kind == "direct" and not self._config.allow_direct_exec:
            raise Forbidden("direct starts are switched off here (allow_direct_exec)")
        if spec.kind == "prepared" and not self._config.allow_prepared_exec:
            raise Forbidden("prepared starts are switched off here (allow_prepared_exec)")
        check_spec(spec)

    async def start_on(self, spec: ProcessSpec, stdin: int | None, on_exit: OnExit | None = None) -> ManagedProcess:
        """Start a process on this stdin."""
        self._check(spec)
        internal = on_exit is not None and not spec.tty
        if starts_at_once(spec):
            started = self.starter.start(spec, stdin, internal=internal)
        else:
            started = await self.starter.start_through_launcher(spec, stdin, internal=internal)
        return self._manage(spec, started, on_exit)

    def _manage(self, spec: ProcessSpec, started: StartedProcess, on_exit: OnExit | None = None) -> ManagedProcess:
        process = self._managed(spec, started, on_exit)
        try:
            process.follow(started.outputs)
        except OSError as error:
            # No descriptor to watch it by. It has just begun, and has no id yet.
            started.undo()
            raise ResourceExhausted(f"cannot watch {spec.argv[0]!r}: {error.strerror}") from None
        started.recorder.started(process.pid, process.started_at)
        self._processes[spec.process_id] = process
        self._leaders.add(process.pid)
        if started.cgroup is not None:
            process.tree.cgroup = started.cgroup
        elif self._cgroups is not None:
            self._cgroups.join_later(process.tree, started.recorder.key)
        return process

    def take_over(
        self, spec: ProcessSpec, started: StartedProcess, past: JobHistory, on_exit: OnExit | None = None
    ) -> ManagedProcess:
        """Take over a process that an earlier server has started."""
        process = self._managed(spec, started, on_exit)
        process.restore(past)
        self._processes[spec.process_id] = process
        process.tree.leader_lives = process.running
        if process.running:
            self._leaders.add(process.pid)
        if process.jail is not None and process.running:
            process.jail.find()
        if past.closed_at is None:
            if self._cgroups is not None:
                self._cgroups.rejoin(process.tree, started.recorder.key)
            process.follow(started.outputs)
        return process

    def keep_to_ourselves(self, directories: Iterable[str]) -> None:
        """Hide directories from confined processes: those of the server's socket and of its keeper's."""
        found = (os.path.realpath(directory) for directory in directories)
        self.starter.own = tuple(dict.fromkeys((*self.starter.own, *found)))

    def inherit_cgroups(self, keeper: int) -> None:
        """Take over the cgroups of a keeper that was killed; before `take_over`."""
        if self._cgroups is not None:
            self._cgroups.inherit(keeper)

    def _managed(self, spec: ProcessSpec, started: StartedProcess, on_exit: OnExit | None) -> ManagedProcess:
        def exited(process: ManagedProcess) -> None:
            self._leaders.discard(process.pid)
            if not process.internal and not spec.process_id.startswith(AWAITED_PREFIX):
                self.ended.add(process.info())
            if on_exit is not None:
                on_exit(process)

        return ManagedProcess(
            spec,
            started.recorder,
            cwd=started.cwd,
            tree=Tree(started.pid, started.mark, self._tables),
            outputs=started.outputs,
            stdin=started.stdin,
            poller=self._poller,
            config=self._config,
            on_exit=exited,
            on_close=self._closed,
            on_growth=self.retention.spool_grew,
            on_silent=self._end_silent,
            oom=self._oom,
            internal=on_exit is not None and not spec.tty,
            jail=started.jail or (ProcessJail(started.pid) if is_jailed(spec) else None),
        )

    def _closed(self, process: ManagedProcess) -> None:
        """Begin the retention of a process. Not before: a child that holds its streams would die of SIGPIPE."""
        if process.tree.cgroup is not None:
            process.tree.cgroup.remove()
        self.retention.keep(process)

    # --- the processes ---------------------------------------------------------------------------------------

    def get(self, process_id: str) -> ManagedProcess | None:
        return self._processes.get(process_id)

    def process(self, process_id: str) -> ManagedProcess:
        """The process with this id; `UnknownProcess` if there is none."""
        try:
            return self._processes[process_id]
        except KeyError:
            raise UnknownProcess(f"no process has the id {process_id!r}") from None

    def is_known(self, process_id: str) -> bool:
        return process_id in self._processes

    def is_running(self, process_id: str) -> bool:
        process = self._processes.get(process_id)
        return process is not None and process.running

    def bound(self) -> list[str]:
        """The running processes that end with the connection that started them."""
        running = (process for process in self.all() if process.running)
        return [process.process_id for process in running if process.spec.lifetime == "connection"]

    def all(self) -> Iterable[ManagedProcess]:
        return self._processes.values()

    @property
    def running(self) -> int:
        """The number of running processes."""
        return len(self._leaders)

    def leaders(self) -> set[int]:
        """The pids of running processes and of starts that are under way."""
        return self._leaders | self.starter.newborn

    @property
    def containment(self) -> tuple[str, ...]:
        """The ways by which members of a tree are found."""
        return (*(() if self._cgroups is None else (self._cgroups.kind,)), "mark", "tree")

    # --- ending ----------------------------------------------------------------------------------------------

    async def end(self, process: ManagedProcess, grace: float) -> None:
        """End a process and its tree; on return the exit is in the journal."""
        # A blocking process must be able to end without a reader: readers get what the log holds.
        process.stop_blocking()
        await process.tree.end(self._leaders, grace)
        await process.wait_exit()

    def _end_silent(self, process: ManagedProcess) -> None:
        """Kill a process that printed nothing for too long."""
        task = asyncio.get_running_loop().create_task(self._end_logged(process))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _end_logged(self, process: ManagedProcess) -> None:
        try:
            await self.end(process, 0.0)
        except HoldfastError as error:
            log.warning("process %s is silent and cannot be ended: %s", process.process_id, error)

    def reap_orphans(self) -> None:
        if self._orphans is not None:
            self._orphans.reap()

    def forget(self, process_id: str) -> None:
        """Drop an ended process and its output."""
        process = self.process(process_id)
        if process.running:
            raise InvalidRequest(f"process {process_id!r} still runs: terminate it first")
        self.retention.discard(process)
        self._forget(process)

    def _forget(self, process: ManagedProcess) -> None:
        process.discard()
        self._processes.pop(process.spec.process_id, None)
        self._on_forget(process.spec.process_id)

    async def finish_starts(self) -> None:
        """Refuse new starts, and wait for those that are under way."""
        self.closing = True
        if self._starting:
            await asyncio.wait(self._starting.values())

    async def end_all(self, grace: float) -> None:
        """End every process, and the daemons of processes that were forgotten before."""
        processes = list(self.all())
        ends = (self.end(process, grace) for process in processes)
        left = []
        for process, error in zip(processes, await asyncio.gather(*ends, return_exceptions=True), strict=True):
            if isinstance(error, ResourceExhausted):
                left.append(process)
            elif isinstance(error, BaseException):
                raise error
        # All at once need a descriptor each, and a server with many processes may not have so many left.
        for start in range(0, len(left), _ENDED_AT_ONCE):
            await asyncio.gather(*(self.end(process, grace) for process in left[start : start + _ENDED_AT_ONCE]))
        if self._orphans is not None:
            await Strays(self._tables, self._keeper).end(self._leaders, grace)

    def close(self) -> None:
        """Drop every process, and close every descriptor."""
        self.retention.close()
        for process in self.all():
            process.discard()
        self._processes.clear()
        if self._cgroups is not None:
            self._cgroups.close()
        if self._orphans is not None:
            self._orphans.reap()
            self._orphans.close()
        self.starter.close()
