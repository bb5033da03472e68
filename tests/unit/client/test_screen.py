"""Screens: what bytes leave on a terminal, by either backend, cut anywhere, flooded, resized and drawn again."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.client.screen import emulation
from holdfast.client.screen.screen import Backend, Emulator, Screen, emulator
from holdfast.errors import InvalidParams, InvalidRequest

BACKENDS: tuple[Backend, ...] = ("ghostty", "pyte")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    pytest.importorskip({"ghostty": "pyghostty", "pyte": "pyte"}[request.param])
    chosen: Backend = request.param
    return chosen


def after(backend: Backend, *pieces: bytes, rows: int = 5, cols: int = 20) -> Screen:
    made = emulator(rows, cols, backend=backend)
    for piece in pieces:
        made.feed(piece)
    screen = made.screen()
    made.close()
    return screen


CASES: dict[str, tuple[bytes, str, tuple[int, int]]] = {
    "nothing": (b"", "", (0, 0)),
    "lines": (b"one\r\n\r\n  three\r\n", "one\n\n  three", (3, 0)),
    "line feed alone keeps the column": (b"one\ntwo", "one\n   two", (1, 6)),
    "scrolling": (b"\r\n".join(b"%d" % n for n in range(9)), "4\n5\n6\n7\n8", (4, 1)),
    "trailing blanks": (b"a   \r\n\x1b[44m   \x1b[0m", "a", (1, 3)),
    "a progress bar": (b"  0% [    ]\r 50% [##  ]\r100% [####]", "100% [####]", (0, 11)),
    "a progress bar that erases": (b"downloading...\r\x1b[2Kdone", "done", (0, 4)),
    "tabs": (b"a\tb\tc", "a       b       c", (0, 17)),
    "a tab at the end": (b"a\tb\tc\td", "a       b       c  d", (0, 19)),
    "backspace": (b"abd\bc", "abc", (0, 3)),
    "wrapping": (b"0123456789" * 3, "01234567890123456789\n0123456789", (1, 10)),
    "the last column is not left at once": (b"0123456789" * 2, "01234567890123456789", (0, 19)),
    "carriage return from the last column": (b"0123456789" * 2 + b"\rX", "X1234567890123456789", (0, 1)),
    "line feed from the last column": (b"0123456789" * 2 + b"\r\nX", "01234567890123456789\nX", (1, 1)),
    "no wrapping": (b"\x1b[?7l" + b"0123456789" * 2 + b"XY", "0123456789012345678Y", (0, 19)),
    "wide characters": ("你好 wide".encode(), "你好 wide", (0, 9)),
    "a wide character at the edge": (b"0123456789012345678" + "你".encode(), "0123456789012345678\n你", (1, 2)),
    "emoji": ("a😀b".encode(), "a😀b", (0, 4)),
    "a combining character": ("e\u0301x".encode(), "e\u0301x", (0, 2)),
    "a combining character on a wide one": ("你\u0301x".encode(), "你\u0301x", (0, 3)),
    "half of a wide character overwritten": ("你你\rx\x1b[4Gy".encode(), "x  y", (0, 4)),
    "invalid UTF-8": (b"a\xffb", "a\ufffdb", (0, 3)),
    "NUL and BEL": (b"a\x00\x07b", "ab", (0, 2)),
    "cursor positions": (b"\x1b[3;4Hx\x1b[1;1Hy\x1b[2Gz", "yz\n\n   x", (0, 2)),
    "cursor movement": (b"\x1b[3Ba\x1b[2A\x1b[5Cb\x1b[3Dc\x1b[Ed\x1b[Fe", "\ne   c b\nd\na", (1, 1)),
    "column and row": (b"\x1b[3d\x1b[5`x\x1b[2ey", "\n\n    x\n\n     y", (4, 6)),
    "erase to the end": (b"abcdef\x1b[3D\x1b[K", "abc", (0, 3)),
    "erase to the start": (b"abcdef\x1b[3D\x1b[1K", "    ef", (0, 3)),
    "erase below": (b"a\r\nb\r\nc\x1b[2;1H\x1b[J", "a", (1, 0)),
    "erase above": (b"a\r\nb\r\nc\x1b[2;1H\x1b[1J", "\n\nc", (1, 0)),
    "clear": (b"a\r\nb\x1b[H\x1b[2J\x1b[3Jc", "c", (0, 1)),
    "insert characters": (b"abcd\x1b[3D\x1b[2@", "a  bcd", (0, 1)),
    "delete characters": (b"abcdef\x1b[5D\x1b[2P", "adef", (0, 1)),
    "erase characters": (b"abcdef\x1b[5D\x1b[2X", "a  def", (0, 1)),
    "insert mode": (b"bcd\r\x1b[4ha\x1b[4l", "abcd", (0, 1)),
    "insert lines": (b"a\r\nb\r\nc\x1b[2;1H\x1b[L", "a\n\nb\nc", (1, 0)),
    "delete lines": (b"a\r\nb\r\nc\x1b[1;1H\x1b[2M", "c", (0, 0)),
    "a scroll region": (b"top\x1b[2;4r\x1b[2;1H1\r\n2\r\n3\r\n4\r\n5", "top\n3\n4\n5", (3, 1)),
    "below a scroll region": (b"\x1b[1;3r\x1b[5;1Hstatus\n\x1b[1;1Hx", "x\n\n\n\nstatus", (0, 1)),
    "reverse index at the top": (b"a\r\nb\x1b[H\x1bM", "\na\nb", (0, 0)),
    "scroll up and down": (b"a\r\nb\r\nc\x1b[S\x1b[2T", "\n\nb\nc", (2, 1)),
    "repeat": (b"ab\x1b[3b", "abbbb", (0, 5)),
    "back tab": (b"\x1b[15G\x1b[Zx", "        x", (0, 9)),
    "tab stops": (b"\x1b[3g\x1b[4G\x1bH\r\tx", "   x", (0, 4)),
    "save and restore": (b"ab\x1b7\x1b[4;4H\x1b8c\x1b8d", "abd", (0, 3)),
    "save and restore by CSI": (b"ab\x1b[s\x1b[4;4H\x1b[uc", "abc", (0, 3)),
    "line drawing": (b"\x1b(0lqk0.\x1b(Bx", "┌─┐0.x", (0, 6)),
    "line drawing by shifts": (b"\x0eq\x1b)0q\x0fq", "q─q", (0, 3)),
    "origin mode beyond the region": (b"\x1b[2;4r\x1b[?6h\x1b[9;9Hx", "\n\n\n        x", (3, 9)),
    "origin mode": (b"\x1b[2;4r\x1b[?6h\x1b[1;1Hx", "\nx", (1, 1)),
    "colours of all kinds": (
        b"\x1b[1;31ma\x1b[38;5;200mb\x1b[48;2;1;2;3mc\x1b[4:3md\x1b[38:2::1:2:3me\x1b[0m",
        "abcde",
        (0, 5),
    ),
    "sequences nobody draws": (
        b"\x1b[>4;2m\x1b[>c\x1b[?u\x1b[=1;1u\x1b[!p\x1b[?2026h\x1b[2 q\x1b[22;0;0t\x1bP+q544e\x1b\\\x1b_Ga=q\x1b\\"
        b"\x1b]133;A\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\x1b]52;c;aGk=\x07\x1b[?1$p\x1b[58;5;3m\x1b[5n.",
        "link.",
        (0, 5),
    ),
    "reset": (b"\x1b[31mabc\x1b[2;3r\x1b[?7lx\x1bcd", "d", (0, 1)),
    "alignment": (b"\x1b#8", "\n".join(["E" * 20] * 5), (0, 0)),
    "a sequence that another one breaks": (b"\x1b[31\x1b[1mx\x1b]2;ti\x1b[2my", "xy", (0, 2)),
    "CAN ends a sequence": (b"\x1b[31\x18x", "x", (0, 1)),
    "a control inside a sequence": (b"ab\x1b[\r1Cx", "ax", (0, 2)),
    "many digits": (b"a\x1b[" + b"9" * 5000 + b"Cx", "a                  x", (0, 19)),
}

#: Differences of pyte that docs/terminals.md names: shapes of characters, origin mode, back tabs, broken sequences.
NOT_ON_PYTE = {
    "a wide character at the edge",
    "a combining character",
    "half of a wide character overwritten",
    "column and row",
    "back tab",
    "save and restore",
    "line drawing",
    "line drawing by shifts",
    "origin mode beyond the region",
    "a sequence that another one breaks",
    "many digits",
}


@pytest.mark.parametrize(
    ("backend", "name"),
    [(backend, name) for backend in BACKENDS for name in CASES if backend != "pyte" or name not in NOT_ON_PYTE],
    indirect=["backend"],
)
def test_what_is_on_the_screen(backend: Backend, name: str) -> None:
    data, text, cursor = CASES[name]
    screen = after(backend, data)
    assert screen.text == text
    assert screen.cursor == cursor
    assert len(screen.lines) == screen.rows == 5


@pytest.mark.parametrize("name", CASES)
def test_byte_by_byte_is_the_same(backend: Backend, name: str) -> None:
    data = CASES[name][0]
    assert after(backend, *(data[at : at + 1] for at in range(len(data)))) == after(backend, data)


PIECES = [
    *(data for name, (data, _, _) in CASES.items() if name != "many digits"),
    *(
        b"text ",
        "é你😀e\u0301".encode(),
        b"\xe4\xbd",
        b"\xff",
        b"\x1b",
        b"\x1b[",
        b"\x1b]2;title",
        b"\x07",
        b"\r\n",
    ),
    *(b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?47h", b"\x1b[?47l", b"\x1b[?25l", b"\x1b[?25h", b"\x1bP", b"\x1b\\"),
]


@given(st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cutting_anywhere_gives_the_same_screen(backend: Backend, data: st.DataObject) -> None:
    whole = b"".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert after(backend, *pieces) == after(backend, whole)


@given(st.binary(max_size=200), st.integers(1, 6), st.integers(1, 12), st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_bytes_leave_a_screen(
    backend: Backend, data: bytes, rows: int, cols: int, new_rows: int, new_cols: int
) -> None:
    made = emulator(rows, cols, backend=backend)
    made.feed(data.replace(b"A", b"\x1b[").replace(b"B", b";"))
    made.resize(new_rows, new_cols)
    made.feed(data)
    screen = made.screen()
    made.restore()
    made.close()
    assert len(screen.lines) == screen.rows == new_rows
    assert 0 <= screen.cursor_row < new_rows
    assert 0 <= screen.cursor_col < new_cols


def test_title_cursor_and_alternate_screen(backend: Backend) -> None:
    made = emulator(4, 20, backend=backend)
    made.feed(b"$ vim\r\n\x1b]0;first\x07")
    assert made.screen() == Screen(4, 20, ("$ vim", "", "", ""), 1, 0, title="first")
    made.feed("\x1b[?1049h\x1b[?25l\x1b]2;zwei ü\x1b\\\x1b[2;3Hinside".encode())
    assert made.screen() == Screen(4, 20, ("", "  inside", "", ""), 1, 8, False, "zwei ü", True)
    made.feed(b"\x1b[?25h\x1b[?1049l$ ")
    assert made.screen() == Screen(4, 20, ("$ vim", "$", "", ""), 1, 2, True, "zwei ü")
    assert str(made.screen()) == "$ vim\n$"
    made.close()


@pytest.mark.parametrize("mode", [47, 1047, 1049])
def test_every_way_into_the_alternate_screen(backend: Backend, mode: int) -> None:
    screen = after(backend, b"under\x1b[?%dh\x1b[H\x1b[2Jover" % mode)
    assert (screen.text, screen.alternate) == ("over", True)
    screen = after(backend, b"under\x1b[?%dh\x1b[H\x1b[2Jover\x1b[?%dl" % (mode, mode))
    assert (screen.text, screen.alternate) == ("under", False)


# Floods: 64 KiB and more in one piece are searched; smaller pieces are drawn. Both must agree.


def small_pieces(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), 50_000):
        yield data[at : at + 50_000]


FLOODS = {
    "yes": b"y\r\n" * 60_000,
    "numbers": b"".join(b"%d\r\n" % number for number in range(30_000)),
    "blank lines": b"\r\n" * 80_000,
    "colours": b"".join(b"\x1b[01;3%dmfile%d\x1b[0m\x1b[K\r\n" % (n % 8, n) for n in range(10_000)),
    "a colour left on": b"\x1b[1;44m" + b"blue\r\n" * 30_000,
    "two colours left on": b"\x1b[0;1m" + b"a\r\n" * 30_000 + b"\x1b[31m" + b"b\r\n" * 30_000,
    "long lines": (b"0123456789" * 50 + b"\r\n") * 300,
    "one line": b"0123456789" * 20_000,
    "line feeds alone": b"ab\n" * 40_000,
    "wide": "你好😀 e\u0301\r\n".encode() * 8_000,
    "overwriting": b"first\rse\tc\b\r\n" * 10_000,
    "no end of line": b"line\r\n" * 30_000 + b"$ ",
    "a scroll region in it": b"x\r\n" * 30_000 + b"\x1b[2;4r\x1b[2;1H" + b"y\r\n" * 60_000,
    "a screen program in it": b"x\r\n" * 30_000
    + b"\x1b[?1049h\x1b[2J\x1b[Htop"
    + b"\x1b[?1049l"
    + b"y\r\n" * 30_000,
    "a title in it": b"x\r\n" * 30_000 + b"\x1b]2;title\x07" + b"y\r\n" * 30_000,
    "a string with lines in it": b"x\r\n" * 30_000 + b"\x1bPq" + b"y\r\n" * 30_000 + b"\x1b\\" + b"z\r\n" * 30_000,
    "a scroll region set and left": b"\x1b[2;4r" + b"y\r\n" * 30_000 + b"\x1b[r\x1b[5;1H" + b"z%d\r\n" * 9_000,
    "shifted": b"x\r\n" * 30_000 + b"\x1b)0\x0e" + b"q\r\n" * 30_000,
    "an escape before the bracket": b"x\r\n" * 30_000 + b"\x1b7[m\r\n" * 10_000 + b"\x1b8here",
    "a cut sequence at the end": b"line\r\n" * 30_000 + b"\x1b[3",
}
BEFORE = {
    "a fresh screen": b"",
    "a full screen": b"\x1b#8\x1b[3;3H",
    "inside a sequence": b"abc\x1b]2;",
    "inside a character": b"abc\xf0\x9f",
    "in a scroll region": b"head\x1b[2;3r\x1b[2;1H",
    "below a scroll region": b"head\x1b[2;3r\x1b[5;1H",
    "between side margins": b"\x1b[?69h\x1b[3;9s\x1b[1;3H",
    "on the alternate screen": b"under\x1b[?1049h\x1b[3;3H",
    "without wrapping, in red": b"\x1b[?7l\x1b[31m",
    "inserting": b"\x1b[4h",
}


@pytest.mark.parametrize("block", [20_000, 1024 * 1024])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_leaves_what_its_bytes_would_have_left(
    before: str, flood: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulation, "FLOOD_BLOCK", block)

    def fed(pieces: Callable[[bytes], Iterator[bytes]]) -> Emulator:
        made = emulator(5, 20, backend="ghostty")
        made.feed(BEFORE[before])
        for piece in pieces(FLOODS[flood]):
            made.feed(piece)
        made.feed(b"2m>")
        return made

    at_once, bit_by_bit = fed(lambda data: iter([data])), fed(small_pieces)
    assert at_once.screen() == bit_by_bit.screen()
    assert at_once.restore() == bit_by_bit.restore()
    for made in (at_once, bit_by_bit):
        made.resize(30, 10)
    assert at_once.screen() == bit_by_bit.screen()


@pytest.mark.parametrize("before", ["a full screen", "in a scroll region"])
@pytest.mark.parametrize("flood", ["numbers", "two colours left on", "a cut sequence at the end"])
def test_a_flood_leaves_the_same_on_pyte(before: str, flood: str) -> None:
    data = FLOODS[flood][-100_000:]
    at_once, bit_by_bit = emulator(5, 20, backend="pyte"), emulator(5, 20, backend="pyte")
    at_once.feed(BEFORE[before])
    at_once.feed(data)
    bit_by_bit.feed(BEFORE[before])
    for piece in small_pieces(data):
        bit_by_bit.feed(piece)
    assert at_once.screen() == bit_by_bit.screen()
    assert at_once.restore() == bit_by_bit.restore()


# Drawing a screen again


SHOWN = {
    "a shell": b"$ ls\r\n\x1b[01;34mdir\x1b[0m file\r\n$ ",
    "a cursor in the middle": b"abc\r\ndef\x1b[1;2H",
    "the last column": b"0123456789" * 2,
    "a full screen": b"\x1b#8\x1b[5;20H",
    "wide": "你好 😀\r\ne\u0301".encode(),
    "a title": b"\x1b]2;the title\x07x",
    "a hidden cursor": b"\x1b[?25lx",
    "a scroll region": b"a\r\nb\x1b[2;4r\x1b[3;3H",
    "origin mode": b"a\r\nb\x1b[2;4r\x1b[?6h\x1b[2;2H",
    "no wrapping": b"\x1b[?7lx",
    "insert mode": b"abc\x1b[4h\r",
    "a colour left on": b"\x1b[1;4;38;5;200;48;2;1;2;3mx",
    "line drawing left on": b"\x1b(0qqq",
    "the alternate screen": b"$ vim\r\n\x1b[?1049h\x1b[2;2Hinside\x1b[3;3H",
    "the alternate screen by 47": b"$ less\r\n\x1b[?47h\x1b[2J\x1b[2;2Hinside",
    "inside a sequence": b"$ vim\r\n\x1b[?1049h\x1b[Hx\x1b[3",
}
THEN = (b"", b"y\r\nz", b"\x1b[2;3Hw\n\n\n\nv", b"\x1b[?1049lback", b"qqq")


def goes_on(backend: Backend, shown: str, then: bytes) -> bool:
    """Whether the backend promises it: pyte restores neither a pending wrap nor a cursor that was not saved."""
    return backend != "pyte" or (shown != "the last column" and (b"1049l" not in then or "alternate" in shown))


@pytest.mark.parametrize(
    ("backend", "shown", "then"),
    [(*each, then) for each in itertools.product(BACKENDS, SHOWN) for then in THEN if goes_on(*each, then)],
    indirect=["backend"],
)
def test_a_restored_screen_goes_on_like_the_first(backend: Backend, shown: str, then: bytes) -> None:
    first, second = emulator(5, 20, backend=backend), emulator(5, 20, backend="ghostty")
    first.feed(SHOWN[shown])
    second.feed(first.restore())
    if shown == "inside a sequence":
        first.feed(b"\x18")
    for made in (first, second):
        made.feed(then)
    assert second.screen() == first.screen()


def test_restore_brings_back_modes_and_colours(backend: Backend) -> None:
    made = emulator(5, 20, backend=backend)
    made.feed(b"\x1b[31mred\x1b[0m\x1b[?1h\x1b[?66h\x1b[?1002h\x1b[?1006h\x1b[?1004h\x1b[?2004h\x1b[?25l")
    drawn = made.restore()
    for mode in (b"1h", b"66h", b"1002h", b"1006h", b"1004h", b"2004h", b"25l"):
        assert b"\x1b[?" + mode in drawn
    assert b"?1000h" not in drawn
    assert (b"\x1b[38;5;1mred" if backend == "ghostty" else b"\x1b[0;31mred") in drawn
    again = emulator(5, 20, backend=backend)
    again.feed(drawn)
    assert again.restore() == drawn


def test_restore_of_a_wide_character_that_a_resize_cut() -> None:
    made = emulator(2, 7, backend="ghostty")
    made.feed("under\x1b[?1049h\x1b[Hab你".encode())
    made.resize(2, 3)
    assert "ab你".encode() in made.restore()
    made.feed(b"\x1b[2J\x1b[Hxyz")
    assert b"xyz" in made.restore()
    assert b"und\r\ner" in made.restore()


def test_restore_draws_the_history_that_was_asked_for() -> None:
    made = emulator(3, 10, scrollback=4, backend="ghostty")
    made.feed(b"\r\n".join(b"%d" % number for number in range(20)))
    assert b"13\r\n14\r\n15\r\n16" in made.restore()
    assert b"17\r\n18\r\n19" in made.restore()
    assert b"12" not in made.restore()
    again = emulator(3, 10, backend="ghostty")
    again.feed(made.restore())
    assert again.screen() == made.screen()


@pytest.mark.parametrize("end", [b"\r\n", b"", b"\r\n\r\n\r\n\r\n\r\n", b"x" * 25 + b"\r\n", b"\x1b[2;4Hmoved"])
def test_output_after_a_restored_history_goes_on_where_it_was(end: bytes) -> None:
    made = emulator(3, 10, scrollback=40, backend="ghostty")
    made.feed(b"\r\n".join(b"%d" % number for number in range(20)) + end)
    again = emulator(3, 10, scrollback=40, backend="ghostty")
    again.feed(made.restore())
    for each in (made, again):
        each.feed(b"and\r\nmore\r\n")
    assert again.screen() == made.screen()
    assert again.restore() == made.restore()


# Sizes


def test_a_narrower_screen_wraps_and_a_wider_one_unwraps() -> None:
    made = emulator(4, 10, backend="ghostty")
    made.feed(b"0123456789ABC\r\n$ ")
    assert made.screen().text == "0123456789\nABC\n$"
    made.resize(4, 20)
    assert made.screen() == Screen(4, 20, ("0123456789ABC", "$", "", ""), 1, 2)
    made.resize(4, 5)
    assert made.screen().lines == ("01234", "56789", "ABC", "$")


def test_pyte_cuts_lines_instead() -> None:
    made = emulator(4, 10, backend="pyte")
    made.feed(b"0123456789ABC\r\n$ ")
    made.resize(4, 5)
    assert made.screen().lines == ("01234", "ABC", "$", "")


def test_fewer_rows_keep_the_line_with_the_cursor(backend: Backend) -> None:
    made = emulator(5, 10, backend=backend)
    made.feed(b"a\r\nb\r\nc")
    made.resize(3, 10)
    assert (made.screen().lines, made.screen().cursor) == (("a", "b", "c"), (2, 1))
    made.resize(2, 10)
    assert (made.screen().lines, made.screen().cursor) == (("b", "c"), (1, 1))
    made.feed(b"\r\nd")
    assert made.screen().lines == ("c", "d")


def test_more_columns_have_tab_stops(backend: Backend) -> None:
    made = emulator(2, 10, backend=backend)
    made.resize(2, 40)
    made.feed(b"\t\t\tx")
    assert made.screen().cursor == (0, 25)


# Errors


@pytest.mark.parametrize(("rows", "cols"), [(0, 80), (24, 0), (-1, 80), (24, 5000)])
def test_impossible_sizes(backend: Backend, rows: int, cols: int) -> None:
    with pytest.raises(InvalidParams, match=f"got {rows}x{cols}"):
        emulator(rows, cols, backend=backend)
    made = emulator(2, 2, backend=backend)
    with pytest.raises(InvalidParams, match=f"got {rows}x{cols}"):
        made.resize(rows, cols)


def test_negative_scrollback() -> None:
    with pytest.raises(InvalidParams, match="got -1"):
        emulator(2, 2, scrollback=-1)


def test_a_closed_emulator_says_so(backend: Backend) -> None:
    made = emulator(2, 2, backend=backend)
    made.close()
    made.close()
    for use in (lambda: made.feed(b"x"), made.screen, made.restore, lambda: made.resize(3, 3)):
        with pytest.raises(InvalidRequest, match="closed"):
            use()


def test_without_pyghostty_pyte_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pyghostty", "pyghostty.core"):
        monkeypatch.setitem(sys.modules, module, None)
    assert type(emulator(2, 2)).__name__ == "PyteEmulator"
    with pytest.raises(InvalidRequest, match="pip install pyghostty"):
        emulator(2, 2, backend="ghostty")
    monkeypatch.setitem(sys.modules, "pyte", None)
    monkeypatch.delitem(sys.modules, "holdfast.client.screen.pyte")
    with pytest.raises(InvalidRequest, match="pip install pyghostty"):
        emulator(2, 2)
    with pytest.raises(InvalidRequest, match="pip install pyte"):
        emulator(2, 2, backend="pyte")


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(InvalidParams, match="'xterm'"):
        emulator(2, 2, backend="xterm")  # type: ignore[arg-type]
