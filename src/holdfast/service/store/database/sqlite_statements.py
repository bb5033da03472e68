"""Statements of every append, run directly by SQLite's driver: SQLAlchemy compiles their text, once.

Running a statement costs SQLAlchemy some 80 µs, of which SQLite takes a few, and an append has four. The driver
releases the interpreter's lock for each row that SQLite writes or returns, and the thread gets the lock back only
when the event loop waits: with hundreds of rows in a transaction, these waits are longer than the transaction. So
one statement writes many rows, and rows are returned as one value. On PostgreSQL the round trip costs more than
that, so these statements run there as any other.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import Connection, Dialect, Executable, Float
from sqlalchemy.exc import DBAPIError

#: Marks such a statement: `statement.execution_options(**FREQUENT)`. It is built once; its search values, if any,
#: are a list `names`.
FREQUENT: Final = {"holdfast_frequent": True}
#: Rows of one statement. A text is compiled for each of these numbers and no other, so that the driver keeps the
#: compiled statements; rows that are missing are NULL, and change nothing. The largest has less than 999 values, a
#: limit of older versions of SQLite.
_ROWS: Final = (1, 8, 32)


class _Text(NamedTuple):
    sql: str
    #: The parameters in the order of the text.
    names: tuple[str, ...]
    #: Converters from the driver's values to the column's, where they differ.
    columns: tuple[tuple[str, Callable[[Any], Any] | None], ...]
    #: Whether all rows are returned as one JSON text. Not with floats: their text form may not be exact.
    as_json: bool = False


class StatementResult:
    """The methods of SQLAlchemy's results that this package uses."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def mappings(self) -> list[dict[str, Any]]:
        return self._rows


class FrequentStatements:
    """The compiled statements of one engine."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._texts: dict[Executable, _Text] = {}
        self._for_rows: dict[tuple[str, int], str] = {}

    def run(self, driver: sqlite3.Connection, statement: Executable, parameters: Any) -> StatementResult:
        """Run the statement for each of the parameters, or for each of the names that they list."""
        text = self._texts.get(statement) or self._write(statement)
        many = [parameters] if isinstance(parameters, Mapping) else parameters
        try:
            if text.columns:
                return StatementResult([_row(text, row) for row in _found(driver, text, many[0]["names"])])
            for done in range(0, len(many), _ROWS[-1]):
                rows = many[done : done + _ROWS[-1]]
                size = next(size for size in _ROWS if size >= len(rows))
                sql = self._for_rows.get((text.sql, size)) or self._repeated(text.sql, size)
                values = [each[name] for each in rows for name in text.names]
                driver.execute(sql, values + [None] * ((size - len(rows)) * len(text.names)))
            return StatementResult([])
        except sqlite3.Error as error:
            raise as_sqlalchemy(error, text.sql) from error

    def _write(self, statement: Executable) -> _Text:
        one: Any = statement
        if "names" in one.compile(dialect=self._dialect).params:
            one = one.params(names=[""])
        compiled = one.compile(dialect=self._dialect, compile_kwargs={"render_postcompile": True})
        selected = one.selected_columns if one.is_select else ()
        columns = tuple((each.name, each.type.result_processor(self._dialect, None)) for each in selected)
        sql, as_json = str(compiled), not any(isinstance(each.type, Float) for each in selected)
        if columns and as_json:
            sql = sql.replace("IN (?)", "IN (SELECT value FROM json_each(?))")
            names = ", ".join(name for name, _ in columns)
            sql = f"SELECT json_group_array(json_array({names})) FROM ({sql})"
        text = self._texts[statement] = _Text(sql, tuple(compiled.positiontup), columns, as_json)
        return text

    def _repeated(self, sql: str, count: int) -> str:
        """Return the text of an insert or update for up to so many rows; the key of a missing one is NULL."""
        width = sql.count("?")
        row = f"({', '.join('?' * width)})"
        rows = f"(VALUES {', '.join([row] * count)}) AS new"
        if count == 1:
            text = sql
        elif sql.startswith("INSERT"):
            # The first column is in the key of every table.
            text = sql.replace(f"VALUES {row}", f"SELECT * FROM {rows} WHERE new.column1 IS NOT NULL")
        else:
            first, *rest = sql.split("?")
            numbered = first + "".join(f"new.column{number}{part}" for number, part in enumerate(rest, 1))
            change, _, which = numbered.rpartition(" WHERE ")
            text = f"{change} FROM {rows} WHERE {which}"
        self._for_rows[sql, count] = text
        return text


def _found(driver: sqlite3.Connection, text: _Text, names: Sequence[str]) -> Iterator[Sequence[Any]]:
    if text.as_json:
        ((found,),) = driver.execute(text.sql, [msgspec.json.encode(names).decode()])
        yield from msgspec.json.decode(found)
    else:
        for name in names:
            yield from driver.execute(text.sql, [name])


def _row(text: _Text, row: Sequence[Any]) -> dict[str, Any]:
    return {
        name: value if process is None else process(value)
        for (name, process), value in zip(text.columns, row, strict=True)
    }


def driver_of(connection: Connection) -> sqlite3.Connection:
    """Return the driver's connection."""
    driver: sqlite3.Connection = connection.connection.driver_connection  # type: ignore[assignment]
    return driver


def as_sqlalchemy(error: sqlite3.Error, sql: str) -> Exception:
    """Return the driver's error as SQLAlchemy's."""
    wrapped: Exception = DBAPIError.instance(sql, None, error, sqlite3.Error)
    return wrapped
