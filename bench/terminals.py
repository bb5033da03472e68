"""The cost of a terminal: beside a bare PTY that this program holds itself, and beside tmux where it is installed.

Touches a home directory of its own without any rc file, and the processes that it starts. All of them run the same
bash with the same prompt.
"""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Final

import msgspec

import holdfast
from bench.measure import (
    Row,
    Samples,
    Scale,
    Target,
    compare,
    figures,
    interleave,
    interleave_samples,
    latencies,
    one,
)
from bench.servers import BenchmarkError, memory_bytes
from holdfast.client.screen.screen import Emulator, Screen, emulator
from holdfast.types import OutputChunk
from tests.support.servers import RunningServer, running_server
from tests.support.signalling import send_signal

if TYPE_CHECKING:
    from holdfast.client.sandbox import Sandbox
    from holdfast.client.terminal import Terminal
    from holdfast.exec_api import EventStream

BARE: Final = "a bare PTY with `bash -i`"
ROWS: Final = 24
COLS: Final = 80
PROMPT: Final = b"$ "
SET_PROMPT: Final = "PS1='$ '"
#: Deletes the line at readline's prompt; it answers with something that ends so.
CLEAR_LINE: Final = b"\x15"
LINE_CLEARED: Final = b"\x1b[K"
#: Commands, or keys, in a turn: what follows another at once finds all the programs awake.
BATCH: Final = 20
#: The line of a flood; the terminal makes its newline two bytes.
LINE: Final = ("0123456789" * COLS)[: COLS - 1]
READ_BYTES: Final = 65_536
MB: Final = 1_000_000
#: Screens drawn in a round.
LOOKS: Final = 5
#: More than any program here takes; it only turns a hang into a failure.
PATIENCE_SECONDS: Final = 60.0


async def true_in_a_terminal(scale: Scale) -> list[Row]:
    """`true` typed at the prompt, until the prompt is back."""
    async with _contenders() as (home, _, box), _prompted(box) as terminal:
        with BarePty(home) as bare, BarePty(home) as far, _tmux(home) as tmux:

            async def ours() -> list[float]:
                return [await _run_well(terminal, "true") for _ in range(BATCH)]

            contenders: dict[str, Samples] = {"bare": _batch(bare.run_true), "apart": _apart(far, far.run_true)}
            contenders["terminal"] = ours
            if tmux is not None:
                contenders["tmux"] = _batch(tmux.run_true, 1)
            taken = await interleave_samples(scale.rounds, scale.echoes // BATCH, contenders)
    what = "`true` at a terminal's prompt"
    return _latency_rows("terminal-true", what, "`send-keys`, `wait-for`", taken, Target("ratio at most", 30.0))


async def key_echo(scale: Scale) -> list[Row]:
    """A key typed at the prompt, until its echo is read."""
    async with _contenders() as (home, _, box), _prompted(box) as terminal:
        with BarePty(home) as bare, BarePty(home) as far, _tmux(home) as tmux:
            events = box.api.events(terminal.id)
            # A key and its echo first: it is what the stream has last, and an empty line is not cleared.
            await terminal.send(b"x")
            await _read_until(events, PROMPT + b"x")
            await terminal.send(CLEAR_LINE)
            await _read_until(events, LINE_CLEARED)

            async def ours() -> list[float]:
                taken = [await _echo(terminal, events) for _ in range(BATCH)]
                await terminal.send(CLEAR_LINE)
                await _read_until(events, LINE_CLEARED)
                return taken

            contenders: dict[str, Samples] = {"bare": _cleared(bare), "apart": _apart(far, far.echo, far.clear)}
            contenders["terminal"] = ours
            if tmux is not None:
                contenders["tmux"] = _batch(tmux.echo, 1)
            taken = await interleave_samples(scale.rounds, scale.echoes // BATCH, contenders)
            await events.aclose()
    what = "a key typed in a terminal, to its echo"
    return _latency_rows("terminal-key", what, "`send-keys`, `capture-pane`", taken, Target("ratio at most", 4.0))


async def flood_of_a_terminal(scale: Scale) -> list[Row]:
    """Lines that a program prints as fast as it can; ours are kept in the sandbox and not fetched."""
    size = scale.flood_blocks // 10 * 1_000_000
    async with _contenders() as (home, _, box), _prompted(box) as terminal:
        with BarePty(home) as bare:

            async def read_here() -> float:
                began = perf_counter()
                _check_flood(bare.type_and_read(_flood(size)), size)
                return size / (perf_counter() - began) / 1e6

            async def ours() -> float:
                return size / await _run_flood(terminal, size) / 1e6

            taken = await interleave(scale.stream_rounds, {"bare": read_here, "terminal": ours})
    return [
        compare(
            "terminal-flood",
            f"{size // 1_000_000} MB of lines in a terminal, until `run` returns",
            "MB/s",
            baseline_what="os.read of a bare PTY, 64 KiB reads",
            baseline=figures(taken["bare"]),
            measured=figures(taken["terminal"]),
            target=Target("ratio at least", 0.7),
        )
    ]


async def screen_after_a_flood(scale: Scale) -> list[Row]:
    """The first screen of a terminal that has printed 10 MB: all of it is fetched and drawn."""
    async with _contenders() as (home, _, box):
        async with _prompted(box) as terminal:
            await _run_flood(terminal, scale.screen_mb * MB)
            # The rounds have an emulator that is loaded; the time to load it is printed beside them.
            loading = await _look(box, terminal, _shows_flood)
            row = await _screen_row(scale, box, terminal, "terminal-screen", "lines", _shows_flood, 100.0)
            note = f"{row.note}, the first in a program {loading * 1000:.0f} ms"
            rows = [msgspec.structs.replace(row, note=note)]
        with _file_of_frames(scale.screen_mb * MB) as path:
            async with _prompted(box) as terminal:
                await _run_well(terminal, f"cat {path}", quiet=False)
                rows += [
                    await _screen_row(scale, box, terminal, "terminal-screen-full", "full screens", _shows_frame)
                ]
        with _tmux(home) as tmux:
            if tmux is not None:
                rows.append(await _tmux_screen_row(scale, tmux, rows[0]))
    return rows


async def memory_of_a_terminal(scale: Scale) -> list[Row]:
    """The memory that each of many terminals, all at their prompt, adds to the server."""
    count = scale.crowd // 10
    added = [await _added_by_terminals(count) for _ in range(scale.server_rounds)]
    return [
        compare(
            "terminal-rss",
            f"server RSS, each of {count} idle terminals",
            "KB",
            baseline_what="bash itself",
            baseline=figures([bash / 1e3 for bash, _, _ in added]),
            measured=figures([each / 1e3 for _, each, _ in added]),
            target=Target("at most", 80.0),
            note=f"and {figures([spooled / 1e3 for _, _, spooled in added]).median:.1f} KB of output on tmpfs",
        )
    ]


# --- ours ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _contenders() -> AsyncIterator[tuple[str, RunningServer, Sandbox]]:
    """A home directory without rc files, a server that has it, and a client of that."""
    with (
        tempfile.TemporaryDirectory(prefix="hf-home-") as home,
        running_server(environ={"HOME": home}) as server,
    ):
        async with holdfast.connect(server.address("unix")) as box:
            yield home, server, box


@contextlib.asynccontextmanager
async def _prompted(box: Sandbox) -> AsyncIterator[Terminal]:
    async with await box.terminal(rows=ROWS, cols=COLS) as terminal:
        await _run_well(terminal, SET_PROMPT)
        yield terminal


async def _run_well(terminal: Terminal, command: str, *, quiet: bool = True) -> float:
    began = perf_counter()
    result = await terminal.run(command, max_bytes=1)
    took = perf_counter() - began
    if result.exit_code != 0 or result.state != "IDLE" or (quiet and result.output_bytes):
        raise BenchmarkError(f"{command} answered {result!r}")
    return took


async def _echo(terminal: Terminal, events: EventStream) -> float:
    began = perf_counter()
    await terminal.send(b"x")
    event = await anext(events)
    took = perf_counter() - began
    if not isinstance(event, OutputChunk) or event.data != b"x":
        raise BenchmarkError(f"a key was answered with {event!r}")
    return took


async def _read_until(events: EventStream, end: bytes) -> None:
    tail = b""
    while not tail.endswith(end):
        event = await anext(events)
        if isinstance(event, OutputChunk):
            tail = (tail + event.data)[-len(end) :]


def _flood(size: int) -> str:
    return f"yes {LINE} | head -c {size}"


def _check_flood(came: int, size: int) -> None:
    if came < size // COLS * (COLS + 1):
        raise BenchmarkError(f"{came} bytes came of a flood of {size}")


async def _run_flood(terminal: Terminal, size: int) -> float:
    """Seconds until the client has its end. The output is not read."""
    began = perf_counter()
    result = await terminal.run(_flood(size), PATIENCE_SECONDS, max_bytes=1)
    took = perf_counter() - began
    if result.exit_code != 0:
        raise BenchmarkError(f"a flood ended with {result!r}")
    _check_flood(result.end_token - result.start_token, size)
    return took


async def _added_by_terminals(count: int) -> tuple[int, float, float]:
    """A fresh server: what bash weighs, what each terminal adds, and its spool. The first one loads code."""
    async with _contenders() as (home, server, box), contextlib.AsyncExitStack() as stack:
        with BarePty(home) as bare:
            await stack.enter_async_context(_prompted(box))
            before, spooled = memory_bytes(server.pid), _allocated(server.spool)
            for _ in range(count):
                await stack.enter_async_context(await box.terminal(rows=ROWS, cols=COLS))
            each = (memory_bytes(server.pid) - before) / count
            return memory_bytes(bare.pid), each, (_allocated(server.spool) - spooled) / count


def _allocated(directory: str) -> int:
    """Bytes that its files take; those of a server are its output."""
    paths = (os.path.join(location, name) for location, _, names in os.walk(directory) for name in names)
    return sum(os.stat(path).st_blocks * 512 for path in paths)


# --- screens ---------------------------------------------------------------------------------------------------


async def _screen_row(
    scale: Scale,
    box: Sandbox,
    terminal: Terminal,
    name: str,
    of_what: str,
    is_right: Callable[[Screen], bool],
    limit: float | None = None,
) -> Row:
    printed = await _everything(terminal)

    async def fed() -> float:
        drawn = emulator(ROWS, COLS)
        began = perf_counter()
        drawn.feed(printed)
        screen = drawn.screen()
        took = perf_counter() - began
        drawn.close()
        _check_screen(screen, is_right)
        return took

    async def ours() -> float:
        return await _look(box, terminal, is_right)

    taken = await interleave_samples(scale.rounds, LOOKS, {"fed": one(fed), "terminal": one(ours)})
    baseline = latencies(taken["fed"])
    return compare(
        name,
        f"`screen()` after {scale.screen_mb} MB of {of_what}, first look",
        "ms",
        baseline_what=f"the same bytes fed to {_name_of(emulator(ROWS, COLS))} here",
        baseline=baseline,
        measured=latencies(taken["terminal"]),
        target=None if limit is None else Target("at most", limit),
        note=f"the emulator takes {len(printed) / baseline.median / 1e3:,.0f} MB/s",
    )


async def _look(box: Sandbox, terminal: Terminal, is_right: Callable[[Screen], bool]) -> float:
    # A new handle has seen nothing: it starts at the first byte.
    handle = await box.open_terminal(terminal.id)
    began = perf_counter()
    screen = await handle.screen()
    took = perf_counter() - began
    await handle.release()
    _check_screen(screen, is_right)
    return took


async def _tmux_screen_row(scale: Scale, tmux: Tmux, ours: Row) -> Row:
    began = perf_counter()
    tmux.run(_flood(scale.screen_mb * MB))
    rate = scale.screen_mb / (perf_counter() - began)

    async def look() -> float:
        began = perf_counter()
        screen = tmux.capture()
        took = perf_counter() - began
        if screen.split("\n")[-2:] != [LINE, PROMPT.decode().strip()]:
            raise BenchmarkError(f"tmux shows {screen!r}")
        return took

    taken = await interleave_samples(scale.rounds, LOOKS, {"tmux": one(look)})
    return compare(
        "terminal-screen-tmux",
        "tmux `capture-pane` after the same lines",
        "ms",
        baseline_what="holdfast's `screen()`",
        baseline=figures(ours.measured_rounds),
        measured=latencies(taken["tmux"]),
        note=f"it drew them as they came, {rate:.0f} MB/s",
    )


async def _everything(terminal: Terminal) -> bytes:
    pieces: list[bytes] = []
    token = 0
    while (found := await terminal.read(token)).token > token:
        token = found.token
        pieces += [event.payload for event in found.events if event.type == "output"]
    return b"".join(pieces)


def _shows_flood(screen: Screen) -> bool:
    return screen.lines[-2:] == (LINE, PROMPT.decode().strip()) and screen.cursor == (ROWS - 1, len(PROMPT))


def _shows_frame(screen: Screen) -> bool:
    return screen.lines[0].endswith("of the last frame") and screen.lines[-1].startswith(PROMPT.decode().strip())


def _check_screen(screen: Screen, is_right: Callable[[Screen], bool]) -> None:
    if not is_right(screen):
        raise BenchmarkError(f"the screen is not what was printed: {screen!r}")


def _name_of(drawn: Emulator) -> str:
    name = type(drawn).__name__.removesuffix("Emulator").lower()
    drawn.close()
    return name


@contextlib.contextmanager
def _file_of_frames(size: int) -> Iterator[str]:
    """`size` bytes of a program that draws its whole screen again and again: places, colours, erased rests."""
    rows = "".join(
        f"\x1b[{row};1H\x1b[3{row % 8}m{row:5d}\x1b[0m {LINE[:50]} \x1b[1m%s\x1b[0m\x1b[K" for row in range(1, ROWS)
    )
    frame = (rows % (("of a frame",) * (ROWS - 1))).encode()
    with tempfile.NamedTemporaryFile(prefix="hf-frames-") as file:
        file.write(frame * (size // len(frame)))
        file.write((rows % (("of the last frame",) * (ROWS - 1))).encode() + b"\r\n")
        file.flush()
        yield file.name


# --- the others ------------------------------------------------------------------------------------------------


def _environment(home: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("TMUX", "LINES", "COLUMNS")}
    return {"LANG": "C.UTF-8", **inherited, "HOME": home, "TERM": "xterm-256color"}


class BarePty:
    """`bash -i` on a PTY that is written and read here: the least that a terminal can cost."""

    def __init__(self, home: str) -> None:
        environment = _environment(home)
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execvpe("bash", ("bash", "-i"), environment)
        termios.tcsetwinsize(self._fd, (ROWS, COLS))
        # The newline is of the answer: the echo of the command ends with its quote.
        os.write(self._fd, f"{SET_PROMPT}\r".encode())
        self._read_until(b"\n\x1b[?2004l\r\x1b[?2004h" + PROMPT)

    def __enter__(self) -> BarePty:
        return self

    def __exit__(self, *_: object) -> None:
        send_signal(self.pid, signal.SIGKILL)
        os.close(self._fd)
        os.waitpid(self.pid, 0)

    def type_and_read(self, command: str) -> int:
        """Run a command; returns how many bytes came until the prompt was back."""
        os.write(self._fd, f"{command}\r".encode())
        return self._read_until(PROMPT)

    def run_true(self) -> float:
        began = perf_counter()
        self.type_and_read("true")
        return perf_counter() - began

    def echo(self) -> float:
        began = perf_counter()
        os.write(self._fd, b"x")
        answer = os.read(self._fd, READ_BYTES)
        took = perf_counter() - began
        if answer != b"x":
            raise BenchmarkError(f"a bare PTY answered a key with {answer!r}")
        return took

    def clear(self) -> None:
        os.write(self._fd, CLEAR_LINE)
        self._read_until(LINE_CLEARED)

    def _read_until(self, end: bytes) -> int:
        came, tail = 0, b""
        while not tail.endswith(end):
            data = os.read(self._fd, READ_BYTES)
            came += len(data)
            tail = data if len(data) >= len(end) else (tail + data)[-len(end) :]
        return came

    @contextlib.contextmanager
    def on_another_core(self) -> Iterator[None]:
        """The cost when each round trip must wake another core, as one through a server always does."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:1])
        os.sched_setaffinity(self.pid, cores[-1:])
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)
            os.sched_setaffinity(self.pid, cores)


class Tmux:
    """A tmux server with one window, driven by commands as in other harnesses."""

    def __init__(self, home: str) -> None:
        self._tmux = ("tmux", "-S", os.path.join(home, "tmux.sock"), "-f", "/dev/null")
        self._environment = _environment(home)
        self._call("new-session", "-d", "-x", str(COLS), "-y", str(ROWS), "bash -i")
        self.run(SET_PROMPT)

    def _call(self, *arguments: str) -> str:
        done = subprocess.run(
            (*self._tmux, *arguments),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_SECONDS,
        )
        return done.stdout

    def run(self, command: str) -> None:
        """Wait until the shell has run it and the prompt is back on the screen."""
        self._type_and_wait(command)
        while self._last_line() != PROMPT.decode().strip():
            pass

    def _type_and_wait(self, command: str) -> None:
        self._call("send-keys", f"{command}; tmux wait-for -S done", "Enter", ";", "wait-for", "done")

    def run_true(self) -> float:
        began = perf_counter()
        self._type_and_wait("true")
        return perf_counter() - began

    def capture(self) -> str:
        return self._call("capture-pane", "-p").rstrip("\n")

    def _last_line(self) -> str:
        return self.capture().rpartition("\n")[2]

    def echo(self) -> float:
        while self._last_line() != PROMPT.decode().strip():
            self._call("send-keys", "C-u")
        began = perf_counter()
        self._call("send-keys", "x")
        while not self._last_line().endswith("x"):
            pass
        return perf_counter() - began

    def close(self) -> None:
        self._call("kill-server")


@contextlib.contextmanager
def _tmux(home: str) -> Iterator[Tmux | None]:
    if shutil.which("tmux") is None:
        sys.stderr.write("tmux is not installed: its rows are left out\n")
        yield None
        return
    tmux = Tmux(home)
    try:
        yield tmux
    finally:
        tmux.close()


# --- contenders and rows ---------------------------------------------------------------------------------------


def _batch(sample: Callable[[], float], size: int = BATCH) -> Samples:
    async def batch() -> list[float]:
        return [sample() for _ in range(size)]

    return batch


def _cleared(bare: BarePty) -> Samples:
    async def batch() -> list[float]:
        taken = [bare.echo() for _ in range(BATCH)]
        bare.clear()
        return taken

    return batch


def _apart(bare: BarePty, sample: Callable[[], float], clear: Callable[[], None] | None = None) -> Samples:
    async def batch() -> list[float]:
        with bare.on_another_core():
            taken = [sample() for _ in range(BATCH)]
            if clear is not None:
                clear()
            return taken

    return batch


def _latency_rows(name: str, what: str, how: str, taken: dict[str, list[list[float]]], target: Target) -> list[Row]:
    bare = latencies(taken["bare"])
    rows = [
        compare(
            name,
            what,
            "ms",
            baseline_what=BARE,
            baseline=bare,
            measured=latencies(taken["terminal"]),
            target=target,
            note=f"bare PTY across cores {latencies(taken['apart']).median:.3f} ms",
        )
    ]
    if "tmux" in taken:
        rows.append(
            compare(
                f"{name}-tmux",
                f"the same by tmux, {how}",
                "ms",
                baseline_what=BARE,
                baseline=bare,
                measured=latencies(taken["tmux"]),
            )
        )
    return rows
