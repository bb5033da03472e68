"""The agents that `make parts` installs from npm: programs of others, unmodified, that tests run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

#: Where they are installed, by this list of them.
LISTED = Path(__file__).parent / "agents/package.json"
AGENTS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast-agents"
#: Set to `yes` by `make agents`: all combinations of agents and connections, each of which takes some seconds.
ALL_CHECKS = os.environ.get("HOLDFAST_ALL_AGENT_CHECKS") == "yes"
NODE = os.path.realpath(shutil.which("node") or "node")


def require_agents() -> Path:
    """The directory of their modules; skips the running test where they are not installed."""
    if not os.path.exists(NODE):
        pytest.skip("no node")
    installed = AGENTS / "package.json"
    if not installed.exists() or installed.read_bytes() != LISTED.read_bytes():
        pytest.skip(f"no agents of these versions in {AGENTS}: make parts")
    return AGENTS / "node_modules"
