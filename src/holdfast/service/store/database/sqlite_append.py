"""Appends audit rows to SQLite as one statement, on condition that the heads of their streams are known.

A transaction of `batch` is seven statements or more. For each of them the driver releases the interpreter's lock
several times, and the thread gets the lock back only when the event loop waits. SQLite has no statement that
writes several tables, except one that runs a trigger: the rows are inserted into a view, with values in JSON, and
a trigger of the view writes them. The statement is a transaction by itself, and writes everything or nothing. View
and trigger are temporary, so they belong to the connection and not to the database.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import Column, Double

from holdfast.service.store.database.schema import ROWS, SESSIONS, STREAMS
from holdfast.service.store.database.sqlite_statements import as_sqlalchemy
from holdfast.service.store.types import Fence, StreamHead
from holdfast.service.types import AuditRow

#: The columns of a session that a fence may set in this way: those of the follower.
METADATA: Final = ("last_activity_at", "warned_at", "commands_run")
_ROW: Final = tuple(ROWS.c)
_SET: Final = tuple(SESSIONS.c[name] for name in METADATA)
#: JSON functions and `UPDATE … FROM` are in every SQLite from this version on; an older one gets transactions.
_OLDEST: Final = (3, 38, 0)
#: A larger denominator is not an integer of SQLite.
_LARGEST_DENOMINATOR: Final = 1 << 62
_APPEND: Final = "INSERT INTO holdfast_append VALUES (?, ?, ?)"


class CannotAppend(Exception):
    """The values need a transaction."""


def append(
    driver: sqlite3.Connection,
    heads: Iterable[tuple[StreamHead, StreamHead]],
    rows: Iterable[AuditRow],
    fences: Iterable[tuple[Fence, bool]],
) -> bool:
    """Append the rows, move the heads and the sessions of the fences; False if a condition does not hold.

    Each stream has its head before the rows and after them. A fence comes with whether it has rows.
    """
    if sqlite3.sqlite_version_info < _OLDEST:
        return False
    try:
        parameters = [
            _json([_stream_values(before, after) for before, after in heads]),
            _json([_row_values(row) for row in rows]),
            _json([_fence_values(fence, has_rows) for fence, has_rows in fences]),
        ]
    except CannotAppend:
        return False
    try:
        try:
            driver.execute(_APPEND, parameters)
        except sqlite3.OperationalError as error:
            if "holdfast_append" not in str(error):
                raise
            for statement in _SET_UP:
                driver.execute(statement)
            driver.execute(_APPEND, parameters)
    except sqlite3.IntegrityError as error:
        if error.sqlite_errorname == "SQLITE_CONSTRAINT_TRIGGER":
            return False
        raise as_sqlalchemy(error, _APPEND) from error
    except sqlite3.Error as error:
        raise as_sqlalchemy(error, _APPEND) from error
    return True


# --- values in JSON -----------------------------------------------------------------------------------------------


def _json(values: list[Any]) -> str:
    return msgspec.json.encode(values).decode()


def _row_values(row: AuditRow) -> list[Any]:
    session_id, seq, at, *texts = msgspec.structs.astuple(row)
    return [session_id, seq, *_ratio(at), *texts]


def _stream_values(before: StreamHead, after: StreamHead) -> list[Any]:
    grown = after.size - before.size
    return [before.session_id, before.last_seq, before.last_hash, after.last_seq, after.last_hash, grown]


def _fence_values(fence: Fence, has_rows: bool) -> list[Any]:
    sets = bool(fence.metadata)
    if sets and fence.metadata.keys() != set(METADATA):
        raise CannotAppend
    active, warned, count = (fence.metadata.get(name) for name in METADATA)
    values = *_ratio(active), *_ratio(warned), count
    return [fence.session_id, fence.replica, fence.epoch, fence.token, has_rows, sets, *values]


def _ratio(value: float | None) -> tuple[int | None, int | None]:
    """Return a number as a fraction: SQLite may read its decimal form as another number, and the hash covers it.

    The denominator is a power of two, so that the division is exact.
    """
    if value is None:
        return None, None
    try:
        numerator, denominator = float(value).as_integer_ratio()
    except (OverflowError, ValueError):
        raise CannotAppend from None
    if denominator > _LARGEST_DENOMINATOR or abs(numerator) >= 1 << 53:
        raise CannotAppend
    return numerator, denominator


# --- the trigger --------------------------------------------------------------------------------------------------


def _item(number: int) -> str:
    return f"json_extract(new_value.value, '$[{number}]')"


def _items(columns: Sequence[Column[Any]], first: int) -> Iterator[str]:
    """Return the SQL of values from this number on; a number with a fraction is two of them (`_ratio`)."""
    for column in columns:
        if isinstance(column.type, Double):
            yield f"CAST({_item(first)} AS REAL) / {_item(first + 1)}"
            first += 2
        else:
            yield _item(first)
            first += 1


def _set_up() -> tuple[str, str]:
    stream, session, row = STREAMS.name, SESSIONS.name, ROWS.name
    sets = "".join(
        f", {name} = CASE WHEN {_item(5)} THEN {value} ELSE {name} END"
        for name, value in zip(METADATA, _items(_SET, 6), strict=True)
    )
    view = "CREATE TEMP VIEW holdfast_append AS SELECT NULL AS streams, NULL AS rows, NULL AS fences"
    trigger = f"""
        CREATE TEMP TRIGGER holdfast_append_all INSTEAD OF INSERT ON holdfast_append BEGIN
            UPDATE {session} SET audited_token = max(audited_token, {_item(3)}){sets}
                FROM json_each(NEW.fences) AS new_value
                WHERE {session}.session_id = {_item(0)} AND lease_owner = {_item(1)} AND lease_epoch = {_item(2)}
                    AND (audited_token < {_item(3)} OR NOT {_item(4)});
            SELECT RAISE(ABORT, 'a lease does not hold') WHERE changes() <> json_array_length(NEW.fences);
            UPDATE {stream} SET last_seq = {_item(3)}, last_hash = {_item(4)}, size = size + {_item(5)}
                FROM json_each(NEW.streams) AS new_value
                WHERE {stream}.session_id = {_item(0)} AND last_seq = {_item(1)} AND last_hash = {_item(2)}
                    AND NOT closed AND removed_seq = 0;
            SELECT RAISE(ABORT, 'a head has moved') WHERE changes() <> json_array_length(NEW.streams);
            INSERT INTO {row} ({", ".join(column.name for column in _ROW)})
                SELECT {", ".join(_items(_ROW, 0))} FROM json_each(NEW.rows) AS new_value;
        END"""
    return view, trigger


_SET_UP: Final = _set_up()
