"""Limits of a bridge on models, routes, calls, tokens and money; pure decisions.

A call is admitted or refused before it starts, never half-way. Admission reserves the tokens that the call may use,
and its end settles them, so concurrent calls cannot exceed a budget together.
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
#: Fields that start work which continues after the call: the bridge sees neither its end nor its tokens.
_DETACHED: Final = ("background",)
#: Fields that refer to input stored at the provider: its size is unknown, and it may belong to another sandbox with
#: the same key.
_STORED_INPUT: Final = ("previous_response_id", "conversation", "cachedContent", "cached_content")
#: English text and code have about four bytes per token in current tokenizers.
BYTES_A_TOKEN: Final = 4
#: Documented cost of an image of about a million pixels.
IMAGE_TOKENS: Final = 1_600
#: Roles and separators around each turn.
TURN_TOKENS: Final = 4


class Price(msgspec.Struct, frozen=True):
    """Price of a million tokens, in the currency of `BridgeLimits.money`."""

    input: float
    output: float
    #: Price of cached input; None: as other input.
    cached: float | None = None

    def of(self, usage: TokenUsage) -> float:
        cached = min(usage.cached, usage.input)
        fresh = usage.input - cached
        per_cached = self.input if self.cached is None else self.cached
        return (fresh * self.input + cached * per_cached + usage.output * self.output) / 1_000_000


class BridgeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one bridge. None: no limit."""

    #: Model names that are allowed; `*` and `?` are wildcards. Keeps agents from choosing a more expensive model.
    models: tuple[str, ...] | None = None
    #: Paths that are allowed; `*` and `?` are wildcards.
    routes: tuple[str, ...] | None = None
    #: Calls in total.
    requests: int | None = None
    #: Input and output tokens in total, as the responses report them.
    tokens: int | None = None
    #: Money in total, by `prices`. A model without a price is refused: its cost is unknown.
    money: float | None = None
    #: Price of a million tokens by model name; `*` and `?` are wildcards, the first match counts.
    prices: dict[str, Price] = {}
    #: Concurrent calls; a further one is refused, and clients retry by themselves. Far more than an agent opens,
    #: and few enough that a runaway loop does not exhaust the provider's rate limit.
    concurrency: int = 64
    #: Size of one request: as large as the providers accept with images.
    body_bytes: int = 50 * MIB
    #: Seconds for one whole call. No response takes as long; a hanging connection does.
    timeout: float | None = 3600.0
    #: Output tokens reserved for a call that names no maximum: more than nearly every response has. Such a call can
    #: exceed the budget by the excess over this number.
    assumed_output_tokens: int = 8_192
    #: Fields and paths that are allowed though their work cannot be counted: `background`, `previous_response_id`,
    #: `conversation`, `prompt`, `cachedContent`, `/v1/batches`; in paths `*` and `?` are wildcards.
    unmetered: tuple[str, ...] = ()
    #: Seconds until a response begins: the timeout of the providers' own clients.
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
        """True if a limit depends on token counts."""
        return self.tokens is not None or self.money is not None


#: The public name in `holdfast.bridge`.
Limits = BridgeLimits


class Refusal(msgspec.Struct, frozen=True):
    """Reason for not admitting a call, as an HTTP status and a message; each dialect renders it."""

    status: int
    message: str
    #: A retry cannot succeed. Clients retry after a 429 unless a header forbids it.
    final: bool = False


class Spent(msgspec.Struct, frozen=True):
    """Totals of all calls so far."""

    requests: int = 0
    tokens: int = 0
    money: float = 0.0
    running: int = 0
    #: Upper bound, as far as it is known, for the running calls.
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
            # Rounding errors of the sums would accumulate.
            self.reserved_money - settled.money if running else 0.0,
        )


class RequestedTokens(msgspec.Struct, frozen=True):
    """Tokens of a request: estimated input and maximum output; None if the request names no maximum."""

    input: int
    output: int | None = None


class Reservation(msgspec.Struct, frozen=True):
    """Tokens and money set aside for one running call."""

    tokens: int = 0
    money: float = 0.0


def refuse_request(limits: BridgeLimits, spent: Spent, path: str, body_bytes: int) -> Refusal | None:
    """Check path, size and remaining budget, before the request is parsed."""
    if not limits.allows_route(path):
        return Refusal(403, f"{path}: this sandbox may not use this route")
    if body_bytes > limits.body_bytes:
        return Refusal(413, f"the request has {body_bytes} bytes, more than {limits.body_bytes}")
    if spent.running >= limits.concurrency:
        return Refusal(429, f"{spent.running} calls are running, the maximum; try again later")
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
    limits: BridgeLimits, spent: Spent, requested: RequestedTokens, price: Price | None
) -> Reservation | Refusal:
    """Reserve what the call may use, if the budget allows it beside the running calls."""
    tokens_left = None if limits.tokens is None else limits.tokens - spent.tokens - spent.reserved_tokens
    money_left = None if limits.money is None else limits.money - spent.money - spent.reserved_money
    output = requested.output
    if output is None:
        # A call without a maximum gets the rest of the budget, up to a likely size.
        output = limits.assumed_output_tokens
        if tokens_left is not None:
            output = min(output, max(1, tokens_left - requested.input))
        if money_left is not None and price is not None and price.output > 0:
            affordable = (money_left - price.of(TokenUsage(requested.input))) * 1_000_000 / price.output
            output = min(output, max(1, int(affordable)))
    tokens = requested.input + output
    money = 0.0 if price is None else price.of(TokenUsage(requested.input, output))
    # Running calls will return a part of their reservation.
    final = not spent.reserved_tokens
    if tokens_left is not None and tokens > tokens_left:
        text = f"the request may use up to {tokens} tokens ({requested.input} in, {output} out)"
        return Refusal(429, f"{text}, and {max(0, tokens_left)} of the budget of {limits.tokens} are left", final)
    if money_left is not None and money > money_left:
        text = f"the request may cost {money:.4f}, and {max(0.0, money_left):.4f}"
        return Refusal(429, f"{text} of the budget of {limits.money:g} are left", final)
    return Reservation(tokens, money)


def refuse_unmetered(limits: BridgeLimits, body: Mapping[str, Any]) -> Refusal | None:
    """Refuse fields that start work or refer to input outside of the budget."""
    names = [name for name in _DETACHED if body.get(name)]
    if limits.has_budget:
        names += [name for name in _STORED_INPUT if body.get(name) is not None]
        if isinstance(body.get("prompt"), Mapping):
            names.append("prompt")
    for name in names:
        if name not in limits.unmetered:
            text = f"{name}: its tokens cannot be counted, and the bridge does not allow it"
            return Refusal(403, text)
    return None


def refuse_unmetered_route(limits: BridgeLimits, method: str, path: str) -> Refusal | None:
    """Refuse paths without a dialect while there is a budget: batches, files, fine-tuning."""
    if not limits.has_budget or method in ("GET", "HEAD") or any(fnmatchcase(path, n) for n in limits.unmetered):
        return None
    return Refusal(403, f"{path}: its work cannot be counted, and the bridge has a budget")


def refuse_model(limits: BridgeLimits, model: str) -> Refusal | None:
    """Check the requested model."""
    if not limits.allows_model(model):
        return Refusal(403, f"model {model!r}: this sandbox may not use it")
    return None


def refuse_unpriced(limits: BridgeLimits, model: str) -> Refusal | None:
    """Check that the model has a price. The provider's name for it may differ from the requested one."""
    if limits.money is not None and limits.price_of(model) is None:
        return Refusal(403, f"model {model!r}: has no price, and the bridge has a money budget")
    return None


def estimate_tokens(request: ModelRequest) -> int:
    """Estimate the tokens of a request: at least 1, and never fewer for a longer request."""
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
