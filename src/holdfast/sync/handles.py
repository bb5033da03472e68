"""Blocking handles on processes, shells, terminals and host services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from holdfast.client import exec_remote, host_call, process, shell, terminal
from holdfast.client.collect import StreamTails
from holdfast.client.defaults import StrPath
from holdfast.errors import HoldfastError, InternalError
from holdfast.sync.facade import (
    Attribute,
    Blocking,
    Facade,
    Handle,
    LoopThread,
    ReturningHandle,
    Streaming,
    next_item,
)
from holdfast.types import (
    CommandEnded,
    ExitStatus,
    OutputChunk,
    OutputGap,
    ProcessInfo,
    ShellState,
    StdinMode,
    TerminalSize,
    TerminalState,
    TerminalStatus,
)


class Process(Handle[process.Process]):
    """`holdfast.Process`, blocking. Leaving its `with` block ends the process."""

    id = Attribute[str](process.Process.id)
    pid = Attribute[int](process.Process.pid)
    info = Attribute[ProcessInfo]()
    describe = Blocking(process.Process.describe)
    events = Streaming(process.Process.events)
    output = Streaming(process.Process.output)
    read = Blocking(process.Process.read)
    snapshot = Blocking(process.Process.snapshot)
    collect = Blocking(process.Process.collect)
    wait_for_output = Blocking(process.Process.wait_for_output)
    communicate = Blocking(process.Process.communicate)
    write = Blocking(process.Process.write)
    close_stdin = Blocking(process.Process.close_stdin)
    resize = Blocking(process.Process.resize)
    signal = Blocking(process.Process.signal)
    terminate = Blocking(process.Process.terminate)
    wait = Blocking(process.Process.wait)
    forget = Blocking(process.Process.forget)

    def on_exit(self, callback: Callable[[ExitStatus], object]) -> None:
        """Call `callback` with the exit status, in a thread of its own, when the process ends."""
        _at_exit(self._loop, self._inner, callback)


class Shell(Handle[shell.Shell]):
    """`holdfast.Shell`, blocking. Leaving its `with` block closes the shell."""

    id = Attribute[str](shell.Shell.id)
    pid = Attribute[int](shell.Shell.pid)
    cwd = Attribute[str](shell.Shell.cwd)
    state = Attribute[ShellState](shell.Shell.state)

    def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        input: str | bytes | None = None,
        stdin: StdinMode = "closed",
        on_output: Callable[[OutputChunk | OutputGap], object] | None = None,
        max_bytes: int = shell.RUN_LIMIT_BYTES,
        silence: float | None = None,
    ) -> shell.CommandResult:
        """Run a command in the live shell; see `holdfast.Shell.run`.

        `on_output` is called in the thread that called this, and the command waits for it.
        """
        if on_output is None:
            return self._loop.run(
                self._inner.run(
                    command,
                    timeout=timeout,
                    cwd=cwd,
                    env=env,
                    input=input,
                    stdin=stdin,
                    max_bytes=max_bytes,
                    silence=silence,
                )
            )
        # In the loop's thread, `on_output` could not use this sandbox, and would block all other calls.
        printed = StreamTails(max_bytes)
        with self.stream(
            command, timeout=timeout, cwd=cwd, env=env, input=input, stdin=stdin, silence=silence
        ) as events:
            for event in events:
                if isinstance(event, CommandEnded):
                    return shell.command_result(printed, event)
                printed.take(event)
                on_output(event)
        raise InternalError(f"the events of a command in shell {self.id!r} ended without its end")

    stream = Streaming(shell.Shell.stream)
    write = Blocking(shell.Shell.write)
    close_stdin = Blocking(shell.Shell.close_stdin)
    start = ReturningHandle(shell.Shell.start, Process)
    interrupt = Blocking(shell.Shell.interrupt)
    output = Streaming(shell.Shell.output)
    snapshot = Blocking(shell.Shell.snapshot)
    describe = Blocking(shell.Shell.describe)
    close = Blocking(shell.Shell.close)


class Terminal(Handle[terminal.Terminal]):
    """`holdfast.Terminal`, blocking. Leaving its `with` block closes the terminal."""

    id = Attribute[str](terminal.Terminal.id)
    pid = Attribute[int](terminal.Terminal.pid)
    size = Attribute[TerminalSize](terminal.Terminal.size)
    status = Attribute[TerminalStatus](terminal.Terminal.status)
    state = Attribute[TerminalState](terminal.Terminal.state)
    prompt = Attribute[str | None](terminal.Terminal.prompt)
    continuation = Attribute[bool](terminal.Terminal.continuation)
    awaiting_input = Attribute[bool | None](terminal.Terminal.awaiting_input)
    describe = Blocking(terminal.Terminal.describe)
    watch = Blocking(terminal.Terminal.watch)
    send = Blocking(terminal.Terminal.send)
    send_keys = Blocking(terminal.Terminal.send_keys)
    paste = Blocking(terminal.Terminal.paste)
    control = Blocking(terminal.Terminal.control)
    signal = Blocking(terminal.Terminal.signal)
    resize = Blocking(terminal.Terminal.resize)
    run = Blocking(terminal.Terminal.run)
    wait_until_idle = Blocking(terminal.Terminal.wait_until_idle)
    wait_until_awaiting_input = Blocking(terminal.Terminal.wait_until_awaiting_input)
    expect = Blocking(terminal.Terminal.expect)
    wait = Blocking(terminal.Terminal.wait)
    read = Blocking(terminal.Terminal.read)
    events = Streaming(terminal.Terminal.events)
    output = Streaming(terminal.Terminal.output)
    screen = Blocking(terminal.Terminal.screen)
    redraw = Blocking(terminal.Terminal.redraw)
    recording = Blocking(terminal.Terminal.recording)
    close = Blocking(terminal.Terminal.close)
    release = Blocking(terminal.Terminal.release)


class ExecRemoteProcess(Facade[exec_remote.ExecRemoteProcess], Iterator[exec_remote.ExecRemoteEvent]):
    """`holdfast.ExecRemoteProcess`, blocking: iterate over it once."""

    pid = Attribute[int | None](exec_remote.ExecRemoteProcess.pid)
    id = Attribute[str](exec_remote.ExecRemoteProcess.id)

    @property
    def events(self) -> ExecRemoteProcess:
        """The events, as an iterator."""
        return self

    def __next__(self) -> exec_remote.ExecRemoteEvent:
        return next_item(self._loop, self._inner)

    started = Blocking(exec_remote.ExecRemoteProcess.started)
    write_stdin = Blocking(exec_remote.ExecRemoteProcess.write_stdin)
    close_stdin = Blocking(exec_remote.ExecRemoteProcess.close_stdin)
    terminate = Blocking(exec_remote.ExecRemoteProcess.terminate)
    kill = terminate

    def on_exit(self, callback: Callable[[ExitStatus], object]) -> None:
        """Call `callback` with the exit status, in a thread of its own, when the command ends."""
        _at_exit(self._loop, self._inner, callback)


def _at_exit(
    loop: LoopThread,
    ended: process.Process | exec_remote.ExecRemoteProcess,
    callback: Callable[[ExitStatus], object],
) -> None:
    async def begin() -> None:
        ended.on_exit(lambda status: asyncio.to_thread(callback, status))

    loop.run(begin())


#: A blocking handler: it runs in a thread, and so does an iterator that it returns.
BlockingHandler = Callable[[str, bytes], bytes | Iterable[bytes]]


class HostService(Facade[host_call.HostService]):
    """`holdfast.client.host_call.HostService`, blocking."""

    name = Attribute[str]()
    instance = Attribute[str]()
    failed = Attribute[HoldfastError | None](host_call.HostService.failed)
    wait = Blocking(host_call.HostService.wait)
