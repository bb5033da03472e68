"""The seam between whoever has messages and whatever carries them.

A channel carries two kinds of traffic. Control messages are handed over with `send` and go out in order. Bulk
output is pulled: whenever no control message waits and the connection takes more, the channel asks its source for
the next frame. So a control message overtakes all output that is not yet on its way, and output that nobody
reads stays where it is kept.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from holdfast.wire.framing import Oversized


class SpoolFrame(NamedTuple):
    """A message whose last `length` bytes lie in a file: the channel sends them with sendfile."""

    header: bytes
    fd: int
    offset: int
    length: int


class Receiver(Protocol):
    """Who gets what arrives. Called from the event loop, never again after `connection_lost`."""

    def message_received(self, message: bytes | Oversized) -> None: ...

    def connection_lost(self, error: Exception | None) -> None:
        """The other end is gone: None after an orderly end or our own `close`."""
        ...


class Source(Protocol):
    """Who has output to send."""

    def next_frame(self) -> bytes | SpoolFrame | None:
        """The next message of output, or None. A `SpoolFrame` only if the channel `takes_spool_frames`."""
        ...


class Channel(Protocol):
    """One open connection."""

    #: What is at the other end, for messages to people: a path, an address, a command.
    description: str

    @property
    def takes_spool_frames(self) -> bool:
        """Whether messages go behind their length, so that a frame's bytes may come from a file."""
        ...

    @property
    def queued_bytes(self) -> int:
        """Control messages that wait to be sent."""
        ...

    def send(self, message: bytes) -> None:
        """Queue a control message (unframed); sends at once what the connection takes. Never blocks."""
        ...

    def set_source(self, source: Source | None) -> None: ...

    def wake(self) -> None:
        """The source has something new."""
        ...

    def use_lengths(self) -> None:
        """From here on MessagePack behind lengths, both ways. On a WebSocket: binary frames."""
        ...

    def hold_frame(self) -> None:
        """Take what is left of the `SpoolFrame` on its way into memory: its file is about to change."""
        ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    async def drain(self) -> None:
        """Wait until nothing is queued; raises `ConnectionLost` if the other end goes first."""
        ...

    def close(self) -> None:
        """Send what is queued if that goes at once, then close."""
        ...
