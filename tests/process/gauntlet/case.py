"""The definition of a case of the gauntlet, and the words that cases are written with.

Each case runs in a live shell of its own, step after step, on every shell it names. `@DIR@` in a command or in an
expectation stands for the case's own empty directory, where the shell starts. Pure: nothing here runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

BASH = ("bash",)
SH = ("bash", "dash", "ash")
POSIX = ("dash", "ash")
ALL = ("bash", "dash", "ash", "zsh")
BASH_ZSH = ("bash", "zsh")

#: The expected contents of a stream: these bytes, or a pattern that matches the whole.
Expected = bytes | re.Pattern[bytes]
#: The state that a new shell has of the old one.
Restored = Literal["", "exports", "state"]


class Step(msgspec.Struct, frozen=True):
    """One command, and all that must be true of its result."""

    command: str
    #: A mapping gives the expectation by shell; "" is for those it does not name.
    out: Expected | Mapping[str, Expected] = b""
    err: Expected | Mapping[str, Expected] = b""
    code: int | Mapping[str, int] = 0
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    input: bytes | str | None = None
    timeout: float | None = None
    #: Interrupt the command once it has printed this to stdout.
    interrupt_at: bytes | None = None
    timed_out: bool = False
    #: With what of the old shell it was restarted; empty if it was not. Several: any of them is right.
    restored: Restored | tuple[Restored, ...] = ""
    #: The directory that the result must name.
    at: str | None = None


class Closed(msgspec.Struct, frozen=True):
    """From here on the shell is closed, and the error gives the reason."""

    why: str


class Late(msgspec.Struct, frozen=True):
    """Output of background jobs after their commands: exactly this is the shell's own output."""

    out: bytes = b""
    err: bytes = b""


class Case(msgspec.Struct, frozen=True):
    """Steps in one live shell. It must live to the end unless the last step has it closed."""

    name: str
    steps: tuple[Step | Closed | Late, ...]
    shells: tuple[str, ...] = SH
    #: Programs without which the case cannot be run.
    needs: tuple[str, ...] = ()


def case(
    name: str,
    *steps: Step | Closed | Late,
    on: tuple[str, ...] = SH,
    needs: tuple[str, ...] = (),
) -> Case:
    return Case(name, steps, on, needs)


def like(pattern: str) -> re.Pattern[bytes]:
    """Any bytes that this pattern matches whole; a dot matches newlines too."""
    return re.compile(pattern.encode(), re.DOTALL)


def says(text: str, line: int | None = 1) -> re.Pattern[bytes]:
    """One line of bash on stderr: the path of the command, the line in it, the message."""
    where = f": line {line}: " if line else ": "
    return re.compile(rb"[^\n]+" + re.escape((where + text).encode()) + rb"\n")


def fakes(*names: str) -> str:
    """Functions with these names, each of which only reports its call."""
    return "; ".join(f"{name}() {{ echo fake {name}; }}" for name in names)


def ends(text: str) -> re.Pattern[bytes]:
    """One line that ends so: for messages that each shell begins in its own way."""
    return re.compile(rb"[^\n]*" + re.escape(text.encode()) + rb"\n")


#: The one trap of ours that a listing of traps shows.
OUR_TRAP = r"trap -- '[^\n]*' (?:SIGRTMAX-7|RTMAX-7|57|USR2)\n"
ANY = like(".*")
#: Bash may report a killed job some commands later (`set -m`), or as soon as it has reaped it.
NOTICE = like(r"(?:[^\n]*(?:Killed|Terminated)[^\n]*\n)*")
SOMETHING = like(".+\n")
ALIVE = Step("echo alive", b"alive\n")
EVERY_BYTE = bytes(range(256))
OCTAL = "".join(f"\\{value:03o}" for value in range(256))
