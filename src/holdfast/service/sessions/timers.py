"""What is done to sessions because time has passed: idle warnings, closing, the end of their lifetime.

One heap and one timer of the injected clock for all sessions of this replica. When something is due is the rules'
decision (`policy.deadlines`); a deadline that moved meanwhile is looked at again, not searched in the heap.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Final

from holdfast.service.api import AuditFilter
from holdfast.service.clock import Clock, Timer
from holdfast.service.policy.deadlines import Deadline, Due
from holdfast.service.problems import Problem
from holdfast.service.sessions.following.events import event_entry
from holdfast.service.sessions.following.follower import Follower
from holdfast.service.sessions.ports import SessionStore
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.store.types import Page
from holdfast.service.types import EventType

#: Between attempts to do what is due, when the database or the sandbox is away; doubling up to the second.
_AGAIN_SECONDS: Final = (1.0, 60.0)
#: Called with the session and why: closes it in the background.
CloseSession = Callable[[str, str], Awaitable[object]]


class TimerHeap:
    """Calls at a time, by key; one timer of the clock for all of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Hashable]] = []
        #: What is due when for each key; what the heap says else of it is old.
        self._current: dict[Hashable, tuple[float, int, Callable[[], object]]] = {}
        self._timer: Timer | None = None
        self._armed = float("inf")

    def __len__(self) -> int:
        return len(self._current)

    def set(self, key: Hashable, when: float, call: Callable[[], object]) -> None:
        """Call this then, instead of what was to be called for this key."""
        number = next(self._order)
        self._current[key] = (when, number, call)
        heapq.heappush(self._heap, (when, number, key))
        # Old entries are dropped when they come up; of a key that is set all the time there may be many before.
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [(due, order, each) for each, (due, order, _) in self._current.items()]
            heapq.heapify(self._heap)
        self._arm()

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
        self._timer = self._clock.call_later(max(0.0, due - self._clock.time()), self._ring)

    def _ring(self) -> None:
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
        clock: Clock,
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
        #: How often something that is due was tried in vain, and whose idle time is told to be over.
        self._tries: dict[str, int] = {}
        self._told_idle: set[str] = set()

    def watch(self, follower: Follower) -> None:
        """From now on, and again whenever a command begins or ends there."""
        session_id = follower.record.session_id
        due = self._next(follower)
        if due is not None and not follower.over.is_set():
            self._heap.set(session_id, due.when, lambda: self._due(follower))

    def forget(self, session_id: str) -> None:
        self._heap.drop(session_id)
        self._lifetime_warned.discard(session_id)
        self._tries.pop(session_id, None)
        self._told_idle.discard(session_id)

    def _next(self, follower: Follower) -> Deadline | None:
        record = follower.record
        return self._rules.deadline(
            record,
            self._clock.time(),
            busy=follower.busy,
            lifetime_warned=record.session_id in self._lifetime_warned,
        )

    def _due(self, follower: Follower) -> None:
        self._spawn(self._act(follower))

    async def _act(self, follower: Follower) -> None:
        session_id, now = follower.record.session_id, self._clock.time()
        due = self._next(follower)
        if due is None or due.when > now or follower.over.is_set():
            self.watch(follower)
            return
        try:
            await self._do(due.what, follower, now)
        except Problem:
            # The database or the sandbox cannot be had now: again, not at once.
            tries = self._tries[session_id] = self._tries.get(session_id, 0) + 1
            pause = min(_AGAIN_SECONDS[1], _AGAIN_SECONDS[0] * 2 ** min(tries - 1, 16))
            self._heap.set(session_id, self._clock.time() + pause, lambda: self._due(follower))
            return
        self._tries.pop(session_id, None)
        self.watch(follower)

    async def _do(self, what: Due, follower: Follower, now: float) -> None:
        record, policy = follower.record, follower.record.policy
        session_id = record.session_id
        match what:
            case "idle_warning":
                idle = now - record.last_activity_at
                detail = f"idle for {idle:.0f} s; it is closed in {policy.idle_grace:.0f} s"
                await self._tell(follower, "IDLE_WARNING", detail)
                follower.warned(now)
            case "idle_close":
                if session_id not in self._told_idle:
                    detail = f"idle for {now - record.last_activity_at:.0f} s"
                    await self._tell(follower, "IDLE_TIMEOUT", detail)
                    self._told_idle.add(session_id)
                await self._close(record.session_id, "idle timeout")
            case "lifetime_warning":
                if not await self._was_warned(record.session_id):
                    await self._tell(follower, "LIFETIME_WARNING", f"closed in {record.expires_at - now:.0f} s")
                self._lifetime_warned.add(record.session_id)
            case "lifetime_end":
                await self._close(record.session_id, "lifetime over")

    async def _was_warned(self, session_id: str) -> bool:
        """By another replica, or before a restart."""
        which = AuditFilter(session_id=session_id, kinds=("event",), contains="LIFETIME_WARNING")
        rows, _ = await self._store.rows(which, Page(1))
        return bool(rows)

    async def _tell(self, follower: Follower, type: EventType, detail: str) -> None:
        await self._store.append([event_entry(follower.record, self._clock.time(), type, detail)])


def background(
    tasks: set[asyncio.Task[Any]],
) -> Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]:
    """Starts work that nobody waits for and keeps it in the set, so that it is neither lost nor left behind."""

    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    return spawn
