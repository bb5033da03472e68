"""Timers of sessions: idle warnings, idle close, the end of the lifetime.

One heap and one timer of the injected clock serve all sessions of this replica. `policy.deadlines` computes the
deadlines; a deadline that moved is computed again when its entry is due, not searched in the heap.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Final

from holdfast.service.clock import ClockTimer, WallClock
from holdfast.service.policy.deadlines import Deadline, Due
from holdfast.service.problems import Problem
from holdfast.service.sessions.following.events import event_entry
from holdfast.service.sessions.following.follower import SessionFollower
from holdfast.service.sessions.ports import SessionStore, first_row
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.types import EventType

#: Between attempts while the database or the sandbox is unreachable; doubling up to the second value.
_RETRY_SECONDS: Final = (1.0, 60.0)
#: Closes a session in the background, with a reason.
CloseSession = Callable[[str, str], Awaitable[object]]


class TimerHeap:
    """Scheduled calls by key, with one timer of the clock."""

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Hashable]] = []
        #: The current entry of each key; other entries of the heap are stale.
        self._current: dict[Hashable, tuple[float, int, Callable[[], object]]] = {}
        self._timer: ClockTimer | None = None
        self._armed = float("inf")

    def __len__(self) -> int:
        return len(self._current)

    def set(self, key: Hashable, when: float, call: Callable[[], object]) -> None:
        """Schedule a call at a time; it replaces the call of the same key."""
        number = next(self._order)
        self._current[key] = (when, number, call)
        heapq.heappush(self._heap, (when, number, key))
        # Stale entries are dropped when they are due; a key that is set often can have many before that.
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [(due, order, each) for each, (due, order, _) in self._current.items()]
            heapq.heapify(self._heap)
        self._arm()

    def when(self, key: Hashable) -> float | None:
        """Return the time of the call of a key."""
        found = self._current.get(key)
        return None if found is None else found[0]

    def drop(self, key: Hashable) -> None:
        self._current.pop(key, None)

    def stop(self) -> None:
        self._current.clear()
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if not self._heap:
            return
        due = self._heap[0][0]
        if due >= self._armed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed = due
        self._timer = self._clock.call_later(max(0.0, due - self._clock.time()), self._fire)

    def _fire(self) -> None:
        self._armed = float("inf")
        self._timer = None
        now = self._clock.time()
        while self._heap and self._heap[0][0] <= now:
            _, number, key = heapq.heappop(self._heap)
            current = self._current.get(key)
            if current is not None and current[1] == number:
                del self._current[key]
                current[2]()
        self._arm()


class SessionTimers:
    """The deadlines of the sessions that this replica follows."""

    def __init__(
        self,
        heap: TimerHeap,
        store: SessionStore,
        rules: Rulebook,
        clock: WallClock,
        close: CloseSession,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._heap = heap
        self._store = store
        self._rules = rules
        self._clock = clock
        self._close = close
        self._spawn = spawn
        self._lifetime_warned: set[str] = set()
        #: Failed attempts by session, and sessions with an IDLE_TIMEOUT event.
        self._tries: dict[str, int] = {}
        self._idle_reported: set[str] = set()

    def watch(self, follower: SessionFollower) -> None:
        """Set the timer of a session; called again when a command ends."""
        record = follower.record
        session_id = record.session_id
        armed = self._heap.when(session_id)
        if armed is not None and armed <= record.last_activity_at + record.policy.idle_timeout:
            # Of all deadlines only this one can have come nearer, and a timer computes them again when it is due.
            return
        due = self._next(follower)
        if due is not None and not follower.over.is_set():
            self._heap.set(session_id, due.when, lambda: self._due(follower))

    def forget(self, session_id: str) -> None:
        self._heap.drop(session_id)
        self._lifetime_warned.discard(session_id)
        self._tries.pop(session_id, None)
        self._idle_reported.discard(session_id)

    def _next(self, follower: SessionFollower) -> Deadline | None:
        record = follower.record
        return self._rules.deadline(
            record,
            self._clock.time(),
            busy=follower.busy,
            lifetime_warned=record.session_id in self._lifetime_warned,
        )

    def _due(self, follower: SessionFollower) -> None:
        self._spawn(self._act(follower))

    async def _act(self, follower: SessionFollower) -> None:
        session_id, now = follower.record.session_id, self._clock.time()
        due = self._next(follower)
        if due is None or due.when > now or follower.over.is_set():
            self.watch(follower)
            return
        try:
            await self._do(due.what, follower, now)
        except Problem:
            # The database or the sandbox is unreachable: retry after a pause.
            tries = self._tries[session_id] = self._tries.get(session_id, 0) + 1
            pause = min(_RETRY_SECONDS[1], _RETRY_SECONDS[0] * 2 ** min(tries - 1, 16))
            self._heap.set(session_id, self._clock.time() + pause, lambda: self._due(follower))
            return
        self._tries.pop(session_id, None)
        self.watch(follower)

    async def _do(self, what: Due, follower: SessionFollower, now: float) -> None:
        record, policy = follower.record, follower.record.policy
        session_id = record.session_id
        match what:
            case "idle_warning":
                idle = now - record.last_activity_at
                detail = f"idle for {idle:.0f} s; it is closed in {policy.idle_grace:.0f} s"
                await self._report(follower, "IDLE_WARNING", detail)
                follower.warned(now)
            case "idle_close":
                if session_id not in self._idle_reported:
                    detail = f"idle for {now - record.last_activity_at:.0f} s"
                    await self._report(follower, "IDLE_TIMEOUT", detail)
                    self._idle_reported.add(session_id)
                await self._close(record.session_id, "idle timeout")
            case "lifetime_warning":
                if not await self._was_warned(record.session_id):
                    await self._report(follower, "LIFETIME_WARNING", f"closed in {record.expires_at - now:.0f} s")
                self._lifetime_warned.add(record.session_id)
            case "lifetime_end":
                await self._close(record.session_id, "lifetime over")

    async def _was_warned(self, session_id: str) -> bool:
        """Return whether another replica, or this one before a restart, has warned."""
        which = {"session_id": session_id, "kinds": ("event",), "contains": "LIFETIME_WARNING"}
        return await first_row(self._store, **which) is not None

    async def _report(self, follower: SessionFollower, type: EventType, detail: str) -> None:
        await self._store.append([event_entry(follower.record, self._clock.time(), type, detail)])


def background(
    tasks: set[asyncio.Task[Any]],
) -> Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]:
    """Return a function that starts a background task and keeps it in the set, for cancellation at the stop."""

    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    return spawn
