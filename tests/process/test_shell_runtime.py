"""Shells in this process: other users, profiles, bounds, ids, what a command may destroy, and the end of it all."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from holdfast import Sandbox
from holdfast.client.dial import open_connection
from holdfast.client.remote import RemoteExec
from holdfast.client.shell import Shell
from holdfast.errors import (
    DuplicateProcess,
    HoldfastError,
    PermissionRefused,
    ShellClosed,
    ShuttingDown,
    UnknownProcess,
    UnknownShell,
    UnknownUser,
)
from holdfast.runtime.local import LocalExec
from holdfast.runtime.shell.foreground import has_blocking_pipes
from holdfast.runtime.shell.program import ShellProgram
from holdfast.types import KEPT_SHELL_COMMANDS, CommandEnded, CommandSpec, ShellSpec
from tests.contract.shell_ways import Running, until_queued
from tests.process.test_shell_restart import run_deaf
from tests.support.servers import is_alive, running_server

MakeExec = Callable[..., LocalExec]
SAFETY_NET = 60
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to run as another user takes root")


@pytest.fixture
async def api(make_exec: MakeExec) -> LocalExec:
    return make_exec(interrupt_grace_seconds=0.05)


@pytest.fixture
async def sandbox(api: LocalExec) -> Sandbox:
    return Sandbox(api)


@pytest.fixture
async def sh(sandbox: Sandbox) -> Shell:
    return await sandbox.shell("bash", id="sh")


async def ended(api: LocalExec, spec: CommandSpec) -> CommandEnded:
    async with asyncio.timeout(SAFETY_NET):
        events = [event async for event in api.run_in_shell("sh", spec)]
    assert isinstance(events[-1], CommandEnded)
    return events[-1]


def exists(path: str) -> bool:
    return Path(path).exists()


def private(api: LocalExec, number: int = 1) -> str:
    """The directory of the shell that was opened as this one, as a command could find it out."""
    return f"{api._spool.path}/s{number}"


# --- another user -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["chosen", "configured"])
async def public(request: pytest.FixtureRequest, make_exec: MakeExec) -> AsyncIterator[LocalExec]:
    """Output kept where another user can get to."""
    if request.param == "chosen":
        yield make_exec(spool_directory="", interrupt_grace_seconds=0.05)
        return
    location = tempfile.mkdtemp(prefix="hf-", dir="/tmp")
    os.chmod(location, 0o711)
    try:
        api = make_exec(spool_directory=f"{location}/a/spool", interrupt_grace_seconds=0.05)
        yield api
        await api.shutdown(0)
    finally:
        shutil.rmtree(location)


@needs_root
async def test_a_shell_of_another_user_is_theirs_alone(public: LocalExec) -> None:
    sh = await Sandbox(public).shell("bash", user="nobody", cwd="/")
    nobody = pwd.getpwnam("nobody")
    result = await sh.run("id -un; id -u; cat; (id -un >&2); word=kept", input="input\n")
    assert (result.stdout, result.stderr) == (f"nobody\n{nobody.pw_uid}\ninput\n", "nobody\n")
    assert (await sh.run("echo $word; id -un", env={"A": "1"}, cwd="/tmp")).stdout == "kept\nnobody\n"
    here = private(public)
    for directory, _, names in os.walk(here):
        assert (os.stat(directory).st_uid, os.stat(directory).st_mode & 0o777) == (os.geteuid(), 0o711)
        found = [os.stat(f"{directory}/{name}") for name in names]
        assert {(each.st_uid, each.st_mode & 0o777) for each in found} == {(nobody.pw_uid, 0o600)}
    # It may pass through to its own files, see no other session's, and put nothing beside them.
    for refused in (f"ls {public._spool.path}", f"touch {here}/x", f"touch {here}/pipes/x", f"rm {here}/pipes/o0"):
        assert (await sh.run(refused)).exit_code != 0, refused
    assert (await sh.describe()).user == "nobody"
    restarted = await sh.run("set -e; false")
    assert (restarted.restored, (await sh.run("set +e; id -un; echo $word")).stdout) == ("state", "nobody\nkept\n")
    process = await sh.start("id -un; echo $word")
    assert (await process.wait()).success
    assert (await process.snapshot()).stdout == b"nobody\nkept\n"
    running = Running(sh, "echo ready; id -un; cat", stdin="open")
    await running.until(b"ready\n")
    await sh.write("written")
    await sh.close_stdin()
    assert (await running.task).stdout == "ready\nnobody\nwritten"
    process = await sh.start("id -un; echo $word; cat", stdin="open")
    assert await process.communicate("written") == (b"nobody\nkept\nwritten", b"")
    await sh.close()
    assert not exists(here)


@needs_root
async def test_a_user_who_is_not_let_through_to_the_files_is_told_where(
    make_exec: MakeExec, tmp_path: Path
) -> None:
    os.chmod(tmp_path, 0o700)
    api = make_exec()
    with pytest.raises(PermissionRefused, match=str(tmp_path)):
        await Sandbox(api).shell("bash", user="nobody", cwd="/")
    assert await api.list_shells() == ()
    assert [name for name in os.listdir(api._spool.path) if name.startswith("s")] == []


async def test_a_user_who_is_not_there(sandbox: Sandbox) -> None:
    with pytest.raises(UnknownUser, match="no-such-user"):
        await sandbox.shell(user="no-such-user")


# --- a login shell ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shell", "profile"), [("bash", ".bash_profile"), ("dash", ".profile")])
async def test_a_login_shell_reads_the_profile_and_what_that_prints_is_the_shells(
    sandbox: Sandbox, tmp_path: Path, shell: str, profile: str
) -> None:
    text = "echo welcome; export FROM_PROFILE=yes; times=$((times + 1)); f() { echo function; }; cd /usr\n"
    (tmp_path / profile).write_text(text)
    env = {"HOME": str(tmp_path)}
    plain = await sandbox.shell(shell, env=env)
    assert (await plain.run("echo ${FROM_PROFILE-unset}")).stdout == "unset\n"
    sh = await sandbox.shell(shell, env=env, login=True)
    assert (sh.cwd, (await sh.describe()).login) == ("/usr", True)
    assert (await sh.run("echo $FROM_PROFILE $times; f")).stdout == "yes 1\nfunction\n"
    assert (await sh.snapshot()).stdout == b"welcome\n"
    # A new program has the exports of the old one, and does not read the profile again.
    assert (await run_deaf(sh)).restored == "exports"
    assert (await sh.run("echo $FROM_PROFILE ${times-unset}")).stdout == "yes unset\n"
    assert (await sh.snapshot()).stdout == b"welcome\n"


async def test_a_profile_that_exits_is_no_shell(sandbox: Sandbox, api: LocalExec, tmp_path: Path) -> None:
    (tmp_path / ".bash_profile").write_text("exit 3\n")
    with pytest.raises(HoldfastError, match="exit code 3"):
        await sandbox.shell("bash", env={"HOME": str(tmp_path)}, login=True)
    assert (await api.list_shells(), exists(private(api))) == ((), False)


# --- what a command may destroy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "dash"])
async def test_a_command_may_remove_our_directory(sandbox: Sandbox, api: LocalExec, shell: str) -> None:
    sh = await sandbox.shell(shell)
    here = private(api)
    remove = f"rm -rf {here}"
    await sh.run("word=kept")
    assert (await sh.run(f"echo before; {remove}; echo after")).stdout == "before\nafter\n"
    assert (await sh.run("echo $word; echo err >&2; (exit 3)")).exit_code == 3
    for options in ({"input": "in"}, {"cwd": "/usr"}, {"env": {"A": "a"}}, {"timeout": 1000.0}):
        assert (await sh.run(remove)).exit_code == 0
        result = await sh.run('echo "$?$word$A"; pwd; cat; seq 3 | tail -1; ls /nowhere', **options)
        a, where = ("a" if "env" in options else ""), options.get("cwd", sh.cwd)
        assert result.stdout == f"0kept{a}\n{where}\n{options.get('input', '')}3\n"
        assert "nowhere" in result.stderr
    job = await sh.run(f"sleep 1000 & echo $!; {remove}")
    assert (await sh.run("while :; do :; done", timeout=0.05)).timed_out
    assert (await sh.run("echo $word")).stdout == "kept\n"
    process = await sh.start("echo $word")
    assert (await process.wait()).success
    await sh.run(remove)
    await sh.close(grace=0)
    assert not is_alive(int(job.stdout))
    assert not exists(here)


async def test_state_is_saved_where_the_directory_was_removed(sh: Shell, api: LocalExec) -> None:
    await sh.run(f"word=kept; rm -rf {private(api)}")
    assert (await sh.run("set -e; false")).restored == "state"
    assert (await sh.run("echo $word")).stdout == "kept\n"


# --- ids ----------------------------------------------------------------------------------------------------------


async def test_only_the_last_few_results_are_kept_and_no_command_runs_twice(
    api: LocalExec, sh: Shell, tmp_path: Path
) -> None:
    specs = [
        CommandSpec(f"c{n}", f"echo {n} | tee -a {tmp_path}/log; (exit {n})")
        for n in range(KEPT_SHELL_COMMANDS + 5)
    ]
    first = [await ended(api, spec) for spec in specs]
    assert [end.exit_code for end in first] == list(range(len(specs)))
    for spec, end in zip(specs[-KEPT_SHELL_COMMANDS:], first[-KEPT_SHELL_COMMANDS:], strict=True):
        assert await ended(api, spec) == end
        assert (await api.snapshot(spec.command_id)).stdout == f"{end.exit_code}\n".encode()
    for spec in specs[:-KEPT_SHELL_COMMANDS]:
        with pytest.raises(UnknownProcess, match=spec.command_id):
            await ended(api, spec)
        with pytest.raises(UnknownProcess, match=spec.command_id):
            await api.snapshot(spec.command_id)
    assert (tmp_path / "log").read_text().split() == [str(number) for number in range(len(specs))]
    other = await Sandbox(api).shell("bash", id="other")
    with pytest.raises(DuplicateProcess, match=specs[-1].command_id):
        api.run_in_shell(other.id, specs[-1])


async def test_an_interrupt_that_is_repeated_means_the_same_command(api: LocalExec, sh: Shell) -> None:
    assert not await api.interrupt_shell("sh", interrupt_id="idle")
    first = Running(sh, "echo on; while :; do :; done")
    await first.until(b"on\n")
    assert not await api.interrupt_shell("sh", interrupt_id="idle")
    assert await api.interrupt_shell("sh", interrupt_id="once")
    assert (await first.task).exit_code == 130
    second = Running(sh, "echo on; while :; do :; done")
    await second.until(b"on\n")
    assert await api.interrupt_shell("sh", interrupt_id="once")
    assert (await sh.describe()).command == "echo on; while :; do :; done"
    assert await api.interrupt_shell("sh", interrupt_id="again")
    assert (await second.task).exit_code == 130


async def test_the_id_of_a_closed_shell_can_be_used_again(api: LocalExec, sandbox: Sandbox) -> None:
    first = await api.open_shell(ShellSpec("sh", start_id="attempt"))
    with pytest.raises(DuplicateProcess, match="'sh'"):
        await sandbox.shell(id="sh")
    await ended(api, CommandSpec("c", "word=old; exit 3"))
    # The attempt that made it may still be repeated: its answer was lost, perhaps.
    again = await api.open_shell(ShellSpec("sh", start_id="attempt"))
    assert (again.pid, again.state, again.reason) == (first.pid, "closed", "exited with code 3")
    sh = await sandbox.shell(id="sh")
    assert (await sh.run("echo ${word-unset}")).stdout == "unset\n"
    assert (sh.pid != first.pid, len(await api.list_shells())) == (True, 1)
    with pytest.raises(UnknownProcess, match="'c'"):
        await api.snapshot("c")
    assert (await ended(api, CommandSpec("c", "exit 4"))).exit_code == 4


async def test_attempts_to_open_one_shell_at_once_open_one(api: LocalExec) -> None:
    spec = ShellSpec("sh", start_id="attempt")
    statuses = await asyncio.gather(*(api.open_shell(spec) for _ in range(5)))
    assert len({status.pid for status in statuses}) == 1
    assert len(await api.list_shells()) == 1


# --- the end of it all --------------------------------------------------------------------------------------------


async def test_shells_are_closed_at_shutdown_and_nothing_is_left(api: LocalExec, sandbox: Sandbox) -> None:
    idle, busy, closed = [await sandbox.shell(name) for name in ("bash", "dash", "bash")]
    pids = [int((await idle.run("(setsid sleep 1000 & echo $!)")).stdout)]
    await closed.run("exit 3")
    running = Running(busy, "sh -c 'trap \"\" TERM; echo $$; while :; do sleep 1000; done'; echo after")
    pids.append(int(await running.until(b"\n")))
    waiting = asyncio.create_task(busy.run("echo waited"))
    await until_queued(busy, 1)
    spool = api._spool.path
    await api.shutdown(0.05)
    assert (await running.task).state == "closed"
    with pytest.raises(ShellClosed):
        await waiting
    assert [pid for pid in (*pids, idle.pid, busy.pid, closed.pid) if is_alive(pid)] == []
    assert not exists(spool)
    with pytest.raises((ShuttingDown, UnknownShell)):
        await idle.run("true")


async def test_no_shell_is_opened_after_shutdown(api: LocalExec, sandbox: Sandbox) -> None:
    await api.shutdown(0)
    with pytest.raises(ShuttingDown):
        await sandbox.shell()
    assert not exists(api._spool.path)


async def test_a_shell_ends_with_its_connection_if_asked_to_and_no_other() -> None:
    with running_server(["unix"], settings={"detached_session_seconds": 0}) as server:
        first = Sandbox(RemoteExec(await open_connection(server.address("unix"))))
        pids = {}
        for lifetime in ("server", "connection"):
            sh = await first.shell(id=lifetime, lifetime=lifetime)
            pids[lifetime] = int((await sh.run("setsid sleep 1000 & echo $!")).stdout)
        await first.aclose()
        second = Sandbox(RemoteExec(await open_connection(server.address("unix"))))
        async with asyncio.timeout(SAFETY_NET):
            bound = await second.open_shell("connection")
            # Ends when the shell has.
            assert [event async for event in bound.output()] == []
        assert (await bound.describe()).state == "closed"
        await bound.close(grace=0)
        assert {lifetime: is_alive(pid) for lifetime, pid in pids.items()} == {"server": True, "connection": False}
        assert (await (await second.open_shell("server")).run("echo here")).stdout == "here\n"
        await second.aclose()


async def test_a_program_that_makes_its_stdout_non_blocking_does_not_fail_the_next_one(
    sh: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node.js leaves a pipe non-blocking. A shell that is alone in its cgroup would keep the pipe."""
    monkeypatch.setattr(ShellProgram, "_is_alone", lambda _: True)
    for number in (1, 2):
        assert (await sh.run(f"python3 -c 'import os; os.set_blocking({number}, False)'")).success
        result = await sh.run(f"head -c 2000000 /dev/zero >&{number}")
        assert (result.exit_code, len(result.stdout_bytes) + len(result.stderr_bytes)) == (0, 2_000_000)


def test_flags_of_output_count_only_on_the_pipes_of_the_shell() -> None:
    """While a shell answers, its stdout is its control socket, whose flags are not those of the pipe."""
    pipes = [os.pipe(), os.pipe()]
    inodes = [os.fstat(reader).st_ino for reader, _ in pipes]
    writers = [writer for _, writer in pipes]
    process = subprocess.Popen(["sleep", "60"], stdout=writers[0], stderr=writers[1])
    try:
        assert has_blocking_pipes(process.pid, inodes)
        assert not has_blocking_pipes(process.pid, inodes[::-1])
        for writer in writers:
            os.set_blocking(writer, False)
            assert not has_blocking_pipes(process.pid, inodes)
            os.set_blocking(writer, True)
        assert has_blocking_pipes(process.pid, inodes)
    finally:
        process.kill()
        process.wait()
        for fd in (*pipes[0], *pipes[1]):
            os.close(fd)
    assert not has_blocking_pipes(process.pid, inodes)
