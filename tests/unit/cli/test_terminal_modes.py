"""Modes that are switched on in our terminal and off again, and keys while a recording plays; pure."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from holdfast.cli.support.terminal_modes import ShownModes
from holdfast.cli.support.terminal_view import too_small
from holdfast.cli.verbs.terminal.player import KeyReader
from holdfast.client.screen.screen import emulator
from holdfast.types import TerminalSize


def leaving(*pieces: bytes) -> bytes:
    modes = ShownModes()
    for piece in pieces:
        modes.feed(piece)
    return modes.reset()


@pytest.mark.parametrize(
    ("shown", "left"),
    [
        (b"plain text\r\n\x1b[31mred\x1b[0m \x1b[1mbold\x1b[m\x1b[K\x1b[2J", b""),
        (b"\x1b[31mred", b"\x1b[0m"),
        (b"\x1b[?1049h\x1b[?25l", b"\x1b[?1049l\x1b[?25h\x1b[0m"),
        (b"\x1b[?1049h\x1b[?25l\x1b[?25h\x1b[?1049l", b""),
        (b"\x1b[?47h", b"\x1b[?47l\x1b[0m"),
        (b"\x1b[?1;2004;1000;1006h", b"\x1b[?1l\x1b[?1000l\x1b[?1006l\x1b[?2004l"),
        (b"\x1b[?7l\x1b[4h\x1b=", b"\x1b[?7h\x1b[4l\x1b>"),
        (b"\x1b[2;10r", b"\x1b7\x1b[r\x1b8"),
        (b"\x1b[2;10r\x1b[r", b""),
        (b"\x1b[?6h", b"\x1b[?6l\x1b[?69l\x1b[r\x1b[999;1H"),
        (b"\x1b[>4;2m", b"\x1b[>4;0m"),
        (b"\x1b[>4;2m\x1b[>4m", b""),
        (b"\x1b[>1u\x1b[>3u", b"\x1b[<2u"),
        (b"\x1b[>1u\x1b[<u", b""),
        (b"\x1b[=5;1u", b"\x1b[=0;1u"),
        (b"\x1b[2 q", b"\x1b[0 q"),
        (b"\x1b(0lqk\x1b(B", b""),
        (b"\x1b(0lqk", b"\x1b(B\x0f"),
        (b"\x0elqk", b"\x1b(B\x0f"),
        (b"\x1b[?1049h\x1b[31m\x1b[?1000h\x1bc", b""),
        (b"\x1b[?25l\x1b[4h\x1b[31m\x1b[!p", b""),
        (b"\x1b]2;a title with [?25l\x07", b""),
        (b"\x1b]2;a title", b"\x18"),
        (b"\x1b]2;a title\x1b\\", b""),
        (b"\x1b[?104", b"\x18"),
        (b"\x1b[?9999h\x1b[?h\x1b[;m\x1b[?12345678901234567890h", b"\x1b[0m"),
    ],
)
def test_what_was_switched_on_is_switched_off(shown: bytes, left: bytes) -> None:
    assert leaving(shown) == left
    assert leaving(*(bytes([byte]) for byte in shown)) == left


@given(st.lists(st.sampled_from([
    b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25l", b"\x1b[?1h", b"\x1b[?1002h", b"\x1b[?2004h", b"\x1b[?2004l",
    b"\x1b[4h", b"\x1b=", b"\x1b[3;5r", b"\x1b[31;1m", b"\x1b[0m", b"text", b"\r\n", b"\x1b[2;2H", b"\x1bc",
])))  # fmt: skip
def test_a_terminal_that_was_left_is_like_a_fresh_one(pieces: list[bytes]) -> None:
    window, fresh = emulator(6, 20), emulator(6, 20)
    modes = ShownModes()
    for piece in pieces:
        window.feed(piece)
        modes.feed(piece)
    window.feed(modes.reset())
    row, col = window.screen().cursor
    for each in (window, fresh):
        each.feed(b"\x1b[H\x1b[2J\x1b[%d;%dH" % (row + 1, col + 1))
    try:
        assert window.restore() == fresh.restore()
        assert window.screen() == fresh.screen()
    finally:
        window.close()
        fresh.close()


def test_keys_are_told_from_answers_of_the_terminal() -> None:
    keys = KeyReader()
    assert keys.feed(b" .q") == [b" ", b".", b"q"]
    assert keys.feed(b"\x1b[C\x1bOD+") == [b"\x1b[C", b"\x1bOD", b"+"]
    assert keys.feed(b"\x1b[?62;4q\x1bP>|q\x1b\\\x1b]11;rgb:qq\x07-") == [
        b"\x1b[?62;4q",
        b"\x1bP>|q\x1b\\",
        b"\x1b]11;rgb:qq\x07",
        b"-",
    ]
    assert keys.feed(b"\x1b[") == []
    assert keys.feed(b"D") == [b"\x1b[D"]
    assert keys.feed(b"\x1b]" + b"q" * 10_000) == []
    assert keys.feed(b"q") == [b"q"]


@pytest.mark.parametrize(
    ("ours", "is_too_small"), [(None, False), (TerminalSize(24, 80), False), (TerminalSize(24, 79), True)]
)
def test_a_terminal_that_is_too_small(ours: TerminalSize | None, is_too_small: bool) -> None:
    assert bool(too_small(TerminalSize(24, 80), ours)) == is_too_small
