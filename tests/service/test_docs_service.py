"""The example session of docs/service.md prints what the page shows, against a real service."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.verbs.service.service import announce
from holdfast.service.assembly import StartupReport
from tests.service.running_service import PATIENCE_SECONDS, RunningService, needs_curl, new_home, running_service

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```shell-session\n(.*?)^```$", (ROOT / "docs" / "service.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with new_home() as home, running_service(home) as started:
        yield started


def steps(block: str) -> list[tuple[str, str]]:
    """Each command of a block with its output on the page."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


def matches(shown: str, printed: str) -> bool:
    """`…` stands for anything, on a line of its own for any number of lines."""
    pattern = re.escape(shown.strip("\n")).replace("\\\n", "\n")
    pattern = re.sub(r"(?m)^…$", r"(?s:.*)", pattern)
    return re.fullmatch(re.sub(r"(\\ )+", " +", pattern).replace("…", ".*"), printed.strip("\n")) is not None


def test_the_page_has_both_halves() -> None:
    assert len(steps(BLOCKS[0])) == 1
    assert len(steps(BLOCKS[1])) > 5


def test_a_start_prints_what_the_page_shows(service: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    report = {**service.report, "grpc": "127.0.0.1:7400", "http": "http://127.0.0.1:7401"}
    announce(
        StartupReport(**{name: value for name, value in report.items() if name in StartupReport.__struct_fields__})
    )
    ((command, shown),) = steps(BLOCKS[0])
    assert command == "holdfast service"
    printed = capsys.readouterr().out
    assert matches(shown, printed), printed


@needs_curl
def test_every_line_of_the_session_prints_what_the_page_shows(service: RunningService) -> None:
    """All lines run in one shell, with the ports that this service has."""
    home = service.home
    program = Path(home.directory) / "holdfast"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m holdfast "$@"\n')
    program.chmod(0o700)
    block = BLOCKS[1].replace("http://127.0.0.1:7401", service.http)
    mark = f"--- end of step {os.getpid()} ---"
    script = "exec 2>&1\n" + "\n".join(f"{command}\nprintf '\\n%s\\n' '{mark}'" for command, _ in steps(block))
    done = subprocess.run(
        ["bash", "-c", script],
        env={**home.environ, "PATH": f"{home.directory}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    printed = done.stdout.split(f"\n{mark}\n")
    for (command, shown), output in zip(steps(block), printed, strict=False):
        assert matches(shown, output), f"{command}\n{output}"
    assert len(printed) == len(steps(block)) + 1, done.stdout
