"""Redirections, here-documents and the ends of lines; pure.

They are parsed together: a here-document's text begins after its line. A command with a here-document is reported
once that text is parsed, since a shell may read commands from it.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

import msgspec

from holdfast.service.policy.shell.words import META, Incomplete, Unreadable, Word, WordReader
from holdfast.service.types import ServiceStruct

#: Nesting levels that a script within a script counts for: it uses more of the stack than a substitution.
SCRIPT_LEVELS: Final = 6
_REDIRECTION: Final = re.compile(
    r"(?P<target>[0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\})?(?P<op><<<|<<-|<<|<>|<&|>&|>>|>\||&>>|&>|<|>)"
)


class Redirection(ServiceStruct, frozen=True):
    """`TARGET OP WORD`; the target is a descriptor's number, `{NAME}`, or empty."""

    op: str
    word: Word
    target: str = ""


class Assignment(ServiceStruct, frozen=True):
    """`NAME=VALUE` before a command or alone."""

    name: str
    value: Word
    #: The value is a number, whatever the variables hold.
    number: bool = False


class SimpleCommand(ServiceStruct, frozen=True):
    """A command as typed. Without words, it only assigns or redirects."""

    words: tuple[Word, ...]
    assignments: tuple[Assignment, ...] = ()
    redirections: tuple[Redirection, ...] = ()
    #: In its context: variables that hold numbers, and the local ones of its function.
    numbers: frozenset[str] = frozenset()
    local_names: frozenset[str] | None = None


class HereDocument:
    """A here-document announced by `<<`; its text begins after the line."""

    def __init__(self, delimiter: str, *, strip: bool, literal: bool) -> None:
        self.delimiter = delimiter
        self.strip = strip
        self.literal = literal
        self.redirection: Redirection | None = None
        self.text = ""
        self.known = False


class CommandListener(Protocol):
    """Receives the results of the grammar."""

    def simple(self, command: SimpleCommand, depth: int) -> None: ...

    def unknown(self, reason: str) -> None: ...

    def background(self, what: str) -> None: ...

    def variable(self, name: str, *, number: bool) -> None: ...

    def holds_numbers(self, name: str) -> bool: ...

    def function(self, name: Word) -> None: ...

    def script(self, text: str, depth: int) -> None: ...


class RedirectionReader(WordReader):
    """Parses the text between and after the words of commands."""

    def __init__(self, text: str, findings: CommandListener, *, posix: bool, history: bool, depth: int) -> None:
        super().__init__(text, posix=posix, history=history, depth=depth)
        self._findings = findings
        self._announced: list[HereDocument] = []
        #: Here-documents of the enclosing text: their lines must not begin inside this one.
        self._around = 0
        #: Commands whose here-documents have not been read yet.
        self._waiting: list[tuple[SimpleCommand, list[HereDocument]]] = []

    def script(self, text: str) -> None:
        self._findings.script(text, self.depth + SCRIPT_LEVELS)

    def unknown(self, reason: str) -> None:
        self._findings.unknown(reason)

    def variable(self, name: str, *, number: bool) -> None:
        self._findings.variable(name, number=number)

    def holds_numbers(self, name: str) -> bool:
        return self._findings.holds_numbers(name)

    def _blanks(self, *, lines: bool = False) -> None:
        """Skip blanks and comments, and with `lines` also line ends."""
        while char := self.peek():
            if char in " \t":
                self.at += 1
            elif self.peek(2) == "\\\n":
                self.at += 2
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == "\n" and lines:
                self._line_end()
            else:
                return

    def _line_end(self) -> None:
        self.at += 1
        if self._around:
            raise Unreadable("a line ends between a here-document's announcement and its text")
        announced, self._announced = self._announced, []
        for document in announced:
            self._here_text(document)
        waiting, self._waiting = self._waiting, []
        for command, documents in waiting:
            self._finish(command, documents)

    def _finish(self, command: SimpleCommand, documents: list[HereDocument]) -> None:
        """Report the command with the texts of its here-documents as its input."""
        texts = {id(each.redirection): Word(each.text, known=each.known) for each in documents}
        redirections = tuple(
            Redirection("<<", texts[id(each)], each.target) if id(each) in texts else each
            for each in command.redirections
        )
        self._findings.simple(msgspec.structs.replace(command, redirections=redirections), self.depth)

    def _flush(self) -> None:
        """Report commands without the here-documents that are missing."""
        waiting, self._waiting = self._waiting, []
        for command, _ in waiting:
            self._findings.simple(command, self.depth)

    def _redirections(self) -> None:
        found: list[Redirection] = []
        documents: list[HereDocument] = []
        self._blanks()
        while self._redirection(found, documents):
            self._blanks()

    def _redirection(self, found: list[Redirection], documents: list[HereDocument]) -> bool:
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        op = match["op"]
        if self.posix and op.startswith("&"):
            return False
        if op in "<>" and self.text.startswith("(", match.end()) and not match["target"] and not self.posix:
            return False
        self.at = match.end()
        target = match["target"] or ""
        if target.startswith("{"):
            self.assign(target[1:-1])
        self._blanks()
        if op in ("<<", "<<-"):
            document = self._announcement(strip=op == "<<-")
            document.redirection = Redirection("<<", Word(document.delimiter, known=False), target)
            found.append(document.redirection)
            documents.append(document)
            self._announced.append(document)
            return True
        begin = self.at
        word = self.word()
        if self.at == begin:
            raise (Unreadable if self.peek() else Incomplete)(f"{op} without what it leads to")
        found.append(Redirection(op, word, target))
        return True

    def _announcement(self, *, strip: bool) -> HereDocument:
        begin = self.at
        out: list[str] = []
        quoted = False
        while (char := self.peek()) and char not in META:
            if char == "\\":
                out.append(self._escaped() or "")
                quoted = True
            elif char in "'\"":
                close = self.text.find(char, self.at + 1)
                if close < 0:
                    raise Incomplete(f"a {char} has no end")
                out.append(self.text[self.at + 1 : close])
                self.at = close + 1
                quoted = True
            else:
                self._history_mark()
                out.append(char)
                self.at += 1
        delimiter = "".join(out)
        if self.at == begin or re.search(r"[$`\\\n]", delimiter):
            raise Unreadable("the end of a here-document that cannot be read")
        return HereDocument(delimiter, strip=strip, literal=quoted)

    def _here_text(self, document: HereDocument) -> None:
        lines: list[str] = []
        while True:
            if self.at >= len(self.text):
                # A shell may accept an unfinished one at the end of its input, or at a ^D.
                if not document.literal:
                    self._read_here_text("".join(lines))
                raise Incomplete(f"the end {document.delimiter!r} of a here-document is missing")
            line = self._text_line()
            while not document.literal and (len(line) - len(line.rstrip("\\"))) % 2 and self.at < len(self.text):
                line = line[:-1] + self._text_line()
            if document.strip:
                line = line.lstrip("\t")
            if line == document.delimiter:
                break
            lines.append(line + "\n")
        document.text = "".join(lines)
        document.known = True
        if not document.literal:
            document.known = self._read_here_text(document.text)

    def _text_line(self) -> str:
        end = self.text.find("\n", self.at)
        line = self.text[self.at :] if end < 0 else self.text[self.at : end]
        self.at = len(self.text) if end < 0 else end + 1
        return line

    def _read_here_text(self, text: str) -> bool:
        inner = type(self)(text, self._findings, posix=self.posix, history=False, depth=self.depth + 1)
        try:
            return inner.here_text()
        except Incomplete as error:
            raise Unreadable(str(error)) from None
