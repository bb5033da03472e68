"""Secrets are taken out of texts and of streams, however they are written and wherever a stream is cut."""

from __future__ import annotations

from hypothesis import given, strategies as st

from holdfast.bridge.redaction import RedactedStream, Redaction

KEY = "sk-of-the-host/0123+4="


def through(redaction: Redaction, pieces: list[bytes]) -> bytes:
    stream = RedactedStream(redaction)
    return b"".join([*map(stream.feed, pieces), stream.end()])


def test_a_key_is_found_as_it_is_in_json_and_in_a_url() -> None:
    redaction = Redaction([KEY])
    for form in (KEY, KEY.replace("/", "\\/"), "sk-of-the-host%2F0123%2B4%3D"):
        assert redaction.text(f"before {form} after") == "before [redacted] after"


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
    said = b'{"a": "Bearer abcdefghijklmnopqrstuvwxyz", "b": "sk-proj-abcdefghijklmnopqrst", "c": "bearer of news"}'
    assert Redaction(()).for_record(said) == '{"a": "[redacted]", "b": "[redacted]", "c": "bearer of news"}'


def test_a_word_too_short_to_be_a_secret_is_left_alone() -> None:
    assert Redaction(["a", ""]).text("a banana") == "a banana"
