"""Screens of terminals: an emulator is fed the bytes that a terminal printed and returns a `Screen`.

Two backends have one interface: pyghostty, exact and fast, and pyte, in pure Python, slow and less exact.
Either is imported when an emulator is made. Nothing here reads a terminal or a log.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Literal, Protocol

from holdfast.client.screen.emulation import check_size
from holdfast.errors import InvalidParams, InvalidRequest
from holdfast.types import Struct

Backend = Literal["auto", "ghostty", "pyte"]


class Screen(Struct, frozen=True):
    """One moment of a terminal: exactly `rows` lines without trailing blanks, and the cursor, counted from 0."""

    rows: int
    cols: int
    lines: tuple[str, ...]
    cursor_row: int
    cursor_col: int
    cursor_visible: bool = True
    title: str = ""
    #: Whether the alternate screen is shown, as full-screen programs do.
    alternate: bool = False

    @property
    def text(self) -> str:
        """The lines down to the last one that is not empty."""
        return "\n".join(self.lines).rstrip("\n")

    @property
    def cursor(self) -> tuple[int, int]:
        return (self.cursor_row, self.cursor_col)

    def __str__(self) -> str:
        return self.text


class Emulator(Protocol):
    """A terminal without a window. Bytes may be cut anywhere between two calls of `feed`."""

    def feed(self, data: bytes) -> None: ...

    def resize(self, rows: int, cols: int) -> None: ...

    def screen(self) -> Screen: ...

    def restore(self) -> bytes:
        """Return bytes that draw this screen on a terminal of the same size that was just cleared.

        Contents with colours, the screen under an alternate one, cursor, title, scroll region and modes.
        """
        ...

    def close(self) -> None: ...


def emulator(rows: int, cols: int, *, scrollback: int = 0, backend: Backend = "auto") -> Emulator:
    """Return an emulator of this size; `auto` takes pyghostty if it is installed and pyte otherwise.

    `scrollback` is the number of lines above the screen that `restore` draws as well; pyte keeps none.
    """
    check_size(rows, cols)
    if scrollback < 0:
        raise InvalidParams(f"scrollback must not be negative, got {scrollback}", scrollback=scrollback)
    failures: list[ImportError | OSError] = []
    makers: tuple[tuple[Backend, Callable[[], Emulator]], ...] = (
        ("ghostty", lambda: _ghostty(rows, cols, scrollback)),
        ("pyte", lambda: _pyte(rows, cols)),
    )
    for name, make in makers:
        if backend in ("auto", name):
            try:
                return make()
            except (ImportError, OSError) as error:  # OSError: the shared library in the wheel does not load here
                failures.append(error)
    if not failures:
        raise InvalidParams(f"no screen backend {backend!r}; there are auto, ghostty and pyte", backend=backend)
    wanted = "pyte" if backend == "pyte" else "pyghostty"
    reasons = "; ".join(str(error) for error in failures)
    raise InvalidRequest(f"a screen needs an emulator: pip install {wanted} ({reasons})") from failures[0]


def preload() -> None:
    """Load pyghostty, in a thread of the caller: that takes some 0.2 s, once in a program."""
    with suppress(ImportError, OSError):  # `emulator` raises the error that names the missing package
        import_module("pyghostty.core")


def _ghostty(rows: int, cols: int, scrollback: int) -> Emulator:
    from holdfast.client.screen.ghostty import GhosttyEmulator

    return GhosttyEmulator(rows, cols, scrollback=scrollback)


def _pyte(rows: int, cols: int) -> Emulator:
    from holdfast.client.screen.pyte import PyteEmulator

    return PyteEmulator(rows, cols)
