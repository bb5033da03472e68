"""Statements of every append, run directly by SQLite's driver: SQLAlchemy compiles their text, once.

Running a statement costs SQLAlchemy some 80 µs, of which SQLite takes a few, and an append has four. On PostgreSQL
the round trip costs more than that, so these statements run there as any other.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Dialect, Executable
from sqlalchemy.exc import DBAPIError

#: Marks such a statement: `statement.execution_options(**FREQUENT)`. It is built once; its search values, if any,
#: are a list `names`.
FREQUENT: Final = {"holdfast_frequent": True}


class _Text(NamedTuple):
    sql: str
    #: The parameters in the order of the text.
    names: tuple[str, ...]
    #: Converters from the driver's values to the column's, where they differ.
    columns: tuple[tuple[str, Callable[[Any], Any] | None], ...]


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

    def run(self, driver: sqlite3.Connection, statement: Executable, parameters: Any) -> StatementResult:
        """Run the statement for each of the parameters, or for each of the names that they list."""
        text = self._texts.get(statement) or self._write(statement)
        many = [parameters] if isinstance(parameters, Mapping) else parameters
        values: Iterable[Sequence[Any]] = (
            [[name] for name in many[0]["names"]]
            if "names" in many[0]
            else ([each[name] for name in text.names] for each in many)
        )
        try:
            if not text.columns:
                driver.executemany(text.sql, values)
                return StatementResult([])
            return StatementResult([_row(text, row) for each in values for row in driver.execute(text.sql, each)])
        except sqlite3.Error as error:
            raise as_sqlalchemy(error, text.sql) from error

    def _write(self, statement: Executable) -> _Text:
        one: Any = statement
        if "names" in one.compile(dialect=self._dialect).params:
            one = one.params(names=[""])
        compiled = one.compile(dialect=self._dialect, compile_kwargs={"render_postcompile": True})
        columns = tuple(
            (column.name, column.type.result_processor(self._dialect, None))
            for column in (one.selected_columns if one.is_select else ())
        )
        text = self._texts[statement] = _Text(str(compiled), tuple(compiled.positiontup), columns)
        return text


def _row(text: _Text, row: Sequence[Any]) -> dict[str, Any]:
    return {
        name: value if process is None else process(value)
        for (name, process), value in zip(text.columns, row, strict=True)
    }


def as_sqlalchemy(error: sqlite3.Error, sql: str) -> Exception:
    """Return the driver's error as SQLAlchemy's."""
    wrapped: Exception = DBAPIError.instance(sql, None, error, sqlite3.Error)
    return wrapped
