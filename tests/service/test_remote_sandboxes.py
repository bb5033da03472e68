"""Sessions in sandboxes that are not the service's own machine: directories, what confines them, their loss."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import errors
from holdfast.service.api import CreateRequest
from holdfast.service.policy.rules import default_rules, load_rules
from holdfast.service.problems import NotNow
from holdfast.service.sessions.backend.connections import SandboxConnections, problem_of
from holdfast.service.sessions.backend.egress import Egress
from holdfast.service.sessions.backend.preparation import Preparation
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.sessions.ports import MetricEvent
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.types import SessionRecord
from holdfast.testing import FakeClock, FakeExec, by_hand
from holdfast.testing.clock import settle
from holdfast.types import EnvironmentInfo
from tests.service.fakes import ANN, MemoryStore, connecting, make_manager, own_uid, running, settings

HOST = "/home/service/.local/state/holdfast/workspaces"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


def manager_at(sandbox: str, fake: FakeExec, store: MemoryStore, clock: FakeClock) -> SessionManager:
    """A manager with the built-in rules, and all that prepares and confines a session."""
    pool = SandboxConnections(connecting(fake), clock)
    preparation = Preparation(pool, Egress(pool, store, clock), own_uid)
    return SessionManager(
        store=store,
        rules=Rulebook(default_rules(HOST)),
        pool=pool,
        plan=preparation.plan,
        prepare=preparation.prepare,
        clock=clock,
        settings=settings(sandbox=sandbox, prompt_seconds=0),
    )


# --- workspaces --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sandbox", "workspace"),
    [
        ("local", f"{HOST}/ann"),
        ("inprocess", f"{HOST}/ann"),
        ("unix:/run/holdfast.sock", f"{HOST}/ann"),
        ("ws://127.0.0.1:7000", f"{HOST}/ann"),
        ("kubernetes:team/web", "/tmp/holdfast-workspaces/ann"),
        ("docker:web?user=app", "/tmp/holdfast-workspaces/ann"),
        ("podman:web", "/tmp/holdfast-workspaces/ann"),
        ("ssh:build@host", "/var/lib/holdfast/workspaces/ann"),
        ("wss://build.example:7000", "/var/lib/holdfast/workspaces/ann"),
    ],
)
def test_a_workspace_is_a_path_of_its_sandbox(sandbox: str, workspace: str) -> None:
    policy = Rulebook(default_rules(HOST)).resolve("ann", CreateRequest(sandbox=sandbox), operator=False)
    assert policy.writable == (workspace,)
    named = load_rules('workspaces = "/srv/agents"', "rules.toml", workspaces=HOST)
    policy = Rulebook(named).resolve("ann", CreateRequest(sandbox=sandbox), operator=False)
    assert policy.writable == ("/srv/agents/ann",)


async def test_a_session_begins_in_the_workspace_of_its_sandbox(store: MemoryStore, clock: FakeClock) -> None:
    fake = FakeExec(terminal_program=by_hand)
    async with running(manager_at("kubernetes:team/web", fake, store, clock)) as manager:
        record = (await manager.create(ANN, CreateRequest())).view.record
    assert record.initial_cwd == "/tmp/holdfast-workspaces/ann"
    assert (await fake.files.stat(record.initial_cwd)).type == "directory"


async def test_a_directory_that_cannot_be_made_is_named(store: MemoryStore, clock: FakeClock) -> None:
    fake = FakeExec(terminal_program=by_hand)

    async def read_only(path: str, **options: Any) -> None:
        raise errors.FileError(f"{path}: Read-only file system", errno=30)

    fake.files.make_dir = read_only  # type: ignore[method-assign]
    async with running(manager_at("kubernetes:team/web", fake, store, clock)) as manager:
        with pytest.raises(
            NotNow, match=r"/tmp/holdfast-workspaces.* Read-only file system; .*\(workspaces"
        ) as refused:
            await manager.create(ANN, CreateRequest())
    assert refused.value.reason == "DIRECTORY_UNAVAILABLE"


@pytest.mark.parametrize(
    "error",
    [errors.SandboxError("there is no place for the server"), errors.FileError("x"), errors.UnknownUser("x")],
    ids=["no place", "file", "user"],
)
def test_a_sandbox_that_cannot_be_used_is_no_bug_of_the_service(error: errors.HoldfastError) -> None:
    problem = problem_of(error, "kubernetes:team/web")
    assert isinstance(problem, NotNow)
    assert (problem.reason, error.message in problem.message) == ("SANDBOX_UNUSABLE", True)


# --- what confines them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "mode"),
    [((), "none"), (("landlock:6", "seccomp"), "landlock"), (("bubblewrap", "seccomp"), "bubblewrap")],
)
async def test_the_sandbox_mode_is_the_one_that_is_enforced(
    store: MemoryStore, clock: FakeClock, features: tuple[str, ...], mode: str
) -> None:
    class Offering(FakeExec):
        async def info(self) -> EnvironmentInfo:
            info = await super().info()
            return EnvironmentInfo(
                info.shell, info.cwd, info.user, info.home, info.hostname, info.os, info.arch, "0", features
            )

    fake = Offering(terminal_program=by_hand)
    async with running(manager_at("kubernetes:team/web", fake, store, clock)) as manager:
        record = (await manager.create(ANN, CreateRequest())).view.record
    assert record.policy.sandbox_mode == mode
    (created,) = store.bodies(record.session_id, "session_created")
    wanted = {} if mode == "bubblewrap" else {"wanted_sandbox_mode": "bubblewrap"}
    assert {name: created[name] for name in created if "mode" in name} == {"sandbox_mode": mode, **wanted}
    assert ("filesystem" in record.enforced) == (mode != "none")


# --- their loss --------------------------------------------------------------------------------------------------


class Losing(FakeExec):
    """A sandbox with calls that fail from some moment on."""

    def __init__(self) -> None:
        super().__init__(terminal_program=by_hand)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read_terminal(self, *arguments: Any, **options: Any) -> Any:
        reading: asyncio.Future[Any] = asyncio.ensure_future(super().read_terminal(*arguments, **options))
        await asyncio.wait([reading, self.lost], return_when=asyncio.FIRST_COMPLETED)
        if self.lost.done():
            reading.cancel()
            self.lost.result()
        return await reading


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.SandboxGone("kubernetes:team/web: there is no such pod"), "sandbox lost"),
        (errors.UnknownTerminal("no terminal has this id"), "session lost"),
    ],
    ids=["pod", "terminal"],
)
async def test_why_a_session_was_lost_is_in_its_close_reason_and_its_event(
    store: MemoryStore, clock: FakeClock, error: errors.HoldfastError, reason: str
) -> None:
    fake, reported = Losing(), list[MetricEvent]()
    async with running(
        make_manager(store, connecting(fake), clock=clock, reported=reported, prompt_seconds=0)
    ) as manager:
        session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
        follower = manager.leases.follower(session_id)
        assert follower is not None
        fake.lost.set_exception(error)
        async with asyncio.timeout(10):
            await follower.over.wait()
    record: SessionRecord = store.records[session_id]
    assert (record.state, record.close_reason) == ("ERROR", f"{reason}: {error.message}")
    event = store.bodies(session_id, "event")[-1]
    assert (event["type"], event["state"]) == ("SESSION_ERROR", "ERROR")
    assert event["detail"].startswith(f"ERROR ({reason}): ")
    assert error.message in event["detail"]
    # A metric has the category alone.
    assert [each.detail for each in reported if each.what == "session_over"] == [reason]


async def test_a_sandbox_made_again_at_the_same_address_is_used(clock: FakeClock) -> None:
    made: list[FakeExec] = []

    async def connect(address: str) -> Any:
        made.append(FakeExec())
        return made[-1]

    pool = SandboxConnections(connect, clock)
    with pytest.raises(errors.SandboxGone):
        async with pool.hold("kubernetes:team/web"):
            raise errors.SandboxGone("another pod has this name now")
    async with pool.use("kubernetes:team/web") as api:
        await api.info()
    await settle()
    assert [each.closed for each in made] == [True, False]
    await pool.aclose()
