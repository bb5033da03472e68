"""What a sandbox tells of a terminal or a command, as the chunks that a reader of a session gets; pure.

A terminal's events have positions already. A shell's commands are recorded one by one in its server: a position is
the command's place in the audit log and a place in its record. Gaps are told with the exact number of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.service.api import Chunk, Prompt
from holdfast.service.positions import FINISHED, Position, write_token
from holdfast.service.types import State
from holdfast.types import ReadResult, TerminalEvent, TerminalRead

#: Of an unfinished last line, this much is told as the prompt of a program.
PROMPT_BYTES: Final = 256
#: What a terminal does not show: colours, modes, titles, a return to the line's beginning.
_UNSEEN: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_]|\r")


class Piece(NamedTuple):
    """Chunks, where a reader has come with them, and whether more is there already."""

    chunks: list[Chunk]
    position: Position
    more: bool = False


def terminal_chunks(session_id: str, since: Position, found: TerminalRead) -> Piece:
    """What came after a position of a terminal."""
    chunks: list[Chunk] = []
    printed = since.printed
    for event in found.events:
        skipped = 0
        if event.type == "gap":
            # `length` counts events as well as bytes: how much was printed tells exactly.
            skipped, printed = event.offset - printed, event.offset
        else:
            printed = event.offset + (len(event.payload) if event.type == "output" else 0)
        chunk = _terminal_chunk(session_id, event, Position(seq=event.token, printed=printed), skipped)
        if chunk is not None:
            chunks.append(chunk)
    if found.token == since.seq:
        return Piece(chunks, since)  # where nothing happened, what its reader was told stays told
    return Piece(chunks, Position(seq=found.token, printed=printed))


def _terminal_chunk(session_id: str, event: TerminalEvent, position: Position, skipped: int) -> Chunk | None:
    token = write_token(session_id, position)
    match event.type:
        case "output":
            return Chunk(session_id, token, event.timestamp, event.state, payload=event.payload)
        case "gap":
            return Chunk(session_id, token, event.timestamp, event.state, skipped=skipped, truncated=True)
        case "ended":
            return Chunk(session_id, token, event.timestamp, event.state, exit_code=event.exit_code)
        case "prompt":
            prompt = Prompt(event.prompt or "", awaiting_input=True)
            return Chunk(session_id, token, event.timestamp, event.state, prompt=prompt)
        case "continuation":
            prompt = Prompt(event.prompt or "", awaiting_input=True)
            return Chunk(session_id, token, event.timestamp, event.state, prompt=prompt)
        case "state" if event.state in ("CLOSED", "ERROR"):
            return Chunk(session_id, token, event.timestamp, event.state, exit_code=event.exit_code)
        case _:
            return None


def unfinished_line(chunks: Sequence[Chunk]) -> str:
    """The text after the last line end, if the last that happened was output: what a program asks with."""
    if not chunks or not chunks[-1].payload:
        return ""
    tail = b""
    for chunk in reversed(chunks):
        if not chunk.payload:
            break
        tail = chunk.payload + tail
        if b"\n" in chunk.payload or len(tail) > PROMPT_BYTES:
            break
    line = tail[-PROMPT_BYTES:].rpartition(b"\n")[2]
    return _UNSEEN.sub(b"", line).decode("utf-8", "replace")


def command_chunks(
    session_id: str, command_id: str, since: Position, found: ReadResult, max_bytes: int, *, at: float, state: State
) -> Piece:
    """What came after a position of one command of a shell."""
    chunks: list[Chunk] = []
    position = since
    room = max_bytes
    gaps = list(found.gap)
    offsets: dict[str, int] = {}
    for each in found.chunks:
        skipped = 0
        while gaps and gaps[0].stream == each.stream and gaps[0].offset < each.offset:
            gap = gaps.pop(0)
            skipped += gap.length
        if skipped:
            # A chunk that was lost after part of it was read: that part is not missing.
            skipped -= min(skipped, position.part)
            position = Position(since.command, each.seq - 1, 0, position.printed + skipped)
            chunks.append(
                _command_chunk(session_id, command_id, position, at, state, stream=each.stream, skipped=skipped)
            )
        # The two ends of a chunk whose middle is lost have one number: bytes of it are counted over both.
        begin = offsets.get(f"{each.stream}{each.seq}", 0)
        offsets[f"{each.stream}{each.seq}"] = begin + len(each.data)
        start = max(0, position.part - begin) if each.seq == position.seq + 1 else 0
        data = each.data[start : start + room]
        if not data and start < len(each.data):
            return Piece(chunks, position, more=True)
        room -= len(data)
        through = start + len(data)
        printed = position.printed + len(data)
        if through < len(each.data):
            position = Position(since.command, each.seq - 1, begin + through, printed)
        else:
            position = Position(since.command, each.seq, 0, printed)
        if data:
            chunks.append(
                _command_chunk(session_id, command_id, position, at, state, stream=each.stream, payload=data)
            )
        if through < len(each.data):
            return Piece(chunks, position, more=True)
    for gap in gaps:
        length = gap.length - min(gap.length, position.part)
        position = Position(since.command, position.seq, 0, position.printed + length)
        chunks.append(
            _command_chunk(session_id, command_id, position, at, state, stream=gap.stream, skipped=length)
        )
    # The exit has a number of its own, after all output.
    if found.exited and found.exit_code is not None and found.after_seq > position.seq:
        ended = ended_chunk(session_id, command_id, position, found.exit_code, at, state)
        return Piece([*chunks, ended], done(position))
    return Piece(chunks, position, more=room <= 0)


def done(position: Position) -> Position:
    """After a command and its end."""
    return Position(position.command, FINISHED, 0, position.printed)


def ended_chunk(
    session_id: str, command_id: str, position: Position, exit_code: int, at: float, state: State
) -> Chunk:
    token = write_token(session_id, done(position))
    return Chunk(session_id, token, at, state, exit_code=exit_code, command_id=command_id)


def lost_chunk(
    session_id: str,
    command_id: str,
    position: Position,
    printed: int,
    exit_code: int | None,
    at: float,
    state: State,
) -> tuple[Chunk, Position]:
    """A command that its server no longer keeps: all that was not read of it is gone."""
    after = Position(position.command, FINISHED, 0, printed)
    skipped = max(0, printed - position.printed)
    chunk = Chunk(
        session_id,
        write_token(session_id, after),
        at,
        state,
        skipped=skipped,
        truncated=skipped > 0,
        exit_code=exit_code,
        command_id=command_id,
    )
    return chunk, after


def _command_chunk(
    session_id: str,
    command_id: str,
    position: Position,
    at: float,
    state: State,
    *,
    stream: str,
    payload: bytes = b"",
    skipped: int = 0,
) -> Chunk:
    return Chunk(
        session_id,
        write_token(session_id, position),
        at,
        state,
        payload=payload,
        skipped=skipped,
        truncated=skipped > 0,
        stream=stream,
        command_id=command_id,
    )
