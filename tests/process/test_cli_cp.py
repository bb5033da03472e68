"""`holdfast cp` as a real process against a real server."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import RunningServer, running_server, server_environment


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def command(server: RunningServer) -> list[str]:
    return [sys.executable, "-m", "holdfast", "cp", "--sandbox", server.address("unix")]


def cp(command: list[str], *arguments: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*command, *arguments], input=input, capture_output=True, env=server_environment(), timeout=60
    )


def test_a_tree_there_and_back(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "tree" / "empty").mkdir(parents=True)
    (tmp_path / "tree" / "file").write_bytes(bytes(range(256)))
    os.mkfifo(tmp_path / "tree" / "fifo")
    (tmp_path / "there").mkdir()
    done = cp(command, f"{tmp_path}/tree", f":{tmp_path}/there")
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"left out" in done.stderr
    assert b"fifo" in done.stderr
    copied = tmp_path / "there" / "tree"
    assert ((copied / "file").read_bytes(), (copied / "empty").is_dir()) == (bytes(range(256)), True)
    done = cp(command, "--json", f":{copied}", f"{tmp_path}/back")
    assert json.loads(done.stdout)["files"] == 1
    assert (tmp_path / "back" / "file").read_bytes() == bytes(range(256))
    done = cp(command, "--quiet", f"{tmp_path}/tree/.", f":{tmp_path}/there")
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "there" / "file").exists()


def test_standard_streams(command: list[str], tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    assert cp(command, "-", f":{tmp_path}/file", input=data).returncode == 0
    assert (tmp_path / "file").read_bytes() == data
    assert cp(command, f":{tmp_path}/file", "-").stdout == data


def test_errors_name_the_path_and_the_side(command: list[str], tmp_path: Path) -> None:
    done = cp(command, f":{tmp_path}/none", f"{tmp_path}/x")
    assert (done.returncode, done.stderr.decode()) == (
        1,
        f"holdfast: in the sandbox: {tmp_path}/none: no such file or directory\n",
    )
    done = cp(command, f"{tmp_path}/none", f":{tmp_path}/x")
    assert (done.returncode, done.stderr.decode()) == (
        1,
        f"holdfast: local file {tmp_path}/none: no such file or directory\n",
    )
    for wrong in (("a", "b"), (":a", ":b"), (":", "b"), ("--json", ":a", "-")):
        done = cp(command, *wrong)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.startswith(b"holdfast: cp: ")


def test_a_bar_where_somebody_looks(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(2_000_000))
    ours, theirs = pty.openpty()
    environment = {**server_environment(), "TERM": "xterm", "COLUMNS": "400"}
    arguments = [*command, f"{tmp_path}/file", f":{tmp_path}/copy"]
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while piece := read_terminal(ours):
            shown += piece
    os.close(ours)
    assert process.returncode == 0
    assert b"1.9/1.9 MiB" in shown


def read_terminal(fd: int) -> bytes:
    try:
        return os.read(fd, 65_536)
    except OSError:  # no process holds the other end any more
        return b""
