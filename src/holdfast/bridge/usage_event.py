"""Takes one event out of a stream again: the usage that the bridge asked for, and its caller did not; pure.

Everything else passes byte for byte.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from holdfast.bridge.sse import EVENT_BYTES

#: What ends an event; kept by the split.
_EVENT_END: Final = re.compile(rb"(\r\n\r\n|\n\n|\r\r)")


class LeftOutUsage:
    """A stream of chat completions without the event of the usage alone: the bridge asked for it, not the caller.

    A client that did not ask takes the first of no choices, and fails.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        parts = _EVENT_END.split(self._rest + piece)
        self._rest = parts.pop()
        pairs = zip(parts[::2], parts[1::2], strict=True)
        passed = b"".join(event + end for event, end in pairs if not _is_usage_alone(event))
        if len(self._rest) > EVENT_BYTES:
            # Not an event of ours, whatever it is.
            passed, self._rest = passed + self._rest, b""
        return passed

    def end(self) -> bytes:
        return b"" if _is_usage_alone(self._rest) else self._rest


def _is_usage_alone(event: bytes) -> bool:
    if b'"choices"' not in event or b'"usage"' not in event:
        return False
    try:
        body: Any = msgspec.json.decode(event.partition(b"data:")[2].strip())
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("choices") == [] and bool(body.get("usage"))
