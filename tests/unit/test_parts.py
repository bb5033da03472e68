"""The list of programs that tests start, the table of what was skipped without them, and how a run is set up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.order import LONGEST_FIRST, rank, unit_of_work
from tests.support.parts import PACKAGES, needs, skip_table

TESTS = Path(__file__).parents[1]


def test_the_table_counts_tests_and_names_the_package() -> None:
    table = skip_table(
        ["no zsh", "no zsh, no vim", "not root: run as root", "no dockerd: `make parts` installs it"]
    )
    assert [line.split() for line in table] == [
        ["skipped", "because", "tests", "would", "run", "with"],
        ["no", "zsh", "2", "package", "zsh"],
        ["not", "root", "1", "run", "as", "root"],
        ["no", "dockerd", "1", "package", "docker.io"],
    ]


def test_there_is_no_table_without_skips() -> None:
    assert skip_table([]) == []


def test_a_missing_program_skips_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.support.parts._SYSTEM_DIRECTORIES", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (needs("zsh").args, needs("zsh").kwargs) == ((True,), {"reason": "no zsh"})
    os.symlink("/bin/sh", tmp_path / "zsh")
    assert needs("zsh").args == (False,)


def test_every_program_that_a_test_is_skipped_for_has_a_package() -> None:
    used = set()
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        if "from support.parts import" not in text:
            continue
        for call in re.findall(r"\b(?:needs|require)\(((?:\"[\w.-]+\"(?:, )?)+)\)", text):
            used |= set(re.findall(r'"([\w.-]+)"', call))
    assert "zsh" in used
    assert used - PACKAGES.keys() == set()


def test_what_tests_start_keeps_its_bytecode() -> None:
    """Whatever the environment contains: a server without bytecode takes four times as long to start."""
    command = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    assert not sys.dont_write_bytecode
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "False\n"


FORK_AFTER_A_CALL = """
import os, subprocess, grpc

with grpc.insecure_channel("127.0.0.1:1") as channel:
    try:
        channel.unary_unary("/nothing/listens")(b"", timeout=60)
    except grpc.RpcError:
        count_threads = lambda: os.write(1, b"%d" % len(os.listdir("/proc/self/task")))
        subprocess.run(["true"], preexec_fn=count_threads, timeout=60)
"""


def test_a_child_that_is_forked_has_one_thread() -> None:
    """Tests of terminals fork where tests of the service have used gRPC."""
    pytest.importorskip("grpc")
    # A new process: a tracer of another test may have a thread, which it also starts in forked children.
    done = subprocess.run([sys.executable, "-c", FORK_AFTER_A_CALL], capture_output=True, timeout=60)
    assert done.stdout == b"1", done.stderr


def test_workers_begin_with_the_longest_and_few_have_the_engines() -> None:
    assert [location for location in LONGEST_FIRST if not (TESTS.parent / location).exists()] == []
    names = ["tests/unit/runtime/test_keys.py::a", "tests/e2e/test_bench.py::b", "tests/e2e/test_soak.py::c[d::e]"]
    assert sorted(names, key=rank) == [names[1], names[2], names[0]]
    assert unit_of_work(names[2]) == "tests/e2e/test_soak.py"
    assert unit_of_work("tests/sandbox/test_pods.py::f") == unit_of_work("tests/sandbox/test_bundle.py::g")
    assert unit_of_work("tests/sandbox/test_pods.py::f") != unit_of_work("tests/sandbox/test_fleet_faults.py::g")
