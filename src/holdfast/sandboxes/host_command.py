"""Run a command of the host to its end: an engine's client, `ssh`. What it prints is bounded, and so is its time.

Touches processes of the host; knows nothing of sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from holdfast.errors import CommandNotFound, ConnectionLost
from holdfast.launch.pidfd_signals import signal_child_group
from holdfast.transport.stdio import without_queries
from holdfast.types import Struct

#: An engine under load takes seconds for what should take one; one that hangs must not hang us.
SECONDS: Final = 120.0
#: What is kept of each stream: ids, a short list, an error text.
KEPT_BYTES: Final = 1024 * 1024


class Outcome(Struct, frozen=True):
    """How a command of the host ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """Why it failed. Docker prints on stdout why it could not execute."""
        return self.stderr or self.stdout

    @property
    def said(self) -> str:
        """What it said last, for an error text."""
        lines = without_queries(self.words).strip().splitlines()
        return "; ".join(lines[-3:]) or f"exit code {self.exit_code}"


async def run_outside(
    argv: Sequence[str],
    *,
    stdin: Path | bytes = b"",
    seconds: float | None = None,
    env: Mapping[str, str] | None = None,
    kept_bytes: int = KEPT_BYTES,
) -> Outcome:
    """Run it on this input; a file is given to it as it is. `ConnectionLost` if it takes too long."""
    source = os.open(stdin, os.O_RDONLY | os.O_CLOEXEC) if isinstance(stdin, Path) else None
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if source is None else source,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except OSError as error:
        raise CommandNotFound(f"{argv[0]}: {error.strerror}") from None
    finally:
        if source is not None:
            os.close(source)
    limit = SECONDS if seconds is None else seconds
    try:
        async with asyncio.timeout(limit):
            _, stdout, stderr = await asyncio.gather(
                _feed(process.stdin, stdin if isinstance(stdin, bytes) else b""),
                _read(process.stdout, kept_bytes),
                _read(process.stderr, KEPT_BYTES),
            )
            code = await process.wait()
    except TimeoutError:
        raise ConnectionLost(f"{shlex.join(argv[:4])} …: no end in {limit:g} s") from None
    finally:
        if process.returncode is None:
            # A thread of asyncio may have reaped it by now, and its number may be another's.
            signal_child_group(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
    return Outcome(code, stdout, stderr)


async def _feed(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    if stream is None:
        return
    # A command that reads no input ends all the same, and its exit code tells more.
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()
    with contextlib.suppress(ConnectionError):
        await stream.wait_closed()


async def _read(stream: asyncio.StreamReader | None, limit: int) -> str:
    assert stream is not None
    kept = bytearray()
    while data := await stream.read(65_536):
        kept += data
        del kept[:-limit]
    return kept.decode(errors="replace")
