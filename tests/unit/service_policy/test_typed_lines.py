"""Lines at a prompt that come in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.service.policy.command_line import MAX_TEXT
from holdfast.service.policy.profiles import CommandRule, Commands, Profile, strictest
from holdfast.service.policy.typed_lines import InputDecision, LineBuffer, decide_input

DENIES_RM = Profile(name="p", commands=Commands(rules=(CommandRule("deny", ("rm",)),)))
ASKS_RM = Profile(name="p", commands=Commands(rules=(CommandRule("ask", ("rm",)),)))


def typed(*pieces: bytes, profile: Profile = DENIES_RM, shell: str = "bash") -> InputDecision:
    """Pieces one after the other, as long as they are allowed."""
    decided = InputDecision(decide_input(profile, LineBuffer(), b"").decision, LineBuffer())
    for piece in pieces:
        decided = decide_input(profile, decided.buffer, piece, shell=shell)
        if not decided.decision.allowed:
            break
    return decided


@pytest.mark.parametrize(
    ("keys", "entered"),
    [
        (b"ls\n", "ls\n"),
        (b"ls\r", "ls\n"),
        (b"ls\npwd\r", "ls\npwd\n"),
        (b"lsx\x7f\n", "ls\n"),
        (b"lsx\x08\n", "ls\n"),
        ("é\x7fls\n".encode(), "ls\n"),
        (b"\x7f\x7fls\n", "ls\n"),
        (b"rm x\x15ls\n", "ls\n"),
        (b"echo rm\x17a\n", "echo a\n"),
        (b"echo rm  \x17a\n", "echo a\n"),
        (b"rm x\x03ls\n", "ls\n"),
        (b"ls\x0c\x0b\x04\n", "ls\n"),
        (b"\x1b[200~ls -l\x1b[201~\n", "ls -l\n"),
        (b"\x1b[200~a\nb\x1b[201~\n", "a\nb\n"),
        (b"\x1b[200~a\tb\x1b[201~\n", "a\tb\n"),
        (b"\x1b[200~a\nb\x1b[201~\x15ls\n", "ls\n"),
        (b"echo 'a\nb'\n", "echo 'a\nb'\n"),
        (b"cat <<E\nrm x\nE\n", "cat <<E\nrm x\nE\n"),
        (b"for i in 1 2\ndo ls\ndone\n", "for i in 1 2\ndo ls\ndone\n"),
    ],
)
def test_enter_gives_the_shell_what_its_line_is(keys: bytes, entered: str) -> None:
    decided = typed(keys)
    assert decided.decision.allowed
    assert decided.entered == (entered,)
    assert decided.buffer == LineBuffer()


def test_a_line_that_is_not_complete_goes_on_in_the_next_input() -> None:
    first = decide_input(DENIES_RM, LineBuffer(), b"ls\ncat <<E\n")
    assert first.decision.allowed
    assert first.buffer.before == "cat <<E\n"
    second = decide_input(DENIES_RM, first.buffer, b"rm x\n")
    assert second.decision.allowed
    third = decide_input(DENIES_RM, second.buffer, b"E\n")
    assert third.entered == ("cat <<E\nrm x\nE\n",)
    assert third.buffer == LineBuffer()
    assert decide_input(DENIES_RM, third.buffer, b"rm x\n").decision.verdict == "deny"


def test_what_was_entered_before_an_interrupt_counts() -> None:
    decided = typed(b"echo 'a\nb\x03ls\n")
    assert decided.entered == ("echo 'a\n", "ls\n")
    assert typed(b"rm x\n\x03ls\n").decision.verdict == "deny"


@pytest.mark.parametrize(
    "keys",
    [
        b"rm x\n",
        b"rm x\r",
        b"ls; rm x\n",
        b"ls\nrm x\n",
        b"lx\x7f\x7frm x\n",
        b"echo 'a\x03rm x\n",
        b"echo 'a\nb\x03rm x\n",
        b"\x1b[200~rm x\x1b[201~\n",
        b"\x1b[200~ls\nrm x\n",
        b"\x1b[200~echo 'a\n\x1b[201~\x15rm x\n",
        b"\x1b[200~echo 'a\n\x1b[201~\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7frm x\n",
        b"for i in 1\ndo rm $i\n",
        b"sh -c 'rm x'\n",
        b"cat <<E\n$(rm x)\n",
        b"cat <<E\nx\n\x04",
        b"$X\n",
        b"!rm\n",
    ],
)
def test_a_line_that_the_rules_deny_is_refused_however_it_is_typed(keys: bytes) -> None:
    assert typed(keys).decision.verdict == "deny"
    assert typed(*(keys[at : at + 1] for at in range(len(keys)))).decision.verdict == "deny"


@pytest.mark.parametrize(
    "key",
    [
        *(b"\t", b"\x1b[A", b"\x1bOA", b"\x1b[D", b"\x1b.", b"\x12", b"\x10", b"\x0e", b"\x01", b"\x02"),
        *(b"\x19", b"\x16", b"\x0f", b"\x00", b"\x1a", b"\x1c", b"\x11", b"\x13", b"\x1f", b"\x18"),
    ],
)
def test_after_a_key_that_only_the_shell_understands_nothing_is_known(key: bytes) -> None:
    for keys in (key, b"ls" + key, b"ls" + key + b"\n"):
        refused = typed(keys)
        assert refused.decision.verdict == "deny"
        assert "content of the line is unknown" in refused.decision.reason
        assert typed(keys, profile=ASKS_RM).decision.verdict == "ask"


def test_a_key_whose_sequence_comes_in_pieces_is_the_same_key() -> None:
    assert typed(b"\x1b", b"[", b"200", b"~ls\x1b[2", b"01~\n").entered == ("ls\n",)
    assert typed(b"\x1b", b"[", b"A").decision.verdict == "deny"


def test_an_interrupt_makes_a_lost_line_known_again() -> None:
    lost = typed(b"ls\t", profile=ASKS_RM)
    assert lost.buffer.lost == "Tab"
    after = decide_input(ASKS_RM, lost.buffer, b"\x03ls\n")
    assert after.decision.allowed
    assert after.entered == ("ls\n",)
    assert decide_input(ASKS_RM, lost.buffer, b"\n").decision.verdict == "ask"


@pytest.mark.parametrize("key", [b"\x08", b"\x1b[200~", b"\x04", b"\x0c"])
def test_without_readline_fewer_keys_are_known(key: bytes) -> None:
    assert typed(b"ls" + key, shell="dash").decision.verdict == "deny"
    assert typed(b"lsx\x7f\n", shell="dash").decision.allowed


def test_where_no_rule_looks_at_commands_all_keys_are_allowed() -> None:
    assert typed(b"rm x\t\x1b[A\n", profile=Profile()).decision.allowed


def test_a_line_before_one_that_is_lost_still_counts() -> None:
    commands = Commands(unknown="allow", rules=(CommandRule("deny", ("rm",)),))
    lenient = Profile(name="p", commands=commands)
    assert typed(b"ls\n\t\n", profile=lenient).decision.allowed
    assert typed(b"rm x\n\t\n", profile=lenient).decision.verdict == "deny"


def test_a_line_that_grows_without_end_is_lost() -> None:
    assert typed(b"a" * (MAX_TEXT + 1)).decision.verdict == "deny"


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from([b"ls", b"rm", b" ", b"'", b";", b"\n", b"\x7f", b"\x15", b"\x03", b"\x1b[200~"]),
        max_size=12,
    ),
    st.integers(0, 40),
)
def test_cuts_change_nothing(parts: list[bytes], cut: int) -> None:
    keys = b"".join(parts)
    whole = decide_input(ASKS_RM, LineBuffer(), keys)
    first = decide_input(ASKS_RM, LineBuffer(), keys[:cut])
    second = decide_input(ASKS_RM, first.buffer, keys[cut:])
    assert second.buffer == whole.buffer
    assert strictest({first.decision.verdict, second.decision.verdict}) == whole.decision.verdict
