"""The frames of one terminal for one reader: the screen first, then output by position.

A reader that resumes from a token gets the output after it, so a new connection neither loses nor repeats a byte. A
reader that is behind by more than `BEHIND_BYTES` gets the screen as it is now, with the number of bytes that were
left out: a flood costs such a reader a screen four times a second, and delays no other reader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from holdfast.service.positions import Position, read_token, write_token
from holdfast.service.problems import BadToken, Invalid
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.types import SessionRecord
from holdfast.service.view_api import TerminalFrame
from holdfast.service.views.screens import ScreenCache
from holdfast.types import TerminalRead

#: The output of one frame: what a slow connection carries in a second or two.
FRAME_BYTES: Final = 64 * 1024
#: Output that a reader may be behind before it gets the screen instead: more than a page of the largest screen.
BEHIND_BYTES: Final = 512 * 1024


async def terminal_frames(
    record: SessionRecord, pool: SandboxConnections, screens: ScreenCache, since: str, wait: float
) -> AsyncIterator[TerminalFrame]:
    """Yield frames as fast as they are consumed, until the terminal is closed."""
    if record.kind != "terminal":
        raise Invalid("session_id: a SHELL has no screen; StreamOutput has its output", reason="NOT_A_TERMINAL")
    stream = _TerminalStream(record, pool, screens, wait)
    if since:
        stream.position = read_token(record.session_id, since)
    else:
        yield await stream.redraw()
    while True:
        for frame in await stream.next():
            yield frame
            if frame.ended:
                return


class _TerminalStream:
    def __init__(self, record: SessionRecord, pool: SandboxConnections, screens: ScreenCache, wait: float) -> None:
        self._record = record
        self._id = record.session_id
        self._pool = pool
        self._screens = screens
        self._wait = wait
        self.position = Position()
        #: Bytes since the last read that found no more output.
        self._burst = 0

    async def redraw(self, skipped: int = 0) -> TerminalFrame:
        drawn = await self._screens.draw(self._record, self.position.seq)
        if skipped:
            skipped = max(skipped, drawn.position.printed - self.position.printed)
        self.position = drawn.position
        # Behind still: the next read decides at once whether the screen is sent again.
        self._burst = 0 if drawn.is_current else BEHIND_BYTES
        return TerminalFrame(
            token=write_token(self._id, drawn.position),
            state=drawn.state,
            timestamp=drawn.timestamp,
            payload=drawn.payload,
            redraw=True,
            cols=drawn.size.cols,
            rows=drawn.size.rows,
            skipped_bytes=skipped,
        )

    async def next(self) -> list[TerminalFrame]:
        """Return the next frames; an empty list after a wait without output."""
        async with self._pool.use(self._record.sandbox) as api:
            found = await api.read_terminal(
                self._id, since=self.position.seq, max_bytes=FRAME_BYTES, wait=self._wait
            )
        if found.token < self.position.seq:
            raise BadToken("since: a position that this session has not reached", reason="BAD_TOKEN")
        gap = next((event for event in found.events if event.type == "gap"), None)
        if gap is not None:
            return [await self.redraw(max(1, gap.offset - self.position.printed))]
        printed = sum(len(event.payload) for event in found.events if event.type == "output")
        self._burst = self._burst + printed if printed >= FRAME_BYTES // 2 else 0
        if self._burst > BEHIND_BYTES:
            return [await self.redraw(1)]
        return self._frames(found)

    def _frames(self, found: TerminalRead) -> list[TerminalFrame]:
        frames: list[TerminalFrame] = []
        pieces: list[bytes] = []
        at, printed = 0.0, self.position.printed

        def flush(seq: int, **fields: object) -> None:
            position = Position(seq=seq, printed=printed)
            token = write_token(self._id, position)
            frames.append(
                TerminalFrame(token, found.state, at, b"".join(pieces), **fields)  # type: ignore[arg-type]
            )
            pieces.clear()

        for event in found.events:
            at = event.timestamp
            if event.type == "output":
                pieces.append(event.payload)
                printed = event.offset + len(event.payload)
            elif event.type == "resize" and event.size is not None:
                # The output before it was printed at the old size.
                if pieces:
                    flush(event.token - 1)
                flush(event.token, cols=event.size.cols, rows=event.size.rows)
        if pieces or found.closed or found.token > self.position.seq:
            flush(found.token, ended=found.closed)
        self.position = Position(seq=found.token, printed=printed)
        return frames
