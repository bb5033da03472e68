"""Replays a ledger: builds the state that its records describe, and the fewest records for it. Pure memory.

A new server replays the ledger of the server before it; compaction replays it too, and writes the result. `Replay`
creates and removes jobs and passes every other record to its job (`job_replay`, `shell_replay`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import ClassVar, Final

from holdfast.errors import SandboxError
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.job_replay import ProcessState, TerminalHistory
from holdfast.runtime.durability.shell_replay import ShellReplay

#: A client repeats only the requests that were unanswered when its connection broke.
RETAINED_RUNS: Final = 16


class ReplayExtension:
    """Record kinds of another part of the server, which share the ledger; this base class has none.

    It does not refer to its replay: in a cycle, each compaction would leave a whole state to the garbage collector.
    """

    KINDS: ClassVar[r.Kinds] = ()

    def apply(self, record: r.LedgerRecord) -> None:
        """Handle a record of `KINDS`."""

    def records(self, replay: Replay) -> Iterator[r.LedgerRecord]:
        """Return the fewest records that describe the state; `replay` has that of the jobs."""
        return iter(())


class Replay:
    """The state of every job in a ledger."""

    def __init__(
        self, *, max_chunks: int, max_events: int, extension: type[ReplayExtension] = ReplayExtension
    ) -> None:
        self._max_chunks = max_chunks
        self._max_events = max_events
        self.processes: dict[int, ProcessState] = {}
        self.shells = ShellReplay(max_chunks)
        #: The latest commands that were typed in terminals.
        self.runs: deque[r.RunTyped] = deque(maxlen=RETAINED_RUNS)
        self.last_key = 0
        self.extension = extension()
        self._openings: dict[str, r.TerminalOpening] = {}

    def apply(self, records: Iterable[r.LedgerRecord]) -> None:
        for record in records:
            match record:
                case r.JobRecord():
                    self.last_key = max(self.last_key, record.key)
                    try:
                        self._apply_to_job(record)
                    except (ValueError, OverflowError) as error:
                        raise SandboxError(f"the ledger has a wrong record of {record.key}: {error}") from None
                case r.TerminalOpening():
                    self._openings[record.spec.terminal_id] = record
                case r.RunTyped():
                    self.runs.append(record)
                case _:
                    self.extension.apply(record)

    def _apply_to_job(self, record: r.JobRecord) -> None:
        match record:
            case r.ProcessBegun():
                opening = self._openings.pop(record.spec.process_id, None)
                terminal = None if opening is None else TerminalHistory(opening, self._max_events)
                self.processes[record.key] = ProcessState(record, self._max_chunks, terminal)
            case r.JobForgotten():
                self.processes.pop(record.key, None)
            case _ if record.key in self.processes:
                self.processes[record.key].apply(record)
            case _:
                self.shells.apply(record)

    def last_seqs(self) -> dict[str, int]:
        """The last number that a reader may have seen of each process that is not closed."""
        return {
            each.begun.spec.process_id: each.journal.last_seq
            for each in self.processes.values()
            if each.closed is None
        }

    def running(self) -> set[str]:
        return {each.begun.spec.process_id for each in self.processes.values() if each.ended is None}

    def records(self) -> Iterator[r.LedgerRecord]:
        """The fewest records that describe this state. The last key is included even if its job is forgotten."""
        yield r.JobForgotten(self.last_key)
        for process in self.processes.values():
            yield from process.records()
        yield from self._openings.values()
        yield from self.runs
        yield from self.shells.records()
        yield from self.extension.records(self)
