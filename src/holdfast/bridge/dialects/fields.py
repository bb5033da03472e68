"""Typed access to the fields of untrusted JSON: every mistake is InvalidParams with the path of the field; pure.

The dialects parse requests only through this module, so no malformed request can raise anything else.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import msgspec

from holdfast.bridge.types import StopReason
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import HttpRequest

_DATA_URL: Final = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.ASCII)
_KINDS: Final = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


class Fields:
    """A JSON object and its path. A null field counts as missing, as it does at the providers."""

    def __init__(self, value: dict[str, Any], path: str = "") -> None:
        self.value = value
        self.path = path

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def refuse(self, name: str, problem: str) -> NoReturn:
        path = self.at(name)
        raise InvalidParams(f"{path}: {problem}", path=path)

    def wrong(self, name: str, wanted: str) -> NoReturn:
        self.refuse(name, f"must be {wanted}, not {kind_of(self.value.get(name))}")

    def has(self, *names: str) -> bool:
        return any(self.value.get(name) is not None for name in names)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.value.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            if value is None:
                self.refuse(name, "is missing")
            self.wrong(name, "a string")
        return value

    def integer(self, name: str) -> int | None:
        value = self.number(name)
        if value is None:
            return None
        if value != value // 1:
            self.wrong(name, "a whole number")
        return int(value)

    def number(self, name: str) -> float | None:
        value = self.value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong(name, "a number")
        if abs(value) > 1e300:
            self.refuse(name, "is too large a number")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.value.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(name, "a boolean")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; a single string is a list of one."""
        value = self.value.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            self.wrong(name, "a string or an array of strings")
        for index, item in enumerate(value):
            if not isinstance(item, str):
                self.refuse(f"{name}[{index}]", f"must be a string, not {kind_of(item)}")
        return tuple(value)

    def object(self, name: str) -> Fields:
        found = self.maybe(name)
        if found is None:
            self.refuse(name, "is missing")
        return found

    def maybe(self, name: str) -> Fields | None:
        value = self.value.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.wrong(name, "an object")
        return Fields(value, self.at(name))

    def items(self, name: str) -> Iterator[Fields]:
        """Yield the objects of a list."""
        value = self.value.get(name)
        if value is None:
            return
        if not isinstance(value, list):
            self.wrong(name, "an array")
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                self.refuse(f"{name}[{index}]", f"must be an object, not {kind_of(item)}")
            yield Fields(item, self.at(f"{name}[{index}]"))

    def base64(self, name: str) -> bytes:
        """Return bytes from either base64 alphabet, with or without padding: clients differ."""
        text = self.text(name)
        decoded = from_base64(text)
        if decoded is None:
            self.refuse(name, "is not base64")
        return decoded


def kind_of(value: object) -> str:
    return _KINDS.get(type(value), "a number")


def from_base64(text: str) -> bytes | None:
    plain = text.replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def from_data_url(url: str) -> tuple[str, bytes] | None:
    """Return media type and bytes of a base64 `data:` URL; None for any other URL."""
    head = _DATA_URL.match(url)
    if head is None or not head[2].lower().endswith(";base64"):
        return None
    data = from_base64(url[head.end() :])
    return None if data is None else (head[1].lower(), data)


def count(counts: object, name: str) -> int:
    """Return a count of a provider's reply; 0 if it is not a count, since replies are only forwarded."""
    value = counts.get(name) if isinstance(counts, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def native(table: Mapping[StopReason, str], word: object) -> StopReason | None:
    """Return the neutral stop reason for a provider's; None if it follows from the content, or is unknown."""
    return next((ours for ours, theirs in table.items() if theirs == word), None)


def json_text(value: Any) -> str:
    """Encode JSON. A decodable value may be too deep to encode from further down the stack."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise InvalidParams("the body is nested too deeply") from error


#: Fields that decide admission or counting. A provider may read them in another case, or without underscores, and
#: the bridge's check would miss them.
_DECIDING: Final = (
    *("model", "stream", "stream_options", "background", "store", "previous_response_id", "conversation", "prompt"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "cachedContent"),
    *("cached_content", "generationConfig", "generation_config", "messages", "input", "contents"),
)


def _folded(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


_SPELLINGS: Final = {_folded(name): name for name in _DECIDING}


def checked_body(request: HttpRequest) -> Fields:
    """Return the body if all JSON parsers read it alike: no duplicate name, no misspelt deciding field."""
    body = body_fields(request)
    try:
        _doubles.decode(request.body.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidParams(f"the body is not JSON: {error}", path="") from error
    seen: dict[str, str] = {}
    for name in body.value:
        folded = _folded(name)
        if folded in seen:
            body.refuse(name, f"conflicts with {seen[folded]!r}, which some parsers treat as the same")
        if folded in _SPELLINGS and name not in _DECIDING:
            body.refuse(name, f"must be written {_SPELLINGS[folded]!r}")
        seen[folded] = name
    return body


def _without_doubles(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise InvalidParams(f"{double}: appears twice", path=double)


_doubles: Final = json.JSONDecoder(object_pairs_hook=_without_doubles)


def body_fields(request: HttpRequest) -> Fields:
    """Return the body, which must be one JSON object."""
    encoding = request.header("content-encoding")
    if encoding not in (None, "", "identity"):
        raise InvalidParams(f"content-encoding: {encoding} is not supported; send the body as plain JSON")
    try:
        value = msgspec.json.decode(request.body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidParams(f"the body is not JSON: {error}", path="") from error
    if not isinstance(value, dict):
        raise InvalidParams(f"the body must be a JSON object, not {kind_of(value)}", path="")
    return Fields(value)
