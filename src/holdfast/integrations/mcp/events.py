"""The latest messages of one session over HTTP: a client whose stream broke reads on where it stopped.

Bounded by count and by bytes: the oldest messages are dropped first, and cannot be read again.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import Final

from mcp.server.streamable_http import EventCallback, EventId, EventMessage, EventStore, StreamId
from mcp_types import JSONRPCMessage

#: Messages, and their bytes as JSON. A client reconnects within seconds; a result has at most some megabytes.
MAX_EVENTS: Final = 1_000
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024


class RecentEvents(EventStore):
    """The latest events of all streams of a session."""

    def __init__(self, max_events: int = MAX_EVENTS, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._bytes = 0
        self._order: deque[EventId] = deque()
        self._events: dict[EventId, tuple[StreamId, JSONRPCMessage | None, int]] = {}

    async def store_event(self, stream_id: StreamId, message: JSONRPCMessage | None) -> EventId:
        event_id = secrets.token_urlsafe(16)
        size = 0 if message is None else len(message.model_dump_json())
        self._events[event_id] = (stream_id, message, size)
        self._order.append(event_id)
        self._bytes += size
        while len(self._order) > self._max_events or self._bytes > self._max_bytes:
            self._bytes -= self._events.pop(self._order.popleft())[2]
        return event_id

    async def replay_events_after(self, last_event_id: EventId, send_callback: EventCallback) -> StreamId | None:
        found = self._events.get(last_event_id)
        if found is None:
            return None
        stream_id = found[0]
        after = list(self._order)[self._order.index(last_event_id) + 1 :]
        for event_id in after:
            other, message, _ = self._events.get(event_id, ("", None, 0))
            if other == stream_id and message is not None:
                await send_callback(EventMessage(message, event_id))
        return stream_id
