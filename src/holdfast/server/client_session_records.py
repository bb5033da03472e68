"""The records of clients' sessions in the ledger, and their replay. Pure.

A session, the processes and shells that it started, and whether each ends with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from holdfast.runtime.durability.records import Kinds, LedgerRecord
from holdfast.runtime.durability.replay import Replay, ReplayExtension


class SessionOpened(LedgerRecord, frozen=True, tag=12):
    id: str
    client_name: str


class SessionStarted(LedgerRecord, frozen=True, tag=13):
    """A session started a process, which ends with the session if `bound`; its events are pushed if `pushed`."""

    id: str
    process_id: str
    bound: bool
    pushed: bool = False


class SessionEnded(LedgerRecord, frozen=True, tag=14):
    id: str


class SessionShell(LedgerRecord, frozen=True, tag=24):
    """A session opened a shell, which ends with the session if `bound`."""

    id: str
    shell_id: str
    bound: bool


class ReplayedSession:
    """A client's session: its processes and shells, and whether each ends with it."""

    def __init__(self, opened: SessionOpened) -> None:
        self.opened = opened
        self.processes: dict[str, bool] = {}
        #: The processes with events that are pushed without a subscription.
        self.pushed: set[str] = set()
        self.shells: dict[str, bool] = {}


class ClientSessionReplay(ReplayExtension):
    """The sessions of a ledger."""

    KINDS: ClassVar[Kinds] = (SessionOpened, SessionStarted, SessionEnded, SessionShell)

    def __init__(self) -> None:
        self.sessions: dict[str, ReplayedSession] = {}

    def apply(self, record: LedgerRecord) -> None:
        match record:
            case SessionOpened():
                self.sessions[record.id] = ReplayedSession(record)
            case SessionEnded():
                self.sessions.pop(record.id, None)
            case SessionShell() if record.id in self.sessions:
                self.sessions[record.id].shells[record.shell_id] = record.bound
            case SessionStarted() if record.id in self.sessions:
                session = self.sessions[record.id]
                session.processes[record.process_id] = record.bound
                if record.pushed:
                    session.pushed.add(record.process_id)

    def records(self, replay: Replay) -> Iterator[LedgerRecord]:
        running, last_seqs = replay.running(), replay.last_seqs()
        open_shells = replay.shells.open_ids()
        for session in self.sessions.values():
            id = session.opened.id
            yield session.opened
            for process_id, bound in session.processes.items():
                pushed = process_id in session.pushed
                if process_id in running or (pushed and process_id in last_seqs):
                    yield SessionStarted(id, process_id, bound, pushed)
            for shell_id, bound in session.shells.items():
                if shell_id in open_shells:
                    yield SessionShell(id, shell_id, bound)
