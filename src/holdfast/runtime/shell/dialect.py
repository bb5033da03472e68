"""The lines that are sent to a live shell, and the parser of its answers, by the shell's family; pure.

The shell reads its own program from descriptor 0, a socket. For each command a line makes it source the user's
command from a file, with an empty stdin, and answer on the socket:

    <traps> NUL status:flags:pid:last NUL PWD NUL OLDPWD NUL 1

While a command runs, the shell holds the socket above descriptor 9, closed on exec, so programs do not inherit it.
These lines contain no loop and no function, so `break` and `return` in a command mean what they mean at a prompt.

Options and traps that would show these lines (tracing, DEBUG and ERR traps) are suspended between commands and
restored by the first words of the next command's file.
"""

from __future__ import annotations

import re
import signal
from typing import ClassVar, Final, NamedTuple

_END: Final = b"\0\1"
#: The name of the pipe that a shell saves to, and the letter before each part that it saves.
SAVED: Final = "saved"
SAVED_NAMES: Final = {b"e": "exports", b"s": "state"}
#: The last line of a state that was saved completely.
STATE_END: Final = "# whole"
#: Options that would show the server's lines, and traps that would run for them.
_NOISY_FLAGS: Final = "xv"
_NOISY_TRAPS: Final = ("DEBUG", "ERR", "ZERR", "RETURN")
#: A trap as shells print it: one word, quoted in the way of each, and the name of the signal.
_TRAP: Final = re.compile(
    r"""^trap\ --\ ((?:\$'(?:[^'\\]|\\.)*'|'[^']*'|"[^"]*"|\\.|[^\s'"\\])*)\ (?:SIG)?(\S+)$""",
    re.MULTILINE | re.DOTALL | re.ASCII,
)
_KNOWN_TRAPS: Final = {"EXIT", "DEBUG", "ERR", "ZERR", "RETURN"}
#: Uses the last argument: `$_` or `${_...}`, and not `$_name`.
_WANTS_LAST: Final = re.compile(r"\$_(?![A-Za-z0-9_])|\$\{_(?![A-Za-z0-9_])")


class _Words:
    """A search of a command for words that need another treatment, which few commands contain.

    Each match contains one of the `substrings`. Their search takes a tenth of the time of the pattern, or less.
    """

    def __init__(self, pattern: str, *substrings: str) -> None:
        self._pattern = re.compile(pattern)
        self._substrings = substrings

    def found_in(self, text: str) -> bool:
        for each in self._substrings:
            if each in text:
                return self._pattern.search(text) is not None
        return False


#: The end of the builtin `.`, as a word.
_DOTS: Final = (". ", ".\t", ".\n")
#: A command of this kind may end the shell by an option (`set -e`, `set -u`) or by an expansion (`${x:?}`).
_MAY_ABORT: Final = _Words(
    r"\?|\b(?:set|shopt|eval|source)\b|(?:^|[\s;&|])\.[ \t\n]", "?", "set", "shopt", "eval", "source", *_DOTS
)
#: Words that may change the exported variables; a function may too, and is noticed at the next idle moment.
_MAY_EXPORT: Final = _Words(
    r"=|\b(?:export|declare|typeset|readonly|unset|read|source|eval|set)\b|(?:^|\s)\.[ \t\n]",
    *("=", "set", "read", "export", "declare", "source", "eval"),
    *_DOTS,
)
#: Tracing and traps.
_SHOWS_LINES: Final = _Words(
    r"\bset\b[^;\n]*\s[-+]\w*[xv]|\bset\b[^;\n]*(?:trace|verbose)|\btrap\b|DEBUG", "set", "trap", "DEBUG"
)


class Answer(NamedTuple):
    """The reply of a shell at the end of a command."""

    status: int
    flags: str
    #: The pid of the last background job, or nothing.
    job: str
    #: The value of `$_`, from shells that have it.
    last: str | None
    cwd: str
    old_cwd: str
    #: The traps on EXIT, DEBUG, ERR and RETURN, each as the shell quotes it.
    traps: dict[str, str]


class ShellStep(NamedTuple):
    """The parameters of the lines that run one command."""

    #: Quoted, if they have to be. The second is the directory of the pipes.
    directory: str
    pipe_directory: str
    #: For this command alone.
    cwd: str | None = None
    env: dict[str, str] | None = None
    #: The file that is its stdin.
    stdin: str = "/dev/null"
    #: `$?` and `$_` as the command before left them.
    status: int = 0
    last: str | None = None
    #: The number of the pair of pipes that the shell switches to first; None keeps the current pair.
    pipes: int | None = None
    #: Whether a stream is switched only if it still is the pipe, which needs the pipe to have its name.
    checks_target: bool = True
    #: Descriptors that are copies of its stdout or stderr, and are switched with them.
    copies: tuple[tuple[int, int], ...] = ()
    #: Whether the shell's state is saved if the command ends the shell.
    saves_state: bool = False
    #: Whether the exported variables are saved first.
    saves_exports: bool = False


class SuspendedTracing(NamedTuple):
    """Options and traps that were removed after a command and are restored before the next."""

    flags: str = ""
    traps: tuple[tuple[str, str], ...] = ()

    @classmethod
    def after(cls, answer: Answer) -> SuspendedTracing:
        if not answer.traps and "x" not in answer.flags and "v" not in answer.flags:  # nearly always
            return _NOTHING_SUSPENDED
        return cls(
            "".join(flag for flag in _NOISY_FLAGS if flag in answer.flags),
            tuple((name, answer.traps[name]) for name in _NOISY_TRAPS if name in answer.traps),
        )

    def __bool__(self) -> bool:
        return bool(self.flags or self.traps)


_NOTHING_SUSPENDED: Final = SuspendedTracing()


def quote(text: str) -> str:
    """Quote a text as one word of any shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def is_complete(received: bytes | bytearray) -> bool:
    """Whether the bytes received from the shell are a complete answer."""
    return received.endswith(_END)


def parse_answer(received: bytes) -> Answer:
    """Parse an answer; `ValueError` for other bytes."""
    *before, first, cwd, old_cwd, _ = received.decode("utf-8", "surrogateescape").split("\0")
    status, flags, job, ended, last = first.split(":", 4)
    traps: dict[str, str] = {}
    if before != [""]:
        found = _TRAP.findall("\0".join(before))
        # In POSIX mode, bash lists traps that are not set.
        traps = {name: action for action, name in found if name in _KNOWN_TRAPS and action != "-"}
    return Answer(int(ended or status), flags, job, last if ended else None, cwd, old_cwd, traps)


class ShellDialect:
    """A POSIX shell: dash, busybox ash, and any other shell without a dialect of its own."""

    #: Builtins past the user's functions and aliases. `command` also makes an error in the sourced file end that
    #: file and not the shell.
    builtin: ClassVar[str] = "\\command"
    #: With redirections that last. `builtin exec` would undo them.
    exec: ClassVar[str] = "\\command exec"
    #: Sources a file; with variables before it that are the file's alone, and exported.
    source: ClassVar[str] = "\\command ."
    #: The line for a step without special parameters, as short as possible. Bash reads lines byte by byte, so they
    #: are in a file, which it reads in blocks; other shells get the lines themselves, because they might go on
    #: reading a file that is written again.
    plain_line: ClassVar[str | None] = None
    #: Ends a sourced file; a special builtin, which no function replaces.
    leave: ClassVar[str] = "\\return"
    #: Hides what the server's lines would print on stderr; closing it costs the least.
    hushed: ClassVar[str] = "2>&-"
    #: Lines before a command, by which `stop` recognises that one runs.
    begin: ClassVar[tuple[str, ...]] = ("_holdfast_run_=1",)
    #: Leaves all nested constructs up to the end of the sourced file, by an expansion error with a hidden text.
    stop: ClassVar[str] = 'case ${_holdfast_run_-} in 1) { : "${_holdfast_stop_?}"; } 2>/dev/null; esac'
    #: Whether it can save its state when an option ends it.
    saves_state: ClassVar[bool] = False
    #: Whether it clears noisy traps as it answers.
    clears_traps: ClassVar[bool] = False
    #: Whether variables before `source` are exported to what the file runs.
    passes_env: ClassVar[bool] = True
    #: An error in a subshell returns to `command` in the child too. The child must not continue as the shell.
    leave_subshell: ClassVar[str] = '[ /proc/self -ef "/proc/$$" ] || exit "${_holdfast_%%:*}";'
    #: The value that is kept of a command beside its status.
    last: ClassVar[str] = ""
    #: The options at the end of a command.
    flags: ClassVar[str] = "$-"
    #: Whether a variable that cannot be set would end the shell.
    dies_of_readonly: ClassVar[bool] = True
    #: The signal that stops a command: few programs use real-time signals, and most shells trap them by number.
    interrupt_signal: ClassVar[int] = 57

    def arguments(self, *, login: bool) -> list[str]:
        return ["-l", "-s"] if login else ["-s"]

    def arg0(self, path: str) -> str | None:
        """The argv[0] to run it under: busybox selects its program by that name."""
        return "ash" if path.endswith("/busybox") else None

    def boot(self, directory: str, pipes: str, restore: str | None) -> str:
        """The first lines: the stop trap, the state of the previous shell, the first pipes, and an answer."""
        lines = [*self.setup(directory), f"{self.builtin} trap {quote(self.stop)} {int(self.interrupt_signal)}"]
        if restore is not None:
            lines += [*self.forget_environment(), f"{self.builtin} . {quote(restore)} </dev/null >/dev/null 2>&1"]
        lines.append(f"{self.exec} >|{pipes}/o0 2>|{pipes}/e0; {self.answer()}")
        return "\n".join(lines) + "\n"

    def setup(self, directory: str) -> list[str]:
        return []

    def forget_environment(self) -> list[str]:
        """Lines before another shell's variables are restored: that shell may have unset some inherited ones."""
        return []

    def answer(self) -> str:
        """Lines that send the answer. stderr is closed meanwhile, so that no trace of them is printed."""
        return (
            f"{{ _holdfast_=$?:{self.flags}:${{!:-}}:${{_holdfast_-:}};{self.builtin} set +{_NOISY_FLAGS};"
            f"{self.leave_subshell}{self.show_traps()}"
            f'{self.builtin} printf \'\\0%s\\0%s\\0%s\\0\\1\' "$_holdfast_" "${{PWD-}}" "${{OLDPWD-}}";'
            f"{self.builtin} unset _holdfast_ _holdfast_run_ _holdfast_flags_;}} >&0 {self.hushed}"
        )

    def show_traps(self) -> str:
        return f"{self.builtin} trap;"

    def is_same(self, one: str, other: str) -> str:
        """A test for two names of one file."""
        return f"{self.builtin} [ {one} -ef {other} ]"

    def status(self, status: int) -> str:
        """The file that restores `$?`."""
        return f"{self.leave} {status}\n"

    def step(self, step: ShellStep) -> str:
        """The lines for one command."""
        lines = list(self.begin)
        if step.pipes is not None:
            for number, letter in ((1, "o"), (2, "e")):
                path = f"{step.pipe_directory}/{letter}"
                move = f"{self.exec} {number}>|{path}{step.pipes}"
                if step.checks_target:
                    # Not if the user sent the stream elsewhere with `exec >file`.
                    move = f"{self.is_same(f'/dev/fd/{number}', f'{path}{1 - step.pipes}')} && {move}"
                lines.append(move)
        lines += [f"{self.exec} {copy}>&{number}" for copy, number in step.copies]
        if step.saves_exports:
            lines.append(self._exports(step.pipe_directory))
        if step.saves_state:
            lines += self.arm(step.directory)
        if len(lines) > len(self.begin) or step.env or step.status or step.last is not None:
            last = "" if step.last is None else f" {quote(step.last)}"
            lines.append(f"{self.builtin} . {step.directory}/status{last}")
        source = f"{self.source} {step.directory}/command <{step.stdin}"
        if step.env and self.passes_env:
            variables = " ".join(f"{name}={quote(value)}" for name, value in step.env.items())
            source = f"{variables} {source}"
            if self.dies_of_readonly:
                source = f"if ({variables}); then {source}; else {self.builtin} false; fi"
        if step.cwd is not None:
            path = step.cwd if step.cwd.startswith("/") else f"./{step.cwd}"
            source = f"if {self.builtin} cd {quote(path)}; then {source}; else {self.builtin} false; fi"
        # In one line, read before it is run: a child that returns (`leave_subshell`) finds no further line to read.
        lines.append("; ".join([source, self.answer(), *self.unset_env(step)]))
        return "\n".join([*self.set_env(step), *lines, ""])

    def set_env(self, step: ShellStep) -> list[str]:
        """For a shell that does not export variables before a sourced file."""
        return []

    def unset_env(self, step: ShellStep) -> list[str]:
        return []

    def command(self, text: str, resumed: SuspendedTracing, step: ShellStep) -> str:
        """The user's command as a file, with the suspended options and traps restored before its first word."""
        if not text.endswith("\n"):
            text += "\n"
        if not resumed:
            # Returns 0 itself: with `set -e`, another status of the file would end the shell, though the command's
            # last word may have failed without harm (`[ -f x ] && echo y`).
            return f"{text}_holdfast_=$?:{self.last};{self.leave} 0\n" if _can_end_with_more(text) else text
        # DEBUG comes last: it runs before every command from there on.
        words = [f"{self.builtin} trap -- {action} {name}" for name, action in reversed(resumed.traps)]
        if resumed.flags:
            words.insert(0, f"{self.builtin} set -{resumed.flags}")
        if step.status and "ERR" not in dict(resumed.traps):
            words.append(f"{self.builtin} . {step.directory}/status")
        # `set -v` shows lines as they are read: the command must begin on the next one.
        separator = "\n" if "v" in resumed.flags else "; "
        return f"{{ {'; '.join(words)}; }} >/dev/null 2>&1{separator}{text}"

    def at_exit(self, pipes: str) -> str:
        """The file that saves the state unless `exit` was called; empty for a shell that cannot save it."""
        return ""

    def arm(self, directory: str) -> list[str]:
        """Lines after which the shell saves its state if it is ended by an option, and not by `exit`."""
        return []

    def disarm(self, *, trapped: bool) -> list[str]:
        """Lines that undo `arm`; `trapped` if the EXIT trap is still the server's."""
        return []

    def clean_up(
        self,
        *,
        suspend: SuspendedTracing,
        stopped_with: str | None = None,
        disarm: list[str] | None = None,
        back: tuple[str, str] | None = None,
    ) -> str:
        """The line between two commands; empty if nothing is to be undone. `stopped_with` are the options that the
        shell had when it was stopped."""
        words = list(disarm or ())
        if suspend.traps and not self.clears_traps:
            words.append(f"{self.builtin} trap - {' '.join(name for name, _ in suspend.traps)}")
        if stopped_with is not None:
            words += self.after_stop(stopped_with)
        if back is not None:
            cwd, old_cwd = back
            # A read-only variable is no reason to end.
            words.append(
                f"{self.builtin} cd {quote(cwd)};{self.builtin} eval {quote(f'OLDPWD={quote(old_cwd)}')}||:"
            )
        return f"{{ {';'.join(words)};}} >/dev/null {self.hushed}\n" if words else ""

    def after_stop(self, flags: str) -> list[str]:
        return []

    def may_abort(self, text: str, flags: str) -> bool:
        """Whether the command may end the shell by an option or an expansion error."""
        return "e" in flags or "u" in flags or _MAY_ABORT.found_in(text)

    def wants_last(self, text: str) -> bool:
        return False

    def may_export(self, text: str) -> bool:
        """Whether the command may change the exported variables."""
        return _MAY_EXPORT.found_in(text)

    def save_exports(self, pipes: str) -> str:
        """The line that saves the exported variables in a form that the shell can source."""
        return f"{{ {self._exports(pipes)};}} {self.hushed}\n"

    def _exports(self, pipes: str) -> str:
        # Opened for reading and writing: without a server the pipe has no reader, and the open would block.
        return (
            f"{{ {self.builtin} printf '\\0e';{self.builtin} export -p;{self.builtin} printf '\\0.';}}"
            f" 1<>{pipes}/{SAVED}"
        )

    def dump(self) -> str:
        """A command that prints the shell's state in a form that another shell of its kind can source."""
        return f"{self.builtin} set; {self.builtin} export -p; {self.builtin} printf 'umask %s\\n' \"$(umask)\""

    def background(self, state: bytes, command: str, *, stdin: int | None = None) -> bytes:
        """A script of a state and a command on the descriptor `stdin`, or with an empty stdin.

        Errors of the state, which read-only variables cause, are hidden.
        """
        source = "</dev/null" if stdin is None else f"<&{stdin} {stdin}<&-"
        run = f"{self.exec} 2>&9 9>&-\n{self.builtin} eval {quote(command)} {source}\n"
        return f"{self.exec} 9>&2 2>/dev/null\n".encode() + state + run.encode("utf-8", "surrogateescape")


class Bash(ShellDialect):
    """bash: saves its state before an option ends it, and leaves a loop through simulated returns."""

    builtin = "\\builtin"
    source = "\\builtin command ."
    leave = "\\builtin return"
    plain_line = '\\. "$_hold_"\n'
    begin = ()
    leave_subshell = ""
    last = "$_"
    flags = "${_holdfast_flags_-$-}"
    dies_of_readonly = False
    saves_state = True
    clears_traps = True
    # With `extdebug`, a DEBUG trap that returns 2 makes the function or sourced file return. So each level returns
    # before its next command, down to the file of ours that sourced the command. An errexit may come first: the
    # EXIT trap must run as usual.
    stop = (
        "builtin : ${_holdfast_flags_:=$-}; builtin set +e; builtin shopt -s extdebug; builtin set -T;"
        ' builtin trap "[[ \\${BASH_SOURCE[*]} != */command* ]]||builtin test -Z _ 2>/dev/null" DEBUG'
    )

    def arguments(self, *, login: bool) -> list[str]:
        return ["--login", "-s"] if login else ["--norc", "--noprofile", "-s"]

    def setup(self, directory: str) -> list[str]:
        # `execfail`: an `exec` of what is not there is an error and not the end, as at a prompt.
        return ["shopt -s expand_aliases execfail", f"readonly _hold_={directory}/keep"]

    def is_same(self, one: str, other: str) -> str:
        return f"[[ {one} -ef {other} ]]"

    def forget_environment(self) -> list[str]:
        return ["\\builtin unset -v $(\\builtin compgen -e) 2>/dev/null"]

    def show_traps(self) -> str:
        # Removed at once: a DEBUG trap would run for the lines that follow.
        return "\\builtin trap -p EXIT DEBUG ERR RETURN;\\builtin trap - DEBUG ERR RETURN;"

    def after_stop(self, flags: str) -> list[str]:
        had = "".join(flag for flag in "eET" if flag in flags)
        words = ["\\builtin trap - DEBUG", "\\builtin set +ET", "\\builtin shopt -u extdebug"]
        return [*words, f"\\builtin set -{had}"] if had else words

    def wants_last(self, text: str) -> bool:
        return "$" in text and _WANTS_LAST.search(text) is not None

    def arm(self, directory: str) -> list[str]:
        # The EXIT trap of bash does not get the reason, so `exit` becomes a function that sets a variable.
        marks_exit = '{ _holdfast_=$?; _holdfast_exit_=1; builtin exit "${@:-$_holdfast_}"; }'
        return [
            f"\\builtin trap {quote(f'builtin . {directory}/at_exit')} EXIT",
            f"if [[ :$SHELLOPTS: != *:posix:* ]] && ! \\builtin declare -F exit >/dev/null;"
            f" then exit() {marks_exit}; _holdfast_armed_=1; fi",
        ]

    def disarm(self, *, trapped: bool) -> list[str]:
        trap = ["\\builtin trap - EXIT"] if trapped else []
        # Not one that the command itself has defined.
        ours = "[[ $(\\builtin declare -f exit) == *_holdfast_exit_* ]] && \\builtin unset -f exit"
        return [*trap, f"[[ -z ${{_holdfast_armed_-}} ]] || {{ {ours};\\builtin unset -v _holdfast_armed_;}}"]

    def at_exit(self, pipes: str) -> str:
        return (
            "if [[ -z ${_holdfast_exit_-} ]]; then\n"
            # It may be being stopped: the traps that stop it are no part of its state.
            "builtin trap - DEBUG; builtin shopt -u extdebug; builtin set +ET; {\n"
            "builtin printf '\\0s'\n"
            f"{self.dump()}\n"
            "[[ ${_holdfast_flags_-} != *e* ]] || builtin printf 'set -e\\n'\n"
            "[[ -z ${_holdfast_armed_-} ]] || builtin printf 'unset -f exit\\n'\n"
            "builtin printf 'unset -v _holdfast_ _holdfast_armed_ _holdfast_flags_\\n'\n"
            f"builtin printf '%s\\n\\0.' '{STATE_END}'; }} 1<>{pipes}/{SAVED} 2>/dev/null; fi\n"
        )

    def dump(self) -> str:
        return "; ".join(
            [
                "\\builtin shopt -p",
                "\\builtin umask -p",
                "\\builtin printf 'builtin cd -- %q\\n' \"${PWD-/}\"",
                "\\builtin declare -f",
                "\\builtin alias -p",
                "\\builtin declare -p",
                "\\builtin trap -p",
                "\\builtin printf 'trap - EXIT\\n'",
                "(($#)) && { \\builtin printf 'set --'; \\builtin printf ' %q' \"$@\"; \\builtin printf '\\n'; }",
                "\\builtin set +o",
            ]
        )


class Zsh(ShellDialect):
    """zsh: a function in a loop can only be stopped by a new program."""

    builtin = "\\builtin"
    exec = "\\exec"
    source = "\\builtin ."
    leave = "\\builtin return"
    hushed = "2>/dev/null"
    begin = ()
    stop = "return 130"
    clears_traps = True
    passes_env = False
    leave_subshell = ""
    dies_of_readonly = False
    interrupt_signal = signal.SIGUSR2

    def show_traps(self) -> str:
        return "\\builtin trap;\\builtin trap - DEBUG ZERR;"

    def arguments(self, *, login: bool) -> list[str]:
        return ["-l", "-s"] if login else ["-f", "-s"]

    def set_env(self, step: ShellStep) -> list[str]:
        return [
            f"_holdfast_had_{name}=${{(t){name}}} _holdfast_old_{name}=${{{name}-}}; export {name}={quote(value)}"
            for name, value in (step.env or {}).items()
        ]

    def unset_env(self, step: ShellStep) -> list[str]:
        return [
            f"case $_holdfast_had_{name} in '') unset {name};; *export*) {name}=$_holdfast_old_{name};;"
            f" *) {name}=$_holdfast_old_{name}; typeset +x {name};; esac;"
            f" unset _holdfast_had_{name} _holdfast_old_{name}"
            for name in step.env or ()
        ]

    def dump(self) -> str:
        return "; ".join(
            [
                "\\builtin typeset -p",
                "\\builtin functions",
                "\\builtin alias -L",
                "\\builtin printf 'umask %s\\n' \"$(umask)\"",
            ]
        )


def _can_end_with_more(text: str) -> bool:
    """Whether a line can follow the command, to keep its status and `$_`.

    An open here-document would swallow the line, a trailing operator or backslash would join it, and tracing or a
    trap would show it.
    """
    end = text.rstrip()
    unfinished = ("\\", "&&", "||", "|", "|&", "!")
    return "<<" not in text and not end.endswith(unfinished) and not _SHOWS_LINES.found_in(text)


#: The dialects by the name of the program; any other program is taken for a POSIX shell.
DIALECTS: Final[dict[str, type[ShellDialect]]] = {
    **dict.fromkeys(("sh", "dash", "ash", "ksh", "mksh"), ShellDialect),
    "bash": Bash,
    **dict.fromkeys(("zsh", "zsh5"), Zsh),
}


def dialect_for(path: str) -> ShellDialect:
    """The dialect for a program, by its name."""
    return DIALECTS.get(path.rsplit("/", 1)[-1], ShellDialect)()
