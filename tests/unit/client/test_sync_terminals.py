"""The blocking facade of terminals, over real shells of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast.sync
from holdfast.client.screen.asciicast import read_cast
from holdfast.errors import InvalidParams, TerminalClosed, TimeoutError, UnknownTerminal
from holdfast.types import TerminalSize

PATIENCE_SECONDS = 60.0


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[holdfast.sync.Sandbox]:
    """Without the profile of the user that runs the tests."""
    (tmp_path / ".bash_profile").write_text("PS1='prompt> '\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with holdfast.sync.connect("inprocess") as box:
        yield box


def test_commands_state_and_screen(box: holdfast.sync.Sandbox) -> None:
    with box.terminal("bash", id="t", rows=10, cols=60) as t:
        assert (t.id, t.size, t.prompt, t.state) == ("t", TerminalSize(10, 60), "prompt> ", "IDLE")
        assert t.pid == t.describe().pid > 0
        result = t.run("echo hi; false", PATIENCE_SECONDS)
        assert (result.output, result.exit_code) == ("hi\n", 1)
        assert t.screen().lines[:3] == ("prompt> echo hi; false", "hi", "prompt>")
        drawn, token = t.redraw()
        assert b"hi" in drawn
        assert token == t.describe().token
        t.resize(12, 70)
        assert t.describe().size == TerminalSize(12, 70)
        assert box.open_terminal("t").pid == t.pid
        assert [one.id for one in box.terminals()] == ["t"]
        assert t.run("exit 3", PATIENCE_SECONDS).state == "CLOSED"
        assert t.wait(PATIENCE_SECONDS).exit_code == 3
    assert t.state == "CLOSED"
    with pytest.raises(TerminalClosed):
        t.run("true")
    with pytest.raises(UnknownTerminal):
        box.open_terminal("nobody")


def test_a_continuation_prompt_and_what_is_expected(box: holdfast.sync.Sandbox) -> None:
    with box.terminal("bash") as t:
        assert (t.run("", PATIENCE_SECONDS).output, t.continuation) == ("", False)
        t.send("echo 'one\n")
        typed = t.expect("echo 'one", PATIENCE_SECONDS)
        assert t.expect("> ", PATIENCE_SECONDS).token > t.expect("echo", since=0).token
        assert typed.text == "echo 'one"
        t.wait_until_awaiting_input(PATIENCE_SECONDS)
        assert t.describe().continuation
        t.send("two'\n")
        t.expect("one\r\ntwo\r\n", PATIENCE_SECONDS)
        assert not t.wait_until_idle(PATIENCE_SECONDS).continuation


def test_a_program_that_waits_for_input(box: holdfast.sync.Sandbox) -> None:
    with box.terminal("bash", record_input=True) as t:
        t.send("cat\n")
        assert t.wait_until_awaiting_input(PATIENCE_SECONDS).foreground == "cat"
        assert t.awaiting_input is True
        with pytest.raises(TimeoutError):
            t.wait_until_idle(0.01)
        t.send("one\n")
        t.wait_until_awaiting_input(PATIENCE_SECONDS)
        t.send_keys("C-d")
        assert t.wait_until_idle(PATIENCE_SECONDS).last_exit_code == 0
        t.send("cat\n")
        t.wait_until_awaiting_input(PATIENCE_SECONDS)
        t.control("CTRL_C")
        assert t.wait_until_idle(PATIENCE_SECONDS).last_exit_code == 130
        t.paste("echo pasted")
        t.send_keys("Enter")
        t.wait_until_idle(PATIENCE_SECONDS)
        typed = b"".join(
            event.data for event in read_cast(t.recording(input=True).splitlines()).events if event.code == "i"
        )
        assert typed.startswith(b"cat\none\n\x04cat\n\x03")
        with pytest.raises(InvalidParams):
            t.control("CTRL_Z")  # type: ignore[arg-type]


def test_output_is_streamed_and_read_again(box: holdfast.sync.Sandbox) -> None:
    t = box.terminal(["sh", "-c", "echo one; read x; echo two:$x"])
    with t.output() as output:
        seen = b""
        while b"one\r\n" not in seen:
            seen += next(output)
        t.send("go\n")
        seen += b"".join(output)
    assert seen == b"one\r\ngo\r\ntwo:go\r\n"
    assert [event.state for event in t.events() if event.type == "state"] == ["CLOSED"]
    found = t.read(0)
    assert b"".join(event.payload for event in found.events if event.type == "output") == seen
    assert t.close().exit_code == 0
    t.release()


def test_a_signal_ends_what_is_in_front(box: holdfast.sync.Sandbox) -> None:
    t = box.terminal(["sh", "-c", "echo ready; exec sleep 1000"])
    with t.output() as output:
        assert next(output) == b"ready\r\n"
    t.signal("TERM")
    assert t.wait(PATIENCE_SECONDS).signal == "SIGTERM"
    assert t.describe().state == "ERROR"
