"""Fakes for tests of code that uses holdfast: channels in memory that can be cut, a clock moved by hand,
processes, shells and terminals whose programs are coroutines, files that are nowhere."""

from __future__ import annotations

from holdfast.testing.clock import FakeClock
from holdfast.testing.fake_exec import FakeExec
from holdfast.testing.fake_files import FakeFiles
from holdfast.testing.fake_process import FakeProcess, cat, hangs, prints
from holdfast.testing.fake_shell import FakeCommand, FakeShell, answers
from holdfast.testing.fake_terminal import FakeTerminal, PtyStub, by_hand
from holdfast.testing.memory import MemoryChannel, MemoryWire, memory_pair
from holdfast.testing.virtual_time import VirtualTimeLoop, run_in_virtual_time

__all__ = [
    "FakeClock",
    "FakeCommand",
    "FakeExec",
    "FakeFiles",
    "FakeProcess",
    "FakeShell",
    "FakeTerminal",
    "MemoryChannel",
    "MemoryWire",
    "PtyStub",
    "VirtualTimeLoop",
    "answers",
    "by_hand",
    "cat",
    "hangs",
    "memory_pair",
    "prints",
    "run_in_virtual_time",
]
