"""A path is text on the wire and any bytes in the system, and comes out as it went in."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, strategies as st

from holdfast.errors import InvalidParams
from holdfast.wire.paths import decode_path, encode_path, encode_uri

raw_paths = st.binary(min_size=1, max_size=40).filter(lambda raw: b"\0" not in raw)


@given(raw_paths | raw_paths.map(lambda raw: b"file:" + raw) | raw_paths.map(lambda raw: b"//" + raw))
def test_every_path_survives(raw: bytes) -> None:
    path = os.fsdecode(raw)
    wire = encode_path(path)
    wire.encode()  # as JSON and MessagePack need it
    assert decode_path(wire) == path


@given(raw_paths)
def test_every_uri_is_a_path(raw: bytes) -> None:
    path = os.fsdecode(b"/" + raw.lstrip(b"/"))
    assert decode_path(encode_uri(path)) == path


def test_text_stands_for_itself() -> None:
    for path in ("/srv/a b", "ü%20", "relative", "."):
        assert encode_path(path) == path
    assert encode_path("/caf\udce9") == "file:/caf%E9"
    assert encode_path("file:x") == "file:file%3Ax"


def test_uris_of_this_machine_are_paths() -> None:
    for uri in ("file:///srv/a%20b", "file://localhost/srv/a%20b", "file:/srv/a%20b"):
        assert decode_path(uri) == "/srv/a b"
    with pytest.raises(InvalidParams, match="not a file of this machine"):
        decode_path("file://elsewhere/srv")


def test_half_a_character_is_no_path() -> None:
    with pytest.raises(InvalidParams, match="surrogate"):
        encode_path("\ud800")
