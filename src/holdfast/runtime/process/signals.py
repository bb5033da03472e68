"""Names of signals, as people and protocols write them, and exit statuses from waitid(2). Pure."""

from __future__ import annotations

import os
import signal

from holdfast.errors import UnknownSignal
from holdfast.types import ExitStatus

#: The names that the Codex client sends.
_WORDS = {"INTERRUPT": signal.SIGINT, "TERMINATE": signal.SIGTERM, "HANGUP": signal.SIGHUP}


def parse_signal(name: str) -> signal.Signals:
    """Return the signal for `INT`, `SIGINT`, `int`, `interrupt` or `2`."""
    word = name.strip().upper()
    if word in _WORDS:
        return _WORDS[word]
    try:
        if word.isdecimal():
            return signal.Signals(int(word))
        return signal.Signals[word if word.startswith("SIG") else f"SIG{word}"]
    except (KeyError, ValueError):
        raise UnknownSignal(f"unknown signal {name!r}") from None


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; real-time signals have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def exit_status(code: int, status: int) -> ExitStatus:
    """Return the exit status for `si_code` and `si_status` of waitid(2)."""
    if code == os.CLD_EXITED:
        return ExitStatus(status)
    return ExitStatus(128 + status, signal_name(status))
