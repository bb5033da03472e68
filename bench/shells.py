"""The same commands in other shells from PyPI: `python -m bench.shells` prints the table.

It takes minutes, because they do, so it is not part of `python -m bench`. Touches the processes that it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.metadata
import itertools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

import holdfast
from bench import report
from bench.live_shells import (
    BARE,
    BATCH,
    COMMANDS,
    MARK,
    SHELLS,
    Answer,
    Coprocess,
    asking,
    file_of_lines,
    rate_of_coprocesses,
)
from bench.measure import Samples, interleave_samples, latencies
from bench.servers import BenchmarkError
from tests.support.servers import running_server

if TYPE_CHECKING:
    from holdfast.client.shell import Shell


#: How long a peer gets: for one command of the edges, for its long output, for all its shells at once, for a turn.
EDGE_SECONDS: Final = 3.0
OUTPUT_SECONDS: Final = 60.0
AT_ONCE_SECONDS: Final = 20.0
TURN_SECONDS: Final = 1.0
MAKES: Final = ("bash", "pexpect", "pexpect-undelayed", "swe-rex", "holdfast")
TIMES_OUT: Final = "times out"


class Edge(msgspec.Struct, frozen=True):
    """A command on which session shells differ, and what bash makes of it. `MARK` is put for the peer's mark."""

    what: str
    command: str
    output: bytes = b""
    #: None: any but 0.
    exit_code: int | None = 0
    times_out: bool = False
    #: Whether the shell is to be there afterwards, with its variables.
    stays: bool = True


class Outcome(msgspec.Struct, frozen=True):
    """The result of an edge case: an answer or an error's name, and the error of the command after it."""

    answer: Answer | None
    raised: str
    after: str


EDGES: Final = (
    Edge("`exit 3`", "exit 3", exit_code=3, stays=False),
    Edge(
        "prints the tool's own mark, then goes on",
        "echo 'MARK'; sleep 1.5; echo after; (exit 7)",
        output=b"MARK\nafter\n",
        exit_code=7,
    ),
    Edge("an unbalanced quote", "echo 'oops", exit_code=None),
    Edge("`cat`, with nothing to read", "cat"),
    Edge("stderr kept out of stdout", "echo out; echo err >&2", output=b"out\n"),
    Edge("no final newline", "printf 'a\\nb'", output=b"a\nb"),
    Edge("many final newlines", "printf 'a\\n\\n\\n'", output=b"a\n\n\n"),
    Edge("a NUL", "printf 'a\\0b\\n'", output=b"a\0b\n"),
    Edge("bytes that are not UTF-8", "printf '\\xff\\xfe\\n'", output=b"\xff\xfe\n"),
    Edge("`sleep 30` with a timeout, nothing else done", "sleep 30", times_out=True),
)


class Session(Protocol):
    """One live shell of any make."""

    async def run(self, command: str, timeout: float) -> Answer:
        """`TimeoutError` when it took longer; otherwise whatever the peer raises."""
        ...

    async def close(self) -> None: ...


class Contender(msgspec.Struct, frozen=True):
    """A make of shells."""

    name: str
    open: Callable[[], Awaitable[Session]]
    #: The text in the output by which its shells detect the end of a command.
    mark: str
    #: Its calls block, so shells at once need a thread each.
    blocks: bool = False


class Ours:
    """A shell of a holdfast server, over its Unix socket."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def run(self, command: str, timeout: float) -> Answer:
        result = await self._shell.run(command, timeout=timeout)
        if result.timed_out:
            raise TimeoutError
        return Answer(result.stdout_bytes, result.exit_code)

    async def close(self) -> None:
        await self._shell.close()


class ReplWrap:
    """A shell of `pexpect.replwrap`. It has no exit codes, so each command is followed by one that prints it.

    By default it waits 50 ms before each line that it sends; the wait is switched off.
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

    async def close(self) -> None:
        self._repl.child.close(force=True)


class SweRex:
    """A bash session of swe-rex's local runtime: what its server runs in a sandbox, without the HTTP before it."""

    def __init__(self, api: Any, runtime: Any, name: str) -> None:
        self._api = api
        self._runtime = runtime
        self._name = name

    async def run(self, command: str, timeout: float) -> Answer:
        action = self._api.BashAction(command=command, session=self._name, timeout=timeout, check="silent")
        seen = await self._runtime.run_in_session(action)
        return Answer(seen.output.encode(), seen.exit_code)

    async def close(self) -> None:
        await self._runtime.close_session(self._api.CloseBashSessionRequest(session=self._name))


@contextlib.asynccontextmanager
async def contender(name: str) -> AsyncIterator[Contender]:
    """One make of shells, ready to open them. `ModuleNotFoundError` where it is not installed."""
    if name == "bash":

        async def bare() -> Session:
            return Coprocess()

        yield Contender(BARE, bare, f"{MARK} 0", blocks=True)
    elif name in ("pexpect", "pexpect-undelayed"):
        replwrap, pexpect = importlib.import_module("pexpect.replwrap"), importlib.import_module("pexpect")

        async def wrapped() -> Session:
            return ReplWrap(replwrap, pexpect, delays=name == "pexpect")

        shown = "replwrap" if name == "pexpect" else "replwrap, `delaybeforesend=None`"
        yield Contender(_versioned("pexpect", shown), wrapped, replwrap.PEXPECT_PROMPT, blocks=True)
    elif name == "swe-rex":
        # Loggers that have a handler are left as they are; the peer's own would print into the table.
        for logger in ("rex-session", "rex-runtime"):
            logging.getLogger(logger).addHandler(logging.NullHandler())
        api = importlib.import_module("swerex.runtime.abstract")
        runtime = importlib.import_module("swerex.runtime.local").LocalRuntime()
        numbers = itertools.count()

        async def session() -> Session:
            shell = SweRex(api, runtime, str(next(numbers)))
            await runtime.create_session(
                api.CreateBashSessionRequest(session=shell._name, startup_timeout=EDGE_SECONDS * 10)
            )
            return shell

        yield Contender(_versioned("swe-rex"), session, "SHELLPS1PREFIX")
    else:
        with running_server() as server:
            async with holdfast.connect(server.address("unix")) as box:

                async def ours() -> Session:
                    return Ours(await box.shell("bash"))

                yield Contender(f"holdfast {holdfast.__version__}", ours, f"{MARK} 0")


def _versioned(distribution: str, part: str = "") -> str:
    return f"{distribution} {importlib.metadata.version(distribution)} {part}".rstrip()


def difference(expected: bytes, came: bytes) -> str:
    """The fault of an output in a few words; empty when there is none."""
    if came == expected:
        return ""
    if came.replace(b"\r\n", b"\n") == expected:
        return "line ends changed"
    return f"gives `{came!r}`" if len(came) < 40 else f"{len(came):,} bytes for {len(expected):,}"


def verdict(edge: Edge, outcome: Outcome) -> str:
    """A cell of the table: "right", or all that was not."""
    answer = outcome.answer
    if answer is None:
        wrong = ["" if edge.times_out and outcome.raised == TIMES_OUT else outcome.raised]
    elif edge.times_out:
        wrong = ["does not time out"]
    else:
        code = answer.exit_code
        fits = code == edge.exit_code if edge.exit_code is not None else code not in (0, None)
        wrong = [difference(edge.output, answer.output), "" if fits else f"exit code {code}"]
    if edge.stays:
        wrong.append(outcome.after)
    return ", ".join(filter(None, wrong)) or "right"


def raised(error: Exception) -> str:
    return TIMES_OUT if isinstance(error, TimeoutError) else f"raises {type(error).__name__}"


async def compare_shells(names: Sequence[str], *, quick: bool) -> str:
    """The table as Markdown: a column a make, a row a figure or an edge."""
    table: dict[str, list[str]] = {"": [], **await _latencies(names, rounds=1 if quick else 5)}
    size = 1_000_000 if quick else 10_000_000
    with file_of_lines(size) as (path, lines):
        for name in names:
            cells = await _cells(name, 4 if quick else SHELLS, path, lines)
            for what, cell in cells.items():
                table.setdefault(what, []).append(cell)
    rows = [f"| {' | '.join([what, *row])} |" for what, row in table.items()]
    rows.insert(1, "|" + "---|" * (len(names) + 1))
    return "\n".join(rows)


async def _latencies(names: Sequence[str], rounds: int) -> dict[str, list[str]]:
    """`true` by all of them in turns."""
    async with contextlib.AsyncExitStack() as stack:
        contenders: dict[str, Samples] = {}
        for name in names:
            with contextlib.suppress(ModuleNotFoundError):
                session = await (await stack.enter_async_context(contender(name))).open()
                stack.push_async_callback(session.close)
                contenders[name] = _turn(session)
        taken = await interleave_samples(rounds, 1, contenders)
    measured = {name: latencies(samples) for name, samples in taken.items()}
    shown = {name: f"{figure.median:.3g} / {figure.p99:.3g} ms" for name, figure in measured.items()}
    if "bash" in measured:
        for name, figure in measured.items():
            shown[name] += f", {figure.median / measured['bash'].median:,.0f} x"
    return {"`true`, p50 / p99": [shown.get(name, "") for name in names]}


def _turn(session: Session) -> Samples:
    if isinstance(session, Coprocess):
        return asking(session, "true")

    async def turn() -> list[float]:
        taken: list[float] = []
        while len(taken) < BATCH and sum(taken) < TURN_SECONDS:
            began = perf_counter()
            answer = await session.run("true", OUTPUT_SECONDS)
            taken.append(perf_counter() - began)
            if answer.exit_code != 0:
                raise BenchmarkError(f"true answered {answer}")
        return taken

    return turn


async def _cells(name: str, shells: int, path: str, lines: bytes) -> dict[str, str]:
    """All but the latency of one make."""
    head = f"{len(lines) // 1_000_000} MB of lines"
    at_once = f"{shells} shells, each {COMMANDS} x `true`, at once"
    async with contextlib.AsyncExitStack() as stack:
        try:
            make = await stack.enter_async_context(contender(name))
        except ModuleNotFoundError:
            absent = dict.fromkeys((head, at_once, *(edge.what for edge in EDGES)), "")
            return {"": f"{name}: not installed", **absent}
        cells = {"": make.name, head: await _reported(_lines(make, path, lines))}
        cells[at_once] = await _reported(_at_once(make, shells))
        for edge in EDGES:
            cells[edge.what] = await _reported(_edge(make, edge))
        return cells


async def _reported(cell: Awaitable[str]) -> str:
    try:
        return await cell
    except Exception as error:  # noqa: BLE001 - the table shows any exception that a peer raises
        return raised(error)


async def _lines(make: Contender, path: str, lines: bytes) -> str:
    async with _opened(make) as (session,):
        began = perf_counter()
        answer = await session.run(f"cat {path}", OUTPUT_SECONDS)
        took = perf_counter() - began
        return f"{took:.2g} s, {difference(lines, answer.output) or 'exact'}"


async def _at_once(make: Contender, shells: int) -> str:
    async with _opened(make, shells) as sessions:
        until = perf_counter() + AT_ONCE_SECONDS

        async def work(session: Session) -> int:
            done = 0
            while done < COMMANDS and perf_counter() < until:
                await session.run("true", OUTPUT_SECONDS)
                done += 1
            return done

        began = perf_counter()
        bare = [session for session in sessions if isinstance(session, Coprocess)]
        if bare:
            return f"{rate_of_coprocesses(bare):,.0f} a second"
        if make.blocks:
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(shells) as pool:
                runs = [loop.run_in_executor(pool, asyncio.run, work(session)) for session in sessions]
                done = sum(await asyncio.gather(*runs))
        else:
            done = sum(await asyncio.gather(*map(work, sessions)))
        return f"{done / (perf_counter() - began):,.0f} a second"


async def _edge(make: Contender, edge: Edge) -> str:
    edge = msgspec.structs.replace(
        edge,
        command=edge.command.replace("MARK", make.mark),
        output=edge.output.replace(b"MARK", make.mark.encode()),
    )
    async with _opened(make) as (session,):
        await session.run("kept=yes", EDGE_SECONDS)
        answer, error, after = None, "", ""
        try:
            answer = await session.run(edge.command, EDGE_SECONDS)
        except Exception as problem:  # noqa: BLE001 - as in `_told`
            error = raised(problem)
        if edge.stays:
            try:
                following = (await session.run('echo "$kept"', EDGE_SECONDS)).output
                after = "" if following.split() == [b"yes"] else f"next command gives `{following!r}`"
            except Exception as problem:  # noqa: BLE001 - as in `_told`
                after = f"next command {raised(problem)}"
        return verdict(edge, Outcome(answer, error, after))


@contextlib.asynccontextmanager
async def _opened(make: Contender, count: int = 1) -> AsyncIterator[list[Session]]:
    async with contextlib.AsyncExitStack() as stack:
        sessions = []
        for _ in range(count):
            sessions.append(await make.open())
            stack.push_async_callback(sessions[-1].close)
        yield sessions


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.shells", description="Compare live shells.")
    parser.add_argument("--quick", action="store_true", help="less of everything: shows that it runs, not how fast")
    parser.add_argument("--only", nargs="+", choices=MAKES, default=MAKES, metavar="NAME", help=", ".join(MAKES))
    options = parser.parse_args()
    # For another terminal, bash writes escape sequences around each command, which swe-rex leaves in its output. A
    # sandbox has no terminal, so the peers are shown as they are there.
    os.environ["TERM"] = "dumb"
    machine = report.this_machine()
    table = asyncio.run(compare_shells(options.only, quick=options.quick))
    print(f"{report.facts(report.Report(machine, options.quick, 0.0, (), {}))}\n\n{table}")


if __name__ == "__main__":
    main()
