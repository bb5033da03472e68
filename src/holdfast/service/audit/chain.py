"""The hash chain of the audit log: computes the hash of a row, and finds tampering in a stream of rows; pure.

Each row's hash covers the row and the previous hash, so a row cannot be changed, removed or inserted without
breaking the next one. With a key the hashes are HMACs: write access to the database is not enough to forge them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from holdfast.service.types import AuditEntry, AuditRow, ServiceStruct

#: Hash before the first row of a stream.
GENESIS: Final = "0" * 64
#: Rows of the service's own stream about others: a stream began; its last row when the session closed, or after so
#: many rows; it was removed by retention; old rows of the service's own stream were.
OPENED: Final = "stream_opened"
MARKED: Final = "stream_marked"
REMOVED: Final = "stream_removed"
TRIMMED: Final = "stream_trimmed"
ABOUT_STREAMS: Final = (OPENED, MARKED, REMOVED, TRIMMED)

Fault = Literal["changed", "missing", "cut", "added", "unknown", "removed"]


class Break(ServiceStruct, frozen=True):
    """A position where the log fails verification. `seq` 0 is the stream as a whole."""

    session_id: str
    seq: int
    fault: Fault
    detail: str

    def __str__(self) -> str:
        where = f"session {self.session_id}" if self.session_id else "the service's own stream"
        return f"{where}, row {self.seq}: {self.detail}" if self.seq else f"{where}: {self.detail}"


class StreamMark(ServiceStruct, frozen=True):
    """Body of a row about another stream: its last row, and the number of the row about its beginning."""

    session_id: str
    seq: int = 0
    hash: str = GENESIS
    opened: int = 0
    reason: str = ""
    rows: int = 0


def row_hash(previous: str, row: AuditEntry | AuditRow, seq: int, body: str, key: bytes | None = None) -> str:
    """Return the hash of a row. The input is a JSON array, so no field can run into the next."""
    fields = [previous, row.session_id, seq, float(row.at), row.agent_id, row.kind, row.command_id, body]
    data = msgspec.json.encode(fields)
    if key is None:
        return hashlib.sha256(data).hexdigest()
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def chained(
    entries: Iterable[AuditEntry], after_seq: int, previous: str, key: bytes | None = None
) -> list[AuditRow]:
    """Return the entries of one stream as rows after the row with this number and hash."""
    rows = []
    for seq, entry in enumerate(entries, after_seq + 1):
        body = encode_body(entry.body)
        link = row_hash(previous, entry, seq, body, key)
        rows.append(
            AuditRow(
                session_id=entry.session_id,
                seq=seq,
                at=float(entry.at),
                agent_id=entry.agent_id,
                kind=entry.kind,
                command_id=entry.command_id,
                body=body,
                previous=previous,
                hash=link,
            )
        )
        previous = link
    return rows


def encode_body(body: dict[str, Any]) -> str:
    """Encode the body as canonical JSON: sorted keys, and nothing that a text column would reject."""
    try:
        return msgspec.json.encode(body, order="deterministic").decode()
    except UnicodeEncodeError:
        # Bytes of file names and arguments that are not UTF-8 arrive as lone surrogates, which JSON cannot encode.
        return msgspec.json.encode(_without_surrogates(body), order="deterministic").decode()


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(each) for each in value]
    return value


def key_id(key: bytes | None) -> str:
    """Return the id of a key for the database, to detect another key; the key cannot be derived from it."""
    return "" if key is None else hmac.new(key, b"holdfast audit key", hashlib.sha256).hexdigest()[:16]


class StreamCheck:
    """Checks the rows of one stream in order, any number at a time, without storing them."""

    def __init__(
        self, session_id: str, key: bytes | None = None, *, base_seq: int = 0, base_hash: str = GENESIS
    ) -> None:
        self._session_id = session_id
        self._key = key
        self.seq = base_seq
        self.hash = base_hash
        self.rows = 0

    def feed(self, rows: Iterable[AuditRow]) -> list[Break]:
        breaks: list[Break] = []
        for row in rows:
            self.rows += 1
            if row.seq != self.seq + 1:
                first, last = self.seq + 1, row.seq - 1
                what = f"row {first} is missing" if first == last else f"rows {first} to {last} are missing"
                breaks.append(self._break(first, "missing", what))
            elif row.previous != self.hash:
                breaks.append(self._break(row.seq, "changed", "the row before it was changed, or put in its place"))
            if row_hash(row.previous, row, row.seq, row.body, self._key) != row.hash:
                breaks.append(
                    self._break(row.seq, "changed", "its content does not match its hash: it was changed")
                )
            # One change is one finding: the following rows are checked against the stored hash.
            self.seq, self.hash = row.seq, row.hash
        return breaks

    def end(self, last_seq: int, last_hash: str) -> list[Break]:
        """Compare the last row with the stream's head."""
        if self.seq < last_seq:
            first = self.seq + 1
            what = f"the rows from {first} on, to {last_seq}, were cut off"
            return [self._break(first, "cut", what)]
        if self.seq > last_seq:
            return [self._break(last_seq + 1, "added", f"the stream's head names row {last_seq} as its last")]
        if self.hash != last_hash:
            return [self._break(self.seq, "changed", "it is not the row that the stream's head names as its last")]
        return []

    def _break(self, seq: int, fault: Fault, detail: str) -> Break:
        return Break(self._session_id, seq, fault, detail)
