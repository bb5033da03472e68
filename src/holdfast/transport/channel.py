"""The interface of a channel, which carries messages.

A channel carries two kinds of traffic. Control messages are passed to `send` and leave in order. Bulk output is
pulled: whenever no control message waits and the connection accepts more, the channel takes the next frame from its
source. So a control message overtakes all output that is not in flight, and output that is not read stays in the
spool.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from holdfast.wire.framing import Oversized


class SpoolFrame(NamedTuple):
    """A message with its last `length` bytes in a file.

    sendfile puts the file's own pages into the connection. On a file system with large folios (seen on ext4) a hole
    that is punched later shows as zeros in bytes that the peer has not read; there `lends_pages` is False, and the
    channel sends copies.
    """

    header: bytes
    fd: int
    offset: int
    length: int
    lends_pages: bool = True


class Receiver(Protocol):
    """The receiver of incoming messages. Called from the event loop, and not after `connection_lost`."""

    def message_received(self, message: bytes | Oversized) -> None: ...

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended; `error` is None after an orderly end or `close`."""


class Source(Protocol):
    """The source of bulk output."""

    def next_frame(self) -> bytes | SpoolFrame | None:
        """The next message of output, or None. A `SpoolFrame` only if the channel `takes_spool_frames`."""


class Channel(Protocol):
    """One open connection."""

    #: The peer, for messages: a path, an address, a command.
    description: str

    @property
    def takes_spool_frames(self) -> bool:
        """Whether messages have a length in front, so that the bytes of a frame may come from a file."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of queued control messages."""

    @property
    def passes_descriptors(self) -> bool:
        """Whether the connection is a Unix socket, which carries descriptors."""

    def pass_descriptor(self, fd: int) -> None:
        """Send a descriptor with the next message, and close it here. Only if the channel `passes_descriptors`."""

    def send(self, message: bytes) -> None:
        """Queue a control message (unframed), and send what the connection accepts at once. Never blocks."""

    def set_source(self, source: Source | None) -> None: ...

    def wake(self) -> None:
        """Send again, because the source has a new frame."""

    def use_lengths(self) -> None:
        """Use MessagePack with lengths from here on, both ways. On a WebSocket: binary frames."""

    def hold_frame(self) -> None:
        """Copy the rest of the `SpoolFrame` in flight into memory, because its file is about to change."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    async def drain(self) -> None:
        """Wait until nothing is queued; raises `ConnectionLost` if the connection ends first."""

    def close(self) -> None:
        """Send the queued messages if that is possible at once, then close."""
