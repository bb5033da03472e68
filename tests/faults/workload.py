"""What runs while faults are thrown: jobs whose output, input and exit code are known from their seed alone.

Each job is a coroutine that uses the public client and raises `Broken` for what must not be. Output is cut from one
file of random bytes, so that every byte is known and no two places look alike. Starts processes, through a server.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

import holdfast
from holdfast.client.process import Process
from holdfast.client.sandbox import Sandbox
from holdfast.client.shell import Shell
from holdfast.client.terminal import Terminal
from holdfast.errors import HoldfastError, ResourceExhausted, ShellClosed
from holdfast.model import ExitStatus, OutputChunk, OutputGap, TerminalSize
from holdfast.runtime.signals import signal_name
from holdfast.testing.servers import Conversation, conversation, is_alive

from .checking import Broken, Following, compare, same

#: Whether live shells outlive a server that is killed. Until they do, one may say that the server was restarted.
SHELLS_SURVIVE: Final = False
#: A command that was being typed into a terminal when the server died says so, and is read in the terminal.
RUNS_SURVIVE: Final = False

#: A line that is awaited comes at once, or after the server's return.
LOST_LINE_SECONDS: Final = 30.0
BLOB_BYTES: Final = 4 * 1024 * 1024
#: `o FROM COUNT` prints a part of the blob, whose path is the script's $0.
PRELUDE: Final = 'o() { dd if="$0" iflag=skip_bytes,count_bytes skip=$1 count=$2 bs=64k status=none; }; '


class Place:
    """Where one job runs: its random numbers, its way to the server, and what has happened around it."""

    def __init__(
        self,
        name: str,
        rng: random.Random,
        box: Sandbox,
        address: str,
        blob: tuple[str, bytes],
        troubles: Callable[[], tuple[int, int]],
        *,
        keeps_little: bool = False,
    ) -> None:
        self.name = name
        self.rng = rng
        self.box = box
        #: A way to the server through which faults may come, for a connection of its own.
        self.address = address
        self.blob_path, self.blob = blob
        self._troubles = troubles
        self._before = troubles()
        #: Whether a process that nobody reads may lose output, by the server's settings.
        self.keeps_little = keeps_little
        self.seen = 0
        self.lost = 0
        self.gave_up = False

    @property
    def killed(self) -> bool:
        """Whether a server was killed since the job began."""
        return self._troubles()[0] > self._before[0]

    @property
    def scarce(self) -> bool:
        """Whether room or descriptors were short since then: counted when it begins and when it ends."""
        before = self._before[1]
        return before % 2 == 1 or self._troubles()[1] > before

    def piece(self, least: int, most: int) -> tuple[str, bytes]:
        """A command that prints a part of the blob, and what it prints."""
        count = self.rng.randint(least, most)
        start = self.rng.randrange(len(self.blob) - count)
        return f"o {start} {count}; ", self.blob[start : start + count]

    def sh(self, script: str) -> list[str]:
        return ["sh", "-c", PRELUDE + script, self.blob_path]

    def ending(self) -> tuple[str, ExitStatus]:
        """How a script ends."""
        if self.rng.random() < 0.2:
            number = self.rng.choice((9, 15, 6))
            return f"kill -{number} $$; sleep 1000", ExitStatus(128 + number, signal_name(number))
        code = self.rng.choice((0, 0, 1, 3, 77, 126, 255))
        return f"exit {code}", ExitStatus(code)

    def count(self, following: Following, *, may_lose: bool = False) -> None:
        self.seen += following.seen
        if following.lost and not self.scarce and not (may_lose and self.keeps_little):
            raise Broken(f"{self.name}: {following.lost} bytes were told to be lost, and nothing was scarce")
        self.lost += following.lost


@contextlib.asynccontextmanager
async def started(place: Place, process: Process) -> AsyncIterator[Process]:
    """A process that is forgotten at the end, whatever became of the job."""
    try:
        yield process
    finally:
        await patiently(place, lambda: process.terminate(force=True))
        await patiently(place, process.forget)


async def patiently(place: Place, do: Callable[[], Awaitable[object]]) -> None:
    """Clean up; again for as long as something is scarce."""
    while True:
        try:
            await do()
            return
        except ResourceExhausted:
            if not place.scarce:
                raise
            await asyncio.sleep(0.1)


async def follow(place: Place, process: Process, expected: dict[str, bytes], status: ExitStatus) -> None:
    """Read it to its end, as it comes."""
    following = Following(place.name, expected, status)
    async for event in process.events():
        following.take(event)
    following.over()
    place.count(following)


@contextlib.contextmanager
def told_unless_scarce(place: Place) -> Iterator[None]:
    """A line that was lost for want of room is told with the next one: one who waits for it may wait for ever."""
    try:
        yield
    except TimeoutError:
        if not place.scarce:
            raise
        place.gave_up = True
        place.lost += 1


# --- processes on pipes ---------------------------------------------------------------------------------------


async def pipes(place: Place) -> None:
    """Both streams, apart, with pauses; one or two readers."""
    script, printed = "", {"stdout": b"", "stderr": b""}
    for _ in range(place.rng.randint(1, 12)):
        stream = place.rng.choice(("stdout", "stderr"))
        command, data = place.piece(1, place.rng.choice((10, 2_000, 70_000)))
        script += command if stream == "stdout" else command.replace(";", " >&2;")
        printed[stream] += data
        if place.rng.random() < 0.4:
            script += f"sleep {place.rng.uniform(0.01, 0.2):.3f}; "
    end, status = place.ending()
    process = await place.box.start(place.sh(script + end), overflow="block")
    async with started(place, process):
        readers = place.rng.randint(1, 2)
        await asyncio.gather(*(follow(place, process, printed, status) for _ in range(readers)))
        got = await process.wait()
        if got != status:
            raise Broken(f"{place.name}: wait tells {got} instead of {status}")


async def stream(place: Place) -> None:
    """A long one, as fast as it goes or with pauses."""
    pieces = [place.piece(100_000, 900_000) for _ in range(place.rng.randint(2, 8))]
    pause = "" if place.rng.random() < 0.5 else f"sleep {place.rng.uniform(0.02, 0.2):.3f}; "
    script = pause.join(command for command, _ in pieces)
    end, status = place.ending()
    process = await place.box.start(place.sh(script + end), overflow="block")
    async with started(place, process):
        await follow(place, process, {"stdout": b"".join(data for _, data in pieces), "stderr": b""}, status)


async def quick(place: Place) -> None:
    """Commands that end at once, one after the other, by `exec`."""
    for _ in range(place.rng.randint(2, 8)):
        out, printed = place.piece(0, 300)
        err, complained = place.piece(0, 300)
        code = place.rng.randrange(256)
        result = await place.box.exec(place.sh(f"{out}{err.replace(';', ' >&2;')}exit {code}"))
        if result.truncated and place.scarce:
            place.lost += 1
        else:
            same(f"{place.name}, stdout", result.stdout_bytes, printed)
            same(f"{place.name}, stderr", result.stderr_bytes, complained)
        if result.returncode != code:
            raise Broken(f"{place.name}: exit code {result.returncode} instead of {code}")
        place.seen += len(printed) + len(complained)


async def lines(place: Place) -> None:
    """Very long lines and very many short ones, as text."""
    first = place.rng.randrange(1_000_000)
    count = place.rng.randint(1, 20_000)
    width = place.rng.randint(1, 200_000)
    script = f"seq {first} {first + count - 1}; head -c {width} /dev/zero | tr '\\0' x; echo; exit 7"
    numbers = b"".join(b"%d\n" % n for n in range(first, first + count))
    process = await place.box.start(["sh", "-c", script], overflow="block")
    async with started(place, process):
        printed = {"stdout": numbers + b"x" * width + b"\n", "stderr": b""}
        await follow(place, process, printed, ExitStatus(7))


async def echo(place: Place) -> None:
    """Input in pieces of any size; what comes back tells that each byte arrived once and in order."""
    process = await place.box.start(["cat"], stdin="open", overflow="block")
    _, data = place.piece(0, place.rng.choice((500, 50_000, 1_500_000)))
    async with started(place, process):
        following = asyncio.create_task(follow(place, process, {"stdout": data, "stderr": b""}, ExitStatus(0)))
        try:
            await write(place, process, data)
            await process.close_stdin()
            await following
        finally:
            following.cancel()
            await asyncio.wait((following,))


async def write(place: Place, process: Process, data: bytes) -> None:
    sent = 0
    most = place.rng.choice((100, 10_000, 400_000))
    while sent < len(data):
        count = place.rng.randint(1, max(most, len(data) // 200))
        await process.write(data[sent : sent + count])
        sent += count
        if place.rng.random() < 0.05:
            await asyncio.sleep(place.rng.uniform(0, 0.1))


async def later(place: Place) -> None:
    """Nobody reads while it runs; then somebody else does, piece by piece, by position."""
    pieces = [place.piece(1, 100_000) for _ in range(place.rng.randint(1, 5))]
    end, status = place.ending()
    script = f"sleep {place.rng.uniform(0, 0.3):.3f}; " + "".join(command for command, _ in pieces) + end
    id = place.name.replace(" ", "-")
    process = await place.box.start(place.sh(script), id=id)
    async with started(place, process):
        if place.rng.random() < 0.5:
            await process.wait()
        async with connected(place) as other:
            handle = await other.process(id)
            following = Following(place.name, {"stdout": b"".join(data for _, data in pieces), "stderr": b""}, status)
            since = 0
            while True:
                found = await handle.read(since, place.rng.randint(1, 60_000), wait=5.0)
                # Each part of what is lost is told before what comes behind it.
                told = sorted([*found.gap, *found.chunks], key=lambda each: (each.stream, each.offset))
                for each in told:
                    following.take(each)
                since = found.next_seq - 1
                if found.closed and not told:
                    break
            following.all_printed()
            following.ended(await handle.wait())
            place.count(following, may_lose=True)


@contextlib.asynccontextmanager
async def connected(place: Place) -> AsyncIterator[Sandbox]:
    """A connection of its own. Only its first handshake is tried once; that is no fault of the server's."""
    for attempt in range(20):
        try:
            context = holdfast.connect(place.address)
            box = await context.__aenter__()
            break
        except HoldfastError:
            if attempt == 19:
                raise
            await asyncio.sleep(0.1)
    try:
        yield box
    finally:
        await context.__aexit__(None, None, None)


async def background(place: Place) -> None:
    """A child goes on printing after its leader has ended."""
    first, before = place.piece(1, 5_000)
    second, after = place.piece(1, 5_000)
    script = f"(sleep {place.rng.uniform(0.05, 0.5):.3f}; {second}) & {first}exit 4"
    process = await place.box.start(place.sh(script))
    async with started(place, process):
        await follow(place, process, {"stdout": before + after, "stderr": b""}, ExitStatus(4))


async def tree(place: Place) -> None:
    """A tree with an escaped branch is ended; nothing of it is left."""
    script = "setsid sleep 1000 & echo $!; (sleep 1000 & echo $!; wait) & sleep 1000; wait"
    process = await place.box.start(["sh", "-c", script], stdin="closed")
    async with started(place, process):
        with told_unless_scarce(place):
            await process.wait_for_output(re.compile(rb"\d+\n\d+\n"), timeout=LOST_LINE_SECONDS)
        printed = (await process.snapshot()).stdout
        force = place.rng.random() < 0.5
        await process.terminate(grace=1.0, force=force)
        status = await process.wait()
        expected = "SIGKILL" if force else "SIGTERM"
        # The reply to a first attempt may be lost with its server, in the middle of the killing.
        if status.signal != expected and not (place.killed and status.signal == "SIGKILL"):
            raise Broken(f"{place.name}: ended by {status} instead of {expected}")
        left = [pid for pid in printed.split() if is_alive(int(pid)) and _is_sleep(int(pid))]
        if left:
            raise Broken(f"{place.name}: processes {left} are left of an ended tree")


def _is_sleep(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"sleep")
    except OSError:
        return False


async def signals(place: Place) -> None:
    """Each signal arrives once, however often it had to be sent."""
    script = "n=0; trap 'n=$((n+1)); echo $n' USR1; echo ready; while :; do read x && exit $n; done"
    process = await place.box.start(["sh", "-c", script], stdin="open")
    count = place.rng.randint(1, 6)
    async with started(place, process):
        with told_unless_scarce(place):
            await process.wait_for_output("ready\n", timeout=LOST_LINE_SECONDS)
            for number in range(1, count + 1):
                await process.signal("USR1")
                await process.wait_for_output(f"{number}\n", timeout=LOST_LINE_SECONDS)
        if place.gave_up:
            return
        await process.write(b"end\n")
        printed = b"ready\n" + b"".join(b"%d\n" % n for n in range(1, count + 1))
        await follow(place, process, {"stdout": printed, "stderr": b""}, ExitStatus(count))


async def storm(place: Place) -> None:
    """Many starts at a time, that end at once."""

    async def one(number: int) -> None:
        process = await place.box.start(["sh", "-c", f"echo {number}; exit {number % 100}"])
        async with started(place, process):
            expected = {"stdout": b"%d\n" % number, "stderr": b""}
            await follow(place, process, expected, ExitStatus(number % 100))

    results = await asyncio.gather(*(one(n) for n in range(place.rng.randint(5, 40))), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def given_up(place: Place) -> None:
    """Commands whose caller gives up, or whose time is over: they are killed, with all that they started."""
    script = "sleep 1000 & sleep 1000; wait"
    if place.rng.random() < 0.5:
        try:
            await place.box.exec(["sh", "-c", script], timeout=place.rng.uniform(0.01, 0.5), timeout_retry=False)
        except TimeoutError:
            return
        raise Broken(f"{place.name}: ended though it sleeps")
    running = asyncio.create_task(place.box.exec(["sh", "-c", script]))
    await asyncio.sleep(place.rng.uniform(0, 0.5))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
        raise Broken(f"{place.name}: ended though it sleeps")


async def foreign(place: Place) -> None:
    """A client by hand, in JSON, that resumes its session and fills holes by reading, as the protocol's page says."""
    pieces = [place.piece(1, 30_000) for _ in range(place.rng.randint(2, 10))]
    pause = f"sleep {place.rng.uniform(0.02, 0.3):.3f}; "
    script = pause.join(command for command, _ in pieces) + "exit 5"
    client = Foreign(place.address, f"{place.name}-{place.rng.randrange(1 << 30)}")
    following = Following(place.name, {"stdout": b"".join(data for _, data in pieces), "stderr": b""}, ExitStatus(5))
    await client.start(place.sh(script))
    process = await place.box.process(client.process_id)
    async with started(place, process):
        await client.read_to_end(following)
        following.all_printed()
        following.ended(await process.wait())
        # What was sent to a connection counts as taken: it is kept as the settings say, and no longer.
        place.count(following, may_lose=True)


class Foreign:
    """One process, pushed; and the session that it was started in."""

    def __init__(self, address: str, process_id: str) -> None:
        self._address = address
        self.process_id = process_id
        self._session: str | None = None
        self._argv: list[str] = []
        self._last = 0
        self._closed = False

    async def start(self, argv: list[str]) -> None:
        self._argv = argv
        while True:
            with contextlib.suppress(ConnectionError):
                async with self._talk() as talk:
                    await self._started(talk)
                    return

    async def _started(self, talk: Conversation) -> None:
        params = {"processId": self.process_id, "argv": self._argv, "startId": "once", "overflow": "block"}
        await talk.result("process/start", **params)

    @contextlib.asynccontextmanager
    async def _talk(self) -> AsyncIterator[Conversation]:
        async with conversation(self._address) as talk:
            resume = {} if self._session is None else {"resumeSessionId": self._session}
            self._session = (await talk.initialize(**resume))["sessionId"]
            yield talk

    async def read_to_end(self, following: Following) -> None:
        """From pushes; what went missing between two connections is read."""
        while not self._closed:
            with contextlib.suppress(ConnectionError):
                async with self._talk() as talk:
                    await self._fill(talk, following)
                    while not self._closed:
                        notice = await talk.notice()
                        if notice["seq"] > self._last + 1:
                            await self._fill(talk, following)
                        if notice["seq"] == self._last + 1:
                            self._take(notice, following)

    async def _fill(self, talk: Conversation, following: Following) -> None:
        while True:
            found = await talk.result("process/read", processId=self.process_id, afterSeq=self._last)
            told = [*found.get("gap", ()), *found["chunks"]]
            for each in sorted(told, key=lambda each: (each["stream"], each["offset"])):
                if "length" in each:
                    following.take(OutputGap(each["stream"], each["offset"], each["length"]))
                else:
                    self._take(each, following)
            self._last = max(self._last, found["nextSeq"] - 1)
            if not found["chunks"]:
                self._closed = self._closed or found["closed"]
                return

    def _take(self, told: dict[str, Any], following: Following) -> None:
        self._last = told["seq"]
        if "chunk" in told:
            data = base64.b64decode(told["chunk"])
            following.take(OutputChunk(told["stream"], told["offset"], data, told["seq"]))
        elif "exitCode" not in told:
            self._closed = True


async def bound(place: Place) -> None:
    """It ends with its connection, and not before."""
    command, data = place.piece(1, 3_000)
    async with connected(place) as own:
        process = await own.start(place.sh(f"{command} exec sleep 1000"), lifetime="connection")
        await asyncio.sleep(place.rng.uniform(0, 1.0))
        if not (await process.describe()).running:
            raise Broken(f"{place.name}: it ended while its connection was there")
    handle = await place.box.process(process.id)
    async with started(place, handle):
        await follow(place, handle, {"stdout": data, "stderr": b""}, ExitStatus(143, "SIGTERM"))


# --- terminals ------------------------------------------------------------------------------------------------


async def pty(place: Place) -> None:
    """A process on a terminal that passes bytes as they are, in and out."""
    _, data = place.piece(1, place.rng.choice((200, 20_000, 200_000)))
    command, printed = place.piece(1, 100_000)
    script = f"stty raw -echo -opost; echo ready; {command} head -c {len(data)}; exit 9"
    size = TerminalSize(place.rng.randint(1, 100), place.rng.randint(1, 200))
    process = await place.box.start(place.sh(script), tty=size, overflow="block")
    async with started(place, process):
        following = Following(place.name, {"pty": b"ready\n" + printed + data}, ExitStatus(9))
        ready = asyncio.Event()

        async def read() -> None:
            async for event in process.events():
                following.take(event)
                if following.seen + following.lost >= len(b"ready\n"):
                    ready.set()
            ready.set()
            following.over()
            place.count(following)

        reading = asyncio.create_task(read())
        try:
            await ready.wait()
            await write(place, process, data)
            await reading
        finally:
            reading.cancel()
            await asyncio.wait((reading,))


async def terminal(place: Place) -> None:
    """Commands typed at the prompt, with their output and exit codes; the shell keeps its state."""
    handle = await place.box.terminal("bash", login=False)
    try:
        ran = 0
        for number in range(place.rng.randint(1, 5)):
            first, count = place.rng.randrange(100_000), place.rng.randint(1, 2_000)
            code = place.rng.randrange(100)
            pause = f"sleep {place.rng.uniform(0, 0.2):.3f}; " if place.rng.random() < 0.5 else ""
            command = f"n=$((n+1)); {pause}seq {first} {first + count - 1}; echo $n; (exit {code})"
            expected = b"".join(b"%d\r\n" % n for n in [*range(first, first + count), ran + 1])
            try:
                result = await handle.run(command)
                output, exit_code = result.output_bytes, result.exit_code
                if result.truncated and place.scarce:
                    place.lost += 1
                    ran += 1
                    continue
            except HoldfastError as error:
                if RUNS_SURVIVE or not place.killed or "was restarted after" not in str(error):
                    raise
                status = await handle.wait_until_idle(timeout=60)
                shown = await so_far(handle)
                if expected not in shown:
                    if b"%d\r\n%d\r\n" % (first, first + 1) in shown:
                        raise Broken(f"{place.name}, command {number}: only a part of its output is there") from None
                    continue  # it was not typed
                output, exit_code = expected, -1 if status.last_exit_code is None else status.last_exit_code
            ran += 1
            same(f"{place.name}, command {number}", output, expected)
            if exit_code != code:
                raise Broken(f"{place.name}, command {number}: exit code {exit_code} instead of {code}")
            place.seen += len(output)
    finally:
        await patiently(place, lambda: handle.close("force"))
        process = await place.box.process(handle.id)
        await patiently(place, process.forget)


async def so_far(handle: Terminal) -> bytes:
    """All that the terminal has shown."""
    shown, token = b"", 0
    while True:
        found = await handle.read(token)
        shown += b"".join(event.payload for event in found.events if event.type == "output")
        if found.token == token:
            return shown
        token = found.token


# --- live shells ----------------------------------------------------------------------------------------------


async def shell(place: Place) -> None:
    """Commands in a live shell; each has its own output and exit code, and finds the state of those before it."""
    handle = await place.box.shell(place.rng.choice(("bash", "sh")))
    try:
        await in_shell(place, handle)
    except ShellClosed as closed:
        if SHELLS_SURVIVE or not place.killed or "the server was restarted" not in str(closed):
            raise
    finally:
        await patiently(place, handle.close)


async def in_shell(place: Place, handle: Shell) -> None:
    await handle.run(f"o() {{ dd if={place.blob_path} iflag=skip_bytes,count_bytes skip=$1 count=$2 bs=64k status=none; }}")
    for number in range(1, place.rng.randint(2, 8)):
        out, printed = place.piece(0, place.rng.choice((100, 100_000)))
        err, complained = place.piece(0, 1_000)
        code = place.rng.randrange(256)
        pause = f"sleep {place.rng.uniform(0, 0.2):.3f}; " if place.rng.random() < 0.3 else ""
        command = f"n=$((n+1)); {out}{pause}{err.replace(';', ' >&2;')} echo $n; (exit {code})"
        result = await handle.run(command)
        what = f"{place.name}, command {number}"
        if result.truncated and place.scarce:
            place.lost += 1
        else:
            same(f"{what}, stdout", result.stdout_bytes, printed + b"%d\n" % number)
            same(f"{what}, stderr", result.stderr_bytes, complained)
        if result.exit_code != code:
            raise Broken(f"{what}: exit code {result.exit_code} instead of {code}")
        place.seen += len(printed) + len(complained)


async def shell_job(place: Place) -> None:
    """A process started from a shell, with its state; it outlives the shell."""
    command, printed = place.piece(1, 50_000)
    async with contextlib.AsyncExitStack() as stack:
        handle = await place.box.shell("bash")
        try:
            await handle.run(f"set -- {place.blob_path}; word=hello; " + PRELUDE.replace('"$0"', place.blob_path))
            process = await handle.start(f"echo $word; {command} exit 6")
            await stack.enter_async_context(started(place, process))
        except ShellClosed as closed:
            if SHELLS_SURVIVE or not place.killed or "the server was restarted" not in str(closed):
                raise
            return
        finally:
            await patiently(place, handle.close)
        await follow(place, process, {"stdout": b"hello\n" + printed, "stderr": b""}, ExitStatus(6))


#: How often each kind of job is drawn.
JOBS: Final[dict[Callable[[Place], Awaitable[None]], int]] = {
    pipes: 5,
    stream: 3,
    quick: 4,
    lines: 2,
    echo: 4,
    later: 3,
    background: 2,
    tree: 2,
    signals: 2,
    storm: 2,
    given_up: 2,
    foreign: 3,
    bound: 1,
    pty: 3,
    terminal: 2,
    shell: 3,
    shell_job: 1,
}
