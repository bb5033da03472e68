"""Words of a shell's language: quoting is taken off, and what only a running shell can know is told; pure.

Expansions run commands too (`$(...)`, backticks, `<(...)`), at any depth of quoting. Those are handed to
`commands_until` and `script`, which the grammar (`shell_grammar`) gives.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.service.model import Struct

#: What ends a word that is not quoted.
META: Final = " \t\n;&|()<>"
#: Levels of nesting; a `$(...)` counts as three. People write a handful; each costs a few frames of Python's stack,
#: which has 1,000.
MAX_DEPTH: Final = 60

_ANSI: Final = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|c(.)|(.))", re.S
)
_ANSI_QUOTED: Final = re.compile(r"'((?:[^'\\]|\\.)*)'", re.S)
_ANSI_LETTERS: Final = dict(zip("abeEfnrtv", "\a\b\x1b\x1b\f\n\r\t\v", strict=True))
#: Letters that mean nothing to a shell, taken at once: most of what is typed.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:=,@%+-]+")
_PLAIN_QUOTED: Final = re.compile(r'[^"\\$`!]+')
_PLAIN_TEXT: Final = re.compile(r"[^\\$`]+")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_ASSIGNING_EXPANSION: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?:\[[^\]]*\])?:?=")
#: A quoted `$` or backtick in a word that is as it was typed.
_QUOTED_EXPANSION: Final = re.compile(r"\\[$`]|'[^']*[$`]|\$'")


class Unreadable(Exception):
    """What a shell would refuse, or what we cannot follow."""


class Incomplete(Unreadable):
    """The text ends within something; a shell at a prompt would ask for more."""


class Word(Struct, frozen=True):
    """A word. Where it is not `known`, `text` is as it was typed."""

    text: str
    known: bool = True
    #: A part of it, or all of it, was quoted.
    quoted: bool = False
    #: An expansion may make several words of it, or none.
    splits: bool = False
    #: It begins with `~`, which stands for somebody's home.
    tilde: bool = False

    @property
    def exact(self) -> bool:
        """Whether the program gets just this text."""
        return self.known and not self.tilde

    @property
    def plain(self) -> bool:
        return self.known and not self.quoted


def runs_as_index(word: Word) -> bool:
    """Whether arithmetic that reads this text runs a command in it: what stands in an index is expanded once more,
    and arithmetic is in `[[`, `test -v`, `${x:...}` and every index."""
    if word.known:
        return "[" in word.text and ("$(" in word.text or "`" in word.text)
    return "[" in word.text and _QUOTED_EXPANSION.search(word.text) is not None


#: What stands for words that are known later: what `xargs` reads, what `find` finds, what is not typed yet.
LATER: Final = Word("...", known=False, splits=True)


class WordReader:
    """Reads words from `text`, beginning at `at`."""

    def __init__(self, text: str, *, posix: bool, history: bool, depth: int) -> None:
        self.text = text
        self.at = 0
        #: As dash reads: no `$'...'`, no `<(...)`, no `{a,b}`.
        self.posix = posix
        #: `!` stands for earlier commands, as at a prompt.
        self.history = history
        self.depth = depth
        #: The last word with quoted letters as NUL: says what of it has a meaning for the shell.
        self.mask = ""
        #: Where `((` turned out to begin no arithmetic; else each would be tried again within each.
        self._no_arithmetic: set[int] = set()

    # --- what the grammar gives ------------------------------------------------------------------------------

    def commands_until(self, closer: str) -> None:
        """Commands up to `)` or `}`, which is taken."""
        raise NotImplementedError

    def script(self, text: str) -> None:
        """Commands that stand in a text of their own."""
        raise NotImplementedError

    def unknown(self, reason: str) -> None:
        """Something runs that nobody can know from the text."""
        raise NotImplementedError

    def variable(self, name: str) -> None:
        """This one is set."""
        raise NotImplementedError

    # --- words -----------------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def word(self) -> Word:
        text, begin, end = self.text, self.at, len(self.text)
        out: list[str] = []
        mask: list[str] = []
        known, quoted, splits = True, False, False

        def literal(piece: str) -> None:
            out.append(piece)
            mask.append("\0" * len(piece))

        while self.at < end:
            char = text[self.at]
            piece: str | None
            if char == "\\":
                piece = self._escaped()
                if piece is None:
                    continue
                quoted = True
            elif char == "'":
                piece, quoted = self._single_quoted(), True
            elif char == '"':
                piece, quoted = self._double_quoted(), True
            elif char == "$":
                quoted = quoted or text[self.at + 1 : self.at + 2] in ("'", '"')
                splits = splits or text[self.at + 1 : self.at + 2] not in ("'", '"')
                piece = self._dollar(within_quotes=False)
            elif char == "`":
                self._backticks(within_quotes=False)
                piece, splits = None, True
            elif char in "<>" and not self.posix and text.startswith("(", self.at + 1):
                self.at += 2
                self.commands_until(")")
                piece = None
            elif char in META:
                break
            else:
                self._history_mark()
                run = _PLAIN.match(text, self.at)
                letters = run[0] if run else char
                out.append(letters)
                mask.append(letters)
                self.at += len(letters)
                continue
            if piece is None:
                known = False
                mask.append("\0")
            else:
                literal(piece)
        self.mask = "".join(mask)
        if self._expands(self.mask):
            known = False
            splits = True
        made = "".join(out)
        if "\0" in made:  # C strings end there
            known = False
        tilde = self.mask.startswith("~")
        if known:
            return Word(made, quoted=quoted, tilde=tilde)
        return Word(text[begin : self.at], known=False, quoted=quoted, splits=splits, tilde=tilde)

    def _expands(self, mask: str) -> bool:
        """Whether names of files, or braces, come into it."""
        if "*" in mask or "?" in mask or -1 < mask.find("[") < mask.rfind("]"):
            return True
        opened, closed = mask.find("{"), mask.rfind("}")
        inside = mask[opened:closed] if -1 < opened < closed else ""
        return not self.posix and ("," in inside or ".." in inside)

    def _escaped(self) -> str | None:
        """A backslash and what follows; None: a line that goes on."""
        if self.at + 1 >= len(self.text):
            raise Incomplete("it ends with a backslash")
        char = self.text[self.at + 1]
        self.at += 2
        return None if char == "\n" else char

    def _single_quoted(self) -> str:
        close = self.text.find("'", self.at + 1)
        if close < 0:
            raise Incomplete("a ' has no end")
        piece = self.text[self.at + 1 : close]
        self.at = close + 1
        return piece

    def _double_quoted(self) -> str | None:
        self.at += 1
        out: list[str] = []
        known = True
        while (char := self.peek()) != '"':
            if not char:
                raise Incomplete('a " has no end')
            if char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if following != "\n":
                    out.append(following if following and following in '$`"\\' else char + following)
            elif char == "$":
                piece = self._dollar(within_quotes=True)
                known = known and piece is not None
                out.append(piece or "")
            elif char == "`":
                self._backticks(within_quotes=True)
                known = False
            else:
                self._history_mark(within_quotes=True)
                run = _PLAIN_QUOTED.match(self.text, self.at)
                letters = run[0] if run else char
                out.append(letters)
                self.at += len(letters)
        self.at += 1
        return "".join(out) if known else None

    def _history_mark(self, *, within_quotes: bool = False) -> None:
        """`!x` at a prompt is an earlier command. `! x`, `!=`, `[!a]`, `${!x}` and `$!` are not."""
        if not self.history or self.text[self.at] != "!":
            return
        following = self.text[self.at + 1 : self.at + 2]
        before = self.text[max(0, self.at - 2) : self.at]
        inert = following in ("", " ", "\t", "\n", "=") or before == "${" or before.endswith("$")
        in_brackets = before.endswith("[") and "]" in self.text[self.at :].split("\n", 1)[0]
        if not inert and not in_brackets and not (within_quotes and following == '"'):
            self.unknown("`!` stands for an earlier command")

    # --- expansions; None: not to be known --------------------------------------------------------------------

    def _dollar(self, *, within_quotes: bool) -> str | None:
        self.deeper()
        piece = self._dollar_here(within_quotes)
        self.depth -= 1
        return piece

    def deeper(self) -> None:
        if self.depth >= MAX_DEPTH:
            raise Unreadable(f"more than {MAX_DEPTH} levels of nesting")
        self.depth += 1

    def _dollar_here(self, within_quotes: bool) -> str | None:
        self.at += 1
        while self.text.startswith("\\\n", self.at):
            self.at += 2
        char = self.peek()
        if char == "(":
            if not (self.peek(2) == "((" and self.arithmetic()):
                self.at += 1
                self.commands_until(")")
            return None
        if char == "{":
            self._braced(within_quotes)
            return None
        if char == "[" and not self.posix:
            self.at += 1
            self._expansions_until("]")
            return None
        if char == "'" and not within_quotes and not self.posix:
            return self._ansi_quoted()
        if char == '"' and not within_quotes and not self.posix:
            return self._double_quoted()
        name = _NAME.match(self.text, self.at)
        if name:
            self.at = name.end()
            return None
        return "$"

    def _ansi_quoted(self) -> str:
        match = _ANSI_QUOTED.match(self.text, self.at)
        if match is None:
            raise Incomplete("a $' has no end")
        self.at = match.end()
        return _ANSI.sub(_ansi_character, match[1])

    def _braced(self, within_quotes: bool) -> None:
        begin = self.at
        self.at += 1
        # `${ command; }` and `${| command; }` run it in the shell itself.
        if self.peek() in (" ", "\t", "\n", "|"):
            self.at += self.peek() == "|"
            self.commands_until("}")
            return
        while (char := self.peek()) != "}":
            if not char:
                raise Incomplete("a ${ has no end")
            if char == "'" and not within_quotes:
                self._single_quoted()
            elif char == '"':
                self._double_quoted()
            else:
                self._expansion(within_quotes)
        raw = self.text[begin : self.at]
        if raw.endswith("@P"):
            self.unknown("`${...@P}` runs what stands in a variable")
        if assigned := _ASSIGNING_EXPANSION.match(raw):
            self.variable(assigned[1])
        self.check_index(Word(raw, known=False))
        self.at += 1

    def _expansion(self, within_quotes: bool = True) -> None:
        """One letter, or the expansion that begins here."""
        char = self.peek()
        if char == "\\":
            self.at += 2
        elif char == "$":
            self._dollar(within_quotes=within_quotes)
        elif char == "`":
            self._backticks(within_quotes=within_quotes)
        elif not self.posix and not within_quotes and self.peek(2) in ("<(", ">("):
            self.at += 2
            self.commands_until(")")
        else:
            if char:
                self._history_mark(within_quotes=within_quotes)
            self.at += 1

    def check_index(self, word: Word) -> Word:
        if runs_as_index(word):
            self.unknown(f"`{word.text[:80]}` holds a command that arithmetic would run")
        return word

    def _expansions_until(self, closer: str) -> None:
        while (char := self.peek()) != closer:
            if not char:
                raise Incomplete(f"the {closer} is missing")
            self._expansion()
        self.at += 1

    def here_text(self) -> bool:
        """All of the text as a here-document reads it; whether it has no expansion."""
        while self.at < len(self.text):
            if run := _PLAIN_TEXT.match(self.text, self.at):
                self.at = run.end()
            else:
                self._expansion()
        return not re.search(r"[$`\\]", self.text)

    def arithmetic(self) -> bool:
        """From `((` to `))`, if that is what it is; else nothing is taken: it is a subshell in another."""
        begin = self.at
        if begin in self._no_arithmetic:
            return False
        self.at += 2
        opened = 0
        while char := self.peek():
            if char == ")" and opened == 0:
                if self.peek(2) == "))":
                    self.at += 2
                    return True
                break
            if char in ";'\"\\":
                # A shell tells the two apart by rules of its own, and may run what we took for a sum.
                raise Unreadable("`((` with quotes or `;` inside")
            opened += (char == "(") - (char == ")")
            self._expansion()
        if not self.peek():
            raise Incomplete("a (( has no end")
        self._no_arithmetic.add(begin)
        self.at = begin
        return False

    def _backticks(self, *, within_quotes: bool) -> None:
        self.at += 1
        inner: list[str] = []
        while (char := self.peek()) != "`":
            if not char:
                raise Incomplete("a ` has no end")
            self._history_mark()
            following = self.text[self.at + 1 : self.at + 2]
            if char == "\\" and following and following in ('$`\\"' if within_quotes else "$`\\"):
                inner.append(following)
                self.at += 2
            else:
                inner.append(char)
                self.at += 1
        self.at += 1
        self.script("".join(inner))


def _ansi_character(match: re.Match[str]) -> str:
    octal, hex_byte, short, long, control, letter = match.groups()
    if octal:
        return chr(int(octal, 8) & 0xFF)
    if digits := hex_byte or short or long:
        value = int(digits, 16)
        return chr(value) if value < 0x110000 else "\0"
    if control:
        return chr(ord(control) & 0x1F)
    return _ANSI_LETTERS.get(letter, letter if letter in "\\'\"?" else "\\" + letter)
