"""OpenAI's `/v1/embeddings`: parses requests, renders vectors as numbers or as base64; pure."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from holdfast.bridge.dialects.fields import Fields, body_fields
from holdfast.bridge.types import JsonObject, TokenUsage
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import HttpRequest

#: The provider's own limit.
MAX_INPUTS: Final = 2048


class EmbeddingsRequest(msgspec.Struct, frozen=True):
    """Texts, or runs of token numbers, to be turned into vectors."""

    model: str
    input: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    base64: bool = False
    raw: JsonObject = {}


def parse(request: HttpRequest) -> EmbeddingsRequest:
    body = body_fields(request)
    encoding = body.text("encoding_format", "float")
    if encoding not in ("float", "base64"):
        body.refuse("encoding_format", f"{encoding!r} is not one of float, base64")
    return EmbeddingsRequest(
        body.text("model"), _inputs(body), body.integer("dimensions"), encoding == "base64", body.value
    )


def _inputs(body: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = body.value.get("input")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        body.wrong("input", "a string or an array that is not empty")
    if _numbers(value):
        return (tuple(value),)
    if len(value) > MAX_INPUTS:
        body.refuse("input", f"has {len(value)} members; at most {MAX_INPUTS} are taken at once")
    inputs: list[str | tuple[int, ...]] = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            inputs.append(item)
        elif isinstance(item, list) and _numbers(item):
            inputs.append(tuple(item))
        else:
            body.refuse(f"input[{index}]", "must be a string or an array of token numbers")
    return tuple(inputs)


def _numbers(items: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def render(
    vectors: Sequence[Sequence[float]], request: EmbeddingsRequest, usage: TokenUsage, model: str = ""
) -> bytes:
    """Render one vector for each input, in order."""
    if len(vectors) != len(request.input):
        raise InvalidParams(f"{len(vectors)} vectors for {len(request.input)} inputs")
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if request.base64 else list(vector)}
        for index, vector in enumerate(vectors)
    ]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": data,
            "model": model or request.model,
            "usage": {"prompt_tokens": usage.input, "total_tokens": usage.input},
        }
    )


def _packed(vector: Sequence[float]) -> str:
    """Encode little-endian single precision, which clients decode."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
