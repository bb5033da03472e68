"""Formats numbers, tables and messages: colours and rules on a terminal, plain stable columns in a pipe.

Standard library only: rich is imported if stdout is a terminal.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

#: Styles by the text of a cell, on a terminal only.
_STYLES = {
    "running": "green",
    "ok": "green",
    "closing": "yellow",
    "limited": "yellow",
    "missing": "red",
    "ended": "dim",
    "failed": "red",
}


def age(seconds: float) -> str:
    """Return a duration as `4s`, `3m 20s`, `2h 05m`, `3d 04h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02}h"


def amount(count: int) -> str:
    """Return a size as `512 B`, `1.5 KiB`, `20 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def one_line(text: str) -> str:
    """Return the text with control characters, line breaks included, written as in a string literal."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text
    )


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows in padded columns, two spaces apart; the last column is not padded, and no cell is cut."""
    table = [header, *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header) - 1)]
    lines = []
    for row in table:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*padded, row[-1]]).rstrip())
    return "\n".join(lines) + "\n"


def complain(message: str) -> None:
    """Print one line on stderr."""
    sys.stderr.write(f"holdfast: {message}\n")
    sys.stderr.flush()


def fail(message: str) -> int:
    """Print one line on stderr and return 2, the exit code for wrong usage and for failures of a plain verb."""
    complain(message)
    return 2


def discard_stdout() -> None:
    """Point stdout at /dev/null after its reader has closed it, or the interpreter fails to flush it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def show_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, wrap: bool = False, plain: bool = False
) -> None:
    """Print a table: plain columns, or on a terminal `rich_table`, which describes `wrap`, unless `plain`."""
    if plain or not on_terminal():
        sys.stdout.write(columns(header, rows))
        sys.stdout.flush()
        return
    from rich.console import Console

    console = Console()
    console.print(rich_table(header, rows, console.width, wrap=wrap), crop=False)


def rich_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, wrap: bool = False) -> Table:
    """Make a table for a terminal of `width` columns.

    A row is one line and its last cell is cut to the width; every other cell is whole, so that an id can be copied.
    With `wrap`, cells are broken into lines instead.
    """
    from rich import box
    from rich.cells import cell_len, set_cell_size
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, (name, *(row[i] for row in cells)))) for i, name in enumerate(header)]
    # Each column but the first has two spaces before it.
    room = max(cell_len(header[-1]), width - sum(widths[:-1]) - 2 * (len(header) - 1))
    widths[-1] = min(widths[-1], room)
    for name in header:
        table.add_column(name, overflow="fold", no_wrap=not wrap)
    if not wrap:
        # Set even if the terminal is narrower: otherwise rich would cut the other columns.
        table.width = sum(widths) + 2 * (len(header) - 1)
    for row in cells:
        if not wrap and cell_len(row[-1]) > room:
            row[-1] = set_cell_size(row[-1], room - 1) + "…"
        # Text, not markup: a command line may well hold square brackets.
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table
