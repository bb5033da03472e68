"""Session shells of every make behind one interface, for `bench.shell_program`.

A make is a library, a program or a server of others, or ours. Its packages are imported only when it is opened, so
the module can be imported in the environment of each. Touches the processes that it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import itertools
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

import holdfast
from bench.live_shells import BARE, MARK, Answer, Coprocess
from bench.servers import memory_bytes, processes_where
from holdfast.launch.pidfd_signals import signal_process
from tests.support.servers import RunningServer, running_server

if TYPE_CHECKING:
    from holdfast.client.sandbox import Sandbox
    from holdfast.client.shell import Shell
    from holdfast.client.terminal import Terminal

#: Longer than any peer takes to open a session, or to answer an input; it only turns a hang into a failure.
PATIENCE_SECONDS: Final = 60.0
#: Between two looks at a screen, so that a thread that reads the terminal gets the interpreter's lock.
LOOK_SECONDS: Final = 0.001
#: Columns and rows of a tmux window.
SIZE: Final = ("80", "24")


class MissingPeer(Exception):
    """A make is not installed; the text names the missing part."""


class Session(Protocol):
    """One live shell of any make."""

    async def run(self, command: str, timeout: float) -> Answer:
        """`TimeoutError` when it took longer; otherwise whatever the peer raises."""
        ...

    async def begin(self, command: str) -> None:
        """Start a command that does not end by itself, and do not wait for it."""
        ...

    async def echo(self, text: str) -> None:
        """Type a line to the command that was begun, `cat`, and return when the text has come back."""
        ...

    async def close(self) -> None: ...


class Make(msgspec.Struct, frozen=True):
    """A make of shells that is ready to open them."""

    name: str
    open: Callable[[], Awaitable[Session]]
    #: The text in the output by which its shells detect the end of a command.
    mark: str
    #: Pids of the programs that hold its sessions, apart from this one.
    servers: Callable[[], Sequence[int]] = list
    #: The sessions are held by this program.
    is_library: bool = True
    #: Its calls block, so shells at once need a thread each.
    blocks: bool = False

    def memory(self) -> int:
        """Resident memory of all programs that hold its sessions, without the shells."""
        return sum(memory_bytes(pid) for pid in [*self.servers(), *([os.getpid()] if self.is_library else [])])


# --- ours ------------------------------------------------------------------------------------------------------


class OurShell:
    """A shell of a holdfast server, over its Unix socket."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._printed: asyncio.Queue[bytes] = asyncio.Queue()
        self._running: asyncio.Task[Any] | None = None

    async def run(self, command: str, timeout: float) -> Answer:
        result = await self._shell.run(command, timeout=timeout)
        if result.timed_out:
            raise TimeoutError
        return Answer(result.stdout_bytes, result.exit_code)

    async def begin(self, command: str) -> None:
        def printed(event: Any) -> None:
            self._printed.put_nowait(event.data)

        self._running = asyncio.create_task(self._shell.run(command, stdin="open", on_output=printed))
        # `write` is possible once the request is sent.
        await asyncio.sleep(0.1)

    async def echo(self, text: str) -> None:
        await self._shell.write(f"{text}\n")
        seen = b""
        while text.encode() not in seen:
            seen += await self._printed.get()

    async def close(self) -> None:
        await self._shell.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)


class OurTerminal:
    """A terminal of a holdfast server, over its Unix socket."""

    def __init__(self, box: Sandbox, terminal: Terminal) -> None:
        self._terminal = terminal
        self._events = box.api.events(terminal.id)

    async def run(self, command: str, timeout: float) -> Answer:
        result = await self._terminal.run(command, timeout, max_bytes=2**30)
        if result.timed_out:
            raise TimeoutError
        return Answer(result.output_bytes, result.exit_code)

    async def begin(self, command: str) -> None:
        await self._terminal.send(f"{command}\r")

    async def echo(self, text: str) -> None:
        await self._terminal.send(f"{text}\r")
        seen = b""
        while text.encode() not in seen:
            event = await anext(self._events)
            seen += getattr(event, "data", b"")

    async def close(self) -> None:
        await self._events.aclose()
        await self._terminal.close("force")


def _our_programs(server: RunningServer) -> list[int]:
    """The server and its keeper."""
    return sorted({server.pid, server.process.pid})


@contextlib.asynccontextmanager
async def our_shells() -> AsyncIterator[Make]:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:

            async def shell() -> Session:
                return OurShell(await box.shell("bash"))

            name = f"holdfast {holdfast.__version__}, shell"
            yield Make(name, shell, f"{MARK} 0", lambda: _our_programs(server), is_library=False)


@contextlib.asynccontextmanager
async def our_terminals() -> AsyncIterator[Make]:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:

            async def terminal() -> Session:
                return OurTerminal(box, await box.terminal())

            name = f"holdfast {holdfast.__version__}, terminal"
            yield Make(name, terminal, f"{MARK} 0", lambda: _our_programs(server), is_library=False)


# --- the others ------------------------------------------------------------------------------------------------


class PipedBash(Coprocess):
    """A bash on pipes."""

    async def begin(self, command: str) -> None:
        self.send(f"{command}\n")

    async def echo(self, text: str) -> None:
        self.send(f"{text}\n")
        while text.encode() not in self.line():
            pass


@contextlib.asynccontextmanager
async def bare_bash() -> AsyncIterator[Make]:
    async def bash() -> Session:
        return PipedBash()

    yield Make(BARE, bash, f"{MARK} 0", blocks=True)


class ReplWrap:
    """A shell of `pexpect.replwrap`. It has no exit codes, so each command is followed by one that prints it.

    By default it waits 50 ms before each line that it sends; the wait is switched off unless it `delays`.
    """

    def __init__(self, replwrap: Any, pexpect: Any, *, delays: bool) -> None:
        self._repl = replwrap.bash()
        if not delays:
            self._repl.child.delaybeforesend = None
        self._timed_out = pexpect.TIMEOUT

    async def run(self, command: str, timeout: float) -> Answer:
        try:
            output = self._repl.run_command(command, timeout=timeout)
            status = self._repl.run_command("echo $?", timeout=timeout)
        except self._timed_out:
            raise TimeoutError from None
        return Answer(output.encode(), int(status) if status.strip().isdecimal() else None)

    async def begin(self, command: str) -> None:
        self._repl.child.sendline(command)

    async def echo(self, text: str) -> None:
        self._repl.child.sendline(text)
        self._repl.child.expect_exact(text, timeout=PATIENCE_SECONDS)

    async def close(self) -> None:
        self._repl.child.close(force=True)


def pexpect_shells(*, delays: bool) -> Callable[[], contextlib.AbstractAsyncContextManager[Make]]:
    @contextlib.asynccontextmanager
    async def shells() -> AsyncIterator[Make]:
        replwrap, pexpect = _imported("pexpect.replwrap"), _imported("pexpect")

        async def shell() -> Session:
            return ReplWrap(replwrap, pexpect, delays=delays)

        shown = "replwrap" if delays else "replwrap, `delaybeforesend=None`"
        yield Make(_versioned("pexpect", shown), shell, replwrap.PEXPECT_PROMPT, blocks=True)

    return shells


class SweRex:
    """A bash session of swe-rex's local runtime: what its server runs in a sandbox, without the HTTP before it."""

    def __init__(self, api: Any, runtime: Any, name: str) -> None:
        self._api = api
        self._runtime = runtime
        self.name = name

    async def run(self, command: str, timeout: float) -> Answer:
        action = self._api.BashAction(command=command, session=self.name, timeout=timeout, check="silent")
        seen = await self._runtime.run_in_session(action)
        return Answer(seen.output.encode(), seen.exit_code)

    async def begin(self, command: str) -> None:
        await self._interact(f"echo begins; {command}", "begins")

    async def echo(self, text: str) -> None:
        await self._interact(text, text)

    async def _interact(self, line: str, expected: str) -> None:
        action = self._api.BashAction(
            command=line,
            session=self.name,
            timeout=PATIENCE_SECONDS,
            is_interactive_command=True,
            expect=[expected],
        )
        await self._runtime.run_in_session(action)

    async def close(self) -> None:
        await self._runtime.close_session(self._api.CloseBashSessionRequest(session=self.name))


@contextlib.asynccontextmanager
async def swe_rex() -> AsyncIterator[Make]:
    # Loggers that have a handler are left as they are; the peer's own would print each command.
    for logger in ("rex-session", "rex-runtime"):
        logging.getLogger(logger).addHandler(logging.NullHandler())
    api = _imported("swerex.runtime.abstract")
    runtime = _imported("swerex.runtime.local").LocalRuntime()
    numbers = itertools.count()

    async def session() -> Session:
        shell = SweRex(api, runtime, str(next(numbers)))
        request = api.CreateBashSessionRequest(session=shell.name, startup_timeout=PATIENCE_SECONDS)
        await runtime.create_session(request)
        return shell

    yield Make(_versioned("swe-rex"), session, "SHELLPS1PREFIX")


class OpenHands:
    """A session of OpenHands' terminal tool: the part below its executor, which adds secrets and truncation."""

    def __init__(self, session: Any, action: Any) -> None:
        self._session = session
        self._action = action

    async def run(self, command: str, timeout: float) -> Answer:
        seen = self._session.execute(self._action(command=command, timeout=timeout))
        if seen.exit_code == -1:
            raise TimeoutError
        return Answer(seen.text.encode(), seen.exit_code)

    async def begin(self, command: str) -> None:
        self._session.terminal.send_keys(command)

    async def echo(self, text: str) -> None:
        # The tool returns from an input when the program has ended, or was silent for seconds: its parts do not.
        self._session.terminal.send_keys(text)
        while text not in self._session.terminal.read_screen():  # noqa: ASYNC110 - it has no events
            await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        self._session.close()


def openhands(kind: str) -> Callable[[], contextlib.AbstractAsyncContextManager[Make]]:
    """OpenHands' terminal tool on tmux, its default where tmux is installed, or on a PTY of its own."""

    @contextlib.asynccontextmanager
    async def sessions() -> AsyncIterator[Make]:
        if kind == "tmux" and shutil.which("tmux") is None:
            raise MissingPeer("tmux is not installed")
        # Neither greetings nor a request to the network at import.
        quiet = {"LOG_LEVEL": "ERROR", "OPENHANDS_SUPPRESS_BANNER": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        os.environ.update(quiet)
        factory = _imported("openhands.tools.terminal.terminal.factory")
        action = _imported("openhands.tools.terminal.definition").TerminalAction

        async def session() -> Session:
            made = factory.create_terminal_session(work_dir="/tmp", terminal_type=kind)
            made.initialize()
            return OpenHands(made, action)

        # A tmux server is a daemon; this one has its sockets in a directory of its own.
        with tempfile.TemporaryDirectory(prefix="hf-tmux-") as directory:
            os.environ["TMUX_TMPDIR"] = directory
            yield Make(
                _versioned("openhands-tools", "tmux" if kind == "tmux" else "PTY"),
                session,
                "###PS1END###",
                lambda: _programs_with("tmux", "TMUX_TMPDIR"),
                blocks=True,
            )

    return sessions


class Tmux:
    """A session of a tmux server, driven by commands as other harnesses do.

    tmux has neither exit codes nor an end of a command, so the typed line prints the one and signals the other.
    """

    def __init__(self, call: Callable[..., str], name: str) -> None:
        self._call = call
        self._name = name
        call("new-session", "-d", "-s", name, "-x", SIZE[0], "-y", SIZE[1], "bash --norc -i")

    async def run(self, command: str, timeout: float) -> Answer:
        mark = f"{MARK}-{secrets.token_hex(4)}"
        typed = f"{command}; echo {mark} $?; tmux wait-for -S {mark}"
        self._call("clear-history", "-t", self._name)
        self._call("send-keys", "-t", self._name, "-l", f"{typed}\n")
        try:
            self._call("wait-for", mark, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        # The pane has the output some time after the shell has printed it.
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            shown = self._call("capture-pane", "-p", "-J", "-S", "-", "-t", self._name)
            if found := re.search(rf"^{mark} (\d+)", shown, re.MULTILINE):
                # Everything after the echo of the typed line, which a long output has scrolled away.
                printed = shown[: found.start()].rpartition(typed)[2].lstrip(" ")
                return Answer(printed.removeprefix("\n").encode(), int(found[1]))
        raise TimeoutError

    async def begin(self, command: str) -> None:
        self._call("send-keys", "-t", self._name, "-l", f"{command}\n")

    async def echo(self, text: str) -> None:
        self._call("send-keys", "-t", self._name, "-l", f"{text}\n")
        while text not in self._call("capture-pane", "-p", "-t", self._name):
            pass

    async def close(self) -> None:
        self._call("kill-session", "-t", self._name)


@contextlib.asynccontextmanager
async def tmux() -> AsyncIterator[Make]:
    if shutil.which("tmux") is None:
        raise MissingPeer("tmux is not installed")
    with tempfile.TemporaryDirectory(prefix="hf-tmux-") as directory:
        program = ("tmux", "-S", os.path.join(directory, "socket"), "-f", "/dev/null")
        environment = {**os.environ, "HOME": directory, "TERM": "xterm-256color"}

        def call(*arguments: str, timeout: float = PATIENCE_SECONDS) -> str:
            done = subprocess.run(
                [*program, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                timeout=timeout,
            )
            return done.stdout

        numbers = itertools.count()

        async def session() -> Session:
            return Tmux(call, f"bench-{next(numbers)}")

        # The server ends with its last session.
        call("new-session", "-d", "-s", "first", "sleep infinity")
        server = int(call("display-message", "-p", "#{pid}"))
        try:
            yield Make(call("-V").strip(), session, MARK, lambda: [server], is_library=False, blocks=True)
        finally:
            call("kill-server")


class InspectRemote:
    """`exec_remote` of a local sandbox of Inspect. It has no sessions: each command is a shell of its own."""

    def __init__(self, made: dict[str, Any], provider: Any, api: Any) -> None:
        self._made = made
        self._provider = provider
        self._api = api
        self._box = api.SandboxEnvironmentProxy(made["default"])
        self._process: Any = None

    async def run(self, command: str, timeout: float) -> Answer:
        async with asyncio.timeout(timeout):
            seen = await self._box.exec_remote(["bash", "-c", command], stream=False)
        return Answer(seen.stdout.encode(), seen.returncode)

    async def begin(self, command: str) -> None:
        options = self._api.ExecRemoteStreamingOptions(stdin_open=True)
        self._process = await self._box.exec_remote(["bash", "-c", command], options)

    async def echo(self, text: str) -> None:
        await self._process.write_stdin(f"{text}\n")
        seen = ""
        while text not in seen:
            seen += getattr(await anext(self._process), "data", "")

    async def close(self) -> None:
        if self._process is not None:
            await self._process.kill()
        await self._provider.sample_cleanup("bench", None, self._made, False)


@contextlib.asynccontextmanager
async def inspect_remote() -> AsyncIterator[Make]:
    provider = _imported("inspect_ai.util._sandbox.local").LocalSandboxEnvironment
    remote = _imported("inspect_ai.util._sandbox.exec_remote")
    # The two names that a session needs.
    remote.SandboxEnvironmentProxy = _imported("inspect_ai.util._sandbox.events").SandboxEnvironmentProxy
    tools = _imported("inspect_ai.util._sandbox._cli").SANDBOX_TOOLS_DIR
    installed = os.path.exists(tools)  # noqa: ASYNC240 - nothing else runs here

    def servers() -> list[int]:
        return _programs_with("inspect-sandbox-tools", "HOME")

    async def sandbox() -> Session:
        return InspectRemote(await provider.sample_init("bench", None, {}), provider, remote)

    await provider.task_init("bench", None)
    try:
        yield Make(_versioned("inspect-ai", "`exec_remote`, local"), sandbox, MARK, servers)
    finally:
        await provider.task_cleanup("bench", None, True)
        # Its server stays when the sandbox is gone.
        for pid in servers():
            signal_process(pid, signal.SIGKILL, lambda each: each in servers())
        # Inspect installs its tools on this machine for every local sandbox.
        if not installed:
            shutil.rmtree(tools, ignore_errors=True)


MAKES: Final[dict[str, Callable[[], contextlib.AbstractAsyncContextManager[Make]]]] = {
    "bash": bare_bash,
    "pexpect": pexpect_shells(delays=True),
    "pexpect-undelayed": pexpect_shells(delays=False),
    "swe-rex": swe_rex,
    "openhands": openhands("tmux"),
    "openhands-pty": openhands("subprocess"),
    "tmux": tmux,
    "inspect": inspect_remote,
    "holdfast": our_shells,
    "holdfast-terminal": our_terminals,
}


def _programs_with(name: str, variable: str) -> list[int]:
    """Programs of this name that inherited a variable of this one, so are not those of another run."""
    inherited = f"{variable}={os.environ[variable]}".encode()

    def is_one(pid: int) -> bool:
        if os.path.basename(os.readlink(f"/proc/{pid}/exe")) != name:
            return False
        return inherited in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")

    return processes_where(is_one)


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPeer(f"no module {error.name}") from None


def _versioned(distribution: str, part: str = "") -> str:
    return f"{distribution} {importlib.metadata.version(distribution)} {part}".rstrip()
