"""Follows a session with a shell: appends the end of each command and of the shell to the audit log.

The position of the session is the row of the last command with an end in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

from holdfast.errors import UnknownProcess
from holdfast.exec_api import ExecApi
from holdfast.service.sessions.backend.session_backend import CommandOutcome, LoggedOutput
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.command_log import CommandLog, LoggedCommand
from holdfast.service.sessions.following.events import Watch
from holdfast.service.sessions.following.follower import END_POSITION, Ending, OnChange, SessionFollower
from holdfast.service.sessions.ports import MetricEvent, body_of
from holdfast.service.store.types import RowNotice, SessionLease
from holdfast.service.types import AuditRow, SessionRecord
from holdfast.types import ReadResult

#: The row of a command is written before the shell gets it: the pauses and the number of attempts to read it. Only
#: the command of another replica takes longer than a moment.
_RETRY_SECONDS: Final = (0.001, 0.05)
_ATTEMPTS: Final = 100
#: Ended commands that wait in memory for their rows, with some KiB each; the output of further ones is read again
#: from the sandbox. More than one commit of the database gathers from one session.
_MOST_OUTCOMES: Final = 64
#: Rows of this replica that are remembered: more than can wait for their notices.
_MOST_ROWS: Final = 256
#: The follower reads the output of a command that this replica runs for longer.
_RUN_SECONDS: Final = 1.0


class _Run:
    """A command that this replica runs or ran; `over` is set at the end of the call."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.over = asyncio.Event()
        self.outcome: CommandOutcome | None = None


class ShellFollower(SessionFollower):
    """A session with a shell."""

    def __init__(
        self, record: SessionRecord, lease: SessionLease, context: SessionContext, on_change: OnChange
    ) -> None:
        super().__init__(record, lease, context, on_change)
        #: The last command that was read to its end.
        self._read_number = 0
        self._progress = asyncio.Event()
        #: The commands that this replica runs or ran, by id, until their ends are written.
        self._runs: dict[str, _Run] = {}
        #: The latest rows of this replica; a command among them is the value.
        self._own: dict[int, LoggedCommand | None] = {}

    # --- commands of this replica --------------------------------------------------------------------------------

    def wrote(self, row: AuditRow, *, runs: bool) -> None:
        command = LoggedCommand(row.seq, row.command_id, row.at)
        self._remember(row.seq, command)
        if runs:
            self._runs[row.command_id] = _Run(row.seq)

    def ran(self, command_id: str, outcome: CommandOutcome | None) -> None:
        run = self._runs.get(command_id)
        if run is None:
            return
        if outcome is None or outcome.logged is None or len(self._runs) > _MOST_OUTCOMES:
            del self._runs[command_id]
        else:
            run.outcome = outcome
        run.over.set()
        self._progress.set()

    def appended(self, rows: Sequence[AuditRow]) -> None:
        for row in rows:
            self._remember(row.seq, None)

    def _remember(self, number: int, command: LoggedCommand | None) -> None:
        self._own[number] = command
        if len(self._own) > _MOST_ROWS:
            del self._own[next(iter(self._own))]

    def has_read(self, number: int) -> bool:
        return number <= self._read_number or any(
            run.number == number and run.outcome is not None for run in self._runs.values()
        )

    async def caught_up(self, number: int, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.has_read(number) and not self.over.is_set():
                    self._progress.clear()
                    await self._progress.wait()

    def _has_read(self, command: LoggedCommand) -> None:
        self._read_number = command.number
        self._runs.pop(command.command_id, None)
        self._progress.set()

    def _is_news(self, notice: RowNotice) -> bool:
        """Return whether a row may be that of a command, and not the end of one that this follower wrote."""
        return self._own.get(notice.seq, True) is not None

    def _own_commands(self, news: Watch, number: int) -> list[LoggedCommand] | None:
        """Return the commands after this row in the notices; None if another replica or part wrote some rows."""
        session_id = self.record.session_id
        new = range(news.first.get(session_id, 1), news.last.get(session_id, 0) + 1)
        known = not news.missed and all(each in self._own for each in new)
        found = [self._own.pop(each, None) for each in new]
        news.clear()
        return [each for each in found if each is not None and each.number > number] if known else None

    # --- the task ------------------------------------------------------------------------------------------------

    async def follow(self) -> Ending:
        context, session_id = self.context, self.record.session_id
        number = 0 if self.record.audited_token >= END_POSITION else self.record.audited_token
        await self._resume()
        commands = CommandLog(context.store, context.notices, session_id)
        async with context.pool.hold(self.record.sandbox) as api:
            ending = asyncio.ensure_future(self._ending(api))
            try:
                with commands.watch(self._is_news) as news:
                    ending.add_done_callback(lambda _: news.wake())
                    # The log has commands that this replica does not know of.
                    behind = True
                    while True:
                        following = await commands.after(number) if behind else self._own_commands(news, number)
                        # One page may not be all of them.
                        behind = following is None or (behind and bool(following))
                        for command in following or ():
                            await self._command(api, command, ending)
                            number = command.number
                        if behind or following:
                            continue
                        if ending.done():
                            # A command that ended the shell has its row before the end of the shell.
                            if not await commands.after(number):
                                return ending.result()
                            behind = True
                            continue
                        await news.wait()
            finally:
                ending.cancel()
                await asyncio.wait([ending])

    async def _resume(self) -> None:
        """Continue from the last row of an earlier follower."""
        last = await self.last_row("command_ended")
        if last is not None:
            body = body_of(last)
            self.counted(body["number"])
            self.last_exit_code, self.output_bytes = body["exit_code"], body["session_bytes"]

    async def _ending(self, api: ExecApi) -> Ending:
        """Wait for the end of the shell, and count the late output of background jobs."""
        session_id, seq = self.record.session_id, 0
        while True:
            try:
                found = await api.read(session_id, after_seq=seq, wait=self.context.settings.follow_seconds)
            except UnknownProcess:
                await api.describe_shell(session_id)  # raises if the shell is lost
                raise
            self._count(found)
            seq = found.after_seq
            if found.exited:
                break
        status = await api.describe_shell(session_id)
        # Without `exit`, such a code means a signal.
        crashed = status.exit_code is not None and status.exit_code > 128 and "exited" not in status.reason
        return Ending("ERROR" if crashed else "CLOSED", status.reason or "the shell ended", status.exit_code)

    async def _command(self, api: ExecApi, command: LoggedCommand, ending: asyncio.Task[Ending]) -> None:
        context = self.context
        excerpt, printed, seq = bytearray(), 0, 0
        self.became(busy=True)
        end: dict[str, Any] | None = None
        if (logged := await self._run_here(command)) is not None:
            excerpt, printed, end = bytearray(logged.excerpt), logged.size, self._ended_at(command)
        while end is None:
            try:
                found = await self._read(api, command, seq, ending)
            except UnknownProcess:
                found = None
            if found is None:
                end = {"exit_code": None, "detail": "the command did not run, or its record was dropped"}
                break
            for chunk in found.chunks:
                excerpt += chunk.data[: max(0, context.settings.audit_excerpt_bytes - len(excerpt))]
            printed += self._count(found)
            seq = found.after_seq
            if found.chunks:
                self.touched("output")
            # The exit has a separate number, after all output.
            if found.exited and (not found.chunks or seq > found.chunks[-1].seq):
                self.last_exit_code = found.exit_code
                end = self._ended_at(command)
        self._has_read(command)
        self.became(busy=False)
        totals = {"number": self.record.commands_run, "session_bytes": self.output_bytes}
        body = {**totals, **end, **self.excerpt(bytes(excerpt), printed)}
        await self.write([self.entry("command_ended", command.command_id, **body)], command.number, patient=True)

    async def _read(
        self, api: ExecApi, command: LoggedCommand, seq: int, ending: asyncio.Task[Ending]
    ) -> ReadResult | None:
        pause = _RETRY_SECONDS[0]
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(UnknownProcess):
                return await api.read(
                    command.command_id,
                    after_seq=seq,
                    max_bytes=self.context.settings.follow_bytes,
                    wait=self.context.settings.follow_seconds,
                )
            if seq or ending.done():
                return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS[1])
        return None

    async def _run_here(self, command: LoggedCommand) -> LoggedOutput | None:
        """Return the output of a command that this replica runs and that ends soon; None if it is to be read."""
        run = self._runs.get(command.command_id)
        if run is None:
            return None
        if not run.over.is_set():
            # Output of a longer command counts as activity while it is printed.
            too_long = asyncio.get_running_loop().call_later(_RUN_SECONDS, run.over.set)
            await run.over.wait()
            too_long.cancel()
        if run.outcome is None or run.outcome.logged is None:
            return None
        self.last_exit_code = run.outcome.exit_code
        self._count_bytes(run.outcome.logged.size)
        return run.outcome.logged

    def _ended_at(self, command: LoggedCommand) -> dict[str, Any]:
        """Count a command that has ended; return the part of its row about the end."""
        context = self.context
        self.counted()
        self.touched("output")
        duration = max(0.0, context.clock.time() - command.at)
        context.emit(MetricEvent("command_ended", "shell", duration))
        return {"exit_code": self.last_exit_code, "duration": round(duration, 6)}

    def _count(self, found: ReadResult) -> int:
        """Count printed bytes, including lost ones, and return their number."""
        count = sum(len(chunk.data) for chunk in found.chunks) + sum(gap.length for gap in found.gap)
        self._count_bytes(count)
        return count

    def _count_bytes(self, count: int) -> None:
        self.output_bytes += count
        if count:
            self.context.emit(MetricEvent("output", "shell", count))
