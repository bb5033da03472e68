"""Parameters and results of `stream/*`: byte streams between the client's machine and the sandbox; pure data.

A stream has a number that is unique on its connection: positive if the client opened it, negative if the server
accepted it on behalf of the client. Each side sends only as many bytes as the other side has granted.
"""

from __future__ import annotations

from holdfast.types import Struct
from holdfast.wire.messages import Empty
from holdfast.wire.methods import Notification, WireMethod


class StreamAddress(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A TCP port, or the path of a Unix socket."""

    host: str = "127.0.0.1"
    port: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class StreamOpenParams(Struct, frozen=True, forbid_unknown_fields=True):
    """Connect to an address in the sandbox; `window` is the number of bytes that the client accepts at first."""

    stream: int
    address: StreamAddress
    window: int


class StreamOpenResult(Struct, frozen=True):
    #: Bytes that the server accepts at first.
    window: int


class StreamDialParams(Struct, frozen=True, forbid_unknown_fields=True):
    """Connect to an address in the sandbox and pass the socket with the reply, as a descriptor."""

    address: StreamAddress


class StreamListenParams(Struct, frozen=True, forbid_unknown_fields=True):
    """Listen in the sandbox on behalf of the client, which chooses the name `listener`."""

    listener: str
    address: StreamAddress


class StreamListenResult(Struct, frozen=True):
    #: The address with the port that the kernel chose, if port 0 was requested.
    address: StreamAddress


class StreamUnlistenParams(Struct, frozen=True):
    listener: str


class StreamAcceptedParams(Struct, frozen=True):
    """A program in the sandbox has connected to a listener; the server accepts `window` bytes.

    The server sends nothing before the client grants credit.
    """

    listener: str
    stream: int
    window: int


class StreamDataParams(Struct, frozen=True):
    stream: int
    data: bytes


class StreamCreditParams(Struct, frozen=True):
    """The receiver accepts `bytes` more."""

    stream: int
    bytes: int


class StreamEndedParams(Struct, frozen=True):
    """The sender sends no more data; the other direction stays open."""

    stream: int


class StreamResetParams(Struct, frozen=True, omit_defaults=True):
    """Both directions have ended at once, and bytes in flight are lost."""

    stream: int
    reason: str = ""


# --- rows of the method table -----------------------------------------------------------------------------------

STREAM_OPEN = WireMethod("stream/open", StreamOpenParams, StreamOpenResult)
STREAM_DIAL = WireMethod("stream/dial", StreamDialParams, Empty)
STREAM_LISTEN = WireMethod("stream/listen", StreamListenParams, StreamListenResult)
STREAM_UNLISTEN = WireMethod("stream/unlisten", StreamUnlistenParams, Empty)

STREAM_ACCEPTED = Notification("stream/accepted", StreamAcceptedParams, sender="server")
STREAM_DATA = Notification("stream/data", StreamDataParams, sender="both")
STREAM_CREDIT = Notification("stream/credit", StreamCreditParams, sender="both")
STREAM_ENDED = Notification("stream/ended", StreamEndedParams, sender="both")
STREAM_RESET = Notification("stream/reset", StreamResetParams, sender="both")
