"""Servers for the whole run, a sandbox for each test, over each way. A test leaves its server as it found it."""

from __future__ import annotations

import asyncio
import resource
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator

import pytest

from holdfast import Sandbox
from tests.contract.ways import BY_HAND, REMOTE_WAYS, SMALL, WAYS, Starter, address_of, end_everything, open_box
from tests.support.servers import Conversation, RunningServer, conversation, running_server

#: The slowest test takes a few seconds.
HANG_SECONDS = 60


@pytest.fixture
def directory() -> Iterator[str]:
    """A directory with a short path, for sockets."""
    path = tempfile.mkdtemp(prefix="hf-", dir="/tmp")
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Turn a test that waits for ever into one that fails where it waits."""

    def hung(number: int, frame: object) -> None:
        # Cancelled rather than raised from here: an error out of a signal handler leaves the loop half stepped.
        for task in asyncio.all_tasks():
            task.cancel(f"the test hangs: it was not done after {HANG_SECONDS} s")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    """One server on a Unix socket and on a WebSocket, with the default settings."""
    with running_server(["unix", "ws"]) as server:
        yield server


@pytest.fixture(scope="session")
def shared_small_server() -> Iterator[RunningServer]:
    """The same with settings that a test can reach."""
    with running_server(["unix", "ws"], settings=SMALL) as server:
        yield server


@pytest.fixture
async def server(shared_server: RunningServer) -> AsyncIterator[RunningServer]:
    yield shared_server
    await end_everything(shared_server)


@pytest.fixture
async def small_server(shared_small_server: RunningServer) -> AsyncIterator[RunningServer]:
    yield shared_small_server
    await end_everything(shared_small_server)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=REMOTE_WAYS)
def remote_way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["pipe", "pty"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def box(way: str, server: RunningServer) -> AsyncIterator[Sandbox]:
    async with open_box(way, server, {}) as box:
        yield box


@pytest.fixture
async def small_box(way: str, small_server: RunningServer) -> AsyncIterator[Sandbox]:
    async with open_box(way, small_server, SMALL) as box:
        yield box


@pytest.fixture
def starter(box: Sandbox, kind: str) -> Starter:
    return Starter(box, kind)


@pytest.fixture(params=BY_HAND)
async def talk(request: pytest.FixtureRequest, server: RunningServer) -> AsyncIterator[Conversation]:
    """A conversation by hand, past its handshake."""
    async with conversation(address_of(request.param, server, {})) as talk:
        await talk.initialize()
        yield talk


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Room for a thousand processes in this program; the server makes its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
