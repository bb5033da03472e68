"""Appends rows to one stream of PostgreSQL as one statement, on condition that the head of the stream is known.

A transaction of `batch` needs at least six round trips: it locks the head, computes the rows after it, and writes
them. A replica that wrote the last row of a stream has the head already, so it sends the rows together with the
condition. The statement is a transaction by itself: it writes everything or, if another replica has written since,
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

from sqlalchemy import TextClause, text

from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.sessions import columns_of
from holdfast.service.store.types import Fence, StreamHead
from holdfast.service.types import AuditRow

#: Heads that are kept, of about 500 bytes each; several times the sessions of a usual replica.
KEPT_HEADS: Final = 4_096


class KnownHeads:
    """The heads of the streams that this replica wrote last; bounded."""

    def __init__(self) -> None:
        self._heads: OrderedDict[str, StreamHead] = OrderedDict()

    def keep(self, heads: Iterable[StreamHead]) -> None:
        for head in heads:
            self._heads[head.session_id] = head
            self._heads.move_to_end(head.session_id)
        while len(self._heads) > KEPT_HEADS:
            self._heads.popitem(last=False)

    def take(self, names: Iterable[str]) -> dict[str, StreamHead] | None:
        """Remove and return heads: they are kept again once the rows after them are written.

        None if one of them is not known.
        """
        heads = {name: head for name in names if (head := self._heads.pop(name, None)) is not None}
        if all(name in heads for name in names):
            return heads
        self.keep(heads.values())
        return None


async def append_after(
    connection: StoreConnection,
    head: StreamHead,
    rows: Sequence[AuditRow],
    *,
    size: int,
    fence: Fence | None,
    notice: tuple[str, str],
) -> bool:
    """Append the rows of a stream after `head`; False if another row follows `head`, or the fence does not hold.

    `size` is added to the size of the stream; `notice` has the channel and the payload for other replicas.
    """
    last = rows[-1]
    values: dict[str, Any] = {
        "stream": head.session_id,
        "head_seq": head.last_seq,
        "head_hash": head.last_hash,
        "last_seq": last.seq,
        "last_hash": last.hash,
        "grown": size,
        "channel": notice[0],
        "payload": notice[1],
        **{f"row_{name}": [getattr(row, name) for row in rows] for name in _COLUMNS},
    }
    columns: dict[str, Any] = {}
    if fence is not None:
        columns = columns_of(fence.metadata)
        values |= {"replica": fence.replica, "epoch": fence.epoch, "token": fence.token}
        values |= {f"new_{name}": value for name, value in columns.items()}
    statement = _append(fence is not None, tuple(sorted(columns)))
    return (await connection.execute(statement, values)).first() is not None


#: The arrays of rows, by column.
_COLUMNS: Final = {
    "seq": "bigint[]",
    "at": "double precision[]",
    "agent_id": "text[]",
    "kind": "text[]",
    "command_id": "text[]",
    "body": "text[]",
    "previous": "text[]",
    "hash": "text[]",
}


@cache
def _append(fenced: bool, changed: tuple[str, ...]) -> TextClause:
    """Return the statement; `changed` are the columns of the session that the fence sets.

    The locks are taken in the order of all transactions: the session, then the stream. PostgreSQL checks a
    condition again after a wait for the lock, so both conditions hold until the end of the statement.
    """
    names = ", ".join(_COLUMNS)
    arrays = ", ".join(f"CAST(:row_{name} AS {kind})" for name, kind in _COLUMNS.items())
    lease = """
        lease AS (
            SELECT 1 FROM sessions
            WHERE session_id = :stream
                AND lease_owner = :replica AND lease_epoch = :epoch AND audited_token < :token
            FOR UPDATE
        ),"""
    sets = "".join(f", {name} = :new_{name}" for name in changed)
    session = f"""
        session AS (
            UPDATE sessions SET audited_token = :token{sets}
            WHERE session_id = :stream AND EXISTS (SELECT FROM head)
        ),"""
    return text(f"""
        WITH{lease if fenced else ""}
        head AS (
            SELECT 1 FROM audit_streams
            WHERE session_id = :stream AND last_seq = :head_seq AND last_hash = :head_hash
                AND NOT closed AND removed_seq = 0 {"AND EXISTS (SELECT FROM lease)" if fenced else ""}
            FOR UPDATE
        ),{session if fenced else ""}
        stream AS (
            UPDATE audit_streams SET last_seq = :last_seq, last_hash = :last_hash, size = size + :grown
            WHERE session_id = :stream AND EXISTS (SELECT FROM head)
        ),
        rows AS (
            INSERT INTO audit_rows (session_id, {names})
            SELECT CAST(:stream AS text), * FROM unnest({arrays}) WHERE EXISTS (SELECT FROM head)
        )
        SELECT pg_notify(:channel, :payload) FROM head
    """)
