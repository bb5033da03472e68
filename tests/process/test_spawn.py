"""How a program starts: what it sees of its surroundings, what it does not inherit, and why it could not start."""

from __future__ import annotations

import asyncio
import grp
import itertools
import json
import os
import pwd
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import (
    CommandNotFound,
    CwdNotFound,
    HelperFailed,
    HoldfastError,
    InvalidParams,
    NotExecutable,
    PermissionRefused,
    ResourceExhausted,
    UnknownUser,
)
from holdfast.launch import self_exec
from holdfast.runtime.libc import SpawnPlan
from holdfast.runtime.local import LocalExec
from holdfast.runtime.tree.process_table import ProcessTable
from holdfast.types import EnvPolicy, ExitStatus, Limits, OutputChunk, ProcessSpec, TerminalSize

MakeExec = Callable[..., LocalExec]
SAFETY_NET = 60
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
IDENTITY = "grep -E '^(Uid|Gid|Groups):' /proc/self/status"
#: The two ways to start: straight, and through the launcher.
WAYS = [pytest.param({}, id="straight"), pytest.param({"limits": Limits(core_bytes=0)}, id="launcher")]


async def run(box: LocalExec, *argv: str, process_id: str = "p", **fields: Any) -> bytes:
    """The output of a program, on both streams."""
    await box.start(ProcessSpec(process_id, argv, **fields))
    async with asyncio.timeout(SAFETY_NET):
        events = [event async for event in box.events(process_id)]
    await box.forget(process_id)
    return b"".join(event.data for event in events if isinstance(event, OutputChunk))


async def see(box: LocalExec, expression: str, **fields: Any) -> Any:
    """The value of an expression in a Python that was started so."""
    script = f"import os, signal, resource, json, sys; print(json.dumps({expression}))"
    return json.loads(await run(box, sys.executable, "-I", "-S", "-c", script, **fields))


def children() -> set[int]:
    """Our children, ended ones too. The tests of a session may share a server, which is one."""
    return set(ProcessTable.read().children.get(os.getpid(), ()))


@pytest.mark.parametrize("way", WAYS)
async def test_no_descriptor_is_inherited(box: LocalExec, way: dict[str, Any]) -> None:
    leaky = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leaky, True)
    try:
        for fields in ({}, {"pipe_stdin": True}, {"tty": True}):
            # The listing itself holds one more.
            assert sorted(await see(box, "[int(n) for n in os.listdir('/proc/self/fd')]", **fields, **way)) == [
                0,
                1,
                2,
                3,
            ]
    finally:
        os.close(leaky)


@pytest.mark.parametrize("way", WAYS)
async def test_signals_are_at_their_defaults_whatever_ours_are(box: LocalExec, way: dict[str, Any]) -> None:
    ours = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGHUP)
    }
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        lines = (await run(box, "grep", "-E", "Sig(Blk|Ign)", "/proc/self/status", **way)).split(b"\n")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in ours.items():
            signal.signal(number, handler)
    assert lines[0].split() == [b"SigBlk:", b"0" * 16]
    # The C library keeps 32 and 33 for its threads and sets them as it likes.
    assert int(lines[1].split()[1], 16) & ~(0b11 << 31) == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tty", [False, True])
async def test_it_leads_its_own_session(box: LocalExec, tty: bool, way: dict[str, Any]) -> None:
    pid, session, group, terminal = await see(
        box, "[os.getpid(), os.getsid(0), os.getpgid(0), os.isatty(0) and os.tcgetpgrp(0)]", tty=tty, **way
    )
    assert pid == session == group
    assert terminal == (pid if tty else False)


@pytest.mark.parametrize("way", WAYS)
async def test_the_environment_is_exact(box: LocalExec, way: dict[str, Any]) -> None:
    env = {"A": "1", "EMPTY": "", "LINES": "a\nb", "UTF": "ü", "EQUALS": "a=b=c", "BYTES": "\udcff"}
    out = await run(box, "/usr/bin/env", "-0", env=env, **way)
    assert sorted(out.split(b"\0")[:-1]) == sorted(os.fsencode(f"{name}={value}") for name, value in env.items())
    assert await run(box, "/usr/bin/env", env={}, **way) == b""


async def test_the_environment_by_policy(make_exec: MakeExec) -> None:
    box = make_exec(environ={"PATH": "/usr/bin:/bin", "API_KEY": "x", "HOME": "/h", "OTHER": "o"})
    assert sorted((await run(box, "env")).split()) == [b"API_KEY=x", b"HOME=/h", b"OTHER=o", b"PATH=/usr/bin:/bin"]
    policy = EnvPolicy(inherit="core", set={"S": "s"})
    out = await run(box, "env", env_policy=policy, env={"E": "e"})
    assert sorted(out.split()) == [b"E=e", b"HOME=/h", b"PATH=/usr/bin:/bin", b"S=s"]


@pytest.mark.parametrize("way", WAYS)
async def test_arg0_is_what_the_program_sees(box: LocalExec, way: dict[str, Any]) -> None:
    out = await run(box, "sh", "-c", "echo $0; cat /proc/$$/cmdline", arg0="-login", **way)
    assert out.split(b"\n")[1].startswith(b"-login\0-c\0")
    assert await run(box, "sh", "-c", 'printf %s "$1"', "zero", "a b\n%\\", **way) == b"a b\n%\\"


@pytest.mark.parametrize("way", WAYS)
async def test_the_working_directory(box: LocalExec, tmp_path: Path, way: dict[str, Any]) -> None:
    directory = tmp_path / "with space"
    directory.mkdir()
    (directory / "tool").write_text("#!/bin/sh\npwd\n")
    (directory / "tool").chmod(0o755)
    for cwd in (str(directory), directory.as_uri()):
        assert await run(box, "pwd", cwd=cwd, **way) == f"{directory}\n".encode()
    # A program with a slash is searched for from there, and one without by the PATH of the process.
    assert await run(box, "./tool", cwd=str(directory), **way) == f"{directory}\n".encode()
    assert await run(box, "tool", cwd="/", env={"PATH": str(directory)}, **way) == b"/\n"
    assert await run(box, "pwd", **way) == f"{os.getcwd()}\n".encode()


@pytest.mark.parametrize("way", WAYS)
async def test_our_raised_descriptor_limit_is_not_theirs(make_exec: MakeExec, way: dict[str, Any]) -> None:
    box = make_exec(open_files=256)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = await see(box, "resource.getrlimit(resource.RLIMIT_NOFILE)", **way)
    assert (soft, hard) == (256, before[1])
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    with pytest.raises(CommandNotFound):
        await box.start(ProcessSpec("p", ("/no/such/program",), **way))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


async def test_a_limit_that_is_changed_during_a_start_stays_changed(
    make_exec: MakeExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `prlimit --pid` of an administrator: the limit that the server had before must not come back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    changed = (before[0] - 2, before[1])
    spawn = SpawnPlan.run

    def change_and_spawn(*arguments: Any) -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, changed)
        return spawn(*arguments)

    monkeypatch.setattr(SpawnPlan, "run", change_and_spawn)
    try:
        await run(make_exec(open_files=before[0] - 1), "true")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == changed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_limits_are_set(box: LocalExec) -> None:
    limits = Limits(
        cpu_seconds=7,
        memory_bytes=2**33,
        open_files=99,
        processes=10_000,
        file_size_bytes=12345,
        core_bytes=0,
        # The tests may run with a nice value already, and only root can lower it again.
        nice=19,
    )
    names = ["RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE"]
    seen = await see(
        box, f"[resource.getrlimit(getattr(resource, n)) for n in {names}] + [os.nice(0)]", limits=limits
    )
    assert seen == [[7, 7], [2**33, 2**33], [99, 99], [10_000, 10_000], [12345, 12345], [0, 0], 19]


@pytest.mark.parametrize(
    "limits", [Limits(cpu_seconds=-5), Limits(open_files=2**63), Limits(memory_bytes=2**80), Limits(nice=100)]
)
async def test_a_limit_out_of_range_is_named(box: LocalExec, limits: Limits) -> None:
    with pytest.raises(InvalidParams, match=r"limits\.(cpu_seconds|open_files|memory_bytes|nice)"):
        await box.start(ProcessSpec("p", ("true",), limits=limits))


async def test_a_limit_that_the_kernel_refuses_is_named(box: LocalExec) -> None:
    with pytest.raises(PermissionRefused, match="limits"):
        await box.start(ProcessSpec("p", ("true",), limits=Limits(open_files=2**62)))


@as_root
@pytest.mark.parametrize("tty", [False, True])
async def test_another_user(box: LocalExec, tty: bool) -> None:
    nobody = pwd.getpwnam("nobody")
    out = await run(box, "sh", "-c", f"{IDENTITY}; echo $HOME $USER $LOGNAME", user="nobody", cwd="/", tty=tty)
    uid, gid = b"%d" % nobody.pw_uid, b"%d" % nobody.pw_gid
    home = nobody.pw_dir.encode()
    assert out.split() == [b"Uid:", *[uid] * 4, b"Gid:", *[gid] * 4, b"Groups:", gid, home, b"nobody", b"nobody"]


@as_root
async def test_a_user_and_group_by_number(box: LocalExec) -> None:
    out = await run(box, "sh", "-c", IDENTITY, user="54321:users", cwd="/")
    group = b"%d" % grp.getgrnam("users").gr_gid
    assert out.split() == [b"Uid:", *[b"54321"] * 4, b"Gid:", *[group] * 4, b"Groups:", group]


@as_root
async def test_another_user_can_open_its_terminal(box: LocalExec) -> None:
    assert b"ok" in await run(
        box, "sh", "-c", "echo ok > /dev/tty && tty >/dev/null", user="nobody", cwd="/", tty=True
    )


@as_root
async def test_another_user_cannot_enter_our_directory(box: LocalExec, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(CwdNotFound, match="private"):
        await box.start(ProcessSpec("p", ("true",), user="nobody", cwd=str(private)))


@pytest.mark.parametrize("user", ["no-such-user", "4294967295", "a\0b"])
async def test_an_unknown_user_is_named(box: LocalExec, user: str) -> None:
    with pytest.raises(UnknownUser):
        await box.start(ProcessSpec("p", ("true",), user=user))


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Programs that cannot be started, each for another reason."""
    for name, text, mode in (
        ("not-executable", "#!/bin/sh\n", 0o644),
        ("no-interpreter", "#!/no/such/interpreter\n", 0o755),
        ("no-format", "just text\n", 0o755),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


async def test_a_server_whose_files_were_removed_is_reported_as_such(
    box: LocalExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a jail whose bundle was removed on the host: the program is not the cause."""
    monkeypatch.setattr(self_exec, "command", lambda: ["/no/such/python"])
    with pytest.raises(HelperFailed, match=r"launcher cannot be started: .* /no/such/python was removed"):
        await box.start(ProcessSpec("p", ("true",), limits=Limits(core_bytes=0)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("argv", "fields", "error", "named"),
    [
        (("no-such-program",), {}, CommandNotFound, "no-such-program"),
        (("/no/such/program",), {}, CommandNotFound, "/no/such/program"),
        (("/etc/passwd/x",), {}, CommandNotFound, "/etc/passwd/x"),
        (("./not-executable",), {}, NotExecutable, "not-executable"),
        (("./no-interpreter",), {}, NotExecutable, "interpreter"),
        (("./no-format",), {}, NotExecutable, "no-format"),
        (("./directory",), {}, NotExecutable, "directory"),
        (("./loop",), {}, HoldfastError, "loop"),
        (("not-executable",), {"env": {"PATH": "."}}, NotExecutable, "not-executable"),
        (("true",), {"cwd": "/no/such/directory"}, CwdNotFound, "/no/such/directory"),
        (("true",), {"cwd": "/etc/passwd"}, CwdNotFound, "/etc/passwd"),
        (("true", "x" * 3_000_000), {}, InvalidParams, "too long"),
        ((), {}, InvalidParams, "argv"),
        (("",), {}, InvalidParams, r"argv\[0\]"),
        (("true", "a\0b"), {}, InvalidParams, r"argv\[1\]"),
        (("true", "\ud800"), {}, InvalidParams, r"argv\[1\]"),
        (("true",), {"arg0": "a\0b"}, InvalidParams, "arg0"),
        (("true",), {"arg0": "\ud800"}, InvalidParams, "arg0"),
        (("true",), {"cwd": "/\ud800"}, InvalidParams, "cwd"),
        (("true",), {"cwd": "file://["}, InvalidParams, "cwd"),
        (("true",), {"env": {"A=B": "1"}}, InvalidParams, "A=B"),
        (("true",), {"env": {"": "1"}}, InvalidParams, "empty name"),
        (("true",), {"env": {"A": "\0"}}, InvalidParams, "'A'"),
        (("true",), {"env": {"A": "\ud800"}}, InvalidParams, "'A'"),
        (("true",), {"env_policy": EnvPolicy(set={"B\0": ""})}, InvalidParams, "B"),
        (("true",), {"size": TerminalSize(1, 1)}, InvalidParams, "size"),
        (("true",), {"tty": True, "size": TerminalSize(0, 80)}, InvalidParams, "0x80"),
        (("true",), {"tty": True, "size": TerminalSize(24, 65536)}, InvalidParams, "24x65536"),
    ],
)
async def test_why_it_could_not_start(
    box: LocalExec,
    programs: Path,
    argv: tuple[str, ...],
    fields: dict[str, Any],
    error: type[HoldfastError],
    named: str,
    way: dict[str, Any],
) -> None:
    ours = children()
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=named):
        await box.start(ProcessSpec("p", argv, **{"cwd": str(programs), **fields, **way}))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert await box.list() == ()
    # The id is free again, and no child is left to be reaped.
    assert await run(box, "echo", "ok") == b"ok\n"
    assert children() == ours


async def test_a_working_directory_of_ours_that_is_gone_is_told(
    box: LocalExec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(CwdNotFound):
        await box.start(ProcessSpec("p", ("true",)))
    assert await run(box, "pwd", cwd="/") == b"/\n"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fields", [{}, {"pipe_stdin": True}, {"tty": True}])
async def test_without_descriptors_nothing_starts_and_nothing_leaks(
    box: LocalExec, fields: dict[str, Any], way: dict[str, Any]
) -> None:
    """With every number of free descriptors from none to enough: whichever is missing, the answer is clear."""
    await run(box, "true")
    ours = children()
    before = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = 0
    numbers = (number for number in itertools.count() if number not in before)
    # Of the numbers below the limit as many are free as there were turns before.
    for limit in itertools.islice(numbers, 20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            await box.start(ProcessSpec("p", ("true",), **fields, **way))
        except ResourceExhausted:
            refused += 1
            continue
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            if "p" not in {each.process_id for each in await box.list()}:
                assert children() == ours
        assert await box.wait("p", timeout=SAFETY_NET) is not None
        async with asyncio.timeout(SAFETY_NET):
            assert [event async for event in box.events("p")]
        await box.forget("p")
    assert 0 < refused < 20
    assert sorted(int(name) for name in os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGHUP])
async def test_death_by_signal_is_told_by_name(box: LocalExec, tty: bool, number: signal.Signals) -> None:
    script = f"ulimit -c 0; kill -{number.value} $$"
    await box.start(ProcessSpec("p", ("sh", "-c", script), tty=tty))
    assert await box.wait("p", timeout=SAFETY_NET) == ExitStatus(128 + number, number.name)


@pytest.mark.parametrize("code", [0, 1, 126, 127, 255])
async def test_exit_codes_are_the_programs(box: LocalExec, code: int) -> None:
    await box.start(ProcessSpec("p", ("sh", "-c", f"exit {code}")))
    status = await box.wait("p", timeout=SAFETY_NET)
    assert status == ExitStatus(code)
    assert status.success == (code == 0)


def our_oom_score() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


@pytest.mark.parametrize("way", WAYS)
async def test_a_started_job_is_taken_by_the_kernel_before_us(make_exec: MakeExec, way: dict[str, Any]) -> None:
    ours = our_oom_score()
    # From its first instruction on: the first thing that it does is to start another.
    look = ("sh", "-c", "cat /proc/self/oom_score_adj; true")
    assert int(await run(make_exec(oom_score_adj=321), *look, **way)) == min(1_000, ours + 321)
    assert our_oom_score() == ours
    assert int(await run(make_exec(oom_score_adj=0), *look, **way)) == ours
