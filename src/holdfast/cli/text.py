"""How numbers and tables look: colours and lines on a terminal, plain stable columns in a pipe.

rich is loaded only when a terminal is there to show it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

#: Styles by what a cell says, on a terminal only.
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
    """`4s`, `3m 20s`, `2h 05m`, `3d 04h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02}h"


def amount(count: int) -> str:
    """`512 B`, `1.5 KiB`, `20 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Padded columns, two spaces apart; the last one is not padded and nothing is cut."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header) - 1)]
    lines = []
    for row in table:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*padded, row[-1]]).rstrip())
    return "\n".join(lines) + "\n"


def on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as fits where it goes."""
    if not on_terminal():
        sys.stdout.write(columns(header, rows))
        sys.stdout.flush()
        return
    from rich.console import Console

    Console().print(rich_table(header, rows))


def rich_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        # Text, not markup: a command line may well hold square brackets.
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table
