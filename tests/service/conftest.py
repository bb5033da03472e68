"""A real PostgreSQL for tests: one cluster for each process that runs tests, one database for each test.

And a real Chromium for each module that tests pages.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from holdfast.service.store import Store
from tests.support.postgres import Cluster, memory, postgres_programs, running_cluster

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.service.browser import Console
    from tests.service.running_service import RunningService


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    """A Chromium of this module, with a new and empty profile; the module has `asyncio(loop_scope="module")`."""
    from playwright.async_api import async_playwright, expect

    from tests.service.browser import ARGUMENTS, MILLISECONDS

    expect.set_options(timeout=MILLISECONDS)
    async with async_playwright() as driver:
        # As root, as in a container, Chromium has no sandbox of its own.
        browser = await driver.chromium.launch(
            executable_path="/usr/bin/chromium", args=ARGUMENTS, chromium_sandbox=False
        )
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def console(browser: Browser, service: RunningService) -> AsyncIterator[Console]:
    """A page of the module's service, without storage of others."""
    from tests.service.browser import WATCH, Console

    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    await context.add_init_script(WATCH)
    yield Console(await context.new_page(), service)
    await context.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """The cluster of this process."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL: initdb is neither in /usr/lib/postgresql/*/bin nor in PATH")
    with running_cluster(programs) as cluster:
        yield cluster


@pytest.fixture
def postgres_url(postgres: Cluster) -> str:
    """An empty database of the test's own."""
    return postgres.new_database()


@pytest.fixture
def sqlite_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hf-db-", dir=memory()) as directory:
        yield f"sqlite:///{directory}/service.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """An empty database: once SQLite, once PostgreSQL."""
    url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    return url


OpenStore = Callable[..., Awaitable[Store]]


@pytest.fixture
async def open_store(store_url: str) -> AsyncIterator[OpenStore]:
    """Opens the test's database, as often as there are to be replicas; all are closed in the end."""
    opened: list[Store] = []

    async def open_one(**options: Any) -> Store:
        opened.append(await Store.open(store_url, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        await store.close()


@pytest.fixture
async def store(open_store: OpenStore) -> Store:
    return await open_store()
