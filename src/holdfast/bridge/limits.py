"""What a bridge allows: which models and routes, how many calls, tokens and how much money; pure decisions.

Nothing is refused half-way through: a call is let in or not, and what it took is counted when it has ended. So a
budget can be passed by what the calls take that run at that moment, which `concurrency` bounds.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

import msgspec

from holdfast.bridge.normal import Usage
from holdfast.errors import InvalidParams

MIB: Final = 1024 * 1024


class Price(msgspec.Struct, frozen=True):
    """Of a million tokens, in whatever currency `Limits.money` is."""

    input: float
    output: float
    #: Of input that the provider had in its cache; None: as other input.
    cached: float | None = None

    def of(self, usage: Usage) -> float:
        cached = min(usage.cached, usage.input)
        fresh = usage.input - cached
        per_cached = self.input if self.cached is None else self.cached
        return (fresh * self.input + cached * per_cached + usage.output * self.output) / 1_000_000


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one bridge. None: no limit."""

    #: Names that may be asked for; `*` and `?` stand for any. For agents that should not choose a dearer model.
    models: tuple[str, ...] | None = None
    #: Paths that may be asked for; `*` and `?` stand for any.
    routes: tuple[str, ...] | None = None
    #: Calls, in all.
    requests: int | None = None
    #: Tokens in and out, in all, as the answers tell them.
    tokens: int | None = None
    #: Money in all, by `prices`. A model without a price is refused then: it could not be counted.
    money: float | None = None
    #: The price of a million tokens by the model's name; `*` and `?` stand for any, the first that fits counts.
    prices: dict[str, Price] = {}
    #: Calls at a time; a further one is refused, and clients try again by themselves. Far more than an agent has
    #: open, and few enough that a runaway loop does not use up the provider's rate limit for everybody.
    concurrency: int = 64
    #: Of one request. What the providers take with images in it.
    body_bytes: int = 50 * MIB
    #: Seconds for one call in all. No answer is as long as that; a connection that hangs is.
    timeout: float | None = 3600.0
    #: Seconds until an answer begins: as long as the providers' own clients wait.
    first_token_timeout: float | None = 600.0

    def __post_init__(self) -> None:
        for name in ("requests", "tokens", "money", "concurrency", "body_bytes", "timeout", "first_token_timeout"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidParams(f"limits: {name} is {value}: it cannot be negative")
        for name in ("models", "routes"):
            if isinstance(getattr(self, name), str):
                raise InvalidParams(f"limits: {name} is a str: give a tuple of names")
        if self.money is not None and not self.prices:
            raise InvalidParams("limits: money needs prices, or nothing can be counted")

    def price_of(self, model: str) -> Price | None:
        return next((price for name, price in self.prices.items() if fnmatchcase(model, name)), None)

    def allows_model(self, model: str) -> bool:
        return self.models is None or any(fnmatchcase(model, name) for name in self.models)

    def allows_route(self, path: str) -> bool:
        return self.routes is None or any(fnmatchcase(path, name) for name in self.routes)

    @property
    def has_budget(self) -> bool:
        """Whether tokens must be counted for a limit to hold."""
        return self.tokens is not None or self.money is not None


class Refusal(msgspec.Struct, frozen=True):
    """Why a call is not let in, as an HTTP status and words; each dialect says it in its own way."""

    status: int
    message: str
    #: Trying again would not help: clients are told, or they would after every 429.
    final: bool = False


class Spent(msgspec.Struct, frozen=True):
    """What the calls so far have taken."""

    requests: int = 0
    tokens: int = 0
    money: float = 0.0
    running: int = 0

    def begun(self) -> Spent:
        return msgspec.structs.replace(self, requests=self.requests + 1, running=self.running + 1)

    def ended(self, tokens: int, money: float) -> Spent:
        return Spent(self.requests, self.tokens + tokens, self.money + money, self.running - 1)


def refuse_request(limits: Limits, spent: Spent, path: str, body_bytes: int) -> Refusal | None:
    """Before the request is looked into: its path, its size, and what is left."""
    if not limits.allows_route(path):
        return Refusal(403, f"{path}: this sandbox may not use this route")
    if body_bytes > limits.body_bytes:
        return Refusal(413, f"the request has {body_bytes} bytes, and {limits.body_bytes} are allowed")
    if spent.running >= limits.concurrency:
        return Refusal(429, f"{spent.running} calls run, which is as many as may at a time; try again later")
    if limits.requests is not None and spent.requests >= limits.requests:
        return Refusal(429, f"the budget of {limits.requests} requests is used up", final=True)
    if limits.tokens is not None and spent.tokens >= limits.tokens:
        return Refusal(
            429, f"the budget of {limits.tokens} tokens is used up ({spent.tokens} were used)", final=True
        )
    if limits.money is not None and spent.money >= limits.money:
        return Refusal(429, f"the budget of {limits.money:g} is used up ({spent.money:.4f} was used)", final=True)
    return None


def refuse_model(limits: Limits, model: str) -> Refusal | None:
    """Once it is known which model is asked for."""
    if not limits.allows_model(model):
        return Refusal(403, f"model {model!r}: this sandbox may not use it")
    return None


def refuse_unpriced(limits: Limits, model: str) -> Refusal | None:
    """Once it is known which model will be paid for: the provider's name of it may be another."""
    if limits.money is not None and limits.price_of(model) is None:
        return Refusal(403, f"model {model!r}: has no price, and there is a budget of money")
    return None
