"""Secrets are taken out of texts and of streams, however they are written and wherever a stream is cut."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given, strategies as st

from holdfast.bridge.redaction import RedactedStream, Redaction

KEY = "sk-of-the-host/0123+4="
#: Each is a way to write the key; what is left of it must not be longer than the second.
WRITTEN = [
    KEY,
    json.dumps(KEY)[1:-1],
    "".join(f"\\u{ord(each):04x}" for each in KEY),
    "".join(f"\\u{ord(each):04X}" if at % 2 else each for at, each in enumerate(KEY)),
    quote(KEY, safe=""),
    "".join(f"%{ord(each):02x}" for each in KEY),
    "".join(f"&#{ord(each)};" for each in KEY),
    "".join(f"&#x{ord(each):x};" for each in KEY),
    html.escape(KEY),
]
ENCODED = ["", ":", "user:", "me:", "Bearer ", "x", "xy"]
MASKED = [
    "sk-of***4=",
    "sk-of************************",
    "sk-of-the-ho...",
    "sk-\u202623+4=",
    "sk-o\u2022\u2022\u2022\u2022\u2022\u20224=",
    "sk-of\\u2026+4=",
    "****************3+4=",
    "...0123+4=",
]


def through(redaction: Redaction, pieces: list[bytes]) -> bytes:
    stream = RedactedStream(redaction)
    return b"".join([*map(stream.feed, pieces), stream.end()])


def test_a_key_is_found_as_it_is_in_json_and_in_a_url() -> None:
    redaction = Redaction([KEY])
    for form in (KEY, KEY.replace("/", "\\/"), "sk-of-the-host%2F0123%2B4%3D"):
        assert redaction.text(f"before {form} after") == "before [redacted] after"


@pytest.mark.parametrize("written", WRITTEN)
def test_a_key_is_found_behind_escapes(written: str) -> None:
    assert Redaction([KEY]).text(f"before {written} after %41 \\u0041") == "before [redacted] after %41 \\u0041"


@pytest.mark.parametrize("behind", ["", "x", ":more"])
@pytest.mark.parametrize("before", ENCODED)
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_key_is_found_in_base64(encode: Callable[[bytes], bytes], before: str, behind: str) -> None:
    encoded = encode(f"{before}{KEY}{behind}".encode()).decode()
    shown = Redaction([KEY]).text(f"token={encoded}.")
    assert "[redacted]" in shown
    # The characters at both ends hold bits of their neighbours, too, and may stay.
    left = shown.removeprefix("token=").removesuffix(".").replace("[redacted]", "")
    assert len(left) <= len(encode(before.encode())) + len(encode(behind.encode())) + 3


@pytest.mark.parametrize("masked", MASKED)
def test_a_masked_key_is_found(masked: str) -> None:
    assert Redaction([KEY]).text(f"Incorrect API key: {masked}, see") == "Incorrect API key: [redacted], see"


def test_what_is_no_key_is_left_alone() -> None:
    text = "A sentence... **bold** text, 100%, C:\\users, \\u00e9, sk-o, ***, sk. \u2026 a-b"
    assert Redaction([KEY]).text(text) == text


def test_a_key_that_ends_as_it_begins_is_found_in_a_stream() -> None:
    redaction = Redaction(["sk-0123456789-sk"])
    assert through(redaction, [b"a sk-0123456789-sk", b" b"]) == b"a [redacted] b"


@pytest.mark.parametrize("key", ["token-%41-0123456", "token-&#65;-0123456", "token-\\u0041-0123456"])
def test_a_key_that_contains_the_text_of_an_escape_is_found_wherever_it_is_cut(key: str) -> None:
    whole = f"a {key} b".encode()
    for cut in range(len(whole)):
        assert through(Redaction([key]), [whole[:cut], whole[cut:]]) == b"a [redacted] b", cut


@pytest.mark.parametrize("key", ['with-"-0123456', "with-/-0123456", "with-\\-0123456"])
def test_a_character_of_the_key_is_found_behind_a_backslash(key: str) -> None:
    written = key.replace("\\", "\\\\").replace('"', '\\"').replace("/", "\\/")
    assert Redaction([key]).text(f'say \\"{written}\\" now') == 'say \\"[redacted]\\" now'


PARTS = [KEY, KEY[:9], "s", "sk-", "data: {}\n\n", *WRITTEN[2:6], *MASKED]
PARTS += [base64.b64encode(f"{each}{KEY}".encode()).decode() for each in ENCODED]


@given(st.lists(st.sampled_from(PARTS), max_size=4), st.randoms(use_true_random=False))
def test_no_form_passes_a_stream_wherever_it_is_cut(parts: list[str], random: object) -> None:
    redaction = Redaction([KEY])
    whole = " | ".join(parts).encode()
    cuts = sorted(random.sample(range(len(whole) + 1), min(6, len(whole) + 1)))  # type: ignore[attr-defined]
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert through(redaction, pieces) == redaction.whole(whole)


@given(st.lists(st.sampled_from([KEY, KEY[:9], "s", "sk-", "data: {}\n\n"])), st.randoms(use_true_random=False))
def test_a_stream_is_redacted_wherever_it_is_cut(parts: list[str], random: object) -> None:
    redaction = Redaction([KEY])
    whole = "".join(parts).encode()
    cuts = sorted(random.sample(range(len(whole) + 1), min(4, len(whole) + 1)))  # type: ignore[attr-defined]
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert through(redaction, pieces) == redaction.whole(whole)
    assert KEY.encode() not in through(redaction, pieces)


def test_only_what_may_be_a_key_waits() -> None:
    stream = RedactedStream(Redaction([KEY]))
    assert stream.feed(b"data: one\n\n") == b"data: one\n\n"
    assert stream.feed(b"data: sk-of") == b"data: "
    assert stream.feed(b"fice") == b"sk-office"


def test_a_record_has_nothing_that_looks_like_a_key() -> None:
    recorded = (
        b'{"a": "Bearer abcdefghijklmnopqrstuvwxyz", "b": "sk-proj-abcdefghijklmnopqrst", "c": "bearer of news"}'
    )
    assert Redaction(()).for_record(recorded) == '{"a": "[redacted]", "b": "[redacted]", "c": "bearer of news"}'


def test_a_word_too_short_to_be_a_secret_is_left_alone() -> None:
    assert Redaction(["a", ""]).text("a banana") == "a banana"
