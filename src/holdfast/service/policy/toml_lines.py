"""Finds the line of each key in a TOML text, which `tomllib` does not report; pure.

For text that `tomllib` has already accepted: only as much is parsed as needed to find keys. A path is names of keys
and, in arrays, indexes.
"""

from __future__ import annotations

import re
from typing import Final

Path = tuple[str | int, ...]

_SPACE: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BLANK: Final = re.compile(r"[ \t]*")
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR: Final = re.compile(r"[^,\]\}\r\n#]*")
_STRINGS: Final = (
    # In a multi-line string up to two quotes may precede the three that end it.
    re.compile(r'"""(?:[^\\]|\\.)*?"""(?:"{1,2})?', re.S),
    re.compile(r"'''.*?'''(?:'{1,2})?", re.S),
    re.compile(r'"(?:[^"\\\n]|\\.)*"', re.S),
    re.compile(r"'[^'\n]*'"),
)
#: Nesting of arrays and inline tables; deeper keys have the line of the enclosing one.
_MAX_DEPTH: Final = 40


def lines_of(text: str) -> dict[Path, int]:
    """Return the line of every table and key, the first of a text being 1."""
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines: dict[Path, int] = {}
        #: Number of elements of each array of tables so far.
        self._elements: dict[Path, int] = {}
        self._counted, self._line = 0, 1

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        while True:
            self._skip(_SPACE)
            if self._at >= len(self._text):
                return self._lines
            begin = self._at
            if self._text.startswith("[", self._at):
                table = self._header()
            else:
                self._pair(table, 0)
            if self._at == begin:  # not TOML; tomllib has reported it
                return self._lines

    def _skip(self, pattern: re.Pattern[str]) -> None:
        if match := pattern.match(self._text, self._at):
            self._at = match.end()

    def _note(self, path: Path) -> None:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        self._lines.setdefault(path, self._line)

    def _header(self) -> Path:
        several = self._text.startswith("[[", self._at)
        start = self._at
        self._at += 2 if several else 1
        keys = self._keys()
        after, self._at = self._at, start
        path: Path = ()
        for index, key in enumerate(keys):
            path = (*path, key)
            last = index == len(keys) - 1
            if last and several:
                self._elements[path] = self._elements.get(path, 0) + 1
            if last or path not in self._lines:
                self._note(path)
            if path in self._elements:
                path = (*path, self._elements[path] - 1)
        self._note(path)
        self._at = after
        self._skip(_BLANK)
        self._at += 2 if several else 1
        return path

    def _keys(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._skip(_BLANK)
            if match := _BARE.match(self._text, self._at):
                keys.append(match[0])
                self._at = match.end()
            else:
                keys.append(self._string())
            self._skip(_BLANK)
            if not self._text.startswith(".", self._at):
                return keys
            self._at += 1

    def _string(self) -> str:
        for pattern in _STRINGS:
            if match := pattern.match(self._text, self._at):
                self._at = match.end()
                quotes = 3 if match[0].startswith(('"""', "'''")) else 1
                inner = match[0][quotes:-quotes]
                return _unescaped(inner) if match[0][0] == '"' else inner
        return ""

    def _pair(self, table: Path, depth: int) -> None:
        start = self._at
        keys = self._keys()
        after, self._at = self._at, start
        path = table
        for key in keys:
            path = (*path, key)
            self._note(path)
        self._at = after
        if self._text.startswith("=", self._at):
            self._at += 1
            self._skip(_BLANK)
            self._value(path, depth)

    def _value(self, path: Path, depth: int) -> None:
        char = self._text[self._at : self._at + 1]
        if char in ("[", "{") and depth < _MAX_DEPTH:
            self._at += 1
            self._inside(path, "]" if char == "[" else "}", depth + 1)
        elif char in ('"', "'"):
            self._string()
        else:
            self._skip(_SCALAR)

    def _inside(self, path: Path, closer: str, depth: int) -> None:
        index = 0
        while True:
            self._skip(_SPACE)
            begin = self._at
            if self._text.startswith(closer, self._at):
                self._at += 1
                return
            if closer == "]":
                self._note((*path, index))
                self._value((*path, index), depth)
                index += 1
            else:
                self._pair(path, depth)
            self._skip(_SPACE)
            if self._text.startswith(",", self._at):
                self._at += 1
            if self._at == begin:
                return


def _unescaped(text: str) -> str:
    """Return a basic string's text. Only keys need it, and only the escapes that occur in keys."""
    letters = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}

    def character(match: re.Match[str]) -> str:
        digits = match[1] or match[2]
        return chr(int(digits, 16)) if digits else letters.get(match[3], match[3])

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", character, text, flags=re.S)
