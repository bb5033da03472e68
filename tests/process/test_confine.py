"""Confined processes, shells and terminals behave like others: exits, signals, prompts, timeouts, ends, recovery.

Their limits are in tests/service/test_escapes.py.
"""

from __future__ import annotations

import asyncio
import errno
import glob
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

import holdfast
from holdfast.client.sandbox import Sandbox
from holdfast.errors import CommandNotFound, CwdNotFound, InvalidParams, PermissionRefused
from holdfast.runtime.confine.features import detect_features
from holdfast.runtime.confine.launch_plan import binds_descriptors, find_bwrap, plan_launch
from holdfast.runtime.confine.resource_groups import hierarchies
from holdfast.types import Confinement, ConfinementMode
from tests.support.keys import SEARCH, session_key
from tests.support.servers import RunningServer, is_alive, running_server
from tests.support.signalling import send_signal

#: Distinguishes the children of these tests from those of another run on this machine.
RUN = os.getpid()
OFFERED = {feature.word.partition(":")[0]: feature.missing for feature in detect_features()}
MODES = [
    pytest.param(mode, marks=pytest.mark.skipif(bool(OFFERED[mode]), reason=f"no {mode} here: {OFFERED[mode]}"))
    for mode in get_args(ConfinementMode)
    if mode != "none"
]
needs_cgroups = pytest.mark.skipif(bool(OFFERED["cgroup.pids"]), reason=f"no pids: {OFFERED['cgroup.pids']}")
needs_bubblewrap = pytest.mark.skipif(bool(OFFERED["bubblewrap"]), reason=f"no jail: {OFFERED['bubblewrap']}")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture
async def box(server: RunningServer) -> AsyncIterator[Sandbox]:
    async with holdfast.connect(server.address("unix")) as box:
        yield box


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    return work


@pytest.fixture(params=MODES)
def confinement(request: pytest.FixtureRequest, work: Path) -> Confinement:
    return Confinement(mode=request.param, writable=(str(work),), network="none")


async def exit_of(box: Sandbox, script: str, confinement: Confinement) -> holdfast.ExitStatus:
    process = await box.start(["sh", "-c", script], cwd=confinement.writable[0], confinement=confinement)
    return await process.wait(30)


# --- processes -------------------------------------------------------------------------------------------------


async def test_exit_codes_and_signals_are_the_programs_own(box: Sandbox, confinement: Confinement) -> None:
    assert await exit_of(box, "exit 7", confinement) == holdfast.ExitStatus(7)
    assert await exit_of(box, "exit 137", confinement) == holdfast.ExitStatus(137)
    assert (await exit_of(box, "kill -KILL $$", confinement)).exit_code == 137


async def test_a_program_that_a_signal_ended_is_told_from_one_that_exited(
    box: Sandbox, work: Path, confinement: Confinement
) -> None:
    # It goes on once it was seen: one that ends before leaves no trace.
    script = "while [ ! -e seen ]; do sleep 0.01; done; kill -KILL $$"
    process = await box.start(["sh", "-c", script], cwd=str(work), confinement=confinement)
    (work / "seen").touch()
    ended = await process.wait(30)
    assert ended.exit_code == 137
    if confinement.mode == "landlock" or _kernel() >= (6, 15):
        assert ended.signal == "SIGKILL"


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor)


@needs_bubblewrap
@pytest.mark.parametrize("stays_away", [True, False], ids=["gone", "still planned"])
async def test_a_hidden_file_that_goes_before_the_jail_is_made_is_planned_again(
    work: Path, monkeypatch: pytest.MonkeyPatch, stays_away: bool
) -> None:
    """Private files below /etc come and go at any time; a jail cannot cover one that is gone."""
    secret = work / "readable" / "secret"
    secret.parent.mkdir()
    plans = 0

    def plan_and_remove(*arguments: Any, **options: Any) -> Any:
        nonlocal plans
        plans += 1
        if plans == 1 or not stays_away:
            secret.touch()
        planned = plan_launch(*arguments, **options)
        secret.unlink(missing_ok=True)
        return planned

    monkeypatch.setattr("holdfast.runtime.process.start.plan_launch", plan_and_remove)
    confined = Confinement(mode="bubblewrap", readable=(str(secret.parent),), hidden=(str(secret),))
    async with holdfast.connect("inprocess") as box:
        if stays_away:
            assert (await (await box.start(["true"], confinement=confined)).wait(30)).exit_code == 0
        else:
            with pytest.raises(PermissionRefused, match="secret"):
                await box.start(["true"], confinement=confined)
    assert plans == 2


async def test_a_signal_reaches_the_program_and_its_answer_is_told(box: Sandbox, confinement: Confinement) -> None:
    script = "trap 'exit 9' TERM; trap 'echo heard' USR1; echo ready; while :; do sleep 0.05; done"
    process = await box.start(["sh", "-c", script], confinement=confinement, cwd=confinement.writable[0])
    await process.wait_for_output("ready\n", timeout=60)
    await process.signal("USR1")
    await process.wait_for_output("heard\n", timeout=60)
    await process.terminate(grace=30)
    assert await process.wait(30) == holdfast.ExitStatus(9)


async def test_nothing_that_it_started_survives_its_end(
    box: Sandbox, server: RunningServer, confinement: Confinement
) -> None:
    nap = f"sleep 4321.{RUN}"
    script = f"setsid {nap} & (nohup {nap} >/dev/null 2>&1 &); trap '' TERM; echo ready; {nap}"
    process = await box.start(["sh", "-c", script], confinement=confinement, cwd=confinement.writable[0])
    await process.wait_for_output("ready\n", timeout=60)
    await process.terminate(force=True)
    assert [pid for pid in _running(f"sleep\x004321.{RUN}\x00") if is_alive(pid)] == []


async def until_running(command_line: str, count: int) -> None:
    """A job that was forked may not have been executed yet, and one that was killed not be gone."""
    async with asyncio.timeout(30):
        while (len(_running(command_line)) < count) if count else _running(command_line):  # noqa: ASYNC110 - untold
            await asyncio.sleep(0.005)


def _running(command_line: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                text = Path(f"/proc/{name}/cmdline").read_text()
            except OSError:
                continue
            if text == command_line:
                found.append(int(name))
    return found


def read(path: str) -> bytes:
    return Path(path).read_bytes()


@needs_bubblewrap
async def test_the_environment_is_the_programs_alone(box: Sandbox, work: Path) -> None:
    """Other processes cannot read it off the command line, and it cannot change what runs outside of the jail."""
    confinement = Confinement(mode="bubblewrap", writable=(str(work),))
    process = await box.start(
        ["sh", "-c", 'echo "$SECRET $LD_PRELOAD"; cat'],
        env={"SECRET": "hunter2", "LD_PRELOAD": "/no/such/library.so"},
        stdin="open",
        confinement=confinement,
        cwd=str(work),
    )
    await process.wait_for_output("hunter2 /no/such/library.so\n", timeout=60)
    for name in ("cmdline", "environ"):
        outside = read(f"/proc/{process.pid}/{name}")
        assert b"hunter2" not in outside
        assert b"library.so" not in outside
    await process.terminate(force=True)


async def test_where_it_starts_if_nobody_says_where(box: Sandbox, work: Path, confinement: Confinement) -> None:
    process = await box.start(["pwd"], confinement=confinement)
    assert (await process.communicate())[0] == f"{work}\n".encode()
    terminal = await box.terminal(["bash"], confinement=confinement)
    assert (await terminal.describe()).cwd == str(work)
    await terminal.close()


@needs_bubblewrap
async def test_a_name_to_run_under(box: Sandbox, work: Path) -> None:
    confinement = Confinement(mode="bubblewrap", writable=(str(work),))
    process = await box.start(["sh", "-c", "ps -o args= $$"], arg0="-other", confinement=confinement, cwd=str(work))
    assert (await process.communicate())[0].startswith(b"-other -c")


def _open_to_all(directory: Path) -> None:
    directory.parent.chmod(0o755)
    directory.chmod(0o777)


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a jail as somebody else")
async def test_a_jail_of_another_user(box: Sandbox, work: Path) -> None:
    _open_to_all(work)
    confinement = Confinement(mode="bubblewrap", writable=(str(work),), network="none")
    process = await box.start(
        ["sh", "-c", "id -u; touch it && echo made; ls /root"],
        user="65534",
        cwd=str(work),
        confinement=confinement,
    )
    assert (await process.communicate())[0] == b"65534\nmade\n"
    assert (work / "it").stat().st_uid == 65534


async def test_what_cannot_be_is_said_at_the_start(box: Sandbox, work: Path, confinement: Confinement) -> None:
    async def start(argv: list[str], cwd: str = str(work), **changes: object) -> None:
        await box.start(argv, cwd=cwd, confinement=replace(confinement, **changes))

    with pytest.raises(InvalidParams, match="does not exist"):
        await start(["true"], writable=("/no/such/place",))
    with pytest.raises(InvalidParams, match="not an absolute path"):
        await start(["true"], writable=("work",))
    (work.parent / "link").symlink_to("/etc")
    with pytest.raises(InvalidParams, match="is a symbolic link"):
        await start(["true"], writable=(str(work.parent / "link"),))
    program = work.parent / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.raises(CommandNotFound, match="not readable in the confinement"):
        await start([str(program)])
    with pytest.raises(InvalidParams, match="needs the path"):
        await start(["true"], network="proxy")
    with pytest.raises(PermissionRefused, match="confinement"):
        await start(["true"], network="proxy", proxy=str(work / "nobody.sock"))
    if confinement.mode == "bubblewrap":
        # None that exists for another reason, as the home directory of the user that runs the tests does.
        (work.parent / "elsewhere").mkdir()
        with pytest.raises(CwdNotFound, match="not readable"):
            await start(["true"], cwd=str(work.parent / "elsewhere"))
    else:
        (work / "kept").mkdir()
        with pytest.raises(InvalidParams, match="cannot give"):
            await start(["true"], hidden=(str(work / "kept"),))


@needs_bubblewrap
async def test_what_bwrap_says_when_the_jail_does_not_stand(box: Sandbox, work: Path) -> None:
    # A socket cannot be made a directory.
    (work / "file").write_text("")
    confinement = Confinement(mode="bubblewrap", writable=(str(work),), readable=(str(work / "file"),))
    process = await box.start(["cat", "file"], cwd=str(work), confinement=confinement)
    assert (await process.wait(30)).exit_code == 0
    with pytest.raises(PermissionRefused, match="bwrap: "):
        await box.start(["true"], cwd="/", confinement=Confinement(mode="bubblewrap", scratch_bytes=-1))


# --- limits of the whole tree ----------------------------------------------------------------------------------


@needs_cgroups
async def test_limits_of_the_tree_hold_from_the_first_moment(box: Sandbox, confinement: Confinement) -> None:
    limited = replace(confinement, total_processes=19, hide_processes=False)
    # Not bash: one that cannot fork tries again for a quarter of a minute.
    script = f"i=0; while [ $i -lt 30 ]; do sleep 4328.{RUN} & i=$((i+1)); done; echo none refused"
    process = await box.start(["dash", "-c", script], confinement=limited, cwd=confinement.writable[0])
    assert (await process.wait(60)).exit_code == 2
    await until_running(f"sleep\x004328.{RUN}\x00", 10)
    sleeping = _running(f"sleep\x004328.{RUN}\x00")
    assert len(sleeping) < 20
    (cgroup,) = _cgroups_with(sleeping[0])
    assert (cgroup / "pids.max").read_text() == "19\n"
    await process.terminate(force=True)
    await process.forget()
    # Another process may have been removing it: then it goes with the next that is made.
    process = await box.start(["true"], confinement=replace(limited, total_processes=18))
    assert not cgroup.exists()


def _cgroups_with(pid: int) -> list[Path]:
    """Those of other servers come and go during the listing."""
    found = []
    for path in glob.glob(f"{hierarchies()['pids'].base}/holdfast-*/*/cgroup.procs"):
        with suppress(OSError):
            if str(pid) in Path(path).read_text().split():
                found.append(Path(path).parent)
    return found


# --- shells ----------------------------------------------------------------------------------------------------


async def test_a_confined_shell_keeps_its_state(box: Sandbox, work: Path, confinement: Confinement) -> None:
    async with await box.shell(cwd=str(work), confinement=confinement) as shell:
        done = await shell.run("name=value; mkdir -p sub; cd sub; echo out; echo err >&2; (exit 3)")
        assert (done.stdout, done.stderr, done.exit_code, done.cwd) == ("out\n", "err\n", 3, f"{work}/sub")
        assert (await shell.run("echo $name $PWD")).stdout == f"value {work}/sub\n"
        assert (await shell.run("cat", input="given")).stdout == "given"
        process = await shell.start("echo $name; exit 4")
        assert (await process.communicate())[0] == b"value\n"
        assert (await process.wait(30)).exit_code == 4


async def test_a_confined_shell_reads_from_an_open_stdin(
    box: Sandbox, work: Path, confinement: Confinement
) -> None:
    async with await box.shell(cwd=str(work), confinement=confinement) as shell:
        await shell.run("name=value")
        begun = asyncio.Event()
        command = 'echo begun; read -r line; echo "$name $line"; cat'
        running = asyncio.create_task(shell.run(command, stdin="open", on_output=lambda _: begun.set()))
        await begun.wait()
        await shell.write("one\ntwo")
        await shell.close_stdin()
        assert (await running).stdout == "begun\nvalue one\ntwo"
        process = await shell.start('read -r line; echo "$name $line"; cat', stdin="open")
        assert await process.communicate("three\nfour") == (b"value three\nfour", b"")


async def test_a_timeout_costs_a_confined_shell_nothing(box: Sandbox, work: Path, confinement: Confinement) -> None:
    async with await box.shell(cwd=str(work), confinement=confinement) as shell:
        await shell.run(f"name=value; sleep 4322.{RUN} & job=$!")
        done = await shell.run(f"sleep 4323.{RUN}", timeout=0.1)
        assert (done.exit_code, done.timed_out, done.shell_restarted) == (124, True, False)
        done = await shell.run("while :; do :; done", timeout=0.1)
        assert (done.exit_code, done.timed_out, done.shell_restarted) == (124, True, False)
        # Its background job was not in the foreground.
        assert (await shell.run("kill -0 $job && echo $name")).stdout == "value\n"
        begun = asyncio.Event()
        running = asyncio.create_task(shell.run(f"echo begun; sleep 4323.{RUN}", on_output=lambda _: begun.set()))
        await begun.wait()
        assert await shell.interrupt()
        assert (await running).exit_code == 130
    assert _running(f"sleep\x004322.{RUN}\x00") + _running(f"sleep\x004323.{RUN}\x00") == []


async def test_a_confined_shell_that_an_option_ended_goes_on(
    box: Sandbox, work: Path, confinement: Confinement
) -> None:
    async with await box.shell(cwd=str(work), confinement=confinement) as shell:
        await shell.run("name=value")
        done = await shell.run("set -e; false")
        assert (done.exit_code, done.shell_restarted, done.restored) == (1, True, "state")
        assert (await shell.run("echo $name $PWD")).stdout == f"value {work}\n"


# --- terminals -------------------------------------------------------------------------------------------------


async def test_a_confined_terminal_knows_its_prompt(box: Sandbox, work: Path, confinement: Confinement) -> None:
    terminal = await box.terminal(["bash"], cwd=str(work), confinement=confinement)
    await terminal.run("PS1='now? '")
    assert ((await terminal.describe()).state, terminal.prompt) == ("IDLE", "now? ")
    done = await terminal.run("echo out; (exit 5)")
    assert (done.output, done.exit_code) == ("out\n", 5)
    await terminal.resize(31, 97)
    assert (await terminal.run("stty size")).output == "31 97\n"
    await terminal.send("cat\n")
    status = await terminal.wait_until_awaiting_input(30)
    assert (status.foreground, status.state, status.cwd) == ("cat", "BUSY", str(work))
    await terminal.send_keys("C-c")
    await terminal.wait_until_idle(30)
    assert (await terminal.describe()).last_exit_code == 130
    done = await terminal.run(f"sleep 4324.{RUN}", timeout=0.1)
    assert (done.exit_code, done.timed_out) == (124, True)
    # An exit with a code above 128 is an exit.
    await terminal.run("(exit 130)")
    await terminal.send("exit\n")
    assert await terminal.wait(30) == holdfast.ExitStatus(130)
    assert (await terminal.describe()).state == "CLOSED"


async def test_a_confined_terminal_whose_shell_is_killed(
    box: Sandbox, work: Path, confinement: Confinement
) -> None:
    terminal = await box.terminal(["bash"], cwd=str(work), confinement=confinement)
    await terminal.send("kill -KILL $$\n")
    assert (await terminal.wait(30)).exit_code == 137
    if confinement.mode == "landlock" or _kernel() >= (6, 15):
        assert (await terminal.describe()).state == "ERROR"


async def test_closing_a_confined_terminal_that_is_busy(box: Sandbox, work: Path, confinement: Confinement) -> None:
    terminal = await box.terminal(["bash"], cwd=str(work), confinement=confinement)
    await terminal.send(f"sleep 4325.{RUN} & sleep 4325.{RUN}\n")
    process = await box.process(terminal.id)
    await process.wait_for_output(f"sleep 4325.{RUN}", timeout=60)
    status = await terminal.close(grace=30)
    assert status.state == "CLOSED"
    assert _running(f"sleep\x004325.{RUN}\x00") == []


async def test_keys_of_a_program_without_a_shell_are_for_the_program(
    box: Sandbox, work: Path, confinement: Confinement
) -> None:
    """It has the process group of bwrap, which a Ctrl-C must not end."""
    script = "trap 'echo heard' INT; echo ready; while read line; do echo got $line; done; exit 6"
    terminal = await box.terminal(["bash", "-c", script], cwd=str(work), confinement=confinement)
    process = await box.process(terminal.id)
    await process.wait_for_output("ready", timeout=60)
    await terminal.send_keys("C-c")
    await process.wait_for_output("heard", timeout=60)
    await terminal.signal("INT")
    await process.wait_for_output(re.compile(rb"heard.*heard", re.DOTALL), timeout=60)
    await terminal.send("word\n")
    await process.wait_for_output("got word", timeout=60)
    assert (await terminal.describe()).state == "RUNNING"
    await terminal.send_keys("C-d")
    assert await terminal.wait(30) == holdfast.ExitStatus(6)


#: The reader of the terminal.
READERS = {
    "orphan": "(cat <&3 &);",
    "of a thread": "python3 -c 'import subprocess, threading; "
    'threading.Thread(target=lambda: subprocess.run("cat")).start()\' <&3 &',
}


@pytest.mark.parametrize("reader", READERS)
async def test_who_waits_for_input_is_found_wherever_it_is(
    box: Sandbox, work: Path, confinement: Confinement, reader: str
) -> None:
    """In the foreground group, with a leader that sleeps."""
    script = f"exec 3<&0; {READERS[reader]} echo; exec sleep 1000"
    terminal = await box.terminal(["sh", "-c", script], cwd=str(work), confinement=confinement)
    assert (await terminal.wait_until_awaiting_input(30)).foreground == "cat"
    await terminal.send("line\n")
    assert (await terminal.wait_until_awaiting_input(30)).foreground == "cat"
    await terminal.close("force")


async def test_background_jobs_that_are_kept(box: Sandbox, work: Path, confinement: Confinement) -> None:
    shell = await box.shell(cwd=str(work), confinement=confinement)
    await shell.run(f"sleep 4329.{RUN} &")
    await shell.close(keep=True)
    await until_running(f"sleep\x004329.{RUN}\x00", 1)
    await shell.close()
    assert _running(f"sleep\x004329.{RUN}\x00") == []


async def test_a_kill_by_signal(box: Sandbox, work: Path, confinement: Confinement) -> None:
    process = await box.start(["sh", "-c", f"echo ready; sleep 4330.{RUN}"], cwd=str(work), confinement=confinement)
    await process.wait_for_output("ready", timeout=60)
    await process.signal("KILL")
    assert (await process.wait(30)).exit_code == 137
    await until_running(f"sleep\x004330.{RUN}\x00", 0)


# --- across servers --------------------------------------------------------------------------------------------


async def test_confined_shells_and_terminals_go_on_when_the_server_is_killed(
    work: Path, confinement: Confinement
) -> None:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            shell = await box.shell(cwd=str(work), confinement=confinement)
            terminal = await box.terminal(
                ["bash"], env={"PS1": "$ ", "HISTFILE": ""}, cwd=str(work), confinement=confinement
            )
            await shell.run(f"name=value; sleep 4326.{RUN} & job=$!")
            await terminal.run("name=shown")
            send_signal(server.pid, signal.SIGKILL)
            assert (await shell.run("echo $name")).stdout == "value\n"
            done = await shell.run(f"sleep 4327.{RUN}", timeout=0.1)
            assert (done.exit_code, done.shell_restarted) == (124, False)
            assert (await shell.run("kill -0 $job && echo runs")).stdout == "runs\n"
            assert (await terminal.describe()).cwd == str(work)
            assert (await terminal.run("echo $name; false")).output == "shown\n"
            await terminal.send("kill -KILL $$\n")
            assert (await terminal.wait(30)).exit_code == 137
            await shell.close()
            assert _running(f"sleep\x004326.{RUN}\x00") == []
            server.pid = (await box.status()).pid


@pytest.mark.parametrize("where", ["writable", "readable"])
async def test_a_directory_that_becomes_a_link_while_its_jail_is_made(
    confinement: Confinement, where: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in another session can do that at any moment: here, just after the path was checked."""
    if confinement.mode == "bubblewrap" and not binds_descriptors(find_bwrap() or ""):
        pytest.skip("this bwrap knows no --bind-fd")
    outside, given = tmp_path / "outside", work / "given"
    outside.mkdir()
    (outside / "secret").write_text("secret")

    def compose_and_replace(*arguments: Any, **options: Any) -> Any:
        composed = plan_launch(*arguments, **options)
        given.rename(work / "moved")
        given.symlink_to(outside)
        return composed

    given.mkdir()
    monkeypatch.setattr("holdfast.runtime.process.start.plan_launch", compose_and_replace)
    confinement = replace(confinement, **{"writable": (), where: (str(given),)})
    async with holdfast.connect("inprocess") as box:
        with pytest.raises(PermissionRefused, match="link"):
            await box.start(["sh", "-c", f"echo >{given}/new"], cwd="/", confinement=confinement)
    assert [each.name for each in outside.iterdir()] == ["secret"]


@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="no /usr/bin/python3: it searches for keys")
async def test_no_program_inherits_the_session_keyring_of_the_server(confinement: Confinement, work: Path) -> None:
    """Also without the filter of system calls, which refuses `keyctl`."""
    unfiltered = replace(confinement, network="host", seccomp=False)
    search = ["/usr/bin/python3", "-c", SEARCH]
    with session_key(), running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            assert int((await box.exec(search)).stdout) > 0
            confined = await box.start(search, confinement=unfiltered)
            assert (await confined.communicate())[0].decode().strip() == os.strerror(errno.ENOKEY)
