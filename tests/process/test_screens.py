"""Real programs on a real PTY, and what a person sees of them, by both backends.

Each program's bytes go to both emulators at once. A test waits until the screen shows what it must show, then reads
whole lines. Where both backends are right they are compared; one test shows where pyte is wrong.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unicodedata import normalize

import msgspec
import pytest

from holdfast.client.screen.screen import Emulator, Screen, emulator
from holdfast.runtime.terminal.input_wait import input_state
from holdfast.runtime.terminal.keys import encode_keys
from tests.support.parts import require
from tests.support.signalling import kill_group

pytest.importorskip("pyghostty")
pytest.importorskip("pyte")

#: How long a screen may take to appear before the test fails; nothing waits this long when all is well.
PATIENCE = 60.0
CONTROLLING = (
    "import fcntl,os,sys,termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


#: The terminal is hung up when its session's leader ends, and what was not read by then may be lost: so it stays.
HOLDING = '"$@"; read -r _'


def composed(screen: Screen) -> Screen:
    """The screen with composed characters, as pyte keeps them."""
    return msgspec.structs.replace(screen, lines=tuple(normalize("NFC", line) for line in screen.lines))


class Watched:
    """A program on a PTY, watched by both emulators."""

    def __init__(self, argv: list[str], home: Path, rows: int, cols: int) -> None:
        require(argv[0])
        self.ghostty: Emulator = emulator(rows, cols, backend="ghostty")
        self.pyte: Emulator = emulator(rows, cols, backend="pyte")
        self.master, terminal = os.openpty()
        self._set_size(rows, cols)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CONTROLLING, "sh", "-c", HOLDING, "sh", *argv],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=home,
            start_new_session=True,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "TERM": "xterm-256color",
                "LC_ALL": "C.UTF-8",
                "LESSHISTFILE": "-",
                "PS1": "$ ",
                "TMUX_TMPDIR": str(home),
            },
        )
        os.close(terminal)

    def _set_size(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def until_it_waits(self) -> None:
        """Wait until the program reads keys: vim and bash handle an earlier signal with the next key only."""
        deadline = time.monotonic() + PATIENCE
        while input_state(self.master).awaiting is False:
            assert time.monotonic() < deadline, "the program never waited for input"
            time.sleep(0.005)

    def resize(self, rows: int, cols: int) -> None:
        self.ghostty.resize(rows, cols)
        self.pyte.resize(rows, cols)
        self._set_size(rows, cols)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def press(self, *keys: str, application_cursor: bool = False) -> None:
        os.write(self.master, encode_keys(keys, application_cursor=application_cursor))

    def until(self, shows: Callable[[Screen], bool]) -> Screen:
        """The first screen of which this is true."""
        deadline = time.monotonic() + PATIENCE
        while not shows(screen := self.ghostty.screen()):
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                pytest.fail(f"the screen never showed it:\n{screen.text}")
            if not self._read():
                screen = self.ghostty.screen()
                assert shows(screen), f"the program ended with this screen:\n{screen.text}"
        return screen

    def _read(self) -> bool:
        try:
            data = os.read(self.master, 65536)
        except OSError:  # EIO: the last program on the terminal is gone
            return False
        self.ghostty.feed(data)
        self.pyte.feed(data)
        return bool(data)

    def close(self) -> None:
        if self.process.poll() is None:
            kill_group(self.process.pid)
            self.process.wait()
        os.close(self.master)
        self.ghostty.close()
        self.pyte.close()


Start = Callable[..., Watched]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Watched] = []

    def begin(*argv: str, rows: int = 10, cols: int = 40) -> Watched:
        started.append(Watched(list(argv), tmp_path, rows, cols))
        return started[-1]

    yield begin
    for watched in started:
        watched.close()


def test_vim_edits_a_file(start: Start, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("one\ntwo\nthree\n")
    shell = start("bash", "--norc", "--noprofile")
    shell.until(lambda screen: screen.text == "$")
    shell.type("vim -u NONE -i NONE -n notes\r")
    screen = shell.until(lambda screen: screen.lines[0] == "one" and screen.lines[9].startswith('"notes"'))
    assert screen.lines[:9] == ("one", "two", "three", "~", "~", "~", "~", "~", "~")
    assert screen.alternate
    screen = shell.until(lambda screen: screen.cursor == (0, 0))
    assert shell.pyte.screen() == screen

    shell.press("Down", application_cursor=True)
    shell.type("o你好 e\u0301")
    shell.until(lambda screen: screen.cursor == (2, 6))
    shell.press("Escape")
    shell.until(lambda screen: screen.cursor == (2, 5))
    shell.press("Down", application_cursor=True)
    shell.type("A!")
    shell.until(lambda screen: screen.cursor == (3, 6))
    shell.press("Escape")
    screen = shell.until(lambda screen: screen.cursor == (3, 5))
    assert screen.lines[:5] == ("one", "two", "你好 e\u0301", "three!", "~")
    assert shell.pyte.screen() == composed(screen)
    shell.type(":set nu nuw=4\r")
    screen = shell.until(lambda screen: screen.lines[3] == "  4 three!")
    assert screen.lines[:4] == ("  1 one", "  2 two", "  3 你好 e\u0301", "  4 three!")
    assert shell.pyte.screen().lines == composed(screen).lines

    shell.type(":wq\r")
    screen = shell.until(lambda screen: not screen.alternate and screen.lines[1] == "$")
    assert screen.lines[:3] == ("$ vim -u NONE -i NONE -n notes", "$", "")
    assert screen.cursor == (1, 2)
    assert screen.cursor_visible
    assert shell.pyte.screen() == screen
    assert (tmp_path / "notes").read_text() == "one\ntwo\n你好 e\u0301\nthree!\n"


def test_vim_draws_again_after_a_resize(start: Start, tmp_path: Path) -> None:
    (tmp_path / "long").write_text("".join(f"line {number}\n" for number in range(100)))
    vim = start("vim", "-u", "NONE", "-i", "NONE", "-n", "long")
    vim.until(lambda screen: screen.lines[9].startswith('"long"'))
    vim.until_it_waits()
    vim.resize(20, 60)
    screen = vim.until(lambda screen: screen.lines[18] == "line 18")
    assert screen.lines[:19] == tuple(f"line {number}" for number in range(19))
    vim.type("50Gzt")
    screen = vim.until(lambda screen: screen.lines[0] == "line 49" and screen.lines[18] == "line 67")
    assert screen.lines[:19] == tuple(f"line {number}" for number in range(49, 68))
    assert vim.pyte.screen() == screen


def test_a_restored_vim_looks_the_same_and_leaves_the_same_shell(start: Start, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("one\n")
    shell = start("bash", "--norc", "--noprofile")
    shell.until(lambda screen: screen.text == "$")
    shell.type("echo before\r")
    shell.until(lambda screen: screen.lines[1:3] == ("before", "$"))
    shell.type("vim -u NONE -i NONE -n notes\r")
    shown = shell.until(lambda screen: screen.lines[0] == "one" and screen.lines[9].startswith('"notes"'))
    attached = emulator(10, 40, backend="ghostty")
    attached.feed(shell.ghostty.restore())
    assert attached.screen() == shown
    attached.feed(b"\x1b[?1049l")
    assert attached.screen().lines[1:3] == ("before", "$ vim -u NONE -i NONE -n notes")
    attached.close()


def test_less_pages_and_searches(start: Start, tmp_path: Path) -> None:
    (tmp_path / "long").write_text("".join(f"line {number}\n" for number in range(100)))
    less = start("less", "long")
    screen = less.until(lambda screen: screen.lines[-1] == "long")
    assert screen.lines[:9] == tuple(f"line {number}" for number in range(9))
    assert screen.alternate
    assert less.pyte.screen() == screen
    less.press("Space")
    screen = less.until(lambda screen: screen.lines[-1] == ":")
    assert screen.lines[:9] == tuple(f"line {number}" for number in range(9, 18))
    less.press("Up", application_cursor=True)
    screen = less.until(lambda screen: screen.lines[0] == "line 8" and screen.lines[-1] == ":")
    assert screen.lines[:9] == tuple(f"line {number}" for number in range(8, 17))
    less.type("/line 9.\r")
    less.until(lambda screen: screen.lines[0] == "line 90")
    less.type("G")
    screen = less.until(lambda screen: screen.lines[-1] == "(END)")
    assert screen.lines[:9] == tuple(f"line {number}" for number in range(91, 100))
    assert less.pyte.screen() == screen
    less.type("q")
    assert not less.until(lambda screen: not screen.alternate).alternate


def test_top_shows_its_table(start: Start) -> None:
    top = start("top", rows=24, cols=80)
    screen = top.until(lambda screen: "COMMAND" in screen.lines[6] and screen.lines[7] != "")
    assert screen.lines[0].startswith("top - ")
    assert "load average" in screen.lines[0]
    assert screen.lines[1].startswith("Tasks:")
    assert screen.lines[5] == ""
    assert screen.lines[6].split()[:3] == ["PID", "USER", "PR"]
    assert screen.lines[7].split()[0].isdigit()
    assert top.pyte.screen() == screen
    top.type("q")
    screen = top.until(lambda screen: screen.cursor_visible)
    assert top.pyte.screen() == screen


def test_htop_shows_its_keys(start: Start) -> None:
    htop = start("htop", rows=24, cols=90)
    screen = htop.until(lambda screen: "F10Quit" in screen.lines[-1] and "USER" in screen.text)
    assert screen.lines[-1].startswith("F1Help")
    assert any(line.split()[:2] == ["PID", "USER"] for line in screen.lines)
    assert screen.alternate
    assert not screen.cursor_visible
    assert htop.pyte.screen().lines == screen.lines
    htop.press("F10")
    assert not htop.until(lambda screen: not screen.alternate).alternate


def test_tmux_inside(start: Start, tmp_path: Path) -> None:
    # Keys that come in one read are pasted text to tmux, unless this time is 0.
    (tmp_path / "conf").write_text("set -g assume-paste-time 0\n")
    tmux = start("tmux", "-u", "-f", "conf", "new-session", "cat", rows=10, cols=40)
    try:
        screen = tmux.until(lambda screen: screen.lines[-1].startswith("[0] 0:"))
        assert screen.alternate
        tmux.type("hello 你好\r")
        screen = tmux.until(lambda screen: screen.lines[:2] == ("hello 你好", "hello 你好"))
        assert screen.cursor == (2, 0)
        # Its prefix and % split the window in two, with a line between.
        tmux.press("C-b", "%")
        screen = tmux.until(lambda screen: all(line[20:21] == "│" for line in screen.lines[2:9]))
        assert screen.lines[8] == " " * 20 + "│"
        assert tmux.pyte.screen().lines[2:9] == screen.lines[2:9]
    finally:
        there = {"PATH": os.environ["PATH"], "TMUX_TMPDIR": str(tmp_path)}
        subprocess.run(["tmux", "kill-server"], env=there, check=True)
    assert not tmux.until(lambda screen: not screen.alternate).alternate


def test_a_line_is_edited_in_bash(start: Start) -> None:
    bash = start("bash", "--norc", "--noprofile")
    bash.until(lambda screen: screen.text == "$")
    bash.type("echo two three")
    bash.press("M-b", "M-b", "C-k")
    bash.type("one")
    bash.press("Home", "Delete", "Delete", "Delete", "Delete")
    bash.type("printf")
    bash.press("End", "BSpace", "Left", "Right", "Enter")
    screen = bash.until(lambda screen: screen.lines[1] == "on$")
    assert screen.lines[0] == "$ printf on"
    assert screen.cursor == (1, 4)
    bash.press("Up")
    bash.until(lambda screen: screen.lines[1] == "on$ printf on")
    bash.until_it_waits()
    bash.press("C-c")
    screen = bash.until(lambda screen: screen.lines[2] == "$")
    assert screen.lines[1] == "on$ printf on^C"
    assert bash.pyte.screen() == screen


def test_a_progress_bar_is_one_line(start: Start) -> None:
    draw = r'printf "\r%3d%% [%-20s]" $n "$(printf "%*s" $((n / 5)) | tr " " "#")"'
    bar = start("bash", "-c", rf'for n in {{0..100..4}}; do {draw}; done; printf "\ndone\n"')
    screen = bar.until(lambda screen: screen.cursor == (2, 0))
    assert screen.text == "100% [####################]\ndone"
    assert bar.pyte.screen() == screen


def test_a_progress_bar_below_a_scroll_region(start: Start) -> None:
    # As apt draws it: the last row is kept out of the scrolling, the cursor goes there and comes back.
    draw = r'echo "unpacking $n"; printf "\0337\033[10;1Hprogress %d%%\0338" $n'
    bar = start("bash", "-c", rf'printf "\0337\033[1;9r\0338"; for n in {{1..30}}; do {draw}; done')
    screen = bar.until(lambda screen: screen.lines[9] == "progress 30%" and screen.cursor == (8, 0))
    assert screen.lines == (*(f"unpacking {n}" for n in range(23, 31)), "", "progress 30%")
    assert bar.pyte.screen() == screen


def test_wide_and_combining_characters_in_columns(start: Start) -> None:
    shown = start(sys.executable, "-c", "print('你好|\\t|\\nab  |\\t|\\n😀e\\u0301x|\\t|\\n' + '宽' * 21)")
    screen = shown.until(lambda screen: screen.cursor == (5, 0))
    assert screen.lines[:5] == ("你好|   |", "ab  |   |", "😀e\u0301x|   |", "宽" * 20, "宽")
    assert shown.pyte.screen() == composed(screen)


def test_where_pyte_is_wrong(start: Start) -> None:
    """Half of a wide character erased: a terminal erases the other half too, pyte keeps it."""
    shown = start("printf", r"\344\275\240\344\275\240\033[2G\033[K\r\n")
    assert shown.until(lambda screen: screen.cursor == (1, 0)).lines[0] == ""
    assert shown.pyte.screen().lines[0] == "你"
