"""Checks of a sandbox, which need no test framework: run them over a `SandboxTarget` of your own.

Each check is a coroutine function in `CHECKS`; it gets a connected `Sandbox` and the `Subject` that it was made
from, and raises AssertionError. They need a POSIX shell and common programs inside, and leave nothing running.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from holdfast.client.connection.channel_connection import Dial
from holdfast.client.dial import dialer
from holdfast.client.exec_remote import Completed, ExecRemoteOptions, StderrChunk, StdoutChunk
from holdfast.client.opening import connect
from holdfast.client.process import Process
from holdfast.client.sandbox import Sandbox
from holdfast.errors import (
    CommandNotFound,
    CwdNotFound,
    HoldfastError,
    PermissionRefused,
    TimeoutError,
    UnknownProcess,
)
from holdfast.sandboxes.target import SandboxTarget
from holdfast.transport.channel import Channel, Receiver
from holdfast.types import OutputChunk, OutputGap, TerminalSize

#: Nothing here takes long; this turns a hang into a failure.
PATIENCE_SECONDS: Final = 60.0
#: The bound of `exec` for each stream.
KEPT_BYTES: Final = 10 * 1024 * 1024
#: Timeouts for commands that are to time out: the first should do; on a machine that starts them slowly, the next.
TIMEOUTS: Final = (0.15, 1.0, 10.0)
#: All 256 byte values, in an order that no text codec survives.
BINARY: Final = bytes(range(256)) * 400


class Subject:
    """A sandbox to be checked: each call of `make` returns a place of it.

    `keeps_processes`: processes run on when the last connection is closed; those of a jail that ends with its
    connection do not.
    """

    def __init__(self, make: Callable[[], SandboxTarget], *, keeps_processes: bool = True) -> None:
        self._make = make
        self.keeps_processes = keeps_processes

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Sandbox]:
        """Open another connection to the sandbox."""
        async with connect(self._make()) as box:
            yield box

    @contextlib.asynccontextmanager
    async def connect_and_cut(self) -> AsyncIterator[tuple[Sandbox, Callable[[], None]]]:
        """Open another connection; yield it and a function that breaks its channel."""
        target = _Cut(self._make())
        async with connect(target) as box:
            yield box, target.cut


Check = Callable[[Sandbox, Subject], Awaitable[None]]


class AddressTarget(SandboxTarget):
    """A running server, at an address such as `local` or `unix:/path`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._dial: Dial = dialer(address)

    async def dial(self, receiver: Receiver) -> Channel:
        return await self._dial(receiver)


class _Cut(SandboxTarget):
    """A place with a channel that can be broken from outside, as if its carrier had died."""

    def __init__(self, target: SandboxTarget) -> None:
        self._target = target
        self.address = target.address
        self.handshake_seconds = target.handshake_seconds
        self._channel: Channel | None = None

    async def open(self) -> None:
        await self._target.open()

    async def dial(self, receiver: Receiver) -> Channel:
        self._channel = await self._target.dial(receiver)
        return self._channel

    async def aclose(self) -> None:
        await self._target.aclose()

    def cut(self) -> None:
        assert self._channel is not None
        self._channel.close()


# --- commands --------------------------------------------------------------------------------------------------


async def exec_gives_both_streams_and_the_exit_code(box: Sandbox, subject: Subject) -> None:
    done = await box.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3), done
    assert not done.success
    assert not done.truncated


async def arguments_arrive_as_they_are(box: Sandbox, subject: Subject) -> None:
    words = ["", "a b", "$HOME", "'", '"', "\\", "*", "-n", "line\nbreak", "ü✓", "; exit 9", "`id`"]
    done = await box.exec(["sh", "-c", 'for w; do printf "%s\\0" "$w"; done', "sh", *words])
    assert done.stdout_bytes.decode().split("\0")[:-1] == words, done


async def variables_and_directory_are_given(box: Sandbox, subject: Subject) -> None:
    done = await box.exec(
        ["sh", "-c", 'echo "$GIVEN"; pwd; echo "${PATH:+has a path}"'], env={"GIVEN": "a b"}, cwd="/"
    )
    assert done.stdout == "a b\n/\nhas a path\n", done


async def nothing_of_the_server_is_in_the_environment(box: Sandbox, subject: Subject) -> None:
    names = {line.partition("=")[0] for line in (await box.exec(["env"])).stdout.splitlines()}
    assert not {name for name in names if name.startswith(("LD_", "PYTHONHOME"))}, names


async def binary_input_comes_back(box: Sandbox, subject: Subject) -> None:
    done = await box.exec(["cat"], input=BINARY)
    assert done.stdout_bytes == BINARY, len(done.stdout_bytes)


async def errors_tell_what_failed(box: Sandbox, subject: Subject) -> None:
    missing = await _raised(box.exec(["/no/such/program"]))
    assert isinstance(missing, CommandNotFound), missing
    assert "/no/such/program" in str(missing)
    nowhere = await _raised(box.exec(["true"], cwd="/no/such/directory"))
    assert isinstance(nowhere, CwdNotFound), nowhere


async def streams_come_as_events(box: Sandbox, subject: Subject) -> None:
    process = box.exec_remote(
        ["sh", "-c", "echo first; read line; echo $line >&2"], ExecRemoteOptions(stdin_open=True)
    )
    printed, complained, completed = "", "", None
    async for event in process:
        if isinstance(event, StdoutChunk):
            printed += event.data
            # It waits for this, so its first line came while it ran.
            await process.write_stdin("second\n")
        elif isinstance(event, StderrChunk):
            complained += event.data
        else:
            completed = event
    assert (printed, complained) == ("first\n", "second\n")
    assert completed == Completed(0, "first\n", "second\n"), completed


async def a_kill_ends_the_stream(box: Sandbox, subject: Subject) -> None:
    process = box.exec_remote(["sh", "-c", "echo ready; sleep 1000"])
    async for event in process:
        if isinstance(event, StdoutChunk):
            await process.kill()
    assert process.pid is not None
    assert not await _runs(box, process.pid)


async def a_timeout_keeps_what_was_printed(box: Sandbox, subject: Subject) -> None:
    command = ["sh", "-c", "echo before; echo trouble >&2; sleep 1000"]
    for timeout in TIMEOUTS:
        error = await _raised(box.exec(command, timeout=timeout, timeout_retry=False))
        assert isinstance(error, TimeoutError), error
        if error.stderr:
            assert (error.stdout, error.stderr) == ("before\n", "trouble\n"), (error.stdout, error.stderr)
            return
    raise AssertionError(f"nothing of what it printed within {TIMEOUTS[-1]:g} s is in the error")


async def the_most_recent_output_is_kept(box: Sandbox, subject: Subject) -> None:
    script = f"dd if=/dev/zero bs=65536 count={KEPT_BYTES // 65536 + 16} 2>/dev/null; printf 'the end'"
    done = await box.exec(["sh", "-c", script])
    assert done.truncated
    assert len(done.stdout_bytes) == KEPT_BYTES, len(done.stdout_bytes)
    assert done.stdout_bytes.endswith(b"\0the end")


async def many_run_at_once(box: Sandbox, subject: Subject) -> None:
    done = await asyncio.gather(*(box.exec(["sh", "-c", f"echo {number}"]) for number in range(20)))
    assert [each.stdout for each in done] == [f"{number}\n" for number in range(20)]


# --- processes -------------------------------------------------------------------------------------------------


async def a_process_is_found_by_its_id(box: Sandbox, subject: Subject) -> None:
    async with _started(box, "echo ready; read line; echo got $line") as process:
        async with subject.connect() if subject.keeps_processes else _same(box) as other:
            found = await other.process(process.id)
            await found.wait_for_output("ready", timeout=PATIENCE_SECONDS)
            await found.write("it\n")
            assert (await found.wait(PATIENCE_SECONDS)).exit_code == 0
        assert await _printed(process) == b"ready\ngot it\n"


async def processes_outlive_the_connection(box: Sandbox, subject: Subject) -> None:
    if not subject.keeps_processes:
        return
    id = f"outlives-{secrets.token_hex(4)}"
    async with subject.connect() as first:
        process = await first.start(["sh", "-c", "echo ready; read line; echo $line"], id=id, stdin="open")
        await process.wait_for_output("ready", timeout=PATIENCE_SECONDS)
    async with subject.connect() as second:
        process = await second.process(id)
        await process.write("still here\n")
        assert (await process.wait(PATIENCE_SECONDS)).exit_code == 0
        assert await _printed(process) == b"ready\nstill here\n"
        await process.forget()


async def a_kill_takes_the_whole_tree(box: Sandbox, subject: Subject) -> None:
    script = "(trap '' TERM HUP; sleep 1000 & echo $!; wait) & echo $!; echo $$; wait"
    async with _started(box, script) as process:
        match = await process.wait_for_output(re.compile(rb"(?:\d+\s+){3}"), timeout=PATIENCE_SECONDS)
        pids = [int(word) for word in match.text.split()[:3]]
        assert all([await _runs(box, pid) for pid in pids])
        await process.terminate(grace=0.2)
        assert [pid for pid in pids if await _runs(box, pid)] == []


async def one_that_ignores_term_is_killed(box: Sandbox, subject: Subject) -> None:
    async with _started(box, "trap '' TERM; echo ready; while :; do sleep 1; done") as process:
        await process.wait_for_output("ready", timeout=PATIENCE_SECONDS)
        await process.terminate(grace=0.2)
        assert (await process.wait(PATIENCE_SECONDS)).signal == "SIGKILL", await process.wait()
    remote = box.exec_remote(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"])
    assert isinstance(await anext(remote), StdoutChunk)
    assert remote.pid is not None
    await remote.kill(grace=0.2)
    assert not await _runs(box, remote.pid)


async def what_was_forgotten_is_unknown(box: Sandbox, subject: Subject) -> None:
    async with _started(box, "true") as process:
        await process.wait(PATIENCE_SECONDS)
        await process.forget()
        assert isinstance(await _raised(box.process(process.id)), UnknownProcess)


# --- a channel that breaks ---------------------------------------------------------------------------------------


async def a_cut_channel_comes_back(box: Sandbox, subject: Subject) -> None:
    async with subject.connect_and_cut() as (own, cut):
        assert (await own.exec(["echo", "before"])).stdout == "before\n"
        cut()
        assert (await own.exec(["echo", "after"])).stdout == "after\n"


async def a_cut_loses_no_byte(box: Sandbox, subject: Subject) -> None:
    blocks = 100
    script = f'i=0; while [ $i -lt {blocks} ]; do i=$((i+1)); printf "%065536d" $i; done'
    async with subject.connect_and_cut() as (own, cut):
        process = await own.start(["sh", "-c", script], overflow="block")
        received, count = hashlib.sha256(), 0
        async for chunk in process.output():
            assert isinstance(chunk, OutputChunk), chunk
            assert chunk.offset == count, (chunk.offset, count)
            if count == 0:
                cut()
            received.update(chunk.data)
            count += len(chunk.data)
        await process.forget()
    expected = hashlib.sha256(b"".join(b"%065536d" % number for number in range(1, blocks + 1)))
    assert (count, received.digest()) == (blocks * 65536, expected.digest())


async def a_reader_gets_every_byte(box: Sandbox, subject: Subject) -> None:
    """More than is kept (16 MiB a stream), to a reader that does nothing but read."""
    first, lines = 1_000_000, 5_000_000
    received, count = hashlib.sha256(), 0
    async for event in box.exec_remote(["seq", str(first), str(first + lines - 1)]):
        assert not isinstance(event, OutputGap | StderrChunk), event
        if isinstance(event, StdoutChunk):
            received.update(event.data.encode())
            count += len(event.data)
    expected = hashlib.sha256()
    for start in range(first, first + lines, 100_000):
        expected.update(b"".join(b"%d\n" % number for number in range(start, start + 100_000)))
    assert (count, received.digest()) == (8 * lines, expected.digest())


# --- shells, terminals, files ------------------------------------------------------------------------------------


async def a_shell_keeps_its_state(box: Sandbox, subject: Subject) -> None:
    async with await box.shell() as shell:
        assert (await shell.run("cd / && kept='a b' && greet() { echo hello $1; }")).exit_code == 0
        done = await shell.run('echo "$kept"; greet you; pwd; echo err >&2; (exit 4)')
        assert (done.stdout, done.stderr, done.exit_code) == ("a b\nhello you\n/\n", "err\n", 4), done


async def a_shell_command_times_out_alone(box: Sandbox, subject: Subject) -> None:
    async with await box.shell() as shell:
        await shell.run("kept=1")
        for timeout in TIMEOUTS:
            late = await shell.run("echo begun; sleep 1000", timeout=timeout)
            assert late.timed_out, late
            assert (await shell.run("echo $kept")).stdout == "1\n"
            if late.stdout:
                break
        assert late.stdout == "begun\n", late


async def a_terminal_runs_commands(box: Sandbox, subject: Subject) -> None:
    async with await box.terminal(rows=30, cols=100, env={"PS1": "$ "}) as terminal:
        if terminal.status.integration:
            done = await terminal.run("stty size; (exit 5)", timeout=PATIENCE_SECONDS)
            assert (done.output.strip(), done.exit_code) == ("30 100", 5), done
            return
        # A shell that marks no prompts: the result of arithmetic differs from the echo of the command.
        await terminal.send("echo $((6 * 7))-answer\r")
        seen = b""
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for data in terminal.output():
                seen += data
                if b"42-answer" in seen:
                    break


async def a_program_on_a_terminal_is_told_its_size(box: Sandbox, subject: Subject) -> None:
    process = await box.start(["sh", "-c", "test -t 0 && test -t 1 && stty size"], tty=TerminalSize(40, 120))
    try:
        assert (await process.wait(PATIENCE_SECONDS)).exit_code == 0
        assert (await _printed(process)).strip() == b"40 120"
    finally:
        await process.forget()


async def files_come_back_as_they_went(box: Sandbox, subject: Subject) -> None:
    files: Any = box
    if not hasattr(files, "write_file"):
        return
    directory = (await box.exec(["sh", "-c", "mktemp -d"])).stdout.strip()
    try:
        path = f"{directory}/made/with parents/data"
        await files.write_file(path, BINARY)
        assert await files.read_file(path) == BINARY
        assert (await files.stat(path)).size == len(BINARY)
        assert [entry.name for entry in await files.list_dir(os.path.dirname(path))] == ["data"]
        await files.make_dir(f"{directory}/empty")
        await files.remove(path)
        assert not await files.exists(path)
    finally:
        await box.exec(["rm", "-rf", directory])


async def changes_of_a_directory_are_reported(box: Sandbox, subject: Subject) -> None:
    directory = (await box.exec(["sh", "-c", "mktemp -d"])).stdout.strip()
    async with box.watch(directory, recursive=True) as events:
        await box.exec(["sh", "-c", "mkdir -p a/b && echo x > a/b/file && mv a c && rm -rf $PWD"], cwd=directory)
        seen = [(event.kind, event.name) async for event in events]
    assert ("created", "a") in seen, seen
    assert seen[-1] == ("root_removed", ""), seen
    assert "overflow" not in dict(seen), seen


async def files_of_another_user_are_that_users(box: Sandbox, subject: Subject) -> None:
    """Where commands can run as another user, files can be worked on as that user."""
    user = "65534:65534"
    if isinstance(await _raised(box.exec(["true"], user=user)), PermissionRefused):
        return
    directory = (await box.exec(["sh", "-c", "mktemp -d"])).stdout.strip()
    try:
        await box.exec(["chmod", "777", directory])
        for name, content in (("small", b"x"), ("tree/large", BINARY * 100)):
            await box.write_file(f"{directory}/{name}", content, user=user)
            assert await box.read_file(f"{directory}/{name}", user=user) == content, name
            assert (await box.stat(f"{directory}/{name}", user=user)).uid == 65534, name
        assert [entry.name for entry in await box.list_dir(directory, user=user)] == ["small", "tree"]
        await box.remove(f"{directory}/tree", recursive=True, user=user)
        await box.write_file(f"{directory}/closed", b"s", mode=0o600)
        refused = await _raised(box.read_file(f"{directory}/closed", user=user))
        assert isinstance(refused, PermissionRefused), refused
        assert f"{directory}/closed" in str(refused)
        assert [entry.name for entry in await box.list_dir(directory)] == ["closed", "small"]
    finally:
        await box.exec(["rm", "-rf", directory])


async def what_a_process_uses_is_told_with_all_that_it_started(box: Sandbox, subject: Subject) -> None:
    async with _started(box, "(sh -c 'echo $$; exec sleep 1000' &); echo $$; exec cat") as process:
        found = await process.wait_for_output(re.compile(rb"(\d+)\s+(\d+)\s"), timeout=PATIENCE_SECONDS)
        (usage,) = (await box.usage([process.id, "nobody"])).usages
        # A sandbox has its own pids, and its server reports those.
        assert usage.pids == tuple(sorted(map(int, found.text.split()))), (usage, found)
        assert (usage.running, usage.process_count, usage.printed_bytes) == (True, 2, len(found.data)), usage
        assert usage.memory_bytes > 0


async def nothing_is_left(box: Sandbox, subject: Subject) -> None:
    """The last: the checks before it have left neither processes nor shells nor terminals behind."""
    status = await box.status()
    assert (status.processes_running, status.shells, status.terminals) == (0, 0, 0), status


# --- shared by the checks ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _started(box: Sandbox, script: str) -> AsyncIterator[Process]:
    process = await box.start(["sh", "-c", script], stdin="open")
    try:
        yield process
    finally:
        with contextlib.suppress(UnknownProcess):
            await process.terminate(force=True)
            await process.wait(PATIENCE_SECONDS)


@contextlib.asynccontextmanager
async def _same(box: Sandbox) -> AsyncIterator[Sandbox]:
    yield box


async def _printed(process: Process) -> bytes:
    return b"".join([chunk.data async for chunk in process.output() if isinstance(chunk, OutputChunk)])


async def _runs(box: Sandbox, pid: int) -> bool:
    """Whether a process exists and is no zombie: `kill -0` succeeds for both."""
    script = f'read -r line < /proc/{pid}/stat || exit 1; case "${{line##*) }}" in Z*|X*) exit 1;; esac'
    return (await box.exec(["sh", "-c", script])).success


async def _raised(work: Awaitable[Any]) -> HoldfastError | None:
    try:
        await work
    except HoldfastError as error:
        return error
    return None


#: In this order: the last check inspects the leftovers of the others.
CHECKS: Final[tuple[Check, ...]] = (
    exec_gives_both_streams_and_the_exit_code,
    arguments_arrive_as_they_are,
    variables_and_directory_are_given,
    nothing_of_the_server_is_in_the_environment,
    binary_input_comes_back,
    errors_tell_what_failed,
    streams_come_as_events,
    a_kill_ends_the_stream,
    a_timeout_keeps_what_was_printed,
    the_most_recent_output_is_kept,
    many_run_at_once,
    a_process_is_found_by_its_id,
    processes_outlive_the_connection,
    a_kill_takes_the_whole_tree,
    one_that_ignores_term_is_killed,
    what_was_forgotten_is_unknown,
    a_cut_channel_comes_back,
    a_cut_loses_no_byte,
    a_reader_gets_every_byte,
    a_shell_keeps_its_state,
    a_shell_command_times_out_alone,
    a_terminal_runs_commands,
    a_program_on_a_terminal_is_told_its_size,
    files_come_back_as_they_went,
    changes_of_a_directory_are_reported,
    files_of_another_user_are_that_users,
    what_a_process_uses_is_told_with_all_that_it_started,
    nothing_is_left,
)
