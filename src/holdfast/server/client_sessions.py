"""What outlives a connection: a session, its processes that must end with it, and where its pushes had come to.

A client that comes back with its session id goes on; one that does not is given up after a while. Memory, one timer
a detached session, and under a keeper the ledger, from which the next server has the sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import UnknownProcess, UnknownShell
from holdfast.runtime.durability.ledger import AnyLedger
from holdfast.server.client_session_records import (
    SessionEnded,
    SessionOpened,
    SessionShell,
    SessionStarted,
)
from holdfast.types import ClientInfo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.runtime.local import LocalExec
    from holdfast.runtime.output.reader import Reader
    from holdfast.server.client_session_records import ReplayedSession
    from holdfast.server.outbox import Key


class Left(NamedTuple):
    """What the client of a broken connection comes back to."""

    #: How far the plain pushes had come.
    positions: Mapping[str, int] = {}
    #: Readers that hold their processes until the client opens them again, or has not for too long.
    readers: Mapping[Key, Reader] = {}


Takeover = Callable[[], Left]


class Session:
    """One client, over any number of connections, one at a time."""

    def __init__(self, client_name: str, id: str | None = None) -> None:
        self.id = id or secrets.token_hex(16)
        self.client_name = client_name
        #: The OS pid behind the connection that holds the session, where the transport has one.
        self.client_pid: int | None = None
        #: Processes that it started, while they run.
        self.processes: set[str] = set()
        #: Those of them that end with the session.
        self.bound: set[str] = set()
        #: Shells that it opened, and whether they end with it.
        self.shells: dict[str, bool] = {}
        #: Of the connection that broke.
        self.left = Left()
        #: Ends the connection that holds the session now, and returns what it leaves to the next.
        self.takeover: Takeover | None = None
        self.expiry: asyncio.TimerHandle | None = None


class Sessions:
    """All sessions of a server."""

    def __init__(self, exec_: LocalExec, ledger: AnyLedger) -> None:
        self._exec = exec_
        self._ledger = ledger
        #: Processes that should end with a session, and are of none: the server died before it could note it.
        self._unclaimed = Session("")
        self._sessions: dict[str, Session] = {}
        self._endings: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def attached(self) -> int:
        return sum(session.takeover is not None for session in self._sessions.values())

    def clients(self, without: Session | None) -> tuple[ClientInfo, ...]:
        """The clients that are connected now, except the one of the session `without`."""
        return tuple(
            ClientInfo(
                name=session.client_name,
                pid=session.client_pid,
                processes=sum(map(self._exec.is_running, session.processes)),
                shells=sum(map(self._exec.shells.is_open, session.shells)),
            )
            for session in self._sessions.values()
            if session.takeover is not None and session is not without
        )

    def open(
        self, client_name: str, resume: str | None, takeover: Takeover, pid: int | None = None
    ) -> tuple[Session, bool]:
        """A new session, or the one to resume if it is still there; and which of the two.

        A connection that still holds the resumed session is dead or about to be: its client is here now.
        """
        session = self._sessions.get(resume or "")
        resumed = session is not None
        if session is None:
            session = Session(client_name)
            self._sessions[session.id] = session
            self._ledger.write(SessionOpened(session.id, client_name))
        if session.takeover is not None:
            session.left = session.takeover()
        if session.expiry is not None:
            session.expiry.cancel()
            session.expiry = None
        session.takeover = takeover
        session.client_pid = pid
        return session, resumed

    def detach(self, session: Session, takeover: Takeover, left: Left) -> None:
        """The connection that took it over with `takeover` is gone; its client may come back, or already has."""
        if session.takeover is not takeover:
            close_readers(left)
            return
        session.takeover, session.left = None, left
        running = any(self._exec.is_running(id) for id in session.processes)
        if not (any(left) or running or any(self._exec.shells.is_open(id) for id in session.shells)):
            # Nothing to come back to: callers of single requests would leave a heap of these.
            self._forget(session)
            return
        self._await_return(session)

    def started(self, session: Session, process_id: str, *, bound: bool, pushed: bool = False) -> None:
        if process_id not in session.processes:
            self._ledger.write(SessionStarted(session.id, process_id, bound, pushed))
        session.processes.add(process_id)
        if bound:
            session.bound.add(process_id)
            self._unclaimed.bound.discard(process_id)

    def restore(self, remembered: Iterable[ReplayedSession], told: Mapping[str, int]) -> None:
        """Have the sessions of an earlier server; their clients come back, as after a broken connection.

        Their plain pushes go on behind what that server may have `told`.
        """
        claimed: set[str] = set()
        claimed_shells: set[str] = set()
        for each in remembered:
            session = self._sessions[each.opened.id] = Session(each.opened.client_name, each.opened.id)
            session.processes = {id for id in each.processes if self._exec.is_running(id)}
            session.bound = {id for id in session.processes if each.processes[id]}
            session.left = Left({id: told[id] for id in each.pushed if id in told})
            claimed |= session.bound
            session.shells = {id: bound for id, bound in each.shells.items() if self._exec.shells.is_open(id)}
            claimed_shells |= session.shells.keys()
            self._await_return(session)
        self._unclaimed.bound = set(self._exec.bound_processes()) - claimed
        self._unclaimed.shells = dict.fromkeys(set(self._exec.shells.bound()) - claimed_shells, True)
        if self._unclaimed.bound or self._unclaimed.shells:
            self._await_return(self._unclaimed)

    def _forget(self, session: Session) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self._ledger.write(SessionEnded(session.id))

    def _await_return(self, session: Session) -> None:
        seconds = self._exec.config.detached_session_seconds
        session.expiry = asyncio.get_running_loop().call_later(seconds, self._expire, session)

    def opened(self, session: Session, shell_id: str, *, bound: bool) -> None:
        # Those that are closed by now need no thought: else this would grow with every shell.
        session.shells = {id: each for id, each in session.shells.items() if self._exec.shells.is_open(id)}
        if shell_id not in session.shells:
            self._ledger.write(SessionShell(session.id, shell_id, bound))
        session.shells[shell_id] = bound
        self._unclaimed.shells.pop(shell_id, None)

    def running(self, session: Session) -> int:
        """How many of its processes run, at most: those that ended are sorted out when it matters."""
        if len(session.processes) >= self._exec.config.max_processes_per_connection:
            session.processes = {id for id in session.processes if self._exec.is_running(id)}
        return len(session.processes)

    def _expire(self, session: Session) -> None:
        self._forget(session)
        close_readers(session.left)
        endings = [self._end(process_id) for process_id in session.bound]
        endings += [self._close(shell_id) for shell_id, bound in session.shells.items() if bound]
        for ending in endings:
            task = asyncio.get_running_loop().create_task(ending)
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    async def _end(self, process_id: str) -> None:
        with contextlib.suppress(UnknownProcess):
            await self._exec.terminate(process_id)

    async def _close(self, shell_id: str) -> None:
        with contextlib.suppress(UnknownShell):
            await self._exec.close_shell(shell_id)

    def close(self) -> None:
        for session in (*self._sessions.values(), self._unclaimed):
            if session.expiry is not None:
                session.expiry.cancel()
            close_readers(session.left)


def close_readers(left: Left) -> None:
    """Their client does not come back for them."""
    for reader in left.readers.values():
        reader.close()
