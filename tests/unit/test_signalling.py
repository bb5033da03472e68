"""Signals reach what is meant and nothing else; and no code sends one by a number that may be another's."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.launch.pidfd_signals import OwnProcess, signal_child_group, signal_group, signal_process
from tests.support.signalling import send_signal, started_by_a_test

ROOT = Path(__file__).parents[2]
#: Where a raw kill stands, and why it reaches only what is meant.
ALLOWED = {
    "src/holdfast/launch/pidfd_signals.py",  # a child that is not reaped keeps its number
    "src/holdfast/runtime/durability/keeper.py",  # the same: its children, which it alone reaps
}
#: A session with a second process in the leader's group and a third in a group of its own; then it waits.
FAMILY = """
import os, signal, sys
def child(own_group):
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        if own_group:
            os.setpgid(0, 0)
        os.write(writing, b".")
        signal.pause()
        os._exit(0)
    os.read(reading, 1)
    return pid
print(child(False), child(True), flush=True)
signal.pause()
"""


class Family:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        self.leader = self.process.pid
        self.member, self.other = (int(word) for word in self.process.stdout.readline().split())

    def end(self) -> None:
        for group in (self.other, self.leader):
            signal_group(group, self.leader, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def family() -> Iterator[Family]:
    made = Family()
    yield made
    made.end()


def ended(pid: int) -> None:
    """Wait for the end of a process that may have been reaped."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    assert select.select([watch], [], [], 60)[0]
    os.close(watch)


def is_signalled(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in ("T", "Z", "X")


# --- groups -------------------------------------------------------------------------------------------------------


def test_a_group_is_signalled_and_no_other_of_its_session(family: Family) -> None:
    assert signal_group(family.other, family.leader, signal.SIGTERM)
    ended(family.other)
    assert family.process.poll() is None
    assert signal_child_group(family.leader, signal.SIGTERM)
    ended(family.member)
    assert family.process.wait(60) == -signal.SIGTERM


def test_the_number_of_a_group_in_another_session_is_another_group(family: Family) -> None:
    """As when a terminal still names a foreground group that has ended, and its number was given again."""
    stranger = Family()
    try:
        assert not signal_group(stranger.other, family.leader, signal.SIGKILL)
        assert not signal_group(stranger.leader, family.leader, signal.SIGKILL)
        assert stranger.process.poll() is None
        assert not is_signalled(stranger.other)
    finally:
        stranger.end()


def test_those_who_are_spared_get_no_signal(family: Family) -> None:
    assert signal_group(family.leader, family.leader, signal.SIGTERM, spared=(family.leader,))
    ended(family.member)
    assert family.process.poll() is None


def test_members_are_signalled_one_by_one_where_the_kernel_cannot_signal_groups(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.launch.pidfd_signals._PROCESS_GROUP", 1 << 30)  # a flag that no kernel has
    assert signal_group(family.leader, family.leader, signal.SIGTERM)
    ended(family.member)
    assert family.process.wait(60) == -signal.SIGTERM


def test_a_child_that_was_reaped_is_not_signalled(family: Family) -> None:
    signal_group(family.other, family.leader, signal.SIGKILL)
    signal_child_group(family.leader, signal.SIGKILL)
    family.process.wait(60)
    assert not signal_child_group(family.leader, signal.SIGKILL)


def test_a_child_without_a_session_of_its_own_is_not_signalled_as_a_group() -> None:
    """Its group is ours."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert not signal_child_group(process.pid, signal.SIGTERM)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("pid", [-1, 0, 1, "ours"])
def test_neither_we_nor_everybody_is_ever_signalled(pid: int | str) -> None:
    number = os.getpid() if pid == "ours" else int(pid)
    with pytest.raises(OwnProcess):
        signal_process(number, signal.SIGCONT, lambda _: True)
    group = os.getpgrp() if pid == "ours" else int(pid)
    with pytest.raises(OwnProcess):
        signal_group(group, 12_345, signal.SIGCONT)
    with pytest.raises(OwnProcess):
        signal_group(12_345, os.getsid(0) if pid == "ours" else int(pid), signal.SIGCONT)


# --- single processes ---------------------------------------------------------------------------------------------


def test_a_process_that_is_another_by_now_is_not_signalled(family: Family) -> None:
    assert not signal_process(family.member, signal.SIGKILL, lambda _: False)
    assert not is_signalled(family.member)
    assert signal_process(family.member, signal.SIGKILL, lambda pid: os.getsid(pid) == family.leader)
    ended(family.member)


def test_a_test_signals_what_it_has_started_and_not_the_program_that_runs_it(family: Family) -> None:
    assert started_by_a_test(family.member)
    send_signal(family.member, signal.SIGTERM)
    ended(family.member)
    with pytest.raises((AssertionError, OwnProcess)):
        send_signal(os.getppid(), signal.SIGCONT)
    with pytest.raises(OwnProcess):
        send_signal(os.getpid(), signal.SIGCONT)


def test_a_process_in_the_middle_of_an_exec_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows an empty environment then; the parent of an orphan is no test."""
    script = tmp_path / "script"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o755)
    monkeypatch.setattr("tests.support.signalling._descends", lambda pid, ancestor: False)
    with subprocess.Popen([str(script)], stdin=subprocess.DEVNULL) as process:
        try:
            assert all(started_by_a_test(process.pid) for _ in range(2_000))
        finally:
            process.kill()


def test_a_process_that_has_ended_and_is_not_reaped_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that init has inherited: on some machines it is reaped late, and its environment is gone."""
    monkeypatch.setattr("tests.support.signalling._descends", lambda pid, ancestor: False)
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            send_signal(process.pid, signal.SIGKILL)


# --- the code -----------------------------------------------------------------------------------------------------


def raw_kills(source: str) -> list[int]:
    """The lines with os.kill or os.killpg, but for a signal to itself and for a question (signal 0)."""
    if "kill" not in source:
        return []
    tree = ast.parse(source)
    calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [node.lineno for name in node.names if name.name in ("kill", "killpg")]
        if not (
            isinstance(node, ast.Attribute) and node.attr in ("kill", "killpg") and ast.unparse(node.value) == "os"
        ):
            continue
        arguments = [ast.unparse(argument) for argument in calls[node].args] if node in calls else []
        if len(arguments) == 2 and (arguments[0] == "os.getpid()" or arguments[1] == "0"):
            continue
        found.append(node.lineno)
    return found


def test_raw_kills_are_found() -> None:
    assert raw_kills("import os\nos.kill(pid, 9)\nos.killpg(os.getpgid(pid), 2)\nf(os.kill, pid)\n") == [2, 3, 4]
    assert raw_kills("import os\nos.kill(os.getpid(), 9)\nos.kill(pid, 0)\n") == []
    assert raw_kills("from os import kill\n") == [1]


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "fuzz"])
def test_no_code_signals_a_number_that_may_be_anothers(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / folder).rglob("*.py")
        if str(path.relative_to(ROOT)) not in ALLOWED
        for line in raw_kills(path.read_text())
    }
    assert found == set(), "use holdfast.launch.pidfd_signals, and in tests tests.support.signalling"


# --- the worker that runs the tests -------------------------------------------------------------------------------

#: A thread of each worker receives messages from the program that runs the tests. If one of these is patched for
#: the whole process and the thread fails, execnet sends SIGINT to the worker after five seconds, in whatever test
#: runs then.
OF_THE_WORKER = ("struct", "threading", "queue", "io", "os.read", "os.write", "os.kill", "os.getpid")


def patches_of_the_worker(source: str) -> list[int]:
    """The lines in which `monkeypatch.setattr` replaces something that the worker's own threads use."""
    if "setattr" not in source:
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr" and node.args):
            continue
        words = [str(word.value) if isinstance(word, ast.Constant) else ast.unparse(word) for word in node.args[:2]]
        if any(f"{'.'.join(words)}.".startswith(f"{name}.") for name in OF_THE_WORKER):
            found.append(node.lineno)
    return found


def test_patches_of_the_worker_are_found() -> None:
    for words in ('struct, "unpack"', '"os.read"', 'os, "kill"', '"threading.Thread"'):
        assert patches_of_the_worker(f"monkeypatch.setattr({words}, f)") == [1]
    for words in ('keeper, "struct"', 'os, "splice"', '"os.readlink"'):
        assert patches_of_the_worker(f"monkeypatch.setattr({words}, f)") == []


def test_no_test_breaks_the_worker_that_runs_it() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / "tests").rglob("*.py")
        for line in patches_of_the_worker(path.read_text())
    }
    assert found == set(), "patch the name in the module under test alone"
