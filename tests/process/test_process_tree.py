"""Ending a whole tree: whatever a process did to get away, nothing that it started is left."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from holdfast.errors import ResourceExhausted
from holdfast.runtime.local import LocalExec
from holdfast.runtime.tree.cgroup import Cgroup, _hierarchies
from holdfast.runtime.tree.pid_handles import PidHandles
from holdfast.runtime.tree.process_table import Entry, ProcessTable, new_mark, newest_pids, read_entry, read_mark
from holdfast.runtime.tree.process_tree import SCARCE_SECONDS
from holdfast.runtime.tree.table_reader import HUNTS, TableReader
from holdfast.types import ExitStatus, OutputChunk, ProcessSpec
from tests.faults.hang_report import process_text

MakeExec = Callable[..., LocalExec]
SAFETY_NET = 60


def marked(box: LocalExec, *process_ids: str) -> list[int]:
    """Every living process of the machine that carries a mark of these, wherever it hangs."""
    marks = {box.processes.process(process_id).tree._mark for process_id in process_ids or ("p",)}
    table = ProcessTable.read()
    return sorted(pid for pid, entry in table.entries.items() if not entry.dead and read_mark(pid) in marks)


async def lines(box: LocalExec, count: int, process_id: str = "p") -> list[bytes]:
    """The first lines that a process and its children print."""
    seen = b""
    events = box.events(process_id)
    async with asyncio.timeout(SAFETY_NET):
        while seen.count(b"\n") < count:
            event = await anext(events)
            if isinstance(event, OutputChunk):
                seen += event.data
    await events.aclose()
    return seen.split()


#: Each prints so many words, one for each of its processes, and then holds out.
ESCAPES = {
    "child": ("sh -c 'echo up; exec sleep 1000' & echo up; wait", 2),
    "setsid": ("setsid sh -c 'echo up; exec sleep 1000' & echo up; wait", 2),
    "nohup": ("cd \"$(mktemp -d)\"; nohup sh -c 'echo up; exec sleep 1000' & echo up; wait", 2),
    "double fork": ("(setsid sh -c '(echo up; exec sleep 1000) &' &); echo up; sleep 1000", 2),
    "clean environment": ("(env -i setsid sh -c 'echo up; exec sleep 1000' &); echo up; sleep 1000", 2),
    "ignores TERM": (
        "(trap '' TERM; setsid sh -c 'echo up; while :; do sleep 1000; done' &); echo up; sleep 1000",
        2,
    ),
    "all ignore TERM": ("trap '' TERM; echo up; while :; do sleep 1000; done", 1),
    "stopped": ("sh -c 'echo up; kill -STOP $$; sleep 1000' & echo up; kill -STOP $$; wait", 2),
    "leader gone": ("setsid sh -c 'echo up; exec sleep 1000' & exit 0", 1),
    "leader gone, same session": ("sh -c 'echo up; exec sleep 1000' & exit 0", 1),
    "streams closed": (
        "(setsid sh -c 'echo up; exec sleep 1000 >/dev/null 2>&1 </dev/null' &); echo up; sleep 1000",
        2,
    ),
}


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("escape", ESCAPES)
async def test_nothing_survives(box: LocalExec, escape: str, tty: bool, force: bool) -> None:
    if tty and escape.startswith("leader gone"):
        pytest.skip("the kernel hangs up a terminal's session with its leader")
    script, count = ESCAPES[escape]
    await box.start(ProcessSpec("p", ("sh", "-c", script), tty=tty))
    await lines(box, count)
    if escape.startswith("leader gone"):
        assert await box.wait("p", timeout=SAFETY_NET) == ExitStatus(0)
    assert marked(box)
    async with asyncio.timeout(SAFETY_NET):
        await box.terminate("p", grace=0.05 if "ignore" in escape else 5, force=force)
    left = marked(box)
    assert left == [], process_text(*left)
    assert not (await box.describe("p")).running


#: Its first thread ends, and another one runs on: the kernel shows the process as a zombie.
FIRST_THREAD_ENDS = """
import _thread, ctypes, os, signal, sys
def run_on():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    os.write(1, b"up\\n")
    signal.pause()
_thread.start_new_thread(run_on, ())
ctypes.CDLL(None).syscall(int(sys.argv[1]), 0)
"""
#: exit(2), which ends one thread; exit_group(2), which the C library calls, ends all.
EXIT_OF_ONE_THREAD = {"x86_64": 60, "aarch64": 93}


@pytest.mark.skipif(os.uname().machine not in EXIT_OF_ONE_THREAD, reason="needs the number of exit(2)")
@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("script", ["exec {}", "{} & wait"], ids=["leader", "child"])
async def test_a_process_whose_first_thread_has_ended_is_killed(
    make_exec: MakeExec, script: str, force: bool
) -> None:
    box = make_exec(cgroup="off")
    number = EXIT_OF_ONE_THREAD[os.uname().machine]
    program = shlex.join([sys.executable, "-I", "-S", "-c", FIRST_THREAD_ENDS, str(number)])
    await box.start(ProcessSpec("p", ("sh", "-c", script.format(program)), pipe_stdin=True))
    await lines(box, 1)
    async with asyncio.timeout(SAFETY_NET):
        await box.terminate("p", grace=0.05, force=force)
    assert marked(box) == []


async def test_terminate_tells_whether_it_was_running(box: LocalExec) -> None:
    await box.start(ProcessSpec("p", ("sleep", "1000")))
    assert await box.terminate("p", grace=5) is True
    assert await box.wait("p") == ExitStatus(143, "SIGTERM")
    assert await box.terminate("p", grace=5) is False
    assert await box.terminate("p", force=True) is False


def test_a_pid_that_was_given_again_is_not_moved_into_the_cgroup_of_the_first() -> None:
    """The thread that moves processes may be late, and all members of a cgroup are killed with its process."""
    mount, path = next(_hierarchies(), ("", ""))
    if not mount or not os.access(f"{mount}{path}", os.W_OK):
        pytest.skip("needs a cgroup that can be written")
    with subprocess.Popen(["true"]) as first:
        pidfd = os.pidfd_open(first.pid)
    group = Cgroup(f"{mount}{path.rstrip('/')}/holdfast-test-{os.getpid()}")
    with subprocess.Popen(["sleep", "1000"]) as second:
        try:
            group.join(second.pid, pidfd)
            assert not group.exists()
            fresh = os.pidfd_open(second.pid)
            group.join(second.pid, fresh)
            os.close(fresh)
            assert group.pids() == [second.pid]
        finally:
            os.close(pidfd)
            second.kill()
            second.wait()
            group.remove()


async def test_term_comes_once_and_gives_time(box: LocalExec) -> None:
    """A program that needs several turns to clean up is not hurried by a second TERM."""
    script = """
import signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [15])
print("up", flush=True)
signal.sigwait([15])
subprocess.run(["sh", "-c", "exit 0"])
print(1 + (15 in signal.sigpending()), flush=True)
sys.exit(9)
"""
    await box.start(ProcessSpec("p", (sys.executable, "-S", "-c", script)))
    await lines(box, 1)
    await box.terminate("p", grace=SAFETY_NET)
    assert await box.wait("p") == ExitStatus(9)
    assert await lines(box, 2) == [b"up", b"1"]


async def test_two_who_terminate_at_once_both_return(box: LocalExec) -> None:
    await box.start(ProcessSpec("p", ("sh", "-c", "trap '' TERM; echo up; while :; do sleep 1000; done")))
    await lines(box, 1)
    async with asyncio.timeout(SAFETY_NET):
        answers = await asyncio.gather(box.terminate("p", grace=SAFETY_NET), box.terminate("p", force=True))
    assert list(answers) == [True, True]
    assert marked(box) == []


async def test_what_keeps_forking_is_caught(box: LocalExec) -> None:
    """Each generation forks the next and ends: its pid is gone before it is found. A cgroup holds them all."""
    if not any(means.startswith("cgroup.kill") for means in (await box.status()).containment):
        pytest.skip("needs a cgroup that can be written, with cgroup.kill (Linux 5.14)")
    script = """
import os, sys, time
sys.stdin.readline()
os.write(1, b"up\\n")
stop = time.monotonic() + 30  # if the test itself is killed, this must not run for ever
while time.monotonic() < stop:
    if os.fork():
        os._exit(0)
    os.setsid()
"""
    await box.start(ProcessSpec("p", (sys.executable, "-S", "-c", script), pipe_stdin=True))
    tree = box.processes.process("p").tree
    async with asyncio.timeout(SAFETY_NET):
        # It joins after a while, on a thread: no event reports it.
        while tree.cgroup is None or not tree.cgroup.pids():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await box.write("p", b"go\n")
        await lines(box, 1)
        await box.terminate("p", force=True)
    assert marked(box) == []


async def test_a_bounded_fork_bomb_is_caught(box: LocalExec) -> None:
    script = "bomb() { [ $1 -gt 6 ] && exec sleep 1000; bomb $(($1+1)) & bomb $(($1+1)) & wait; }; echo up; bomb 0"
    await box.start(ProcessSpec("p", ("sh", "-c", script)))
    await lines(box, 1)
    async with asyncio.timeout(SAFETY_NET):
        await box.terminate("p", force=True)
    assert marked(box) == []


async def test_a_neighbour_is_left_alone(box: LocalExec) -> None:
    script = "setsid sh -c 'echo up; exec sleep 1000' & echo up; wait"
    for id in ("p", "q"):
        await box.start(ProcessSpec(id, ("sh", "-c", script)))
        await lines(box, 2, id)
    neighbour = marked(box, "q")
    await box.terminate("p", force=True)
    assert marked(box) == []
    assert marked(box, "q") == neighbour
    assert len(neighbour) == 2


async def test_many_are_ended_at_once(box: LocalExec) -> None:
    ids = [str(number) for number in range(50)]
    for id in ids:
        await box.start(ProcessSpec(id, ("sh", "-c", "setsid sleep 1000 & echo up; wait")))
    for id in ids:
        await lines(box, 1, id)
    async with asyncio.timeout(SAFETY_NET):
        await asyncio.gather(*(box.terminate(id, force=True) for id in ids))
    assert marked(box, *ids) == []


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"])


async def test_a_member_that_no_table_has_is_found_by_its_mark_and_stopped(
    box: LocalExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    await box.start(ProcessSpec("p", ("sleep", "1000")))
    tree = box.processes.process("p").tree
    # On a busy machine other processes would be newer.
    monkeypatch.setattr("holdfast.runtime.tree.table_reader.newest_pids", lambda: [1, tree.leader])
    found, other = await asyncio.gather(tree._tables.hunt(tree.mark), tree._tables.hunt(new_mark()))
    assert (found, other) == ({tree.leader: read_entry(tree.leader)}, {})
    async with asyncio.timeout(SAFETY_NET):
        state = await asyncio.to_thread(os.waitid, os.P_PID, tree.leader, os.WSTOPPED | os.WNOWAIT)
    assert state is not None
    assert state.si_status == signal.SIGSTOP


async def test_an_id_that_was_used_again_is_not_signalled() -> None:
    """The table is older than the pid's present owner: no signal goes to the new owner."""
    child = sleeper()
    try:
        entry = read_entry(child.pid)
        assert entry is not None
        before = sorted(os.listdir("/proc/self/fd"))
        with PidHandles([entry._replace(started=b"1")]) as handles:
            handles.send(signal.SIGKILL)
            await handles.wait_gone(SAFETY_NET)
        assert child.poll() is None
        with PidHandles([entry, Entry(2**22 + 1, 1, 1, b"1", False)]) as handles:
            await handles.wait_gone(0)
            handles.send(signal.SIGKILL, except_for={child.pid})
            assert child.poll() is None
            handles.send(signal.SIGKILL)
            await handles.wait_gone(SAFETY_NET)
        assert child.wait() == -9
        assert sorted(os.listdir("/proc/self/fd")) == before
    finally:
        child.kill()
        child.wait()


def entries(*rows: tuple[int, int, int]) -> dict[int, Entry]:
    return {pid: Entry(pid, parent, session, b"1", False) for pid, parent, session in rows}


def test_members_by_parent_by_session_and_by_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    us, mark = os.getpid(), new_mark()
    table = ProcessTable(
        entries(
            (us, 1, us),
            (100, us, 100),  # the leader
            (101, 100, 100),  # its child
            (102, 101, 102),  # a grandchild that called setsid
            (103, 1, 100),  # an orphan of its session
            (104, 1, 104),  # an orphan of its own session, with the mark
            (105, 104, 105),  # the orphan's child
            (200, us, 200),  # another leader
            (201, 1, 201),  # an orphan of another process
        )
    )
    monkeypatch.setattr(
        table, "carries", lambda pid, wanted: wanted == mark and pid in {100, 101, 102, 103, 104, 105}
    )
    members = table.members(100, leader_lives=True, mark=mark, others={100, 200})
    assert sorted(members) == [100, 101, 102, 103, 104, 105]
    # Reaped: the pid and the session number may be another's by now, the mark may not.
    monkeypatch.setattr(table, "carries", lambda pid, wanted: pid in {104})
    assert sorted(table.members(100, leader_lives=False, mark=mark)) == [104, 105]
    assert sorted(table.members(100, leader_lives=False, mark=mark, inside=[200])) == [104, 105, 200]


def test_the_orphans_of_a_table_are_computed_once_for_all_trees() -> None:
    class Leaders:
        checked = 0

        def __contains__(self, pid: object) -> bool:
            self.checked += 1
            return True

    count = 200
    entries = {pid: Entry(pid, os.getpid(), pid, b"0", False) for pid in range(10**6, 10**6 + count)}
    table, leaders = ProcessTable({**entries, os.getpid(): Entry(os.getpid(), 1, 1, b"0", False)}), Leaders()
    for pid in entries:
        assert list(table.members(pid, leader_lives=True, mark=1, others=leaders)) == [pid]
    assert leaders.checked <= 2 * count


def test_the_dead_are_no_members() -> None:
    rows = entries((100, 1, 100), (101, 100, 100))
    rows[100] = rows[100]._replace(dead=True)
    table = ProcessTable(rows)
    table._marks = dict.fromkeys(rows, None)
    assert sorted(table.members(100, leader_lives=True, mark=1)) == [101]


def test_a_name_with_parentheses_is_read() -> None:
    child = subprocess.Popen(["bash", "-c", "exec -a x sleep 1000"])
    named = subprocess.Popen(
        [sys.executable, "-S", "-c", "open('/proc/self/comm','w').write(') R 1 2 (');print(flush=True);input()"],
        stdin=-1,
        stdout=-1,
    )
    try:
        assert named.stdout is not None
        named.stdout.readline()
        entry = read_entry(named.pid)
        assert entry is not None
        assert (entry.parent, entry.dead) == (os.getpid(), False)
        assert read_entry(2**22 + 1) is None
    finally:
        for process in (child, named):
            process.kill()
            process.communicate()


async def test_a_kill_waits_for_descriptors_and_is_then_complete(box: LocalExec) -> None:
    """A kill that gave up here would leave what the leader started."""
    await box.start(ProcessSpec("p", ("sh", "-c", "sleep 1000 & sleep 1000; wait")))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        ending = asyncio.create_task(box.terminate("p", force=True))
        await asyncio.sleep(2 * SCARCE_SECONDS)  # an attempt that fails
        assert not ending.done()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    async with asyncio.timeout(SAFETY_NET):
        assert await ending
    assert marked(box) == []


async def test_a_process_table_that_cannot_be_read_is_an_error_and_no_hang(
    box: LocalExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    await box.start(ProcessSpec("p", ("sleep", "1000")))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with monkeypatch.context() as patches:
        patches.setattr("holdfast.runtime.tree.process_tree.KILL_TIMEOUT", 0.1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            async with asyncio.timeout(SAFETY_NET):
                with pytest.raises(ResourceExhausted, match="/proc"):
                    await box.terminate("p", force=True)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert await box.terminate("p", force=True)


async def test_an_orphan_whose_mark_cannot_be_read_is_not_taken_for_another(
    make_exec: MakeExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptors are gone after the table was read."""
    box = make_exec(cgroup="off")
    await box.start(ProcessSpec("p", ("sh", "-c", ESCAPES["leader gone"][0])))
    await lines(box, 1)
    assert await box.wait("p", timeout=SAFETY_NET) == ExitStatus(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    read = box.processes._tables.read
    monkeypatch.setattr("holdfast.runtime.tree.process_tree.KILL_TIMEOUT", 0.0)  # one attempt

    async def read_and_limit() -> ProcessTable[Entry]:
        table = await read()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        return table

    monkeypatch.setattr(box.processes._tables, "read", read_and_limit)
    try:
        with pytest.raises(ResourceExhausted, match="cannot be found"):
            await box.terminate("p", force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        monkeypatch.undo()
    assert marked(box)
    await box.terminate("p", force=True)
    assert marked(box) == []


async def test_a_tree_with_more_members_than_we_have_descriptors_ends(make_exec: Callable[..., LocalExec]) -> None:
    box = make_exec(cgroup="off")
    family = "for i in $(seq 30); do setsid sleep 1000 & done; echo started; wait"
    await box.start(ProcessSpec("p", ("sh", "-c", family)))
    assert await lines(box, 1) == [b"started"]
    assert len(marked(box, "p")) == 31
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 10, hard))
    try:
        async with asyncio.timeout(SAFETY_NET):
            assert await box.terminate("p", grace=0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(taken)
    assert marked(box, "p") == []


def run_python(script: str) -> str:
    """In a process of its own: these change what cannot be changed back."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=SAFETY_NET
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_where_limits_cannot_mark_the_environment_does() -> None:
    out = run_python("""
        import asyncio, os, resource
        resource.setrlimit(resource.RLIMIT_RTTIME, (10**9, 10**9))
        from holdfast.types import ProcessSpec
        from holdfast.runtime.local import LocalExec

        async def main():
            box = LocalExec()
            await box.start(ProcessSpec("p", ("sh", "-c", "setsid sh -c 'echo $$; exec sleep 1000' & exit 0")))
            events = box.events("p")
            while not hasattr(event := await anext(events), "data"):
                pass
            pid = int(event.data)
            await box.wait("p")
            os.kill(pid, 0)
            await box.terminate("p", force=True)
            async for event in events:
                pass
            await box.aclose()
            print("ended")

        asyncio.run(main())
    """)
    assert out == "ended\n"


def test_no_zombies_are_left_by_orphans_that_we_adopted() -> None:
    out = run_python("""
        import asyncio, os, signal
        from holdfast.types import Limits, ProcessSpec
        from holdfast.runtime.local import LocalExec
        from holdfast.runtime.tree.process_table import ProcessTable

        def children():
            return [pid for pid in ProcessTable.read().children.get(os.getpid(), ())]

        async def main():
            box = LocalExec(adopt_orphans=True)
            for number in range(10):
                await box.start(ProcessSpec(str(number), ("sh", "-c", "(sh -c 'sleep 0.01; echo' &); exit 5")))
            for number in range(10):
                async for event in box.events(str(number)):
                    pass
                assert (await box.wait(str(number))).exit_code == 5
            # The last of them has closed its streams and may be at its last instructions.
            while children():
                box.processes.reap_orphans()
                await asyncio.sleep(0)
            await box.aclose()
            print("none")

        asyncio.run(main())
    """)
    assert out == "none\n"


def test_the_reaper_of_orphans_leaves_a_start_alone_that_is_under_way() -> None:
    """Between the exec of a program and our check of it, it may have ended: its status is not for the reaper."""
    out = run_python("""
        import asyncio, os
        from holdfast.types import Limits, ProcessSpec
        from holdfast.runtime.process import spawn
        from holdfast.runtime.local import LocalExec

        async def main():
            box = LocalExec(adopt_orphans=True)
            read_report = spawn._read_report

            async def slow(fd):
                said = await read_report(fd)
                (pid,) = box.processes.starter.newborn
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                box.processes.reap_orphans()
                return said

            spawn._read_report = slow
            await box.start(ProcessSpec("p", ("sh", "-c", "exit 5"), limits=Limits(core_bytes=0)))
            print((await box.wait("p")).exit_code)
            await box.aclose()

        asyncio.run(main())
    """)
    assert out == "5\n"


async def test_signals_go_to_the_group(box: LocalExec) -> None:
    # Busy, because a program that it waits for would get the signal too, and the shell would report its end.
    child = "trap 'echo child; exit 0' USR1; echo up; while :; do :; done"
    script = f'trap "echo leader; exit 4" USR1; sh -c "{child}" & echo up; while :; do wait; done'
    await box.start(ProcessSpec("p", ("sh", "-c", script)))
    await lines(box, 2)
    await box.signal("p", "usr1")
    assert await box.wait("p", timeout=SAFETY_NET) == ExitStatus(4)
    assert sorted(await lines(box, 4)) == [b"child", b"leader", b"up", b"up"]


@pytest.mark.parametrize("send", ["signal", "keystroke"])
async def test_control_c_reaches_the_foreground_of_a_terminal(box: LocalExec, send: str) -> None:
    """A shell with job control: the foreground job has a group of its own, and the shell lives on."""
    await box.start(
        ProcessSpec("p", ("bash", "--norc", "-i"), tty=True, env={"PS1": "[>]", "PATH": os.environ["PATH"]})
    )
    await until(box, b"[>]")
    await box.write("p", b"sh -c 'echo u''p; exec sleep 1000'\n")
    await until(box, b"up\r\n")
    if send == "signal":
        await box.signal("p", "INT")
    else:
        await box.write("p", b"\x03")
    await until(box, b"[>]", times=2)
    await box.write("p", b"echo code $?\n")
    await until(box, b"code 130\r\n")
    await box.write("p", b"exit 7\n")
    assert await box.wait("p", timeout=SAFETY_NET) == ExitStatus(7)


async def until(box: LocalExec, text: bytes, times: int = 1) -> None:
    async with asyncio.timeout(SAFETY_NET):
        seen = b""
        events = box.events("p")
        while seen.count(text) < times:
            event = await anext(events)
            if isinstance(event, OutputChunk):
                seen += event.data
        await events.aclose()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(errno.EMFILE, "Too many open files"), ResourceExhausted), (ValueError("a new field"), ValueError)],
    ids=["scarcity", "a bug"],
)
async def test_every_caller_gets_the_error_of_a_shared_read(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("holdfast.runtime.tree.table_reader.ProcessTable.read", fail)
    reader = TableReader()
    async with asyncio.timeout(10):
        results = await asyncio.gather(reader.read(), reader.read(), return_exceptions=True)
    assert [type(result) for result in results] == [raised, raised]


async def test_callers_that_end_trees_at_the_same_time_share_one_hunt(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a table is nearly always incomplete, and each of a thousand kills then hunts."""
    scans = 0

    def count() -> list[int]:
        nonlocal scans
        scans += 1
        return newest_pids()

    monkeypatch.setattr("holdfast.runtime.tree.table_reader.newest_pids", count)
    reader = TableReader()
    assert await asyncio.gather(*(reader.hunt(new_mark()) for _ in range(100))) == [{}] * 100
    assert scans == HUNTS
