"""`RunCommand` in a session: the calls to its sandbox, and the rows of the command and of its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.config import ExecServerConfig
from holdfast.exec_api import ExecApi
from holdfast.runtime.local import LocalExec
from holdfast.service.api import AuditFilter, CreateRequest, RunRequest
from holdfast.service.sessions.following import shell as shell_following
from holdfast.service.sessions.ports import body_of
from holdfast.service.store import Store
from holdfast.service.types import AuditRow
from holdfast.testing import FakeClock, FakeExec, by_hand
from holdfast.testing.clock import settle
from tests.service.fakes import ANN, MemoryStore, connecting, make_manager, running

#: Calls that wait for the session's next event, whatever it is.
_FOLLOWING = ("read_terminal", "read")


class _CountedCalls:
    """A sandbox with the numbers of its calls; `features` replaces those of its server."""

    def __init__(self, api: ExecApi, features: tuple[str, ...] | None = None) -> None:
        self._api = api
        self._features = features
        self.calls: Counter[str] = Counter()
        self.read_ids: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._api, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            if name == "read":
                self.read_ids.add(arguments[0])
            return method(*arguments, **options)

        return counted

    async def info(self) -> Any:
        info = await self._api.info()
        return info if self._features is None else msgspec.structs.replace(info, features=self._features)


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[_CountedCalls]:
    api = LocalExec(ExecServerConfig(spool_directory=str(tmp_path / "spool")))
    yield _CountedCalls(api)
    await api.shutdown(0)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with await Store.open(f"sqlite:///{tmp_path}/service.db") as store:
        yield store


async def rows_of(store: Store, session_id: str, kind: str, count: int) -> list[AuditRow]:
    """The rows of a kind, once there are so many."""
    which = AuditFilter(session_id=session_id, kinds=(kind,))
    async with asyncio.timeout(60), store.listen(session_id) as news:
        while len(rows := (await store.rows(which))[0]) < count:
            await anext(news)
    return rows


@pytest.mark.parametrize(("kind", "call"), [("terminal", "run_in_terminal"), ("shell", "run_in_shell")])
async def test_a_command_is_one_call_to_its_sandbox(
    real: _CountedCalls, store: Store, kind: Any, call: str
) -> None:
    async with running(make_manager(store, connecting(real))) as manager:
        session_id = (await manager.create(ANN, CreateRequest(kind=kind))).view.record.session_id
        await manager.run_command(ANN, RunRequest("cd /tmp", session_id))
        await rows_of(store, session_id, "command_ended", 1)
        before = real.calls.copy()
        results = [await manager.run_command(ANN, RunRequest(f"echo {n}", session_id)) for n in range(5)]
        assert [(result.exit_code, result.cwd) for result in results] == [(0, "/tmp")] * 5
        ended = await rows_of(store, session_id, "command_ended", 6)
        new = {name: count for name, count in (real.calls - before).items() if name not in _FOLLOWING}
        assert new == {call: 5}
    assert [row.command_id for row in ended[1:]] == [result.command_id for result in results]
    assert [body_of(row)["output"].strip() for row in ended[1:]] == [str(n) for n in range(5)]
    written = await rows_of(store, session_id, "command", 6)
    assert all(row.seq < end.seq for row, end in zip(written, ended, strict=True))


async def test_the_end_of_a_shells_command_is_taken_from_its_run(
    real: _CountedCalls, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The output of a command that takes longer is read, and on a busy machine each of these can.
    monkeypatch.setattr(shell_following, "_RUN_SECONDS", 60.0)
    async with running(make_manager(store, connecting(real), audit_excerpt_bytes=4)) as manager:
        session_id = (await manager.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
        # A follower that is starting reads the log, and may find a command there before its run is noted.
        await manager.run_command(ANN, RunRequest("true", session_id))
        await rows_of(store, session_id, "command_ended", 1)
        quiet = await manager.run_command(ANN, RunRequest("(exit 3)", session_id))
        loud = await manager.run_command(ANN, RunRequest("printf 123456 >&2", session_id))
        both = await manager.run_command(ANN, RunRequest("echo a; echo b >&2", session_id))
        ended = [body_of(row) for row in (await rows_of(store, session_id, "command_ended", 4))[1:]]
        # The reply with the output of both streams does not have their order.
        assert real.read_ids & {quiet.command_id, loud.command_id, both.command_id} == {both.command_id}
    figures = [(row["exit_code"], row["output"], row["output_bytes"], row["cut"]) for row in ended]
    assert figures == [(3, "", 0, False), (0, "1234", 6, True), (0, "a\nb\n", 4, False)]
    assert [(row["number"], row["session_bytes"]) for row in ended] == [(2, 0), (3, 6), (4, 10)]


async def test_the_end_of_a_command_whose_caller_left_is_read(real: _CountedCalls, store: Store) -> None:
    async with running(make_manager(store, connecting(real))) as manager:
        session_id = (await manager.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
        call = asyncio.ensure_future(manager.run_command(ANN, RunRequest("echo begun; sleep 1000", session_id)))
        (row,) = await rows_of(store, session_id, "command", 1)
        found = await manager.read_output(ANN, session_id, wait=30)
        assert found.chunks[0].payload == b"begun\n"
        call.cancel()
        await asyncio.wait([call])
        (ended,) = await rows_of(store, session_id, "command_ended", 1)
        assert (ended.command_id, body_of(ended)["exit_code"]) == (row.command_id, 130)
        assert body_of(ended)["output"].startswith("begun\n")


@pytest.mark.parametrize("kind", ["terminal", "shell"])
async def test_after_a_crash_another_replica_writes_the_end_of_a_command(
    real: _CountedCalls, store: Store, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is killed when the row of the command is written, and the command has ended."""
    first = make_manager(store, connecting(real), replica="first")
    await first.start()
    session_id = (await first.create(ANN, CreateRequest(kind=kind))).view.record.session_id
    append = store.append

    async def without_ends(entries: Any, **options: Any) -> Any:
        if any(entry.kind in ("command_started", "command_ended") for entry in entries):
            await asyncio.Event().wait()
        return await append(entries, **options)

    monkeypatch.setattr(store, "append", without_ends)
    ran = await first.run_command(ANN, RunRequest("echo lost", session_id, request_id="once"))
    monkeypatch.undo()
    await store.release("first")
    async with running(make_manager(store, connecting(real), replica="second")) as second:
        (ended,) = await rows_of(store, session_id, "command_ended", 1)
        assert (ended.command_id, body_of(ended)["exit_code"]) == (ran.command_id, 0)
        assert body_of(ended)["output"].strip() == "lost"
        again = await second.run_command(ANN, RunRequest("echo lost", session_id, request_id="once"))
        assert (again.command_id, again.exit_code) == (ran.command_id, 0)
        assert len(await rows_of(store, session_id, "command", 1)) == 1
    await first.stop()


async def test_commands_of_two_replicas_in_one_shell_have_their_ends_in_order(
    real: _CountedCalls, store: Store
) -> None:
    first = make_manager(store, connecting(real), replica="first")
    second = make_manager(store, connecting(real), replica="second")
    async with running(first), running(second):
        session_id = (await first.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
        ran = []
        for number in range(6):
            manager = (first, second)[number % 2]
            ran.append(await manager.run_command(ANN, RunRequest(f"echo {number}", session_id)))
        ended = await rows_of(store, session_id, "command_ended", 6)
    assert [row.command_id for row in ended] == [result.command_id for result in ran]
    assert [body_of(row)["output"] for row in ended] == [f"{number}\n" for number in range(6)]


# --- terminals by hand --------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.mark.parametrize("names_runs", [True, False])
async def test_a_command_has_its_id_although_earlier_input_went_to_a_program(
    clock: FakeClock, names_runs: bool
) -> None:
    """A server that does not name runs is queried for the position of the command."""
    memory, fake = MemoryStore(clock), FakeExec(terminal_program=by_hand)
    api = _CountedCalls(fake, None if names_runs else ())
    async with running(make_manager(memory, connecting(api), clock=clock, prompt_seconds=0)) as manager:
        session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
        stub = fake.terminal(session_id)
        stub.shows_prompt("$ ")
        await settle()
        await manager.send_input(ANN, session_id, b"python\n")
        stub.starts_command("python")
        await manager.send_input(ANN, session_id, b"1\n")
        stub.shows_prompt("$ ", exit_code=0)
        before = api.calls["describe_terminal"]
        run = asyncio.ensure_future(manager.run_command(ANN, RunRequest("make", session_id)))
        await settle()
        stub.starts_command("make")
        stub.shows_prompt("$ ", exit_code=0)
        ran = await run
        await settle()
        assert api.calls["describe_terminal"] - before == (0 if names_runs else 1)
    started = [row for row in memory.log if row.kind == "command_started"]
    assert started[-1].command_id == ran.command_id


async def test_the_row_is_on_disk_before_the_command_reaches_the_sandbox(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, fake = MemoryStore(clock), FakeExec(terminal_program=by_hand)
    api = _CountedCalls(fake)
    async with running(make_manager(memory, connecting(api), clock=clock, prompt_seconds=0)) as manager:
        session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
        fake.terminal(session_id).shows_prompt("$ ")
        await settle()
        flushed, append = asyncio.Event(), memory.append

        async def slow(entries: Any, **options: Any) -> Any:
            await flushed.wait()
            return await append(entries, **options)

        monkeypatch.setattr(memory, "append", slow)
        run = asyncio.ensure_future(manager.run_command(ANN, RunRequest("make", session_id)))
        await settle()
        assert api.calls["run_in_terminal"] == 0
        flushed.set()
        await settle()
        assert api.calls["run_in_terminal"] == 1
        assert memory.kinds(session_id)[-1] == "command"
        run.cancel()
        await asyncio.wait([run])
