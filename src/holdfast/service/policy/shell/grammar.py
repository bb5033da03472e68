"""The shell's grammar, as far as needed to find the simple commands at every level; pure.

A text that every shell rejects is `Unreadable`, and reported as such. A construct that ends too early is
`Incomplete`. `command_line` interprets the words of a command.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.service.policy.shell.arithmetic import is_number
from holdfast.service.policy.shell.redirections import (
    Assignment,
    CommandListener,
    HereDocument,
    Redirection,
    RedirectionReader,
    SimpleCommand,
)
from holdfast.service.policy.shell.words import META, UNKNOWN_WORDS, Incomplete, Unreadable, Word

_COMPOUND: Final = ("if", "while", "until", "for", "select", "case", "function", "[[", "{", "coproc")
_CLOSERS: Final = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_RESERVED: Final = frozenset([*_COMPOUND, *_CLOSERS, "!", "time"])
#: Reserved words that dash does not have.
_BASH_ONLY: Final = frozenset(["select", "function", "[[", "coproc", "time"])
_RESERVED_WORD: Final = re.compile(
    "(" + "|".join(re.escape(word) for word in sorted(_RESERVED, key=len, reverse=True)) + r")(?=[ \t\n;&|()<>]|\Z)"
)
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[[^\]]*\])?\+?=")
_NAMED_COPROC: Final = re.compile(
    r"[A-Za-z_][A-Za-z0-9_]*[ \t]+(?=\(|(?:if|while|until|for|select|case|\{|\[\[)[ \t\n])"
)
_ASSIGNED_INDEX: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\[")
_ELEMENT: Final = re.compile(r"\[([^\]]*)\]\+?=")
_RANGE: Final = re.compile(r"\{-?[0-9]+\.\.-?[0-9]+(?:\.\.-?[0-9]+)?\}")
#: Operators of `[[` that evaluate their operands.
_COMPARISONS: Final = frozenset(["-eq", "-ne", "-lt", "-le", "-gt", "-ge"])
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Builtins that declare variables of a function.
_DECLARING: Final = ("local", "declare", "typeset")
_PARENTHESES: Final = re.compile(r"\([ \t]*\)")
_TIME: Final = re.compile(r"time[ \t]+(-p(?=[ \t])|(?=-))?")
_IN: Final = re.compile(r"in(?=[ \t\n;]|\Z)")
_END: Final = "the end"


class Grammar(RedirectionReader):
    """Reports each simple command, at every level, to a `CommandListener`."""

    def __init__(self, text: str, findings: CommandListener, *, posix: bool, history: bool, depth: int) -> None:
        super().__init__(text, findings, posix=posix, history=history, depth=depth)
        #: End of the complete lines that a shell would have executed.
        self.taken = 0
        self._reserved_words = _RESERVED - _BASH_ONLY if posix else _RESERVED

    def read(self) -> None:
        """Parse the whole text. A shell at a prompt continues after a rejected line, and so does this parser."""
        if self.history and re.search(r"(?m)^\^", self.text):
            self.unknown("a line that begins with `^` changes the command before it")
        depth = self.depth
        while True:
            try:
                self._list((_END,))
                break
            except Incomplete:
                self._flush()
                raise
            except Unreadable as error:
                self.unknown(str(error))
                self._flush()
                self.depth, self._around, self._announced = depth, 0, []
                self.numbers, self.local_names = set(), None
                line_end = self.text.find("\n", self.at)
                if line_end < 0:
                    return
                self.at = line_end + 1
        self._flush()
        if self._announced:
            raise Incomplete(f"the end {self._announced[0].delimiter!r} of a here-document is missing")

    def commands_until(self, closer: str) -> None:
        self.deeper()
        announced, around = self._announced, self._around
        self._announced, self._around = [], around + len(announced)
        with self._scope():
            self._list((closer,))
        self.depth -= 1
        if self._announced:
            raise Unreadable("a here-document that does not end before its `)`")
        self._announced, self._around = announced, around

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        """Restore the variables after commands that may not run, not to their end, or in a subshell."""
        numbers, local_names = set(self.numbers), self.local_names
        self.local_names = None if local_names is None else set(local_names)
        yield
        self.numbers, self.local_names = numbers, local_names

    def _hold(self, names: Iterable[str]) -> None:
        self.numbers.update(filter(self.holds_numbers, names))

    # --- lists -----------------------------------------------------------------------------------------------

    def _list(self, stops: tuple[str, ...]) -> str:
        """Parse commands up to one of these words, which is consumed and returned."""
        while True:
            self._blanks(lines=True)
            if _END in stops:
                taken = self.text.rfind("\n", 0, self.at) + 1
                if taken != self.taken:
                    # An error or a ^C ends the previous line and not this one, so its assignments may not have
                    # happened.
                    self.numbers = set()
                self.taken = taken
            if not self.peek():
                if _END in stops:
                    return _END
                raise Incomplete(f"{' or '.join(stops)} is missing")
            if stop := self._stop(stops):
                return stop
            numbers = set(self.numbers)
            self._and_or()
            self._blanks()
            if self.peek() == "&" and self.peek(2) != "&&":
                self.numbers = numbers
                self._findings.background("&")
                self.at += 1
            elif self.peek() == ";" and self.peek(2) not in (";;", ";&"):
                self.at += 1
            elif not (
                self.peek() in ("", "\n", ")") or self.peek(2) in (";;", ";&") or self._reserved() in _CLOSERS
            ):
                raise Unreadable(f"{self.peek()!r} is not expected after a command")

    def _stop(self, stops: tuple[str, ...]) -> str:
        if ")" in stops and self.peek() == ")":
            self.at += 1
            return ")"
        if ";;" in stops:
            for operator in (";;&", ";;", ";&"):
                if self.peek(len(operator)) == operator:
                    self.at += len(operator)
                    return ";;"
        word = self._reserved()
        if word and word in stops:
            self.at += len(word)
            return word
        return ""

    def _reserved(self) -> str:
        match = _RESERVED_WORD.match(self.text, self.at)
        word = match[1] if match else ""
        return word if word in self._reserved_words else ""

    def _and_or(self) -> None:
        self._pipeline()
        while True:
            self._blanks()
            if self.peek(2) not in ("&&", "||"):
                return
            self.at += 2
            self._continue()
            with self._scope():
                self._pipeline()

    def _continue(self) -> None:
        """Require a command, on the same line or a later one."""
        self._blanks(lines=True)
        if not self.peek():
            raise Incomplete("a command is missing at the end")

    def _pipeline(self) -> None:
        while self._reserved() in ("!", "time"):
            if self._reserved() == "time":
                flag = _TIME.match(self.text, self.at)
                if flag and flag[1] == "":  # options that only the program of that name has
                    break
                self._findings.simple(SimpleCommand((Word("time"),)), self.depth)
                self.at += flag.end() - flag.start() if flag else 4
            else:
                self._history_mark()
                self.at += 1
            self._blanks()
            if self.peek() in ("", "\n", ";", "&", "|", ")"):
                return
        before = set(self.numbers)
        self._command()
        while True:
            self._blanks()
            if self.peek() != "|" or self.peek(2) == "||":
                return
            self.at += 2 if self.peek(2) == "|&" and not self.posix else 1
            self._continue()
            # Each part of a pipeline has its own variables.
            self.numbers = set(before)
            with self._scope():
                self._command()

    # --- commands --------------------------------------------------------------------------------------------

    def _command(self) -> None:
        self.deeper()
        if self.peek() == "(":
            if not self.posix and self.peek(2) == "((" and self.arithmetic():
                self._hold(self.held)
            else:
                self.at += 1
                with self._scope():
                    self._list((")",))
            self._redirections()
        elif (word := self._reserved()) in _CLOSERS:
            raise Unreadable(f"`{word}` is not expected here")
        elif word in _COMPOUND:
            self.at += len(word)
            with self._scope():
                self._compound(word)
            if word not in ("function", "coproc"):
                self._redirections()
        else:
            self._simple()
        self.depth -= 1

    def _compound(self, word: str) -> None:
        if word == "{":
            self._list(("}",))
        elif word == "if":
            self._list(("then",))
            while (stop := self._branch(("elif", "else", "fi"))) != "fi":
                self._branch(("then" if stop == "elif" else "fi",))
                if stop == "else":
                    break
        elif word in ("while", "until"):
            self._list(("do",))
            self._list(("done",))
        elif word in ("for", "select"):
            self._for(word)
        elif word == "case":
            self._case()
        elif word == "[[":
            self._test()
        elif word == "function":
            self._blanks()
            name = self.word()
            self._blanks()
            if match := _PARENTHESES.match(self.text, self.at):
                self.at = match.end()
            self._function_body(name)
        else:
            self._coproc()

    def _branch(self, stops: tuple[str, ...]) -> str:
        with self._scope():
            return self._list(stops)

    def _for(self, word: str) -> None:
        self._blanks()
        if self.peek(2) == "((":
            self.at += 2
            self.sum(self.reduced_until((";", "))")))
            self._hold(self.held)
            while self.peek() == ";":
                self.at += 1
                self.sum(self.reduced_until((";", "))")))
            self.at += 2
        else:
            name = self.word().text
            self._blanks(lines=True)
            number = False
            if _IN.match(self.text, self.at):
                self.at += 2
                number = self._words() and word == "for"
            self.assign(name, number=number)
            if number:
                self._hold([name])
        self._blanks()
        if self.peek() == ";":
            self.at += 1
        self._blanks(lines=True)
        if not self.peek():
            raise Incomplete("do is missing")
        stop = self._stop(("do", "{"))
        if not stop:
            raise Unreadable("a loop without `do`")
        self._list(("done" if stop == "do" else "}",))

    def _words(self) -> bool:
        """Parse the words of a loop; return True if all are numbers."""
        numbers = True
        while True:
            self._blanks()
            inner = self.peek(2) in ("<(", ">(") and not self.posix
            if not inner and (not self.peek() or self.peek() in META):
                return numbers
            self.word()
            numbers = numbers and (is_number(self.reduced) or _RANGE.fullmatch(self.mask) is not None)

    def _case(self) -> None:
        self._blanks()
        self.word()
        self._blanks(lines=True)
        if not self.peek():
            raise Incomplete("in is missing")
        if not _IN.match(self.text, self.at):
            raise Unreadable("`case` without `in`")
        self.at += 2
        while True:
            self._blanks(lines=True)
            if self._stop(("esac",)):
                return
            if self.peek() == "(":
                self.at += 1
            while True:
                self._blanks()
                begin = self.at
                self.word()
                self._blanks()
                if not self.peek():
                    raise Incomplete("esac is missing")
                if self.peek() not in ("|", ")") or self.at == begin:
                    raise Unreadable("a pattern of `case` that cannot be read")
                self.at += 1
                if self.text[self.at - 1] == ")":
                    break
            if self._branch((";;", "esac")) == "esac":
                return

    def _test(self) -> None:
        before, operator = "", ""
        while True:
            self._blanks(lines=True)
            char = self.peek()
            if not char:
                raise Incomplete("]] is missing")
            if char in "()<>&|" and self.peek(2) not in ("<(", ">("):
                self.at += 1
                before = operator = ""
                continue
            if char in META:
                raise Unreadable("`[[` that cannot be read")
            word = self.word()
            if operator in _COMPARISONS:
                self.sum(self.reduced)
            elif operator == "-v" and not (word.known and _IDENTIFIER.fullmatch(word.text)):
                self.unknown("`[[ -v` evaluates the index of the name that it is given")
            if word == Word("]]"):
                return
            operator = word.text if word.known else ""
            if operator in _COMPARISONS:
                self.sum(before)
            before = self.reduced

    def _function_body(self, name: Word) -> None:
        self._findings.function(name)
        self._continue()
        # The function runs later, when variables may hold other values.
        numbers, local_names = self.numbers, self.local_names
        self.numbers, self.local_names = set(), set()
        # dash accepts any command as a body, and so does this parser.
        self._command()
        self._redirections()
        self.numbers, self.local_names = numbers, local_names

    def _coproc(self) -> None:
        self._findings.background("coproc")
        self._blanks()
        named = _NAMED_COPROC.match(self.text, self.at)
        name = "COPROC"
        if named and self._reserved() == "":
            name = named[0].split()[0]
            self.at = named.end()
        self.assign(name)
        self._command()
        self._redirections()

    # --- simple commands -------------------------------------------------------------------------------------

    def _simple(self) -> None:
        words: list[Word] = []
        assignments: list[Assignment] = []
        redirections: list[Redirection] = []
        documents: list[HereDocument] = []
        try:
            if self._parts(words, assignments, redirections, documents):
                return
        except Unreadable:
            if words:
                self._findings.simple(self._made([*words, UNKNOWN_WORDS], assignments, redirections), self.depth)
            raise
        if not words and not assignments and not redirections:
            raise Unreadable(f"a command is missing before {self.peek()!r}")
        command = self._made(words, assignments, redirections)
        self._declared(words)
        if not words:
            self._hold(each.name for each in assignments if each.number)
        if documents:
            self._waiting.append((command, documents))
        else:
            self._findings.simple(command, self.depth)

    def _made(
        self, words: list[Word], assignments: list[Assignment], redirections: list[Redirection]
    ) -> SimpleCommand:
        local_names = None if self.local_names is None else frozenset(self.local_names)
        return SimpleCommand(
            tuple(words), tuple(assignments), tuple(redirections), frozenset(self.numbers), local_names
        )

    def _declared(self, words: list[Word]) -> None:
        """Return the variables that a function declares, and handle `local i=0`."""
        if self.local_names is None or not words or words[0] not in map(Word, _DECLARING):
            return
        options = [word.text for word in words if word.text.startswith(("-", "+"))]
        if any("g" in option for option in options):
            return
        for word in words[1:]:
            name, equals, value = word.text.partition("=")
            self.local_names.add(name)
            if equals and word.known and is_number(value) and not options:
                self._hold([name])

    def _parts(
        self,
        words: list[Word],
        assignments: list[Assignment],
        redirections: list[Redirection],
        documents: list[HereDocument],
    ) -> bool:
        """Parse the parts of a simple command; return True if it was a function definition."""
        while True:
            self._blanks()
            if self._redirection(redirections, documents):
                continue
            char = self.peek()
            if char == "(" and len(words) == 1 and not assignments and not redirections:
                self._function(words.pop())
                return True
            if not char or (char in META and not (self.peek(2) in ("<(", ">(") and not self.posix)):
                return False
            word = self.word()
            if self.mask.startswith("{") and self.mask.endswith("}") and self.peek() in ("<", ">"):
                self.unknown(f"`{word.text[:80]}` before a redirection evaluates an index")
            if words:
                words.append(word)
            elif match := _ASSIGNMENT.match(self.mask):
                assignments.append(self._assignment(match, word))
            elif _ASSIGNED_INDEX.match(self.mask):
                self.unknown("an index that cannot be read")
                words.append(word)
            elif word.plain and word.text in self._reserved_words - {"time"}:
                raise Unreadable(f"`{word.text}` is not expected here")
            else:
                words.append(word)

    def _assignment(self, match: re.Match[str], word: Word) -> Assignment:
        head = match[0].rstrip("+=")
        if head != match[1]:
            self.sum(self.reduced[len(match[1]) + 1 : len(head) - 1])
        if match.end() == len(self.mask) and self.peek() == "(":
            self._array()
            number = False
        else:
            plain = head == match[1] and not match[0].endswith("+=")
            number = plain and is_number(self.reduced[match.end() :])
        return Assignment(match[1], word, number)

    def _array(self) -> None:
        if self.posix:
            raise Unreadable("`(` is not expected here")
        self.at += 1
        while True:
            self._blanks(lines=True)
            if not self.peek():
                raise Incomplete("a list of values has no end")
            if self.peek() == ")":
                self.at += 1
                return
            if self.peek() in META and self.peek(2) not in ("<(", ">("):
                raise Unreadable(f"{self.peek()!r} is not expected in a list of values")
            self.word()
            if element := _ELEMENT.match(self.mask):
                self.sum(self.reduced[1 : element.end(1)])
            elif self.mask.startswith("["):
                self.unknown("an index that cannot be read")

    def _function(self, name: Word) -> None:
        match = _PARENTHESES.match(self.text, self.at)
        if match is None or not name.plain:
            if not self.text[self.at + 1 :].strip(" \t"):
                raise Incomplete(") is missing")
            raise Unreadable("`(` is not expected here")
        self.at = match.end()
        self._function_body(name)
