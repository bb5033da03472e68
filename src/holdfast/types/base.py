"""The base of all data types, and the limits that concern every message; pure."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

#: The end of anything that a client starts: with the server, or with the connection of that client.
Lifetime = Literal["server", "connection"]
#: The largest message that servers and clients accept by default. A 50 MiB body of a model call as base64 fits.
MAX_MESSAGE_BYTES: Final = 96 * 1024 * 1024


class Struct(msgspec.Struct, frozen=True, rename="camel"):
    """Base of all data types: frozen, and camelCase on the wire."""
