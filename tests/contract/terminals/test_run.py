"""Commands typed at a terminal's prompt: their output to the byte, their exit code, and the end of endless ones."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from holdfast.client.terminal import Terminal
from holdfast.errors import InvalidParams, InvalidRequest, TerminalClosed, TimeoutError
from holdfast.testing.sandbox_suite import TIMEOUTS
from tests.contract.terminals.ways import (
    PATIENCE,
    Opener,
    number_in,
    until_event,
    until_gone,
    until_shown,
    until_status,
)
from tests.support.parts import needs
from tests.support.servers import is_alive

# --- what is typed ------------------------------------------------------------------------------------------------

COMMANDS = [
    ("echo hi; (exit 3)", b"hi\r\n", 3),
    ("printf 'no newline'", b"no newline", 0),
    ("printf '\\n\\n'", b"\r\n\r\n", 0),
    (":", b"", 0),
    ("nosuchcommand 2>/dev/null", b"", 127),
    ("echo one\necho two\nfalse", b"one\r\ntwo\r\n", 1),
    ("echo 'a\tb'", b"a\tb\r\n", 0),
    ("ec\\\nho joined", b"joined\r\n", 0),
    ("echo 'wow!' \"really!x\" !$", b"wow! really!x !$\r\n", 0),
    ("cat <<'END'\nin $here\n\tdoc\nEND", b"in $here\r\n\tdoc\r\n", 0),
    ("cat <<-END\n\tindented\n\tEND\necho after", b"indented\r\nafter\r\n", 0),
    ("f() {\n  echo in $1\n}\nf it", b"in it\r\n", 0),
    ("for i in 1 2; do\n  echo $i\ndone", b"1\r\n2\r\n", 0),
    ("# only a comment", b"", 0),
    ("echo end # comment", b"end\r\n", 0),
    ("true &\nwait", None, 0),
    ("echo é 漢字 🙂", "é 漢字 🙂\r\n".encode(), 0),
    ("echo \"$(printf '%s' 'nested \"quotes\"')\"", b'nested "quotes"\r\n', 0),
    ("   echo indented", b"indented\r\n", 0),
    ("echo 'two\nlines'", b"two\r\nlines\r\n", 0),
    ("printf '\\033[31mred\\033[m\\033]0;title\\007'", b"\x1b[31mred\x1b[m\x1b]0;title\x07", 0),
    ("printf 'ends in escape\\033'", b"ends in escape\x1b", 0),
    ("find . -maxdepth 0 -exec echo found {} \\;", b"found .\r\n", 0),
    ("\n\necho trimmed\n\n", b"trimmed\r\n", 0),
    ("echo a | tr a b", b"b\r\n", 0),
    ("echo 'tab\tand\x01control'", b"tab\tand\x01control\r\n", 0),
]


async def test_the_event_of_a_command_has_the_id_of_its_run(opened: Opener, terminal: Terminal) -> None:
    api, start = opened.box.api, (await terminal.read()).token
    ended = await api.run_in_terminal(terminal.id, "cd /\necho two", run_id="mine")
    assert ended.cwd == "/"
    after = (await terminal.read()).token
    await terminal.send("echo typed\n")
    await until_event(terminal, lambda event: event.type == "ended", after)
    events = (await terminal.read(start)).events
    assert [event.run_id for event in events if event.type == "command"] == ["mine", "mine", ""]


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=needs("zsh"))])
async def test_output_and_exit_code_are_exact(opened: Opener, shell: str) -> None:
    terminal = await opened(shell)
    for command, output, code in COMMANDS:
        if shell == "zsh" and "#" in command:
            continue  # on its command line, zsh takes comments only with an option
        result = await terminal.run(command, PATIENCE)
        assert result.exit_code == code, (command, result)
        if output is not None:
            assert result.output_bytes == output, (command, result)
        assert (result.timed_out, result.truncated, result.state) == (False, False, "IDLE")
        assert result.success is (code == 0)
    # Settings of the user stay: nothing of ours is left behind by them.
    assert (await terminal.run("echo $?")).output == "0\n"


async def test_the_status_of_the_command_before_is_there(terminal: Terminal) -> None:
    await terminal.run("(exit 42)")
    assert (await terminal.run("echo $?")).output == "42\n"
    await terminal.run("true | (exit 5) | true")
    assert (await terminal.run("echo ${PIPESTATUS[*]}")).output == "0 5 0\n"


async def test_state_stays(terminal: Terminal, tmp_path: Path) -> None:
    await terminal.run(f"word=kept; cd {tmp_path}; alias greet='echo hello'; set -- a b")
    assert (await terminal.run('greet $word "$*"; pwd')).output == f"hello kept a b\n{tmp_path}\n"
    assert (await terminal.describe()).cwd == str(tmp_path)


@pytest.mark.parametrize(
    "command",
    ["echo 'oops", 'echo "oops', "{ echo a", "cat <<END\nopen", "if true; then", "echo $(true", "echo hi \\"],
)
async def test_a_command_that_is_not_complete_is_refused_at_once(terminal: Terminal, command: str) -> None:
    with pytest.raises(InvalidRequest, match="not complete"):
        await terminal.run(command, PATIENCE)
    assert (await terminal.run("echo on", PATIENCE)).output == "on\n"


@pytest.mark.parametrize("command", ["if true; fi", "(echo a))", "echo a; }; echo b", "&& true"])
async def test_what_the_shell_cannot_parse(terminal: Terminal, command: str) -> None:
    result = await terminal.run(command, PATIENCE)
    assert result.exit_code == 2
    assert "syntax error" in result.output
    assert not result.output.startswith(command[:3])
    assert (await terminal.run("echo on", PATIENCE)).output == "on\n"


@pytest.mark.parametrize("command", ["\0", "echo a\0b", "echo \x1b[201~\n"])
async def test_what_is_no_command(terminal: Terminal, command: str) -> None:
    with pytest.raises(InvalidParams):
        await terminal.run(command)
    assert (await terminal.run("echo on")).output == "on\n"


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=needs("zsh"))])
async def test_an_empty_command_changes_nothing_as_in_a_shell(opened: Opener, shell: str) -> None:
    terminal, beside = await opened(shell), await opened.box.shell(shell)
    for before, code in (("(exit 3)", 3), ("true", 0)):
        await terminal.run(before, PATIENCE)
        await beside.run(before)
        for empty in ("", "  ", "\n\n", "\t\n "):
            result = await terminal.run(empty, PATIENCE)
            assert (result.output, result.exit_code, result.state) == ("", code, "IDLE")
            expected = await beside.run(empty)
            assert (expected.stdout, expected.exit_code) == ("", code)
    await beside.close()
    assert (await terminal.run("echo on", PATIENCE)).output == "on\n"


CONTINUATIONS = [("echo 'oops", "' on"), ("if true; then", "echo on; fi"), ("cat <<END", "on\nEND")]


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=needs("zsh"))])
async def test_at_a_continuation_prompt_the_terminal_is_not_idle(opened: Opener, shell: str) -> None:
    terminal = await opened(shell)
    await terminal.run("(exit 3)", PATIENCE)
    for first, rest in CONTINUATIONS:
        since = (await terminal.describe()).token
        await terminal.send(f"{first}\n")
        status = await until_status(terminal, lambda status: status.continuation)
        assert (status.state, status.reason) == ("BUSY", "")
        with pytest.raises(TimeoutError, match="continuation prompt"):
            await terminal.wait_until_idle(0.05)
        status = await terminal.wait_until_awaiting_input(PATIENCE)
        assert (status.state, status.continuation, status.awaiting_input) == ("BUSY", True, True)
        event = await until_event(terminal, lambda event: event.type == "continuation", since)
        assert event.state == "BUSY"
        await terminal.send(f"{rest}\n")
        status = await terminal.wait_until_idle(PATIENCE)
        assert (status.state, status.continuation, status.last_exit_code) == ("IDLE", False, 0)
        types = [event.type for event in (await terminal.read(since)).events if event.type in ("command", "ended")]
        assert types == ["command", "ended"]


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=needs("zsh"))])
async def test_a_continuation_prompt_can_be_left(opened: Opener, shell: str) -> None:
    terminal = await opened(shell)
    await terminal.send("echo 'oops\n")
    await until_status(terminal, lambda status: status.continuation)
    await terminal.send_keys("C-c")
    status = await terminal.wait_until_idle(PATIENCE)
    assert (status.state, status.continuation) == ("IDLE", False)
    await terminal.send("echo 'oops\n")
    await until_status(terminal, lambda status: status.continuation)
    assert (await terminal.run("echo on", PATIENCE)).output == "on\n"
    assert not (await terminal.describe()).continuation
    assert not terminal.continuation


async def test_a_line_that_is_completed_while_its_end_is_waited_for(opened: Opener) -> None:
    agent = await opened()
    person = await opened.box.open_terminal(agent.id)
    await person.send("echo 'one\n")
    await until_status(person, lambda status: status.continuation)
    waiting = asyncio.create_task(agent.wait_until_idle(PATIENCE))
    await person.send("two'; (exit 4)\n")
    assert (await waiting).last_exit_code == 4


@pytest.mark.parametrize("jobs", ["kill", "keep"])
async def test_closing_at_a_continuation_prompt(terminal: Terminal, jobs: str) -> None:
    await terminal.send("echo 'oops\n")
    await until_status(terminal, lambda status: status.continuation)
    status = await terminal.close(jobs=jobs)  # type: ignore[arg-type]
    assert (status.state, status.continuation) == ("CLOSED", False)
    assert status.signal is None  # it was left by `exit`


async def test_a_prompt_tells_the_directory(terminal: Terminal, tmp_path: Path) -> None:
    since = (await terminal.describe()).token
    for name in ("one", "two words", "é\n"):
        (tmp_path / name).mkdir()
        await terminal.run(f"cd '{tmp_path}/{name}'", PATIENCE)
        event = await until_event(terminal, lambda event: event.type == "prompt", since)
        assert event.cwd == f"{tmp_path}/{name}"
        since = event.token
    others = [event.cwd for event in (await terminal.read()).events if event.type != "prompt"]
    assert set(others) == {None}


async def test_a_command_of_200_kb(terminal: Terminal) -> None:
    text = "".join(f"line {number} of many\n" for number in range(10_000))
    result = await terminal.run(f"word='{text}'; printf %s \"$word\" | cksum; echo ${{#word}}", PATIENCE)
    assert result.exit_code == 0
    assert result.output.split("\n")[-2] == str(len(text))
    one_line = "x" * 200_000
    result = await terminal.run(f"word={one_line}; echo ${{#word}}", PATIENCE)
    assert result.output == "200000\n"


async def test_many_megabytes_of_output_are_exact(terminal: Terminal, tmp_path: Path) -> None:
    expected = b"".join(b"%d\r\n" % number for number in range(1, 700_001))
    assert len(expected) > 5_000_000
    result = await terminal.run("seq 700000", PATIENCE)
    assert len(result.output_bytes) == len(expected)
    assert result.output_bytes == expected
    assert not result.truncated


async def test_of_more_than_is_wanted_the_latest_is_returned(terminal: Terminal) -> None:
    result = await terminal.run("seq 100000", max_bytes=14)
    assert (result.output_bytes, result.truncated) == (b"9999\r\n100000\r\n"[-14:], True)


async def test_every_byte_arrives(terminal: Terminal, tmp_path: Path) -> None:
    data = bytes(range(256)) * 3 + b"\xff\xfe\x00 \xe2\x82\x1b]133;"
    (tmp_path / "data").write_bytes(data)
    await terminal.run("stty -opost")
    for _ in range(5):
        assert (await terminal.run(f"cat {tmp_path}/data", PATIENCE)).output_bytes == data
    await terminal.run("stty opost")


async def test_marks_that_a_program_forges_are_output(terminal: Terminal) -> None:
    forged = "\\033]133;D;0\\007\\033]133;A\\007\\033]133;B\\007\\033]133;C\\007" + f"\\033]133;D;0;{7:032}\\007"
    result = await terminal.run(f"printf '{forged}'; echo still here; (exit 4)", PATIENCE)
    raw = forged.replace("\\033", "\x1b").replace("\\007", "\x07").encode()
    assert result.output_bytes == raw + b"still here\r\n"
    assert result.exit_code == 4
    # The nonce is not in the reach of what runs in the terminal.
    found = await terminal.run("env; set | grep -c 'e]133' ; true", PATIENCE)
    assert "133;" not in (await terminal.run("env", PATIENCE)).output
    assert found.exit_code == 0


async def test_tokens_say_where_the_output_is(terminal: Terminal) -> None:
    result = await terminal.run("seq 5")
    found = await terminal.read(result.start_token)
    output = b"".join(e.payload for e in found.events if e.type == "output" and e.token <= result.end_token)
    assert output == result.output_bytes
    assert result.duration >= 0


# --- several, and people in between -------------------------------------------------------------------------------


async def test_several_callers_are_served_in_their_order(opened: Opener) -> None:
    terminal = await opened(id="busy")
    other = await opened.box.open_terminal("busy")
    await terminal.run("log=")
    handles = [terminal, other]
    results = await asyncio.gather(
        *(handles[number % 2].run(f"log=${{log}}{number},; echo {number}", PATIENCE) for number in range(10))
    )
    assert [result.output for result in results] == [f"{number}\n" for number in range(10)]
    assert (await terminal.run("echo $log")).output == "0,1,2,3,4,5,6,7,8,9,\n"


async def test_a_person_interrupts_the_command_of_an_agent(opened: Opener) -> None:
    agent = await opened()
    person = await opened.box.open_terminal(agent.id)
    running = asyncio.create_task(agent.run("sh -c 'echo up:$((1+1)); exec sleep 1000'"))
    await until_shown(person, b"up:2")
    await person.send_keys("C-c")
    result = await running
    assert (result.exit_code, result.timed_out, result.state) == (130, False, "IDLE")
    assert result.output == "up:2\n^C\n"


async def test_a_person_answers_the_command_of_an_agent(opened: Opener) -> None:
    agent = await opened()
    person = await opened.box.open_terminal(agent.id)
    running = asyncio.create_task(agent.run("read -p 'go on? ' word; echo so:$word"))
    await until_shown(person, b"go on? ")
    await person.wait_until_awaiting_input(PATIENCE)
    await person.send("yes\n")
    assert (await running).output == "go on? yes\nso:yes\n"


async def test_an_agent_waits_for_the_prompt_of_a_person(opened: Opener, tmp_path: Path) -> None:
    person = await opened()
    agent = await opened.box.open_terminal(person.id)
    await person.send("cat\n")
    await person.wait_until_awaiting_input(PATIENCE)
    with pytest.raises(TimeoutError, match="is busy"):
        await agent.run("echo early", 0.02)
    running = asyncio.create_task(agent.run("echo mine", PATIENCE))
    await person.send("typed\n")
    await until_shown(person, b"typed\r\ntyped\r\n")
    await person.send_keys("C-d")
    assert (await running).output == "mine\n"


async def test_a_command_has_its_time_while_others_are_before_it(terminal: Terminal) -> None:
    first = asyncio.create_task(terminal.run("sleep 1000"))
    await until_event(terminal, lambda event: event.type == "command")
    try:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(TimeoutError, match="is busy"):
                await terminal.run("echo late", 0.02)
    finally:
        first.cancel()
        await asyncio.wait([first])


# --- those that do not end ----------------------------------------------------------------------------------------


async def test_a_timeout_interrupts(terminal: Terminal) -> None:
    for timeout in TIMEOUTS:
        result = await terminal.run("sh -c 'echo $$; exec sleep 1000'", timeout)
        assert (result.exit_code, result.timed_out, result.state) == (124, True, "IDLE")
        if result.output[:1].isdigit():
            break
    await until_gone(number_in(result.output.split("\n")[0]))
    assert (await terminal.run("echo on")).output == "on\n"
    assert terminal.pid == (await terminal.describe()).pid


@pytest.mark.parametrize(
    "command",
    [
        "for ((;;)); do :; done",
        "while sleep 0.01; do :; done",
        "(trap '' INT; echo up; sleep 1000)",
        "sh -c 'trap \"\" INT TERM HUP; echo up; while :; do sleep 0.01; done'",
        "cat",
        "read word",
        "stty raw -echo; sleep 1000; stty sane",
        "python3 -c 'input()'",
    ],
)
async def test_whatever_does_not_end_is_ended_and_the_shell_stays(terminal: Terminal, command: str) -> None:
    result = await terminal.run(f"word=kept; {command}", 0.1)
    assert (result.exit_code, result.timed_out, result.state) == (124, True, "IDLE")
    await terminal.run("stty sane")
    assert (await terminal.run("echo $word", PATIENCE)).output == "kept\n"


async def test_a_call_that_is_cancelled_interrupts_its_command(terminal: Terminal) -> None:
    before = (await terminal.describe()).token
    running = asyncio.create_task(terminal.run("sh -c 'echo pid:$$; exec sleep 1000'; echo never"))
    text = await until_shown(
        terminal, b"\r\n", (await until_event(terminal, lambda e: e.type == "command", before)).token
    )
    pid = number_in(text.decode())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until_gone(pid)
    assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 130
    assert (await terminal.run("echo on", PATIENCE)).output == "on\n"


async def test_a_call_that_is_cancelled_before_its_turn_types_nothing(opened: Opener, tmp_path: Path) -> None:
    terminal = await opened()
    os.mkfifo(tmp_path / "go")
    first = asyncio.create_task(terminal.run(f"read x < {tmp_path}/go; echo first"))
    await until_event(terminal, lambda event: event.type == "command")
    second = asyncio.create_task(terminal.run(f"touch {tmp_path}/never"))
    third = asyncio.create_task(terminal.run("echo third", PATIENCE))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    await asyncio.to_thread((tmp_path / "go").write_text, "x\n")
    assert (await first).output == "first\n"
    assert (await third).output == "third\n"
    assert not (tmp_path / "never").exists()


# --- those that end the shell -------------------------------------------------------------------------------------


async def test_a_command_that_ends_the_shell(terminal: Terminal) -> None:
    result = await terminal.run("echo bye; exit 3", PATIENCE)
    assert (result.exit_code, result.state) == (3, "CLOSED")
    assert result.output.startswith("bye\n")
    assert "exit code 3" in result.reason
    assert (await terminal.describe()).exit_code == 3
    with pytest.raises(TerminalClosed, match="exit code 3"):
        await terminal.run("true")
    with pytest.raises(TerminalClosed):
        await terminal.send_keys("Enter")


async def test_a_command_that_kills_the_shell(terminal: Terminal) -> None:
    result = await terminal.run("kill -KILL $$", PATIENCE)
    assert (result.exit_code, result.state) == (137, "ERROR")
    assert "SIGKILL" in result.reason
    status = await terminal.describe()
    assert (status.state, status.signal, status.exit_code) == ("ERROR", "SIGKILL", 137)


async def test_a_shell_that_becomes_another_program(opened: Opener) -> None:
    terminal = await opened()
    result = await terminal.run("exec sh -c 'echo other; exit 6'", PATIENCE)
    assert (result.exit_code, result.state, result.output) == (6, "CLOSED", "other\n")
    terminal = await opened()
    result = await terminal.run("exec cat", 0.1)
    assert (result.timed_out, result.exit_code) == (True, 124)
    assert result.state in ("BUSY", "ERROR")


async def test_a_shell_in_the_shell(terminal: Terminal) -> None:
    """An inner shell has no marks: its prompt is no end of the command that started it."""
    running = asyncio.create_task(terminal.run("sh", PATIENCE))
    await until_event(terminal, lambda event: event.type == "command")
    await until_status(terminal, lambda status: status.foreground == "sh" and bool(status.awaiting_input))
    await terminal.send("echo in:$((1+1)); exit 5\n")
    result = await running
    assert result.exit_code == 5
    assert "in:2\n" in result.output


async def test_options_that_would_end_other_tools(terminal: Terminal) -> None:
    for command, code in (
        ("set -u", 0),
        ("set -x; set +x", 0),
        ("PS1='foo> '", 0),
        ("PROMPT_COMMAND='echo PC'", 0),
    ):
        assert (await terminal.run(command, PATIENCE)).exit_code == code
    assert (await terminal.run("echo on", PATIENCE)).output == "on\n"
    assert terminal.pid == (await terminal.describe()).pid
    assert (await terminal.describe()).prompt == "foo> "
    result = await terminal.run("set -e; false", PATIENCE)
    assert (result.exit_code, result.state) == (1, "CLOSED")


async def test_a_background_job_does_not_hold_the_command(terminal: Terminal) -> None:
    result = await terminal.run("sleep 1000 & echo $!", PATIENCE)
    pid = number_in(result.output.split("\n")[-2])
    assert is_alive(pid)
    assert result.exit_code == 0
    await terminal.close()
    await until_gone(pid)
