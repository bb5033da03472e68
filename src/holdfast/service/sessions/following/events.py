"""Subscriptions to events, and the hub that distributes the store's notices of new audit rows.

An event is a row of kind `event`; for a subscriber that names `COMMAND_ENDED` or `MODEL_CALL`, also a row of kind
`command_ended` or `model_call`. A subscription reads rows from the store at its own speed and waits for notices in
between. Nothing is queued for it, so a slow subscriber delays only itself, and one that reconnects resumes after
its token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from holdfast.service.api import AuditFilter, SessionEvent
from holdfast.service.clock import WallClock, sleep
from holdfast.service.problems import BadToken, NotFound, Problem
from holdfast.service.sessions.ports import SessionStore, body_of, first_row, page_after
from holdfast.service.store.types import MISSED, Page, RowNotice
from holdfast.service.types import AuditEntry, AuditRow, Caller, EventType, SessionRecord, State

_PAGE: Final = 100
#: The key of watches on all sessions; no session has this id, and the stream of the service has the empty id.
_ANY: Final = "*"
#: Sessions that a subscription keeps in memory, those of the caller and others.
_MAX_SESSIONS: Final = 10_000
#: The pause before the hub listens again after a failure of the database.
_RETRY_SECONDS: Final = 1.0

_Found = TypeVar("_Found")
#: Kinds of rows that are events only for a subscriber that names the type: there are many of each in a session.
_BY_NAME: Final[dict[str, EventType]] = {"command_ended": "COMMAND_ENDED", "model_call": "MODEL_CALL"}
#: Whether a watch is woken for a row.
IsNews = Callable[[RowNotice], bool]


class NoticeHub:
    """Reads the store's notices once for all watches of this replica."""

    def __init__(self, store: SessionStore, clock: WallClock) -> None:
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
    def watch(self, session_id: str = "", is_news: IsNews | None = None) -> Iterator[Watch]:
        """Return a watch for the rows of this session, or of all; with `is_news`, for some of them."""
        session_id = session_id or _ANY
        watch = Watch(is_news)
        self._watchers.setdefault(session_id, set()).add(watch)
        try:
            yield watch
        finally:
            self._watchers[session_id].discard(watch)
            if not self._watchers[session_id]:
                del self._watchers[session_id]

    async def until(
        self, session_id: str, find: Callable[[], Awaitable[_Found | None]], seconds: float
    ) -> _Found | None:
        """Call `find` after each row of a session, until it returns a result; None after the timeout."""
        with self.watch(session_id) as watch, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    watch.clear()
                    if (found := await find()) is not None:
                        return found
                    await watch.wait()
        return None

    async def _listen(self) -> None:
        while True:
            # The store reconnects by itself; this handles its permanent failures.
            with contextlib.suppress(Problem):
                async for notice in self._store.listen():
                    self._notify(notice)
            self._notify(MISSED)
            await sleep(self._clock, _RETRY_SECONDS)

    def _notify(self, notice: RowNotice) -> None:
        if notice == MISSED:
            for watch in [each for all_ in self._watchers.values() for each in all_]:
                watch.notify(notice)
            return
        for key in (notice.session_id, _ANY):
            for watch in self._watchers.get(key, ()):
                watch.notify(notice)


class Watch:
    """The notices since the last `clear`: the first and the last new row of each session."""

    def __init__(self, is_news: IsNews | None = None) -> None:
        self._is_news = is_news
        self._event = asyncio.Event()
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.missed = False

    def notify(self, notice: RowNotice) -> None:
        if notice == MISSED:
            self.missed = True
        elif self._is_news is not None and not self._is_news(notice):
            return
        else:
            self.first.setdefault(notice.session_id, notice.seq)
            self.last[notice.session_id] = notice.seq
        self._event.set()

    def clear(self) -> None:
        self._event.clear()
        self.first, self.last = {}, {}
        self.missed = False

    def wake(self) -> None:
        """End the wait without a notice."""
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


class _EventPosition(NamedTuple):
    """The position of an event among all events, which are delivered in this order."""

    at: float
    session_id: str
    seq: int


def audit_entry(record: SessionRecord, at: float, kind: str, command_id: str = "", /, **body: Any) -> AuditEntry:
    """Return an audit row of a session."""
    return AuditEntry(record.session_id, at, record.agent_id, kind, command_id, body)


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
    """Return the audit row of an event."""
    ids = {"approval_id": approval_id} if approval_id else {}
    return audit_entry(
        record, at, "event", command_id, type=type, detail=detail, state=state or record.state, **ids
    )


class EventStreams:
    """`SubscribeSessionEvents`."""

    def __init__(self, store: SessionStore, notices: NoticeHub, clock: WallClock) -> None:
        self._store = store
        self._notices = notices
        self._clock = clock

    async def subscribe(
        self, caller: Caller, session_id: str, since: str, types: Sequence[EventType]
    ) -> AsyncGenerator[SessionEvent, None]:
        """Yield the events after `since`, then new ones. A subscription to one session ends with it."""
        agent_id = "" if caller.role == "operator" else caller.agent_id
        position = _read_position(since) if since else None
        kinds = ("event", *(kind for kind, type_ in _BY_NAME.items() if type_ in types))
        with self._notices.watch(session_id) as watch:
            start = self._clock.time()
            #: The last delivered row of each session, and sessions of other agents, to ignore their notices.
            delivered: dict[str, int] = {}
            others: set[str] = set()
            if session_id:
                delivered[session_id] = position.seq if position else await self._last_seq(session_id)
                watch.notify(RowNotice(session_id, delivered[session_id] + 1))
            elif position is not None:
                which = AuditFilter(agent_id=agent_id, kinds=kinds)
                async for row in self._after(which, *position):
                    delivered[row.session_id] = row.seq
                    start = max(start, row.at)
                    if (event := _event(row, types)) is not None:
                        yield event
            while True:
                await watch.wait()
                first, missed = watch.first, watch.missed
                watch.clear()
                if missed:
                    first |= await self._all_since(session_id, agent_id, start, kinds)
                for each, seq in first.items():
                    if each in others or (each not in delivered and await self._is_others(each, agent_id)):
                        if len(others) >= _MAX_SESSIONS:
                            others.clear()
                        others.add(each)
                        continue
                    over = False
                    which = AuditFilter(session_id=each, agent_id=agent_id, kinds=kinds)
                    async for row in self._after(which, delivered.get(each, seq - 1)):
                        delivered[each] = row.seq
                        if (event := _event(row, types)) is not None:
                            yield event
                        over = over or _type_of(row) in ("SESSION_CLOSED", "SESSION_ERROR")
                    if session_id and (over or (await self._store.session(session_id)).over):
                        return
                    # Sessions that are over stay for a while: notices may arrive after their rows were read.
                    if len(delivered) > _MAX_SESSIONS:
                        del delivered[next(iter(delivered))]

    async def _is_others(self, session_id: str, agent_id: str) -> bool:
        if not agent_id:
            return False
        try:
            return (await self._store.session(session_id)).agent_id != agent_id
        except NotFound:
            return True  # the stream of the service

    async def _all_since(
        self, session_id: str, agent_id: str, start: float, kinds: tuple[str, ...]
    ) -> dict[str, int]:
        """Return the first event of each session since the start, after notices were lost."""
        if session_id:
            return {session_id: 1}
        first: dict[str, int] = {}
        async for row in self._after(AuditFilter(agent_id=agent_id, kinds=kinds, since=start)):
            first.setdefault(row.session_id, row.seq)
        return first

    async def _last_seq(self, session_id: str) -> int:
        last = await first_row(self._store, session_id=session_id, newest_first=True)
        return 0 if last is None else last.seq

    async def _after(self, which: AuditFilter, *position: float | str) -> AsyncIterator[AuditRow]:
        page = page_after(_PAGE, *position) if position else Page(_PAGE)
        while True:
            rows, token = await self._store.rows(which, page)
            for row in rows:
                yield row
            if not token:
                return
            page = Page(_PAGE, token)


def _event(row: AuditRow, types: Sequence[EventType]) -> SessionEvent | None:
    body = body_of(row)
    if row.kind == "command_ended":
        code = body.get("exit_code")
        detail = f"{row.command_id}: " + ("exit code unknown" if code is None else f"exit code {code}")
        body = {"detail": detail, "state": "IDLE"}
    elif row.kind == "model_call":
        detail = f"{body.get('model') or body.get('path')}: status {body.get('status')}"
        body = {"detail": detail, "state": "RUNNING"}
    body.setdefault("type", _BY_NAME.get(row.kind))
    if types and body["type"] not in types:
        return None
    return SessionEvent(
        session_id=row.session_id,
        type=body["type"],
        detail=body["detail"],
        token=_write_position(_EventPosition(row.at, row.session_id, row.seq)),
        timestamp=row.at,
        approval_id=body.get("approval_id", ""),
        state=body["state"],
    )


def _type_of(row: AuditRow) -> str:
    return str(body_of(row).get("type", ""))


def _write_position(position: _EventPosition) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(list(position))).decode().rstrip("=")


def _read_position(token: str) -> _EventPosition:
    try:
        position = msgspec.json.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)), type=list[Any])
        return msgspec.convert(tuple(position), _EventPosition)
    except (binascii.Error, UnicodeError, ValueError, msgspec.MsgspecError):
        raise BadToken("since: not a token of an event", reason="BAD_TOKEN") from None
