"""The handles that this replica has on sessions: the backend of each, and the input that was sent to it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from holdfast.service.observability.tracing import Tracer
from holdfast.service.policy.typed_lines import LineBuffer
from holdfast.service.sessions.backend.session_backend import SessionBackend
from holdfast.service.sessions.backend.shell import ShellBackend
from holdfast.service.sessions.backend.terminal import TerminalBackend
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.command_log import CommandLog
from holdfast.service.types import SessionRecord
from holdfast.types import KEPT_SHELL_COMMANDS

#: Commands of a shell that may end before the follower has read the first of them.
UNREAD_COMMANDS: Final = KEPT_SHELL_COMMANDS - 1


class SessionHandle:
    """One session in this replica. Input holds `lock`, so that the input of one call stays together."""

    def __init__(self, backend: SessionBackend) -> None:
        self.backend = backend
        self.lock = asyncio.Lock()
        #: The text on the command line, as far as the rules need it.
        self.line = LineBuffer()
        #: The audit row of the last input from this replica. A later row means that another replica typed since.
        self.last_row = 0
        #: Commands that are about to be typed or run, which discard the text on the line.
        self.runs = 0
        #: Callers other than the owner that type in the session.
        self.taken_by: set[str] = set()
        #: The audit rows of the last commands of a shell.
        self.recent: deque[int] = deque(maxlen=UNREAD_COMMANDS)


class SessionHandles:
    """The handles by session, made at the first use."""

    def __init__(self, context: SessionContext, tracer: Tracer) -> None:
        self._context = context
        self._tracer = tracer
        self._handles: dict[str, SessionHandle] = {}

    def get(self, record: SessionRecord) -> SessionHandle:
        handle = self._handles.get(record.session_id)
        if handle is None:
            handle = SessionHandle(self.backend(record))
            if not record.over:
                self._handles[record.session_id] = handle
                self._drop_oldest()
        return handle

    def backend(self, record: SessionRecord) -> SessionBackend:
        """Return a new backend of the session's kind."""
        context = self._context
        if record.kind == "terminal":
            return TerminalBackend(record, context.pool, context.settings, self._tracer)
        commands = CommandLog(context.store, context.notices, record.session_id)
        return ShellBackend(record, context.pool, context.settings, self._tracer, commands, context.clock.time)

    def drop(self, session_id: str) -> None:
        self._handles.pop(session_id, None)

    def _drop_oldest(self) -> None:
        """Bound the handles. This replica gets no notice of sessions that ended under another replica."""
        surplus = len(self._handles) - 2 * self._context.settings.max_sessions - 16
        for session_id in list(self._handles)[: max(0, surplus)]:
            if not self._handles[session_id].lock.locked():
                del self._handles[session_id]
