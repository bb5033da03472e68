"""Clients, each of which outlives its connections: its processes and shells, and where its output continues.

A client that reconnects with its session id resumes; one that does not is dropped after `detached_session_seconds`,
together with the processes that are bound to it. State is in memory and, with a keeper, also in the ledger, from
which the next server restores it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.errors import UnknownProcess, UnknownShell
from holdfast.runtime.durability.ledger import AnyLedger
from holdfast.server.client_session_records import SessionEnded, SessionOpened, SessionShell, SessionStarted
from holdfast.types import ClientInfo
from holdfast.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.runtime.output.reader import Reader
    from holdfast.server.client_session_records import ReplayedSession
    from holdfast.server.outbox import Key
    from holdfast.server.served_exec import ServedExec


class ResumePoint(NamedTuple):
    """Where the output of a reconnected client continues."""

    #: The last `seq` that was pushed, by process, for plain subscriptions.
    positions: Mapping[str, int] = {}
    #: Readers that hold back their processes until the client subscribes again or is dropped.
    readers: Mapping[Key, Reader] = {}


#: The ids of ended processes that a client may have; more are dropped at the next start.
PRUNED_IDS: Final = 256

Takeover = Callable[[], ResumePoint]
#: Methods that only observe the server.
_OBSERVING = frozenset({m.PING.name, m.ENVIRONMENT_STATUS.name, m.ENVIRONMENT_INFO.name})


class ClientState:
    """One client, over any number of connections, one at a time."""

    def __init__(self, client_name: str, id: str | None = None) -> None:
        self.id = id or secrets.token_hex(16)
        self.client_name = client_name
        #: The OS pid of the client, where the transport reports one.
        self.client_pid: int | None = None
        #: Processes that the client started: all that run, and ended ones until the next `prune`.
        self.processes: set[str] = set()
        #: The processes among them that end with the client.
        self.bound: set[str] = set()
        #: The number of processes at which they are pruned.
        self.prune_at = PRUNED_IDS
        #: Shells that the client opened, and whether each ends with the client.
        self.shells: dict[str, bool] = {}
        #: Set when a connection broke.
        self.resume = ResumePoint()
        #: Closes the current connection and returns where the next one continues; None while disconnected.
        self.takeover: Takeover | None = None
        self.expiry: asyncio.TimerHandle | None = None

    def prune(self, is_running: Callable[[str], bool]) -> None:
        """Drop the ids of ended processes."""
        self.processes = set(filter(is_running, self.processes))
        self.bound &= self.processes
        self.prune_at = max(PRUNED_IDS, 2 * len(self.processes))


class ClientRegistry:
    """All clients of a server, connected or not."""

    def __init__(self, exec_: ServedExec, ledger: AnyLedger) -> None:
        self._exec = exec_
        self._ledger = ledger
        #: Bound processes and shells without a client: the server died before it recorded the owner.
        self._unclaimed = ClientState("")
        self._clients: dict[str, ClientState] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._called_at = time.monotonic()

    def note_call(self, method: str) -> None:
        """Note the time of a client's call. A call that only observes the server is not use."""
        if method not in _OBSERVING:
            self._called_at = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last call of any client."""
        return time.monotonic() - self._called_at

    @property
    def attached(self) -> int:
        return sum(client.takeover is not None for client in self._clients.values())

    def clients(self, without: ClientState | None) -> tuple[ClientInfo, ...]:
        """The connected clients, except `without`."""
        return tuple(
            ClientInfo(
                name=client.client_name,
                pid=client.client_pid,
                processes=sum(map(self._exec.processes.is_running, client.processes)),
                shells=sum(map(self._exec.shells.is_open, client.shells)),
            )
            for client in self._clients.values()
            if client.takeover is not None and client is not without
        )

    def open(
        self, client_name: str, resume: str | None, takeover: Takeover, pid: int | None = None
    ) -> tuple[ClientState, bool]:
        """A new client, or the one to resume if it is still known; and whether it was resumed.

        A connection that still holds the resumed client is half-open, and is closed.
        """
        client = self._clients.get(resume or "")
        resumed = client is not None
        if client is None:
            client = ClientState(client_name)
            self._clients[client.id] = client
            self._ledger.write(SessionOpened(client.id, client_name))
        if client.takeover is not None:
            client.resume = client.takeover()
        if client.expiry is not None:
            client.expiry.cancel()
            client.expiry = None
        client.takeover = takeover
        client.client_pid = pid
        return client, resumed

    def detach(self, client: ClientState, takeover: Takeover, resume: ResumePoint) -> None:
        """The connection that was opened with `takeover` is lost; the client may have reconnected already."""
        if client.takeover is not takeover:
            close_readers(resume)
            return
        client.takeover, client.resume = None, resume
        running = any(self._exec.processes.is_running(id) for id in client.processes)
        if not (any(resume) or running or any(self._exec.shells.is_open(id) for id in client.shells)):
            # Nothing to resume. Callers of single requests would otherwise leave many of these.
            self._forget(client)
            return
        self._start_expiry(client)

    def started(self, client: ClientState, process_id: str, *, bound: bool, pushed: bool = False) -> None:
        if process_id not in client.processes:
            self._ledger.write(SessionStarted(client.id, process_id, bound, pushed))
        if len(client.processes) >= client.prune_at:
            client.prune(self._exec.processes.is_running)
        client.processes.add(process_id)
        if bound:
            client.bound.add(process_id)
            self._unclaimed.bound.discard(process_id)

    def restore(self, remembered: Iterable[ReplayedSession], sent_seqs: Mapping[str, int]) -> None:
        """Restore the clients of an earlier server, as if their connections had just broken.

        Plain pushes continue after `sent_seqs`, the last number that the earlier server may have sent.
        """
        claimed: set[str] = set()
        claimed_shells: set[str] = set()
        for each in remembered:
            client = self._clients[each.opened.id] = ClientState(each.opened.client_name, each.opened.id)
            client.processes = {id for id in each.processes if self._exec.processes.is_running(id)}
            client.bound = {id for id in client.processes if each.processes[id]}
            client.resume = ResumePoint({id: sent_seqs[id] for id in each.pushed if id in sent_seqs})
            claimed |= client.bound
            client.shells = {id: bound for id, bound in each.shells.items() if self._exec.shells.is_open(id)}
            claimed_shells |= client.shells.keys()
            self._start_expiry(client)
        self._unclaimed.bound = set(self._exec.processes.bound()) - claimed
        self._unclaimed.shells = dict.fromkeys(set(self._exec.shells.bound()) - claimed_shells, True)
        if self._unclaimed.bound or self._unclaimed.shells:
            self._start_expiry(self._unclaimed)

    def _forget(self, client: ClientState) -> None:
        if self._clients.pop(client.id, None) is not None:
            self._ledger.write(SessionEnded(client.id))

    def _start_expiry(self, client: ClientState) -> None:
        seconds = self._exec.config.detached_session_seconds
        client.expiry = asyncio.get_running_loop().call_later(seconds, self._expire, client)

    def opened(self, client: ClientState, shell_id: str, *, bound: bool) -> None:
        # Closed shells are pruned, or this would grow with every shell.
        client.shells = {id: each for id, each in client.shells.items() if self._exec.shells.is_open(id)}
        if shell_id not in client.shells:
            self._ledger.write(SessionShell(client.id, shell_id, bound))
        client.shells[shell_id] = bound
        self._unclaimed.shells.pop(shell_id, None)

    def running(self, client: ClientState) -> int:
        """An upper bound of the client's running processes; ended ones are pruned at the limit."""
        if len(client.processes) >= self._exec.config.max_processes_per_connection:
            client.prune(self._exec.processes.is_running)
        return len(client.processes)

    def _expire(self, client: ClientState) -> None:
        self._forget(client)
        close_readers(client.resume)
        endings = [self._end(process_id) for process_id in client.bound]
        endings += [self._close(shell_id) for shell_id, bound in client.shells.items() if bound]
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
        for client in (*self._clients.values(), self._unclaimed):
            if client.expiry is not None:
                client.expiry.cancel()
            close_readers(client.resume)


def close_readers(resume: ResumePoint) -> None:
    """Close the readers of a client that will not resume them."""
    for reader in resume.readers.values():
        reader.close()
