"""Server-sent events: whatever the pieces they come in and whatever ends their lines, the same events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from holdfast.bridge.sse import ServerSentEvent, SseReader, sse

from .replies import names, texts

events = st.lists(st.tuples(names, st.dictionaries(names, texts, max_size=2)), max_size=4)


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size
    yield data[at:]


@given(events, st.lists(st.integers(0, 9), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_what_is_written_is_read(given_: list[tuple[str, dict[str, Any]]], sizes: list[int], end: bytes) -> None:
    data = b"".join(sse(body, name) for name, body in given_).replace(b"\n", end)
    reader = SseReader()
    read = [event for piece in cut(data, sizes) for event in reader.feed(piece)]
    assert [(event.event, json.loads(event.data)) for event in read] == given_


def test_comments_and_other_fields_are_passed_over_and_data_lines_joined() -> None:
    data = b": ping\n\nid: 1\nretry: 5\ndata: one\ndata:two\n\nevent: x\n\ndata\n\n"
    assert SseReader().feed(data) == [ServerSentEvent("", b"one\ntwo"), ServerSentEvent("", b"")]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_event_over_the_limit_is_dropped_and_the_next_one_read(size: int) -> None:
    data = sse({"long": "x" * 500}) + b"data: " + b"y" * 60 + b"\ndata: " + b"z" * 60 + b"\n\n" + sse({"short": 1})
    reader = SseReader(limit=100)
    read = [event for i in range(0, len(data), size) for event in reader.feed(data[i : i + size])]
    assert [event.data for event in read] == [b'{"short":1}']
