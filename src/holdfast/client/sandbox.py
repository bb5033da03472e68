"""The public `Sandbox`: processes, commands, shells, terminals, ports and files behind one `ExecApi`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Self, TypeVar

import msgspec

from holdfast.client.command import check_command, kill_now, start_streaming
from holdfast.client.connection.clean_up import clean_up_cancelled
from holdfast.client.connection.connection import ClientConnection, check_loop, running_loop
from holdfast.client.defaults import Defaults, Path, StrPath, check_env, optional_path, path_text
from holdfast.client.endings import Endings
from holdfast.client.exec_remote import ExecRemoteOptions, SandboxCommands, new_id, policy_for
from holdfast.client.files.files import Progress, SandboxFiles
from holdfast.client.files.trees import Transferred, download, upload
from holdfast.client.host_call import Handler, HostService
from holdfast.client.ports.ports import PortForward, PortOffer, parse_address
from holdfast.client.process import Process
from holdfast.client.remote import RemoteExec
from holdfast.client.screen.screen import preload
from holdfast.client.shell import Shell, close_unknown
from holdfast.client.terminal import Terminal, close_unknown as close_terminal
from holdfast.errors import InvalidParams, InvalidRequest, TerminalClosed
from holdfast.exec_api import EventStream, ExecApi
from holdfast.transport.sockets import dial
from holdfast.types import (
    Confinement,
    EnvironmentInfo,
    EnvPolicy,
    Lifetime,
    Limits,
    Overflow,
    ProcessSpec,
    ServerStatus,
    ShellSpec,
    StdinMode,
    TerminalSize,
    TerminalSpec,
    UsageSample,
)

T = TypeVar("T")

#: Concurrent commands of `exec` in one sandbox; further ones wait. Far more than a sandbox has cores, and few
#: enough that a thousand calls at once do not exhaust its pids and descriptors.
MAX_CONCURRENT_EXECS: Final = 64
#: How long `terminal` waits for the first prompt: long enough for a slow profile.
PROMPT_SECONDS: Final = 10.0


class Sandbox(SandboxCommands, SandboxFiles):
    """A machine, container, pod or jail in which commands run, opened by `connect`.

    Any number of tasks of one event loop can share it.
    """

    def __init__(
        self,
        api: ExecApi,
        *,
        max_concurrent_execs: int = MAX_CONCURRENT_EXECS,
        user: str | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`user`, `cwd` and `env` are defaults of calls; see `connect`."""
        self._connected = api
        self._loop = running_loop()
        self._defaults = Defaults(user=user, cwd=cwd, env=env)
        self._exec_slots = asyncio.Semaphore(max_concurrent_execs)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._forwards: dict[int | str, PortForward] = {}

    @property
    def _api(self) -> ExecApi:
        check_loop(self._loop)
        return self._connected

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that this object belongs to."""
        if self._loop is None:
            raise InvalidRequest("this Sandbox was made without an event loop")
        return self._loop

    @property
    def api(self) -> ExecApi:
        """The underlying `ExecApi`: processes by id."""
        return self._api

    # --- processes -----------------------------------------------------------------------------------------------

    async def start(
        self,
        argv: Sequence[StrPath],
        *,
        id: str | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        arg0: str | None = None,
        tty: TerminalSize | None = None,
        stdin: StdinMode = "closed",
        user: str | None = None,
        overflow: Overflow = "follow",
        lifetime: Lifetime = "server",
        limits: Limits | None = None,
        confinement: Confinement | None = None,
        env_policy: EnvPolicy | None = None,
        exact_env: bool = False,
        merge_stderr: bool = False,
        silence: float | None = None,
    ) -> Process:
        """Start a process and return a handle; the process does not depend on the handle.

        `id` is its key for `process`; the default is a short unique id. With a `tty` size it runs on a terminal,
        which is always writable. `env` adds to the sandbox's environment, or to the part that `env_policy` leaves;
        with `exact_env` it is the whole environment. By `overflow` the process waits for readers that follow it
        (`"follow"`), for every attached reader (`"block"`), or for none (`"drop"`). `lifetime="connection"` ends it
        when this client does not reconnect. With `merge_stderr` stderr goes to stdout, in the printed order. A
        process that prints nothing for `silence` seconds is killed with all that it started.
        """
        if exact_env and (env is None or env_policy is not None):
            raise InvalidParams("exact_env: needs env, and no env_policy")
        variables = check_env(env) if exact_env else self._defaults.env(env)
        spec = ProcessSpec(
            process_id=id if id is not None else new_id(),
            argv=check_command(argv),
            cwd=self._defaults.cwd(cwd),
            env=variables,
            env_policy=None if exact_env else policy_for(variables, env_policy),
            arg0=arg0,
            tty=tty is not None,
            size=tty,
            pipe_stdin=stdin == "open",
            user=self._defaults.user(user),
            overflow=overflow,
            lifetime=lifetime,
            limits=limits,
            confinement=confinement,
            start_id=new_id(),
            merge_stderr=merge_stderr,
            silence=silence,
        )
        async with self._killing_cancelled(spec.process_id):
            return Process(self._api, await self._api.start(spec))

    @asynccontextmanager
    async def _killing_cancelled(self, process_id: str) -> AsyncIterator[None]:
        """Kill the process of a start that is cancelled: it may have started, and the caller has no handle."""
        try:
            yield
        except asyncio.CancelledError as cancelled:
            await clean_up_cancelled(self._api, kill_now(self._api, process_id), cancelled)
            raise

    async def _start_streaming(
        self, argv: Sequence[StrPath], *, cwd: StrPath | None, options: ExecRemoteOptions, tty: TerminalSize | None
    ) -> tuple[Process, EventStream]:
        """Start a process and read its events from the beginning, in one round trip."""
        spec = self._command_spec(check_command(argv), options, pipe_stdin=False)
        spec = msgspec.structs.replace(spec, cwd=self._defaults.cwd(cwd), tty=tty is not None, size=tty)
        async with self._killing_cancelled(spec.process_id):
            info, events = await start_streaming(self._api, spec)
            return Process(self._api, info), events

    async def process(self, id: str) -> Process:
        """A handle on an existing process, whichever client started it; `UnknownProcess` if there is none."""
        return Process(self._api, await self._api.describe(id))

    async def processes(self) -> list[Process]:
        """Handles on all processes: running ones, and ended ones that are still retained."""
        return [Process(self._api, info) for info in await self._api.list()]

    def ended(self) -> Endings:
        """The processes that end from this call on, as an async iterator: `async for process in box.ended()`.

        It covers processes, terminals and streamed commands of every client, but not the commands of `exec`, whose
        callers await them. `process.info` has the exit code and the reason of the end. The iteration waits for the
        next end, without polling, until it is left.
        """
        return Endings(self._api, self._spawn)

    # --- host calls ----------------------------------------------------------------------------------------------

    def offer(self, name: str, handler: Handler) -> HostService:
        """Offer a service to programs in the sandbox, for the length of an `async with` block.

        `handler` is an async function of a method's name and a body of bytes; it returns the answer, whole or as an
        async iterator of pieces. In the sandbox, `holdfast call NAME METHOD` calls it by the service's `instance`.
        """
        return HostService(self._connection("services"), name, handler)

    def _connection(self, what: str) -> ClientConnection:
        if not isinstance(self._api, RemoteExec):
            raise InvalidParams(f"{what} need a server that programs can call; 'inprocess' has none")
        return self._api.connection

    # --- ports ---------------------------------------------------------------------------------------------------

    def forward(self, port: int | str, *, local: int = 0) -> PortForward:
        """Make a port of the sandbox reachable on this machine: `async with box.forward(8000) as (host, port)`.

        `port` is a port of the sandbox's loopback, `"HOST:PORT"` as seen from the sandbox, or `"unix:/PATH"`. The
        block gets the address on this machine's loopback, at the port `local` or one that the kernel chooses.
        Connections go over the sandbox's channel, which needs no network in the sandbox; they end if it breaks.
        """
        return PortForward(self._connection("ports"), parse_address(port), local)

    async def url(self, port: int | str) -> str:
        """The URL on this machine of an HTTP server at `port` in the sandbox, until this object is closed."""
        forward = self._forwards.get(port)
        if forward is None:
            forward = self._forwards[port] = self.forward(port)
            try:
                await forward.start()
            except BaseException:
                del self._forwards[port]
                raise
        return f"http://{forward.address}"

    def offer_port(self, port: int | str, inside: int | str | None = None) -> PortOffer:
        """Make a port of this machine reachable in the sandbox: `async with box.offer_port(5432) as (host, port)`.

        `port` is a port of this machine's loopback, `"HOST:PORT"` as seen from this machine, or `"unix:/PATH"`.
        `inside` is where the sandbox's programs connect: a port of the sandbox's loopback (0: any) or
        `"unix:/PATH"`; the default is the same port. The block gets the address inside.
        """
        target = parse_address(port)
        chosen = parse_address(target.port or str(target) if inside is None else inside, listens=True)
        return PortOffer(self._connection("ports"), chosen, lambda: dial(target))

    # --- shells --------------------------------------------------------------------------------------------------

    async def shell(
        self,
        shell: StrPath | None = None,
        *,
        id: str | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        login: bool = False,
        lifetime: Lifetime = "server",
        limits: Limits | None = None,
        confinement: Confinement | None = None,
        env_policy: EnvPolicy | None = None,
    ) -> Shell:
        """Start a live shell whose state persists from command to command.

        `shell` is the name or path of bash, zsh or any POSIX shell; the default is bash, or sh where bash is
        missing. `id` is its key for `attach_shell`. `env` adds to the sandbox's environment. `login` reads
        the profile files. `lifetime="connection"` closes it when this client does not reconnect.
        """
        variables = self._defaults.env(env)
        spec = ShellSpec(
            shell_id=id if id is not None else new_id(),
            shell=optional_path(shell, "shell"),
            cwd=self._defaults.cwd(cwd),
            env=variables,
            env_policy=policy_for(variables, env_policy),
            user=self._defaults.user(user),
            login=login,
            lifetime=lifetime,
            limits=limits,
            confinement=confinement,
            start_id=new_id(),
        )
        try:
            return Shell(self._api, await self._api.open_shell(spec))
        except asyncio.CancelledError as cancelled:
            await clean_up_cancelled(self._api, close_unknown(self._api, spec.shell_id), cancelled)
            raise

    async def attach_shell(self, id: str) -> Shell:
        """A handle on an existing shell, whichever client started it; `UnknownShell` if there is none."""
        return Shell(self._api, await self._api.describe_shell(id))

    #: An older name of `attach_shell`. `ExecApi.open_shell` starts a shell.
    open_shell = attach_shell

    async def shells(self) -> list[Shell]:
        """Handles on all shells: open ones, and the last ones that closed."""
        return [Shell(self._api, status) for status in await self._api.list_shells()]

    # --- terminals -----------------------------------------------------------------------------------------------

    async def terminal(
        self,
        command: StrPath | Sequence[StrPath] | None = None,
        *,
        id: str | None = None,
        rows: int = 24,
        cols: int = 80,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        term: str = "xterm-256color",
        locale: str | None = None,
        login: bool = True,
        integration: bool = True,
        record_input: bool = False,
        lifetime: Lifetime = "server",
        limits: Limits | None = None,
        confinement: Confinement | None = None,
        env_policy: EnvPolicy | None = None,
        ready_timeout: float = PROMPT_SECONDS,
    ) -> Terminal:
        """Open a terminal with an interactive shell in it, or the program `command`.

        Without a command it is `/bin/bash --login`, or sh where bash is missing; a str or a path object is a shell
        by name or path, a list a program with its arguments. bash and zsh mark their prompts (unless
        `integration=False`), which shows when a command has ended; this call returns once the first prompt is
        shown, or after `ready_timeout` seconds in any case. `env` adds to the sandbox's environment. `id` is its
        key for `attach_terminal`, and a process id, too.
        """
        variables = self._defaults.env(env)
        spec = TerminalSpec(
            terminal_id=id if id is not None else new_id(),
            argv=_terminal_argv(command),
            size=TerminalSize(rows, cols),
            cwd=self._defaults.cwd(cwd),
            env=variables,
            env_policy=policy_for(variables, env_policy),
            user=self._defaults.user(user),
            term=term,
            locale=locale,
            login=login,
            integration=integration,
            record_input=record_input,
            lifetime=lifetime,
            limits=limits,
            confinement=confinement,
            start_id=new_id(),
        )
        try:
            status = await self._api.open_terminal(spec)
            # Loads the emulator in the background, before the first `screen()`.
            self._spawn(asyncio.to_thread(preload))
            if status.integration:
                with suppress(TerminalClosed):  # its profile ended it, which the status shows
                    _, status = await self._api.wait_terminal(status.terminal_id, "idle", timeout=ready_timeout)
        except asyncio.CancelledError as cancelled:
            await clean_up_cancelled(self._api, close_terminal(self._api, spec.terminal_id), cancelled)
            raise
        return Terminal(self._api, status, self._spawn)

    async def attach_terminal(self, id: str) -> Terminal:
        """A handle on an existing terminal, whichever client opened it; `UnknownTerminal` if there is none."""
        return Terminal(self._api, await self._api.describe_terminal(id), self._spawn)

    #: An older name of `attach_terminal`. `ExecApi.open_terminal` opens a new one.
    open_terminal = attach_terminal

    async def terminals(self) -> list[Terminal]:
        """Handles on all terminals: open ones, and closed ones that are still retained."""
        return [Terminal(self._api, status, self._spawn) for status in await self._api.list_terminals()]

    # --- files: the others are in `SandboxFiles` ------------------------------------------------------------------

    async def upload(
        self, local: Path, remote: Path, *, user: str | None = None, progress: Progress | None = None
    ) -> Transferred:
        """Copy a local file or tree to the path `remote`; a tree is merged into an existing directory.

        Modes, times, symbolic links and empty directories are copied; devices, sockets and FIFOs are skipped and
        listed. `progress` is called with the bytes so far and the total.
        """
        ends = path_text(local), self._defaults.path(remote)
        return await upload(self._api.files, *ends, user=self._defaults.user(user), progress=progress)

    async def download(
        self, remote: Path, local: Path, *, user: str | None = None, progress: Progress | None = None
    ) -> Transferred:
        """Copy a file or tree of the sandbox to the path `local`, as `upload` does in the other direction.

        Nothing is written outside `local`, whatever the sandbox sends: links that lead out of the tree are skipped
        and listed, and setuid bits are dropped.
        """
        ends = self._defaults.path(remote), path_text(local)
        return await download(self._api.files, *ends, user=self._defaults.user(user), progress=progress)

    # --- the sandbox itself --------------------------------------------------------------------------------------

    async def wait_for_port(self, port: int, timeout: float = 30.0, *, host: str = "127.0.0.1") -> None:
        """Wait until a program in the sandbox accepts connections on `port`; `TimeoutError` otherwise."""
        await self._api.wait_for_port(port, host=host, timeout=timeout)

    async def info(self) -> EnvironmentInfo:
        """The sandbox's environment: shell, user, directories, platform and features."""
        return await self._api.info()

    async def status(self) -> ServerStatus:
        """The status of the sandbox's server."""
        return await self._api.status()

    async def usage(self, ids: Sequence[str], *, members: bool = False) -> UsageSample:
        """The resources that processes, terminals and shells use, with all that they started, in one sample."""
        return await self._api.usage(ids, members=members)

    async def aclose(self) -> None:
        """Close the connection to the sandbox. Processes with `lifetime="server"` continue."""
        check_loop(self._loop)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for forward in self._forwards.values():
            await forward.aclose()
        await self._api.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _terminal_argv(command: StrPath | Sequence[StrPath] | None) -> tuple[str, ...] | None:
    if command is None or isinstance(command, str):
        return None if command is None else (command,)
    return (path_text(command, "command"),) if isinstance(command, os.PathLike) else check_command(command)
