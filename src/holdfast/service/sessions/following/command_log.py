"""The commands of one shell session in the order of the audit log. Reads the store, keeps nothing.

The server of a shell keeps the latest commands by their ids. The log has all commands, and the ends of those that
the server has dropped.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from holdfast.service.api import AuditFilter
from holdfast.service.sessions.following.events import IsNews, NoticeHub, Watch
from holdfast.service.sessions.ports import SessionStore, body_of, first_row, page_after

#: A reader without a backlog needs the last one or two.
_PAGE: Final = 4


class LoggedCommand(NamedTuple):
    """A command and the number of its row."""

    number: int
    command_id: str
    at: float


class CommandLog:
    """The commands of one session in the audit log."""

    def __init__(self, store: SessionStore, notices: NoticeHub, session_id: str) -> None:
        self._store = store
        self._notices = notices
        self._id = session_id

    def watch(self, is_news: IsNews | None = None) -> AbstractContextManager[Watch]:
        """Return a watch for new rows of the session; with `is_news`, for some of them."""
        return self._notices.watch(self._id, is_news)

    async def after(self, number: int) -> list[LoggedCommand]:
        """Return the next commands after this row."""
        which = AuditFilter(session_id=self._id, kinds=("command",))
        rows, _ = await self._store.rows(which, page_after(_PAGE, number))
        return [LoggedCommand(row.seq, row.command_id, row.at) for row in rows]

    async def end_of(self, command_id: str) -> tuple[int, int | None] | None:
        """Return the output size and the exit code of a command; None if its end is not in the log."""
        kinds = ("command_ended",)
        row = await first_row(self._store, session_id=self._id, command_id=command_id, kinds=kinds)
        if row is None:
            return None
        body = body_of(row)
        return int(body.get("output_bytes", 0)), body.get("exit_code")
