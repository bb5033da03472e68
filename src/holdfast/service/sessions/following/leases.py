"""Renews the leases of this replica every third of their time, and claims free ones.

Each lease has a follower and timers, which end when another replica takes the lease. The store refuses later writes
of that follower by their epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from holdfast.service.clock import sleep
from holdfast.service.problems import NotFound, Problem
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.follower import LeaseLost, SessionFollower
from holdfast.service.sessions.following.shell import ShellFollower
from holdfast.service.sessions.following.terminal import TerminalFollower
from holdfast.service.sessions.ports import MetricEvent, SessionWatcher
from holdfast.service.sessions.timers import SessionTimers
from holdfast.service.store.types import SessionLease
from holdfast.service.types import SessionRecord

#: Between two attempts to claim expired leases, if another replica claims them at the same time.
SHORTEST_PAUSE: Final = 0.1

#: Called for each session of another replica, or of this one before a restart, before it is followed.
Adopt = Callable[[SessionRecord], Awaitable[SessionRecord | None]]


class Leases:
    """The followers of this replica."""

    def __init__(
        self,
        context: SessionContext,
        timers: SessionTimers,
        adopt: Adopt,
        watchers: Sequence[SessionWatcher],
        on_renewal: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_renewal` is called after each renewal, for other rows that expire without one."""
        self._context = context
        self._timers = timers
        self._adopt = adopt
        self._watchers = watchers
        self._on_renewal = on_renewal
        self._followers: dict[str, tuple[SessionFollower, asyncio.Task[None]]] = {}
        #: Sessions that this replica creates now: it has their lease, and does not follow them yet.
        self._creating: set[str] = set()
        #: Sessions with a lease of this replica that had no follower at the last renewal.
        self._unfollowed: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._followers)

    def followers(self) -> list[SessionFollower]:
        return [follower for follower, _ in self._followers.values()]

    def follower(self, session_id: str) -> SessionFollower | None:
        found = self._followers.get(session_id)
        return None if found is None else found[0]

    def expect(self, session_id: str) -> None:
        """This replica creates the session."""
        self._creating.add(session_id)

    def creation_failed(self, session_id: str) -> None:
        self._creating.discard(session_id)
        for watcher in self._watchers:
            watcher.closed(session_id)

    def follow(self, record: SessionRecord, lease: SessionLease) -> SessionFollower:
        """Follow an open session."""
        self._creating.discard(record.session_id)
        kind = TerminalFollower if record.kind == "terminal" else ShellFollower
        follower = kind(record, lease, self._context, self._timers.watch)
        task = asyncio.ensure_future(follower.run())
        self._followers[record.session_id] = (follower, task)
        task.add_done_callback(lambda done: self._follower_done(follower, done))
        self._timers.watch(follower)
        for watcher in self._watchers:
            watcher.watch(record)
        return follower

    def _follower_done(self, follower: SessionFollower, task: asyncio.Task[None]) -> None:
        session_id = follower.record.session_id
        found = self._followers.get(session_id)
        if found is not None and found[1] is task:
            del self._followers[session_id]
            self._timers.forget(session_id)
            for watcher in self._watchers:
                leave = watcher.closed if follower.over.is_set() else watcher.forget
                leave(session_id)
        if not task.cancelled():
            task.result()  # raises a bug, which the loop's exception handler logs

    # --- the loop ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Claim free leases, then start the renewal loop."""
        await self.claim()
        self._task = asyncio.ensure_future(self._keep())

    async def stop(self) -> None:
        """Release all leases. The sessions continue, and another replica can follow them at once."""
        followers = [follower for follower, _ in self._followers.values()]
        tasks = [task for _, task in self._followers.values()]
        if self._task is not None:
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with contextlib.suppress(Problem):  # leases expire by themselves
            for follower in followers:
                with contextlib.suppress(LeaseLost):
                    await follower.flush()
            await self._context.store.release(self._context.replica)

    async def _keep(self) -> None:
        pause = third = self._context.settings.lease_seconds / 3
        while True:
            await sleep(self._context.clock, pause)
            pause = third
            with contextlib.suppress(
                Problem
            ):  # the database is unreachable: leases may expire, epochs keep the order
                await self.renew()
                await self.claim()
                await self._on_renewal()
                # Leases of a stopped replica are claimed when they expire, not up to a third of a lease later.
                ends = await self._context.store.next_end(self._context.replica)
                pause = min(third, max(ends, SHORTEST_PAUSE))

    async def renew(self) -> None:
        context = self._context
        ours = set(await context.store.renew(context.replica, context.settings.lease_seconds))
        for session_id in [each for each in self._followers if each not in ours]:
            follower, task = self._followers[session_id]
            # A session that is over has no lease; its follower may still write the last rows.
            stored = await context.store.session(session_id)
            if not stored.over and not follower.over.is_set():
                task.cancel()
                context.emit(MetricEvent("lease_lost", stored.kind))
        idle = ours - self._followers.keys() - self._creating
        for session_id in idle & self._unfollowed:
            # The follower ended by a bug, or did not start because the database failed after the claim. Without
            # its lease the session is claimed again. Only if seen twice: a new session has its lease a moment
            # before `expect` is called.
            await context.store.release(context.replica, session_id)
        self._unfollowed = idle

    async def claim(self) -> None:
        context = self._context
        limit = context.settings.claim_batch
        while True:
            leases = await context.store.claim(context.replica, context.settings.lease_seconds, limit)
            for lease in leases:
                await self._take_follower_done(lease)
            if len(leases) < limit:
                return

    async def _take_follower_done(self, lease: SessionLease) -> None:
        if lease.session_id in self._creating:
            return
        known = self._followers.get(lease.session_id)
        if known is not None:
            known[1].cancel()  # the lease had expired and was claimed again, with another epoch
            await asyncio.wait([known[1]])
        try:
            record = await self._adopt(await self._context.store.session(lease.session_id))
        except NotFound:
            return
        if record is not None:
            self.follow(record, lease)
            self._context.emit(MetricEvent("lease_taken", record.kind))
