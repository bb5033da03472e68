"""A handle on a terminal in a sandbox; all its calls go through `ExecApi`.

A handle holds no resources in the sandbox: dropping it leaves the terminal open, and another handle on the same id
reads the same output. The client draws screens and recordings from the output that the sandbox retains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Literal, cast, get_args

import msgspec

from holdfast.client.collect import MIB, SHOWN_TAIL_BYTES, OutputMatch, OutputSearch, Pattern
from holdfast.client.connection.clean_up import clean_up_cancelled
from holdfast.client.process import signal_name, write_pieces
from holdfast.client.screen.asciicast import INPUT, MARKER, OUTPUT, CastEvent, resize_event, write_cast
from holdfast.client.screen.screen import Emulator, Screen, emulator, preload
from holdfast.errors import (
    HoldfastError,
    InvalidParams,
    StdinClosed,
    TerminalClosed,
    TimeoutError,
    UnknownTerminal,
)
from holdfast.exec_api import ExecApi
from holdfast.types import (
    TERMINAL_OUTPUT_BYTES,
    CloseMode,
    ExitStatus,
    JobsAtClose,
    OutputChunk,
    OutputGap,
    Struct,
    TerminalEvent,
    TerminalRead,
    TerminalSize,
    TerminalState,
    TerminalStates,
    TerminalStatus,
    TerminalWait,
)

Control = Literal["CTRL_C", "CTRL_D", "SIGINT", "SIGTERM", "SIGKILL", "RESIZE"]

#: Bytes that one step of a screen or a recording reads.
_STEP_BYTES: Final = 1024 * 1024
#: Bytes that `expect` still searches after its timeout: as much as a sandbox retains by default. Without a bound, a
#: program that prints faster than it is read would block `expect` for ever.
_BACKLOG_BYTES: Final = 32 * MIB
#: How long one long poll waits. A shorter one would cost a round trip more often.
_POLL_SECONDS: Final = 30.0
_OVER: Final = (TerminalStates.CLOSED, TerminalStates.ERROR)
#: Cancels an escape sequence that a gap has cut, so that the emulator does not take later output for its rest.
_CANCEL: Final = b"\x18"


class TerminalResult(Struct, frozen=True):
    """The output of a command that was typed in a terminal, and how it ended."""

    output_bytes: bytes
    #: 124 after a timeout.
    exit_code: int
    #: Seconds since it was typed.
    duration: float
    timed_out: bool = False
    #: More was printed: this is the most recent part.
    truncated: bool = False
    #: The terminal's state after it: BUSY if it could not be stopped, CLOSED if it ended the shell.
    state: TerminalState = "IDLE"
    reason: str = ""
    #: The positions of the beginning and the end of its output, for `read`.
    start_token: int = 0
    end_token: int = 0

    @property
    def output(self) -> str:
        """The output as text, with `\\n` as line ends; `output_bytes` has the raw bytes."""
        return self.output_bytes.decode("utf-8", "replace").replace("\r\n", "\n")

    @property
    def success(self) -> bool:
        return self.exit_code == 0


class TerminalMatch(Struct, frozen=True):
    """A match of `expect`. `token` is the position directly after it, from which to continue reading."""

    data: bytes
    #: Bytes printed before it.
    offset: int
    token: int
    groups: tuple[bytes | None, ...] = ()

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


class Terminal:
    """One terminal by its id.

    `status`, and its parts `state`, `prompt`, `continuation` and `awaiting_input`, are the last known values: those
    of the last call that returned a status. `describe` fetches them; `watch` keeps them up to date.
    """

    def __init__(
        self,
        api: ExecApi,
        status: TerminalStatus,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._api = api
        self._status = status
        self._spawn = spawn
        self._writing = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._emulator: Emulator | None = None
        self._emulating = asyncio.Lock()
        #: The position up to which the emulator has drawn.
        self._shown = 0
        #: The position at which the next `expect` begins: after the last match or `run`.
        self._expected = 0

    def __repr__(self) -> str:
        return f"<Terminal {self.id!r} {self._status.state} pid={self.pid}>"

    # --- status --------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The key that the caller chose."""
        return self._status.terminal_id

    @property
    def pid(self) -> int:
        """The OS pid of its shell or program."""
        return self._status.pid

    @property
    def size(self) -> TerminalSize:
        return self._status.size

    @property
    def status(self) -> TerminalStatus:
        """The last known status."""
        return self._status

    @property
    def state(self) -> TerminalState:
        """The last known state, one of `TerminalStates`."""
        return self.status.state

    @property
    def prompt(self) -> str | None:
        """The current or last prompt, as text."""
        return self.status.prompt

    @property
    def continuation(self) -> bool:
        """Whether the shell shows a continuation prompt, for the rest of a command."""
        return self.status.continuation

    @property
    def awaiting_input(self) -> bool | None:
        """Whether a program in the foreground, the shell included, is blocked on reading the terminal."""
        return self.status.awaiting_input

    async def describe(self) -> TerminalStatus:
        """Fetch the current status."""
        return self._update(await self._api.describe_terminal(self.id))

    def _update(self, status: TerminalStatus) -> TerminalStatus:
        # Replies may overtake each other.
        if status.changes >= self._status.changes:
            self._status = status
        return status

    async def watch(self) -> None:
        """Fetch the current status, and from then on keep it up to date in the background until `release`.

        This costs a long poll at a time, and the sandbox checks more often whether a program awaits input.
        """
        await self.describe()
        if self._watcher is None and self._status.state not in _OVER:
            self._watcher = self._spawn(self._watch())

    async def _watch(self) -> None:
        try:
            while self._status.state not in _OVER:
                _, status = await self._api.wait_terminal(
                    self.id, "change", timeout=_POLL_SECONDS, changes=self._status.changes
                )
                self._update(status)
        except HoldfastError:
            return  # the caller's next call raises it
        finally:
            self._watcher = None

    # --- input ---------------------------------------------------------------------------------------------------

    async def send(self, data: str | bytes) -> None:
        """Type text or bytes unchanged. Returns when all was accepted; waits while no program reads."""
        try:
            await write_pieces(self._api, self.id, data, self._writing)
        except StdinClosed:
            raise TerminalClosed(f"terminal {self.id!r} is closed and takes no input") from None

    async def send_keys(self, *keys: str) -> None:
        """Press keys by name: `C-c`, `Up`, `F5`, `M-x`, `Enter`; or a single character."""
        async with self._writing:
            await self._api.press_keys(self.id, keys)

    async def paste(self, text: str) -> None:
        """Type text as a bracketed paste if the foreground program supports it, so that no line runs by itself."""
        status = await self.describe()
        if not status.bracketed_paste:
            await self.send(text)
            return
        if "\x1b[201~" in text:
            raise InvalidParams("text: contains the sequence that ends a paste")
        await self.send(f"\x1b[200~{text}\x1b[201~")

    async def control(self, action: Control, *, rows: int | None = None, cols: int | None = None) -> None:
        """Perform a control action: a key, a signal to the foreground, or a resize."""
        name = action.upper()
        if name == "CTRL_C":
            await self.send(b"\x03")
        elif name == "CTRL_D":
            await self.send(b"\x04")
        elif name == "RESIZE":
            if rows is None or cols is None:
                raise InvalidParams("RESIZE: needs rows and cols")
            await self.resize(rows, cols)
        elif name in get_args(Control):
            await self.signal(name)
        else:
            raise InvalidParams(f"control action {action!r}: not one of {', '.join(get_args(Control))}")

    async def signal(self, signal: str | int) -> None:
        """Send a signal, by name (`INT`, `SIGINT`) or number, to the foreground process group."""
        name = signal if isinstance(signal, str) else signal_name(signal)
        await self._api.signal(self.id, name)

    async def resize(self, rows: int, cols: int) -> None:
        """Set the size; the foreground program gets SIGWINCH."""
        await self._api.resize(self.id, TerminalSize(rows, cols))

    # --- commands ------------------------------------------------------------------------------------------------

    async def run(
        self, command: str, timeout: float | None = None, *, max_bytes: int = TERMINAL_OUTPUT_BYTES
    ) -> TerminalResult:
        """Type a command at the prompt of bash or zsh, and return its output once the next prompt is shown.

        Concurrent calls run in order. After `timeout` seconds the command gets Ctrl-C, then TERM, then KILL, and
        `timed_out` is set; a cancelled call interrupts it. Of more than `max_bytes` of output the latest part is
        returned.
        """
        ended = await self._api.run_in_terminal(self.id, command, timeout=timeout, max_bytes=max_bytes)
        self._update(
            msgspec.structs.replace(
                self._status,
                state=ended.state,
                prompt=ended.prompt,
                changes=ended.changes,
                reason=ended.reason,
                last_exit_code=ended.exit_code,
                continuation=False,
            )
        )
        self._expected = max(self._expected, ended.end_token)
        fields = {name: getattr(ended, name) for name in TerminalResult.__struct_fields__ if name != "output_bytes"}
        return TerminalResult(output_bytes=ended.output, **fields)

    # --- waiting -------------------------------------------------------------------------------------------------

    async def wait_until_idle(self, timeout: float | None = None) -> TerminalStatus:
        """Wait until the prompt is shown and no typed input is pending; `TimeoutError` otherwise."""
        return await self._wait("idle", timeout, "shows no prompt")

    async def wait_until_awaiting_input(self, timeout: float | None = None) -> TerminalStatus:
        """Wait until a foreground program awaits input and has read everything that was typed."""
        return await self._wait("awaitingInput", timeout, "does not wait for input")

    async def _wait(self, until: TerminalWait, timeout: float | None, otherwise: str) -> TerminalStatus:
        reached, status = await self._api.wait_terminal(self.id, until, timeout=timeout)
        self._update(status)
        if not reached:
            why = ": the shell shows a continuation prompt" if status.continuation else ""
            raise TimeoutError(f"terminal {self.id!r} {otherwise} after {timeout or 0.0:g} s{why}")
        return status

    async def expect(
        self, pattern: Pattern, timeout: float | None = None, *, since: int | None = None
    ) -> TerminalMatch:
        """Wait until `pattern` is printed after the position `since`.

        Without `since`, the search begins where the last match of this handle ended, or the output of its last
        `run`; at first, at the beginning of the output. A str or bytes pattern is literal; `re.compile(...)` makes
        it a regular expression. The echo of typed input is output, too. Raises `TimeoutError` after `timeout`
        seconds, and `TerminalClosed` if the terminal closes first.
        """
        now = asyncio.get_running_loop().time
        deadline = None if timeout is None else now() + timeout
        search = OutputSearch(pattern)
        token = self._expected if since is None else since
        backlog = _BACKLOG_BYTES
        while True:
            left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(0.0, deadline - now()))
            found = await self._api.read_terminal(self.id, since=token, wait=left, max_bytes=_STEP_BYTES)
            for event in found.events:
                match = _search(search, event)
                if match is not None:
                    self._expected = match.end + match.before
                    return TerminalMatch(match.data, match.offset, self._expected, match.groups)
            size, token = found.token - token, max(found.token, token)
            if found.closed:
                what = search.describe(await self._latest(token))
                raise TerminalClosed(f"terminal {self.id!r} was closed before it printed {what}")
            if left > 0:
                continue
            backlog -= size
            if size <= 0 or backlog <= 0:
                what = search.describe(await self._latest(token))
                raise TimeoutError(f"terminal {self.id!r} did not within {timeout or 0.0:g} s print {what}")

    async def _latest(self, token: int) -> bytes:
        """The latest output before a position, as much as an error message shows."""
        start = max(0, token - SHOWN_TAIL_BYTES)
        found = await self._api.read_terminal(self.id, since=start, max_bytes=token - start)
        return b"".join(event.payload for event in found.events if event.type == "output")

    async def wait(self, timeout: float | None = None) -> ExitStatus:
        """Wait for the exit status of its program; `TimeoutError` after `timeout` seconds, and it continues."""
        status = await self._api.wait(self.id, timeout=timeout)
        if status is None:
            raise TimeoutError(f"terminal {self.id!r} is still open after {timeout or 0.0:g} s")
        return status

    # --- output --------------------------------------------------------------------------------------------------

    async def read(
        self, since: int = 0, wait: float = 0.0, *, max_bytes: int | None = None, marks: bool = False
    ) -> TerminalRead:
        """Read output and events after the position `since`, waiting up to `wait` seconds for the first.

        Continue from the result's `token`. With `marks`, prompt marks have their escape sequences as payload.
        """
        return await self._api.read_terminal(self.id, since=since, wait=wait, max_bytes=max_bytes, marks=marks)

    async def events(
        self, since: int = 0, *, marks: bool = False, cursor: bool = False
    ) -> AsyncGenerator[TerminalEvent, None]:
        """Output and events as they happen, until the terminal is closed.

        With `cursor`, output events have the position of the cursor after them.
        """
        screen = emulator(self.size.rows, self.size.cols) if cursor else None
        token = 0 if cursor else since
        try:
            while True:
                found = await self._api.read_terminal(self.id, since=token, wait=_POLL_SECONDS, marks=marks)
                for event in found.events:
                    if screen is not None:
                        event = _with_cursor(screen, event)
                    if event.token > since:
                        yield event
                token = found.token
                if found.closed:
                    return
        finally:
            if screen is not None:
                screen.close()

    async def output(self, since: int = 0) -> AsyncGenerator[bytes, None]:
        """Output after the position `since`, as it is printed."""
        async for event in self.events(since):
            if event.type == "output":
                yield event.payload

    async def screen(self) -> Screen:
        """The current screen. The first call reads all retained output, a later one only new output."""
        async with self._emulating:
            return (await self._draw()).screen()

    async def redraw(self) -> tuple[bytes, int]:
        """Bytes that draw the screen on a cleared terminal of the same size, and the position after it."""
        async with self._emulating:
            drawn = await self._draw()
            return drawn.restore(), self._shown

    async def _draw(self) -> Emulator:
        if self._emulator is None:
            await asyncio.to_thread(preload)
            self._emulator = emulator(self.size.rows, self.size.cols)
        while True:
            found = await self._api.read_terminal(self.id, since=self._shown, max_bytes=_STEP_BYTES)
            if found.token == self._shown:
                return self._emulator
            for event in found.events:
                _show(self._emulator, event)
            self._shown = found.token

    async def recording(self, *, input: bool = False, title: str | None = None) -> str:
        """The retained output as asciicast v2, with its real timing.

        `input` adds typed input, if the terminal was opened with `record_input`. Dropped output shows as a marker.
        """
        status = await self.describe()
        events: list[CastEvent] = []
        size = status.size
        begun = False
        token = 0
        while True:
            found = await self._api.read_terminal(self.id, since=token, max_bytes=_STEP_BYTES, timing=True)
            if found.token == token:
                break
            token = found.token
            for event in found.events:
                if event.type == "resize" and event.size is not None and not begun:
                    size, begun = event.size, True  # the size that it was opened with
                    continue
                cast_event = _cast_event(event, status.started_at, input=input)
                if cast_event is not None:
                    events.append(cast_event)
        return "".join(
            write_cast(
                events,
                width=size.cols,
                height=size.rows,
                timestamp=int(status.started_at),
                title=title,
                command=" ".join(status.argv),
            )
        )

    # --- closing -------------------------------------------------------------------------------------------------

    async def close(
        self,
        mode: CloseMode | Literal["GRACEFUL", "FORCE"] = "graceful",
        *,
        jobs: JobsAtClose = "kill",
        grace: float = 5.0,
    ) -> TerminalStatus:
        """End the terminal: `exit` at the prompt, else a hang-up, up to `grace` seconds, KILL (`force`: at once).

        Background jobs end with it, or continue with `jobs="keep"`. Closing a closed terminal is no error.
        """
        kind = mode.lower()
        if kind not in get_args(CloseMode):
            raise InvalidParams(f"mode {mode!r}: not one of {', '.join(get_args(CloseMode))}")
        if jobs not in get_args(JobsAtClose):
            raise InvalidParams(f"jobs {jobs!r}: not one of {', '.join(get_args(JobsAtClose))}")
        status = await self._api.close_terminal(self.id, mode=cast(CloseMode, kind), jobs=jobs, grace=grace)
        self._status = status
        await self.release()
        return status

    async def release(self) -> None:
        """Stop `watch` and free the emulator of this handle. The terminal stays open."""
        if self._watcher is not None:
            self._watcher.cancel()
        async with self._emulating:
            if self._emulator is not None:
                self._emulator.close()
                self._emulator, self._shown = None, 0

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A terminal that was closed long ago is no longer known.
        with contextlib.suppress(UnknownTerminal):
            if isinstance(error, asyncio.CancelledError):
                await clean_up_cancelled(self._api, self.close("force"), error)
            else:
                await self.close("graceful")


async def close_unknown(api: ExecApi, terminal_id: str) -> None:
    """Close a terminal that may not have been opened."""
    with contextlib.suppress(UnknownTerminal):
        await api.close_terminal(terminal_id, mode="force")


def _search(search: OutputSearch, event: TerminalEvent) -> OutputMatch | None:
    """The match that this event completes, if any; `before` is the number of events before its end."""
    if event.type == "gap":
        search.feed(OutputGap("pty", event.offset, event.length))
    elif event.type == "output":
        chunk = OutputChunk("pty", event.offset, event.payload, event.token)
        return search.feed(chunk, before=event.token - len(event.payload) - event.offset)
    return None


def _show(screen: Emulator, event: TerminalEvent) -> None:
    if event.type == "output":
        screen.feed(event.payload)
    elif event.type == "resize" and event.size is not None:
        screen.resize(event.size.rows, event.size.cols)
    elif event.type == "gap":
        screen.feed(_CANCEL)


def _with_cursor(screen: Emulator, event: TerminalEvent) -> TerminalEvent:
    _show(screen, event)
    if event.type != "output":
        return event
    return msgspec.structs.replace(event, cursor_position=screen.screen().cursor)


def _cast_event(event: TerminalEvent, began: float, *, input: bool) -> CastEvent | None:
    at = max(0.0, event.timestamp - began)
    if event.type == "output":
        return CastEvent(at, OUTPUT, event.payload)
    if event.type == "input" and input:
        return CastEvent(at, INPUT, event.payload)
    if event.type == "resize" and event.size is not None:
        return resize_event(at, event.size)
    if event.type == "gap":
        return CastEvent(at, MARKER, f"{event.length} bytes are no longer kept".encode())
    return None
