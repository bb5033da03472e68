"""A person left the line editor in some state: the next command of an agent must run as it is, or be refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import holdfast
from holdfast import ExecServerConfig
from holdfast.client.terminal import Terminal
from holdfast.errors import InvalidParams

PATIENCE = 60.0


@pytest.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    (tmp_path / ".bash_profile").write_text("PS1='$ '\nunset HISTFILE PROMPT_COMMAND\n")
    config = ExecServerConfig(spool_directory=str(tmp_path), interrupt_grace_seconds=0.2)
    async with holdfast.connect("inprocess", config=config) as box:
        terminal = await box.terminal(env={"HOME": str(tmp_path), "INPUTRC": "/dev/null"}, cwd=str(tmp_path))
        yield terminal
        await terminal.close("force")


async def settled(terminal: Terminal) -> None:
    """The shell has read the input, and its state was queried."""
    await terminal.wait_until_awaiting_input(PATIENCE)
    await terminal.wait_until_idle(PATIENCE)


async def test_a_line_that_was_completed_by_a_tab(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "unique_name").touch()
    await terminal.send("ls uniq\t")
    await settled(terminal)
    result = await terminal.run("echo hi", PATIENCE)
    assert (result.output, result.exit_code) == ("hi\n", 0)


async def test_a_search_of_the_history(terminal: Terminal) -> None:
    await terminal.run("echo hi; false")
    await terminal.send_keys("C-r")
    await settled(terminal)
    result = await terminal.run("echo hi", PATIENCE)
    assert (result.output, result.exit_code) == ("hi\n", 0)


async def test_a_line_from_the_history(terminal: Terminal) -> None:
    await terminal.run("echo earlier")
    await terminal.send_keys("Up")
    await settled(terminal)
    assert (await terminal.run("echo hi", PATIENCE)).output == "hi\n"


async def test_an_editor_of_lines_in_vi_mode(terminal: Terminal) -> None:
    await terminal.run("set -o vi")
    await terminal.send("half")
    await terminal.send_keys("Escape")
    await settled(terminal)
    result = await terminal.run("echo hi", PATIENCE)
    assert (result.output, result.exit_code) == ("hi\n", 0)


async def test_a_count_before_a_key(terminal: Terminal) -> None:
    await terminal.send_keys("M-3")
    await settled(terminal)
    assert (await terminal.run("echo hi", PATIENCE)).output == "hi\n"


async def test_a_key_that_quotes_the_next(terminal: Terminal) -> None:
    await terminal.send_keys("C-v")
    await settled(terminal)
    assert (await terminal.run("echo hi", PATIENCE)).output == "hi\n"


async def test_a_command_that_a_person_has_begun_over_several_lines(terminal: Terminal) -> None:
    await terminal.send("echo 'open\n")
    await terminal.wait_until_awaiting_input(PATIENCE)
    result = await terminal.run("echo hi", PATIENCE)
    assert (result.output, result.exit_code) == ("hi\n", 0)


async def test_output_that_was_stopped_by_a_key(terminal: Terminal) -> None:
    await terminal.send_keys("C-s", "C-q")
    await settled(terminal)
    assert (await terminal.run("echo hi", PATIENCE)).output == "hi\n"


@pytest.mark.xfail(strict=True, reason="the marks go where the shell's output goes")
async def test_a_shell_whose_output_goes_nowhere(terminal: Terminal) -> None:
    result = await terminal.run("exec >/dev/null 2>&1; (exit 3)", 0.5)
    assert (result.exit_code, result.timed_out) == (3, False)


@pytest.mark.xfail(strict=True, reason="with all four gone nothing puts the marks back")
async def test_a_shell_that_loses_all_of_its_prompts(terminal: Terminal) -> None:
    result = await terminal.run("unset PS1 PS2 PS0 PROMPT_COMMAND", 0.5)
    assert not result.timed_out
    assert (await terminal.run("echo hi", 0.5)).output == "hi\n"


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
async def test_a_time_that_is_none(terminal: Terminal, timeout: float) -> None:
    with pytest.raises(InvalidParams, match="timeout"):
        await terminal.run("echo hi", timeout)


async def test_less_than_no_output(terminal: Terminal) -> None:
    with pytest.raises(InvalidParams, match="max_bytes"):
        await terminal.run("echo hi", max_bytes=-1)
    with pytest.raises(InvalidParams, match="max_bytes"):
        await terminal.read(0, max_bytes=-1)


@pytest.mark.xfail(strict=True, reason="the prompt is not found among what readline draws in so few columns")
async def test_a_terminal_of_two_columns(terminal: Terminal) -> None:
    for rows, cols in ((2, 2), (1, 3), (200, 500)):
        await terminal.resize(rows, cols)
        result = await terminal.run("echo hi", 0.5)
        assert (result.output, result.exit_code) == ("hi\n", 0), (rows, cols)
