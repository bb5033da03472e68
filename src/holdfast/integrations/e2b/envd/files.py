"""`/files` of envd: download, and upload as multipart or as an octet stream, with or without gzip.

Contents pass through in pieces. The caller has checked the token or the signature of the URL.
"""

from __future__ import annotations

import posixpath
import urllib.parse
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final

from starlette.types import Send

from holdfast.client.files.files import file_pieces
from holdfast.integrations.e2b.envd.multipart import PartBegin, PartData, PartEnd, boundary_of, part_events
from holdfast.integrations.e2b.open_sandbox import OpenSandbox
from holdfast.integrations.e2b.problems import Problem, invalid

#: Decompressed bytes of one step: a small input can become a thousand times as large.
_GZIP_STEP: Final = 1024 * 1024
_GZIP_WINDOW: Final = 31
#: Fast rather than small: most of the time is spent here.
_GZIP_LEVEL: Final = 1


async def download(opened: OpenSandbox, path: str, user: str, headers: Mapping[str, str], send: Send) -> None:
    """Send a file. It is compressed only if the client accepts nothing else, because most clients list gzip."""
    if not path:
        raise invalid("path: missing")
    path = await opened.path(path, user)
    run_as = opened.run_as(user)
    found = await opened.box.stat(path, user=run_as)
    if found.type != "file":
        raise invalid(f"{path}: is a {found.type}, not a file")
    compressed = headers.get("accept-encoding", "").strip().lower() == "gzip"
    name = urllib.parse.quote(posixpath.basename(path), safe="", errors="surrogateescape")
    reply = [
        (b"content-type", b"application/octet-stream"),
        (b"content-disposition", f"inline; filename*=UTF-8''{name}".encode()),
    ]
    async with aclosing(file_pieces(opened.box.api.files, path, user=run_as)) as pieces:
        first = await anext(pieces, None)
        if first is not None and first.eof and not compressed:
            reply.append((b"content-length", str(len(first.data)).encode()))
        elif compressed:
            reply.append((b"content-encoding", b"gzip"))
        await send({"type": "http.response.start", "status": 200, "headers": reply})
        squeeze = zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_WINDOW) if compressed else None
        piece = first
        while piece is not None:
            data = piece.data if squeeze is None else squeeze.compress(piece.data)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            piece = await anext(pieces, None)
    await send({"type": "http.response.body", "body": b"" if squeeze is None else squeeze.flush()})


async def upload(
    opened: OpenSandbox,
    path: str,
    user: str,
    headers: Mapping[str, str],
    body: AsyncIterator[bytes],
    limit: int,
) -> list[dict[str, Any]]:
    """Write the files of a request and return their descriptions."""
    if any(name.startswith("x-metadata-") for name in headers):
        raise invalid("metadata of files: this server does not have it")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", ""):
        raise invalid(f"Content-Encoding: {encoding[:20]!r} is not gzip")
    content = _bounded(_unzipped(body) if encoding == "gzip" else body, limit)
    boundary = boundary_of(headers.get("content-type", ""))
    if boundary is None:
        if not path:
            raise invalid("path: missing")
        return [await _write(opened, path, user, content)]
    written: list[dict[str, Any]] = []
    async with aclosing(part_events(content, boundary)) as events:
        async for event in events:
            if not isinstance(event, PartBegin):
                continue
            target = path or event.filename
            if event.name != "file" or not target:
                raise invalid("multipart: each part is a file: its name is 'file', its filename a path")
            if path and written:
                raise invalid("path: names one file, and the request has several")
            written.append(await _write(opened, target, user, _part(events)))
    if not written:
        raise invalid("multipart: no file")
    return written


async def _write(opened: OpenSandbox, path: str, user: str, content: AsyncIterator[bytes]) -> dict[str, Any]:
    path = await opened.path(path, user)
    await opened.box.write_file(path, content, user=opened.run_as(user))
    return {"path": path, "name": posixpath.basename(path), "type": "file"}


async def _part(events: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    """The content of the part that has begun."""
    async for event in events:
        if isinstance(event, PartData):
            yield event.data
        elif isinstance(event, PartEnd):
            return


async def _bounded(body: AsyncIterator[bytes], limit: int) -> AsyncGenerator[bytes, None]:
    size = 0
    async for piece in body:
        size += len(piece)
        if size > limit:
            raise Problem(413, "resource_exhausted", f"an upload of more than {limit} bytes")
        yield piece


async def _unzipped(body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    inflate = zlib.decompressobj(wbits=_GZIP_WINDOW)
    try:
        async for piece in body:
            data = inflate.decompress(piece, _GZIP_STEP)
            while data:
                yield data
                data = inflate.decompress(inflate.unconsumed_tail, _GZIP_STEP)
        yield inflate.flush()
    except zlib.error as error:
        raise invalid(f"the body is not gzip: {error}") from None
    if not inflate.eof:
        raise invalid("the body ends within the gzip data")
