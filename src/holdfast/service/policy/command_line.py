"""Parses the text of a command line into the programs that it runs, at every level, through wrappers; pure.

Parts that only the running shell can know (`$X foo`, `eval "$y"`), or that cannot be parsed, are reported as
unknown, so that rules can fail closed. Programs in other languages (`python -c`, `awk`) are not parsed: the
operating system confines them.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Callable, Iterable
from typing import Final

from holdfast.service.policy.runners import is_loader, runs_by_option
from holdfast.service.policy.shell.arithmetic import analyse_arithmetic, is_number
from holdfast.service.policy.shell.grammar import Grammar
from holdfast.service.policy.shell.names import (
    ASSIGNING,
    ATTRIBUTES,
    BUILTINS,
    COUNTING,
    DECLARING,
    MOVING,
    ONE_SIDED,
    RUNNING_OPTIONS,
    SET_BY_SHELL,
    STEERING,
    TWO_SIDED,
)
from holdfast.service.policy.shell.redirections import SCRIPT_LEVELS, Assignment, Redirection, SimpleCommand
from holdfast.service.policy.shell.words import MAX_DEPTH, UNKNOWN_WORDS, Incomplete, Word
from holdfast.service.policy.wrappers import (
    BACKGROUND,
    OPAQUE,
    STARTS_SHELL,
    STTY_PRINTS,
    WRAPPERS,
    UnknownCommand,
    split,
)
from holdfast.service.types import ServiceStruct

#: A longer text is unknown as a whole: four times the longest argument of Linux would only cost time.
MAX_TEXT: Final = 128 * 1024
#: Commands in one line; further ones are unknown.
MAX_COMMANDS: Final = 2_000
#: `env env env ...`: each level uses some of Python's stack.
_MAX_WRAPPERS: Final = 30
#: Reasons that are recorded: one is enough to refuse.
_MAX_REASONS: Final = 20

#: Dialects of each shell: False as bash, True as dash. `sh` may be either, so both are tried.
_DIALECTS: Final[dict[str, tuple[bool, ...]]] = {
    "bash": (False,),
    "rbash": (False,),
    "ksh": (False,),
    "mksh": (False,),
    "sh": (False, True),
    "dash": (True,),
    "ash": (True,),
}
#: Programs that need no rule, since they only run others. `busybox` is all programs in one.
NEED_NO_RULE: Final = tuple(
    name
    for name in (*_DIALECTS, *(name for name, wrapper in WRAPPERS.items() if wrapper.transparent))
    if name not in ("busybox", "toybox", "builtin", "command", "exec")
)
_OTHER_SHELLS: Final = frozenset(["zsh", "fish", "csh", "tcsh", "xonsh", "nu", "pwsh", "elvish", "yash", "ksh93"])
_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
#: Parts of a path to the shell's own input, not to a file.
_STREAMS: Final = frozenset(["dev", "proc", "fd", "stdin"])
_SHELL_LONG_FLAGS: Final = ("login", "noediting", "noprofile", "norc", "posix", "restricted", "verbose")
_FIND_COMMANDS: Final = ("-exec", "-execdir", "-ok", "-okdir")


def decides_program(name: str) -> bool:
    """True if the variable decides which program runs."""
    return bool(STEERING.fullmatch(name))


class ParsedCommand(ServiceStruct, frozen=True):
    """A program with its arguments. `via`: the programs that run it, outermost first."""

    program: str
    arguments: tuple[Word, ...] = ()
    via: tuple[str, ...] = ()
    #: The command only runs another one, which is listed as well.
    transparent: bool = False

    @property
    def name(self) -> str:
        """Name without the directory."""
        return posixpath.basename(self.program)

    @property
    def text(self) -> str:
        """Text that patterns are matched with."""
        return " ".join([self.name, *(word.text for word in self.arguments)])


class CommandLine(ServiceStruct, frozen=True):
    """Result of parsing a text."""

    commands: tuple[ParsedCommand, ...] = ()
    #: Reasons why parts of it are unknown.
    unknown: tuple[str, ...] = ()
    #: Reason why the text is incomplete; a shell at a prompt would read more.
    incomplete: str = ""
    #: Operators and programs that start a background process: `&`, `nohup`, ...
    background: tuple[str, ...] = ()
    #: Characters of the text before the incomplete line.
    taken: int = 0
    #: The line may change the working directory.
    moves: bool = False

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of the programs, each once, in the order of the text."""
        return tuple(dict.fromkeys(command.name for command in self.commands))


def read_command_line(text: str, *, shell: str = "bash", interactive: bool = False) -> CommandLine:
    """Parse all simple commands of a text as this shell would; `interactive` treats `!` as a prompt does."""
    name = posixpath.basename(shell.split()[0]) if shell.split() else "bash"
    if name not in _DIALECTS:
        return CommandLine(unknown=(f"the language of {name} is not supported",))
    if len(text) > MAX_TEXT:
        return CommandLine(unknown=(f"it is longer than {MAX_TEXT:,} letters",))
    line, texts = _read(text, name, interactive, frozenset())
    if texts:
        # Repeated with the variables that were found to be assigned text anywhere.
        line, _ = _read(text, name, interactive, texts)
    return line


def _read(text: str, shell: str, interactive: bool, texts: frozenset[str]) -> tuple[CommandLine, frozenset[str]]:
    """Parse a text; also return variables used as numbers that are assigned text, beside `texts`."""
    reading = _Reading(texts)
    if control := re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text):
        reading.unknown(f"it holds the control character {control[0]!r}")
    incomplete, taken = "", len(text)
    for posix in _DIALECTS[shell]:
        grammar = reading.grammar(text, posix=posix, history=interactive, depth=0, via=())
        try:
            grammar.read()
        except Incomplete as error:
            incomplete = str(error)
            taken = min(taken, grammar.taken)
    commands = tuple(dict.fromkeys(reading.commands))
    reasons, backgrounds = tuple(reading.reasons), tuple(reading.backgrounds)
    line = CommandLine(commands, reasons, incomplete, backgrounds, taken, reading.moves)
    return line, frozenset(reading.texts & reading.numbers) - texts


class _Reading:
    """State while one text is parsed."""

    def __init__(self, texts: frozenset[str]) -> None:
        self.commands: list[ParsedCommand] = []
        #: Variables known to be assigned text, found to be, and assumed to be numbers.
        self.known_texts = texts
        self.texts: set[str] = set()
        self.numbers: set[str] = set()
        self.moves = False
        # Ordered sets: two dialects find most things twice.
        self.reasons: dict[str, None] = {}
        self.backgrounds: dict[str, None] = {}
        self._scripts: set[tuple[str, bool, frozenset[str] | None]] = set()

    def unknown(self, reason: str) -> None:
        if len(self.reasons) < _MAX_REASONS:
            self.reasons[reason] = None

    def grammar(self, text: str, *, posix: bool, history: bool, depth: int, via: tuple[str, ...]) -> Grammar:
        return Grammar(text, _CommandVisitor(self, posix, via), posix=posix, history=history, depth=depth)

    def script(
        self, text: str, depth: int, *, posix: bool, via: tuple[str, ...], local_names: frozenset[str] | None = None
    ) -> None:
        """`local_names`: those of the function that runs the script in its own shell."""
        if (text, posix, local_names) in self._scripts:
            return
        self._scripts.add((text, posix, local_names))
        if depth >= MAX_DEPTH or len(self._scripts) > MAX_COMMANDS:
            self.unknown("scripts within scripts, too many of them")
            return
        try:
            grammar = self.grammar(text, posix=posix, history=False, depth=depth, via=via)
            grammar.local_names = None if local_names is None else set(local_names)
            grammar.read()
        except Incomplete as error:
            self.unknown(f"a script within it is not complete: {error}")


class _CommandVisitor:
    """Visits simple commands, and the commands that those run."""

    def __init__(self, reading: _Reading, posix: bool, via: tuple[str, ...]) -> None:
        self._reading = reading
        self._posix = posix
        self._via = via
        self._depth = 0
        self._command = SimpleCommand(())
        self._special: dict[str, Callable[[tuple[Word, ...], tuple[Redirection, ...], tuple[str, ...]], None]] = {
            "eval": self._eval,
            "trap": self._trap,
            "find": self._find,
            "alias": self._alias,
            ".": self._source,
            "source": self._source,
            "let": self._let,
            "wait": self._wait,
        }

    def simple(self, command: SimpleCommand, depth: int) -> None:
        self._depth = depth
        self._command = command
        self._assigned(command.assignments)
        if command.words:
            self._run(command.words, command.redirections, self._via)

    def unknown(self, reason: str) -> None:
        self._reading.unknown(reason)

    def background(self, what: str) -> None:
        self._reading.backgrounds[what] = None

    def script(self, text: str, depth: int) -> None:
        self._reading.script(text, depth, posix=self._posix, via=self._via)

    def variable(self, name: str, *, number: bool) -> None:
        if decides_program(name) or (name in COUNTING and not number):
            self.unknown(f"it sets {name}, which decides what runs")
        if not number:
            self._reading.texts.add(name)

    def holds_numbers(self, name: str) -> bool:
        self._reading.numbers.add(name)
        return name not in self._reading.known_texts and name not in SET_BY_SHELL and not decides_program(name)

    def function(self, name: Word) -> None:
        if not name.known or name.text in BUILTINS or name.text in WRAPPERS or name.text in _DIALECTS:
            self.unknown(f"a function changes what `{name.text[:80]}` is")

    def _assigned(self, assignments: Iterable[Assignment]) -> None:
        for each in assignments:
            self.variable(each.name, number=each.number)
            if not self._command.words:
                self._own(each.name, number=each.number)

    def _own(self, name: str, *, number: bool) -> None:
        """Report the variable like `WordReader.assign`."""
        local_names = self._command.local_names
        if not number and not self._posix and local_names is not None and name not in local_names:
            self.unknown(f"a function gives {name}, which is not its own, a text")

    def _run(self, words: tuple[Word, ...], redirections: tuple[Redirection, ...], via: tuple[str, ...]) -> None:
        first = words[0]
        if not first.known or (first.tilde and "/" not in first.text):
            self.unknown(f"which program `{first.text[:80]}` is, is known only at run time")
            return
        if len(self._reading.commands) >= MAX_COMMANDS or len(via) > _MAX_WRAPPERS:
            self.unknown(f"more than {MAX_COMMANDS:,} commands, or {_MAX_WRAPPERS} wrappers around one")
            return
        name = posixpath.basename(first.text)
        if name in BACKGROUND:
            self.background(name)
        self._reading.moves = self._reading.moves or name in MOVING
        index = len(self._reading.commands)
        self._reading.commands.append(ParsedCommand(first.text, words[1:], via))
        transparent = False
        try:
            transparent = self._inner(name, words, redirections, (*via, name))
        except UnknownCommand as reason:
            self.unknown(str(reason))
        if transparent:
            self._reading.commands[index] = ParsedCommand(first.text, words[1:], via, transparent=True)

    def _inner(
        self, name: str, words: tuple[Word, ...], redirections: tuple[Redirection, ...], via: tuple[str, ...]
    ) -> bool:
        """Visit the commands that this one runs; return True if it only runs them."""
        if (running := RUNNING_OPTIONS.get(name)) is not None:
            self._option(name, running, words)
        if (how := runs_by_option(name, words)) is not None:
            raise UnknownCommand(f"`{name}`: {how}")
        if name in ASSIGNING:
            self._assigning(name, words, via)
        elif name == "printf":
            self._printf(words)
        elif name in ("test", "["):
            self._test(words[1:])
        elif name in ("set", "shopt"):
            self._set(name, words)
        elif is_loader(name):
            raise UnknownCommand(f"`{name}` runs the program in its arguments")
        elif name in _OTHER_SHELLS:
            raise UnknownCommand(f"the language of {name} is not supported")
        elif name in _DIALECTS:
            return self._shell(name, words, redirections, via)
        elif name == "stty" and all(word.known and word.text in STTY_PRINTS for word in words[1:]):
            return False
        elif name in OPAQUE:
            raise UnknownCommand(f"`{name}`: {OPAQUE[name]}")
        elif name in self._special:
            self._special[name](words, redirections, via)
            return name in ("eval", "trap")
        elif name in WRAPPERS:
            return self._wrapper(name, words, redirections, via)
        return False

    def _option(self, name: str, letter: str, words: tuple[Word, ...]) -> None:
        for word in words[1:]:
            if not word.known or (word.text.startswith("-") and letter in word.text):
                raise UnknownCommand(f"`{name} -{letter}` changes what runs")

    def _wrapper(
        self, name: str, words: tuple[Word, ...], redirections: tuple[Redirection, ...], via: tuple[str, ...]
    ) -> bool:
        wrapper = WRAPPERS[name]
        if name == "env" and any(re.match(r"-\w*S|--split", word.text) for word in words[1:]):
            raise UnknownCommand("`env -S` splits words by its own rules")
        if name in ("flock", "sg") and any(word.text in ("-c", "--command") for word in words):
            at = next(index for index, word in enumerate(words) if word.text in ("-c", "--command"))
            self._script(words[at + 1 : at + 2], via, _DIALECTS["sh"])
            return True
        taken = split(words, wrapper)
        rest = taken.rest
        for word in taken.assigned:
            self.variable(word.text.partition("=")[0], number=False)
        self._reading.moves = self._reading.moves or bool({"C", "D", "chdir"} & taken.values.keys())
        if name == "command" and taken.given & {"v", "V"}:
            return False
        if name in ("sudo", "doas") and taken.given & {"b", "background"}:
            self.background(name)
        if not rest:
            if taken.given & {"i", "s", "login", "shell"} and name in ("sudo", "doas"):
                raise UnknownCommand(f"`{name}` starts a shell")
            if name in STARTS_SHELL:
                raise UnknownCommand(f"`{name}` without a command starts a shell")
            if name == "exec" and any(_replaces_input(each) for each in redirections):
                raise UnknownCommand("`exec` gives the shell another input, which it may read commands from")
            return name == "time"
        if name == "sg":
            raise UnknownCommand("`sg` starts a shell")
        if name == "xargs":
            replaced = taken.values.get("I", Word("")).text
            rest = (*(_filled_in(word, replaced) for word in rest), UNKNOWN_WORDS)
        if name == "watch" and not taken.given & {"x", "exec"}:
            self._joined(rest, via, _DIALECTS["sh"])
            return False
        self._run(rest, redirections, via)
        return wrapper.transparent

    def _shell(
        self, name: str, words: tuple[Word, ...], redirections: tuple[Redirection, ...], via: tuple[str, ...]
    ) -> bool:
        at, commands, stdin, values = 1, False, False, 0
        while at < len(words):
            word = words[at]
            if not word.known:
                if commands and not word.splits:
                    break
                raise UnknownCommand(f"`{word.text[:80]}` may be an option of `{name}`, a script or its name")
            text = word.text
            at += 1
            if text in ("-", "--"):
                break
            if text.startswith("--"):
                if text[2:] not in _SHELL_LONG_FLAGS:
                    raise UnknownCommand(f"`{text}` of `{name}` may read commands from a file")
            elif len(text) > 1 and text[0] in "-+":
                commands = commands or (text[0] == "-" and "c" in text)
                stdin = stdin or "s" in text
                values = text.count("o") + text.count("O")
                at += values
            else:
                at -= 1
                break
        if commands:
            self._script(words[at : at + 1], via, _DIALECTS[name])
            return True
        if at < len(words) and not stdin:
            self._script_file(words[at], redirections)
            return False
        self._shell_input(name, redirections, via)
        return True

    def _shell_input(self, name: str, redirections: tuple[Redirection, ...], via: tuple[str, ...]) -> None:
        texts = [each.word for each in redirections if each.op in ("<<", "<<<")]
        if len(texts) != 1 or any(each.op.startswith("<") and each.op[:2] != "<<" for each in redirections):
            raise UnknownCommand(f"`{name}` reads commands from its input")
        self._script(tuple(texts), via, _DIALECTS[name])

    def _script_file(self, word: Word, redirections: tuple[Redirection, ...]) -> None:
        if not word.known or _STREAMS & set(word.text.split("/")) or any("<" in each.op for each in redirections):
            raise UnknownCommand(f"`{word.text[:80]}` is read as commands")

    def _script(
        self,
        words: tuple[Word, ...],
        via: tuple[str, ...],
        dialects: tuple[bool, ...],
        local_names: frozenset[str] | None = None,
    ) -> None:
        for word in words[:1]:
            # The known part of a script still counts: `sh -c "rm $x"` runs rm.
            text = word.text if word.known else word.text.removeprefix('"').removesuffix('"')
            for posix in dialects:
                depth = self._depth + SCRIPT_LEVELS
                self._reading.script(text, depth, posix=posix, via=via, local_names=local_names)
            if not word.exact:
                raise UnknownCommand(f"the script `{word.text[:80]}` of `{via[-1]}` is known only at run time")

    def _joined(
        self,
        words: tuple[Word, ...],
        via: tuple[str, ...],
        dialects: tuple[bool, ...],
        local_names: frozenset[str] | None = None,
    ) -> None:
        if any(not word.exact for word in words):
            raise UnknownCommand(f"what `{via[-1]}` runs is known only at run time")
        self._script((Word(" ".join(word.text for word in words)),), via, dialects, local_names)

    def _eval(self, words: tuple[Word, ...], _: tuple[Redirection, ...], via: tuple[str, ...]) -> None:
        begin = 2 if len(words) > 1 and words[1].text == "--" else 1
        self._joined(words[begin:], via, (self._posix,), self._command.local_names)

    def _trap(self, words: tuple[Word, ...], _: tuple[Redirection, ...], via: tuple[str, ...]) -> None:
        rest = words[2:] if len(words) > 1 and words[1].text == "--" else words[1:]
        if any(not word.known for word in rest[1:]):
            raise UnknownCommand("which signals `trap` is for is known only at run time")
        if len(rest) > 1 and rest[0].text != "-":
            self._script(rest, via, (self._posix,))
            if rest[0].text and any(word.text not in ("EXIT", "0") for word in rest[1:]):
                raise UnknownCommand("`trap` runs commands between those of later lines")

    def _source(self, words: tuple[Word, ...], redirections: tuple[Redirection, ...], _: tuple[str, ...]) -> None:
        for word in words[2:3] if len(words) > 1 and words[1].text == "--" else words[1:2]:
            self._script_file(word, redirections)

    def _let(self, words: tuple[Word, ...], _: tuple[Redirection, ...], __: tuple[str, ...]) -> None:
        for word in words[1:]:
            found = analyse_arithmetic(word.text, self._command.numbers)
            for name in found.assigned:
                self.variable(name, number=True)
            if not word.known or not found.harmless:
                raise UnknownCommand("`let` evaluates the text of variables")

    def _wait(self, words: tuple[Word, ...], _: tuple[Redirection, ...], __: tuple[str, ...]) -> None:
        for word in words[1:]:
            if not self._is_number(word) and not (word.known and re.fullmatch(r"-[fn]+|--|%.*", word.text)):
                raise UnknownCommand("`wait -p` sets a variable, and evaluates its index")

    def _is_number(self, word: Word) -> bool:
        if word.known:
            return is_number(word.text)
        expanded = re.fullmatch(r'"?\$(?:([!?$#])|\{?([A-Za-z_]\w*)\}?)"?', word.text, re.ASCII)
        return expanded is not None and (expanded[1] is not None or expanded[2] in self._command.numbers)

    def _set(self, name: str, words: tuple[Word, ...]) -> None:
        options = tuple(itertools.takewhile(lambda word: word.text not in ("-", "--"), words[1:]))
        for word in options:
            if not word.known or word.text in ("emacs", "vi"):
                raise UnknownCommand(f"`{name}` may change what keys do")
            letters = word.text[1:] if name == "set" and word.text[:1] in ("-", "+") else ""
            if {"k", "H"} & set(letters) or word.text in ("keyword", "posix", "histexpand", "history"):
                raise UnknownCommand(f"`{name} {word.text}` changes how later lines are read")
            if name == "set" and word.text[:1] not in ("-", "+") and not _NAME.fullmatch(word.text):
                return  # the remaining words are the new `$1` and following

    def _test(self, words: tuple[Word, ...]) -> None:
        """`test -v` evaluates an index, so a word that might be `-v`, or follow it, must be an operand."""
        if self._posix or (len(words) == 1 and not words[0].splits):
            return
        for index, word in enumerate(words):
            before = words[index - 1].text if index and words[index - 1].known else ""
            after = words[index + 1].text if index + 1 < len(words) and words[index + 1].known else ""
            if before == "-v" and not (word.known and _NAME.fullmatch(word.text)):
                raise UnknownCommand("`test -v` evaluates the index of the name that it is given")
            operand = before in ONE_SIDED or before in TWO_SIDED or after in TWO_SIDED
            operand = operand or (len(words) == 2 and after == "]")
            if not word.known and not self._is_number(word) and (word.splits or not operand):
                raise UnknownCommand(f"`{word.text[:80]}` may be `-v`, which evaluates an index")

    def _printf(self, words: tuple[Word, ...]) -> None:
        """`printf -v` assigns text to a variable, and evaluates the variable's index."""
        for word in words[1:2]:
            may_be_option = re.match(r'"?\\?[$`*?\[{<>~-]', word.text) if not word.known else word.text[:2] == "-v"
            if may_be_option:
                raise UnknownCommand("`printf -v` sets a variable")

    def _alias(self, words: tuple[Word, ...], _: tuple[Redirection, ...], __: tuple[str, ...]) -> None:
        if any("=" in word.text or not word.known for word in words[1:]):
            raise UnknownCommand("`alias` changes what later commands are")

    def _assigning(self, name: str, words: tuple[Word, ...], via: tuple[str, ...]) -> None:
        # `a=$x` is one word only where bash's parser sees the builtin's name.
        splits = self._posix or words[0].quoted or len(via) > 1
        if name in ("read", "mapfile", "readarray", "getopts"):
            for implied in ("REPLY", "MAPFILE", "OPTARG", "OPTIND"):
                self._reading.texts.add(implied)
        arrays = False
        for word in words[1:]:
            if not word.known and (not re.match(r"[A-Za-z_]\w*=", word.text) or (splits and word.splits)):
                raise UnknownCommand(f"`{words[0].text}` may set a variable that decides what runs")
            named, value = re.split(r"\+?=|\Z", word.text, maxsplit=1)[:2]
            if named.startswith(("-", "+")) and name in DECLARING:
                arrays = arrays or bool({"a", "A"} & set(named))
                for letter, what in ATTRIBUTES.items():
                    if letter in named and not (letter == "n" and name == "export"):
                        raise UnknownCommand(f"`{name} -{letter}` {what}")
                continue
            if name == "readonly":
                raise UnknownCommand(f"`readonly` {ATTRIBUTES['r']}")
            # `declare -a x='(...)'` parses the text as a list of values.
            if name in DECLARING and (value.startswith("(") or (arrays and value and not word.known)):
                raise UnknownCommand(f"`{name}` reads `{value[:80]}` as a list of values")
            if re.match(r"-?\w+\[", named):
                raise UnknownCommand(f"`{name}` evaluates the index of `{named[:80]}`")
            # The value of an option may follow its letter directly: `read -aPATH`.
            number = word.known and is_number(value)
            for begin in range(len(named) if named.startswith("-") else 1):
                self.variable(named[begin:], number=number)
            if name not in ("declare", "typeset", "local") or any("g" in each.text for each in words[1:]):
                self._own(named, number=number)

    def _find(self, words: tuple[Word, ...], redirections: tuple[Redirection, ...], via: tuple[str, ...]) -> None:
        at, strays = 1, False
        while at < len(words):
            if words[at].text not in _FIND_COMMANDS:
                strays = strays or (words[at].text in (";", "+") and words[at].known)
                at += 1
                continue
            end = next((i for i in range(at + 1, len(words)) if words[i].text in (";", "+")), len(words))
            inner = tuple(_filled_in(word, "{}") for word in words[at + 1 : end])
            self._reading.moves = self._reading.moves or words[at].text in ("-execdir", "-okdir")
            if inner:
                self._run(inner, redirections, via)
            at = end + 1
        if strays or any(word.splits for word in words[1:]):
            raise UnknownCommand("`find` may be given a command that is known only at run time")


def _replaces_input(redirection: Redirection) -> bool:
    return redirection.target == "0" or ("<" in redirection.op and not redirection.target)


def _filled_in(word: Word, mark: str) -> Word:
    """Return a word in which a program replaces a placeholder."""
    return Word(word.text, known=False, quoted=True) if mark and mark in word.text else word
