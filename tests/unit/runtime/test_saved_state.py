"""The state that a shell saved is found in the bytes of its pipe, however they are divided and mixed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from holdfast.runtime.shell.files import ShellFiles
from holdfast.runtime.shell.saved_state import MAX_SAVED_BYTES, SavedParts

WHOLE = b"\0edeclare -x A=1\n\0."


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        ([WHOLE], {"exports": b"declare -x A=1\n"}),
        ([b"\0sstate\0.", WHOLE], {"state": b"state", "exports": b"declare -x A=1\n"}),
        ([b"\0e\0."], {"exports": b""}),
        ([b"\0eold\0.\0enew\0."], {"exports": b"new"}),
        ([b"junk\0xjunk", WHOLE, b"\0.junk\0"], {"exports": b"declare -x A=1\n"}),
        ([b"\0ekilled in the mid", WHOLE], {"exports": b"declare -x A=1\n"}),
        ([b"\0enot whole"], {}),
        ([b"\0" * 70_000, WHOLE], {"exports": b"declare -x A=1\n"}),
        ([b"\0e", *[b"x" * 65_536] * (MAX_SAVED_BYTES // 65_536 + 1), b"\0."], {}),
        ([b"\0e", *[b"x" * 65_536] * (MAX_SAVED_BYTES // 65_536 + 1), b"\0.", WHOLE], {"exports": WHOLE[2:-2]}),
    ],
)
def test_what_is_found(pieces: list[bytes], found: dict[str, bytes]) -> None:
    parts = SavedParts()
    seen: dict[str, bytes] = {}
    for piece in pieces:
        seen |= parts.feed(piece)
    assert seen == found


@given(st.lists(st.sampled_from((b"\0e", b"\0s", b"\0.", b"\0", b"e", b"a.", WHOLE)), max_size=12), st.data())
def test_how_the_bytes_are_divided_makes_no_difference(words: list[bytes], data: st.DataObject) -> None:
    text = b"".join(words)
    divided, whole = SavedParts(), SavedParts()
    seen: dict[str, bytes] = {}
    at = 0
    while at < len(text):
        step = data.draw(st.integers(1, len(text)))
        seen |= divided.feed(text[at : at + step])
        at += step
    assert seen == whole.feed(text)


def test_a_part_over_the_bound_is_not_found_wherever_it_is_divided() -> None:
    text = b"\0s" + b"x" * (MAX_SAVED_BYTES + 1) + b"\0."
    for cut in (10, MAX_SAVED_BYTES, len(text) - 1):
        parts = SavedParts()
        assert parts.feed(text[:cut]) | parts.feed(text[cut:]) == {}


def test_the_pipes_of_a_shell_of_an_earlier_version_stay_where_they_are(tmp_path: Path) -> None:
    """And a link in the place of their directory, which the shell's user has put there, is not followed."""
    old, linked, new = (str(tmp_path / name) for name in ("old", "linked", "new"))
    os.mkdir(old)
    os.mkdir(linked)
    os.symlink("/", f"{linked}/pipes")
    assert [ShellFiles(path, None).pipes for path in (old, linked, new)] == [old, linked, f"{new}/pipes"]
    assert ShellFiles(new, None).pipes == f"{new}/pipes"
