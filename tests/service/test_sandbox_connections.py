"""Connections to sandboxes: shared, bounded, closed when unused, replaced when broken; and their errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import errors
from holdfast.service.problems import Exhausted, Invalid, NotNow, Problem, TooLate, Unavailable
from holdfast.service.sessions.backend.connections import SandboxConnections, is_gone, problem_of
from holdfast.testing import FakeClock, FakeExec
from holdfast.testing.clock import settle
from tests.service.fakes import Uncloseable


class FakeServers:
    """Counts the connections that were made."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Uncloseable]] = []
        self.failure: Exception | None = None

    async def connect(self, address: str) -> Any:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.made.append((address, Uncloseable(FakeExec())))
        return self.made[-1][1]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def use(pool: SandboxConnections, address: str) -> None:
    async with pool.use(address) as api:
        await api.info()


async def test_users_of_one_address_share_one_connection(clock: FakeClock) -> None:
    servers = FakeServers()
    pool = SandboxConnections(servers.connect, clock)
    await asyncio.gather(*(use(pool, "a") for _ in range(10)), use(pool, "b"))
    assert sorted(address for address, _ in servers.made) == ["a", "b"]
    await pool.aclose()
    assert all(api.closed for _, api in servers.made)


async def test_a_connection_that_nobody_uses_is_closed_after_a_while(clock: FakeClock) -> None:
    servers = FakeServers()
    pool = SandboxConnections(servers.connect, clock, idle_seconds=300)
    await use(pool, "a")
    async with pool.hold("b"):
        await clock.advance(299)
        assert list(pool.addresses) == ["a", "b"]
        await clock.advance(301)
        assert list(pool.addresses) == ["b"]
    await settle()
    assert [api.closed for _, api in servers.made] == [True, False]
    await use(pool, "a")
    assert len(servers.made) == 3
    await pool.aclose()


async def test_what_runs_in_this_process_is_not_closed_for_being_unused(clock: FakeClock) -> None:
    pool = SandboxConnections(FakeServers().connect, clock, idle_seconds=10)
    await use(pool, "inprocess")
    await clock.advance(100)
    assert pool.addresses == ("inprocess",)
    await pool.aclose()


async def test_the_number_of_connections_is_bounded_and_unused_ones_make_room(clock: FakeClock) -> None:
    servers = FakeServers()
    pool = SandboxConnections(servers.connect, clock, limit=2)
    async with pool.hold("a"), pool.hold("b"):
        with pytest.raises(Exhausted) as refused:
            await use(pool, "c")
        assert refused.value.reason == "TOO_MANY_SANDBOXES"
    await use(pool, "c")
    assert len(pool.addresses) == 2
    await pool.aclose()


async def test_a_connection_that_failed_for_good_is_replaced(clock: FakeClock) -> None:
    servers = FakeServers()
    pool = SandboxConnections(servers.connect, clock)
    with pytest.raises(Unavailable) as refused:
        async with pool.use("a"):
            raise errors.ConnectionLost("it did not come back")
    assert (refused.value.reason, refused.value.retry_after) == ("SANDBOX_UNREACHABLE", 1.0)
    await use(pool, "a")
    assert [api.closed for _, api in servers.made] == [True, False]
    await pool.aclose()


async def test_a_sandbox_that_cannot_be_opened_is_tried_again_by_the_next_caller(clock: FakeClock) -> None:
    servers = FakeServers()
    pool = SandboxConnections(servers.connect, clock)
    servers.failure = errors.SandboxGone("no such container")
    with pytest.raises(Unavailable) as refused:
        await use(pool, "a")
    assert refused.value.reason == "SANDBOX_GONE"
    servers.failure = None
    await use(pool, "a")
    await pool.aclose()


async def test_a_caller_that_gives_up_does_not_take_the_connection_from_others(clock: FakeClock) -> None:
    opened = asyncio.Event()
    made: list[str] = []

    async def connect(address: str) -> Any:
        made.append(address)
        await opened.wait()
        return Uncloseable(FakeExec())

    pool = SandboxConnections(connect, clock)
    one, two = asyncio.ensure_future(use(pool, "a")), asyncio.ensure_future(use(pool, "a"))
    await settle()
    one.cancel()
    await asyncio.wait([one])
    opened.set()
    await two
    assert (one.cancelled(), made) == (True, ["a"])
    await pool.aclose()


async def test_what_a_sandbox_is_is_asked_once_a_connection(clock: FakeClock) -> None:
    requested = 0

    class Asked(FakeExec):
        async def info(self) -> Any:
            nonlocal requested
            requested += 1
            return await super().info()

    fake = Asked()

    async def connect(address: str) -> Any:
        return Uncloseable(fake)

    pool = SandboxConnections(connect, clock)
    await asyncio.gather(*(pool.info("a") for _ in range(5)))
    await pool.info("a")
    assert requested == 1
    await pool.aclose()


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (errors.UnknownTerminal("x"), NotNow, "SESSION_LOST"),
        (errors.TerminalClosed("x"), NotNow, "SESSION_CLOSED"),
        (errors.CwdNotFound("x"), Invalid, "CWD_NOT_FOUND"),
        (errors.CommandNotFound("x"), Invalid, "SHELL_NOT_FOUND"),
        (errors.TimeoutError("x"), TooLate, "TIMED_OUT"),
        (errors.LimitReached("x"), Exhausted, "SANDBOX_EXHAUSTED"),
        (errors.SandboxGone("x"), Unavailable, "SANDBOX_GONE"),
        (errors.ConnectionLost("x"), Unavailable, "SANDBOX_UNREACHABLE"),
        (errors.Unauthorized("x"), Unavailable, "SANDBOX_UNREACHABLE"),
        (errors.InvalidParams("x"), Invalid, "INVALID_REQUEST"),
        (errors.InternalError("x"), Problem, "INTERNAL"),
    ],
)
def test_every_error_of_a_sandbox_is_a_problem(
    error: errors.HoldfastError, kind: type[Problem], reason: str
) -> None:
    problem = problem_of(error, "docker:a")
    assert isinstance(problem, kind)
    assert (problem.reason, "x" in problem.message) == (reason, True)


def test_only_what_is_known_to_be_gone_is_gone() -> None:
    assert is_gone(errors.SandboxGone("x"))
    assert is_gone(errors.UnknownShell("x"))
    assert not is_gone(errors.ConnectionLost("x"))
    assert not is_gone(errors.ShuttingDown("x"))
