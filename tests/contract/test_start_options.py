"""Where a process runs: its directory, its variables, its user, its limits; commands; ports."""

from __future__ import annotations

import asyncio
import builtins
import os
import socket
from pathlib import Path

import pytest

import holdfast
from holdfast import EnvPolicy, Limits, Sandbox
from holdfast.errors import CommandNotFound, CwdNotFound, InvalidParams, TimeoutError
from holdfast.testing.sandbox_suite import TIMEOUTS
from tests.contract.ways import printed

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


async def environment(box: Sandbox, **options: object) -> dict[str, str]:
    process = await box.start(["/usr/bin/env", "-0"], **options)  # type: ignore[arg-type]
    pairs = (await printed(process)).decode().rstrip("\0").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


async def test_the_directory_is_a_path_or_a_uri(box: Sandbox, tmp_path: Path) -> None:
    location = tmp_path / "with space"
    location.mkdir()
    for cwd in (str(location), location.as_uri()):
        process = await box.start(["pwd"], cwd=cwd)
        assert (await printed(process)).decode() == f"{location}\n"
    with pytest.raises(CwdNotFound, match="/no/such/place"):
        await box.start(["pwd"], cwd="/no/such/place")


async def test_the_program_sees_the_name_it_was_given(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "echo $0"], arg0="other-name")
    assert await printed(process) == b"other-name\n"


async def test_an_exact_environment_is_exact(box: Sandbox) -> None:
    given = {"ONLY": "this", "EMPTY": "", "LINES": "a\nb", "UNICODE": "ü"}
    assert await environment(box, env=given, exact_env=True) == given


async def test_env_adds_to_the_sandboxs_own(box: Sandbox) -> None:
    seen = await environment(box, env={"ADDED": "1", "HOME": "/elsewhere"})
    assert (seen["ADDED"], seen["HOME"]) == ("1", "/elsewhere")
    assert "PATH" in seen


async def test_a_policy_decides_what_is_inherited(box: Sandbox) -> None:
    core = await environment(box, env_policy=EnvPolicy(inherit="core"))
    assert "PATH" in core
    assert not {name for name in core if name.startswith(("PYTEST", "HOLDFAST"))}
    secret = EnvPolicy(inherit="none", set={"MY_TOKEN": "t", "MY_NAME": "n"}, include_only=("MY_*",))
    assert await environment(box, env_policy=secret) == {"MY_TOKEN": "t", "MY_NAME": "n"}
    everything = await environment(box, env_policy=EnvPolicy(inherit="all", exclude=("PA*",)))
    assert "PATH" not in everything
    over = await environment(box, env_policy=EnvPolicy(inherit="none"), env={"LAID": "over"})
    assert over == {"LAID": "over"}


@needs_root
async def test_another_user_has_its_own_home_and_groups(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "id -un; id -gn; id -Gn; echo $HOME $USER"], user="nobody", cwd="/")
    name, group, groups, home = (await printed(process)).decode().splitlines()
    assert (name, group, groups) == ("nobody", "nogroup", "nogroup")
    assert home.endswith(" nobody")


async def test_limits_hold_for_the_process_and_its_children(box: Sandbox) -> None:
    limits = Limits(open_files=64, file_size_bytes=1_000_000, core_bytes=0)
    process = await box.start(["sh", "-c", "ulimit -n; sh -c 'ulimit -f; ulimit -c'"], limits=limits)
    files, size, core = (await printed(process)).split()
    # sh counts file sizes in blocks of 512 bytes.
    assert (int(files), int(size), int(core)) == (64, 1_000_000 // 512, 0)


async def test_a_process_inherits_no_descriptor_of_ours(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "ls -l /proc/self/fd | grep -v /proc/ | grep -c ' -> '"])
    assert await printed(process) == b"3\n"


async def test_a_process_has_default_signals(box: Sandbox) -> None:
    process = await box.start(["grep", "-hE", "SigBlk|SigIgn", "/proc/self/status"])
    blocked, ignored = (int(line.split()[1], 16) for line in (await printed(process)).splitlines())
    # 32 and 33 are the C library's own; its posix_spawn leaves them ignored in every child.
    assert (blocked, ignored & ~(1 << 31 | 1 << 32)) == (0, 0)


# --- commands -------------------------------------------------------------------------------------------------


async def test_exec_gives_the_result(box: Sandbox) -> None:
    result = await box.exec(["sh", "-c", "cat; echo err >&2; exit 3"], input=b"in\0put")
    assert (result.returncode, result.stdout_bytes, result.stderr) == (3, b"in\0put", "err\n")
    assert not result.success


async def test_exec_that_takes_too_long_is_killed_and_told(box: Sandbox) -> None:
    for timeout in TIMEOUTS:
        with pytest.raises(TimeoutError, match="sleep 1000") as caught:
            await box.exec(["sh", "-c", "echo begun; sleep 1000"], timeout=timeout, timeout_retry=False)
        if caught.value.stdout:
            break
    assert caught.value.stdout == "begun\n"
    assert isinstance(caught.value, builtins.TimeoutError)
    assert [info.running for info in await box.api.list()] == [False]


async def test_exec_of_nothing_to_be_found(box: Sandbox) -> None:
    with pytest.raises(CommandNotFound, match="no-such-program"):
        await box.exec(["no-such-program"])


async def test_exec_remote_streams(box: Sandbox) -> None:
    options = holdfast.ExecRemoteOptions(stdin_open=True)
    process = box.exec_remote(["sh", "-c", "read x; echo got $x; echo err >&2; exit 4"], options)
    await process.write_stdin("word\n")
    events = [event async for event in process]
    assert holdfast.StdoutChunk("got word\n") in events
    assert holdfast.StderrChunk("err\n") in events
    assert events[-1] == holdfast.Completed(4, "got word\n", "err\n")


# --- ports ----------------------------------------------------------------------------------------------------


async def test_wait_for_port_returns_when_somebody_listens(box: Sandbox) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        waiting = asyncio.create_task(box.wait_for_port(port, timeout=60))
        # A call that comes back meanwhile shows that the wait was under way before the server listened.
        assert await box.processes() == []
        assert not waiting.done()
        listener.listen()
        await waiting


async def test_wait_for_port_gives_up(box: Sandbox) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(TimeoutError, match=f"127.0.0.1:{port}"):
            await box.wait_for_port(port, timeout=0.05)
    with pytest.raises(InvalidParams, match="70000"):
        await box.wait_for_port(70_000)


async def test_what_kind_of_place_it_is(box: Sandbox) -> None:
    info = await box.info()
    assert info.os.startswith("Linux")
    assert info.version == holdfast.__version__
    assert os.path.isabs(info.shell.path)
    status = await box.status()
    assert (status.processes_running, status.processes_kept) == (0, 0)
    await box.start(["sleep", "1000"])
    assert (await box.status()).processes_running == 1
