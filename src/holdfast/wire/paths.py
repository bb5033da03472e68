"""How a path, a name or a link's target is written on the wire; pure.

Neither JSON nor MessagePack can carry text that is no UTF-8, and file names may be any bytes. One rule, both ways:
text that is UTF-8 stands for itself; any other bytes, and text that begins with `file:`, are `file:` and the bytes
percent-encoded. So every `file:` URI of this machine is a path as well, which is how the Codex client writes all.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote_to_bytes

from holdfast.errors import InvalidParams

SCHEME: Final = "file:"


def encode_path(path: str) -> str:
    """Text as `os.fsdecode` gives it, as the wire has it."""
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
    # Two slashes would begin the name of a machine.
    return SCHEME + (f"%2F{text[1:]}" if text.startswith("//") else text)


def decode_path(text: str) -> str:
    """The wire's text as `os.fsdecode` would give it."""
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
