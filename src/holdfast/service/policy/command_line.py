"""From the text of a command line to the programs in it, at every level, through wrappers; pure.

What only the running shell can know (`$X foo`, `eval "$y"`) and what cannot be read is told, so that rules can fail
closed. What a program does with its own language (`python -c`, `awk`) is not looked at: the operating system guards
that.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Callable, Iterable
from typing import Final

from holdfast.service.model import Struct
from holdfast.service.policy.shell_grammar import Grammar
from holdfast.service.policy.shell_redirections import SCRIPT_LEVELS, Assignment, Redirection, SimpleCommand
from holdfast.service.policy.shell_words import LATER, MAX_DEPTH, Incomplete, Word, runs_as_index
from holdfast.service.policy.wrappers import BACKGROUND, OPAQUE, WRAPPERS, NotKnown, split

#: A longer text is unknown as a whole. Four times what Linux takes as one argument would only cost time.
MAX_TEXT: Final = 128 * 1024
#: Commands in one line; more of them are unknown.
MAX_COMMANDS: Final = 2_000
#: `env env env ...`: each costs some of Python's stack.
_MAX_WRAPPERS: Final = 30
#: Reasons that are kept: one is enough to refuse.
_MAX_REASONS: Final = 20

#: How a shell reads: False as bash, True as dash. `sh` may be either, so both are tried.
_DIALECTS: Final[dict[str, tuple[bool, ...]]] = {
    "bash": (False,),
    "rbash": (False,),
    "ksh": (False,),
    "mksh": (False,),
    "sh": (False, True),
    "dash": (True,),
    "ash": (True,),
}
_OTHER_SHELLS: Final = frozenset(["zsh", "fish", "csh", "tcsh", "xonsh", "nu", "pwsh", "elvish", "yash", "ksh93"])
#: Variables that change which programs a name means, or run something by themselves.
_STEERING: Final = re.compile(
    r"(PATH|LD_\w+|BASH_ENV|ENV|IFS|SHELLOPTS|BASHOPTS|PROMPT_COMMAND|PS[0-4]|BASH_FUNC_.*|BASH_ALIASES|BASH_CMDS"
    r"|BASH_LOADABLES_PATH|INPUTRC|histchars)"
)
#: Builtins that evaluate the names that they are given, with the index in them; `set` makes `$1` of its words.
_EVALUATING: Final = frozenset(["test", "[", "wait", "set"])
#: Builtins whose words are names of variables.
_ASSIGNING: Final = frozenset(
    ["export", "declare", "typeset", "local", "readonly", "read", "mapfile", "readarray", "unset", "getopts", "let"]
)
_SHELL_LONG_FLAGS: Final = ("login", "noediting", "noprofile", "norc", "posix", "restricted", "verbose")
#: Options with which a builtin changes what runs, or runs something itself.
_RUNNING_OPTIONS: Final = {"hash": "p", "enable": "f", "jobs": "x", "mapfile": "C", "readarray": "C"}
_FIND_COMMANDS: Final = ("-exec", "-execdir", "-ok", "-okdir")


def steers(name: str) -> bool:
    """Whether a variable decides what runs."""
    return bool(_STEERING.fullmatch(name))


class Command(Struct, frozen=True):
    """A program with its words. `via`: what runs it, outermost first."""

    program: str
    arguments: tuple[Word, ...] = ()
    via: tuple[str, ...] = ()
    #: It only runs another command, which is told beside it.
    transparent: bool = False

    @property
    def name(self) -> str:
        """Without the directory."""
        return posixpath.basename(self.program)

    @property
    def text(self) -> str:
        """What patterns are matched with."""
        return " ".join([self.name, *(word.text for word in self.arguments)])


class CommandLine(Struct, frozen=True):
    """What is in a text."""

    commands: tuple[Command, ...] = ()
    #: Why something in it cannot be known.
    unknown: tuple[str, ...] = ()
    #: Why it ends too early; a shell at a prompt asks for more.
    incomplete: str = ""
    #: What puts something into the background: `&`, `nohup`, ...
    background: tuple[str, ...] = ()
    #: Letters of the text before the line that is not complete.
    taken: int = 0

    @property
    def programs(self) -> tuple[str, ...]:
        """The names, each once, in the order of the text."""
        return tuple(dict.fromkeys(command.name for command in self.commands))


def read_command_line(text: str, *, shell: str = "bash", interactive: bool = False) -> CommandLine:
    """All simple commands of a text as this shell reads it; `interactive` knows `!` as a prompt does."""
    name = posixpath.basename(shell.split()[0]) if shell.split() else "bash"
    if name not in _DIALECTS:
        return CommandLine(unknown=(f"the language of {name} is not known",))
    if len(text) > MAX_TEXT:
        return CommandLine(unknown=(f"it is longer than {MAX_TEXT:,} letters",))
    reading = _Reading()
    if control := re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text):
        reading.unknown(f"it holds the control character {control[0]!r}")
    incomplete, taken = "", len(text)
    for posix in _DIALECTS[name]:
        grammar = reading.grammar(text, posix=posix, history=interactive, depth=0, via=())
        try:
            grammar.read()
        except Incomplete as error:
            incomplete = str(error)
            taken = min(taken, grammar.taken)
    commands = tuple(dict.fromkeys(reading.commands))
    return CommandLine(commands, tuple(reading.reasons), incomplete, tuple(reading.backgrounds), taken)


class _Reading:
    """What is found while one text is read."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        # Ordered sets: two dialects find most things twice.
        self.reasons: dict[str, None] = {}
        self.backgrounds: dict[str, None] = {}
        self._scripts: set[tuple[str, bool]] = set()

    def unknown(self, reason: str) -> None:
        if len(self.reasons) < _MAX_REASONS:
            self.reasons[reason] = None

    def grammar(self, text: str, *, posix: bool, history: bool, depth: int, via: tuple[str, ...]) -> Grammar:
        return Grammar(text, _Look(self, posix, via), posix=posix, history=history, depth=depth)

    def script(self, text: str, depth: int, *, posix: bool, via: tuple[str, ...]) -> None:
        if (text, posix) in self._scripts:
            return
        self._scripts.add((text, posix))
        if depth >= MAX_DEPTH or len(self._scripts) > MAX_COMMANDS:
            self.unknown("scripts within scripts, too many of them")
            return
        try:
            self.grammar(text, posix=posix, history=False, depth=depth, via=via).read()
        except Incomplete as error:
            self.unknown(f"a script within it is not complete: {error}")


class _Look:
    """Looks through commands at those that they run."""

    def __init__(self, reading: _Reading, posix: bool, via: tuple[str, ...]) -> None:
        self._reading = reading
        self._posix = posix
        self._via = via
        self._depth = 0
        self._special: dict[str, Callable[[tuple[Word, ...], tuple[Redirection, ...], tuple[str, ...]], None]] = {
            "eval": self._eval,
            "trap": self._trap,
            "find": self._find,
            "alias": self._alias,
            ".": self._source,
            "source": self._source,
        }

    def simple(self, command: SimpleCommand, depth: int) -> None:
        self._depth = depth
        self._assigned(command.assignments)
        if command.words:
            self._run(command.words, command.redirections, self._via)

    def unknown(self, reason: str) -> None:
        self._reading.unknown(reason)

    def background(self, what: str) -> None:
        self._reading.backgrounds[what] = None

    def script(self, text: str, depth: int) -> None:
        self._reading.script(text, depth, posix=self._posix, via=self._via)

    def variable(self, name: str) -> None:
        if steers(name):
            self.unknown(f"it sets {name}, which decides what runs")

    def _assigned(self, assignments: Iterable[Assignment]) -> None:
        for each in assignments:
            self.variable(each.name)
            self._stored(each.value)

    def _stored(self, value: Word) -> None:
        """Arithmetic runs what stands in a variable, if it looks like an index: `x='a[$(...)]'; ((x))`."""
        literal = value.quoted and value.known and ("$(" in value.text or "`" in value.text)
        if literal or runs_as_index(value):
            self.unknown("a variable is given a text that holds a command")

    def _run(self, words: tuple[Word, ...], redirections: tuple[Redirection, ...], via: tuple[str, ...]) -> None:
        first = words[0]
        if not first.known or (first.tilde and "/" not in first.text):
            self.unknown(f"which program `{first.text[:80]}` is, is known only when it runs")
            return
        if len(self._reading.commands) >= MAX_COMMANDS or len(via) > _MAX_WRAPPERS:
            self.unknown(f"more than {MAX_COMMANDS:,} commands, or {_MAX_WRAPPERS} wrappers around one")
            return
        name = posixpath.basename(first.text)
        if name in BACKGROUND:
            self.background(name)
        place = len(self._reading.commands)
        self._reading.commands.append(Command(first.text, words[1:], via))
        transparent = False
        try:
            transparent = self._inner(name, words, redirections, (*via, name))
        except NotKnown as reason:
            self.unknown(str(reason))
        if transparent:
            self._reading.commands[place] = Command(first.text, words[1:], via, transparent=True)

    def _inner(
        self, name: str, words: tuple[Word, ...], redirections: tuple[Redirection, ...], via: tuple[str, ...]
    ) -> bool:
        """Those that it runs; whether it adds nothing of its own."""
        if (running := _RUNNING_OPTIONS.get(name)) is not None:
            self._option(name, running, words)
        if name in _EVALUATING and any(runs_as_index(word) for word in words):
            raise NotKnown(f"`{name}` runs a command that stands in an index")
        if name in _ASSIGNING or (name == "printf" and len(words) > 1 and words[1].text.startswith("-v")):
            self._assigning(name, words)
        elif name in ("set", "shopt"):
            options = itertools.takewhile(lambda word: word.text not in ("-", "--"), words)
            if any(not word.known or word.text in ("emacs", "vi") for word in options):
                raise NotKnown(f"`{name}` may change what keys do")
        elif name in _OTHER_SHELLS:
            raise NotKnown(f"the language of {name} is not known")
        elif name in _DIALECTS:
            return self._shell(name, words, redirections, via)
        elif name in OPAQUE:
            raise NotKnown(f"`{name}`: {OPAQUE[name]}")
        elif name in self._special:
            self._special[name](words, redirections, via)
            return name in ("eval", "trap")
        elif name in WRAPPERS:
            return self._wrapper(name, words, redirections, via)
        return False

    def _option(self, name: str, letter: str, words: tuple[Word, ...]) -> None:
        for word in words[1:]:
            if not word.known or (word.text.startswith("-") and letter in word.text):
                raise NotKnown(f"`{name} -{letter}` changes what runs")

    def _wrapper(
        self, name: str, words: tuple[Word, ...], redirections: tuple[Redirection, ...], via: tuple[str, ...]
    ) -> bool:
        wrapper = WRAPPERS[name]
        if name == "env" and any(re.match(r"-\w*S|--split", word.text) for word in words[1:]):
            raise NotKnown("`env -S` makes words by rules of its own")
        if name == "flock" and any(word.text in ("-c", "--command") for word in words):
            at = next(index for index, word in enumerate(words) if word.text in ("-c", "--command"))
            self._script(words[at + 1 : at + 2], via, _DIALECTS["sh"])
            return True
        taken = split(words, wrapper)
        rest = taken.rest
        for word in taken.assigned:
            self.variable(word.text.partition("=")[0])
            self._stored(word)
        if name == "command" and taken.given & {"v", "V"}:
            return False
        if name in ("sudo", "doas") and taken.given & {"b", "background"}:
            self.background(name)
        if not rest:
            if taken.given & {"i", "s", "login", "shell"} and name in ("sudo", "doas"):
                raise NotKnown(f"`{name}` starts a shell")
            return name == "time"
        if name == "xargs":
            replaced = taken.values.get("I", Word("")).text
            rest = (*(_filled_in(word, replaced) for word in rest), LATER)
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
                raise NotKnown(f"`{word.text[:80]}` may be an option of `{name}`, a script or its name")
            text = word.text
            at += 1
            if text in ("-", "--"):
                break
            if text.startswith("--"):
                if text[2:] not in _SHELL_LONG_FLAGS:
                    raise NotKnown(f"`{text}` of `{name}` may read commands from a file")
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
            return False
        self._shell_input(name, redirections, via)
        return True

    def _shell_input(self, name: str, redirections: tuple[Redirection, ...], via: tuple[str, ...]) -> None:
        texts = [each.word for each in redirections if each.op in ("<<", "<<<")]
        if len(texts) != 1 or any(each.op.startswith("<") and each.op[:2] != "<<" for each in redirections):
            raise NotKnown(f"`{name}` reads commands from its input")
        self._script(tuple(texts), via, _DIALECTS[name])

    def _script(self, words: tuple[Word, ...], via: tuple[str, ...], dialects: tuple[bool, ...]) -> None:
        for word in words[:1]:
            # Of a script that is not all known, what is known still counts: `sh -c "rm $x"` runs rm.
            text = word.text if word.known else word.text.removeprefix('"').removesuffix('"')
            for posix in dialects:
                self._reading.script(text, self._depth + SCRIPT_LEVELS, posix=posix, via=via)
            if not word.exact:
                raise NotKnown(f"the script `{word.text[:80]}` of `{via[-1]}` is known only when it runs")

    def _joined(self, words: tuple[Word, ...], via: tuple[str, ...], dialects: tuple[bool, ...]) -> None:
        if any(not word.exact for word in words):
            raise NotKnown(f"what `{via[-1]}` runs is known only when it runs")
        self._script((Word(" ".join(word.text for word in words)),), via, dialects)

    def _eval(self, words: tuple[Word, ...], _: tuple[Redirection, ...], via: tuple[str, ...]) -> None:
        begin = 2 if len(words) > 1 and words[1].text == "--" else 1
        self._joined(words[begin:], via, (self._posix,))

    def _trap(self, words: tuple[Word, ...], _: tuple[Redirection, ...], via: tuple[str, ...]) -> None:
        rest = words[2:] if len(words) > 1 and words[1].text == "--" else words[1:]
        if len(rest) > 1 and rest[0].text != "-":
            self._script(rest, via, (self._posix,))

    def _source(self, words: tuple[Word, ...], _: tuple[Redirection, ...], __: tuple[str, ...]) -> None:
        for word in words[1:2]:
            if not word.known or word.text.startswith(("/dev/", "/proc/")):
                raise NotKnown(f"`{word.text[:80]}` is read as commands")

    def _alias(self, words: tuple[Word, ...], _: tuple[Redirection, ...], __: tuple[str, ...]) -> None:
        if any("=" in word.text or not word.known for word in words[1:]):
            raise NotKnown("`alias` changes what later commands are")

    def _assigning(self, name: str, words: tuple[Word, ...]) -> None:
        for word in words[1:]:
            if not word.known and not re.match(r"[A-Za-z_]\w*=", word.text):
                raise NotKnown(f"`{words[0].text}` may set a variable that decides what runs")
            named = re.split(r"\+?=|\[", word.text)[0]
            if named.startswith("-") and "n" in named and name in ("declare", "typeset", "local"):
                raise NotKnown(f"`{name} -n` gives a variable another name")
            # The value of an option may follow its letter at once: `printf -vPATH`, `read -ra PATH`.
            for begin in range(len(named) if named.startswith("-") else 1):
                self.variable(named[begin:])
            self._stored(word)

    def _find(self, words: tuple[Word, ...], redirections: tuple[Redirection, ...], via: tuple[str, ...]) -> None:
        at, strays = 1, False
        while at < len(words):
            if words[at].text not in _FIND_COMMANDS:
                strays = strays or (words[at].text in (";", "+") and words[at].known)
                at += 1
                continue
            end = next((i for i in range(at + 1, len(words)) if words[i].text in (";", "+")), len(words))
            inner = tuple(_filled_in(word, "{}") for word in words[at + 1 : end])
            if inner:
                self._run(inner, redirections, via)
            at = end + 1
        if strays or any(word.splits for word in words[1:]):
            raise NotKnown("`find` may be given a command that is known only when it runs")


def _filled_in(word: Word, mark: str) -> Word:
    """A word in which a program puts something in the mark's place."""
    return Word(word.text, known=False, quoted=True) if mark and mark in word.text else word
