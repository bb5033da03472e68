"""The shell's grammar as far as it says which simple commands there are, at every level; pure.

Every shell refuses what is wrong by this grammar; we call it `Unreadable`, and say so. A construct that ends too
early is `Incomplete`. What a command does with its words is the business of `command_line`.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.service.policy.shell_redirections import (
    Assignment,
    Findings,
    HereDocument,
    Redirection,
    RedirectionReader,
    SimpleCommand,
)
from holdfast.service.policy.shell_words import LATER, META, Incomplete, Unreadable, Word

_COMPOUND: Final = ("if", "while", "until", "for", "select", "case", "function", "[[", "{", "coproc")
_CLOSERS: Final = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_RESERVED: Final = frozenset([*_COMPOUND, *_CLOSERS, "!", "time"])
#: Words that dash does not have.
_BASH_ONLY: Final = frozenset(["select", "function", "[[", "coproc", "time"])
_RESERVED_WORD: Final = re.compile(
    "(" + "|".join(re.escape(word) for word in sorted(_RESERVED, key=len, reverse=True)) + r")(?=[ \t\n;&|()<>]|\Z)"
)
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[[^\]]*\])?\+?=")
_NAMED_COPROC: Final = re.compile(
    r"[A-Za-z_][A-Za-z0-9_]*[ \t]+(?=\(|(?:if|while|until|for|select|case|\{|\[\[)[ \t\n])"
)
_PARENTHESES: Final = re.compile(r"\([ \t]*\)")
_TIME: Final = re.compile(r"time[ \t]+(-p(?=[ \t])|(?=-))?")
_IN: Final = re.compile(r"in(?=[ \t\n;]|\Z)")
_END: Final = "the end"


class Grammar(RedirectionReader):
    """Tells `Findings` each simple command, at every level."""

    def __init__(self, text: str, findings: Findings, *, posix: bool, history: bool, depth: int) -> None:
        super().__init__(text, findings, posix=posix, history=history, depth=depth)
        #: Up to here there are whole lines that a shell has taken.
        self.taken = 0
        self._words_of_ours = _RESERVED - _BASH_ONLY if posix else _RESERVED

    def read(self) -> None:
        """All of it. A shell at a prompt goes on at the next line after one that it refused: so do we."""
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
        self._list((closer,))
        self.depth -= 1
        if self._announced:
            raise Unreadable("a here-document that does not end before its `)`")
        self._announced, self._around = announced, around

    # --- lists -----------------------------------------------------------------------------------------------

    def _list(self, stops: tuple[str, ...]) -> str:
        """Commands up to one of these, which is taken and returned."""
        while True:
            self._blanks(lines=True)
            if _END in stops:
                self.taken = self.text.rfind("\n", 0, self.at) + 1
            if not self.peek():
                if _END in stops:
                    return _END
                raise Incomplete(f"{' or '.join(stops)} is missing")
            if stop := self._stop(stops):
                return stop
            self._and_or()
            self._blanks()
            if self.peek() == "&" and self.peek(2) != "&&":
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
        return word if word in self._words_of_ours else ""

    def _and_or(self) -> None:
        self._pipeline()
        while True:
            self._blanks()
            if self.peek(2) not in ("&&", "||"):
                return
            self.at += 2
            self._continue()
            self._pipeline()

    def _continue(self) -> None:
        """A command must follow, on the same line or a later one."""
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
        while True:
            self._command()
            self._blanks()
            if self.peek() != "|" or self.peek(2) == "||":
                return
            self.at += 2 if self.peek(2) == "|&" and not self.posix else 1
            self._continue()

    # --- commands --------------------------------------------------------------------------------------------

    def _command(self) -> None:
        self.deeper()
        if self.peek() == "(":
            if self.posix or self.peek(2) != "((" or not self.arithmetic():
                self.at += 1
                self._list((")",))
            self._redirections()
        elif (word := self._reserved()) in _CLOSERS:
            raise Unreadable(f"`{word}` is not expected here")
        elif word in _COMPOUND:
            self.at += len(word)
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
            while (stop := self._list(("elif", "else", "fi"))) != "fi":
                self._list(("then" if stop == "elif" else "fi",))
                if stop == "else":
                    break
        elif word in ("while", "until"):
            self._list(("do",))
            self._list(("done",))
        elif word in ("for", "select"):
            self._for()
        elif word == "case":
            self._case()
        elif word == "[[":
            self._test()
        elif word == "function":
            self._blanks()
            self.word()
            self._blanks()
            if match := _PARENTHESES.match(self.text, self.at):
                self.at = match.end()
            self._function_body()
        else:
            self._coproc()

    def _for(self) -> None:
        self._blanks()
        if self.peek(2) == "((":
            self.at += 2
            while self.peek(2) != "))":
                if not self.peek():
                    raise Incomplete("a for (( has no end")
                self._expansion()
            self.at += 2
        else:
            self._findings.variable(self.word().text)
            self._blanks(lines=True)
            if _IN.match(self.text, self.at):
                self.at += 2
                self._words()
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

    def _words(self) -> None:
        while True:
            self._blanks()
            if not self.peek() or self.peek() in META:
                if self.peek(2) in ("<(", ">(") and not self.posix:
                    self.word()
                    continue
                return
            self.check_index(self.word())

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
            if self._list((";;", "esac")) == "esac":
                return

    def _test(self) -> None:
        while True:
            self._blanks(lines=True)
            char = self.peek()
            if not char:
                raise Incomplete("]] is missing")
            if char in "()<>&|" and self.peek(2) not in ("<(", ">("):
                self.at += 1
            elif char in META:
                raise Unreadable("`[[` that cannot be read")
            elif self.check_index(self.word()) == Word("]]"):
                return

    def _function_body(self) -> None:
        self._continue()
        # dash takes any command for a body, so we do.
        self._command()
        self._redirections()

    def _coproc(self) -> None:
        self._findings.background("coproc")
        self._blanks()
        named = _NAMED_COPROC.match(self.text, self.at)
        if named and self._reserved() == "":
            self.at = named.end()
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
                self._findings.simple(
                    SimpleCommand((*words, LATER), tuple(assignments), tuple(redirections)), self.depth
                )
            raise
        if not words and not assignments and not redirections:
            raise Unreadable(f"a command is missing before {self.peek()!r}")
        command = SimpleCommand(tuple(words), tuple(assignments), tuple(redirections))
        if documents:
            self._waiting.append((command, documents))
        else:
            self._findings.simple(command, self.depth)

    def _parts(
        self,
        words: list[Word],
        assignments: list[Assignment],
        redirections: list[Redirection],
        documents: list[HereDocument],
    ) -> bool:
        """What a simple command is made of; whether it was a function's definition after all."""
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
            if words:
                words.append(word)
            elif match := _ASSIGNMENT.match(self.mask):
                value = self._array() if match.end() == len(self.mask) and self.peek() == "(" else word
                assignments.append(Assignment(match[1], value))
            elif word.plain and word.text in self._words_of_ours - {"time"}:
                raise Unreadable(f"`{word.text}` is not expected here")
            else:
                words.append(word)

    def _array(self) -> Word:
        if self.posix:
            raise Unreadable("`(` is not expected here")
        begin = self.at
        self.at += 1
        while True:
            self._blanks(lines=True)
            if not self.peek():
                raise Incomplete("a list of values has no end")
            if self.peek() == ")":
                self.at += 1
                return Word(self.text[begin : self.at], known=False)
            if self.peek() in META and self.peek(2) not in ("<(", ">("):
                raise Unreadable(f"{self.peek()!r} is not expected in a list of values")
            self.check_index(self.word())

    def _function(self, name: Word) -> None:
        match = _PARENTHESES.match(self.text, self.at)
        if match is None or not name.plain:
            if not self.text[self.at + 1 :].strip(" \t"):
                raise Incomplete(") is missing")
            raise Unreadable("`(` is not expected here")
        self.at = match.end()
        self._function_body()
