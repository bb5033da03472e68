"""Removes secrets from whole texts, and from streams in which a secret may be cut in two; pure.

The provider's key is searched for as it is, in base64 at any alignment (`user:KEY`, `Bearer KEY`), behind JSON, URL
and HTML escapes of any of its characters, and masked (`sk-ab***yz`), so a provider that echoes it cannot bring it
into the sandbox or into a record.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import Final

REDACTED: Final = b"[redacted]"
#: Texts of the form of any provider's key: for records only, since an agent may legitimately write such text.
_KEY_PATTERN: Final = re.compile(
    r"\b(?:sk|pk|rk|xai|gsk|hf)[-_][A-Za-z0-9_-]{16,}|\bAIza[A-Za-z0-9_-]{30,}|\b(?:[Bb]earer|BEARER)\s+[A-Za-z0-9._~+/=-]{16,}"
)
#: Every match of the pattern contains one of these; checking them first takes a tenth of the time.
_FRAGMENTS: Final = ("k-", "k_", "xai", "hf-", "hf_", "AIza", "earer", "EARER")
#: A shorter text is not worth hiding, and would match ordinary words.
MIN_SECRET: Final = 6
#: Parts of a shorter secret, in base64 or beside a mask, would match ordinary words.
MIN_PARTED: Final = 12
#: Least and greatest number of visible characters of a masked key: providers show its beginning, its end or both.
_SHOWN_HEAD: Final = 3
_SHOWN_TAIL: Final = 3
_SHOWN_MOST: Final = 24
#: Longest run of mask characters: longer than any key. Bounds the bytes that a stream holds back.
_MASK_MOST: Final = 512

#: Characters that JSON may write as themselves behind a backslash.
_BACKSLASHED: Final = b'"/\\'
#: Incomplete escape at the end of a piece.
_ESCAPE_BEGUN: Final = re.compile(
    rb"(?:\\{1,4}(?:u(?:0(?:0[0-9a-fA-F]?)?)?)?|%[0-9a-fA-F]?|&(?:#(?:[xX]?[0-9a-fA-F]{0,6})?)?)\Z"
)
#: Every escape contains one of these, which most texts do not.
_ESCAPE_SIGNS: Final = (b"\\u00", b"%", b"&#")
#: The bytes of escapes and of masks.
_ESCAPE_BYTES: Final = rb"\u%&#xX;0123456789abcdefABCDEF"
_MASK_BYTES: Final = b"*.\xe2\x80\xa6\xa2"
#: Asterisks, dots, ellipses and bullets, also JSON-escaped.
_MASK: Final = rb"(?:\*|\.|\xe2\x80\xa6|\xe2\x80\xa2|\\u2026|\\u2022)"
_MASKS: Final = (b"**", b"..", b"\xe2\x80\xa6", b"\xe2\x80\xa2", b"\\u202")


class Redaction:
    """A set of secrets, in all forms in which they are likely to be written."""

    def __init__(self, secrets: Iterable[str]) -> None:
        known = [secret.encode() for secret in secrets if len(secret) >= MIN_SECRET]
        self._set(
            [form for secret in known for form in _forms_of(secret)], [s for s in known if len(s) >= MIN_PARTED]
        )

    def _set(self, forms: Iterable[bytes], masked: Iterable[bytes]) -> None:
        # Longest first: a shorter form may be part of a longer one.
        self._forms = sorted(set(forms), key=len, reverse=True)
        self._masked = sorted(set(masked))
        self._patterns = [_masked_pattern(secret) for secret in self._masked]
        self._begun = [_masked_begun(secret) for secret in self._masked]
        self._longest = max(map(len, self._forms), default=0)
        used = b"".join(self._forms)
        backslashed = bytes(char for char in _BACKSLASHED if char in used)
        self._escaped = _escape_pattern(backslashed)
        self._escape_signs = (*_ESCAPE_SIGNS, *(b"\\%c" % char for char in backslashed))
        #: Every byte that can be a part of a secret in any of its forms.
        self._alphabet = used + _ESCAPE_BYTES + _MASK_BYTES
        #: A masked secret shows its first or its last characters.
        self._shown = [part for s in self._masked for part in (s[:_SHOWN_HEAD], s[-_SHOWN_TAIL:])]

    @staticmethod
    def joined(parts: Iterable[Redaction]) -> Redaction:
        """Return the union of several sets."""
        whole, given = Redaction(()), list(parts)
        whole._set(
            (form for part in given for form in part._forms), (each for part in given for each in part._masked)
        )
        return whole

    def whole(self, data: bytes) -> bytes:
        return self.without_masked(self.without_forms(data))

    def without_forms(self, data: bytes) -> bytes:
        """Remove whole secrets, literal and escaped."""
        for form in self._forms:
            if form in data:
                data = data.replace(form, REDACTED)
        if self._forms and any(sign in data for sign in self._escape_signs):
            data = self._without_escaped(data)
        return data

    def without_masked(self, data: bytes) -> bytes:
        """Remove masked secrets that show a part of the key."""
        if any(part in data for part in self._shown) and any(mask in data for mask in _MASKS):
            for pattern in self._patterns:
                data = pattern.sub(REDACTED, data)
        return data

    def _without_escaped(self, data: bytes) -> bytes:
        plain = self._escaped.sub(_unescaped_character, data)
        if not any(form in plain for form in self._forms):
            return data
        plain, starts = self._unescaped(data)
        for form in self._forms:
            spans = [(starts[at], starts[at + len(form)]) for at in _positions(plain, form)]
            if spans:
                for start, end in reversed(spans):
                    data = data[:start] + REDACTED + data[end:]
                plain, starts = self._unescaped(data)
        return data

    def _unescaped(self, data: bytes) -> tuple[bytes, list[int]]:
        """Return `data` without escapes, and the position in `data` of each byte and of the end."""
        plain = bytearray()
        starts: list[int] = []
        last = 0
        for found in self._escaped.finditer(data):
            plain += data[last : found.start()] + _unescaped_character(found)
            starts.extend(range(last, found.start() + 1))
            last = found.end()
        plain += data[last:]
        starts.extend(range(last, len(data) + 1))
        return bytes(plain), starts

    def text(self, text: str) -> str:
        return self.whole(text.encode(errors="replace")).decode(errors="replace")

    def for_record(self, data: bytes) -> str:
        """Return text without the secrets and without anything of the form of a key."""
        if not data:
            return ""
        text = self.whole(data).decode(errors="replace")
        if not any(sign in text for sign in _FRAGMENTS):
            return text
        return _KEY_PATTERN.sub(REDACTED.decode(), text)

    def held(self, data: bytes) -> int:
        """Return how many bytes at the end of `data` may be the beginning of a secret."""
        if not self._forms:
            return 0
        # An escape takes six bytes or more for one character, and a mask is longer than a key.
        tail = data[-max(10 * self._longest, _MASK_MOST + 2 * _SHOWN_MOST) :]
        # A piece usually ends with a byte that no secret contains, such as the line break after an event.
        tail = tail[len(tail.rstrip(self._alphabet)) :]
        if not tail:
            return 0
        plain, starts = self._unescaped(tail)
        longest = 0
        begun = _ESCAPE_BEGUN.search(tail)
        if begun is not None:
            # The incomplete escape may continue a secret, or begin one.
            plain, starts = self._unescaped(tail[: begun.start()])
            longest = len(tail) - begun.start()
        longest = max(longest, len(tail) - starts[self._begins_at(plain)])
        if plain != tail:
            # A secret may itself contain the text of an escape.
            longest = max(longest, len(tail) - self._begins_at(tail))
        if self._begun and any(mask in tail for mask in (b"*", b".", b"\xe2", b"\\")):
            for pattern in self._begun:
                found = pattern.search(tail)
                if found is not None:
                    longest = max(longest, len(tail) - found.start())
        return longest

    def _begins_at(self, text: bytes) -> int:
        """Return the first position from which `text` is the beginning of a secret, or its length."""
        first = len(text)
        for form in self._forms:
            at = max(0, len(text) - len(form) + 1)
            while 0 <= (at := text.find(form[:1], at)) < first:
                if form.startswith(text[at:]):
                    first = at
                at += 1
        return first


class RedactedStream:
    """Redacts piece by piece. Only bytes that may begin a secret wait for the next piece."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        data = self._redaction.without_forms(self._rest + piece if self._rest else piece)
        held = self._redaction.held(data)
        self._rest = data[len(data) - held :]
        # A masked key is replaced only when complete: otherwise its last characters would pass with the next piece.
        return self._redaction.without_masked(data[: len(data) - held] if held else data)

    def end(self) -> bytes:
        rest, self._rest = self._rest, b""
        return self._redaction.without_masked(rest)


def _forms_of(secret: bytes) -> Iterator[bytes]:
    yield secret
    if len(secret) < MIN_PARTED:
        return
    for offset in range(3):
        # The base64 characters that depend on the secret alone, not on its neighbours.
        encoded = base64.b64encode(bytes(offset) + secret)
        core = encoded[-(-offset * 8 // 6) : (offset + len(secret)) * 8 // 6]
        yield core
        yield core.replace(b"+", b"-").replace(b"/", b"_")


def _positions(data: bytes, form: bytes) -> Iterator[int]:
    at = data.find(form)
    while at >= 0:
        yield at
        at = data.find(form, at + len(form))


def _escape_pattern(backslashed: bytes) -> re.Pattern[bytes]:
    """Pattern of one escaped character of JSON, JSON in JSON, URLs or HTML.

    `backslashed` are the characters that may stand behind a backslash as themselves. The others are part of no
    secret: nearly every JSON text has an escaped quotation mark, and most keys have none.
    """
    literal = b"[%s]" % re.escape(backslashed) if backslashed else b"(?!)"
    # Each branch begins with a literal, by which `re` finds the places to try.
    in_json = rb"\\(?:\\{0,3}u00([0-9a-fA-F]{2})|(%s))" % literal
    return re.compile(in_json + rb"|%([0-9a-fA-F]{2})|&#(?:[xX]0{0,4}([0-9a-fA-F]{2})|0{0,4}([0-9]{2,3}));")


def _unescaped_character(found: re.Match[bytes]) -> bytes:
    in_json, literal, in_url, in_html, decimal = found.groups()
    if literal is not None:
        return literal
    hexadecimal = in_json or in_url or in_html
    return bytes(((int(decimal) if hexadecimal is None else int(hexadecimal, 16)) & 0xFF,))


def _masked_pattern(secret: bytes) -> re.Pattern[bytes]:
    head, tail = secret[:_SHOWN_MOST], secret[-_SHOWN_MOST:]
    with_head = _head(head, _SHOWN_HEAD) + rb"(?:" + _masks(2) + rb"|\xe2\x80\xa6|\\u2026)" + _tail(tail, 2) + rb"?"
    return re.compile(with_head + rb"|" + _masks(3) + _tail(tail, _SHOWN_TAIL))


def _masked_begun(secret: bytes) -> re.Pattern[bytes]:
    """Pattern of a masked secret that may continue in the next piece."""
    head, tail = secret[:_SHOWN_MOST], secret[-_SHOWN_MOST:]
    parts = {tail[a:b] for a in range(len(tail)) for b in range(a + 1, len(tail) + 1)}
    some_tail = b"|".join(map(re.escape, sorted(parts, key=len, reverse=True)))
    half_a_mask = rb"(?:\xe2\x80?|\\(?:u(?:2(?:02?)?)?)?)?"
    begins = rb"(?:" + _head(head, _SHOWN_HEAD) + _masks(0) + rb"|" + _masks(1) + rb")"
    return re.compile(begins + half_a_mask + rb"(?:" + some_tail + rb")?\Z")


def _masks(least: int) -> bytes:
    return _MASK + b"{%d,%d}" % (least, _MASK_MOST)


def _head(text: bytes, least: int) -> bytes:
    """Pattern of at least `least` characters of the beginning of `text`, greedy."""
    pattern = b""
    for at in range(len(text) - 1, least - 1, -1):
        pattern = rb"(?:%s%s)?" % (re.escape(text[at : at + 1]), pattern)
    return re.escape(text[:least]) + pattern


def _tail(text: bytes, least: int) -> bytes:
    """Pattern of at least `least` characters of the end of `text`, longest first."""
    return rb"(?:" + b"|".join(re.escape(text[at:]) for at in range(len(text) - least + 1)) + rb")"
