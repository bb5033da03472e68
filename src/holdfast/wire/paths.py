"""The encoding of paths, file names and link targets on the wire; pure.

Neither JSON nor MessagePack can carry text that is not UTF-8, and file names may be any bytes. UTF-8 text is sent
as it is; any other bytes, and text that begins with `file:`, are sent as `file:` and the percent-encoded bytes.
So every `file:` URI of this machine is also a path, and the Codex client sends all paths as such URIs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import quote, unquote_to_bytes

import msgspec

from holdfast.errors import InvalidParams
from holdfast.types import DirEntry, FileInfo, WatchEvent, WatchRead

Info = TypeVar("Info", bound=FileInfo)

SCHEME: Final = "file:"


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


def map_paths(info: Info, code: Callable[[str], str]) -> Info:
    """`info` with its file name and link target passed through `encode_path` or `decode_path`."""
    changed = {} if info.target is None else {"target": code(info.target)}
    if isinstance(info, DirEntry):
        changed["name"] = code(info.name)
    return msgspec.structs.replace(info, **changed) if changed else info


def map_event_paths(read: WatchRead, code: Callable[[str], str]) -> WatchRead:
    """`read` with the names of its events passed through `encode_path` or `decode_path`."""

    def mapped(event: WatchEvent) -> WatchEvent:
        old_name = None if event.old_name is None else code(event.old_name)
        return msgspec.structs.replace(event, name=code(event.name), old_name=old_name)

    return WatchRead(tuple(map(mapped, read.events)), read.ended)
