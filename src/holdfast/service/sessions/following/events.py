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
from holdfast.service.problems import BadToken, NotFound, Problem
from holdfast.service.sessions.ports import SessionStore, page_after
from holdfast.service.store.types import MISSED, Page, RowNotice
from holdfast.service.types import AuditEntry, AuditRow, Caller, EventType, SessionRecord, State

_PAGE: Final = 100
#: The watchers of all sessions; no session has this id, and the service's own stream has the empty one.
_ANY: Final = "*"
#: Sessions that a subscription remembers, its own and others'.
_MAX_REMEMBERED: Final = 10_000
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
        session_id = session_id or _ANY
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

    def _ring(self, notice: RowNotice) -> None:
        if notice == MISSED:
            for watch in [each for all_ in self._watchers.values() for each in all_]:
                watch.ring(notice)
            return
        for key in (notice.session_id, _ANY):
            for watch in self._watchers.get(key, ()):
                watch.ring(notice)


class Watch:
    """Whether something came since it was last cleared, and the first row of it in each session."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.first: dict[str, int] = {}
        self.missed = False

    def ring(self, notice: RowNotice) -> None:
        if notice == MISSED:
            self.missed = True
        else:
            self.first.setdefault(notice.session_id, notice.seq)
        self._event.set()

    def clear(self) -> None:
        self._event.clear()
        self.first = {}
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
            start = self._clock.time()
            #: The last that was told of each session, and sessions of others, whose notices are not looked into.
            told: dict[str, int] = {}
            others: set[str] = set()
            if session_id:
                told[session_id] = place.seq if place else await self._last_seq(session_id)
                watch.ring(RowNotice(session_id, told[session_id] + 1))
            elif place is not None:
                which = AuditFilter(agent_id=agent_id, kinds=("event",))
                async for row in self._after(which, *place):
                    told[row.session_id] = row.seq
                    start = max(start, row.at)
                    if (event := _event(row, types)) is not None:
                        yield event
            while True:
                await watch.wait()
                first, missed = watch.first, watch.missed
                watch.clear()
                if missed:
                    first |= await self._all_since(session_id, agent_id, start)
                for each, seq in first.items():
                    if each in others or (each not in told and await self._is_others(each, agent_id)):
                        if len(others) >= _MAX_REMEMBERED:
                            others.clear()
                        others.add(each)
                        continue
                    over = False
                    which = AuditFilter(session_id=each, agent_id=agent_id, kinds=("event",))
                    async for row in self._after(which, told.get(each, seq - 1)):
                        told[each] = row.seq
                        if (event := _event(row, types)) is not None:
                            yield event
                        over = over or _type_of(row) in ("SESSION_CLOSED", "SESSION_ERROR")
                    if session_id and (over or (await self._store.session(session_id)).over):
                        return
                    # A session that is over is remembered for a while: notices may come after the rows were read.
                    if len(told) > _MAX_REMEMBERED:
                        del told[next(iter(told))]

    async def _is_others(self, session_id: str, agent_id: str) -> bool:
        if not agent_id:
            return False
        try:
            return (await self._store.session(session_id)).agent_id != agent_id
        except NotFound:
            return True  # the service's own stream

    async def _all_since(self, session_id: str, agent_id: str, start: float) -> dict[str, int]:
        """Some notices did not come: what there was since the start, for each session from its first."""
        if session_id:
            return {session_id: 1}
        first: dict[str, int] = {}
        async for row in self._after(AuditFilter(agent_id=agent_id, kinds=("event",), since=start)):
            first.setdefault(row.session_id, row.seq)
        return first

    async def _last_seq(self, session_id: str) -> int:
        rows, _ = await self._store.rows(AuditFilter(session_id=session_id, newest_first=True), Page(1))
        return rows[0].seq if rows else 0

    async def _after(self, which: AuditFilter, *position: float | str) -> AsyncIterator[AuditRow]:
        page = page_after(_PAGE, *position) if position else Page(_PAGE)
        while True:
            rows, token = await self._store.rows(which, page)
            for row in rows:
                yield row
            if not token:
                return
            page = Page(_PAGE, token)


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
