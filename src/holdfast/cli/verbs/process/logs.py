"""`holdfast logs`: prints the output of a process, byte for byte, each stream to its own descriptor."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Final

import typer

from holdfast.cli.support.byte_streams import ByteSink
from holdfast.cli.support.command_request import STDOUT, WINDOW_BYTES
from holdfast.cli.support.foreground import OutputCopy
from holdfast.cli.support.moments import moment
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.support.typed_verb import run_async
from holdfast.cli.verbs.process.log_lines import LineFilter, print_lines
from holdfast.exec_api import ExecApi
from holdfast.types import Closed, Exited, OutputChunk, OutputGap, ProcessEvent

#: Bytes of one read; bounds the memory.
_STEP_BYTES: Final = 1024 * 1024


def command(
    process_id: Annotated[str, typer.Argument(metavar="ID")],
    sandbox: SandboxOption = LOCAL,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until its output has ended.")] = False,
    stdout: Annotated[bool, typer.Option("--stdout", help="Only its stdout.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Only its stderr.")] = False,
    tail: Annotated[
        str | None, typer.Option("--tail", "-n", metavar="N", help="Only the last N lines; all prints every line.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Only output since 10m, 2h or 3d ago, a date, @SECONDS; a number N: after event N."
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only output before this time.")] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Print the time of each line before it.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Print the output of a process: its stdout on stdout, its stderr on stderr, the exact bytes.

    With --json a line for each event, with its number for --since; bytes are base64. Output that is no longer
    retained is reported on stderr. --tail, --timestamps and times select and print whole lines, in JSON an event
    each; a time has a resolution of 0.1 s, and less for a process that prints for hours.
    """
    if stdout == stderr:
        streams: tuple[str, ...] = ("stdout", "stderr", "pty")
    else:
        streams = ("stdout", "pty") if stdout else ("stderr",)
    now = time.time()
    after_seq = int(since) if since is not None and since.isdecimal() else 0
    which = LineFilter(
        streams,
        since=None if since is None or since.isdecimal() else moment("--since", since, now),
        until=None if until is None else moment("--until", until, now),
        tail=_tail(tail),
        timestamps=timestamps,
    )
    return run_async(_logs(sandbox, process_id, follow, which, after_seq, as_json))


def _tail(text: str | None) -> int | None:
    if text is None or text == "all":
        return None
    # A deque has this limit; no log has as many lines.
    if not text.isdecimal() or int(text) > sys.maxsize:
        raise typer.BadParameter(f"--tail {text}: a number of lines, or all.")
    return int(text)


async def _logs(sandbox: str, process_id: str, follow: bool, which: LineFilter, since: int, as_json: bool) -> int:
    async with open_exec(sandbox, ids=[process_id]) as api:
        info = await api.describe(process_id)
        ends = {"stdout": info.stdout_bytes, "stderr": info.stderr_bytes, "pty": info.pty_bytes}
        if which.needs_times or which.tail is not None:
            await print_lines(api, process_id, which, ends, after_seq=since, follow=follow, as_json=as_json)
            return 0
        streams = which.streams
        await print_output(api, process_id, None if follow else ends, streams=streams, since=since, as_json=as_json)
    return 0


async def print_output(
    api: ExecApi,
    id: str,
    ends: dict[str, int] | None,
    *,
    streams: tuple[str, ...] = ("stdout", "stderr", "pty"),
    since: int = 0,
    as_json: bool = False,
) -> None:
    """Print the retained output up to the given end of each stream; without ends, until the streams close."""
    copy = _JsonLines(streams) if as_json else OutputCopy(streams)
    try:
        events = (
            api.events(id, after_seq=since, window=WINDOW_BYTES)
            if ends is None
            else _retained(api, id, since, ends)
        )
        async with aclosing(events):
            async for event in events:
                await copy.write(event)
    finally:
        copy.close()


async def _retained(
    api: ExecApi, process_id: str, since: int, ends: dict[str, int]
) -> AsyncGenerator[ProcessEvent, None]:
    """Yield the output up to `ends`.

    Later output is left out, because a process that prints faster than this program writes would never let it end.
    """
    while True:
        result = await api.read(process_id, after_seq=since, max_bytes=_STEP_BYTES)
        for gap in result.gap:
            yield gap
        for chunk in result.chunks:
            if chunk.offset < ends[chunk.stream]:
                yield chunk
        was_new = all(chunk.offset >= ends[chunk.stream] for chunk in result.chunks)
        if (was_new and not result.gap) or result.after_seq == since:
            return
        since = result.after_seq


class _JsonLines:
    """Prints each event as one line of JSON."""

    def __init__(self, streams: tuple[str, ...]) -> None:
        self._streams = streams
        self._sink = ByteSink(STDOUT)

    async def write(self, event: ProcessEvent) -> None:
        if isinstance(event, OutputChunk | OutputGap) and event.stream not in self._streams:
            return
        await self._sink.write(json.dumps(as_object(event)).encode() + b"\n")

    def close(self) -> None:
        self._sink.close()


def as_object(event: ProcessEvent) -> dict[str, Any]:
    """Return an event as `--json` prints it."""
    if isinstance(event, OutputChunk):
        chunk = base64.b64encode(event.data).decode()
        return {
            "event": "output",
            "seq": event.seq,
            "stream": event.stream,
            "offset": event.offset,
            "chunk": chunk,
        }
    if isinstance(event, OutputGap):
        return {"event": "gap", "stream": event.stream, "offset": event.offset, "length": event.length}
    if isinstance(event, Exited):
        status = event.status
        return {"event": "exited", "seq": event.seq, "exitCode": status.exit_code, "signal": status.signal}
    assert isinstance(event, Closed)
    return {"event": "closed", "seq": event.seq}
