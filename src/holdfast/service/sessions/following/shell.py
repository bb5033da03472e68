"""Follows a session with a shell: appends the end of each command and of the shell to the audit log.

The position of the session is the row of the last command with an end in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from holdfast.errors import UnknownProcess
from holdfast.exec_api import ExecApi
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.command_log import CommandLog, LoggedCommand
from holdfast.service.sessions.following.follower import END_POSITION, Ending, OnChange, SessionFollower
from holdfast.service.sessions.ports import MetricEvent, body_of
from holdfast.service.store.types import SessionLease
from holdfast.service.types import SessionRecord
from holdfast.types import ReadResult

#: The row of a command is written before the shell gets it: the pauses and the number of attempts to read it. Only
#: the command of another replica takes longer than a moment.
_RETRY_SECONDS: Final = (0.001, 0.05)
_ATTEMPTS: Final = 100


class ShellFollower(SessionFollower):
    """A session with a shell."""

    def __init__(
        self, record: SessionRecord, lease: SessionLease, context: SessionContext, on_change: OnChange
    ) -> None:
        super().__init__(record, lease, context, on_change)
        #: The last command that was read to its end.
        self._read_number = 0
        self._progress = asyncio.Event()

    async def caught_up(self, number: int, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._read_number < number and not self.over.is_set():
                    self._progress.clear()
                    await self._progress.wait()

    def _has_read(self, number: int) -> None:
        self._read_number = number
        self._progress.set()

    async def follow(self) -> Ending:
        context, session_id = self.context, self.record.session_id
        number = 0 if self.record.audited_token >= END_POSITION else self.record.audited_token
        await self._resume()
        commands = CommandLog(context.store, context.notices, session_id)
        async with context.pool.hold(self.record.sandbox) as api:
            ending = asyncio.ensure_future(self._ending(api))
            try:
                with commands.watch() as news:
                    while True:
                        news.clear()
                        for command in await commands.after(number):
                            await self._command(api, command, ending)
                            number = command.number
                        if ending.done():
                            # A command that ended the shell has its row before the end of the shell.
                            if not await commands.after(number):
                                return ending.result()
                            continue
                        wake = asyncio.ensure_future(news.wait())
                        try:
                            await asyncio.wait([wake, ending], return_when=asyncio.FIRST_COMPLETED)
                        finally:
                            wake.cancel()
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
        end: dict[str, Any] | None = None
        self.became(busy=True)
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
                self.counted()
                self.touched("output")
                duration = max(0.0, context.clock.time() - command.at)
                context.emit(MetricEvent("command_ended", "shell", duration))
                end = {"exit_code": found.exit_code, "duration": round(duration, 6)}
        self._has_read(command.number)
        self.became(busy=False)
        totals = {"number": self.record.commands_run, "session_bytes": self.output_bytes}
        body = {**totals, **end, **self.excerpt(bytes(excerpt), printed)}
        await self.write([self.entry("command_ended", command.command_id, **body)], command.number)

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

    def _count(self, found: ReadResult) -> int:
        """Count printed bytes, including lost ones, and return their number."""
        count = sum(len(chunk.data) for chunk in found.chunks) + sum(gap.length for gap in found.gap)
        self.output_bytes += count
        if count:
            self.context.emit(MetricEvent("output", "shell", count))
        return count
