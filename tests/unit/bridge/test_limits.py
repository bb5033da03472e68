"""Admission and counters of a bridge: decisions on plain values."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.bridge import Limits, Price, Spent, Usage
from holdfast.bridge.limits import (
    Refusal,
    RequestedTokens as Requested,
    Reservation,
    refuse_model,
    refuse_request,
    refuse_unmetered,
    refuse_unmetered_route,
    refuse_unpriced,
    reserve,
)
from holdfast.errors import InvalidParams

PATH = "/v1/chat/completions"


def status_of(limits: Limits, spent: Spent, size: int = 10) -> int | None:
    refusal = refuse_request(limits, spent, PATH, size)
    return None if refusal is None else refusal.status


def test_without_limits_everything_reasonable_is_let_in() -> None:
    assert status_of(Limits(), Spent(10_000, 10**9, 10.0**6, 63)) is None


@pytest.mark.parametrize(
    ("limits", "spent", "size", "status"),
    [
        (Limits(concurrency=2), Spent(running=2), 10, 429),
        (Limits(concurrency=0), Spent(), 10, 429),
        (Limits(requests=3), Spent(requests=3), 10, 429),
        (Limits(tokens=100), Spent(tokens=100), 10, 429),
        (Limits(money=1.5, prices={"*": Price(1, 1)}), Spent(money=1.5), 10, 429),
        (Limits(body_bytes=10), Spent(), 11, 413),
        (Limits(routes=("/v1/messages*",)), Spent(), 10, 403),
    ],
)
def test_a_limit_that_is_reached_refuses(limits: Limits, spent: Spent, size: int, status: int) -> None:
    assert status_of(limits, spent, size) == status


@pytest.mark.parametrize(
    ("limits", "spent"),
    [
        (Limits(concurrency=2), Spent(running=1)),
        (Limits(requests=3), Spent(requests=2)),
        (Limits(tokens=100), Spent(tokens=99)),
        (Limits(body_bytes=10), Spent()),
        (Limits(routes=("/v1/chat/*",)), Spent()),
    ],
)
def test_the_last_that_a_limit_allows_is_let_in(limits: Limits, spent: Spent) -> None:
    assert status_of(limits, spent) is None


def test_a_budget_says_that_trying_again_is_of_no_use_and_concurrency_does_not() -> None:
    budget = refuse_request(Limits(requests=0), Spent(), PATH, 0)
    busy = refuse_request(Limits(concurrency=0), Spent(), PATH, 0)
    assert budget is not None
    assert busy is not None
    assert (budget.final, busy.final) == (True, False)


def test_models_are_allowed_by_pattern() -> None:
    limits = Limits(models=("gpt-5-*", "o4"))
    assert refuse_model(limits, "gpt-5-mini") is None
    refusal = refuse_model(limits, "gpt-5")
    assert refusal is not None
    assert (refusal.status, "'gpt-5'" in refusal.message) == (403, True)


def test_a_model_without_a_price_cannot_be_paid() -> None:
    limits = Limits(money=5, prices={"gpt-*": Price(1, 2)})
    assert refuse_unpriced(limits, "gpt-5") is None
    assert refuse_unpriced(limits, "other") is not None
    assert refuse_unpriced(Limits(), "other") is None


def test_money_counts_cached_input_by_its_own_price() -> None:
    usage = Usage(input=1_000_000, output=500_000, cached=400_000)
    assert Price(2.0, 8.0).of(usage) == pytest.approx(6.0)
    assert Price(2.0, 8.0, cached=0.5).of(usage) == pytest.approx(0.6 * 2 + 0.4 * 0.5 + 4.0)


def test_the_first_price_that_fits_counts() -> None:
    limits = Limits(prices={"gpt-5": Price(1, 1), "gpt-*": Price(9, 9)})
    assert limits.price_of("gpt-5") == Price(1, 1)
    assert limits.price_of("gpt-4") == Price(9, 9)


def test_what_is_spent_adds_up() -> None:
    spent = Spent().begun().begun().ended(10, 0.5).begun().ended(5, 0.25)
    assert spent == Spent(requests=3, tokens=15, money=0.75, running=1)


PRICED = Limits(money=10.0, prices={"*": Price(1_000_000, 2_000_000)})


@pytest.mark.parametrize(
    ("limits", "spent", "requested", "reserved"),
    [
        (Limits(tokens=100), Spent(), Requested(10, 90), Reservation(100, 2.0 * 90 + 10)),
        (Limits(tokens=100), Spent(), Requested(10, 91), None),
        (
            Limits(tokens=100),
            Spent(tokens=50, reserved_tokens=30),
            Requested(10, 10),
            Reservation(20, 30.0),
        ),
        (Limits(tokens=100), Spent(tokens=50, reserved_tokens=31), Requested(10, 10), None),
        # Without a maximum it gets what is left, and what is likely at most.
        (Limits(tokens=100), Spent(), Requested(10), Reservation(100, 190.0)),
        (Limits(tokens=100), Spent(), Requested(100), None),
        (Limits(tokens=10**6), Spent(), Requested(10), Reservation(8_202, 10.0 + 2 * 8_192)),
        (PRICED, Spent(), Requested(4, 3), Reservation(7, 10.0)),
        (PRICED, Spent(), Requested(4, 4), None),
        (PRICED, Spent(money=2.0, reserved_money=1.0), Requested(4, 2), None),
        (PRICED, Spent(), Requested(4), Reservation(7, 10.0)),
        (PRICED, Spent(), Requested(11), None),
    ],
)
def test_what_a_call_asks_for_is_reserved_or_refused(
    limits: Limits, spent: Spent, requested: Requested, reserved: Reservation | None
) -> None:
    found = reserve(limits, spent, requested, Price(1_000_000, 2_000_000))
    if reserved is not None:
        assert found == reserved
    else:
        assert isinstance(found, Refusal)
        # While others run, a part of what they reserved may come back.
        assert (found.status, found.final) == (429, not spent.reserved_tokens)


def test_what_was_reserved_is_settled() -> None:
    reservation = Reservation(100, 1.5)
    spent = Spent().begun().reserved(reservation)
    assert (spent.reserved_tokens, spent.reserved_money) == (100, 1.5)
    assert spent.ended(7, 0.25, reservation) == Spent(requests=1, tokens=7, money=0.25)


@pytest.mark.parametrize(
    ("limits", "body", "refused"),
    [
        (Limits(), {"background": True}, "background"),
        (Limits(), {"background": False}, ""),
        (Limits(unmetered=("background",)), {"background": True}, ""),
        (Limits(), {"previous_response_id": "r"}, ""),
        (Limits(tokens=9), {"previous_response_id": "r"}, "previous_response_id"),
        (Limits(tokens=9), {"previous_response_id": None}, ""),
        (Limits(tokens=9), {"conversation": {"id": "c"}}, "conversation"),
        (Limits(tokens=9), {"cachedContent": "c"}, "cachedContent"),
        (Limits(tokens=9), {"prompt": {"id": "p"}}, "prompt"),
        (Limits(tokens=9), {"prompt": "words"}, ""),
        (Limits(tokens=9, unmetered=("conversation",)), {"conversation": "c"}, ""),
    ],
)
def test_fields_whose_work_cannot_be_counted_are_refused(
    limits: Limits, body: dict[str, Any], refused: str
) -> None:
    refusal = refuse_unmetered(limits, body)
    if refused:
        assert refusal is not None
        assert (refusal.status, refusal.message.partition(":")[0]) == (403, refused)
    else:
        assert refusal is None


@pytest.mark.parametrize(
    ("limits", "method", "allowed"),
    [
        (Limits(), "POST", True),
        (Limits(tokens=9), "POST", False),
        (Limits(tokens=9), "GET", True),
        (Limits(tokens=9, unmetered=("/v1/batch*",)), "POST", True),
    ],
)
def test_paths_whose_work_cannot_be_counted_are_refused(limits: Limits, method: str, allowed: bool) -> None:
    assert (refuse_unmetered_route(limits, method, "/v1/batches") is None) == allowed


@pytest.mark.parametrize("wrong", [{"requests": -1}, {"timeout": -0.1}, {"money": 1.0}, {"models": "gpt-5"}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidParams, match=next(iter(wrong))):
        Limits(**wrong)  # type: ignore[arg-type]
