"""A pause that the kernel could not make at once is made again; the client program of the engine is a script."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from holdfast.errors import SandboxError
from holdfast.fleet.containers.engine import DockerEngine

PROGRAM = """#!/bin/sh
echo "$1" >>"$COUNTED"
[ "$(wc -l <"$COUNTED")" -gt "$FAILURES" ] && exit 0
echo "Error response from daemon: OCI runtime pause failed: $MESSAGE" >&2
exit 1
"""


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "docker"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    return tmp_path / "counted"


@pytest.mark.parametrize(
    ("message", "failures", "runs"),
    [("unable to freeze: unknown", 2, 3), ("unable to freeze: unknown", 99, 5), ("permission denied", 99, 1)],
)
def test_a_pause(counted: Path, monkeypatch: pytest.MonkeyPatch, message: str, failures: int, runs: int) -> None:
    monkeypatch.setenv("MESSAGE", message)
    monkeypatch.setenv("FAILURES", str(failures))
    with pytest.raises(SandboxError, match=message) if failures == 99 else nullcontext():
        asyncio.run(DockerEngine().pause("holdfast-aaaaaaaaaaaaaaaa"))
    assert counted.read_text() == "pause\n" * runs
