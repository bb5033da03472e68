"""Marks in a terminal's output are taken out and modes are noticed, however the output is cut."""

from __future__ import annotations

import gc
import itertools
import re

import pytest
from hypothesis import given, strategies as st

from holdfast.runtime.terminal.mark_filter import MARK_BYTES, MarkFilter, PromptMark, TerminalModes

NONCE = "00112233445566778899aabbccddeeff"
OTHER = "f" * 32


def mark(letter: str, argument: str = "", nonce: str = NONCE) -> bytes:
    middle = f";{argument}" if argument else ""
    return f"\x1b]133;{letter}{middle};{nonce}\x07".encode()


MARKS = [mark("A"), mark("B"), mark("C"), mark("D", "0"), mark("D", "130"), mark("P")]
#: Sequences that resemble a mark and are none of ours.
FORGED = [
    b"\x1b]133;A\x07",
    b"\x1b]133;D;0\x07",
    mark("A", nonce=OTHER),
    mark("D", "0", OTHER),
    b"\x1b]133;A;" + NONCE.encode(),  # no end
    b"\x1b]133;A;" + NONCE.encode() + b"\x1b\\",  # another end
    b"\x1b]133;a;" + NONCE.encode() + b"\x07",
    b"\x1b]133;D;0;1;" + NONCE.encode() + b"\x07",
    b"\x1b]1337;" + NONCE.encode() + b"\x07",
    b"\x1b]133;D;" + b"9" * 200 + b";" + NONCE.encode()[:-1] + b"\x07",
]
PIECES = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(MARKS),
    st.sampled_from(FORGED),
    st.sampled_from([b"\x1b", b"\x1b]", b"\x1b]133;", b"\x07", b"\x1b[31m", b"\x1b]0;title\x07", NONCE.encode()]),
)


def cut(data: bytes, locations: list[int]) -> list[bytes]:
    edges = [0, *sorted(location % (len(data) + 1) for location in locations), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def filtered(pieces: list[bytes]) -> tuple[bytes, list[PromptMark]]:
    """All that comes out, with the marks at their places in it."""
    filter = MarkFilter(NONCE)
    clean, marks = b"", []
    for piece in pieces:
        data, found = filter.feed(piece)
        marks += [PromptMark(each.letter, each.argument, each.position + len(clean)) for each in found]
        clean += data
        assert len(filter.held) <= MARK_BYTES
    return clean + filter.release(), marks


@given(st.lists(PIECES, max_size=12), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_cut_of_the_stream_gives_the_same(pieces: list[bytes], locations: list[int]) -> None:
    data = b"".join(pieces)
    whole = filtered([data])
    assert filtered(cut(data, locations)) == whole
    assert filtered([data[at : at + 1] for at in range(len(data))]) == whole


@given(st.lists(st.one_of(st.binary(max_size=12).filter(lambda data: b"\x1b" not in data), st.sampled_from(MARKS))))
def test_marks_are_taken_out_and_nothing_else(pieces: list[bytes]) -> None:
    clean, marks = filtered(pieces)
    expected, locations = b"", []
    for piece in pieces:
        if piece in MARKS:
            locations.append((chr(piece[6]), len(expected)))
        else:
            expected += piece
    assert clean == expected
    assert [(each.letter, each.position) for each in marks] == locations


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_marks_without_the_secret_pass_as_they_are(forged: bytes, size: int) -> None:
    data = b"before" + forged + b"after"
    assert filtered([data[at : at + size] for at in range(0, len(data), size)]) == (data, [])


def test_what_a_mark_says() -> None:
    data = b"".join([b"x", mark("D", "130"), b"\r\n", mark("A"), b"$ ", mark("B")])
    assert MarkFilter(NONCE).feed(data) == (
        b"x\r\n$ ",
        [PromptMark("D", "130", 1), PromptMark("A", "", 3), PromptMark("B", "", 5)],
    )


def test_a_mark_may_be_as_long_as_the_limit_and_no_longer() -> None:
    room = MARK_BYTES - len(mark("D", "0")) + 1
    assert filtered([mark("D", "9" * room)]) == (b"", [PromptMark("D", "9" * room, 0)])
    assert filtered([mark("D", "9" * (room + 1))]) == (mark("D", "9" * (room + 1)), [])


def test_a_filter_compiles_no_pattern_of_its_own() -> None:
    def patterns() -> int:
        return sum(isinstance(each, re.Pattern) for each in gc.get_objects())

    before = patterns()
    filters = [MarkFilter(f"{number:032x}") for number in range(10)]
    assert (len(filters), patterns()) == (10, before), "Python's cache would keep 512 of them"


@pytest.mark.parametrize("start", [b"\x1b", b"\x1b]", b"\x1b]133;", b"\x1b]133;D;0;" + NONCE.encode()[:10]])
def test_what_may_be_the_beginning_of_a_mark_is_held_and_let_go(start: bytes) -> None:
    filter = MarkFilter(NONCE)
    assert filter.feed(b"text" + start) == (b"text", [])
    assert filter.held == start
    assert filter.release() == start
    assert (filter.held, filter.release()) == (b"", b"")
    assert filter.feed(b"more") == (b"more", [])


@pytest.mark.parametrize("start", [b"\x1b[", b"\x1b]0", b"\x1b]134", b"\x1bP", b"\x1b]133;A\x07"])
def test_what_cannot_become_one_is_not(start: bytes) -> None:
    filter = MarkFilter(NONCE)
    assert filter.feed(b"text" + start) == (b"text" + start, [])
    assert filter.held == b""


def test_an_unfinished_mark_is_held_no_further_than_any_is_long() -> None:
    filter = MarkFilter(NONCE)
    clean = b""
    for _ in range(50):
        data, marks = filter.feed(b"\x1b]133;" if not clean and not filter.held else b"0123456789")
        assert marks == []
        assert len(filter.held) <= MARK_BYTES
        clean += data
    assert clean + filter.release() == b"\x1b]133;" + b"0123456789" * 49


def test_a_flood_with_a_mark_at_its_end() -> None:
    flood = b"0123456789\r\n" * 100_000
    filter = MarkFilter(NONCE)
    total = 0
    for at in range(0, len(flood), 65_536):
        data, found = filter.feed(flood[at : at + 65_536])
        total += len(data)
        assert found == []
    data, marks = filter.feed(mark("D", "0"))
    assert (total, data, marks) == (len(flood), b"", [PromptMark("D", "0", 0)])


def test_a_flood_of_escapes() -> None:
    data = b"\x1b" * 100_000
    assert filtered([data[at : at + 4096] for at in range(0, len(data), 4096)]) == (data, [])


# --- modes --------------------------------------------------------------------------------------------------------

SEQUENCES = [
    b"\x1b[?1h",
    b"\x1b[?1l",
    b"\x1b[?2004h",
    b"\x1b[?2004l",
    b"\x1b[?1049h",
    b"\x1b[?1049l",
    b"\x1b[?47h",
    b"\x1b[?1;2004h",
    b"\x1b[?25l",
    b"\x1b[1h",
    b"\x1b[?1;25;1049l",
]


def switched(pieces: list[bytes]) -> tuple[bool, bool, bool]:
    modes = TerminalModes()
    for piece in pieces:
        modes.feed(piece)
    return modes.alternate_screen, modes.application_cursor, modes.bracketed_paste


@given(
    st.lists(st.one_of(st.sampled_from(SEQUENCES), st.binary(max_size=5), st.just(b"\x1b[?")), max_size=10),
    st.lists(st.integers(0, 1000), max_size=8),
)
def test_modes_are_noticed_however_they_are_cut(pieces: list[bytes], locations: list[int]) -> None:
    data = b"".join(pieces)
    assert switched(cut(data, locations)) == switched([data])
    assert switched([data[at : at + 1] for at in range(len(data))]) == switched([data])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", (False, False, False)),
        (b"\x1b[?1049h", (True, False, False)),
        (b"\x1b[?1047h", (True, False, False)),
        (b"\x1b[?1049h text \x1b[?1049l", (False, False, False)),
        (b"\x1b[?1;2004h", (False, True, True)),
        (b"\x1b[?2004h\x1b[?1h\x1b[?2004l", (False, True, False)),
        (b"\x1b[?10h\x1b[?20041h\x1b[1h\x1b?1h", (False, False, False)),
    ],
)
def test_which_modes(data: bytes, expected: tuple[bool, bool, bool]) -> None:
    assert switched([data]) == expected
