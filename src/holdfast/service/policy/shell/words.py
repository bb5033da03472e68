"""Parses shell words: removes quoting, and marks parts that only a running shell can know; pure.

Expansions run commands too (`$(...)`, backticks, `<(...)`), at any depth of quoting. Those go to `commands_until`
and `script`, which `grammar` implements.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.service.policy.shell.arithmetic import NUMBER, TEXT, analyse_arithmetic
from holdfast.service.types import ServiceStruct

#: Characters that end an unquoted word.
META: Final = " \t\n;&|()<>"
#: Nesting levels; a `$(...)` counts as three. People write a handful; each uses a few frames of Python's stack,
#: which has 1,000.
MAX_DEPTH: Final = 60

#: `\\x{...}` and `\\c...` differ between versions of bash and are excluded.
_ANSI: Final = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|(.))", re.S
)
_ANSI_QUOTED: Final = re.compile(r"'((?:[^'\\]|\\.)*)'", re.S)
_ANSI_LETTERS: Final = dict(zip("abeEfnrtv", "\a\b\x1b\x1b\f\n\r\t\v", strict=True))
#: Characters without a meaning to a shell, consumed at once: most of the input.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:=,@%+-]+")
_PLAIN_QUOTED: Final = re.compile(r'[^"\\$`!]+')
_PLAIN_TEXT: Final = re.compile(r"[^\\$`]+")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
#: The inside of `${...}`: `#` or `!`, the parameter, its index, and the operator with its operand.
_PARAMETER: Final = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\[\]]*)\])?(.*)", re.S | re.ASCII)
#: Parameters with a value that is a number, or empty.
_NUMBERS: Final = frozenset("#?$!")
_DEFAULTS: Final = (":-", ":=", ":?", ":+", "-", "=", "?", "+")
#: Operators that only change text; not `@P`, which expands the text as a prompt.
_TRANSFORMATIONS: Final = frozenset(["@Q", "@E", "@A", "@K", "@a", "@k", "@U", "@u", "@L"])


class Unreadable(Exception):
    """A text that a shell would reject, or that this parser cannot follow."""


class Incomplete(Unreadable):
    """The text ends within a construct; a shell at a prompt would read more."""


class Word(ServiceStruct, frozen=True):
    """A word. Where it is not `known`, `text` is as typed."""

    text: str
    known: bool = True
    #: A part of it, or all of it, was quoted.
    quoted: bool = False
    #: An expansion may make several words of it, or none.
    splits: bool = False
    #: It begins with `~`, a home directory.
    tilde: bool = False

    @property
    def exact(self) -> bool:
        """True if the program gets exactly this text."""
        return self.known and not self.tilde

    @property
    def plain(self) -> bool:
        return self.known and not self.quoted


#: Stands for words that are known only at run time: input of `xargs`, results of `find`, text not typed yet.
UNKNOWN_WORDS: Final = Word("...", known=False, splits=True)


class WordReader:
    """Parses words from `text`, beginning at `at`."""

    def __init__(self, text: str, *, posix: bool, history: bool, depth: int) -> None:
        self.text = text
        self.at = 0
        #: Parse like dash: no `$'...'`, no `<(...)`, no `{a,b}`.
        self.posix = posix
        #: `!` refers to earlier commands, as at a prompt.
        self.history = history
        self.depth = depth
        #: The last word with quoted characters as NUL: the remaining ones have a meaning for the shell.
        self.mask = ""
        #: The last word, or its last part, with each expansion as `NUMBER` or `TEXT`. Aligned with `mask`.
        self.reduced = ""
        #: Variables that hold numbers here on every path.
        self.numbers: set[str] = set()
        #: Local variables within a function; None outside of one.
        self.local_names: set[str] | None = None
        #: Variables that hold numbers if the last expression was evaluated.
        self.held: tuple[str, ...] = ()
        #: True if the last quoted part may become several words: `"$@"`.
        self._many = False
        #: Positions where `((` begins no arithmetic, so that nested ones are not tried repeatedly.
        self._no_arithmetic: set[int] = set()

    # --- implemented by the grammar ---------------------------------------------------------------------------

    def commands_until(self, closer: str) -> None:
        """Parse commands up to `)` or `}`, which is consumed."""
        raise NotImplementedError

    def script(self, text: str) -> None:
        """Parse commands in a text of their own."""
        raise NotImplementedError

    def unknown(self, reason: str) -> None:
        """Report a command that the text does not determine."""
        raise NotImplementedError

    def variable(self, name: str, *, number: bool) -> None:
        """Report that this variable is set, to a number or to any text."""
        raise NotImplementedError

    def assign(self, name: str, *, number: bool = False) -> None:
        """Report a variable that is set here."""
        self.variable(name, number=number)
        if not number and not self.posix and self.local_names is not None and name not in self.local_names:
            # Between `x=5` and `((x))` any command may be a function, which must not assign text to `x`.
            self.unknown(f"a function gives {name}, which is not its own, a text")

    # --- words -----------------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def word(self) -> Word:
        text, begin, end = self.text, self.at, len(self.text)
        out: list[str] = []
        mask: list[str] = []
        reduced: list[str] = []
        known, quoted, splits = True, False, False

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
                splits = splits or self._many
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
                piece, self.reduced = None, TEXT
            elif char in META:
                break
            else:
                self._history_mark()
                run = _PLAIN.match(text, self.at)
                letters = run[0] if run else char
                out.append(letters)
                mask.append(letters)
                reduced.append(letters)
                self.at += len(letters)
                continue
            if piece is None:
                known = False
                mask.append("\0")
                reduced.append(self.reduced)
            else:
                out.append(piece)
                mask.append("\0" * len(piece))
                reduced.append(piece)
        self.mask = "".join(mask)
        self.reduced = "".join(reduced)
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
        """True if the word contains file name patterns or braces."""
        if "*" in mask or "?" in mask or -1 < mask.find("[") < mask.rfind("]"):
            return True
        opened, closed = mask.find("{"), mask.rfind("}")
        inside = mask[opened:closed] if -1 < opened < closed else ""
        return not self.posix and ("," in inside or ".." in inside)

    def _escaped(self) -> str | None:
        """Return the character after a backslash; None for a continued line."""
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
        known, many = True, False
        self._many = False
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
                many = many or self._many
                known = known and piece is not None
                out.append(self.reduced if piece is None else piece)
            elif char == "`":
                self._backticks(within_quotes=True)
                known = False
                out.append(TEXT)
            else:
                self._history_mark(within_quotes=True)
                run = _PLAIN_QUOTED.match(self.text, self.at)
                letters = run[0] if run else char
                out.append(letters)
                self.at += len(letters)
        self.at += 1
        self._many = many
        made = "".join(out)
        self.reduced = NUMBER if made == NUMBER else TEXT
        return made if known else None

    def _history_mark(self, *, within_quotes: bool = False) -> None:
        """True if `!x` refers to an earlier command; not `! x`, `!=`, `[!a]`, `${!x}` and `$!`."""
        if not self.history or self.text[self.at] != "!":
            return
        following = self.text[self.at + 1 : self.at + 2]
        before = self.text[max(0, self.at - 2) : self.at]
        inert = following in ("", " ", "\t", "\n", "=") or before == "${" or before.endswith("$")
        in_brackets = before.endswith("[") and "]" in self.text[self.at :].split("\n", 1)[0]
        if not inert and not in_brackets and not (within_quotes and following == '"'):
            self.unknown("`!` stands for an earlier command")

    # --- expansions; None: unknown -----------------------------------------------------------------------------

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
        self._many = False
        while self.text.startswith("\\\n", self.at):
            self.at += 2
        char = self.peek()
        if char == "(":
            if self.peek(2) == "((" and self.arithmetic():
                self.reduced = NUMBER
                return None
            self.at += 1
            self.commands_until(")")
            self.reduced, self._many = TEXT, False
            return None
        if char == "{":
            self.reduced, self._many = self._braced(within_quotes)
            return None
        if char == "[" and not self.posix:
            self.at += 1
            self.sum(self.reduced_until(("]",)))
            self.at += 1
            self.reduced = NUMBER
            return None
        if char == "'" and not within_quotes and not self.posix:
            return self._ansi_quoted()
        if char == '"' and not within_quotes and not self.posix:
            return self._double_quoted()
        name = _NAME.match(self.text, self.at)
        if name:
            self.at = name.end()
            self.reduced = NUMBER if name[0] in _NUMBERS or name[0] in self.numbers else TEXT
            self._many = name[0] == "@"
            return None
        return "$"

    def _ansi_quoted(self) -> str | None:
        match = _ANSI_QUOTED.match(self.text, self.at)
        if match is None:
            raise Incomplete("a $' has no end")
        self.at = match.end()
        self.reduced = TEXT
        made = _ANSI.sub(_ansi_character, match[1])
        return None if TEXT in made else made

    def _braced(self, within_quotes: bool) -> tuple[str, bool]:
        """Parse an expansion; return `NUMBER` or `TEXT`, and whether it may be several words in quotes."""
        self.at += 1
        # `${ command; }` and `${| command; }` run it in the shell itself.
        if self.peek() in (" ", "\t", "\n", "|"):
            self.at += self.peek() == "|"
            self.commands_until("}")
            return TEXT, False
        out: list[str] = []
        while (char := self.peek()) != "}":
            if not char:
                raise Incomplete("a ${ has no end")
            if char == "'" and not within_quotes:
                self._single_quoted()
                out.append(TEXT)
            elif char == '"':
                self._double_quoted()
                out.append(self.reduced)
            else:
                out.append(self._expansion(within_quotes))
        self.at += 1
        inside = "".join(out)
        return self._parameter(inside), "@" in inside

    def _parameter(self, inside: str) -> str:
        if inside in _NUMBERS:
            return NUMBER
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            self.unknown("`${...}` that cannot be read")
            return TEXT
        mark, name, index, rest = match.groups()
        if index is not None and index not in ("@", "*"):
            self.sum(index)
        if mark == "!" and not ((index in ("@", "*") and not rest) or (index is None and rest in ("@", "*"))):
            self.unknown(f"`${{!{name}}}` reads what stands in a variable as a name, and runs what is in its index")
        elif rest.startswith(_DEFAULTS):
            if rest.removeprefix(":").startswith("="):
                self.assign(name)
        elif rest.startswith(":"):
            self.sum(rest[1:])
        elif rest.startswith("@") and rest not in _TRANSFORMATIONS and not mark:
            self.unknown("`${...@P}` runs what stands in a variable")
        elif rest and rest[0] not in "#%/^,~@" and not mark:
            self.unknown("`${...}` that cannot be read")
        if mark == "#" and not rest:
            return NUMBER
        return NUMBER if name in self.numbers and not mark and index is None and not rest else TEXT

    def _expansion(self, within_quotes: bool = True) -> str:
        """Parse one character, or the expansion that begins here; return it as in `reduced`."""
        char = self.peek()
        if char == "\\":
            continued = self.peek(2) == "\\\n"
            self.at += 2
            return "" if continued else TEXT
        if char == "$":
            piece = self._dollar(within_quotes=within_quotes)
            return self.reduced if piece is None else piece
        if char == "`":
            self._backticks(within_quotes=within_quotes)
            return TEXT
        if not self.posix and not within_quotes and self.peek(2) in ("<(", ">("):
            self.at += 2
            self.commands_until(")")
            return TEXT
        if char:
            self._history_mark(within_quotes=within_quotes)
        self.at += 1
        return char

    def sum(self, reduced: str) -> None:
        """Analyse an expression that may be evaluated here. `held` are the variables that hold numbers if it is."""
        found = analyse_arithmetic(reduced, self.numbers)
        for name in found.assigned:
            self.assign(name, number=True)
        # dash takes only numbers from variables.
        if not found.harmless and not self.posix:
            self.unknown(f"arithmetic evaluates the text of variables: `{_shown(reduced)}`")
        self.held = found.numbers

    def holds_numbers(self, name: str) -> bool:
        """True if all assignments of this variable are numbers."""
        raise NotImplementedError

    def reduced_until(self, closers: tuple[str, ...]) -> str:
        """Parse an expression up to one of these characters, which is not consumed."""
        out: list[str] = []
        while not self.text.startswith(closers, self.at):
            if not self.peek():
                raise Incomplete(f"the {closers[0]} is missing")
            out.append(self._expansion())
        return "".join(out)

    def here_text(self) -> bool:
        """Parse the whole text as a here-document; return True if it has no expansion."""
        while self.at < len(self.text):
            if run := _PLAIN_TEXT.match(self.text, self.at):
                self.at = run.end()
            else:
                self._expansion()
        return not re.search(r"[$`\\]", self.text)

    def arithmetic(self) -> bool:
        """Parse from `((` to `))` if it is arithmetic; otherwise consume nothing: it is a nested subshell."""
        begin = self.at
        if begin in self._no_arithmetic:
            return False
        self.at += 2
        opened = 0
        out: list[str] = []
        while char := self.peek():
            if char == ")" and opened == 0:
                if self.peek(2) == "))":
                    self.at += 2
                    self.sum("".join(out))
                    return True
                break
            if char in ";'\"\\":
                # A shell distinguishes the two by rules of its own, and may run what was parsed as arithmetic.
                raise Unreadable("`((` with quotes or `;` inside")
            opened += (char == "(") - (char == ")")
            out.append(self._expansion())
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
        self.reduced, self._many = TEXT, False


def _shown(reduced: str) -> str:
    return reduced.replace(NUMBER, "$").replace(TEXT, "$...")[:80]


def _ansi_character(match: re.Match[str]) -> str:
    """Return the character, or `TEXT` where it depends on the version of bash or on the locale."""
    octal, hex_byte, short, long, letter = match.groups()
    if octal or hex_byte or short or long:
        value = int(octal, 8) & 0xFF if octal else int(hex_byte or short or long, 16)
        return chr(value) if value < 0x7F and chr(value) not in (NUMBER, TEXT) else TEXT
    if letter in "xuUc":
        return TEXT
    return _ANSI_LETTERS.get(letter, letter if letter in "\\'\"?" else "\\" + letter)
