"""Keys to bytes: every name, every modifier, and the facts of xterm's own terminfo entry."""

from __future__ import annotations

import curses
import itertools
import string

import pytest
from hypothesis import given, strategies as st

from holdfast.errors import InvalidParams
from holdfast.runtime.terminal.keys import encode_keys, key_names

MODIFIER_SETS = [
    "".join(chosen) for count in range(4) for chosen in itertools.permutations(("C-", "M-", "S-"), count)
]


def parameter(prefix: str) -> int:
    """xterm's number for a set of modifiers: 1 and 1 for Shift, 2 for Alt, 4 for Control."""
    return 1 + ("S-" in prefix) + 2 * ("M-" in prefix) + 4 * ("C-" in prefix)


def press(*keys: str) -> bytes:
    return encode_keys(keys)


@pytest.mark.parametrize(
    ("name", "final"), [*zip(("Up", "Down", "Right", "Left", "Home", "End"), "ABCDHF", strict=True)]
)
@pytest.mark.parametrize("prefix", MODIFIER_SETS)
def test_cursor_keys_with_every_set_of_modifiers(prefix: str, name: str, final: str) -> None:
    code = parameter(prefix)
    normal = f"\x1b[{final}" if code == 1 else f"\x1b[1;{code}{final}"
    application = f"\x1bO{final}" if code == 1 else f"\x1b[1;{code}{final}"
    assert encode_keys([prefix + name]) == normal.encode()
    assert encode_keys([prefix + name], application_cursor=True) == application.encode()


@pytest.mark.parametrize(
    ("names", "number"),
    [
        (("Insert", "IC", "Ins"), 2),
        (("Delete", "DC", "Del"), 3),
        (("PageUp", "PgUp", "PPage", "Prior"), 5),
        (("PageDown", "PgDn", "PgDown", "NPage", "Next"), 6),
        (("F5",), 15),
        (("F6",), 17),
        (("F7",), 18),
        (("F8",), 19),
        (("F9",), 20),
        (("F10",), 21),
        (("F11",), 23),
        (("F12",), 24),
    ],
)
@pytest.mark.parametrize("prefix", MODIFIER_SETS)
def test_numbered_keys_with_every_set_of_modifiers(prefix: str, names: tuple[str, ...], number: int) -> None:
    code = parameter(prefix)
    expected = f"\x1b[{number}~" if code == 1 else f"\x1b[{number};{code}~"
    for name in names:
        for application in (False, True):
            assert encode_keys([prefix + name], application_cursor=application) == expected.encode()


@pytest.mark.parametrize(("name", "final"), [("F1", "P"), ("F2", "Q"), ("F3", "R"), ("F4", "S")])
@pytest.mark.parametrize("prefix", MODIFIER_SETS)
def test_the_first_four_function_keys(prefix: str, name: str, final: str) -> None:
    code = parameter(prefix)
    expected = f"\x1bO{final}" if code == 1 else f"\x1b[1;{code}{final}"
    assert press(prefix + name) == expected.encode()


@pytest.mark.parametrize("number", range(13, 25))
def test_function_keys_beyond_twelve_are_the_shifted_ones(number: int) -> None:
    assert press(f"F{number}") == press(f"S-F{number - 12}")
    assert press(f"C-F{number}") == press(f"C-S-F{number - 12}")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("Enter", b"\r"),
        ("Return", b"\r"),
        ("S-Enter", b"\r"),
        ("C-Enter", b"\r"),
        ("M-Enter", b"\x1b\r"),
        ("Tab", b"\t"),
        ("M-Tab", b"\x1b\t"),
        ("BTab", b"\x1b[Z"),
        ("S-Tab", b"\x1b[Z"),
        ("M-BTab", b"\x1b\x1b[Z"),
        ("Escape", b"\x1b"),
        ("Esc", b"\x1b"),
        ("M-Escape", b"\x1b\x1b"),
        ("Space", b" "),
        ("M-Space", b"\x1b "),
        ("C-Space", b"\x00"),
        ("C-M-Space", b"\x1b\x00"),
        ("BSpace", b"\x7f"),
        ("Backspace", b"\x7f"),
        ("C-BSpace", b"\x08"),
        ("M-BSpace", b"\x1b\x7f"),
        ("KPEnter", b"\r"),
        ("KP7", b"7"),
        ("KP/", b"/"),
        ("KP-", b"-"),
        ("KP+", b"+"),
        ("KP.", b"."),
        ("M-x", b"\x1bx"),
        ("A-x", b"\x1bx"),
        ("M-X", b"\x1bX"),
        ("M-é", b"\x1b\xc3\xa9"),
        ("M--", b"\x1b-"),
        ("M-^", b"\x1b^"),
        ("S-a", b"A"),
        ("S-é", "É".encode()),
        ("C-S-a", b"\x01"),
        ("C-M-c", b"\x1b\x03"),
        ("M-C-c", b"\x1b\x03"),
        ("M-^C", b"\x1b\x03"),
        ("Ctrl+C", b"\x03"),
        ("ctrl-alt-left", b"\x1b[1;7D"),
        ("Shift+F5", b"\x1b[15;2~"),
        ("C-@", b"\x00"),
        ("C-2", b"\x00"),
        ("C-[", b"\x1b"),
        ("C-3", b"\x1b"),
        ("C-\\", b"\x1c"),
        ("C-]", b"\x1d"),
        ("C-^", b"\x1e"),
        ("^^", b"\x1e"),
        ("C-_", b"\x1f"),
        ("C-/", b"\x1f"),
        ("C-?", b"\x7f"),
        ("^?", b"\x7f"),
    ],
)
def test_keys_one_by_one(key: str, expected: bytes) -> None:
    assert press(key) == expected


@pytest.mark.parametrize("letter", string.ascii_letters)
def test_control_with_every_letter_in_either_notation(letter: str) -> None:
    expected = bytes([string.ascii_lowercase.index(letter.lower()) + 1])
    assert press(f"C-{letter}") == press(f"^{letter}") == press(f"c-{letter}") == expected


@pytest.mark.parametrize("name", key_names())
def test_names_are_known_in_any_case(name: str) -> None:
    assert press(name) == press(name.lower()) == press(name.upper())
    assert press(name)


@given(st.characters(codec="utf-8"))
def test_one_character_is_itself(char: str) -> None:
    assert press(char) == char.encode()


@given(st.lists(st.sampled_from([*key_names(), "a", "é", "C-c", "M-x", "^", "-"])))
def test_keys_are_pressed_one_after_the_other(keys: list[str]) -> None:
    assert encode_keys(keys) == b"".join(press(key) for key in keys)


@given(st.text(max_size=8))
def test_every_string_is_a_key_or_refused(key: str) -> None:
    named: str | None = None
    encoded = b""
    try:
        encoded = press(key)
    except InvalidParams as error:
        named = error.details["key"]
    assert named == key or 1 <= len(encoded) <= 8


@pytest.mark.parametrize(
    ("key", "near"),
    [("Etner", "Enter"), ("PageUpp", "PageUp"), ("C-Lefft", "Left"), ("Bakspace", "Backspace"), ("F25", "F2")],
)
def test_a_misspelt_name_is_refused_with_near_names(key: str, near: str) -> None:
    with pytest.raises(InvalidParams, match="is no key") as caught:
        press(key)
    assert key in caught.value.message
    assert near in caught.value.message
    assert near in caught.value.details["near"]


@pytest.mark.parametrize("key", ["ls -l", "hello world", "qqqqq", "x" * 10_000, "C-", "C-M-", "^CC"])
def test_text_is_no_key(key: str) -> None:
    with pytest.raises(InvalidParams, match="is no key") as caught:
        press("a", key)
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "must not be empty"),
        ("C-9", "Control makes no character of '9'"),
        ("C--", "Control makes no character of '-'"),
        ("C-é", "Control makes no character of 'é'"),
        ("S-1", "give the shifted character itself"),
        ("\ud800", "UTF-8"),
    ],
)
def test_keys_that_have_no_bytes(key: str, reason: str) -> None:
    with pytest.raises(InvalidParams, match=reason):
        press(key)


def test_a_string_instead_of_a_list_is_refused() -> None:
    with pytest.raises(InvalidParams, match="must be a list of keys, not the string 'C-c'"):
        encode_keys("C-c")


TERMINFO = {
    "kcuu1": "Up",
    "kcud1": "Down",
    "kcuf1": "Right",
    "kcub1": "Left",
    "khome": "Home",
    "kend": "End",
    "kich1": "Insert",
    "kdch1": "Delete",
    "kpp": "PageUp",
    "knp": "PageDown",
    "kbs": "BSpace",
    "kcbt": "S-Tab",
    "ht": "Tab",
    "kri": "S-Up",
    "kind": "S-Down",
    **{f"kf{number}": f"F{number}" for number in range(1, 25)},
    **{f"kf{number}": f"C-F{number - 24}" for number in range(25, 37)},
    **{f"kf{number}": f"C-S-F{number - 36}" for number in range(37, 49)},
    **{f"kf{number}": f"M-F{number - 48}" for number in range(49, 61)},
}
#: The extended names: `kUP5` is Control with Up.
for stem, name in {
    "kUP": "Up",
    "kDN": "Down",
    "kRIT": "Right",
    "kLFT": "Left",
    "kHOM": "Home",
    "kEND": "End",
    "kIC": "Insert",
    "kDC": "Delete",
    "kPRV": "PageUp",
    "kNXT": "PageDown",
}.items():
    for suffix, prefix in {"": "S-", "3": "M-", "4": "M-S-", "5": "C-", "6": "C-S-", "7": "C-M-"}.items():
        TERMINFO[stem + suffix] = prefix + name


@pytest.fixture(scope="module")
def terminfo() -> None:
    """curses holds one terminal for the whole process, and nothing here needs another."""
    try:
        curses.setupterm("xterm-256color", 1)
    except curses.error:
        pytest.skip("no terminfo entry for xterm-256color on this machine")


@pytest.mark.usefixtures("terminfo")
@pytest.mark.parametrize(("capability", "key"), TERMINFO.items())
def test_xterms_own_terminfo_entry_says_the_same(capability: str, key: str) -> None:
    # Terminfo describes the keys in application mode, which `smkx` switches on.
    sequence = curses.tigetstr(capability)
    if sequence is None:
        pytest.skip(f"this terminfo entry has no {capability}")
    assert encode_keys([key], application_cursor=True) == sequence
