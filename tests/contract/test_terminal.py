"""Processes on a terminal: its size, its signals, its modes."""

from __future__ import annotations

import pytest

from holdfast import ExitStatus, Process, Sandbox, TerminalSize
from holdfast.errors import InvalidParams, NotATerminal
from tests.contract.ways import printed


async def terminal(box: Sandbox, script: str, size: TerminalSize | None = None) -> Process:
    return await box.start(["sh", "-c", script], tty=size or TerminalSize())


async def test_the_program_sees_the_size(box: Sandbox) -> None:
    process = await terminal(box, "stty size", TerminalSize(rows=41, cols=133))
    assert await printed(process) == b"41 133\r\n"
    assert (await process.describe()).size == TerminalSize(41, 133)


async def test_the_program_is_told_of_a_new_size(box: Sandbox) -> None:
    process = await terminal(box, "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.01; done")
    await process.wait_for_output("ready")
    await process.resize(50, 100)
    assert (await process.wait_for_output("50 100\r\n")).stream == "pty"
    assert (await process.wait()).exit_code == 0
    assert (await process.describe()).size == TerminalSize(50, 100)


async def test_it_is_a_controlling_terminal_for_all_three_streams(box: Sandbox) -> None:
    process = await terminal(box, "test -t 0 && test -t 1 && test -t 2 && echo to tty > /dev/tty; ps -o tty= $$")
    out = (await printed(process)).decode().split("\r\n")
    assert out[0] == "to tty"
    assert out[1].startswith("pts/")


async def test_output_of_both_streams_is_one(box: Sandbox) -> None:
    process = await terminal(box, "echo out; echo err >&2")
    assert await printed(process) == b"out\r\nerr\r\n"
    assert (await process.snapshot()).terminal == b"out\r\nerr\r\n"


async def test_control_c_interrupts_the_program(box: Sandbox) -> None:
    process = await terminal(box, "echo ready; exec sleep 1000")
    await process.wait_for_output("ready")
    await process.write("\x03")
    assert await process.wait() == ExitStatus(130, "SIGINT")


async def test_control_c_reaches_the_job_in_the_foreground(box: Sandbox) -> None:
    process = await box.start(["bash", "--norc", "-i"], tty=TerminalSize(), env={"PS1": "", "HISTFILE": ""})
    # The echo of a line also holds its words; only the answer has the sum.
    await process.write("sh -c 'echo job:$((20 + 3)); exec sleep 1000'\n")
    await process.wait_for_output("job:23")
    await process.write("\x03")
    await process.write("echo alive:$((40 + 2))\n")
    await process.wait_for_output("alive:42")
    assert (await process.describe()).running
    await process.write("exit 9\n")
    assert (await process.wait()).exit_code == 9


async def test_what_is_typed_is_echoed_and_read(box: Sandbox) -> None:
    process = await terminal(box, "read word; echo got:$word")
    await process.write("hello\n")
    assert await printed(process) == b"hello\r\ngot:hello\r\n"


async def test_control_d_ends_the_input(box: Sandbox) -> None:
    process = await terminal(box, "cat; echo ended")
    await process.write("line\n")
    await process.wait_for_output("line\r\nline\r\n")
    await process.close_stdin()
    await process.wait_for_output("ended")
    assert (await process.wait()).exit_code == 0


async def test_a_hang_up_ends_who_reads_from_it(box: Sandbox) -> None:
    process = await terminal(box, "echo ready; cat")
    await process.wait_for_output("ready")
    await process.signal("HUP")
    assert await process.wait() == ExitStatus(129, "SIGHUP")


async def test_a_pipe_has_no_size(box: Sandbox) -> None:
    process = await box.start(["sleep", "1000"])
    with pytest.raises(NotATerminal, match=process.id):
        await process.resize(24, 80)


async def test_an_impossible_size_is_refused(box: Sandbox) -> None:
    process = await terminal(box, "exec sleep 1000")
    for rows, cols in ((0, 80), (24, 0), (-1, 80), (24, 70_000)):
        with pytest.raises(InvalidParams, match=f"{rows}x{cols}"):
            await process.resize(rows, cols)
        assert (await process.describe()).size == TerminalSize()
        with pytest.raises(InvalidParams, match=f"{rows}x{cols}"):
            await terminal(box, "true", TerminalSize(rows, cols))


async def test_a_terminal_program_gets_a_terminal_type(box: Sandbox) -> None:
    process = await terminal(box, 'test -n "$TERM" && echo named')
    assert await printed(process) == b"named\r\n"


async def test_a_million_bytes_through_a_terminal(box: Sandbox) -> None:
    process = await terminal(box, "seq -f %07.0f 0 131071")
    expected = b"".join(b"%07d\r\n" % i for i in range(131_072))
    assert await printed(process) == expected
