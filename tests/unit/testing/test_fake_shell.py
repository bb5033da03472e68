"""The fake shell that users test with, through the public `Shell`: scripted commands, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from holdfast.client.sandbox import Sandbox
from holdfast.client.shell import CommandResult, Shell
from holdfast.errors import DuplicateProcess, ShellClosed, StdinClosed, UnknownProcess, UnknownShell
from holdfast.testing import FakeCommand, FakeExec, answers, cat, hangs, prints, run_in_virtual_time
from holdfast.testing.fake_shell import INTERRUPT_GRACE_SECONDS
from holdfast.types import CommandEnded, CommandSpec, OutputChunk, ShellSpec


async def ticks(command: FakeCommand) -> int:
    """One line a second, ten of them."""
    for number in range(10):
        command.stdout(f"tick {number}\n")
        await command.sleep(1)
    return 0


async def remember(command: FakeCommand) -> int:
    command.variables["word"] = command.spec.argv[1]
    return 0


async def recall(command: FakeCommand) -> int:
    command.stdout(f"{command.env.get('word', 'unset')} in {command.cwd}\n")
    return 0


def fake(**commands: Any) -> FakeExec:
    scripted = {
        "cd /src": answers(cwd="/src"),
        "cd sub": answers(cwd="sub"),
        "git status": answers("clean\n", "warning\n", 1),
        "exit 3": answers("bye\n", exit_code=3, exits=True),
        "remember kept": remember,
        "recall": recall,
        "ticks": ticks,
        "hang": hangs("up\n"),
        "stubborn": hangs("up\n", ignores=["TERM"]),
        **commands,
    }
    return FakeExec({"echo": prints("echoed\n"), "cat": cat}, shell_commands=scripted)


def in_virtual_time(test: Callable[[FakeExec, Shell], Coroutine[Any, Any, None]], **commands: Any) -> None:
    async def main() -> None:
        exec_ = fake(**commands)
        box = Sandbox(exec_)
        try:
            await test(exec_, await box.shell(id="sh"))
        finally:
            await box.aclose()

    run_in_virtual_time(main())


def shown(result: CommandResult) -> tuple[str, str, int, str]:
    return result.stdout, result.stderr, result.exit_code, result.cwd


# --- commands -----------------------------------------------------------------------------------------------------


def test_commands_are_found_by_their_text_then_by_their_first_word() -> None:
    async def test(_: FakeExec, sh: Shell) -> None:
        assert shown(await sh.run("git status")) == ("clean\n", "warning\n", 1, "/fake")
        assert shown(await sh.run("echo anything")) == ("echoed\n", "", 0, "/fake")
        assert shown(await sh.run("nosuch --flag")) == ("", "nosuch: command not found\n", 127, "/fake")
        assert shown(await sh.run("echo 'open")) == ("", "echo 'open: command not found\n", 127, "/fake")
        assert shown(await sh.run("")) == ("", "", 0, "/fake")

    in_virtual_time(test)


async def test_another_default_may_be_given() -> None:
    box = Sandbox(FakeExec(default_command=answers("whatever\n")))
    sh = await box.shell()
    assert (await sh.run("anything | at all")).stdout == "whatever\n"


def test_directory_and_variables_persist_and_those_of_one_command_do_not() -> None:
    async def test(_: FakeExec, sh: Shell) -> None:
        assert (await sh.run("cd /src")).cwd == sh.cwd == "/src"
        assert (await sh.run("cd sub")).cwd == "/src/sub"
        await sh.run("remember kept")
        assert (await sh.run("recall")).stdout == "kept in /src/sub\n"
        result = await sh.run("recall", cwd="..", env={"word": "other"})
        assert (result.stdout, result.cwd) == ("other in /src\n", "/src/sub")
        assert (await sh.run("cd sub", cwd="/tmp")).cwd == "/src/sub"
        assert (await sh.run("recall")).stdout == "kept in /src/sub\n"

    in_virtual_time(test)


def test_input_is_all_of_stdin() -> None:
    async def test(_: FakeExec, sh: Shell) -> None:
        assert (await sh.run("cat", input="in")).stdout == "in"
        assert shown(await sh.run("cat")) == ("", "", 0, "/fake")

    in_virtual_time(test)


def test_output_comes_as_it_is_printed_and_the_end_last() -> None:
    async def test(_: FakeExec, sh: Shell) -> None:
        times: list[float] = []
        events = []
        async for event in sh.stream("ticks"):
            times.append(asyncio.get_running_loop().time())
            events.append(event)
        assert [event.data for event in events if isinstance(event, OutputChunk)] == [
            b"tick %d\n" % number for number in range(10)
        ]
        assert [time - times[0] for time in times] == [float(number) for number in range(11)]
        assert events[-1] == CommandEnded(0, "/fake", 10.0)

    in_virtual_time(test)


# --- ending them --------------------------------------------------------------------------------------------------


def test_a_timeout_ends_a_command_to_the_second_and_the_shell_goes_on() -> None:
    async def test(_: FakeExec, sh: Shell) -> None:
        await sh.run("remember kept")
        result = await sh.run("ticks", timeout=3.5)
        assert (result.timed_out, result.exit_code, result.duration) == (True, 124, 3.5)
        assert result.stdout == "tick 0\ntick 1\ntick 2\ntick 3\n"
        stubborn = await sh.run("stubborn", timeout=1800)
        assert (stubborn.exit_code, stubborn.duration) == (124, 1800 + INTERRUPT_GRACE_SECONDS)
        assert (await sh.run("recall", timeout=5)).stdout == "kept in /fake\n"

    in_virtual_time(test)


def test_an_interrupt_ends_the_command_that_runs_and_its_id_means_that_one() -> None:
    async def test(exec_: FakeExec, sh: Shell) -> None:
        assert not await sh.interrupt()
        running = asyncio.create_task(sh.run("hang"))
        await exec_.shell("sh").until(lambda: exec_.shell("sh").current is not None)
        assert await exec_.interrupt_shell("sh", interrupt_id="once")
        result = await running
        assert (result.stdout, result.exit_code, result.timed_out) == ("up\n", 130, False)
        running = asyncio.create_task(sh.run("hang", timeout=10))
        await exec_.shell("sh").until(lambda: exec_.shell("sh").current is not None)
        assert await exec_.interrupt_shell("sh", interrupt_id="once")
        assert (await running).timed_out

    in_virtual_time(test)


def test_a_caller_that_gives_up_ends_its_command_or_takes_it_out() -> None:
    async def test(exec_: FakeExec, sh: Shell) -> None:
        inside = exec_.shell("sh")
        first = asyncio.create_task(sh.run("hang"))
        await inside.until(lambda: inside.current is not None)
        waiting = [asyncio.create_task(sh.run(text)) for text in ("recall", "remember kept")]
        await inside.until(lambda: len(inside.queue) == 2)
        waiting[1].cancel()
        await inside.until(lambda: len(inside.queue) == 1)
        first.cancel()
        assert (await waiting[0]).stdout == "unset in /fake\n"
        assert [spec.command for spec in inside.ran] == ["hang", "recall"]
        assert [task.cancelled() for task in (first, waiting[1])] == [True, True]

    in_virtual_time(test)


# --- the queue ----------------------------------------------------------------------------------------------------


def test_commands_run_one_after_the_other_in_their_order() -> None:
    async def test(exec_: FakeExec, sh: Shell) -> None:
        tasks = [asyncio.create_task(sh.run(text)) for text in ("ticks", "remember kept", "recall")]
        inside = exec_.shell("sh")
        await inside.until(lambda: len(inside.queue) == 2)
        status = await sh.describe()
        assert (status.state, status.command, status.queued) == ("running", "ticks", 2)
        results = await asyncio.gather(*tasks)
        assert results[2].stdout == "kept in /fake\n"
        assert [result.duration for result in results] == [10.0, 0.0, 0.0]
        status = await sh.describe()
        assert (status.state, status.command, status.queued, status.commands_run) == ("idle", None, 0, 3)

    in_virtual_time(test)


def test_the_same_command_id_runs_once() -> None:
    async def test(exec_: FakeExec, sh: Shell) -> None:
        streams = [exec_.run_in_shell("sh", CommandSpec("same", "git status")) for _ in range(2)]
        events = [[event async for event in stream] for stream in streams]
        assert events[0] == events[1]
        assert len(exec_.shell("sh").ran) == 1
        assert (await exec_.snapshot("same")).stdout == b"clean\n"

    in_virtual_time(test)


# --- the end of a shell -------------------------------------------------------------------------------------------


def test_exit_closes_the_shell_and_those_who_wait_are_told() -> None:
    async def test(exec_: FakeExec, sh: Shell) -> None:
        tasks = [asyncio.create_task(sh.run(text)) for text in ("exit 3", "recall")]
        result = await tasks[0]
        assert shown(result) == ("bye\n", "", 3, "/fake")
        assert (result.state, result.reason) == ("closed", "exited with code 3")
        with pytest.raises(ShellClosed, match="'sh' is closed: exited with code 3"):
            await tasks[1]
        with pytest.raises(ShellClosed, match="exited with code 3"):
            await sh.run("recall")
        with pytest.raises(ShellClosed, match="exited with code 3"):
            await sh.start("recall")
        status = await sh.describe()
        assert (status.state, status.exit_code) == ("closed", 3)
        assert not await sh.interrupt()
        await sh.close()

    in_virtual_time(test)


def test_closing_ends_the_command_that_runs() -> None:
    async def test(exec_: FakeExec, sh: Shell) -> None:
        running = asyncio.create_task(sh.run("stubborn"))
        await exec_.shell("sh").until(lambda: exec_.shell("sh").current is not None)
        await asyncio.sleep(0)
        await asyncio.gather(sh.close(grace=7), sh.close(grace=7))
        result = await running
        assert (result.exit_code, result.state, result.reason, result.duration) == (137, "closed", "closed", 7.0)
        with pytest.raises(ShellClosed, match="closed"):
            await sh.run("recall")

    in_virtual_time(test)


@pytest.mark.parametrize("keep", [False, True])
def test_background_jobs_print_on_the_shell_and_end_with_it_unless_kept(keep: bool) -> None:
    async def job(command: FakeCommand) -> int:
        async def later() -> None:
            for number in range(3):
                await command.sleep(10)
                command.stdout(f"late {number}\n")

        command.leave_behind(later())
        command.stdout("now\n")
        return 0

    async def test(exec_: FakeExec, sh: Shell) -> None:
        assert (await sh.run("job &")).stdout == "now\n"
        output = sh.output()
        assert await anext(output) == OutputChunk("stdout", 0, b"late 0\n", 1)
        assert (await sh.run("recall")).stdout == "unset in /fake\n"
        await sh.close(keep=keep)
        rest = [event.data async for event in output if isinstance(event, OutputChunk)]
        assert rest == ([b"late 1\n", b"late 2\n"] if keep else [])
        assert (await sh.snapshot()).running is False

    in_virtual_time(test, **{"job &": job})


# --- processes with the shell's state -----------------------------------------------------------------------------


def test_a_process_begins_with_the_state_of_the_shell_in_its_turn() -> None:
    async def test(exec_: FakeExec, sh: Shell) -> None:
        tasks = [asyncio.create_task(sh.run(text)) for text in ("ticks", "remember kept", "cd /src")]
        inside = exec_.shell("sh")
        await inside.until(lambda: len(inside.queue) == 2)
        process = await sh.start("recall", id="p")
        assert [spec.command for spec in inside.ran] == ["ticks", "remember kept", "cd /src"]
        await asyncio.gather(*tasks)
        assert (await process.wait()).exit_code == 0
        assert (await process.snapshot()).stdout == b"kept in /src\n"
        changing = await sh.start("cd /src/other")
        assert (await changing.wait()).exit_code == 0
        assert (await sh.run("recall")).stdout == "kept in /src\n"
        with pytest.raises(DuplicateProcess, match="'p'"):
            await sh.start("recall", id="p")
        endless = await sh.start("hang")
        assert await endless.terminate(grace=0)

    in_virtual_time(test, **{"cd /src/other": answers(cwd="other")})


def test_a_start_id_that_comes_again_starts_once() -> None:
    async def test(exec_: FakeExec, sh: Shell) -> None:
        starts = [await exec_.start_in_shell("sh", "hang", "p", start_id="attempt") for _ in range(2)]
        assert starts[0].pid == starts[1].pid
        assert len(exec_.started) == 1

    in_virtual_time(test)


# --- ids ----------------------------------------------------------------------------------------------------------


async def test_ids_name_one_shell_until_it_is_closed() -> None:
    exec_ = fake()
    box = Sandbox(exec_)
    first = await exec_.open_shell(ShellSpec("sh", start_id="attempt", cwd="/home", env={"word": "given"}))
    assert (await exec_.open_shell(ShellSpec("sh", start_id="attempt"))).pid == first.pid
    with pytest.raises(DuplicateProcess, match="'sh'"):
        await box.shell(id="sh")
    sh = await box.open_shell("sh")
    assert (await sh.run("recall")).stdout == "given in /home\n"
    await sh.close()
    again = await box.shell("bash", id="sh")
    assert (again.state, again.cwd, (await again.describe()).path) == ("idle", "/fake", "/bin/bash")
    assert again.pid != first.pid
    assert [each.id for each in await box.shells()] == ["sh"]
    with pytest.raises(UnknownShell, match="'other'"):
        await box.open_shell("other")
    with pytest.raises(UnknownShell, match="'other'"):
        exec_.run_in_shell("other", CommandSpec("c", "recall"))
    with pytest.raises(UnknownProcess, match="'other'"):
        await exec_.snapshot("other")


def test_a_command_and_a_process_of_a_shell_are_written_to() -> None:
    async def test(exec_: FakeExec, shell: Shell) -> None:
        with pytest.raises(StdinClosed, match="stdin='open'"):
            await shell.write("nobody reads")
        running = asyncio.create_task(shell.run("cat", stdin="open"))
        await asyncio.sleep(1)
        await shell.write("one ")
        await shell.write("two")
        await shell.close_stdin()
        assert (await running).stdout == "one two"
        with pytest.raises(StdinClosed):
            await shell.write("late")
        process = await shell.start("cat", stdin="open")
        assert await process.communicate("three") == (b"three", b"")

    in_virtual_time(test)
