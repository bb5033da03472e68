"""Descendants of a process, by the kernel's lists of children: the list is complete, or there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from holdfast.runtime.confine.jail import ProcessJail, descendants
from tests.support.signalling import kill_group

MANY = 1000
#: Complete lists while processes come and go, and how many are tried for them.
LOOKS, TRIES = 50, 20_000

OF_THREADS = """
import subprocess, threading
def start():
    with subprocess.Popen(["sleep", "1000"]) as process:
        print(process.pid, flush=True)
threads = [threading.Thread(target=start) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
#: One that stays, between many that go.
COMING_AND_GOING = "true & true & sleep 1000 & echo $!; while :; do true & true & wait %3 %4; true; done"

#: Starts a program, and gives its pid and the pids that it prints first.
Start = Callable[..., tuple[int, list[int]]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(*argv: str, tells: int) -> tuple[int, list[int]]:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        return process.pid, [int(process.stdout.readline()) for _ in range(tells)]

    yield begin
    for process in started:
        kill_group(process.pid)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_children_of_children(start: Start) -> None:
    pid, below = start("sh", "-c", "sh -c 'sleep 1000 & echo $$; echo $!; wait'; true", tells=2)
    assert sorted(descendants(pid, MANY) or ()) == sorted([pid, *below])


def test_children_of_every_thread(start: Start) -> None:
    pid, below = start(sys.executable, "-I", "-S", "-c", OF_THREADS, tells=3)
    assert sorted(descendants(pid, MANY) or ()) == sorted([pid, *below])


def test_nobody_is_left_out_while_others_come_and_go(start: Start) -> None:
    pid, (stays,) = start("sh", "-c", COMING_AND_GOING, tells=1)
    looks = 0
    for _ in range(TRIES):
        found = descendants(pid, MANY)
        if found is not None:
            assert stays in found
            looks += 1
            if looks == LOOKS:
                break
    assert looks == LOOKS


def test_too_many_and_gone_are_not_told(start: Start) -> None:
    pid, _ = start("sh", "-c", "sleep 1000 & echo $!; wait", tells=1)
    assert len(descendants(pid, 2) or ()) == 2
    assert descendants(pid, 1) is None
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert descendants(gone.pid, MANY) is None


def test_where_no_jail_is_found_everybody_may_be_inside() -> None:
    assert os.getpid() in ProcessJail(0).inside()
