"""The previews of one replica: opens them for callers, finds them by their secrets, ends them with their session.

A preview has two random secrets: the ticket in its URL, and the cookie that a browser gets for the ticket. Only
their hashes are kept, in memory, so a preview does not outlive its replica. Touches sandboxes through the pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from holdfast.client.ports.port_dial import dial_port
from holdfast.client.ports.ports import parse_address
from holdfast.client.remote import RemoteExec
from holdfast.fleet.template import Template
from holdfast.service.api import Preview, PreviewRequest
from holdfast.service.clock import ClockTimer, WallClock
from holdfast.service.policy.engine import decide_preview, refusal
from holdfast.service.policy.profiles import PolicyRules
from holdfast.service.previews.urls import PreviewUrls
from holdfast.service.problems import Denied, Exhausted, Invalid, NotNow, Problem, Unavailable
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.following.events import audit_entry
from holdfast.service.settings import ServiceSettings
from holdfast.service.types import AuditEntry, Caller, SessionRecord

_log = logging.getLogger("holdfast.service.previews")
#: Of the name of a replica in a secret: a host name fits, and a URL stays short.
MAX_NAME: Final = 64
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]")

#: Engines of the fleet whose sandboxes have a network namespace of their own.
_ISOLATING: Final = ("bwrap", "docker", "podman")


class PreviewSessions(Protocol):
    """The part of the sessions that previews need."""

    #: The name of this replica.
    replica: str

    async def visible(self, caller: Caller, session_id: str) -> SessionRecord: ...


class PreviewStore(Protocol):
    """The part of the store that previews need."""

    async def session(self, session_id: str) -> SessionRecord: ...

    async def append(self, entries: list[AuditEntry]) -> Any: ...


class SandboxTemplates(Protocol):
    """`SessionSandboxes`."""

    async def template_of(self, record: SessionRecord) -> Template | None: ...


class OpenPreview:
    """A preview until it ends."""

    def __init__(self, preview_id: str, record: SessionRecord, port: int, expires_at: float) -> None:
        self.preview_id = preview_id
        self.record = record
        self.port = port
        self.expires_at = expires_at
        self.ended = ""
        #: Set once by `create_preview`: the value of the cookie, and the hashes of both secrets.
        self.cookie = ""
        self.hashes: tuple[bytes, bytes] = (b"", b"")
        self.timer: ClockTimer | None = None
        #: Running requests and WebSockets; cancelled at the end.
        self.requests: set[asyncio.Task[None]] = set()


class Previews:
    """`api.PreviewApi`, and a `ports.SessionWatcher` that ends the previews of closed sessions."""

    def __init__(
        self,
        store: PreviewStore,
        sandboxes: SandboxTemplates,
        pool: SandboxConnections,
        rules: Callable[[], PolicyRules],
        clock: WallClock,
        settings: ServiceSettings,
        count: Callable[[int], object] = lambda number: None,
    ) -> None:
        """`count` gets the number of open previews at each change."""
        self._store = store
        self._sandboxes = sandboxes
        self._pool = pool
        self._rules = rules
        self._clock = clock
        self._settings = settings
        self._count = count
        #: Set by the assembly before the first call: the sessions get this object in their constructor.
        self.sessions: PreviewSessions
        self.urls = PreviewUrls("http://localhost")
        self._open: dict[str, OpenPreview] = {}
        self._by_ticket: dict[bytes, OpenPreview] = {}
        self._by_cookie: dict[bytes, OpenPreview] = {}
        #: Sessions that this replica follows: it gets notice of their end.
        self._followed: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- opening -------------------------------------------------------------------------------------------------

    async def create_preview(self, caller: Caller, request: PreviewRequest) -> Preview:
        record = await self.sessions.visible(caller, request.session_id)
        if not _is_open(record):
            raise NotNow(f"session {record.session_id!r} is {record.state}", reason="SESSION_CLOSED")
        try:
            await self._check(record, request.port)
        except Denied as denied:
            body = {"port": request.port, "by": caller.agent_id, "reason": denied.message}
            await self._store.append([audit_entry(record, self._clock.time(), "preview_refused", **body)])
            raise
        now, longest = self._clock.time(), self._settings.preview_seconds
        if request.lifetime is not None and request.lifetime > longest:
            raise Invalid(
                f"lifetime_seconds: more than the {longest:g} s of the service (preview_seconds)",
                reason="INVALID_FIELD",
                field="lifetime_seconds",
            )
        expires_at = min(now + (request.lifetime or longest), record.expires_at)
        self._check_room(record.session_id)
        opened = OpenPreview(secrets.token_hex(16), record, request.port, expires_at)
        ticket = self._add(opened, expires_at - now)
        body = {
            "preview_id": opened.preview_id,
            "port": opened.port,
            "by": caller.agent_id,
            "expires_at": expires_at,
        }
        try:
            await self._store.append([audit_entry(record, now, "preview_opened", **body)])
            # The session may have ended before the preview was in the list that its end goes through.
            await self.check_session(opened)
        except BaseException:
            self._end(opened, "not opened")
            raise
        url, path_url = self.urls.of(opened.preview_id, record.session_id, opened.port, ticket)
        return Preview(opened.preview_id, record.session_id, opened.port, url, path_url, expires_at)

    async def _check(self, record: SessionRecord, port: int) -> None:
        decision = decide_preview(self._rules().profile(record.policy.profile), record.policy, port)
        if not decision.allowed:
            raise refusal(decision)
        if why := why_unreachable(record, await self._sandboxes.template_of(record)):
            raise Denied(f"no preview of port {port}: {why}", reason="PREVIEW_UNREACHABLE")

    def _check_room(self, session_id: str) -> None:
        settings = self._settings
        if len(self._open) >= settings.max_previews:
            raise Exhausted(f"{len(self._open)} previews are open (max_previews)", reason="TOO_MANY_PREVIEWS")
        own = sum(each.record.session_id == session_id for each in self._open.values())
        if own >= settings.previews_per_session:
            raise Exhausted(
                f"{own} previews of session {session_id!r} are open (previews_per_session)",
                reason="TOO_MANY_PREVIEWS",
            )

    def _add(self, opened: OpenPreview, seconds: float) -> str:
        """Add a preview and return its ticket."""
        # With the name of the replica, so that another one can report where the preview is.
        ticket, opened.cookie = (f"{secrets.token_urlsafe(32)}.{self._replica()}" for _ in range(2))
        opened.hashes = (_hash(ticket), _hash(opened.cookie))
        self._open[opened.preview_id] = opened
        self._by_ticket[opened.hashes[0]] = opened
        self._by_cookie[opened.hashes[1]] = opened
        opened.timer = self._clock.call_later(seconds, self._end, opened, "expired")
        self._count(len(self._open))
        return ticket

    # --- requests ------------------------------------------------------------------------------------------------

    def by_ticket(self, ticket: str) -> OpenPreview | None:
        return self._current(self._by_ticket.get(_hash(ticket)))

    def other_replica(self, secret: str) -> str:
        """The name of the other replica that made this secret of a preview; empty for none, or for this one."""
        name = secret.partition(".")[2]
        return "" if name == self._replica() or _NOT_IN_NAMES.search(name) else name[:MAX_NAME]

    def _replica(self) -> str:
        """The name of this replica in URLs and cookies."""
        return _NOT_IN_NAMES.sub("-", self.sessions.replica)[:MAX_NAME]

    def by_cookie(self, cookie: str) -> OpenPreview | None:
        return self._current(self._by_cookie.get(_hash(cookie)))

    def _current(self, opened: OpenPreview | None) -> OpenPreview | None:
        if opened is not None and opened.expires_at <= self._clock.time():
            self._end(opened, "expired")
        return None if opened is None or opened.ended else opened

    async def check_session(self, opened: OpenPreview) -> None:
        """Raise `NotNow` if the session is over; its end may have been in another replica."""
        if opened.record.session_id not in self._followed:
            try:
                record = await self._store.session(opened.record.session_id)
            except Problem:
                self._end(opened, "session unknown")
                raise
            if not _is_open(record):
                self._end(opened, "session over")
        if opened.ended:
            raise NotNow(f"the preview has ended: {opened.ended}", reason="SESSION_CLOSED")

    @asynccontextmanager
    async def channel(self, opened: OpenPreview) -> AsyncIterator[Callable[[], Any]]:
        """Hold the connection to the sandbox; the value dials the preview's port there."""
        async with self._pool.hold(opened.record.sandbox) as api:
            if not isinstance(api, RemoteExec):
                raise Unavailable(
                    "the sandbox has no server that carries connections", reason="PREVIEW_UNREACHABLE"
                )
            connection = api.connection

            async def dial() -> socket.socket:
                return await dial_port(connection, parse_address(opened.port))

            yield dial

    # --- ending --------------------------------------------------------------------------------------------------

    def watch(self, record: SessionRecord) -> None:
        self._followed.add(record.session_id)

    def forget(self, session_id: str) -> None:
        self._followed.discard(session_id)

    def closed(self, session_id: str) -> None:
        self._followed.discard(session_id)
        for opened in [each for each in self._open.values() if each.record.session_id == session_id]:
            self._end(opened, "session over")

    def _end(self, opened: OpenPreview, reason: str) -> None:
        if self._open.pop(opened.preview_id, None) is None:
            return
        opened.ended = reason
        ticket, cookie = opened.hashes
        del self._by_ticket[ticket], self._by_cookie[cookie]
        if opened.timer is not None:
            opened.timer.cancel()
        for request in opened.requests:
            request.cancel()
        self._count(len(self._open))
        task = asyncio.get_running_loop().create_task(self._record_end(opened, reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _record_end(self, opened: OpenPreview, reason: str) -> None:
        body = {"preview_id": opened.preview_id, "port": opened.port, "reason": reason}
        try:
            await self._store.append([audit_entry(opened.record, self._clock.time(), "preview_closed", **body)])
        except Problem as problem:
            _log.warning("preview %s has ended (%s), without an audit row: %s", *body.values(), problem.message)

    async def stop(self) -> None:
        """End all previews; the store must still be open."""
        for opened in list(self._open.values()):
            self._end(opened, "service stopped")
        if self._tasks:
            await asyncio.wait(self._tasks)


def _is_open(record: SessionRecord) -> bool:
    return not record.over and record.state not in ("CLOSING", "UNKNOWN")


def _hash(secret: str) -> bytes:
    # A lookup by the hash takes no time that depends on how much of the secret is right.
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def why_unreachable(record: SessionRecord, template: Template | None) -> str:
    """Return why a preview would reach another port than the session's; empty if it would not.

    The server in a sandbox dials from its own network namespace. A session that is confined with another one is not
    reachable there, and in a sandbox with the network of its machine, the port would be one of the machine.
    `template` is that of the sandbox that was made for this session; None if the session has another one.
    """
    sandbox, network = record.sandbox, record.policy.network
    engine = sandbox.partition(":")[0]
    if template is None:
        return (
            f"sandbox {sandbox!r} was not made for this session, so its ports can be those of its machine or of "
            "another session; previews need one of bwrap:new, docker:new, podman:new, or of a pool of these"
        )
    if engine not in _ISOLATING:
        return f"sandboxes of engine {engine!r} have the network of their machine, and so would the preview"
    if template.network == "host":
        return 'the template has network = "host": the preview would reach ports of the machine'
    if template.options.get("arguments"):
        # Further options of `docker run` can select any network.
        return "the template has options.arguments, which can select another network than the sandbox's own"
    if network != "host":
        return (
            f"the session has a network of its own inside the sandbox (network.mode = {network!r}), which the "
            'service does not reach; with "host" it has the network of the sandbox, which the template closes'
        )
    return ""
