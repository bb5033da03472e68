"""Runs a command of the host to its end: an engine's client, `ssh`. Its output and its time are bounded.

Touches processes of the host; depends on no sandbox.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from holdfast.errors import ConnectionLost
from holdfast.sandboxes.host_process import HostProcess
from holdfast.transport.preamble import without_queries
from holdfast.types import Struct

#: The default limit of a command: an engine under load takes seconds, and a hanging one must not block its caller.
SECONDS: Final = 120.0
#: Kept of each stream: enough for ids, a short list, an error text.
KEPT_BYTES: Final = 1024 * 1024


class Outcome(Struct, frozen=True):
    """The exit code and the output of a command of the host."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The error output. Docker prints on stdout why it could not execute."""
        return self.stderr or self.stdout

    @property
    def summary(self) -> str:
        """The last lines of the error output, for an error text."""
        # Docker ends its errors with a hint at its own options, which the caller did not write.
        lines = [line.strip() for line in without_queries(self.error).splitlines()]
        lines = [line for line in lines if line and not line.endswith(("--help'.", "--help' for more information"))]
        return "; ".join(lines[-3:]) or f"exit code {self.exit_code}"


async def run_host_command(
    argv: Sequence[str],
    *,
    stdin: Path | bytes = b"",
    seconds: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    kept_bytes: int = KEPT_BYTES,
) -> Outcome:
    """Run a command with this input; a file becomes its stdin. `ConnectionLost` if it takes too long."""
    source = os.open(stdin, os.O_RDONLY | os.O_CLOEXEC) if isinstance(stdin, Path) else None
    pipe = subprocess.PIPE
    try:
        process = HostProcess(
            argv, stdin=pipe if source is None else source, stdout=pipe, stderr=pipe, env=env, cwd=cwd
        )
    finally:
        if source is not None:
            os.close(source)
    limit = SECONDS if seconds is None else seconds
    try:
        async with process, asyncio.timeout(limit):
            _, stdout, stderr = await asyncio.gather(
                process.feed(stdin if isinstance(stdin, bytes) else b""),
                process.read_stdout(kept_bytes),
                process.read_stderr(KEPT_BYTES),
            )
            code = await process.wait()
    except TimeoutError:
        raise ConnectionLost(f"{shlex.join(argv[:4])} …: no end in {limit:g} s") from None
    return Outcome(code, stdout, stderr)
