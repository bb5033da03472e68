"""Groups small writes into one transaction: while one runs, the next writes accumulate.

A flush to disk costs the same for one row as for hundreds, so under load each caller waits for about one flush, and
the number of flushes does not grow with the number of callers. Patient work, which no caller waits for, begins no
transaction at once: a transaction of one row takes several times as long as the row adds to another one. For the
same reason all work is patient while many sessions write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from sqlalchemy.exc import IntegrityError

from holdfast.service.problems import Bug, Problem, Unavailable
from holdfast.service.store.batch import Append, Batch, Outcome, Work
from holdfast.service.store.database.database import Database
from holdfast.service.store.one_statement import KnownHeads

#: Rows in one transaction. More would delay the first callers of the group; at a few thousand the flush is no
#: longer the main cost.
MAX_ROWS: Final = 1_000
#: How long patient work waits for other work: longer than a busy session takes to its next command, and too short
#: for a person to notice.
PATIENCE_SECONDS: Final = 0.005
#: So many sessions that write within so many seconds are a crowd. Their calls wait for the processor for longer
#: than `PATIENCE_SECONDS`, so a transaction for each few of them only takes processor time. Fewer sessions would
#: wait longer than they do without it.
CROWD: Final = 16
CROWD_SECONDS: Final = 0.1


class _Waiting(NamedTuple):
    work: Work
    done: asyncio.Future[Outcome]


class _Crowd:
    """Counts the sessions that have written lately."""

    def __init__(self) -> None:
        self._began = 0.0
        self._names: set[str] = set()
        self._before = 0

    def is_there(self, work: Work, now: float) -> bool:
        """Count the session of some work; return whether many sessions write."""
        if now - self._began > CROWD_SECONDS:
            # An interval without work was not counted.
            recent = now - self._began <= 2 * CROWD_SECONDS
            self._before = len(self._names) if recent else 0
            self._began, self._names = now, set()
        if isinstance(work, Append):
            self._names.update(entry.session_id for entry in work.entries)
        return self._before >= CROWD or len(self._names) >= CROWD


class GroupCommit:
    """Writes queued work in order, and returns to each caller the outcome of its own."""

    def __init__(
        self,
        database: Database,
        *,
        key: bytes | None,
        origin: str,
        on_written: Callable[[dict[str, tuple[int, int]]], None],
    ) -> None:
        self._database = database
        self._key = key
        self._origin = origin
        self._on_written = on_written
        self._waiting: deque[_Waiting] = deque()
        self._heads = KnownHeads()
        self._task: asyncio.Task[None] | None = None
        #: Some of the waiting work must be written now; patient work waits for the timer.
        self._due = False
        self._timer: asyncio.TimerHandle | None = None
        self._crowd = _Crowd()
        #: Transactions, and works in them: their ratio shows the benefit of grouping.
        self.transactions = 0
        self.works = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def do(self, work: Work) -> Outcome:
        """Return once the work is on disk. A cancelled caller withdraws work that has not begun."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()
        self._waiting.append(_Waiting(work, done))
        if not work.patient and not self._crowd.is_there(work, loop.time()):
            self._go_on()
        elif self._timer is None:
            self._timer = loop.call_later(PATIENCE_SECONDS, self._go_on)
        outcome = await done
        if isinstance(outcome, Problem):
            raise outcome
        return outcome

    async def finish(self) -> None:
        """Write everything that waits."""
        self._go_on()
        while self._task is not None:
            await asyncio.wait([self._task])

    def _go_on(self) -> None:
        self._due = bool(self._waiting)
        if self._task is None and self._due:
            self._task = asyncio.create_task(self._run(), name="holdfast-group-commit")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            while self._waiting:
                self._waiting.popleft().done.cancel()
        elif self._due:
            # Also after a bug, which asyncio reports: work that arrived in the meantime must not hang.
            self._go_on()

    async def _run(self) -> None:
        while self._due and (group := self._take()):
            await self._commit(group)

    def _take(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        rows = 0
        while self._waiting and rows < MAX_ROWS:
            each = self._waiting.popleft()
            if not each.done.done():
                group.append(each)
                rows += len(each.work.entries) if isinstance(each.work, Append) else 1
        self._due = bool(self._waiting)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return group

    async def _commit(self, group: list[_Waiting]) -> None:
        batch = Batch(
            [each.work for each in group], at=self._database.clock.time(), key=self._key, origin=self._origin
        )
        try:
            await self._write(batch)
        except Unavailable as problem:
            _resolve(group, [problem] * len(group))
        except (Problem, IntegrityError) as error:
            if len(group) == 1:
                _resolve(group, [_as_problem(error)])
                return
            # One work cannot be written; the others are committed one by one.
            for each in group:
                await self._commit([each])
        except BaseException as error:
            _resolve(group, [Bug(f"the audit log: {error!r}", reason="STORE_BUG")] * len(group))
            raise
        else:
            self.transactions += 1
            self.works += len(group)
            _resolve(group, batch.outcomes)
            self._on_written(batch.written)

    async def _write(self, batch: Batch) -> None:
        statement = batch.one_statement(self._heads, is_sqlite=self._database.is_sqlite)
        if statement is not None:
            await self._database.write_statement(statement, batch.write)
        else:
            await self._database.write(batch.write)
        self._heads.keep(batch.heads.values())


def _resolve(group: list[_Waiting], outcomes: list[Outcome]) -> None:
    for each, outcome in zip(group, outcomes, strict=True):
        if not each.done.done():
            each.done.set_result(outcome)


def _as_problem(error: Problem | IntegrityError) -> Problem:
    if isinstance(error, Problem):
        return error
    # The head of a stream was reset or removed, so its next number is taken. Nothing may be overwritten.
    return Bug(
        "the audit log is damaged: a row with the next number of its stream exists already; "
        "`holdfast audit verify` shows which",
        reason="AUDIT_DAMAGED",
    )
