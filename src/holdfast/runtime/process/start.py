"""Starts a process from its spec: resolves the program, opens its streams, marks and records it.

Opens pipes and terminals, and closes the child's ends after the spawn. `process` manages the running process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import termios
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from holdfast.errors import PermissionRefused, ResourceExhausted
from holdfast.launch.pidfd_signals import signal_child_group
from holdfast.runtime.confine.jail import ProcessJail
from holdfast.runtime.confine.launch_plan import default_cwd, environment_for, plan_launch
from holdfast.runtime.output.journal import output_kinds
from holdfast.runtime.process.environment import Account, build_environment, resolve_cwd, resolve_user
from holdfast.runtime.process.process import set_terminal_size
from holdfast.runtime.process.spawn import (
    JailFailed,
    OomScore,
    SpawnCommand,
    StandardStreams,
    encode_variables,
    find_program,
    spawn,
    spawn_through_launcher,
)
from holdfast.runtime.process.spawner import Spawner
from holdfast.runtime.tree.process_table import MARK_VARIABLE, limits_can_mark, new_mark
from holdfast.types import Confinement, ProcessSpec, TerminalSize

if TYPE_CHECKING:
    from holdfast.runtime.durability.durability import Durability
    from holdfast.runtime.durability.recorder import ProcessRecorder
    from holdfast.runtime.tree.cgroup import Cgroup, Cgroups

T = TypeVar("T")

#: More plans of one jail, after a first that failed. A plan names the private files below /etc; other programs
#: replace some of them at any time, so a second plan is nearly always enough.
_MORE_PLANS: Final = 2
#: Descriptors that starts leave free: for logs of running processes, for kills, for connections.
SPARE_DESCRIPTORS: Final = 64
#: The fraction of a small limit that is left free.
_SPARE_FRACTION: Final = 16
#: With this many descriptors a spawn by the thread of `Spawner` is cheaper than copies of all of them for a child
#: that closes them: the thread costs about 50 µs, a descriptor 0.1.
CROWDED_DESCRIPTORS: Final = 512
#: Makes line mode erase a whole character and not its last byte; the termios module lacks it.
_IUTF8: Final = 0o040000


class StartedProcess(NamedTuple):
    """A process that runs, and the server's ends of its streams."""

    pid: int
    mark: int
    cwd: str
    #: Descriptors by the journal's kinds: stdout and stderr, or a terminal.
    outputs: dict[int, int]
    #: The descriptor for its input, or -1.
    stdin: int
    recorder: ProcessRecorder
    #: The cgroup, if the process was started in one; and the jail, once it was found.
    cgroup: Cgroup | None = None
    jail: ProcessJail | None = None

    def undo(self) -> None:
        """Kill the process and close the server's ends, as if it had not been started."""
        signal_child_group(self.pid, signal.SIGKILL)
        for fd in {self.stdin, *self.outputs.values()} - {-1}:
            os.close(fd)
        if self.jail is not None:
            self.jail.close()
        self.recorder.undo()
        os.waitpid(self.pid, 0)
        if self.cgroup is not None:
            self.cgroup.remove()


class _Streams:
    """The descriptors of one start: the server's ends, and the child's, which are closed after the spawn."""

    def __init__(self) -> None:
        self.for_child = StandardStreams()
        self.outputs: dict[int, int] = {}
        self.stdin = -1
        self._theirs: list[int] = []

    def open_pipes(self, null: int, given: int | None, *, pipe_stdin: bool, merge_stderr: bool) -> None:
        """Open pipes. `given` is the stdin; with `pipe_stdin` it is a script, and the pipe is beside it."""
        for kind in output_kinds(tty=False, merge_stderr=merge_stderr):
            self.outputs[kind], write = os.pipe2(os.O_CLOEXEC)
            self._theirs.append(write)
            os.set_blocking(self.outputs[kind], False)
        pipe = -1
        if pipe_stdin:
            pipe, self.stdin = os.pipe2(os.O_CLOEXEC)
            self._theirs.append(pipe)
            os.set_blocking(self.stdin, False)
        stdin = given if given is not None else pipe if pipe_stdin else null
        self.for_child = StandardStreams(
            stdin,
            self._theirs[0],
            self._theirs[0 if merge_stderr else 1],
            scripted_input=-1 if given is None else pipe,
        )

    def open_terminal(self, size: TerminalSize, account: Account | None) -> None:
        master, slave = os.openpty()
        self.outputs[2] = self.stdin = master
        self._theirs.append(slave)
        set_terminal_size(master, size)
        os.set_blocking(master, False)
        mode = termios.tcgetattr(slave)
        mode[0] |= _IUTF8
        termios.tcsetattr(slave, termios.TCSANOW, mode)
        if account is not None and account.uid != os.geteuid():
            os.fchown(slave, account.uid, -1)
        self.for_child = StandardStreams(terminal=os.ttyname(slave))

    @property
    def highest(self) -> int:
        return max(self.stdin, *self._theirs, *self.outputs.values())

    def last_words(self) -> str:
        """Return the output of a program that could not start."""
        said = b""
        for fd in self.outputs.values():
            with contextlib.suppress(OSError):
                said += os.read(fd, 4096)
        return said.decode(errors="replace").strip().replace("\r\n", "; ")

    def close_theirs(self) -> None:
        for fd in self._theirs:
            os.close(fd)
        self._theirs.clear()

    def close(self) -> None:
        self.close_theirs()
        for fd in {self.stdin, *self.outputs.values()} - {-1}:
            os.close(fd)


def starts_at_once(spec: ProcessSpec) -> bool:
    """Whether one posix_spawn is enough: a user switch, limits and a confinement need the slower launcher."""
    return spec.user is None and spec.limits is None and spec.confinement is None


def is_jailed(spec: ProcessSpec) -> bool:
    """Whether the leader is bwrap and not the program itself."""
    return spec.confinement is not None and spec.confinement.mode == "bubblewrap"


class Starter:
    """Starts processes in an environment; `open_files` is their descriptor limit, if the server raised its own."""

    def __init__(
        self,
        environ: Mapping[str, str],
        open_files: int | None,
        durability: Durability,
        spare: Callable[[], bool] = lambda: False,
        oom_score_adj: int = 0,
    ) -> None:
        """`spare` closes the least needed descriptors; it returns False if there are none."""
        self._environ = dict(environ)
        self._durability = durability
        self._spare = spare
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._oom_score = OomScore(oom_score_adj)
        self._own_spawner: Spawner | None = None
        self._cannot_unshare = False
        #: The environment of most processes, encoded once.
        self._variables = encode_variables(self._environ)
        self._soft_limits = {} if open_files is None else {resource.RLIMIT_NOFILE: open_files}
        #: Pids of starts that are under way: children of the server that are not orphans.
        self.newborn: set[int] = set()
        #: Makes cgroups for limits of a whole tree; None where no cgroup can be made.
        self.cgroups: Cgroups | None = None
        #: Paths of the server that no confined process may access.
        self.own: tuple[str, ...] = ()

    def close(self) -> None:
        os.close(self._null)
        self._oom_score.close()
        if self._own_spawner is not None:
            self._own_spawner.close()

    def _spawner(self, highest: int) -> Spawner | None:
        """The thread for spawns of a server with many descriptors, of which `highest` is one; None: spawn here."""
        if highest >= CROWDED_DESCRIPTORS and not self._cannot_unshare and self._own_spawner is None:
            try:
                self._own_spawner = Spawner()
            except (OSError, RuntimeError):
                self._cannot_unshare = True  # an old kernel, or no thread can be started: every spawn copies them
        return self._own_spawner if highest >= CROWDED_DESCRIPTORS else None

    def start(self, spec: ProcessSpec, stdin: int | None = None, *, internal: bool = False) -> StartedProcess:
        """Start a spec that `starts_at_once`; `stdin` replaces the descriptor that the spec would get."""
        mark = new_mark()
        command = self._command(spec, mark, None)
        streams = self._open(spec, None, stdin)
        recorder = None
        try:
            recorder = self._record(spec, mark, command, streams, internal)
            spawner = self._spawner(streams.highest)
            pid = spawn(command, streams.for_child, self._limits(mark), self._oom_score, spawner)
        except BaseException:
            streams.close()
            if recorder is not None:
                recorder.undo()
            raise
        streams.close_theirs()
        return StartedProcess(pid, mark, command.cwd, streams.outputs, streams.stdin, recorder)

    async def start_through_launcher(
        self, spec: ProcessSpec, stdin: int | None = None, *, internal: bool = False
    ) -> StartedProcess:
        """Start any spec."""
        mark = new_mark()
        account = None if spec.user is None else resolve_user(spec.user)
        command = self._command(spec, mark, account)

        async def attempt(planned: SpawnCommand) -> StartedProcess:
            return await self._start_planned(spec, mark, planned, self._open(spec, account, stdin), internal)

        started = await _with_plan(lambda: self._confined(spec, command), attempt)
        return await self._found_in_jail(started) if is_jailed(spec) else started

    async def _start_planned(
        self, spec: ProcessSpec, mark: int, command: SpawnCommand, streams: _Streams, internal: bool
    ) -> StartedProcess:
        recorder, cgroup = None, None
        try:
            recorder = self._record(spec, mark, command, streams, internal)
            cgroup = self._cgroup(spec, recorder.key)
            if cgroup is not None:
                command = command._replace(cgroups=cgroup.directories)
            pid = await spawn_through_launcher(
                command, streams.for_child, self._limits(mark), self._oom_score, self.newborn
            )
        except BaseException as error:
            said = streams.last_words() if isinstance(error, JailFailed) else ""
            streams.close()
            if recorder is not None:
                recorder.undo()
            if cgroup is not None:
                cgroup.remove()
            if isinstance(error, JailFailed):
                raise JailFailed(f"confinement: {said or error}") from None
            raise
        streams.close_theirs()
        return StartedProcess(pid, mark, command.cwd, streams.outputs, streams.stdin, recorder, cgroup)

    async def spawn_helper(self, confinement: Confinement, argv: list[str], streams: StandardStreams) -> int:
        """Start a helper of the server itself, confined. Its pid is in `newborn` until the caller has reaped it."""
        environment = {"LC_ALL": "C.UTF-8"}

        async def plan() -> SpawnCommand:
            confined = await asyncio.to_thread(
                plan_launch,
                confinement,
                path=argv[0],
                argv=argv,
                environment=environment,
                cwd="/",
                as_root=os.geteuid() == 0,
                own=self.own,
            )
            return SpawnCommand(argv[0], argv, encode_variables(environment), "/", confined=confined)

        async def attempt(planned: SpawnCommand) -> int:
            return await spawn_through_launcher(planned, streams, {}, self._oom_score, self.newborn)

        pid = await _with_plan(plan, attempt)
        self.newborn.add(pid)
        return pid

    async def _found_in_jail(self, started: StartedProcess) -> StartedProcess:
        jail = ProcessJail(started.pid)
        # The process may end during the search, and has no owner until this returns.
        self.newborn.add(started.pid)
        try:
            await jail.wait_found()
        except BaseException:
            jail.close()
            started.undo()
            raise
        finally:
            self.newborn.discard(started.pid)
        return started._replace(jail=jail)

    async def _confined(self, spec: ProcessSpec, command: SpawnCommand) -> SpawnCommand:
        confinement = spec.confinement
        if confinement is None:
            return command
        variables = (os.fsdecode(variable).partition("=") for variable in command.variables)
        # On a thread: it examines some thousand files.
        confined = await asyncio.to_thread(
            plan_launch,
            confinement,
            path=command.path,
            argv=command.argv,
            environment={name: value for name, _, value in variables},
            cwd=command.cwd,
            as_root=os.geteuid() == 0,
            own=self.own,
            account=command.account,
            tty=spec.tty,
        )
        return command._replace(confined=confined)

    def _cgroup(self, spec: ProcessSpec, key: int) -> Cgroup | None:
        """Make the cgroup in which a process starts: for limits, and under Landlock, which contains no tree."""
        confinement = spec.confinement
        if confinement is None or not (confinement.limits_tree or confinement.mode == "landlock"):
            return None
        if self.cgroups is not None:
            return self.cgroups.make(confinement, key)
        if confinement.limits_tree:
            raise PermissionRefused("confinement: no cgroup can be made here, and limits of a whole tree need one")
        return None

    def _record(
        self, spec: ProcessSpec, mark: int, command: SpawnCommand, streams: _Streams, internal: bool
    ) -> ProcessRecorder:
        return self._durability.begin(spec, mark, command.cwd, streams.outputs, streams.stdin, internal=internal)

    def _command(self, spec: ProcessSpec, mark: int, account: Account | None) -> SpawnCommand:
        cwd = default_cwd(spec.confinement) if spec.cwd is None else None
        cwd = cwd or resolve_cwd(spec.cwd)
        environment = build_environment(spec, self._environ, account)
        if spec.confinement is not None:
            environment = environment_for(spec.confinement, environment)
        if not limits_can_mark():
            environment = {**environment, MARK_VARIABLE: str(mark)}
        return SpawnCommand(
            path=find_program(spec.argv[0], environment, cwd),
            argv=spec.argv if spec.arg0 is None else (spec.arg0, *spec.argv[1:]),
            variables=self._variables if environment is self._environ else encode_variables(environment),
            cwd=cwd,
            account=account,
            limits=spec.limits,
        )

    def _open(self, spec: ProcessSpec, account: Account | None, stdin: int | None) -> _Streams:
        streams = _Streams()
        try:
            if spec.tty:
                streams.open_terminal(spec.size or TerminalSize(), account)
            else:
                streams.open_pipes(self._null, stdin, pipe_stdin=spec.pipe_stdin, merge_stderr=spec.merge_stderr)
            _require_spare_descriptors(streams.highest)
        except OSError as error:
            streams.close()
            if error.errno == errno.EMFILE and self._spare():
                return self._open(spec, account, stdin)
            raise ResourceExhausted(f"cannot start {spec.argv[0]!r}: {_why_not_opened(spec, error)}") from None
        except BaseException:
            streams.close()
            raise
        return streams

    def _limits(self, mark: int) -> dict[int, int]:
        marked = {resource.RLIMIT_RTTIME: mark} if limits_can_mark() else {}
        return {**self._soft_limits, **marked}


async def _with_plan(
    plan: Callable[[], Awaitable[SpawnCommand]], attempt: Callable[[SpawnCommand], Awaitable[T]]
) -> T:
    """Start a planned command. If its jail fails and a new plan differs, a path has come or gone: that is tried."""
    planned = await plan()
    for _ in range(_MORE_PLANS):
        try:
            return await attempt(planned)
        except JailFailed:
            previous, planned = planned, await plan()
            if planned == previous:
                raise
    return await attempt(planned)


def _require_spare_descriptors(highest: int) -> None:
    """Raise EMFILE if too few descriptors are free; the kernel assigns the lowest free number."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if highest >= limit - min(SPARE_DESCRIPTORS, limit // _SPARE_FRACTION):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _why_not_opened(spec: ProcessSpec, error: OSError) -> str:
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"too many open files in the server: its limit is {limit} descriptors (RLIMIT_NOFILE), some of which "
            "are reserved for running processes; end some processes, or start the server with a higher hard limit"
        )
    if error.errno == errno.ENFILE:
        return "the machine has no descriptors left (fs.file-max)"
    if spec.tty and error.errno in (errno.ENOSPC, errno.ENOENT):
        return f"no terminal is left: {_terminals_of_the_machine()}; close some, or raise kernel.pty.max"
    return f"no {'terminal' if spec.tty else 'pipe'} can be opened: {error.strerror}"


def _terminals_of_the_machine() -> str:
    try:
        with open("/proc/sys/kernel/pty/nr") as used, open("/proc/sys/kernel/pty/max") as most:
            return f"{used.read().strip()} are open on this machine, and kernel.pty.max is {most.read().strip()}"
    except OSError:
        return "as many are open as the machine allows"
