"""Lists of sessions without their environments and policies, and a stream of those that change."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from holdfast.service.api import AuditFilter, SessionView
from holdfast.service.problems import NotFound
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.store import Store
from holdfast.service.store.types import Page, SessionFilter
from holdfast.service.types import Caller, ResourceUsage, SessionRecord, State
from holdfast.service.view_api import SessionChange, SessionSummary, SummaryFilter, SummaryPage
from holdfast.service.views.commands import commands_of

_LIVE: Final[tuple[State, ...]] = ("RUNNING", "BUSY", "IDLE")
#: Rows that are searched for the last command of a session.
_ROWS: Final = 32
#: Samples of a sparkline.
_HISTORY: Final = 24
#: Changes within this time are one; a page need not follow each of some thousand rows a second.
GATHER_SECONDS: Final = 0.25
#: Changed sessions in one round; beyond them a list is read again more cheaply.
MOST_CHANGES: Final = 200

History = Callable[[str], Sequence[ResourceUsage]]


class Summaries:
    """Summaries of the sessions that a caller may see."""

    def __init__(self, manager: SessionManager, store: Store, history: History) -> None:
        self._manager = manager
        self._store = store
        self._history = history

    async def page(self, caller: Caller, which: SummaryFilter, page_size: int, page_token: str) -> SummaryPage:
        agent_id = which.agent_id if caller.role == "operator" else caller.agent_id
        stored: tuple[State, ...] = tuple({"RUNNING" if each in _LIVE else each for each in which.states})
        chosen = SessionFilter(
            agent_id, stored, which.labels, which.search, which.sandbox, newest_first=not which.oldest_first
        )
        records, token = await self._store.sessions(chosen, Page(page_size, page_token))
        found = await self._summaries(caller, records)
        counts = await self._store.count_sessions("" if caller.role == "operator" else caller.agent_id)
        shown = (each for each in found if not which.states or each.state in which.states)
        return SummaryPage(tuple(shown), token, counts)

    async def _summaries(self, caller: Caller, records: Sequence[SessionRecord]) -> list[SessionSummary]:
        owner = "" if caller.role == "operator" else caller.agent_id
        waiting = Counter(each.session_id for each in await self._store.open_approvals(agent_id=owner))
        stored = await self._store.usages([each.session_id for each in records if not each.over])
        views = await asyncio.gather(*(self._manager.view(each, stored.get(each.session_id)) for each in records))
        return list(await asyncio.gather(*(self._summary(view, waiting) for view in views)))

    async def _summary(self, view: SessionView, waiting: Counter[str]) -> SessionSummary:
        record = view.record
        which = AuditFilter(
            session_id=record.session_id,
            kinds=("command", "input", "command_started", "command_ended"),
            newest_first=True,
        )
        # Pages of closed sessions, which may be long, cost no query for each.
        rows = [] if record.over else (await self._store.rows(which, Page(_ROWS)))[0]
        last = next(iter(commands_of(record, rows)), None)
        return SessionSummary(
            session_id=record.session_id,
            agent_id=record.agent_id,
            kind=record.kind,
            sandbox=record.sandbox,
            state=view.state,
            created_at=record.created_at,
            last_activity_at=record.last_activity_at,
            closed_at=record.closed_at,
            labels=record.labels,
            commands_run=record.commands_run,
            close_reason=record.close_reason,
            usage=view.usage,
            command="" if last is None else last.text,
            command_at=None if last is None else last.started_at,
            exit_code=None if last is None else last.exit_code,
            approvals=waiting[record.session_id],
            cpu_history=tuple(each.cpu_percent for each in self._history(record.session_id)[-_HISTORY:]),
        )

    async def changes(
        self, caller: Caller, session_ids: Sequence[str], interval: float, *, only: bool = False
    ) -> AsyncIterator[SessionChange]:
        """Yield the sessions with new rows in the audit log, and each `interval` those with new usage samples."""
        sampled: dict[str, float] = {}
        with self._manager.notices.watch() as watch:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval):
                        await watch.wait()
                    await asyncio.sleep(GATHER_SECONDS)
                changed = [name for name in watch.first if name and (not only or name in session_ids)]
                missed = watch.missed
                watch.clear()
                if missed or len(changed) > MOST_CHANGES:
                    yield SessionChange(reload=True)
                    continue
                for name in session_ids:
                    history = self._history(name)
                    if history and sampled.get(name) != history[-1].sampled_at:
                        sampled[name] = history[-1].sampled_at
                        changed.append(name)
                for summary in await self._summaries(caller, await self._visible(caller, changed)):
                    yield SessionChange(session=summary)

    async def _visible(self, caller: Caller, names: Sequence[str]) -> list[SessionRecord]:
        found = []
        for name in dict.fromkeys(names):
            with contextlib.suppress(NotFound):
                found.append(await self._manager.visible(caller, name))
        return found
