"""Encodes names of keys as the bytes that xterm sends for them, so that a caller can press `C-c` or `F5`.

The names are those of tmux and a few more. Pure: the caller passes whether cursor keys are in application mode.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Final

from holdfast.errors import InvalidParams

_SHIFT: Final = 1
_ALT: Final = 2
_CTRL: Final = 4

_MODIFIERS: Final = {
    **dict.fromkeys(("c", "ctrl", "control"), _CTRL),
    **dict.fromkeys(("m", "meta", "a", "alt"), _ALT),
    **dict.fromkeys(("s", "shift"), _SHIFT),
}
# Something must follow, so that `-` and `C-` are not read as a modifier without a key.
_MODIFIER: Final = re.compile(rf"({'|'.join(_MODIFIERS)})[-+](?=.)", re.IGNORECASE | re.DOTALL)

#: `ESC [ 1 ; m X` with modifiers; without, `ESC [ X`, and `ESC O X` while cursor keys are in application mode.
_CURSOR: Final = {"Up": "A", "Down": "B", "Right": "C", "Left": "D", "Home": "H", "End": "F"}
#: `ESC O X` without modifiers, in every mode.
_FUNCTION: Final = {"F1": "P", "F2": "Q", "F3": "R", "F4": "S"}
#: `ESC [ n ~`, with modifiers `ESC [ n ; m ~`.
_NUMBERED: Final = {
    "Insert": 2,
    "Delete": 3,
    "PageUp": 5,
    "PageDown": 6,
    "F5": 15,
    "F6": 17,
    "F7": 18,
    "F8": 19,
    "F9": 20,
    "F10": 21,
    "F11": 23,
    "F12": 24,
}
_CHARACTERS: Final = {
    "Enter": "\r",
    "Tab": "\t",
    "Escape": "\x1b",
    "Space": " ",
    "BSpace": "\x7f",
    # The keypad in numeric mode, which is how a terminal starts.
    "KPEnter": "\r",
    **{f"KP{char}": char for char in "0123456789/*-+."},
}
_ALIASES: Final = {
    **dict.fromkeys(("PgUp", "PPage", "Prior"), "PageUp"),
    **dict.fromkeys(("PgDn", "PgDown", "NPage", "Next"), "PageDown"),
    "IC": "Insert",
    "Ins": "Insert",
    "DC": "Delete",
    "Del": "Delete",
    "Return": "Enter",
    "Esc": "Escape",
    "Backspace": "BSpace",
}
#: xterm has no keys beyond F12: its terminfo entry gives F13 to F24 the bytes of Shift with F1 to F12.
_SHIFTED: Final = {f"F{number}": f"F{number - 12}" for number in range(13, 25)}
#: The name as it is written here for the name in lower case. `BTab` is Shift with Tab.
_NAMES: Final = {
    name.lower(): name for name in (*_CURSOR, *_FUNCTION, *_NUMBERED, *_CHARACTERS, *_ALIASES, *_SHIFTED, "BTab")
}

#: The control characters of keys that are not letters, as on the keyboards of the VT220 and in xterm.
_CONTROLS: Final = {
    **dict.fromkeys("@ 2`", b"\x00"),
    **dict.fromkeys("[3{", b"\x1b"),
    **dict.fromkeys("\\4|", b"\x1c"),
    **dict.fromkeys("]5}", b"\x1d"),
    **dict.fromkeys("^6~", b"\x1e"),
    **dict.fromkeys("_7/", b"\x1f"),
    **dict.fromkeys("?8", b"\x7f"),
}


def key_names() -> tuple[str, ...]:
    """Every name that `encode_keys` accepts, without modifiers, for documentation and for completion."""
    return tuple(_NAMES.values())


def encode_keys(keys: Sequence[str], *, application_cursor: bool = False) -> bytes:
    """The bytes that xterm sends when these keys are pressed one after the other.

    A key is one character, which is itself, or a name in any case (`Up`, `F5`, `Enter`), or `^` and a character,
    or either after modifiers in any order: `C-` `M-` `A-` `S-`. A longer string that is no key is refused rather
    than typed, so that a misspelt name cannot end up as text in a program. Text is sent as text.

    `application_cursor`: the program has set application cursor keys (`ESC [ ? 1 h`).
    """
    if isinstance(keys, str):
        raise InvalidParams(f"keys must be a list of keys, not the string {keys!r}", keys=keys)
    return b"".join(_encode(key, application_cursor) for key in keys)


def _encode(key: str, application_cursor: bool) -> bytes:
    modifiers, rest = 0, key
    while len(rest) > 1 and (match := _MODIFIER.match(rest)):
        modifiers |= _MODIFIERS[match[1].lower()]
        rest = rest[match.end() :]
    if len(rest) == 2 and rest[0] == "^":
        modifiers, rest = modifiers | _CTRL, rest[1]
    if len(rest) == 1:
        return _character(key, rest, modifiers)
    name = _NAMES.get(rest.lower())
    if name is None:
        raise _unknown(key, rest)
    return _named(_ALIASES.get(name, name), modifiers, application_cursor)


def _named(name: str, modifiers: int, application_cursor: bool) -> bytes:
    if name in _SHIFTED:
        name, modifiers = _SHIFTED[name], modifiers | _SHIFT
    if name == "BTab" or (name == "Tab" and modifiers & _SHIFT):
        return _meta(modifiers) + b"\x1b[Z"
    if name == "Space" and modifiers & _CTRL:
        return _meta(modifiers) + b"\x00"
    if name == "BSpace" and modifiers & _CTRL:
        return _meta(modifiers) + b"\x08"
    if name in _CHARACTERS:
        # xterm sends the same byte with Shift or Control.
        return _meta(modifiers) + _CHARACTERS[name].encode()
    if name in _NUMBERED:
        suffix = f";{modifiers + 1}" if modifiers else ""
        return f"\x1b[{_NUMBERED[name]}{suffix}~".encode()
    final = _CURSOR.get(name) or _FUNCTION[name]
    if modifiers:
        return f"\x1b[1;{modifiers + 1}{final}".encode()
    return f"\x1b{'O' if application_cursor or name in _FUNCTION else '['}{final}".encode()


def _character(key: str, char: str, modifiers: int) -> bytes:
    if modifiers & _CTRL:
        code = bytes([ord(char) & 0x1F]) if char.isascii() and char.isalpha() else _CONTROLS.get(char)
        if code is None:
            raise InvalidParams(f"key {key!r}: Control makes no character of {char!r}", key=key)
        return _meta(modifiers) + code
    if modifiers & _SHIFT:
        if not char.isalpha():
            # The shifted character of a digit or a sign depends on the keyboard.
            raise InvalidParams(f"key {key!r}: Shift goes with letters; give the shifted character itself", key=key)
        char = char.upper()
    try:
        return _meta(modifiers) + char.encode()
    except UnicodeEncodeError:
        raise InvalidParams(f"key {key!r} is not a character that UTF-8 can encode", key=key) from None


def _meta(modifiers: int) -> bytes:
    return b"\x1b" if modifiers & _ALT else b""


def _unknown(key: str, name: str) -> InvalidParams:
    if not key:
        return InvalidParams("a key must not be empty", key=key)
    near = [_NAMES[match] for match in difflib.get_close_matches(name.lower()[:32], _NAMES, n=3, cutoff=0.5)]
    hint = f"; did you mean {' or '.join(near)}?" if near else "; text is sent as text, not as keys"
    shown = key if len(key) <= 64 else f"{key[:61]}..."
    return InvalidParams(f"{shown!r} is no key{hint}", key=shown, near=near)
