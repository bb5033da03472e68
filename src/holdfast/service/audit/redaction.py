"""Removes probable secrets from texts before they are recorded, and truncates long ones; pure.

The service does not have the agents' secrets, so it recognises them by form: keys of well-known issuers, and values
in the position of a password. Each pattern matches a bounded piece of text, so that no text makes it slow. A secret
that is typed in pieces, or has no recognisable form, is not found; input at a password prompt is never recorded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, Final

from holdfast.secret_names import SIGNS, looks_secret
from holdfast.service.problems import Invalid

REDACTED: Final = "[redacted]"
#: Passwords found in one command; a command has one, or a second by mistake or to hide it.
_MOST_PASSES: Final = 16

#: A value: quoted, or up to the end of a word in a command line, in JSON or in a URL's query; a shell joins
#: adjacent parts (`"a"b'c'`). Not an expansion: `$X` reveals nothing.
_VALUE: Final = r"(?P<secret>(?!\$)(?:\"[^\"\n]{1,4096}\"|'[^'\n]{1,4096}'|[^\s\"'&;,}]{1,4096}){1,64})"

#: Patterns, each with lower-case fragments of which every match contains one: most texts contain none, and checking
#: fragments first takes a hundredth of the time. The group `secret`, or the whole match, is replaced; with a group
#: `name`, only if that is the name of a secret.
PATTERNS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    # First the patterns for a program's name, which a later pattern could match as a value.
    (("mysql", "mariadb"), r"\b(?:mysql|mariadb)[^\n|;&]{0,512}?\s-p(?!\[redacted\])(?P<secret>\S{1,256})"),
    (
        ("curl",),
        r"\bcurl\s[^\n|;&]{0,400}?(?<=\s)(?:-u|--user)[ =]{0,2}[\"']?[^\s:\"']{0,256}:"
        r"(?!\[redacted\])(?P<secret>[^\s\"']{1,256})",
    ),
    # PEM keys, also truncated ones.
    (
        ("private key-----",),
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----(?P<secret>(?:[^-]|-(?!----)){1,16000})",
    ),
    # Amazon's key ids, and those of other issuers with a recognisable prefix.
    (("akia", "asia", "agpa", "aida", "aroa", "anpa"), r"\b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA)[A-Z0-9]{16}\b"),
    (
        ("sk-", "sk_", "pk-", "pk_", "rk-", "rk_", "xai", "gsk", "hf_", "hf-"),
        r"\b(?:sk|pk|rk|xai|gsk|hf)[-_][A-Za-z0-9_-]{16,512}",
    ),
    (("aiza", "ya29."), r"\b(?:AIza[A-Za-z0-9_-]{30,60}|ya29\.[A-Za-z0-9_-]{20,512})"),
    (
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
        r"\b(?:gh[pousr]_[A-Za-z0-9]{20,255}|github_pat_[A-Za-z0-9_]{20,255}|glpat-[A-Za-z0-9_-]{16,255})",
    ),
    (
        ("xox", "npm_", "pypi-"),
        r"\b(?:xox[abeprs]-[A-Za-z0-9-]{10,255}|npm_[A-Za-z0-9]{30,60}|pypi-[A-Za-z0-9_-]{30,512})",
    ),
    # JSON web tokens.
    (("eyj",), r"\beyJ[A-Za-z0-9_-]{8,4096}\.eyJ[A-Za-z0-9_-]{8,4096}\.[A-Za-z0-9_-]{8,1024}"),
    # Headers. The value ends with the line; the next line is another header.
    (
        ("authorization",),
        r"(?i)authorization[\"']?[^\S\n]{0,4}[:=][^\S\n]{0,4}[\"']?"
        r"(?:(?:bearer|basic|token|digest)[^\S\n]{1,4})?(?P<secret>[^\s\"']{4,4096})",
    ),
    (("bearer",), r"(?i)\bbearer[^\S\n]{1,4}(?P<secret>[A-Za-z0-9._~+/=-]{8,4096})"),
    (("cookie:",), r"(?i)cookie:[^\S\n]{0,4}(?P<secret>[^\n\"']{4,4096})"),
    # The password in a URL.
    (("://",), r"://[^\s/:@\"']{0,256}:(?P<secret>[^\s/@\"']{1,1024})@"),
    # Options: by their name, and the short password options of known programs.
    (SIGNS, rf"(?<!\S)--?(?P<name>[A-Za-z][A-Za-z0-9_-]{{1,60}})(?:=|\s{{1,4}}){_VALUE}"),
    (("sshpass",), r"\bsshpass\s{1,4}-p\s{0,4}(?P<secret>\S{1,256})"),
    # `NAME=value`, `name: value`, `"name": "value"`, where the name is that of a secret.
    (SIGNS, rf"(?<![\w.-])(?P<name>[\w.-]++)[\"']?\s{{0,4}}[=:](?!=)\s{{0,4}}{_VALUE}"),
)


class Redactor:
    """Callable that returns a text without secrets."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        """`patterns` are additional regular expressions; a group `secret` limits the replacement to itself."""
        self._patterns = [(signs, re.compile(pattern), _MOST_PASSES) for signs, pattern in PATTERNS]
        #: All fragments, each once: most texts contain none.
        self._signs = tuple(dict.fromkeys(sign for signs, _ in PATTERNS for sign in signs))
        for pattern in patterns:
            try:
                # Applied once: a pattern that matches a part of `REDACTED` would lengthen the text each time.
                self._patterns.append((("",), re.compile(pattern), 1))
                self._signs = ("",)
            except re.error as error:
                raise Invalid(
                    f"redact: {pattern!r} is not a regular expression: {error}", reason="REDACT_PATTERN"
                ) from None

    def __call__(self, text: str) -> str:
        lowered = text.lower()
        if not _contains(lowered, self._signs):
            return text
        for signs, pattern, passes in self._patterns:
            if _contains(lowered, signs):
                text = _by_name(pattern, text) if "name" in pattern.groupindex else _without(pattern, text, passes)
        return text

    def body(self, value: Any) -> Any:
        """Redact all texts in a JSON value; its keys count as names of values."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {name: self._named(str(name), each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.body(each) for each in value]
        return value

    def _named(self, name: str, value: Any) -> Any:
        if isinstance(value, str) and value and looks_secret(name, alone=False):
            return REDACTED
        return self.body(value)


def _contains(text: str, signs: tuple[str, ...]) -> bool:
    # A loop: every row of the log is searched, and `any` with a generator takes twice as long.
    for sign in signs:  # noqa: SIM110
        if sign in text:
            return True
    return False


def _by_name(pattern: re.Pattern[str], text: str) -> str:
    """Replace values of secret names. A value is searched for names as well: `env: PASSWORD=x`."""
    pieces: list[str] = []
    at = searched = 0
    while (match := pattern.search(text, searched)) is not None:
        begin, end = match.span("secret")
        if looks_secret(match["name"], match["secret"], alone=False):
            pieces += [text[at:begin], REDACTED]
            at = searched = end
        else:
            searched = match.end("name")
    return "".join([*pieces, text[at:]])


def _without(pattern: re.Pattern[str], text: str, passes: int) -> str:
    """Apply one pattern until nothing changes: a match ends at the first of several passwords."""
    for _ in range(passes):
        before, text = text, pattern.sub(_hidden, text)
        if text == before:
            break
    return text


def _hidden(match: re.Match[str]) -> str:
    if "secret" not in match.re.groupindex or match["secret"] is None:
        return REDACTED
    begin, end = match.span("secret")
    whole, start = match[0], match.start()
    return whole[: begin - start] + REDACTED + whole[end - start :]


def cut(text: str, limit: int) -> dict[str, Any]:
    """Return a text for a row's body: all of it, or its first `limit` bytes with length and hash of the whole.

    The text must be redacted already: the hash of a text with one short unknown secret reveals the secret.
    """
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return {"text": text}
    kept = data[:limit].decode(errors="ignore")
    return {"text": kept, "length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
