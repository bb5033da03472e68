"""The method table: every method and notification of the wire by its name; pure.

The server's dispatch, the client and the test of `docs/protocol.md` use its rows.
"""

from __future__ import annotations

from typing import Final

from holdfast.wire import (
    codex_messages,
    exec_remote_messages,
    file_messages,
    host_call_messages,
    messages,
    stream_messages,
)
from holdfast.wire.methods import Notification, WireMethod

FAMILIES: Final = (
    messages,
    file_messages,
    codex_messages,
    host_call_messages,
    stream_messages,
    exec_remote_messages,
)


def methods() -> dict[str, WireMethod[object, object]]:
    """Every method by its wire name."""
    return {row.name: row for family in FAMILIES for row in vars(family).values() if isinstance(row, WireMethod)}


def notifications() -> dict[str, Notification[object]]:
    """Every notification by its wire name."""
    return {row.name: row for family in FAMILIES for row in vars(family).values() if isinstance(row, Notification)}
