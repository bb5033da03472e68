"""Tools for files: read, write, edit by exact replacement, list and search."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any, Final

from mcp.server.mcpserver import Context
from pydantic import Field

from holdfast.errors import InvalidParams, LimitReached, SandboxError
from holdfast.integrations.mcp.exec_tools import SandboxName
from holdfast.integrations.mcp.hints import READS, SETS, WRITES
from holdfast.integrations.mcp.results import (
    MAX_RESULT_BYTES,
    FileChanged,
    FileContent,
    FileEntry,
    Listing,
    SearchHit,
    SearchHits,
)
from holdfast.types import DirEntry

if TYPE_CHECKING:
    from holdfast.integrations.mcp.server import SandboxServer

KIB: Final = 1024
#: Characters of content in one call: more than a model writes at once, and below the limit of requests.
MAX_CONTENT_BYTES: Final = 1024 * KIB
#: The largest file of which lines are read; its beginning is passed over in pieces.
MAX_SCANNED_BYTES: Final = 100 * KIB * KIB
MAX_ENTRIES: Final = 2_000
MAX_HITS: Final = 1_000
#: A long line of a search result, as in minified code.
MAX_LINE_CHARACTERS: Final = 500
SEARCH_SECONDS: Final = 30.0

Path = Annotated[str, Field(min_length=1, description="Absolute, or relative to the sandbox's working directory.")]
Offset = Annotated[int, Field(ge=1, description="The number of the first line.")]
Limit = Annotated[int, Field(ge=1, le=100_000, description="Lines to return at most.")]
Content = Annotated[str, Field(max_length=MAX_CONTENT_BYTES)]
Old = Annotated[str, Field(min_length=1, max_length=MAX_CONTENT_BYTES, description="The exact text to replace.")]
Count = Annotated[int, Field(ge=1, description="How often the file must contain old_text; all are replaced.")]
Pattern = Annotated[
    str, Field(min_length=1, max_length=10_000, description="An extended regular expression, as for grep -E.")
]
Glob = Annotated[str, Field(max_length=1_000, description="Only files with such a name: *.py. Empty for all.")]
MaxHits = Annotated[int, Field(ge=1, le=MAX_HITS)]


def add_to(server: SandboxServer) -> None:
    """Add the tools to a server."""

    async def read_file(
        ctx: Context[Any, Any], path: Path, offset: Offset = 1, limit: Limit = 2_000, sandbox: SandboxName = ""
    ) -> FileContent:
        """Read lines of a text file; the beginning of another file as base64."""

        async def read() -> FileContent:
            box = (await server.opened(ctx, sandbox)).box
            size = (await box.stat(path)).size
            if size > MAX_SCANNED_BYTES:
                raise LimitReached(f"{path}: {size} bytes, more than {MAX_SCANNED_BYTES}; use exec_command")
            window = _LineWindow(offset, limit)
            async for piece in box.open_read(path):
                if window.feed(piece):
                    break
            return window.content(size)

        return await server.call(read())

    async def write_file(
        ctx: Context[Any, Any], path: Path, content: Content, sandbox: SandboxName = ""
    ) -> FileChanged:
        """Write a whole file, and the missing directories above it. A reader sees the old content or the new."""

        async def write() -> FileChanged:
            box = (await server.opened(ctx, sandbox)).box
            data = content.encode("utf-8", "surrogatepass")
            await box.write_file(path, data)
            return FileChanged(path=path, size=len(data))

        return await server.call(write())

    async def edit_file(
        ctx: Context[Any, Any],
        path: Path,
        old_text: Old,
        new_text: Content,
        count: Count = 1,
        sandbox: SandboxName = "",
    ) -> FileChanged:
        """Replace an exact text in a file. It is an error, and no change, if it does not occur `count` times."""

        async def edit() -> FileChanged:
            box = (await server.opened(ctx, sandbox)).box
            await box.edit(path, old_text, new_text, count)
            return FileChanged(path=path, size=(await box.stat(path)).size)

        return await server.call(edit())

    async def list_directory(ctx: Context[Any, Any], path: Path = ".", sandbox: SandboxName = "") -> Listing:
        """List the entries of a directory in the order of their names."""

        async def found() -> Listing:
            entries = await (await server.opened(ctx, sandbox)).box.list_dir(path)
            return Listing(
                entries=[_entry(each) for each in entries[:MAX_ENTRIES]], truncated=len(entries) > MAX_ENTRIES
            )

        return await server.call(found())

    async def search_files(
        ctx: Context[Any, Any],
        pattern: Pattern,
        path: Path = ".",
        glob: Glob = "",
        max_hits: MaxHits = 100,
        sandbox: SandboxName = "",
    ) -> SearchHits:
        """Search the lines of files below a directory for a regular expression."""

        async def search() -> SearchHits:
            box = (await server.opened(ctx, sandbox)).box
            # The programs that every image has, with the options that busybox has as well.
            top = path if path.startswith(("/", ".")) else f"./{path}"
            names = ["-name", glob] if glob else []
            grep = ["grep", "-nHE", "-m", str(max_hits + 1), "-e", pattern, "--"]
            script = f'find "$@" | head -n {max_hits + 1}'
            find = [top, "-type", "f", *names, "-exec", *grep, "{}", "+"]
            result = await box.exec(["/bin/sh", "-c", script, "search", *find], timeout=SEARCH_SECONDS)
            if not result.stdout and "grep:" in result.stderr:
                raise InvalidParams(f"pattern: {result.stderr.strip()[-MAX_LINE_CHARACTERS:]}")
            if not result.stdout and "find:" in result.stderr:
                raise SandboxError(result.stderr.strip()[-MAX_LINE_CHARACTERS:])
            hits = [hit for line in result.stdout.split("\n") if (hit := _hit(line)) is not None]
            return SearchHits(hits=hits[:max_hits], truncated=len(hits) > max_hits)

        return await server.call(search())

    server.add_tool(read_file, annotations=READS)
    server.add_tool(write_file, annotations=SETS)
    server.add_tool(edit_file, annotations=WRITES)
    server.add_tool(list_directory, annotations=READS)
    server.add_tool(search_files, annotations=READS)


class _LineWindow:
    """The wanted lines of a file, from its pieces; the bytes before them are only counted."""

    def __init__(self, first: int, count: int) -> None:
        self._first = first
        self._last = first + count
        self._line = 1
        self._kept = bytearray()
        self._taken = 0

    def feed(self, piece: bytes) -> bool:
        """Take a piece; returns whether the window is full."""
        begin = 0
        while begin < len(piece) and self._line < self._last and len(self._kept) <= MAX_RESULT_BYTES:
            end = piece.find(b"\n", begin) + 1 or len(piece)
            if self._line >= self._first:
                self._kept += piece[begin:end]
            self._line += piece[end - 1 : end] == b"\n"
            begin = end
        self._taken += begin
        return begin < len(piece)

    def content(self, size: int) -> FileContent:
        data = bytes(self._kept[:MAX_RESULT_BYTES])
        truncated = self._taken < size or len(self._kept) > len(data)
        try:
            # The cut of a long line may have split a character.
            text = data.decode("utf-8", "strict" if len(data) == len(self._kept) else "ignore")
            if "\0" not in text:
                return FileContent(
                    content=text, encoding="utf-8", first_line=self._first, truncated=truncated, size=size
                )
        except UnicodeDecodeError:
            pass
        encoded = base64.b64encode(data).decode()
        return FileContent(content=encoded, encoding="base64", first_line=0, truncated=truncated, size=size)


def _entry(entry: DirEntry) -> FileEntry:
    return FileEntry(name=entry.name, type=entry.type, size=entry.size)


def _hit(line: str) -> SearchHit | None:
    """A line of grep: `PATH:NUMBER:TEXT`. Others, as for binary files, are no hits."""
    path, _, rest = line.partition(":")
    number, colon, text = rest.partition(":")
    if not colon or not number.isdecimal():
        return None
    return SearchHit(path=path, line=int(number), text=text[:MAX_LINE_CHARACTERS])
