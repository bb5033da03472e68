"""Signals by name: every way that people write them, and nothing else."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given, strategies as st

from holdfast.errors import UnknownSignal
from holdfast.runtime.process.signals import parse_signal, signal_name


@pytest.mark.parametrize("name", ["INT", "SIGINT", "int", "sigint", "interrupt", " Int ", "2"])
def test_the_ways_to_write_a_signal(name: str) -> None:
    assert parse_signal(name) is signal.SIGINT


@pytest.mark.parametrize("name", ["", "0", "-1", "99", "SIG", "NOPE", "SIG_IGN", "SIGSIGINT", "9" * 5000, "²"])
def test_what_is_no_signal_is_named(name: str) -> None:
    with pytest.raises(UnknownSignal) as caught:
        parse_signal(name)
    assert repr(name) in caught.value.message


@pytest.mark.parametrize("number", sorted(signal.Signals))
def test_every_name_leads_back(number: signal.Signals) -> None:
    assert parse_signal(signal_name(number)) == number


def test_a_real_time_signal_without_a_name_has_its_number() -> None:
    assert signal_name(signal.SIGRTMIN + 1) == f"SIG{signal.SIGRTMIN + 1}"


@given(st.text(max_size=12))
def test_any_text_is_a_signal_or_refused(name: str) -> None:
    try:
        outcome = f"{name!r} is {parse_signal(name).name}"
    except UnknownSignal as error:
        outcome = str(error)
    assert repr(name) in outcome
