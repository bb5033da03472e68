"""`holdfast replay`: plays the recording of a terminal on ours with its timing, describes it, or saves it.

A recording is an asciicast v2: a file, our stdin, a terminal of a sandbox, or a session of the service.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, TextIO

import typer

from holdfast.cli.support.command_request import STDIN, STDOUT
from holdfast.cli.support.exit_codes import INTERRUPTED
from holdfast.cli.support.own_terminal import raw_mode, terminal_size
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption
from holdfast.cli.support.terminal_view import ShownOutput, too_small
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.cli.verbs.terminal.player import Player
from holdfast.client.screen.asciicast import INPUT, OUTPUT, CastEvent, CastHeader, cast_lines, read_cast
from holdfast.errors import InvalidParams, UnknownTerminal
from holdfast.launch.local_server import is_running
from holdfast.types import TerminalSize


def command(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="An asciicast file, - for stdin, a terminal's or a session's id."),
    ],
    sandbox: SandboxOption = LOCAL,
    speed: Annotated[float, typer.Option(metavar="X", help="Play X times as fast.")] = 1.0,
    idle_limit: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="No pause is longer than S seconds.")
    ] = None,
    seek: Annotated[
        float, typer.Option(metavar="S", min=0, help="Begin at second S; earlier output is drawn at once.")
    ] = 0.0,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a terminal's recording there (- is stdout) instead.")
    ] = None,
    input: Annotated[
        bool, typer.Option("--input", help="With --save: also the typed input, if the terminal records it.")
    ] = False,
    service: Annotated[
        str | None,
        typer.Option(metavar="ADDR", help="SOURCE is a session of the service at HOST:PORT (gRPC)."),
    ] = None,
    tls_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --service: the authority of its certificate.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="SOURCE is a session in this database of a service."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Play the recording of a terminal with its timing.

    While it plays on a terminal, space pauses and resumes, `.` shows one event and pauses, the left and right
    arrows skip 5 seconds, + and - double and halve the speed, q leaves. --json describes the recording instead: its
    size, duration, events and bytes.
    """
    if not (math.isfinite(speed) and speed > 0):
        raise InvalidParams(f"--speed {speed:g}: must be above 0")
    if not math.isfinite(seek):
        raise InvalidParams(f"--seek {seek:g}: must be a number of seconds")
    if input and save is None:
        raise InvalidParams("--input is for --save: typed input is not played")
    if save is not None and as_json:
        raise InvalidParams("--save and --json exclude each other")
    of_service = service is not None or store is not None
    file = None if of_service else _open(source)
    if file is None:
        if service is not None:
            from holdfast.cli.verbs.terminal.session_recording import from_service

            text = from_service(service, source, tls_ca)
        else:
            text = _of_session(store, source, input) if of_service else _recording_of(sandbox, source, input)
        if save is not None:
            return _save(text, save)
        file = io.StringIO(text)
    elif save is not None:
        raise InvalidParams(f"--save {save}: {source} is a file already; only a terminal's recording can be saved")
    with file:
        recording = _Recording(source, file)
        if as_json:
            print(json.dumps(recording.summary()))
            return 0
        return run_async(_play(recording, speed, idle_limit, seek))


def _open(source: str) -> TextIO | None:
    """Open the file with this name; None if there is none."""
    if source == "-":
        return io.StringIO(sys.stdin.buffer.read().decode("utf-8", "replace"))
    if not os.path.exists(source):
        return None
    # A line that is not UTF-8 is reported like any other malformed line.
    file = open(source, encoding="utf-8", errors="replace")  # noqa: SIM115 - the caller closes it
    if file.seekable():
        return file
    with file:
        return io.StringIO(file.read())


def _recording_of(sandbox: str, source: str, input: bool) -> str:
    """Return the recording of the terminal with this id."""
    # Without a server there are no terminals; the search must not start one.
    if sandbox != LOCAL or is_running():
        with suppress(UnknownTerminal):
            return asyncio.run(_terminal_recording(sandbox, source, input))
    if sandbox == LOCAL and _has_service():
        return _of_session(None, source, input)
    raise UnknownTerminal(f"{source}: no such file, and no terminal's id")


def _has_service() -> bool:
    """Whether a session service has a database here; its packages are loaded only then."""
    from holdfast.service.settings import default_store_path

    return os.path.exists(default_store_path())


def _of_session(store: str | None, source: str, input: bool) -> str:
    from holdfast.cli.verbs.terminal.session_recording import from_store
    from holdfast.service.problems import NotFound

    try:
        return asyncio.run(from_store(store, source, input=input))
    except NotFound:
        raise UnknownTerminal(f"{source}: no such file, and no terminal's or session's id") from None


async def _terminal_recording(sandbox: str, terminal_id: str, input: bool) -> str:
    from holdfast.client.opening import connect

    async with connect(sandbox) as box:
        terminal = await box.open_terminal(terminal_id)
        return await terminal.recording(input=input)


def _save(text: str, path: str) -> int:
    data = text.encode()
    if path == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        with open(path, "wb") as file:
            file.write(data)
    return 0


class _Recording:
    """A recording that can be read several times from its beginning."""

    def __init__(self, name: str, file: TextIO) -> None:
        self._name = name
        self._file = file
        self.header = self._read()[0]

    def _read(self) -> tuple[CastHeader, Iterator[CastEvent]]:
        self._file.seek(0)
        try:
            return read_cast(cast_lines(self._file))
        except InvalidParams as error:
            raise self._named(error) from None

    def events(self) -> Iterator[CastEvent]:
        """Yield the events from the beginning; ends earlier iterations."""
        _, events = self._read()
        try:
            yield from events
        except InvalidParams as error:
            raise self._named(error) from None

    def _named(self, error: InvalidParams) -> InvalidParams:
        return InvalidParams(f"{self._name}: {error.message}", **error.details)

    def summary(self) -> dict[str, Any]:
        """Return the size, duration and counts of the recording."""
        count, duration, sizes = 0, 0.0, {OUTPUT: 0, INPUT: 0}
        for event in self.events():
            count += 1
            duration = max(duration, event.time)
            if event.code in sizes:
                sizes[event.code] += len(event.data)
        header = self.header
        return {
            "source": self._name,
            "rows": header.height,
            "cols": header.width,
            "duration": duration,
            "events": count,
            "outputBytes": sizes[OUTPUT],
            "inputBytes": sizes[INPUT],
            "timestamp": header.timestamp,
            "title": header.title,
            "command": header.command,
        }


@contextmanager
def _without_echo(keys: bool) -> Iterator[None]:
    if not keys:
        yield
        return
    with raw_mode(STDIN):
        try:
            yield
        finally:
            # Drop the answers of our terminal to queries in the recording, or our shell would read them.
            termios.tcflush(STDIN, termios.TCIFLUSH)


async def _play(recording: _Recording, speed: float, idle_limit: float | None, seek: float) -> int:
    header = recording.header
    keys = os.isatty(STDIN) and os.isatty(STDOUT)
    if note := too_small(TerminalSize(header.height, header.width), terminal_size(STDOUT)):
        complain(f"the recording is larger than this terminal: {note}")
    out = ShownOutput()
    with _without_echo(keys):
        try:
            finished = await Player(
                recording.events,
                out,
                speed=speed,
                idle_limit=header.idle_time_limit if idle_limit is None else idle_limit,
                seek=seek,
                keys=keys,
            ).play()
        finally:
            await out.leave()
    return 0 if finished else INTERRUPTED
