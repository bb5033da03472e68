"""The keystrokes of a command: whatever it holds, the shell gets it as one."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from holdfast.errors import InvalidParams
from holdfast.runtime.terminal.paste import keystrokes

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("command", "pasted", "quoted"),
    [
        ("true", b"true", b"true"),
        ("echo é", "echo é".encode(), "echo é".encode()),
        ("a\nb", b"\x1b[200~a\nb\x1b[201~", b"a\x16\nb"),
        ("a\tb", b"\x1b[200~a\tb\x1b[201~", b"a\x16\tb"),
        ("\n\ntrue\n\n", b"true", b"true"),
        ("echo \x03", b"\x1b[200~echo \x03\x1b[201~", b"echo \x16\x03"),
        (" true ", b" true ", b" true "),
        *((blank, b"", b"") for blank in ("", " ", "\n", "\t\n ")),
        ("echo \x7f", b"\x1b[200~echo \x7f\x1b[201~", b"echo \x16\x7f"),
    ],
)
def test_what_is_typed(command: str, pasted: bytes, quoted: bytes) -> None:
    assert keystrokes(command, paste=True) == pasted
    assert keystrokes(command, paste=False) == quoted


@given(TEXT)
def test_no_key_of_it_does_anything_by_itself(command: str) -> None:
    if not command.strip("\n").encode().strip():
        return
    quoted = keystrokes(command, paste=False)
    expected = command.strip("\n").encode()
    plain, at = b"", 0
    while at < len(quoted):
        if quoted[at] == 0x16:
            at += 1
        else:
            assert quoted[at] >= 0x20
            assert quoted[at] != 0x7F
        plain += quoted[at : at + 1]
        at += 1
    assert plain == expected


@given(TEXT)
def test_a_paste_has_one_end(command: str) -> None:
    try:
        pasted = keystrokes(command, paste=True)
    except InvalidParams:
        return
    if not command.encode().strip():
        assert pasted == b""
        return
    assert pasted.count(b"\x1b[201~") == pasted.count(b"\x1b[200~") in (0, 1)
    assert command.strip("\n").encode() in pasted


@pytest.mark.parametrize("command", ["a\0b", "\0"])
@pytest.mark.parametrize("paste", [False, True])
def test_what_cannot_be_typed(command: str, paste: bool) -> None:
    with pytest.raises(InvalidParams, match="command"):
        keystrokes(command, paste=paste)


def test_a_text_cannot_leave_its_paste() -> None:
    with pytest.raises(InvalidParams, match="ends a paste"):
        keystrokes("echo '\n\x1b[201~rm -rf /\n'", paste=True)
    assert b"\x16\x1b[201~" in keystrokes("echo '\n\x1b[201~x'", paste=False)
