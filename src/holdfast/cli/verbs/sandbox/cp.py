"""`holdfast cp`: copies files and trees between this machine and a sandbox, with a progress bar on a terminal.

The path in the sandbox begins with a colon. The address is an option, because it contains colons itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from holdfast.cli.support.byte_streams import ByteSink, ByteSource
from holdfast.cli.support.exit_codes import FAILED
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.errors import FileError, InvalidParams, LimitReached, PermissionRefused, ResourceExhausted
from holdfast.types import FILE_PIECE_BYTES, FileAttributes

if TYPE_CHECKING:
    from holdfast.client.files.files import Progress
    from holdfast.client.files.trees import Transferred
    from holdfast.exec_api import FileApi

STDIN: Final = 0
STDOUT: Final = 1
#: Our own stdin or stdout.
STANDARD: Final = "-"


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A file or a directory; :PATH is in the sandbox.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Where to; :PATH is in the sandbox.")],
    sandbox: SandboxOption = LOCAL,
    user: Annotated[str | None, typer.Option(metavar="USER", help="Work on its files as this user.")] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print neither progress nor what is left out.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Copy files and directories to a sandbox or from one.

    Exactly one of SRC and DST is in the sandbox and begins with a colon: `holdfast cp report.txt :/srv/report.txt`.
    A directory is copied with everything in it. Into a DST that is a directory, SRC is copied under its own name.
    `-` is our own stdin or stdout.
    """
    if source.startswith(":") == target.startswith(":"):
        raise InvalidParams(
            "cp: exactly one of SRC and DST is in the sandbox and begins with a colon, as in `:/srv/report.txt`; "
            "write a local name that begins with one as ./:NAME"
        )
    if as_json and target == STANDARD:
        raise InvalidParams("cp: --json cannot be used with a file's own content on stdout")
    if not target.startswith(":") and target != STANDARD and (target.endswith("/") or os.path.isdir(target)):
        target = os.path.join(target, _own_name(source[1:]))
    return run_async(_copy(sandbox, source, target, user, quiet, as_json))


async def _copy(sandbox: str, source: str, target: str, user: str | None, quiet: bool, as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        try:
            with _bar(f"{source} → {target}", shown=not quiet and STANDARD not in (source, target)) as progress:
                result = await _transfer(api.files, source, target, user, progress)
        except (FileError, PermissionRefused, ResourceExhausted, LimitReached) as error:
            # An error about a local file begins so.
            here = error.message.startswith("local file ")
            complain(error.message if here else f"in the sandbox: {error.message}")
            return FAILED
    if result is None:
        return 0
    if as_json:
        print(msgspec.json.encode(result).decode())
    elif not quiet:
        for skipped in result.skipped:
            complain(f"left out {skipped.path}: {skipped.reason}")
        if result.skipped_count > len(result.skipped):
            complain(f"left out {result.skipped_count - len(result.skipped)} more")
    return 0


async def _transfer(
    files: FileApi, source: str, target: str, user: str | None, progress: Progress | None
) -> Transferred | None:
    from holdfast.client.files.trees import download, upload

    if target.startswith(":"):
        remote = _sandbox_path(target)
        if source == STANDARD:
            await _from_stdin(files, remote, user)
            return None
        remote = await _destination(files, remote, source, user)
        return await upload(files, source, remote, user=user, progress=progress)
    remote = _sandbox_path(source)
    if target == STANDARD:
        await _to_stdout(files, remote, user)
        return None
    return await download(files, remote, target, user=user, progress=progress)


def _sandbox_path(argument: str) -> str:
    path = argument[1:]
    if not path:
        raise InvalidParams("cp: the path in the sandbox is empty; its working directory is `:.`")
    return path


def _own_name(path: str) -> str:
    """Return the last name of a path; empty for `dir/.`, which names the contents of a directory."""
    name = os.path.basename(path.rstrip("/"))
    return "" if name in (".", "..") else name


async def _destination(files: FileApi, remote: str, source: str, user: str | None) -> str:
    """Return the path to write: below `remote` under the source's name if that is a directory, else `remote`."""
    from holdfast.errors import FileNotFound, NotADirectory

    if remote.endswith("/"):
        return os.path.join(remote, _own_name(source))
    try:
        info = await files.stat(remote, user=user)
    except (FileNotFound, NotADirectory):
        return remote
    return os.path.join(remote, _own_name(source)) if info.type == "directory" else remote


async def _from_stdin(files: FileApi, remote: str, user: str | None) -> None:
    from holdfast.client.files.files import write_pieces

    async def pieces() -> AsyncGenerator[bytes, None]:
        source, rest = ByteSource(STDIN), bytearray()
        while data := await source.read():
            rest += data
            while len(rest) >= FILE_PIECE_BYTES:
                yield bytes(rest[:FILE_PIECE_BYTES])
                del rest[:FILE_PIECE_BYTES]
        yield bytes(rest)

    await write_pieces(files, remote, pieces(), FileAttributes(), user=user)


async def _to_stdout(files: FileApi, remote: str, user: str | None) -> None:
    from contextlib import aclosing

    from holdfast.client.files.files import file_pieces

    sink = ByteSink(STDOUT)
    try:
        async with aclosing(file_pieces(files, remote, user=user)) as pieces:
            async for piece in pieces:
                await sink.write(piece.data)
    finally:
        sink.close()


@contextmanager
def _bar(title: str, *, shown: bool) -> Iterator[Progress | None]:
    """Show a progress bar if stderr is a terminal; only then is the size of the tree computed."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress as Bar,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress
