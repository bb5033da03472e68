"""Recordings of sessions by parts: the retained output with its times, for players and downloads."""

from __future__ import annotations

from holdfast.service.api import SessionApi
from holdfast.service.positions import Position, read_token, write_token
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.types import Caller, SessionRecord
from holdfast.service.view_api import RecordedEvent, RecordingPart
from holdfast.types import TerminalEvent


async def read_recording(
    caller: Caller,
    record: SessionRecord,
    sessions: SessionApi,
    pool: SandboxConnections,
    since: str,
    max_bytes: int,
) -> RecordingPart:
    """Return the part of the recording after a token."""
    if record.kind == "terminal":
        return await _of_terminal(record, pool, since, max_bytes)
    read = await sessions.read_output(caller, record.session_id, since=since, max_bytes=max_bytes)
    events = tuple(
        RecordedEvent(
            max(0.0, chunk.timestamp - record.created_at),
            "o",
            # A shell has no terminal that turns a line feed into a new line.
            chunk.payload.replace(b"\n", b"\r\n"),
            chunk.token,
        )
        for chunk in read.chunks
        if chunk.payload
    )
    return RecordingPart(events, read.token, read.more, record.created_at, record.cols, record.rows)


async def _of_terminal(
    record: SessionRecord, pool: SandboxConnections, since: str, max_bytes: int
) -> RecordingPart:
    position = read_token(record.session_id, since)
    async with pool.use(record.sandbox) as api:
        status = await api.describe_terminal(record.session_id, look=False)
        found = await api.read_terminal(record.session_id, since=position.seq, max_bytes=max_bytes, timing=True)
    printed, events = position.printed, []
    for event in found.events:
        printed = event.offset + (len(event.payload) if event.type == "output" else 0)
        made = _event(
            event, record.created_at, write_token(record.session_id, Position(seq=event.token, printed=printed))
        )
        if made is not None:
            events.append(made)
    token = write_token(record.session_id, Position(seq=found.token, printed=printed))
    more = found.token < status.token and found.token > position.seq
    # Times count from the creation of the session, as those of its commands and of its audit log do.
    return RecordingPart(tuple(events), token, more, record.created_at, status.size.cols, status.size.rows)


def _event(event: TerminalEvent, began: float, token: str) -> RecordedEvent | None:
    at = max(0.0, event.timestamp - began)
    if event.type == "output":
        return RecordedEvent(at, "o", event.payload, token)
    if event.type == "resize" and event.size is not None:
        return RecordedEvent(at, "r", b"%dx%d" % (event.size.cols, event.size.rows), token)
    if event.type == "gap":
        return RecordedEvent(at, "m", b"output before this moment is no longer kept", token)
    return None
