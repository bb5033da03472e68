"""What a bridge allows: which models and routes, how many calls, tokens and how much money; pure decisions.

Nothing is refused half-way through: a call is let in or not. What it asks for is reserved when it is let in, and
settled by what it took when it has ended, so calls that run at the same time cannot pass a budget together.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from holdfast.bridge.types import (
    FilePart,
    ImagePart,
    ModelRequest,
    Part,
    TextPart,
    ThinkingPart,
    TokenUsage,
    ToolCallPart,
    ToolResultPart,
)
from holdfast.errors import InvalidParams

MIB: Final = 1024 * 1024
#: Fields that start work which goes on without the call: neither its end nor its tokens are seen.
_DETACHED: Final = ("background",)
#: Fields that bring input which is kept at the provider: how much it is cannot be known before, and it may be that
#: of another sandbox which has the same key.
_KEPT_INPUT: Final = ("previous_response_id", "conversation", "cachedContent", "cached_content")
#: English text and code take about four bytes a token in the tokenizers of today.
BYTES_A_TOKEN: Final = 4
#: What an image of about a million pixels takes at the providers that say.
IMAGE_TOKENS: Final = 1_600
#: Roles and separators around each turn.
TURN_TOKENS: Final = 4


class Price(msgspec.Struct, frozen=True):
    """Of a million tokens, in whatever currency `BridgeLimits.money` is."""

    input: float
    output: float
    #: Of input that the provider had in its cache; None: as other input.
    cached: float | None = None

    def of(self, usage: TokenUsage) -> float:
        cached = min(usage.cached, usage.input)
        fresh = usage.input - cached
        per_cached = self.input if self.cached is None else self.cached
        return (fresh * self.input + cached * per_cached + usage.output * self.output) / 1_000_000


class BridgeLimits(msgspec.Struct, frozen=True, kw_only=True):
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
    #: Output of a call that names no maximum, as it is reserved: more than nearly every answer has. Such a call can
    #: pass the budget by what its answer has beyond this.
    assumed_output_tokens: int = 8_192
    #: Fields and paths that are let in though their work cannot be counted: `background`, `previous_response_id`,
    #: `conversation`, `prompt`, `cachedContent`, `/v1/batches`; in paths `*` and `?` stand for any.
    unmetered: tuple[str, ...] = ()
    #: Seconds until an answer begins: as long as the providers' own clients wait.
    first_token_timeout: float | None = 600.0

    def __post_init__(self) -> None:
        numbers = ("requests", "tokens", "money", "concurrency", "body_bytes", "timeout", "first_token_timeout")
        for name in (*numbers, "assumed_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidParams(f"limits: {name} is {value}: it cannot be negative")
        for name in ("models", "routes", "unmetered"):
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


#: The public name in `holdfast.bridge`.
Limits = BridgeLimits


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
    #: Of the calls that run: what they may take at most, as far as that is known.
    reserved_tokens: int = 0
    reserved_money: float = 0.0

    def begun(self) -> Spent:
        return msgspec.structs.replace(self, requests=self.requests + 1, running=self.running + 1)

    def reserved(self, what: Reservation) -> Spent:
        return msgspec.structs.replace(
            self,
            reserved_tokens=self.reserved_tokens + what.tokens,
            reserved_money=self.reserved_money + what.money,
        )

    def ended(self, tokens: int, money: float, settled: Reservation | None = None) -> Spent:
        settled = settled or Reservation()
        running = self.running - 1
        return Spent(
            self.requests,
            self.tokens + tokens,
            self.money + money,
            running,
            self.reserved_tokens - settled.tokens,
            # Sums of fractions leave a rest, which would add up.
            self.reserved_money - settled.money if running else 0.0,
        )


class RequestedTokens(msgspec.Struct, frozen=True):
    """The tokens that a request asks for: its input by estimate, and its output at most; None: it names none."""

    input: int
    output: int | None = None


class Reservation(msgspec.Struct, frozen=True):
    """What is set aside for one call while it runs."""

    tokens: int = 0
    money: float = 0.0


def refuse_request(limits: BridgeLimits, spent: Spent, path: str, body_bytes: int) -> Refusal | None:
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


def reserve(
    limits: BridgeLimits, spent: Spent, asked: RequestedTokens, price: Price | None
) -> Reservation | Refusal:
    """What the call may take, if that much is left beside the calls that run."""
    tokens_left = None if limits.tokens is None else limits.tokens - spent.tokens - spent.reserved_tokens
    money_left = None if limits.money is None else limits.money - spent.money - spent.reserved_money
    output = asked.output
    if output is None:
        # A call that names no maximum gets what is left, as far as it is likely to need it.
        output = limits.assumed_output_tokens
        if tokens_left is not None:
            output = min(output, max(1, tokens_left - asked.input))
        if money_left is not None and price is not None and price.output > 0:
            affordable = (money_left - price.of(TokenUsage(asked.input))) * 1_000_000 / price.output
            output = min(output, max(1, int(affordable)))
    tokens = asked.input + output
    money = 0.0 if price is None else price.of(TokenUsage(asked.input, output))
    # The calls that run will give back a part of what is reserved for them.
    final = not spent.reserved_tokens
    if tokens_left is not None and tokens > tokens_left:
        text = f"the request asks for up to {tokens} tokens ({asked.input} in, {output} out)"
        return Refusal(429, f"{text}, and {max(0, tokens_left)} of the budget of {limits.tokens} are left", final)
    if money_left is not None and money > money_left:
        text = f"the request may cost {money:.4f}, and {max(0.0, money_left):.4f}"
        return Refusal(429, f"{text} of the budget of {limits.money:g} are left", final)
    return Reservation(tokens, money)


def refuse_unmetered(limits: BridgeLimits, body: Mapping[str, Any]) -> Refusal | None:
    """A field of a request to a provider that starts work, or brings input, which no budget sees."""
    names = [name for name in _DETACHED if body.get(name)]
    if limits.has_budget:
        names += [name for name in _KEPT_INPUT if body.get(name) is not None]
        if isinstance(body.get("prompt"), Mapping):
            names.append("prompt")
    for name in names:
        if name not in limits.unmetered:
            text = f"{name}: what it starts or brings cannot be counted, and the bridge does not allow it"
            return Refusal(403, text)
    return None


def refuse_unmetered_route(limits: BridgeLimits, method: str, path: str) -> Refusal | None:
    """A path that no dialect has, under a budget: batches, files, fine-tuning."""
    if not limits.has_budget or method in ("GET", "HEAD") or any(fnmatchcase(path, n) for n in limits.unmetered):
        return None
    return Refusal(403, f"{path}: its work cannot be counted, and there is a budget")


def refuse_model(limits: BridgeLimits, model: str) -> Refusal | None:
    """Once it is known which model is asked for."""
    if not limits.allows_model(model):
        return Refusal(403, f"model {model!r}: this sandbox may not use it")
    return None


def refuse_unpriced(limits: BridgeLimits, model: str) -> Refusal | None:
    """Once it is known which model will be paid for: the provider's name of it may be another."""
    if limits.money is not None and limits.price_of(model) is None:
        return Refusal(403, f"model {model!r}: has no price, and there is a budget of money")
    return None


def estimate_tokens(request: ModelRequest) -> int:
    """An estimate, by the sizes above: at least 1, and never less for a longer request."""
    size = len(request.system.encode())
    for tool in request.tools:
        size += len(tool.name.encode()) + len(tool.description.encode()) + len(msgspec.json.encode(tool.schema))
    parts = [part for message in request.messages for part in message.content]
    fixed = TURN_TOKENS * len(request.messages) + sum(IMAGE_TOKENS for part in parts if isinstance(part, ImagePart))
    return max(1, fixed + -(-(size + sum(_bytes_of(part) for part in parts)) // BYTES_A_TOKEN))


def _bytes_of(part: Part) -> int:
    match part:
        case TextPart() | ThinkingPart():
            return len(part.text.encode())
        case ToolCallPart():
            return len(part.name.encode()) + len(part.arguments.encode())
        case ToolResultPart():
            return sum(_bytes_of(inner) for inner in part.content)
        case FilePart():
            return len(part.data)
        case _:
            return 0
