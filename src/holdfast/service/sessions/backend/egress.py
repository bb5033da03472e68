"""The filtering proxies of sessions with an allow-list network: one `holdfast egress` in the sandbox for each.

A proxy runs outside the session's confinement. It starts before the session and ends after it. The replica that
follows the session writes the proxy's decisions to the audit log. Touches sandboxes through the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from typing import Any, Final

from holdfast.client.process import Process
from holdfast.errors import HoldfastError, UnknownProcess
from holdfast.exec_api import ExecApi
from holdfast.service.clock import WallClock, sleep
from holdfast.service.problems import Problem, Unavailable
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.ports import SessionStore, body_of, first_row
from holdfast.service.types import AuditEntry, SessionPolicy, SessionRecord
from holdfast.types import PYTHON_VARIABLES, EnvironmentInfo, EnvPolicy, OutputChunk, ProcessSpec

#: The start of a Python interpreter on a busy machine.
READY_SECONDS: Final = 20.0
KIND: Final = "network"
#: Decisions with rows, of one read; a package manager connects to tens of hosts.
MOST_DECISIONS: Final = 50
_GATHER_SECONDS: Final = 1.0
#: Between attempts while the sandbox or the database is unreachable; doubling up to the second value.
_RETRY_SECONDS: Final = (1.0, 30.0)
#: The socket is in a private directory, which is removed with the proxy.
_SCRIPT: Final = (
    'd=$(mktemp -d) || exit 2; trap : TERM INT; "$@" --socket "$d/egress.sock"; code=$?; rm -rf "$d"; exit $code'
)

_SOCKET: Final = re.compile(rb'"socket": "([^"]+)"')

_log = logging.getLogger("holdfast.service.egress")


def is_wanted(policy: SessionPolicy, info: EnvironmentInfo) -> bool:
    """Return whether the session needs a proxy and the sandbox supports one."""
    return policy.network == "allow-list" and {"network", "egress"} <= set(info.features)


class Egress:
    """The proxies that this replica has started or follows; a `ports.SessionWatcher`."""

    def __init__(self, pool: SandboxConnections, store: SessionStore, clock: WallClock) -> None:
        self._pool = pool
        self._store = store
        self._clock = clock
        #: Sockets of sessions that this replica creates now.
        self._sockets: dict[str, str] = {}
        #: The sandbox of each session with a proxy.
        self._sandboxes: dict[str, str] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self, record: SessionRecord, info: EnvironmentInfo) -> None:
        """Start the session's proxy and wait until it is ready."""
        hosts = [word for host in record.policy.allowed_hosts for word in ("--allow", host)]
        argv = ("sh", "-c", _SCRIPT, "egress", *info.holdfast, "egress", *hosts)
        name = _process_id(record.session_id)
        self._sandboxes[record.session_id] = record.sandbox
        async with self._pool.use(record.sandbox) as api:
            spec = ProcessSpec(name, argv, env_policy=EnvPolicy.minimal(*PYTHON_VARIABLES), start_id=name)
            process = Process(api, await api.start(spec))
            self._sockets[record.session_id] = await _ready(process)

    def socket_of(self, session_id: str) -> str | None:
        """Return the proxy's socket of a session that is being created."""
        return self._sockets.get(session_id)

    # --- ports.SessionWatcher ------------------------------------------------------------------------------------

    def watch(self, record: SessionRecord) -> None:
        if record.policy.network != "allow-list":
            return
        self._sockets.pop(record.session_id, None)
        self._sandboxes[record.session_id] = record.sandbox
        self.forget(record.session_id)
        self._following[record.session_id] = asyncio.create_task(self._follow(record))

    def forget(self, session_id: str) -> None:
        task = self._following.pop(session_id, None)
        if task is not None:
            task.cancel()

    def closed(self, session_id: str) -> None:
        self.forget(session_id)
        self._sockets.pop(session_id, None)
        sandbox = self._sandboxes.pop(session_id, None)
        if sandbox is not None:
            task = asyncio.create_task(self._end(session_id, sandbox))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        """Stop following. Proxies continue, as their sessions do."""
        tasks = [*self._following.values(), *self._ending]
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- work ----------------------------------------------------------------------------------------------------

    async def _follow(self, record: SessionRecord) -> None:
        """Append the proxy's decisions to the audit log, from the last one that is in the log."""
        pause = _RETRY_SECONDS[0]
        while True:
            try:
                since = await self._last_written(record.session_id)
                async with self._pool.hold(record.sandbox) as api:
                    await self._write_down(record, api, since)
                return
            except UnknownProcess:
                return  # the sandbox does not support a proxy, or the sandbox is lost
            except HoldfastError as error:
                _log.warning("%s: the proxy's decisions are recorded later: %s", record.session_id, error.message)
            # The proxy continues, and its server keeps its output for a while.
            await sleep(self._clock, pause)
            pause = min(2 * pause, _RETRY_SECONDS[1])

    async def _write_down(self, record: SessionRecord, api: ExecApi, since: int) -> None:
        process = Process(api, await api.describe(_process_id(record.session_id)))
        rest = b""
        async for chunk in process.output(since):
            if not isinstance(chunk, OutputChunk) or chunk.stream != "stdout":
                continue
            *lines, rest = (rest + chunk.data).split(b"\n")
            now = self._clock.time()
            entries = [
                AuditEntry(record.session_id, now, record.agent_id, KIND, body=body | {"position": chunk.seq})
                for body in decisions(lines)
            ]
            if entries:
                await self._store.append(entries)
                # A pause, so that a session that connects all the time does not fill the log.
                await sleep(self._clock, _GATHER_SECONDS)

    async def _last_written(self, session_id: str) -> int:
        last = await first_row(self._store, session_id=session_id, kinds=(KIND,), newest_first=True)
        return 0 if last is None else int(body_of(last).get("position", 0))

    async def _end(self, session_id: str, sandbox: str) -> None:
        with contextlib.suppress(Problem, HoldfastError):
            async with self._pool.hold(sandbox) as api:
                await api.terminate(_process_id(session_id), grace=2.0)
                await api.forget(_process_id(session_id))


def decisions(lines: list[bytes]) -> list[dict[str, Any]]:
    """Return the proxy's output as bodies of rows: equal decisions once, with their number, and bounded."""
    found: dict[str, dict[str, Any]] = {}
    left_out = 0
    for line in lines:
        if b'"ready"' in line:
            continue
        body: dict[str, Any]
        try:
            body = dict(json.loads(line))
        except (ValueError, TypeError):
            body = {"said": line.decode("utf-8", "replace")[:1000]}
        key = json.dumps({name: value for name, value in body.items() if name != "at"}, sort_keys=True)
        if key in found:
            found[key]["times"] = found[key].get("times", 1) + 1
        elif len(found) < MOST_DECISIONS:
            found[key] = body
        else:
            left_out += 1
    rest: list[dict[str, Any]] = [{"event": "left_out", "times": left_out}] if left_out else []
    return [*found.values(), *rest]


def _process_id(session_id: str) -> str:
    return f"egress-{session_id}"


async def _ready(process: Process) -> str:
    """Wait for the proxy's first line, and return the socket in it."""
    try:
        match = await process.wait_for_output(_SOCKET, timeout=READY_SECONDS)
    except HoldfastError as error:
        raise Unavailable(f"the proxy of the allow-list did not start: {error.message}", reason="PROXY") from error
    return (match.groups[0] or b"").decode()
