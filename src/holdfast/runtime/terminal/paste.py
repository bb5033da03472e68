"""The bytes to type so that a command of any content stands on a shell's prompt unchanged. Pure."""

from __future__ import annotations

import re
from typing import Final

from holdfast.errors import InvalidParams

#: To the end of the line, and delete all before it: in readline and in zsh, in insert mode.
CLEAR_LINE: Final = b"\x05\x15"
ENTER: Final = b"\r"
INTERRUPT: Final = b"\x03"
_PASTE_START: Final = b"\x1b[200~"
_PASTE_END: Final = b"\x1b[201~"
#: Makes the next key a character, in readline and in zsh.
_QUOTE: Final = b"\x16"
_CONTROL: Final = re.compile(rb"[\x00-\x1f\x7f]")


def keystrokes(command: str, *, paste: bool) -> bytes:
    """The bytes to type for a command of any number of lines, without the Enter at its end.

    A tab would complete a word and a newline would run half of the command. In a bracketed paste they are text; for
    a shell without bracketed paste, each is quoted. A command of blanks alone is empty.
    """
    text = command.strip("\n").encode()
    if not text.strip():
        return b""
    if b"\0" in text:
        raise InvalidParams("command holds a NUL character")
    if not _CONTROL.search(text):
        return text
    if paste:
        if _PASTE_END in text:
            raise InvalidParams("command holds the sequence that ends a paste")
        return _PASTE_START + text + _PASTE_END
    return _CONTROL.sub(lambda found: _QUOTE + found[0], text)
