"""Converts what a sandbox returns of a terminal or a command to the chunks of a session's reader; pure.

The events of a terminal have positions. The commands of a shell are recorded one by one in its server: a position
is the number of the command in the audit log and a position in its record. A gap has the exact number of bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast.service.api import Chunk, PromptInfo
from holdfast.service.positions import FINISHED, Position, write_token
from holdfast.service.types import OVER, State
from holdfast.types import ReadResult, TerminalEvent, TerminalRead


class OutputSlice(NamedTuple):
    """Chunks, the position after them, and whether there is more output."""

    chunks: list[Chunk]
    position: Position
    more: bool = False


def terminal_chunks(session_id: str, since: Position, found: TerminalRead) -> OutputSlice:
    """Return the chunks after a position of a terminal."""
    chunks: list[Chunk] = []
    printed = since.printed
    for event in found.events:
        skipped = 0
        if event.type == "gap":
            # `length` counts events as well as bytes; the difference of the offsets is exact.
            skipped, printed = event.offset - printed, event.offset
        else:
            printed = event.offset + (len(event.payload) if event.type == "output" else 0)
        chunk = _terminal_chunk(session_id, event, Position(seq=event.token, printed=printed), skipped)
        if chunk is not None:
            chunks.append(chunk)
    if found.token == since.seq:
        return OutputSlice(chunks, since)  # no change: `part` stays, so a prompt is not repeated
    return OutputSlice(chunks, Position(seq=found.token, printed=printed))


def _terminal_chunk(session_id: str, event: TerminalEvent, position: Position, skipped: int) -> Chunk | None:
    fields: dict[str, Any]
    match event.type:
        case "output":
            fields = {"payload": event.payload}
        case "gap":
            fields = {"skipped_bytes": skipped, "truncated": True}
        case "prompt" | "continuation":
            fields = {"prompt": PromptInfo(event.prompt or "", awaiting_input=True)}
        case "ended":
            fields = {"exit_code": event.exit_code}
        case "state" if event.state in OVER:
            fields = {"exit_code": event.exit_code}
        case _:
            return None
    return Chunk(session_id, write_token(session_id, position), event.timestamp, event.state, **fields)


def command_chunks(
    session_id: str, command_id: str, since: Position, found: ReadResult, max_bytes: int, *, at: float, state: State
) -> OutputSlice:
    """Return the chunks after a position of one command of a shell."""

    def made(position: Position, **fields: Any) -> Chunk:
        return _command_chunk(session_id, command_id, position, at, state, **fields)

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
            # Part of the lost chunk may have been read before: that part is not missing.
            skipped -= min(skipped, position.part)
            position = Position(since.command, each.seq - 1, 0, position.printed + skipped)
            chunks.append(made(position, stream=each.stream, skipped_bytes=skipped))
        # The two ends of a chunk with a lost middle have one number, so its bytes are counted over both.
        begin = offsets.get(f"{each.stream}{each.seq}", 0)
        offsets[f"{each.stream}{each.seq}"] = begin + len(each.data)
        start = max(0, position.part - begin) if each.seq == position.seq + 1 else 0
        data = each.data[start : start + room]
        if not data and start < len(each.data):
            return OutputSlice(chunks, position, more=True)
        room -= len(data)
        through = start + len(data)
        printed = position.printed + len(data)
        if through < len(each.data):
            position = Position(since.command, each.seq - 1, begin + through, printed)
        else:
            position = Position(since.command, each.seq, 0, printed)
        if data:
            chunks.append(made(position, stream=each.stream, payload=data))
        if through < len(each.data):
            return OutputSlice(chunks, position, more=True)
    for gap in gaps:
        length = gap.length - min(gap.length, position.part)
        position = Position(since.command, position.seq, 0, position.printed + length)
        chunks.append(made(position, stream=gap.stream, skipped_bytes=length))
    # The exit has a number of its own, after all output.
    if found.exited and found.exit_code is not None and found.after_seq > position.seq:
        end = Position(position.command, FINISHED, 0, position.printed)
        return OutputSlice([*chunks, made(end, exit_code=found.exit_code)], end)
    return OutputSlice(chunks, position, more=room <= 0)


def lost_chunk(
    session_id: str,
    command_id: str,
    position: Position,
    printed: int,
    exit_code: int | None,
    at: float,
    state: State,
) -> tuple[Chunk, Position]:
    """Return the chunk for a command that its server has dropped: all output that was not read is lost."""
    after = Position(position.command, FINISHED, 0, printed)
    skipped = max(0, printed - position.printed)
    fields = {"skipped_bytes": skipped, "exit_code": exit_code}
    return _command_chunk(session_id, command_id, after, at, state, **fields), after


def _command_chunk(
    session_id: str, command_id: str, position: Position, at: float, state: State, **fields: Any
) -> Chunk:
    truncated = fields.get("skipped_bytes", 0) > 0
    token = write_token(session_id, position)
    return Chunk(session_id, token, at, state, command_id=command_id, truncated=truncated, **fields)
