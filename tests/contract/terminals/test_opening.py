"""Options of a new terminal, and its description, over several ways."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from holdfast import Sandbox, TerminalSize
from holdfast.errors import (
    CommandNotFound,
    CwdNotFound,
    DuplicateProcess,
    InvalidParams,
    InvalidRequest,
    LimitReached,
    TimeoutError,
    UnknownTerminal,
    UnknownUser,
)
from holdfast.types import TerminalSpec
from tests.contract.terminals.ways import (
    PATIENCE,
    TERMINAL_SETTINGS,
    Opener,
    is_root,
    make_home,
    terminal_box,
    until_shown,
)
from tests.contract.ways import WAYS
from tests.support.servers import RunningServer


@pytest.mark.parametrize("way", WAYS)
async def test_the_whole_of_it_over_every_way(way: str, terminal_server: RunningServer, tmp_path: Path) -> None:
    async with terminal_box(way, terminal_server) as box:
        terminal = await Opener(box, make_home(tmp_path))(id="whole", rows=30, cols=100)
        assert (terminal.id, terminal.state, terminal.prompt, terminal.size) == (
            "whole",
            "IDLE",
            "$ ",
            TerminalSize(30, 100),
        )
        result = await terminal.run("printf 'a\\377b\\n'; stty size; (exit 7)")
        assert (result.output_bytes, result.exit_code, result.state) == (b"a\xffb\r\n30 100\r\n", 7, "IDLE")
        await terminal.send("read word; echo got:$word\n")
        await terminal.wait_until_awaiting_input(PATIENCE)
        await terminal.send("it\n")
        await until_shown(terminal, b"got:it\r\n")
        assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 0
        assert "got:it" in (await terminal.screen()).lines
        assert (await terminal.close()).state == "CLOSED"


async def test_it_is_described(opened: Opener) -> None:
    terminal = await opened(id="described", rows=20, cols=70)
    status = await terminal.describe()
    assert (status.terminal_id, status.argv, status.integration) == ("described", ("/bin/bash",), "bash")
    assert (status.state, status.prompt, status.size, status.cwd) == (
        "IDLE",
        "$ ",
        TerminalSize(20, 70),
        str(opened.home),
    )
    assert (status.exit_code, status.signal, status.reason, status.last_exit_code) == (None, None, "", None)
    assert (status.input_queued, status.queue) == (0, "empty")
    assert (status.bracketed_paste, status.alternate_screen, status.application_cursor) == (True, False, False)
    status = await terminal.wait_until_awaiting_input(PATIENCE)
    assert (status.foreground, status.foreground_pid, status.awaiting_input) == ("bash", terminal.pid, True)
    assert not status.password_prompt
    unseen = await opened.box.api.describe_terminal("described", look=False)
    assert (unseen.awaiting_input, unseen.foreground, unseen.echo) == (None, "bash", status.echo)
    assert (unseen.state, unseen.canonical, unseen.token) == ("IDLE", status.canonical, status.token)
    again = await opened.box.open_terminal("described")
    assert (again.pid, again.state) == (terminal.pid, "IDLE")
    assert [each.id for each in await opened.box.terminals()] == ["described"]
    assert (await opened.box.status()).terminals == 1
    assert "terminal" in (await opened.box.info()).features
    (info,) = [process for process in await opened.box.processes() if process.id == "described"]
    assert (await info.describe()).tty


async def test_what_it_is_given_to_start_with(opened: Opener, tmp_path: Path) -> None:
    location = tmp_path / "place"
    location.mkdir()
    terminal = await opened(cwd=str(location), env={"WORD": "given"}, term="vt220", locale="C", rows=11, cols=66)
    result = await terminal.run('echo "$WORD $TERM $LANG $PWD ${LINES-} $(stty size) $-"; shopt login_shell')
    words = result.output.split()
    assert words[:4] == ["given", "vt220", "C", str(location)]
    assert words[-5:-3] == ["11", "66"] or "11 66" in result.output
    assert "i" in words[-3]
    assert words[-2:] == ["login_shell", "on"]
    plain = await opened(login=False)
    result = await plain.run("echo $TERM ${LANG:-none}; shopt login_shell")
    assert result.output.split()[0] == "xterm-256color"
    assert result.output.split()[-1] == "off"
    assert plain.prompt == "$ "


async def test_a_locale_is_named_if_the_environment_names_none(opened: Opener) -> None:
    terminal = await opened(env={"LANG": "", "LC_ALL": "", "LC_CTYPE": ""})
    assert (await terminal.run("echo $LANG; printf '\\u00e9\\n'")).output == "C.UTF-8\né\n"


async def test_any_program_can_run_in_it(opened: Opener) -> None:
    terminal = await opened(["sh", "-c", "echo hello; read x; exit 4"])
    assert (terminal.status.integration, terminal.prompt) == ("", None)
    await until_shown(terminal, b"hello\r\n")
    status = await terminal.wait_until_awaiting_input(PATIENCE)
    assert (status.state, status.foreground) == ("RUNNING", "sh")
    with pytest.raises(InvalidRequest, match="does not mark its prompt"):
        await terminal.run("true")
    await terminal.send("\n")
    assert (await terminal.wait(PATIENCE)).exit_code == 4
    status = await terminal.describe()
    assert (status.state, status.exit_code) == ("CLOSED", 4)


async def test_a_shell_without_marks_takes_what_is_typed(opened: Opener) -> None:
    terminal = await opened(integration=False)
    assert terminal.status.integration == ""
    await terminal.send("echo sum:$((20 + 3))\n")
    await until_shown(terminal, b"sum:23\r\n")
    assert (await terminal.describe()).state == "RUNNING"
    with pytest.raises(TimeoutError, match="shows no prompt"):
        await terminal.wait_until_idle(0.01)


@pytest.mark.skipif(not is_root(), reason="only root may become another user")
async def test_another_user(opened: Opener, tmp_path: Path) -> None:
    for location in (tmp_path, *tmp_path.parents):
        if location == Path(tempfile.gettempdir()):
            break
        location.chmod(0o755)
    terminal = await opened(user="nobody")
    assert (await terminal.run("id -un; tty | xargs stat -c %U")).output == "nobody\nnobody\n"
    assert terminal.state == "IDLE"
    assert (await terminal.describe()).user == "nobody"
    assert (await terminal.wait_until_awaiting_input(PATIENCE)).foreground == "bash"
    await terminal.close()


async def test_what_cannot_be_opened(opened: Opener) -> None:
    with pytest.raises(CommandNotFound, match="nosuchprogram"):
        await opened("nosuchprogram")
    with pytest.raises(CwdNotFound, match="/nowhere"):
        await opened(cwd="/nowhere")
    with pytest.raises(UnknownUser, match="nosuchuser"):
        await opened(user="nosuchuser")
    for rows, cols in ((0, 80), (24, 0), (-1, 80), (24, 70_000)):
        with pytest.raises(InvalidParams):
            await opened(rows=rows, cols=cols)
    with pytest.raises(InvalidParams):
        await opened([])
    with pytest.raises(InvalidParams, match="empty"):
        await opened.box.api.open_terminal(TerminalSpec("empty", ()))
    assert await opened.box.terminals() == []
    assert await opened.box.processes() == []


async def test_ids(opened: Opener) -> None:
    terminal = await opened(id="one")
    with pytest.raises(DuplicateProcess, match="'one'"):
        await opened(id="one")
    await opened.box.start(["sleep", "1000"], id="process")
    with pytest.raises(DuplicateProcess, match="'process'"):
        await opened(id="process")
    with pytest.raises(DuplicateProcess, match="'one'"):
        await opened.box.start(["true"], id="one")
    with pytest.raises(UnknownTerminal, match="is a process and no terminal"):
        await opened.box.open_terminal("process")
    with pytest.raises(UnknownTerminal, match="'two'"):
        await opened.box.open_terminal("two")
    spec = TerminalSpec("again", argv=("sh",), start_id="attempt")
    first, second = await asyncio.gather(*(opened.box.api.open_terminal(spec) for _ in range(2)))
    third = await opened.box.api.open_terminal(spec)
    assert first.pid == second.pid == third.pid
    await (await opened.box.process("process")).terminate(force=True)
    await terminal.close()


async def test_every_call_knows_that_there_is_no_such_terminal(box: Sandbox) -> None:
    api = box.api
    for call in (
        api.read_terminal("no"),
        api.run_in_terminal("no", "true"),
        api.press_keys("no", ["Enter"]),
        api.wait_terminal("no", "idle"),
        api.close_terminal("no"),
        api.describe_terminal("no"),
    ):
        with pytest.raises(UnknownTerminal, match="'no'"):
            await call


async def test_so_many_may_be_open(opened: Opener) -> None:
    limit = int(TERMINAL_SETTINGS["max_terminals"])
    several = [await opened(["cat"]) for _ in range(limit)]
    with pytest.raises(LimitReached, match="max_terminals"):
        await opened(["cat"])
    await several[0].close()
    assert (await opened(["cat"])).state == "RUNNING"


async def test_so_many_may_be_opened_at_once(opened: Opener) -> None:
    limit = int(TERMINAL_SETTINGS["max_terminals"])
    several = await asyncio.gather(*(opened(["cat"]) for _ in range(limit)))
    assert [terminal.state for terminal in several] == ["RUNNING"] * limit
