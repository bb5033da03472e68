"""Which sessions are ours to follow: leases are renewed every third of their time, and free ones claimed.

For each there is a follower and its deadlines. A lease that another replica took ends both; what a follower still
writes then is refused by its epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.service.clock import sleep
from holdfast.service.problems import NotFound, Problem
from holdfast.service.sessions.following.follower import Follower, LeaseLost, Surroundings
from holdfast.service.sessions.following.shell import ShellFollower
from holdfast.service.sessions.following.terminal import TerminalFollower
from holdfast.service.sessions.ports import Told, Watcher
from holdfast.service.sessions.timers import SessionTimers
from holdfast.service.store.types import SessionLease
from holdfast.service.types import SessionRecord

#: Between two looks at leases that have run out, if somebody else is just taking them.
SHORTEST_PAUSE: Final = 0.1

#: Called for each session that comes to us from another replica or from before a restart, before it is followed.
Adopt = Callable[[SessionRecord], Awaitable[SessionRecord | None]]


class Leases:
    """The followers of this replica."""

    def __init__(self, around: Surroundings, timers: SessionTimers, adopt: Adopt) -> None:
        self._around = around
        self._timers = timers
        self._adopt = adopt
        self._followers: dict[str, tuple[Follower, asyncio.Task[None]]] = {}
        #: Sessions that are being made here: their lease is ours, and they are not followed yet.
        self._in_the_making: set[str] = set()
        #: Those with a lease of ours that nobody followed when the leases were renewed last.
        self._unfollowed: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.watcher: Watcher | None = None
        #: Called after each renewal: what else must be renewed, or taken from replicas that are gone.
        self.beside: list[Callable[[], Awaitable[None]]] = []

    def __len__(self) -> int:
        return len(self._followers)

    def followers(self) -> list[Follower]:
        return [follower for follower, _ in self._followers.values()]

    def follower(self, session_id: str) -> Follower | None:
        found = self._followers.get(session_id)
        return None if found is None else found[0]

    def expect(self, session_id: str) -> None:
        """It is being made here."""
        self._in_the_making.add(session_id)

    def given_up(self, session_id: str) -> None:
        self._in_the_making.discard(session_id)
        if self.watcher is not None:
            self.watcher.closed(session_id)

    def follow(self, record: SessionRecord, lease: SessionLease) -> Follower:
        """It is there: follow it."""
        self._in_the_making.discard(record.session_id)
        kind = TerminalFollower if record.kind == "terminal" else ShellFollower
        follower = kind(record, lease, self._around, self._timers.watch)
        task = asyncio.ensure_future(follower.run())
        self._followers[record.session_id] = (follower, task)
        task.add_done_callback(lambda done: self._over(follower, done))
        self._timers.watch(follower)
        if self.watcher is not None:
            self.watcher.watch(record)
        return follower

    def _over(self, follower: Follower, task: asyncio.Task[None]) -> None:
        session_id = follower.record.session_id
        found = self._followers.get(session_id)
        if found is not None and found[1] is task:
            del self._followers[session_id]
            self._timers.forget(session_id)
            if self.watcher is not None:
                leave = self.watcher.closed if follower.over.is_set() else self.watcher.forget
                leave(session_id)
        if not task.cancelled():
            task.result()  # a bug of ours is not kept quiet: the loop's handler tells it

    # --- the loop ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Claim what is free before anybody is answered, then keep at it."""
        await self.claim()
        self._task = asyncio.ensure_future(self._keep())

    async def stop(self) -> None:
        """Let go of all sessions: they go on, and another replica may have them at once."""
        followers = [follower for follower, _ in self._followers.values()]
        tasks = [task for _, task in self._followers.values()]
        if self._task is not None:
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with contextlib.suppress(Problem):  # leases end by themselves
            for follower in followers:
                with contextlib.suppress(LeaseLost):
                    await follower.flush()
            await self._around.store.release(self._around.replica)

    async def _keep(self) -> None:
        pause = third = self._around.settings.lease_seconds / 3
        while True:
            await sleep(self._around.clock, pause)
            pause = third
            with contextlib.suppress(Problem):  # the database is away: leases may end, epochs keep the order
                await self.renew()
                await self.claim()
                for each in self.beside:
                    await each()
                # Those of a replica that is gone are taken when they end, not up to a third of a lease later.
                ends = await self._around.store.next_end(self._around.replica)
                pause = min(third, max(ends, SHORTEST_PAUSE))

    async def renew(self) -> None:
        around = self._around
        ours = set(await around.store.renew(around.replica, around.settings.lease_seconds))
        for session_id in [each for each in self._followers if each not in ours]:
            follower, task = self._followers[session_id]
            # One that is over has no lease any more: it may still be at its last words.
            stored = await around.store.session(session_id)
            if not stored.over and not follower.over.is_set():
                task.cancel()
                around.tell(Told("lease_lost", stored.kind))
        idle = ours - self._followers.keys() - self._in_the_making
        for session_id in idle & self._unfollowed:
            # Its follower ended by a bug, or was never begun because the database failed when it was claimed. With
            # the lease it would be nobody's; without it, it is claimed again. Seen twice: one that is made just now
            # has its lease a moment before it is expected.
            await around.store.release(around.replica, session_id)
        self._unfollowed = idle

    async def claim(self) -> None:
        around = self._around
        limit = around.settings.claim_batch
        while True:
            leases = await around.store.claim(around.replica, around.settings.lease_seconds, limit)
            for lease in leases:
                await self._take_over(lease)
            if len(leases) < limit:
                return

    async def _take_over(self, lease: SessionLease) -> None:
        if lease.session_id in self._in_the_making:
            return
        known = self._followers.get(lease.session_id)
        if known is not None:
            known[1].cancel()  # ours had expired and is ours again, with another epoch
            await asyncio.wait([known[1]])
        try:
            record = await self._adopt(await self._around.store.session(lease.session_id))
        except NotFound:
            return
        if record is not None:
            self.follow(record, lease)
            self._around.tell(Told("lease_taken", record.kind))
