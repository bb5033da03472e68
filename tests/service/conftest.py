"""A real PostgreSQL for tests: one cluster for each process that runs tests, one database for each test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from holdfast.service.store import Store
from tests.support.postgres import Cluster, memory, postgres_programs, running_cluster


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
