"""`SessionViews` implements `view_api.ViewApi` over the sessions, the store, the monitor and the engines."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from holdfast.service.clock import WallClock
from holdfast.service.monitor.monitor import ResourceMonitor
from holdfast.service.policy.profiles import PolicyRules
from holdfast.service.problems import Denied, NotNow, Problem
from holdfast.service.sandboxes.session_sandboxes import SessionSandboxes
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.settings import ServiceSettings
from holdfast.service.store import Store
from holdfast.service.types import Caller
from holdfast.service.view_api import (
    AuditState,
    FleetState,
    ModelCall,
    ModelCalls,
    RecordingPart,
    SessionChange,
    SessionCommand,
    SummaryFilter,
    SummaryPage,
    TerminalFrame,
    TerminalScreen,
    UsageTotal,
)
from holdfast.service.views.commands import list_commands
from holdfast.service.views.fleet_view import list_fleet
from holdfast.service.views.model_calls import list_model_calls, record_model_calls
from holdfast.service.views.recording import read_recording
from holdfast.service.views.screens import ScreenCache
from holdfast.service.views.summaries import Summaries
from holdfast.service.views.terminal_stream import terminal_frames

#: A verification reads the whole log, so its result is reused for so long.
VERIFIED_SECONDS: Final = 30.0
_MOST_VERIFIED: Final = 100


class SessionViews:
    """The views of one replica."""

    def __init__(
        self,
        manager: SessionManager,
        store: Store,
        monitor: ResourceMonitor,
        sandboxes: SessionSandboxes,
        rules: Callable[[], PolicyRules],
        clock: WallClock,
        settings: ServiceSettings,
    ) -> None:
        self._manager = manager
        self._store = store
        self._monitor = monitor
        self._sandboxes = sandboxes
        self._rules = rules
        self._clock = clock
        self._settings = settings
        self._screens = ScreenCache(manager.pool)
        self._summaries = Summaries(manager, store, monitor.history)
        self._verified: OrderedDict[str, AuditState] = OrderedDict()
        self._verifying = asyncio.Lock()

    async def stop(self) -> None:
        await self._screens.aclose()

    async def summaries(
        self, caller: Caller, which: SummaryFilter, *, page_size: int = 100, page_token: str = ""
    ) -> SummaryPage:
        return await self._summaries.page(caller, which, page_size, page_token)

    def changes(
        self, caller: Caller, session_ids: Sequence[str] = (), *, only: bool = False
    ) -> AsyncIterator[SessionChange]:
        return self._summaries.changes(caller, session_ids, self._settings.monitor_interval, only=only)

    async def stream_terminal(
        self, caller: Caller, session_id: str, since: str = ""
    ) -> AsyncIterator[TerminalFrame]:
        record = await self._manager.visible(caller, session_id)
        wait = self._settings.max_wait_seconds
        async for frame in terminal_frames(record, self._manager.pool, self._screens, since, wait):
            yield frame

    async def screens(self, caller: Caller, session_ids: Sequence[str]) -> list[TerminalScreen]:
        return list(await asyncio.gather(*(self._screen(caller, each) for each in session_ids)))

    async def _screen(self, caller: Caller, session_id: str) -> TerminalScreen:
        try:
            record = await self._manager.visible(caller, session_id)
            if record.kind != "terminal":
                return TerminalScreen(session_id, problem="a SHELL has no screen")
            screen, drawing = await self._screens.screen(record)
        except Problem as problem:
            return TerminalScreen(session_id, problem=problem.message)
        return TerminalScreen(session_id, screen.cols, screen.rows, drawing, screen.text)

    async def commands(
        self, caller: Caller, session_id: str, *, page_token: str = ""
    ) -> tuple[list[SessionCommand], str]:
        record = await self._manager.visible(caller, session_id)
        return await list_commands(self._store, record, page_token)

    async def recording(
        self, caller: Caller, session_id: str, *, since: str = "", max_bytes: int = 1024 * 1024
    ) -> RecordingPart:
        record = await self._manager.visible(caller, session_id)
        return await read_recording(caller, record, self._manager, self._manager.pool, since, max_bytes)

    async def usage(self, caller: Caller, session_id: str = "") -> list[UsageTotal]:
        if not session_id:
            _operators_only(caller, "the usage of all sessions")
            return list(self._monitor.totals)
        await self._manager.visible(caller, session_id)
        return [
            UsageTotal(each.sampled_at, each.cpu_percent, each.memory_bytes, each.process_count, each.output_bytes)
            for each in self._monitor.history(session_id)
        ]

    async def sandboxes(self, caller: Caller) -> FleetState:
        _operators_only(caller, "the fleet")
        return await list_fleet(self._rules(), self._sandboxes, self._store, self._manager.pool)

    async def verify_audit(self, caller: Caller, session_id: str = "") -> AuditState:
        if session_id:
            await self._manager.visible(caller, session_id)
        else:
            _operators_only(caller, "the verification of the whole log")
        # One at a time: each reads all rows of its streams.
        async with self._verifying:
            known = self._verified.get(session_id)
            if known is not None and self._clock.time() - known.verified_at < VERIFIED_SECONDS:
                return known
            found = await self._store.verify(session_id or None)
            breaks = [
                f"{each.session_id or 'service'} row {each.seq}: {each.fault}: {each.detail}"
                for each in found.breaks
            ]
            if found.further:
                breaks.append(f"{found.further} more")
            state = AuditState(
                holds=found.holds,
                rows=found.rows,
                sessions=found.sessions,
                breaks=tuple(breaks),
                verified_at=self._clock.time(),
                head_seq=found.head_seq,
                head_hash=found.head_hash,
            )
            self._verified[session_id] = state
            if len(self._verified) > _MOST_VERIFIED:
                self._verified.popitem(last=False)
            return state

    async def take_over(self, caller: Caller, session_id: str, *, release: bool = False) -> None:
        await self._manager.take_over(caller, session_id, release=release)

    async def record_model_calls(self, caller: Caller, session_id: str, calls: Sequence[ModelCall]) -> None:
        record = await self._manager.visible(caller, session_id)
        if record.over:
            raise NotNow(f"session {session_id!r} is {record.state}", reason="SESSION_CLOSED")
        await record_model_calls(self._store, self._clock, caller, record, calls)

    async def model_calls(self, caller: Caller, session_id: str = "") -> ModelCalls:
        if session_id:
            await self._manager.visible(caller, session_id)
        else:
            _operators_only(caller, "the model calls of all sessions")
        return await list_model_calls(self._store, session_id)


def _operators_only(caller: Caller, what: str) -> None:
    if caller.role != "operator":
        raise Denied(f"only an operator may see {what}", reason="NOT_OPERATOR")
