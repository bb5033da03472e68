"""What happens in a session's shell, as rows of the audit log: how each command ended, and how the shell did.

The position of such a session is the number of the last command row whose end is written down.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.errors import UnknownProcess
from holdfast.exec_api import ExecApi
from holdfast.service.sessions.following.command_log import CommandLog, LoggedCommand
from holdfast.service.sessions.following.follower import END_POSITION, Ending, Follower, Surroundings
from holdfast.service.sessions.ports import Told
from holdfast.service.store.types import Lease
from holdfast.service.types import SessionRecord
from holdfast.types import ReadResult

#: A command's row is written before the shell has it: so long, and so often, it is looked for there. Only another
#: replica's takes longer than a moment.
_LOOK_SECONDS: Final = (0.001, 0.05)
_LOOKS: Final = 100


class ShellFollower(Follower):
    """A session with a shell."""

    def __init__(
        self, record: SessionRecord, lease: Lease, around: Surroundings, on_change: Callable[[Follower], None]
    ) -> None:
        super().__init__(record, lease, around, on_change)
        #: The last command whose end was read.
        self._read_number = 0
        self._progress = asyncio.Event()

    async def caught_up(self, number: int, seconds: float) -> None:
        """Until the end of this command was read: its shell forgets it after a few more. Not for ever, though."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._read_number < number and not self.over.is_set():
                    self._progress.clear()
                    await self._progress.wait()

    def _has_read(self, number: int) -> None:
        self._read_number = number
        self._progress.set()

    async def follow(self) -> Ending:
        around, session_id = self.around, self.record.session_id
        number = 0 if self.record.audited_token >= END_POSITION else self.record.audited_token
        await self._resume()
        commands = CommandLog(around.store, around.bell, session_id)
        async with around.pool.hold(self.record.sandbox) as api:
            ending = asyncio.ensure_future(self._ending(api))
            try:
                with commands.watch() as news:
                    while True:
                        news.clear()
                        for command in await commands.after(number):
                            await self._command(api, command, ending)
                            number = command.number
                        if ending.done():
                            # A command that ended the shell has its row by now.
                            if not await commands.after(number):
                                return ending.result()
                            continue
                        ring = asyncio.ensure_future(news.wait())
                        try:
                            await asyncio.wait([ring, ending], return_when=asyncio.FIRST_COMPLETED)
                        finally:
                            ring.cancel()
            finally:
                ending.cancel()
                await asyncio.wait([ending])

    async def _resume(self) -> None:
        """How far another follower had come."""
        last = await self.last_row("command_ended")
        if last is not None:
            body = msgspec.json.decode(last.body, type=dict[str, Any])
            self.counted(body["number"])
            self.last_exit_code, self.output_bytes = body["exit_code"], body["session_bytes"]

    async def _ending(self, api: ExecApi) -> Ending:
        """Wait for the shell's own end. What background jobs print late is counted."""
        session_id, seq = self.record.session_id, 0
        while True:
            try:
                found = await api.read(session_id, after_seq=seq, wait=self.around.settings.follow_seconds)
            except UnknownProcess:
                await api.describe_shell(session_id)  # raises, if it is gone
                raise
            self._count(found)
            seq = found.after_seq
            if found.exited:
                break
        status = await api.describe_shell(session_id)
        # An exit that nobody asked for by `exit` is one by a signal.
        crashed = status.exit_code is not None and status.exit_code > 128 and "exited" not in status.reason
        return Ending("ERROR" if crashed else "CLOSED", status.reason or "the shell ended", status.exit_code)

    async def _command(self, api: ExecApi, command: LoggedCommand, ending: asyncio.Task[Ending]) -> None:
        around = self.around
        excerpt, printed, seq = bytearray(), 0, 0
        self.became(busy=True)
        while True:
            try:
                found = await self._read(api, command, seq, ending)
            except UnknownProcess:
                found = None
            if found is None:
                self._has_read(command.number)
                body = self.excerpt(bytes(excerpt), printed)
                lost = self.entry(
                    "command_ended",
                    command.command_id,
                    number=self.record.commands_run,
                    exit_code=None,
                    detail="it did not run, or is forgotten",
                    session_bytes=self.output_bytes,
                    **body,
                )
                await self.write([lost], command.number)
                break
            for chunk in found.chunks:
                excerpt += chunk.data[: max(0, around.settings.audit_excerpt_bytes - len(excerpt))]
            printed += self._count(found)
            seq = found.after_seq
            if found.chunks:
                self.touched("output")
            # The exit has a number of its own, after all output.
            if found.exited and (not found.chunks or seq > found.chunks[-1].seq):
                self.last_exit_code = found.exit_code
                self._has_read(command.number)
                self.became(busy=False)
                self.counted()
                self.touched("output")
                duration = max(0.0, around.clock.time() - command.at)
                around.tell(Told("command_ended", "shell", duration))
                body = self.excerpt(bytes(excerpt), printed)
                ended = self.entry(
                    "command_ended",
                    command.command_id,
                    number=self.record.commands_run,
                    exit_code=found.exit_code,
                    session_bytes=self.output_bytes,
                    duration=round(duration, 6),
                    **body,
                )
                await self.write([ended], command.number)
                break
        self.became(busy=False)

    async def _read(
        self, api: ExecApi, command: LoggedCommand, seq: int, ending: asyncio.Task[Ending]
    ) -> ReadResult | None:
        pause = _LOOK_SECONDS[0]
        for _ in range(_LOOKS):
            with contextlib.suppress(UnknownProcess):
                return await api.read(
                    command.command_id,
                    after_seq=seq,
                    max_bytes=self.around.settings.follow_bytes,
                    wait=self.around.settings.follow_seconds,
                )
            if seq or ending.done():
                return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS[1])
        return None

    def _count(self, found: ReadResult) -> int:
        """Bytes printed, those that are lost among them."""
        count = sum(len(chunk.data) for chunk in found.chunks) + sum(gap.length for gap in found.gap)
        self.output_bytes += count
        if count:
            self.around.tell(Told("output", "shell", count))
        return count
