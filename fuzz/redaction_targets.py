"""Properties of the bridge's redaction: no piece of a stream contains the key, however it is written and cut."""

from __future__ import annotations

import base64
from typing import Final

from fuzz.target import Target, cut_at, places_of, target
from holdfast.bridge.redaction import RedactedStream, Redaction

KEY: Final = "sk-of-the-host/0123+4="
_REDACTION: Final = Redaction([KEY])


def targets() -> dict[str, Target]:
    """Every target of this module by its name."""
    return {each.name: each for each in globals().values() if isinstance(each, Target)}


@target(
    b"\x02\x05\x07before " + KEY.encode() + b" after",
    b"\x02\x0b\x09" + "".join(f"\\u{ord(each):04x}" for each in KEY).encode(),
    b"\x03\x04\x04\x04" + "".join(f"%{ord(each):02x}" for each in KEY).encode(),
    b"\x02\x08\x08" + base64.b64encode(f"user:{KEY}".encode()),
    b"\x02\x04\x08key sk-of***4= here",
)
def redacted_stream(data: bytes) -> None:
    """Neither the key nor its escaped form passes, and a second redaction of the whole finds nothing more."""
    locations, body = places_of(data)
    stream = RedactedStream(_REDACTION)
    passed = b"".join([*map(stream.feed, cut_at(body, locations)), stream.end()])
    assert KEY.encode() not in passed
    assert _REDACTION.without_forms(passed) == passed
    # Nothing is lost but what was taken out: a text without a key arrives as it was.
    if _REDACTION.whole(body) == body:
        assert passed == body
