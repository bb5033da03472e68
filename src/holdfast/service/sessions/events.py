"""Events for whoever subscribed, and the bell that wakes all who wait for a row of the audit log.

An event is a row of kind `event`. A subscription reads rows from the store at its own speed, and waits for the
store's notices between: nothing is queued for it, whoever is slow holds back nobody, and whoever was cut off reads
on after its token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.service.api import AuditFilter, Event
from holdfast.service.clock import Clock, sleep
from holdfast.service.model import AuditEntry, AuditRow, Caller, EventType, SessionRecord, State
from holdfast.service.problems import BadToken, Problem
from holdfast.service.sessions.ports import SessionStore
from holdfast.service.store.model import MISSED, Notice, Page

_PAGE: Final = 100
#: How soon the notices are asked for again after the database failed.
_AGAIN_SECONDS: Final = 1.0


class NoticeBell:
    """One reader of the store's notices for all who wait in this replica."""

    def __init__(self, store: SessionStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._watchers: dict[str, set[Watch]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._listen())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @contextmanager
    def watch(self, session_id: str = "") -> Iterator[Watch]:
        """Rung for each row of this session, or of any."""
        watch = Watch()
        self._watchers.setdefault(session_id, set()).add(watch)
        try:
            yield watch
        finally:
            self._watchers[session_id].discard(watch)
            if not self._watchers[session_id]:
                del self._watchers[session_id]

    async def _listen(self) -> None:
        while True:
            # The store reconnects by itself; this is for what it does not survive.
            with contextlib.suppress(Problem):
                async for notice in self._store.listen():
                    self._ring(notice)
            self._ring(MISSED)
            await sleep(self._clock, _AGAIN_SECONDS)

    def _ring(self, notice: Notice) -> None:
        if notice == MISSED:
            for watch in [each for all_ in self._watchers.values() for each in all_]:
                watch.ring(notice)
            return
        for key in {notice.session_id, ""}:
            for watch in self._watchers.get(key, ()):
                watch.ring(notice)


class Watch:
    """Whether something came since it was last cleared, and for which sessions."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.sessions: set[str] = set()
        self.missed = False

    def ring(self, notice: Notice) -> None:
        if notice == MISSED:
            self.missed = True
        else:
            self.sessions.add(notice.session_id)
        self._event.set()

    def clear(self) -> None:
        self._event.clear()
        self.sessions.clear()
        self.missed = False

    async def wait(self) -> None:
        await self._event.wait()


class _Place(NamedTuple):
    """Of an event among all: events are told in this order, and those of one session without a gap."""

    at: float
    session_id: str
    seq: int


def event_entry(
    record: SessionRecord,
    at: float,
    type: EventType,
    detail: str,
    *,
    approval_id: str = "",
    state: State | None = None,
    command_id: str = "",
) -> AuditEntry:
    """The row of an event."""
    body: dict[str, Any] = {"type": type, "detail": detail, "state": state or record.state}
    if approval_id:
        body["approval_id"] = approval_id
    return AuditEntry(record.session_id, at, record.agent_id, "event", command_id, body)


class EventStreams:
    """`SubscribeSessionEvents`."""

    def __init__(self, store: SessionStore, bell: NoticeBell, clock: Clock) -> None:
        self._store = store
        self._bell = bell
        self._clock = clock

    async def subscribe(
        self, caller: Caller, session_id: str, since: str, types: Sequence[EventType]
    ) -> AsyncIterator[Event]:
        """Those that were missed, then those that come. One session's end with that session."""
        agent_id = "" if caller.role == "operator" else caller.agent_id
        place = _read_place(since) if since else None
        with self._bell.watch(session_id) as watch:
            #: The last that was told of each session.
            told: dict[str, int] = {}
            start = self._clock.time()
            if session_id:
                last = await self._last_seq(session_id) if place is None else place.seq
                told[session_id] = last
                if place is not None:
                    watch.ring(Notice(session_id, last + 1))
            elif place is not None:
                async for row in self._missed(agent_id, place):
                    told[row.session_id] = row.seq
                    start = max(start, row.at)
                    if (event := _event(row, types)) is not None:
                        yield event
            while True:
                await watch.wait()
                sessions, missed = set(watch.sessions), watch.missed
                watch.clear()
                if missed and session_id:
                    sessions.add(session_id)
                elif missed:
                    # Some notices did not come: look at everything since the start.
                    newer = AuditFilter(agent_id=agent_id, kinds=("event",), since=start)
                    sessions |= {row.session_id async for row in self._all(newer)}
                for each in sorted(sessions):
                    over = False
                    for row in await self._newer(each, agent_id, told.get(each), start):
                        told[each] = row.seq
                        if (event := _event(row, types)) is not None:
                            yield event
                        over = over or _type_of(row) in ("SESSION_CLOSED", "SESSION_ERROR")
                    if over:
                        told.pop(each, None)
                        if session_id:
                            return

    async def _newer(self, session_id: str, agent_id: str, told: int | None, start: float) -> list[AuditRow]:
        """Its events after the one that was told last, oldest first."""
        which = AuditFilter(session_id=session_id, agent_id=agent_id, kinds=("event",), newest_first=True)
        found: list[AuditRow] = []
        token = ""
        while True:
            rows, token = await self._store.rows(which, Page(_PAGE, token))
            for row in rows:
                if row.seq <= (told or 0) or (told is None and row.at < start):
                    return found[::-1]
                found.append(row)
            if not token:
                return found[::-1]

    async def _last_seq(self, session_id: str) -> int:
        which = AuditFilter(session_id=session_id, kinds=("event",), newest_first=True)
        rows, _ = await self._store.rows(which, Page(1))
        return rows[0].seq if rows else 0

    async def _missed(self, agent_id: str, place: _Place) -> AsyncIterator[AuditRow]:
        which = AuditFilter(agent_id=agent_id, kinds=("event",), since=place.at)
        async for row in self._all(which):
            if _Place(row.at, row.session_id, row.seq) > place:
                yield row

    async def _all(self, which: AuditFilter) -> AsyncIterator[AuditRow]:
        token = ""
        while True:
            rows, token = await self._store.rows(which, Page(_PAGE, token))
            for row in rows:
                yield row
            if not token:
                return


def _event(row: AuditRow, types: Sequence[EventType]) -> Event | None:
    body = msgspec.json.decode(row.body)
    if types and body["type"] not in types:
        return None
    return Event(
        session_id=row.session_id,
        type=body["type"],
        detail=body["detail"],
        token=_write_place(_Place(row.at, row.session_id, row.seq)),
        at=row.at,
        approval_id=body.get("approval_id", ""),
        state=body["state"],
    )


def _type_of(row: AuditRow) -> str:
    return str(msgspec.json.decode(row.body)["type"])


def _write_place(place: _Place) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(list(place))).decode().rstrip("=")


def _read_place(token: str) -> _Place:
    try:
        place = msgspec.json.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)), type=list[Any])
        return msgspec.convert(tuple(place), _Place)
    except (binascii.Error, UnicodeError, ValueError, msgspec.MsgspecError):
        raise BadToken("since: no token of an event", reason="BAD_TOKEN") from None
