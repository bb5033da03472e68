"""One interactive terminal: its state by the shell's marks, programs that read input, typing, and its end.

The process below it has the output and the input queue; the timeline has the events between the bytes. The state
comes from the shell's marks and from the kernel, never from the text of the output. `run` runs commands.

    RUNNING --prompt--> IDLE --command--> BUSY --prompt--> IDLE ...        close: CLOSING --exit--> CLOSED
    IDLE --continuation prompt--> BUSY, with `continuation` until the command begins or the prompt is back
    the program ended: CLOSED; it was killed, and not by us: ERROR
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.errors import TerminalClosed
from holdfast.runtime.durability.records import TerminalCheckpoint
from holdfast.runtime.terminal.input_wait import InputState, every_process, input_state, line_mode
from holdfast.runtime.terminal.keys import encode_keys
from holdfast.runtime.terminal.mark_filter import MarkFilter, PromptMark, TerminalModes
from holdfast.runtime.terminal.paste import CLEAR_LINE, ENTER, INTERRUPT
from holdfast.runtime.terminal.timeline import Timeline
from holdfast.runtime.tree.usage import ForegroundActivity
from holdfast.types import (
    CloseMode,
    JobsAtClose,
    TerminalCommandEnded,
    TerminalRead,
    TerminalSize,
    TerminalSpec,
    TerminalState,
    TerminalStatus,
    TerminalWait,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from holdfast.config import ExecServerConfig
    from holdfast.runtime.process.process import ManagedProcess
    from holdfast.runtime.terminal.run import CommandInFlight

#: Bytes that may begin a mark are held back for this long, if nothing follows them.
HOLD_SECONDS: Final = 0.02
#: The kernel has no event for a program that begins to read: a waiter polls, ever less often.
POLL_SECONDS: Final = (0.001, 0.1)
#: How long a shell has to exit by `exit` before it is hung up: it may print a warning of stopped jobs instead.
EXIT_SECONDS: Final = 1.0
#: The time between two hang-ups, doubled each time.
HANG_UP_SECONDS: Final = 0.05
#: A prompt is no longer than this, and neither is the question of a program that reads input.
_PROMPT_BYTES: Final = 4096
_QUESTION_BYTES: Final = 256
_NOT_TEXT: Final = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]|[\x00-\x09\x0b-\x1f\x7f]"
)

_LINE_ENDS: Final = (b"\r", b"\n", b"\x03", b"\x1c")
#: Ctrl-C, Ctrl-Z, Ctrl-\\.
_SIGNAL_KEYS: Final = b"\x03\x1a\x1c"
_CONTROL_KEYS: Final = bytes(range(0x20))
_NO_INPUT: Final = InputState(False, None, True, True)
_OVER: Final = ("CLOSED", "ERROR")


class LiveTerminal:
    """A terminal from its start until it is forgotten."""

    def __init__(
        self,
        spec: TerminalSpec,
        argv: tuple[str, ...],
        *,
        integration: str,
        nonce: str,
        config: ExecServerConfig,
        end_process: Callable[[ManagedProcess, float], Coroutine[None, None, None]],
        on_first_prompt: Callable[[], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self.spec = spec
        self.argv = argv
        self.integration = integration
        #: Commands of `run` by their ids: those under way, and the last ones that ended.
        self.runs: OrderedDict[str, asyncio.Task[TerminalCommandEnded]] = OrderedDict()
        self.timeline = Timeline(config.retained_terminal_events)
        self.process: ManagedProcess
        self.changes = 0
        self.reason = ""
        self.last_exit_code: int | None = None
        self.prompt: str | None = None
        #: How many prompts were shown.
        self.prompts = 0
        #: A continuation prompt is shown: the shell reads the rest of a command.
        self.continuation = False
        #: Keys were typed after the last line end: the line editor shows them, or waits for the rest of a key.
        self.typed = False
        #: An interrupt was typed or sent, and no line was entered since. bash records an interrupt that comes while
        #: it does not block in read(2), and acts on it after its line editor has read the first byte of the next
        #: line: that byte is lost, and the rest of the line runs.
        self.interrupted = False
        self.modes = TerminalModes()
        #: The command that `run` has typed.
        self.in_flight: CommandInFlight | None = None
        self.turn = asyncio.Lock()
        #: How long a command has between Ctrl-C, TERM and KILL.
        self.grace = config.interrupt_grace_seconds
        self._filter = MarkFilter(nonce) if integration else None
        self._release: asyncio.TimerHandle | None = None
        #: A line editor prints its prompt again whenever it draws its line anew: only what follows a D is new.
        self._prompt_due = False
        self._prompt_start: int | None = None
        self._command_runs = False
        #: How many keys were sent that may start a command, and have had no visible effect yet.
        self._unsettled = 0
        #: The number of prompts at the time of the last key.
        self._typed_at = 0
        self._awaiting: bool | None = False
        #: The time of the last change of the state, by the loop's clock.
        self._state_since = asyncio.get_running_loop().time()
        self._closing = False
        self._prints = 0
        #: The state that was recorded last.
        self._waiters: set[asyncio.Event] = set()
        self._loop = asyncio.get_running_loop()
        self._now = now
        self._end_process = end_process
        self._on_first_prompt = on_first_prompt

    def attach(self, process: ManagedProcess) -> None:
        """Connect the process of this terminal, before anything is read from it."""
        self._connect(process)
        self.timeline.add("resize", 0, self._now(), size=process.size)

    def _connect(self, process: ManagedProcess) -> None:
        self.process = process
        process.watcher = self
        process.input.on_put = self._on_typed
        self.timeline.on_add = process.recorder.terminal_event

    def attach_again(self, process: ManagedProcess, memory: TerminalCheckpoint | None) -> None:
        """Connect a process of an earlier server; the timeline has its events."""
        self._connect(process)
        if memory is not None:
            self._restore(memory)
        if process.status is not None and not self.is_over:
            self.ended(process)
        elif self._filter is not None and self._filter.held:
            self._hold()

    # --- status ----------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.spec.terminal_id

    @property
    def state(self) -> TerminalState:
        return self.timeline.state

    @property
    def token(self) -> int:
        """The position after everything so far."""
        return self.timeline.token(self.process.logs[2])

    @property
    def is_over(self) -> bool:
        return self.state in _OVER

    def status(self, *, look: bool = True) -> TerminalStatus:
        """The current status; without `look`, which queries the kernel, `awaiting_input` is None."""
        seen = self._query_input() if look else self._query_line_mode()
        self._read_pending()
        process, group = self.process, self.process.foreground_group()
        return TerminalStatus(
            terminal_id=self.id,
            pid=process.pid,
            argv=self.argv,
            state=self.state,
            size=process.size or TerminalSize(),
            cwd=self.cwd,
            started_at=process.started_at,
            token=self.token,
            changes=self.changes,
            prompt=self.prompt,
            continuation=self.continuation,
            awaiting_input=seen.awaiting,
            echo=seen.echo,
            canonical=seen.canonical,
            foreground=_name(seen.pid or group),
            foreground_pid=seen.pid or group or None,
            input_queued=process.input.queued_bytes,
            last_exit_code=self.last_exit_code,
            exit_code=process.status.exit_code if process.status else None,
            signal=process.status.signal if process.status else None,
            reason=self.reason,
            integration=self.integration,
            alternate_screen=self.modes.alternate_screen,
            bracketed_paste=self.modes.bracketed_paste,
            application_cursor=self.modes.application_cursor,
            user=self.spec.user,
            interrupted=self.interrupted,
        )

    def activity(self) -> ForegroundActivity:
        """The foreground group, and how long a command runs; after a restart of the server, since the restart."""
        group = self.process.foreground_group()
        if group == self.process.own_group:
            group = 0
        runs = self.state == "BUSY" and not self.continuation
        busy = self._loop.time() - self._state_since if runs else None
        # Not at a prompt: the query reads a few files of /proc.
        awaiting = self._probe_input().awaiting if group or busy is not None else False
        return ForegroundActivity(group=group, seconds=busy, awaiting=awaiting)

    @property
    def cwd(self) -> str:
        """The directory of the shell, or of the program without one."""
        try:
            return (
                os.readlink(f"/proc/{self.process.program_pid}/cwd") if self.process.running else self.process.cwd
            )
        except OSError:
            return self.process.cwd

    # --- output ----------------------------------------------------------------------------------------------

    def printed(self, data: bytes) -> bytes:
        marks: list[PromptMark] = []
        if self._filter is not None:
            data, marks = self._filter.feed(data)
            if self._filter.held:
                self._hold()
        # One time for all bytes of a read: marks are never older than the bytes behind them.
        now = self._now()
        if data:
            self._note_output(data, now)
        offset = self.process.logs[2].end
        last_command = max((at for at, mark in enumerate(marks) if mark.letter == "C"), default=-1)
        for at, mark in enumerate(marks):
            self._marked(mark, offset, data, now, went_on=at < last_command)
        self._save_state()
        return data

    def printing_ended(self) -> bytes:
        held = self._filter.release() if self._filter is not None else b""
        if held:
            self._note_output(held, self._now())
            self.process.recorder.terminal_checkpoint(self._saved_state, delay=True)
        return held

    def _note_output(self, data: bytes, now: float) -> None:
        self.timeline.note_output(self.process.logs[2].end, now)
        self.process.recorder.printed_at = now
        self.modes.feed(data)
        self._prints += 1

    def _hold(self) -> None:
        if self._release is not None:
            self._release.cancel()
        self._release = self._loop.call_later(HOLD_SECONDS, self._release_held)

    def _release_held(self) -> None:
        held = self.printing_ended()
        if held:
            self.process.print_late(held)

    def _read_pending(self) -> None:
        """Read what the PTY holds."""
        if self.process.running:
            self.process.take_what_is_there()

    def read(self, since: int, max_bytes: int, *, timing: bool = False, marks: bool = False) -> TerminalRead:
        """Output and events after a position, without waiting."""
        found = self.timeline.read(self.process.logs[2], since, max_bytes, timing=timing, marks=marks)
        at_end = found.token >= self.token
        return TerminalRead(found.events, found.token, found.state, found.truncated, at_end and self.process.closed)

    # --- the shell's marks -----------------------------------------------------------------------------------

    def _marked(self, mark: PromptMark, offset: int, data: bytes, now: float, *, went_on: bool) -> None:
        """Handle a mark in `data`, which is not in the log yet and begins at `offset` there.

        `went_on`: the shell has begun a command since.
        """
        at = offset + mark.position
        if self._closing and mark.letter != "D":
            # The `exit` that closes it is no command; a prompt after it is counted.
            self.prompts += mark.letter == "B"
        elif mark.letter == "A" and self._prompt_due:
            self._prompt_start = at
            self.timeline.add("promptStart", at, now)
        elif mark.letter == "B" and self._prompt_start is not None:
            text = self._between(self._prompt_start, at, offset, data)
            self._prompt_start = None
            # The current directory: a command that was typed ahead may have changed it already.
            self._prompt_shown(at, text, now, None if went_on else self.cwd)
        elif mark.letter == "C":
            self._command_runs = True
            self._set_continuation(False)
            run_id = "" if self.in_flight is None else self.in_flight.began(at)
            self.timeline.add("command", at, now, run_id=run_id)
            self._set_state("BUSY", at, now)
        elif mark.letter == "D":
            self._command_ended(at, mark.argument, now)
        elif mark.letter == "P":
            self._set_state("BUSY", at, now)
            self._set_continuation(not self._command_runs)
            self.timeline.add("continuation", at, now)
        self._notify()

    def _set_continuation(self, continuation: bool) -> None:
        if continuation != self.continuation:
            self.continuation = continuation
            self.changes += 1

    def _prompt_shown(self, at: int, text: str, now: float, cwd: str | None) -> None:
        self._command_runs = self._prompt_due = False
        self._set_continuation(False)
        if self._unsettled <= 1:
            self._unsettled = 0
        self.prompts += 1
        if self.prompts == 1:
            self._on_first_prompt()
        if text != self.prompt:
            self.prompt = text
            self.changes += 1
        self._set_state("IDLE", at, now)
        self.timeline.add("prompt", at, now, prompt=text, cwd=cwd)

    def _command_ended(self, at: int, argument: str, now: float) -> None:
        self._prompt_due = True
        code = int(argument) if argument.isdecimal() else 0
        in_flight = self.in_flight
        # A line with a syntax error, or with a comment alone, ends without having begun.
        typed_by_us = in_flight is not None and in_flight.was_typed
        if not self._command_runs and not typed_by_us:
            return
        self._command_runs = False
        self.last_exit_code = code
        if in_flight is not None and typed_by_us:
            in_flight.ended(at, code, self.prompts)
        self.timeline.add("ended", at, now, exit_code=code)

    def _between(self, start: int, end: int, offset: int, data: bytes) -> str:
        start = max(start, end - _PROMPT_BYTES)
        earlier = self.process.logs[2].read(start, min(end, offset) - start) if start < offset else b""
        text = earlier + data[max(0, start - offset) : max(0, end - offset)]
        return _as_text(text)

    def unfinished_line(self) -> str:
        """The text of the output after the last line end: the question of a program that reads input."""
        return _as_text(self.timeline.unfinished_line(self.process.logs[2], _QUESTION_BYTES))

    # --- state -----------------------------------------------------------------------------------------------

    def _set_state(
        self,
        state: TerminalState,
        at: int | None = None,
        now: float | None = None,
        *,
        reason: str = "",
        exit_code: int | None = None,
    ) -> None:
        if state == self.state:
            return
        self.timeline.state = state
        self._state_since = self._loop.time()
        self.changes += 1
        self.reason = reason
        at = self.process.logs[2].end if at is None else at
        self.timeline.add("state", at, now or self._now(), exit_code=exit_code, reason=reason)

    def ended(self, process: ManagedProcess) -> None:
        """Event of the process: its program has exited, and all its output is in the log."""
        status = process.status
        assert status is not None
        name = self.argv[0]
        self._set_continuation(False)
        if self._closing or status.signal is None:
            reason = f"{name} ended with exit code {status.exit_code}"
            self._set_state("CLOSED", reason=reason, exit_code=status.exit_code)
        else:
            reason = f"{name} was killed by {status.signal}"
            self._set_state("ERROR", reason=reason, exit_code=status.exit_code)
        if self._release is not None:
            self._release.cancel()
        self._awaiting = False
        self._notify()

    def check_open(self) -> None:
        if self.is_over:
            raise TerminalClosed(f"terminal {self.id!r} is closed: {self.reason}")

    def _notify(self) -> None:
        """Wake the waiters after an event other than output; they run after this turn of the loop."""
        self._save_state()
        for event in self._waiters:
            event.set()
        self.process.wake_waiters()

    # --- waiting ---------------------------------------------------------------------------------------------

    def _query_input(self) -> InputState:
        """Query the kernel for a program that reads input, and record a change."""
        found = self._probe_input()
        if self.process.input.queued_bytes:
            found = found._replace(awaiting=False)  # there is more to read than the terminal has taken
        if found.awaiting != self._awaiting:
            self._awaiting = found.awaiting
            self.changes += 1
            self._notify()
        return found

    def _query_line_mode(self) -> InputState:
        """Line mode only; `awaiting` is None."""
        terminal = self.process.terminal
        mode = line_mode(terminal) if terminal >= 0 and self.process.running else None
        return _NO_INPUT if mode is None else InputState(None, None, *mode)

    def _probe_input(self) -> InputState:
        process = self.process
        if process.terminal < 0 or not process.running:
            return _NO_INPUT
        return input_state(process.terminal, every_process if process.jail is None else process.jail.inside)

    def is_idle(self) -> bool:
        """Whether the prompt is shown and each line that was typed has begun.

        The shell's mark of a command that was just typed may not have come yet. So the kernel is queried whether
        the shell reads again, and only then its output up to that moment is read.
        """
        if self._unsettled and self.state != "BUSY":
            awaiting = self._query_input().awaiting
            self._read_pending()
            if self.state == "IDLE" and (awaiting or (awaiting is None and self.prompts > self._typed_at)):
                self._unsettled = 0
            return self.state == "IDLE" and not self._unsettled
        return self.state == "IDLE"

    def is_input_awaited(self) -> bool:
        """Whether a program or the shell blocks in a read of the terminal."""
        return self._query_input().awaiting is True

    async def wait_for_line(self, timeout: float | None) -> bool:
        """Wait for a prompt or a continuation prompt; False after the timeout."""

        def takes_line() -> bool:
            return self.is_idle() or (self.continuation and self._query_input().awaiting is not False)

        return await self.until(takes_line, timeout, polls=lambda: self._unsettled > 0 or self.continuation)

    async def wait(self, until: TerminalWait, timeout: float | None, changes: int) -> bool:
        """Wait for a condition; False after the timeout, `TerminalClosed` if it cannot hold any more."""
        if until == "idle":
            return await self.until(self.is_idle, timeout, polls=lambda: self._unsettled > 0)
        if until == "awaitingInput":
            return await self.until(self.is_input_awaited, timeout, polls=lambda: True)
        if until == "change":
            return await self.until(
                lambda: self._has_changed(changes), timeout, polls=lambda: True, over_is_fine=True
            )
        return await self.until(lambda: self.is_over, timeout, over_is_fine=True)

    def _has_changed(self, since: int) -> bool:
        self._query_input()
        return self.changes > since

    async def until(
        self,
        condition: Callable[[], bool],
        timeout: float | None,
        *,
        polls: Callable[[], bool] = lambda: False,
        over_is_fine: bool = False,
    ) -> bool:
        """Wait until a condition holds. `polls` returns whether it may begin to hold without an event."""
        now = self._loop.time
        deadline = None if timeout is None else now() + timeout
        shortest, longest = POLL_SECONDS
        pause, prints = shortest, self._prints
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            while not condition():
                if self.is_over and not over_is_fine:
                    self.check_open()
                left = None if deadline is None else deadline - now()
                if left is not None and left <= 0:
                    return False
                rest = left
                if polls():
                    pause = shortest if self._prints != prints else min(2 * pause, longest)
                    prints = self._prints
                    rest = pause if left is None else min(left, pause)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await event.wait()
                event.clear()
            return True
        finally:
            self._waiters.discard(event)

    # --- input -----------------------------------------------------------------------------------------------

    def _on_typed(self, data: bytes) -> None:
        self.typed = data[-1:] not in _LINE_ENDS
        interrupt, line_end = data.rfind(INTERRUPT), max(data.rfind(b"\r"), data.rfind(b"\n"))
        if interrupt != line_end:
            self.interrupted = interrupt > line_end
        self._typed_at = self.prompts
        # A signal discards keys for a moment after the prompt that it causes: it counts twice.
        self._unsettled += _count(data, _CONTROL_KEYS) + _count(data, _SIGNAL_KEYS)
        self._save_state()
        if self.spec.record_input and not self._is_secret():
            self.timeline.add("input", self.process.logs[2].end, self._now(), payload=data)
            self.process.wake_waiters()

    def _is_secret(self) -> bool:
        """Whether the terminal reads a line without echo: most likely a password."""
        return self.process.terminal >= 0 and line_mode(self.process.terminal) == (False, True)

    def type_line(self, line: bytes, write_id: str = "") -> None:
        """Type one line at the prompt, in place of what stands there; the same `write_id` again types nothing."""
        if not self.process.input.has_taken(write_id):
            self.process.input.put((CLEAR_LINE if self.typed else b"") + line + ENTER, write_id or None)
            self._unsettled = 1

    def interrupt(self) -> None:
        """Type Ctrl-C."""
        self.process.input.put(INTERRUPT)

    def press(self, keys: Sequence[str], write_id: str | None = None) -> None:
        """Type keys by their names, encoded for the mode of the program in the foreground."""
        self.check_open()
        self.process.input.put(encode_keys(keys, application_cursor=self.modes.application_cursor), write_id)

    def signalled(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            self.interrupted = True
            self._typed_at = self.prompts
            self._unsettled += 2  # as Ctrl-C
            self._save_state()

    def resized(self, size: TerminalSize) -> None:
        self.changes += 1
        self.timeline.add("resize", self.process.logs[2].end, self._now(), size=size)
        self._notify()

    def signal_foreground(self, number: signal.Signals) -> None:
        """Send a signal to the foreground group, unless that is the shell itself."""
        group = self.process.foreground_group()
        if group not in (0, self.process.pid, self.process.own_group):
            self.process.signal_group(group, number)

    def runs_program(self) -> bool:
        """Whether a program is in the foreground, and not the shell or its child that has not executed one yet."""
        shell, group = self.process.pid, self.process.foreground_group()
        return group not in (0, shell, self.process.own_group) and _name(group) != _name(shell)

    # --- its end ---------------------------------------------------------------------------------------------

    async def close(self, mode: CloseMode, jobs: JobsAtClose, grace: float) -> None:
        """Close it: graceful is `exit` at the prompt, else a hang-up, and KILL after the grace. May be repeated."""
        process = self.process
        deadline = self._loop.time() + (grace if mode == "graceful" else 0.0)
        if not self.is_over:
            idle, continuation = self.is_idle(), self.continuation
            self._closing = True
            self._set_continuation(False)
            self._set_state("CLOSING")
            self._notify()
            if mode == "graceful":
                await self._exit_shell(idle, continuation, jobs, grace, deadline)
        if jobs == "kill":
            # Also after its program has exited: background jobs may still run.
            await self._end_process(process, max(0.0, deadline - self._loop.time()))
        elif process.running:
            self.signal_foreground(signal.SIGKILL)
            process.signal_leader(signal.SIGKILL)
            await process.wait_exit()

    async def _exit_shell(
        self, idle: bool, continuation: bool, jobs: JobsAtClose, grace: float, deadline: float
    ) -> None:
        if continuation:
            # `exit` would be read as the next line of the incomplete command.
            before = self.prompts
            self.interrupt()
            idle = await self.until(
                lambda: self.prompts > before or self.is_over, min(grace, EXIT_SECONDS), over_is_fine=True
            )
        elif not idle and jobs == "keep" and self.integration:
            # A shell that is hung up hangs up its background jobs: only the foreground gets the signal.
            before = self.prompts
            self.signal_foreground(signal.SIGHUP)
            idle = await self.until(lambda: self.prompts > before or self.is_over, grace / 2, over_is_fine=True)
        if idle and not self.is_over:
            before = self.prompts
            self.type_line(b"exit")
            await self.until(
                lambda: self.prompts > before or self.is_over, min(grace, EXIT_SECONDS), over_is_fine=True
            )
        pause = HANG_UP_SECONDS
        while jobs == "kill" and not self.is_over and self._loop.time() < deadline:
            # A shell that has just shown its prompt records a signal, and acts on it at the next key.
            self._hang_up()
            await self.until(lambda: self.is_over, pause, over_is_fine=True)
            pause *= 2
        await self.until(lambda: self.is_over, max(0.0, deadline - self._loop.time()), over_is_fine=True)

    def _hang_up(self) -> None:
        for group in {self.process.own_group, self.process.foreground_group()} - {0}:
            self.process.signal_group(group, signal.SIGHUP)
            self.process.signal_group(group, signal.SIGCONT)

    # --- across servers --------------------------------------------------------------------------------------

    def _save_state(self) -> None:
        """Record the state if it has changed, for the next server."""
        self.process.recorder.terminal_checkpoint(self._saved_state)

    def _saved_state(self, key: int) -> TerminalCheckpoint:
        return TerminalCheckpoint(
            key=key,
            changes=self.changes,
            reason=self.reason,
            last_exit_code=self.last_exit_code,
            prompt=self.prompt,
            prompts=self.prompts,
            continued=self.continuation,
            typed=self.typed,
            typed_at=self._typed_at,
            unsettled=self._unsettled,
            prompt_due=self._prompt_due,
            prompt_start=self._prompt_start,
            command_runs=self._command_runs,
            closing=self._closing,
            held=b"" if self._filter is None else self._filter.held,
            mode_tail=self.modes.tail,
            alternate_screen=self.modes.alternate_screen,
            application_cursor=self.modes.application_cursor,
            bracketed_paste=self.modes.bracketed_paste,
            interrupted=self.interrupted,
        )

    def _restore(self, memory: TerminalCheckpoint) -> None:
        self.process.recorder.checkpoint = memory
        self.changes, self.reason, self.last_exit_code = memory.changes, memory.reason, memory.last_exit_code
        self.prompt, self.prompts = memory.prompt, memory.prompts
        self.typed, self._typed_at, self._unsettled = memory.typed, memory.typed_at, memory.unsettled
        self.interrupted, self._closing = memory.interrupted, memory.closing
        self._prompt_due, self._prompt_start = memory.prompt_due, memory.prompt_start
        self._command_runs = memory.command_runs
        # Earlier versions kept it while the command ran, and were IDLE before.
        self.continuation = memory.continued and not memory.command_runs
        if self.continuation and self.state == "IDLE":
            self._set_state("BUSY")
        if self._filter is not None:
            self._filter.held = memory.held
        self.modes.tail = memory.mode_tail
        self.modes.alternate_screen = memory.alternate_screen
        self.modes.application_cursor = memory.application_cursor
        self.modes.bracketed_paste = memory.bracketed_paste


def _as_text(data: bytes) -> str:
    """The text of some output without its control sequences."""
    return _NOT_TEXT.sub(b"", data.replace(b"\r\n", b"\n")).decode("utf-8", "replace")


def _count(data: bytes, of: bytes) -> int:
    return len(data) - len(data.translate(None, of))


def _name(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().decode("utf-8", "replace").rstrip("\n")
    except OSError:
        return None
