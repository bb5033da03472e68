"""The encoding of paths, file names and link targets on the wire; pure.

Neither JSON nor MessagePack can carry text that is not UTF-8, and file names may be any bytes. UTF-8 text is sent
as it is; any other bytes, and text that begins with `file:`, are sent as `file:` and the percent-encoded bytes.
So every `file:` URI of this machine is also a path, and the Codex client sends all paths as such URIs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import quote, unquote_to_bytes

import msgspec

from holdfast.errors import InvalidParams

Message = TypeVar("Message", bound=msgspec.Struct)

SCHEME: Final = "file:"
#: Fields of the `file/*` messages that hold a path or a name, and those that hold messages with such fields.
_PATHS: Final = frozenset(("path", "source", "target", "after", "name", "old_name"))
_PARTS: Final = frozenset(("entries", "events"))


def encode_path(path: str) -> str:
    """Encode a path, as `os.fsdecode` returns it, for the wire."""
    if not path.startswith(SCHEME):
        try:
            path.encode()
        except UnicodeEncodeError:
            pass
        else:
            return path
    try:
        raw = path.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise InvalidParams(f"path {path!r} holds half of a surrogate pair, which is no character") from None
    text = quote(raw, safe="/")
    # Two slashes would begin a host name.
    return SCHEME + (f"%2F{text[1:]}" if text.startswith("//") else text)


def decode_path(text: str) -> str:
    """Decode a path from the wire to the form that `os.fsdecode` returns."""
    if not text.startswith(SCHEME):
        return text
    rest = text.removeprefix(SCHEME)
    if rest.startswith("//"):
        machine, slash, tail = rest[2:].partition("/")
        if machine not in ("", "localhost"):
            raise InvalidParams(f"path {text!r}: not a file of this machine")
        rest = slash + tail
    return unquote_to_bytes(rest).decode(errors="surrogateescape")


def encode_uri(path: str) -> str:
    """An absolute path as a `file:` URI."""
    return "file://" + quote(path.encode(errors="surrogateescape"), safe="/")


def map_paths(message: Message, code: Callable[[str], str]) -> Message:
    """A message of `file/*` with its paths and names passed through `encode_path` or `decode_path`."""
    changed: dict[str, object] = {}
    for field in _coded_fields(type(message)):
        value = getattr(message, field)
        if isinstance(value, str):
            changed[field] = code(value)
        elif isinstance(value, tuple):
            changed[field] = tuple(map_paths(each, code) for each in value)
    return msgspec.structs.replace(message, **changed) if changed else message


@functools.cache
def _coded_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name in _PATHS or name in _PARTS)
