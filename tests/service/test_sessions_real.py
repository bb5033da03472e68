"""Sessions with real shells, in this process and over a server's socket: the seed's integration tests, by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.opening import open_exec
from holdfast.config import ExecServerConfig
from holdfast.exec_api import ExecApi
from holdfast.runtime.local import LocalExec
from holdfast.service.api import AuditFilter, Control, CreateRequest, PolicyRequest, PromptInfo, RunRequest
from holdfast.service.problems import NotNow
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.store import Store
from holdfast.testing.sandbox_suite import TIMEOUTS
from tests.service.fakes import ANN, connecting, make_manager, read_until, row_written, running
from tests.support.servers import RunningServer, is_alive, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture(params=["inprocess", "unix"])
async def location(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """A way to real shells: in this process, or through a server's socket as with the address `local`."""
    if request.param == "inprocess":
        api = LocalExec(ExecServerConfig(spool_directory=str(tmp_path / "spool")))
        yield connecting(api)
        await api.shutdown(0)
    else:
        address = request.getfixturevalue("server").address("unix")

        async def connect(_: str) -> ExecApi:
            return await open_exec(address)

        yield connect


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(f"sqlite:///{tmp_path}/service.db")
    yield store
    await store.close()


@pytest.fixture
async def manager(location: Any, store: Store) -> AsyncIterator[SessionManager]:
    async with running(make_manager(store, location)) as manager:
        yield manager


async def test_happy_path(manager: SessionManager, store: Store) -> None:
    created = await manager.create(ANN, CreateRequest())
    session_id = created.view.record.session_id
    assert created.view.state == "IDLE"
    assert created.view.prompt.rstrip().endswith(("$", "#"))

    taken = await manager.send_input(ANN, session_id, b"cd /tmp; echo $((6*7))\n")
    assert taken.accepted
    printed, token, chunks = await read_until(
        manager, session_id, lambda _, chunk: chunk.prompt is not None, created.token
    )
    assert b"\r42\r\n" in printed
    assert [chunk.exit_code for chunk in chunks if chunk.exit_code is not None] == [0]
    assert (await manager.get(ANN, session_id)).cwd == "/tmp"
    nothing = await manager.read_output(ANN, session_id, since=token)
    assert (nothing.chunks, nothing.token, nothing.state) == ((), token, "IDLE")

    await row_written(store, session_id, "command_ended")
    closed = await manager.close(ANN, session_id)
    assert closed.state == "CLOSED"
    assert "1 command" in closed.summary
    rows, _ = await store.rows(AuditFilter(session_id=session_id))
    kinds = [row.kind for row in rows]
    assert kinds == [
        "session_created", "event", "input", "command_started", "command_ended", "close", "session_closed", "event"
    ]  # fmt: skip
    ids = {row.command_id for row in rows if row.kind in ("input", "command_started", "command_ended")}
    assert ids == {taken.command_id}
    with pytest.raises(NotNow, match="CLOSED"):
        await manager.send_input(ANN, session_id, b"true\n")
    assert (await store.verify()).holds


async def test_interactive_prompt_python_toggles(manager: SessionManager) -> None:
    created = await manager.create(ANN, CreateRequest())
    session_id = created.view.record.session_id
    await manager.send_input(ANN, session_id, b"python3 -i -q\n")
    _, token, chunks = await read_until(manager, session_id, lambda _, chunk: _asks(chunk, ">>> "), created.token)
    assert chunks[-1].state == "BUSY"
    taken = await manager.send_input(ANN, session_id, b"print(6 * 7)\n")
    assert taken.state == "BUSY"
    printed, token, _ = await read_until(manager, session_id, lambda _, chunk: _asks(chunk, ">>> "), token)
    assert b"42" in printed
    await manager.send_input(ANN, session_id, b"exit()\n")
    _, _, chunks = await read_until(manager, session_id, lambda _, chunk: chunk.state == "IDLE", token)
    assert [chunk.exit_code for chunk in chunks if chunk.exit_code is not None] == [0]
    assert (await manager.get(ANN, session_id)).state == "IDLE"


def _asks(chunk: Any, text: str) -> bool:
    return chunk.prompt is not None and chunk.prompt.awaiting_input and chunk.prompt.text.endswith(text)


async def test_a_password_prompt_is_told_and_its_input_not_written_down(
    manager: SessionManager, store: Store
) -> None:
    created = await manager.create(ANN, CreateRequest())
    session_id = created.view.record.session_id
    await manager.send_input(ANN, session_id, b"read -rsp 'Password: ' word; echo got ${#word}\n")
    _, token, chunks = await read_until(
        manager, session_id, lambda _, chunk: _asks(chunk, "Password: "), created.token
    )
    assert chunks[-1].prompt.password
    await manager.send_input(ANN, session_id, b"correct horse\n")
    await read_until(manager, session_id, lambda printed, _: b"got 13" in printed, token)
    rows, _ = await store.rows()
    assert not any("correct horse" in row.body for row in rows)
    assert any('"hidden":true' in row.body for row in rows if row.kind == "input")


class _ReadingExec(LocalExec):
    """Counts the reads with `until`. A server that predates the parameter ignores it."""

    def __init__(self, config: ExecServerConfig, *, predates_until: bool) -> None:
        super().__init__(config)
        self.reads, self._predates_until = 0, predates_until

    async def read_terminal(self, *arguments: Any, **options: Any) -> Any:
        self.reads += options.get("until") is not None
        if self._predates_until:
            options.pop("until", None)
        return await super().read_terminal(*arguments, **options)


@pytest.mark.parametrize("predates_until", [False, True])
async def test_the_prompt_of_a_program_needs_one_call_for_each_read(
    store: Store, tmp_path: Path, predates_until: bool
) -> None:
    api = _ReadingExec(ExecServerConfig(spool_directory=str(tmp_path / "spool")), predates_until=predates_until)
    async with running(make_manager(store, connecting(api))) as manager:
        created = await manager.create(ANN, CreateRequest())
        session_id, token, reads = created.view.record.session_id, created.token, 0
        await manager.send_input(ANN, session_id, b"read -rp 'Name: ' name\n")
        async with asyncio.timeout(60):
            while True:
                found = await manager.read_output(ANN, session_id, since=token, wait=0.2 if predates_until else 30)
                reads, token = reads + 1, found.token
                if prompts := [chunk.prompt for chunk in found.chunks if chunk.prompt]:
                    break
        assert api.reads == reads
        assert prompts == [PromptInfo("" if predates_until else "Name: ", awaiting_input=True)]
        # The prompt is reported once at a position.
        again = await manager.read_output(ANN, session_id, since=token)
        assert (again.chunks, again.token, again.state) == ((), token, "BUSY")
    await api.shutdown(0)


async def test_long_running_process_is_stopped_by_a_control_action(manager: SessionManager) -> None:
    created = await manager.create(ANN, CreateRequest())
    session_id = created.view.record.session_id
    # Printed by the program itself: until it runs, a Ctrl-C may find the shell between fork and exec, and be lost.
    await manager.send_input(ANN, session_id, b"sh -c 'echo begun; exec sleep 1000'\n")
    _, token, _ = await read_until(
        manager, session_id, lambda printed, _: b"begun\r\n" in printed.partition(b"\n")[2], created.token
    )
    assert (await manager.read_output(ANN, session_id, since=token)).state == "BUSY"
    await manager.send_input(ANN, session_id, b"", [Control("CTRL_C")])
    _, _, chunks = await read_until(manager, session_id, lambda _, chunk: chunk.state == "IDLE", token)
    assert [chunk.exit_code for chunk in chunks if chunk.exit_code is not None] == [130]


@pytest.mark.parametrize("kept", [False, True])
async def test_background_process_cleanup_follows_the_policy(
    location: Any, store: Store, kept: bool, tmp_path: Path
) -> None:
    rules = "[profiles.default.background]\noutlive = true\n"
    async with running(make_manager(store, location, text=rules)) as manager:
        created = await manager.create(ANN, CreateRequest(policy=PolicyRequest(allow_background=kept)))
        session_id = created.view.record.session_id
        ran = await manager.run_command(ANN, RunRequest("sleep 100 & echo pid $!", session_id))
        pid = int(ran.stdout.split(b"pid ")[1].split()[0])
        closed = await manager.close(ANN, session_id)
        assert closed.state == "CLOSED"
        assert is_alive(pid) == kept
        if kept:
            other = await manager.create(ANN, CreateRequest(kind="shell"))
            await manager.run_command(ANN, RunRequest(f"kill -9 {pid}", other.view.record.session_id))


async def test_failure_handling_a_shell_crash_is_an_error_with_audit_rows(
    manager: SessionManager, store: Store
) -> None:
    created = await manager.create(ANN, CreateRequest())
    session_id = created.view.record.session_id
    follower = manager.leases.follower(session_id)
    assert follower is not None
    await manager.send_input(ANN, session_id, b"kill -9 $$\n")
    async with asyncio.timeout(60):
        await follower.over.wait()
    closed = await manager.close(ANN, session_id)
    assert closed.state == "ERROR"
    assert "killed by" in closed.summary
    view = await manager.get(ANN, session_id)
    assert (view.state, view.record.close_reason) == ("ERROR", "crashed")
    rows, _ = await store.rows(AuditFilter(session_id=session_id))
    kinds = [row.kind for row in rows]
    assert kinds[-3:] == ["error", "session_closed", "event"]
    assert '"type":"SESSION_ERROR"' in rows[-1].body
    assert [event async for event in manager.events(ANN, session_id)] == []  # over: nothing comes any more


async def test_reconnect_flow_a_restarted_service_finds_its_sessions_and_goes_on(
    location: Any, store: Store
) -> None:
    first = make_manager(store, location, replica="one")
    await first.start()
    created = await first.create(ANN, CreateRequest(labels={"job": "7"}))
    session_id = created.view.record.session_id
    shell = (await first.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
    await first.send_input(ANN, session_id, b"x=kept; echo one\n")
    _, token, _ = await read_until(first, session_id, lambda _, chunk: chunk.exit_code is not None, created.token)
    await first.run_command(ANN, RunRequest("y=kept", shell))
    # Started before the service goes away, ended while it is away.
    await first.send_input(ANN, session_id, b"sleep 0.3; (exit 7)\n")
    await first.stop()

    async with running(make_manager(store, location, replica="two")) as second:
        view = await second.get(ANN, session_id)
        assert (view.record.labels, view.state in ("BUSY", "IDLE")) == ({"job": "7"}, True)
        _, token, chunks = await read_until(second, session_id, lambda _, chunk: chunk.exit_code is not None, token)
        assert [chunk.exit_code for chunk in chunks if chunk.exit_code is not None] == [7]
        assert (await second.run_command(ANN, RunRequest("echo $x", session_id))).stdout == b"kept\r\n"
        assert (await second.run_command(ANN, RunRequest("echo $y", shell))).stdout == b"kept\n"
        assert "3 commands" in (await second.close(ANN, session_id)).summary
        assert "2 commands" in (await second.close(ANN, shell)).summary
    rows, _ = await store.rows()
    ended = [row for row in rows if row.session_id == session_id and row.kind == "command_ended"]
    assert len(ended) == len({row.command_id for row in ended}) == 3
    assert (await store.verify()).holds


async def test_a_session_whose_terminal_is_gone_after_a_restart_is_an_error(tmp_path: Path, store: Store) -> None:
    old = LocalExec(ExecServerConfig(spool_directory=str(tmp_path / "old")))
    first = make_manager(store, connecting(old))
    await first.start()
    session_id = (await first.create(ANN, CreateRequest())).view.record.session_id
    await first.stop()
    await old.shutdown(0)
    new = LocalExec(ExecServerConfig(spool_directory=str(tmp_path / "new")))
    async with running(make_manager(store, connecting(new))) as second:
        follower = second.leases.follower(session_id)
        if follower is not None:
            async with asyncio.timeout(60):
                await follower.over.wait()
        view = await second.get(ANN, session_id)
        assert (view.state, "no longer in its sandbox" in view.record.summary) == ("ERROR", True)
    await new.shutdown(0)


async def test_a_shell_session_has_its_streams_apart_and_is_read_by_token(manager: SessionManager) -> None:
    created = await manager.create(ANN, CreateRequest(kind="shell"))
    session_id = created.view.record.session_id
    first = await manager.send_input(ANN, session_id, b"echo out; echo err >&2; (exit 3)\n")
    second = await manager.send_input(ANN, session_id, b"cd /tmp && pwd")
    _, token, chunks = await read_until(
        manager, session_id, lambda _, chunk: chunk.command_id == second.command_id and chunk.exit_code == 0
    )
    reported = [(chunk.command_id, chunk.stream, chunk.payload, chunk.exit_code) for chunk in chunks]
    assert sorted(reported[:2]) == [
        (first.command_id, "stderr", b"err\n", None),
        (first.command_id, "stdout", b"out\n", None),
    ]
    assert reported[2:] == [
        (first.command_id, "", b"", 3),
        (second.command_id, "stdout", b"/tmp\n", None),
        (second.command_id, "", b"", 0),
    ]
    assert [chunk.token for chunk in chunks] == sorted(chunk.token for chunk in chunks)
    again = await manager.read_output(ANN, session_id, since=chunks[2].token)
    assert [chunk.payload for chunk in again.chunks] == [b"/tmp\n", b""]
    assert (await manager.get(ANN, session_id)).cwd == "/tmp"
    bit = await manager.read_output(ANN, session_id, since=chunks[2].token, max_bytes=2)
    assert ([chunk.payload for chunk in bit.chunks], bit.more) == ([b"/t"], True)
    rest = await manager.read_output(ANN, session_id, since=bit.token, max_bytes=100)
    assert (rest.chunks[0].payload, rest.token) == (b"mp\n", token)


async def test_commands_that_a_shell_no_longer_keeps_are_a_gap_of_their_exact_size(manager: SessionManager) -> None:
    created = await manager.create(ANN, CreateRequest(kind="shell"))
    session_id = created.view.record.session_id
    for number in range(8):
        await manager.run_command(ANN, RunRequest(f"printf '%0{10 + number}d' 0", session_id))
    _, _, chunks = await read_until(
        manager, session_id, lambda printed, chunk: chunk.token and printed.endswith(b"0" * 17)
    )
    lost = [chunk for chunk in chunks if chunk.truncated]
    assert lost
    assert sum(chunk.skipped_bytes for chunk in lost) + sum(len(chunk.payload) for chunk in chunks) == sum(
        range(10, 18)
    )


async def test_a_command_in_a_session_made_for_it(manager: SessionManager) -> None:
    ran = await manager.run_command(ANN, RunRequest("echo out; echo err >&2; exit 4", create=None))
    assert (ran.stdout, ran.stderr, ran.exit_code) == (b"out\n", b"err\n", 4)
    views, _ = await manager.find(ANN)
    assert [view.state for view in views] == ["CLOSED"]


async def test_a_command_that_takes_too_long_is_stopped_and_the_session_stays(manager: SessionManager) -> None:
    for kind in ("terminal", "shell"):
        created = await manager.create(ANN, CreateRequest(kind=kind))
        session_id = created.view.record.session_id
        for timeout in TIMEOUTS:
            ran = await manager.run_command(ANN, RunRequest("echo begun; sleep 1000", session_id, timeout=timeout))
            if ran.stdout.startswith(b"begun"):
                break
        assert (ran.timed_out, ran.exit_code, ran.stdout[:5]) == (True, 124, b"begun")
        assert (await manager.run_command(ANN, RunRequest("echo on", session_id))).stdout.strip() == b"on"


async def test_a_session_in_a_directory_that_is_not_there_is_refused_and_leaves_nothing(
    manager: SessionManager, store: Store
) -> None:
    from holdfast.service.problems import Invalid

    with pytest.raises(Invalid, match="nowhere") as refused:
        await manager.create(ANN, CreateRequest(initial_cwd="/nowhere/at/all"))
    assert refused.value.reason == "CWD_NOT_FOUND"
    views, _ = await manager.find(ANN)
    assert [(view.state, view.record.close_reason) for view in views] == [("ERROR", "creation failed")]
    rows, _ = await store.rows()
    assert [row.kind for row in rows if row.session_id] == ["session_created", "error", "event"]
