"""Terminals over each way, for every test in this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast import Sandbox
from holdfast.client.terminal import Terminal
from tests.contract.terminals.ways import TERMINAL_SETTINGS, TERMINAL_WAYS, Opener, make_home, terminal_box
from tests.support.servers import RunningServer, running_server


@pytest.fixture(scope="package")
def terminal_server() -> Iterator[RunningServer]:
    with running_server(["unix", "ws"], settings=TERMINAL_SETTINGS) as server:
        yield server


@pytest.fixture(params=TERMINAL_WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def box(way: str, terminal_server: RunningServer) -> AsyncIterator[Sandbox]:
    async with terminal_box(way, terminal_server) as box:
        yield box


@pytest.fixture
def opened(box: Sandbox, tmp_path: Path) -> Opener:
    return Opener(box, make_home(tmp_path))


@pytest.fixture
async def terminal(opened: Opener) -> Terminal:
    return await opened()
