"""The terminal of this program: its size, raw mode, and the detach key, which leaves the command running.

The detach key is Ctrl-\\ followed by `d`. Ctrl-\\ twice sends one Ctrl-\\; with any other key both are sent.
"""

from __future__ import annotations

import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.types import TerminalSize

DETACH_PREFIX: Final = 0x1C
DETACH_KEY: Final = ord("d")
DETACH_NAME: Final = "Ctrl-\\ d"
#: The byte of Ctrl-C in raw mode.
INTERRUPT: Final = 0x03


class DetachKey:
    """Finds the detach key in typed bytes, however they are split."""

    def __init__(self) -> None:
        self._prefixed = False

    def feed(self, typed: bytes) -> tuple[bytes, bool]:
        """Return the bytes to forward, and whether the key was pressed; bytes after it are dropped."""
        passed = bytearray()
        for byte in typed:
            if self._prefixed:
                self._prefixed = False
                if byte == DETACH_KEY:
                    return bytes(passed), True
                if byte != DETACH_PREFIX:
                    passed.append(DETACH_PREFIX)
                passed.append(byte)
            elif byte == DETACH_PREFIX:
                self._prefixed = True
            else:
                passed.append(byte)
        return bytes(passed), False


def terminal_size(*fds: int) -> TerminalSize | None:
    """Return the size of the first of these descriptors that is a terminal; None if none is."""
    for fd in fds:
        try:
            size = os.get_terminal_size(fd)
        except OSError:
            continue
        if size.lines and size.columns:
            return TerminalSize(rows=size.lines, cols=size.columns)
    return None


def draws(fd: int) -> bool:
    """Whether a descriptor is a terminal that can move its cursor."""
    return os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def raw_mode(fd: int) -> Iterator[None]:
    """Set raw mode, in which keys reach the command as they are typed; the former mode is restored at the end."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
