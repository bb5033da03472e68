"""Fakes for tests of code that uses holdfast: a clock moved by hand, a virtual-time loop,
processes, shells and terminals with coroutines as programs, and files in memory."""

from __future__ import annotations

from holdfast.testing.clock import FakeClock
from holdfast.testing.fake_exec import FakeExec
from holdfast.testing.fake_files import FakeFiles
from holdfast.testing.fake_process import FakeProcess, cat, hangs, prints
from holdfast.testing.fake_shell import FakeCommand, FakeShell, answers
from holdfast.testing.fake_terminal import FakeTerminal, PtyStub, by_hand
from holdfast.testing.virtual_time import VirtualTimeLoop, run_in_virtual_time

__all__ = [
    "FakeClock",
    "FakeCommand",
    "FakeExec",
    "FakeFiles",
    "FakeProcess",
    "FakeShell",
    "FakeTerminal",
    "PtyStub",
    "VirtualTimeLoop",
    "answers",
    "by_hand",
    "cat",
    "hangs",
    "prints",
    "run_in_virtual_time",
]
