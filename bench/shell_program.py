"""`python -m bench.shell_program MAKE`: measures one make of session shells, at the requests of `bench.shells`.

Each make runs in a program of its own, by the interpreter of its environment, so that its memory and its packages
are its own. A request is a line of JSON on stdin and its reply a line on stdout: `{"do": "true", "count": 20}` and
`{"result": [0.0006, ...]}`, or `{"raised": "times out"}`. Latencies are taken here, in seconds. The first line is
the make's name with its version, or the part that is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, Final

import msgspec

from bench.live_shells import COMMANDS, Answer, Coprocess, rate_of_coprocesses
from bench.servers import TREE, TREE_SIZE, BenchmarkError, memory_bytes, sleepers, tree_mark
from bench.shell_edges import EDGES, Edge, Outcome, difference, raised, verdict
from bench.shell_sessions import MAKES, Make, MissingPeer, Session

#: How long a peer gets: for one command of the edges, for its long output, for all its shells at once.
EDGE_SECONDS: Final = 3.0
OUTPUT_SECONDS: Final = 60.0
AT_ONCE_SECONDS: Final = 20.0
#: Turns of the shells at once, fewer if they take longer than that.
AT_ONCE_TURNS: Final = 5
#: A turn of latencies ends early after so long.
TURN_SECONDS: Final = 1.0
START_SECONDS: Final = 3.0
#: For whatever a peer does when it is to end a tree.
TREE_SECONDS: Final = 1.0


class Program:
    """The operations that a request may name, of one make."""

    def __init__(self, make: Make, stack: contextlib.AsyncExitStack, floor: int) -> None:
        self._make = make
        self._stack = stack
        #: What this program had before it loaded the make.
        self._floor = floor if make.is_library else 0
        self._session: Session | None = None
        self._typing: Session | None = None
        self._texts = (f"k{number}x" for number in itertools.count(100_000))

    async def start(self, count: int) -> list[float]:
        """A new session until `true` has ended in it."""
        taken: list[float] = []
        while len(taken) < count and sum(taken) < START_SECONDS:
            began = perf_counter()
            session = await self._make.open()
            await run_true(session)
            taken.append(perf_counter() - began)
            await session.close()
        return taken

    async def true(self, count: int) -> list[float]:
        """`true` in one session, again and again."""
        if self._session is None:
            self._session = await self._kept()
        taken: list[float] = []
        while len(taken) < count and sum(taken) < TURN_SECONDS:
            began = perf_counter()
            await run_true(self._session)
            taken.append(perf_counter() - began)
        return taken

    async def echo(self, count: int) -> list[float]:
        """A line typed to a running `cat`, until it has come back."""
        if self._typing is None:
            self._typing = await self._kept()
            await self._typing.begin("cat")
            await self._echoed(self._typing)
        taken: list[float] = []
        while len(taken) < count and sum(taken) < TURN_SECONDS:
            taken.append(await self._echoed(self._typing))
        return taken

    async def _echoed(self, session: Session) -> float:
        text = next(self._texts)
        began = perf_counter()
        async with asyncio.timeout(OUTPUT_SECONDS):
            await session.echo(text)
        return perf_counter() - began

    async def _kept(self) -> Session:
        session = await self._make.open()
        self._stack.push_async_callback(session.close)
        return session

    async def many(self, shells: int) -> dict[str, float]:
        """Commands a second of many sessions; memory with one session, and for each further one."""
        async with self._opened(1) as (first,):
            await run_true(first)
            one = self._make.memory()
            async with self._opened(shells - 1) as others:
                for session in others:
                    await run_true(session)
                each = (self._make.memory() - one) / (shells - 1)
                rates: list[float] = []
                until = perf_counter() + AT_ONCE_SECONDS
                while len(rates) < AT_ONCE_TURNS and perf_counter() < until:
                    rates.append(await self._rate([first, *others]))
        return {"rate": statistics.median(rates), "one": one - self._floor, "each": each}

    async def _rate(self, sessions: list[Session]) -> float:
        bare = [session for session in sessions if isinstance(session, Coprocess)]
        if bare:
            return rate_of_coprocesses(bare)
        until = perf_counter() + AT_ONCE_SECONDS

        async def work(session: Session) -> int:
            done = 0
            while done < COMMANDS and perf_counter() < until:
                await run_true(session)
                done += 1
            return done

        began = perf_counter()
        if self._make.blocks:
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(len(sessions)) as pool:
                runs = [loop.run_in_executor(pool, asyncio.run, work(session)) for session in sessions]
                done = sum(await asyncio.gather(*runs))
        else:
            done = sum(await asyncio.gather(*map(work, sessions)))
        return done / (perf_counter() - began)

    async def stream(self, path: str) -> dict[str, Any]:
        """The lines of a file, and what is wrong with them."""
        lines = _contents(path)
        async with self._opened(1) as (session,):
            began = perf_counter()
            answer = await session.run(f"cat {path}", OUTPUT_SECONDS)
            return {"seconds": perf_counter() - began, "fault": difference(lines, answer.output)}

    async def kill(self) -> dict[str, float]:
        """The close of a session while a tree runs in it, and the processes of the tree that are left."""
        mark = tree_mark()
        try:
            async with self._opened(1, closes=False) as (session,):
                await session.begin(TREE.format(mark=mark))
                async with asyncio.timeout(OUTPUT_SECONDS):
                    while sleepers(mark) < TREE_SIZE:  # noqa: ASYNC110 - no event reports a start
                        await asyncio.sleep(0.01)
                began = perf_counter()
                await session.close()
                took = perf_counter() - began
            await asyncio.sleep(TREE_SECONDS)
        finally:
            left = sleepers(mark, end=True)
        return {"seconds": took, "left": left}

    async def edge(self, number: int) -> str:
        """The verdict on one of `EDGES`, in a new session."""
        edge = _with_mark(EDGES[number], self._make.mark)
        async with self._opened(1) as (session,):
            await session.run("kept=yes", EDGE_SECONDS)
            answer, error, after = None, "", ""
            try:
                answer = await session.run(edge.command, EDGE_SECONDS)
            except Exception as problem:  # noqa: BLE001 - the table shows any exception that a peer raises
                error = raised(problem)
            if edge.stays:
                try:
                    following = (await session.run('echo "$kept"', EDGE_SECONDS)).output
                    after = "" if following.split() == [b"yes"] else f"next command gives `{following!r}`"
                except Exception as problem:  # noqa: BLE001 - as above
                    after = f"next command {raised(problem)}"
            return verdict(edge, Outcome(answer, error, after))

    @contextlib.asynccontextmanager
    async def _opened(self, count: int, *, closes: bool = True) -> AsyncIterator[list[Session]]:
        async with contextlib.AsyncExitStack() as stack:
            sessions = []
            for _ in range(count):
                sessions.append(await self._make.open())
                if closes:
                    stack.push_async_callback(sessions[-1].close)
            yield sessions


async def run_true(session: Session) -> None:
    answer: Answer = await session.run("true", OUTPUT_SECONDS)
    if answer.exit_code != 0:
        raise BenchmarkError(f"true answered {answer}")


def _contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _with_mark(edge: Edge, mark: str) -> Edge:
    command = edge.command.replace("MARK", mark)
    return msgspec.structs.replace(edge, command=command, output=edge.output.replace(b"MARK", mark.encode()))


async def serve(name: str, reply: Callable[[object], None]) -> None:
    floor = memory_bytes(os.getpid())
    async with contextlib.AsyncExitStack() as stack:
        try:
            make = await stack.enter_async_context(MAKES[name]())
        except MissingPeer as missing:
            reply({"missing": str(missing)})
            return
        reply({"name": make.name})
        program = Program(make, stack, floor)
        # In a thread, so that the event loop answers a server meanwhile.
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            operation: Callable[..., Awaitable[object]] = getattr(program, request.pop("do"))
            try:
                reply({"result": await operation(**request)})
            except Exception as error:  # noqa: BLE001 - the table shows any exception that a peer raises
                sys.stderr.write(f"{name}: {operation.__name__}: {error!r}\n")
                reply({"raised": raised(error)})


def main() -> None:
    # For another terminal, bash writes escape sequences around each command, which swe-rex leaves in its output. A
    # sandbox has no terminal, so the peers are shown as they are there.
    os.environ["TERM"] = "dumb"
    # Peers print on stdout; replies have a descriptor of their own.
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)

        def reply(message: object) -> None:
            replies.write(json.dumps(message) + "\n")
            replies.flush()

        asyncio.run(serve(sys.argv[1], reply))


if __name__ == "__main__":
    main()
