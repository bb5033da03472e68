"""Programs that run another program, and the position of that program in their arguments; pure.

One table. An option that is not in it makes the rest unknown instead of misread: whether a word is an option's
value or the command decides what runs.
"""

from __future__ import annotations

import posixpath
import re
from typing import Final

from holdfast.service.policy.shell.words import Word
from holdfast.service.types import ServiceStruct

_ASSIGNED: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


class UnknownCommand(Exception):
    """The arguments of a wrapper do not determine the command that it runs."""


class Wrapper(ServiceStruct, frozen=True):
    """The options of a program that runs the rest of its arguments."""

    #: Letters of options without a value, and with one.
    flags: str = ""
    values: str = ""
    long_flags: tuple[str, ...] = ()
    long_values: tuple[str, ...] = ()
    #: Number of words before the command.
    operands: int = 0
    #: Whether NAME=VALUE may precede the command.
    assigns: bool = False
    #: `-10`, `+5`.
    numbers: bool = False
    #: The wrapper only runs the command: a rule for that command is enough to allow it.
    transparent: bool = True


class Split(ServiceStruct, frozen=True):
    """The parsed arguments of a wrapper."""

    given: frozenset[str]
    values: dict[str, Word]
    assigned: tuple[Word, ...]
    rest: tuple[Word, ...]


_SETARCH: Final = Wrapper("RFILSTXZ3Bv")
_SUDO: Final = Wrapper(
    "ABbEeHikKlnNPSsvV",
    "CDghpRrTtUu",
    ("askpass", "background", "edit", "login", "non-interactive", "preserve-env", "set-home", "shell", "stdin"),
    ("close-from", "chdir", "group", "host", "prompt", "chroot", "command-timeout", "other-user", "user"),
    assigns=True,
    transparent=False,
)

WRAPPERS: Final[dict[str, Wrapper]] = {
    "env": Wrapper(
        "i0v",
        "uCa",
        ("ignore-environment", "null", "debug", "block-signal", "default-signal", "ignore-signal"),
        ("unset", "chdir", "argv0"),
        assigns=True,
    ),
    "nohup": Wrapper(),
    "nice": Wrapper("", "n", (), ("adjustment",), numbers=True),
    "ionice": Wrapper("t", "cn", ("ignore",), ("class", "classdata")),
    "chrt": Wrapper("abdfiorRmv", "DPT", ("batch", "fifo", "idle", "other", "rr", "reset-on-fork"), (), operands=1),
    "taskset": Wrapper("ac", "", ("all-tasks", "cpu-list"), (), operands=1),
    "timeout": Wrapper(
        "fpv", "ks", ("foreground", "preserve-status", "verbose"), ("kill-after", "signal"), operands=1
    ),
    "time": Wrapper("apqv", "fo", ("append", "portability", "quiet", "verbose"), ("format", "output")),
    "stdbuf": Wrapper("", "ioe", (), ("input", "output", "error")),
    "setsid": Wrapper("cfw", "", ("ctty", "fork", "wait"), ()),
    **dict.fromkeys(("setarch", "linux32", "linux64", "x86_64", "i386", "i486", "i586", "i686"), _SETARCH),
    "choom": Wrapper("", "np", (), ("adjust", "pid")),
    "eatmydata": Wrapper(),
    "gosu": Wrapper(operands=1),
    "su-exec": Wrapper(operands=1),
    "sg": Wrapper(operands=1),
    "prlimit": Wrapper("", "cdefilmnqrstuvxy", (), ()),
    "unbuffer": Wrapper("p"),
    "fakeroot": Wrapper("u", "lsi", ("unknown-is-real",), ("lib", "faked", "save", "load")),
    "catchsegv": Wrapper(),
    "builtin": Wrapper(),
    "command": Wrapper("pvV"),
    "exec": Wrapper("cl", "a"),
    "flock": Wrapper(
        "sxeunoFv",
        "wE",
        ("shared", "exclusive", "unlock", "nonblock", "nb", "close", "no-fork", "verbose"),
        ("wait", "timeout", "conflict-exit-code"),
        operands=1,
    ),
    "xargs": Wrapper(
        "0oprtx",
        "adEILnPs",
        ("null", "open-tty", "interactive", "no-run-if-empty", "verbose", "exit", "show-limits"),
        ("arg-file", "delimiter", "max-lines", "max-args", "max-procs", "max-chars", "process-slot-var"),
    ),
    "busybox": Wrapper(),
    "toybox": Wrapper(),
    "sudo": _SUDO,
    "doas": Wrapper("Lns", "aCu", assigns=False, transparent=False),
    "pkexec": Wrapper("", "", ("disable-internal-agent", "keep-cwd"), ("user",), transparent=False),
    "chroot": Wrapper("", "", ("skip-chdir",), ("groups", "userspec"), operands=1, transparent=False),
    "strace": Wrapper(
        "cCdDfFhikqrtTvVwxyYzZ", "abeEIoOpPsSuUX", ("follow-forks",), ("output", "trace"), transparent=False
    ),
    "ltrace": Wrapper("bcCfiLrStT", "aAeFlnopsux", transparent=False),
    "watch": Wrapper(
        "bcdegtwx",
        "nq",
        ("beep", "color", "differences", "errexit", "chgexit", "no-title", "no-wrap", "exec", "precise"),
        ("interval", "equexit"),
        transparent=False,
    ),
    "setpriv": Wrapper(
        "d",
        "",
        ("dump", "clear-groups", "init-groups", "keep-groups", "no-new-privs", "nnp", "reset-env"),
        ("ruid", "euid", "rgid", "egid", "reuid", "regid", "groups", "bounding-set", "inh-caps", "ambient-caps"),
        transparent=False,
    ),
    "unshare": Wrapper("cfimnpruCTU", "RSGw", ("fork", "map-root-user", "net", "user", "pid"), transparent=False),
    "xvfb-run": Wrapper("al", "efnpsw", ("auto-servernum", "listen-tcp"), ("server-args", "server-num")),
    "dbus-run-session": Wrapper("", "", (), ("dbus-daemon", "config-file")),
}

#: Programs that run commands from elsewhere than their arguments, or in a process that outlives the line.
OPAQUE: Final[dict[str, str]] = {
    name: reason
    for reason, names in {
        "it builds command lines": "parallel rush",
        "it starts shells": "tmux screen",
        "it starts a shell": "script newgrp login",
        "it is another user's shell": "su runuser",
        "it runs its input later": "at batch crontab",
        "another process runs the command": "systemd-run start-stop-daemon daemonize",
        "it runs in other namespaces": "nsenter",
        "it types into other programs": "expect",
        "it loads builtins": "enable",
        "it runs its arguments": "compopt complete compgen",
        "it runs earlier commands": "fc",
        "it changes what keys do": "bind stty",
        "it runs the program in its arguments": """
            bwrap capsh chpst cpulimit dbus-launch dtach dumb-init entr faketime firejail gdb hyperfine ncat nsjail
            numactl perf pexec proot proxychains proxychains4 rlwrap run-parts runcon setuidgid socat softlimit
            ssh-agent systemd-inhibit tini torsocks tsocks valgrind xterm
        """,
    }.items()
    for name in names.split()
}
#: Arguments of `stty` with which it prints and changes nothing.
STTY_PRINTS: Final = frozenset({"size", "speed", "-a", "--all", "-g", "--save"})
#: Wrappers that start a shell without a command.
STARTS_SHELL: Final = frozenset(
    [name for name, wrapper in WRAPPERS.items() if wrapper is _SETARCH]
    + ["chroot", "unshare", "fakeroot", "sg", "gosu", "su-exec"]
)
#: Programs that continue after the prompt returns, or after the session.
BACKGROUND: Final = frozenset(
    [
        *("nohup", "setsid", "disown", "bg", "tmux", "screen", "at", "batch", "crontab"),
        *("systemd-run", "start-stop-daemon", "daemonize"),
    ]
)


def split(words: tuple[Word, ...], wrapper: Wrapper) -> Split:
    """Remove options, assignments and operands; the rest is the command."""
    name = posixpath.basename(words[0].text)
    given: set[str] = set()
    values: dict[str, Word] = {}
    assigned: list[Word] = []
    operands = wrapper.operands
    at, options = 1, True
    if name == "setarch" and len(words) > 1 and words[1].known and not words[1].text.startswith("-"):
        at = 2  # the architecture precedes the options, if given
    while at < len(words):
        word = words[at]
        if wrapper.assigns and _ASSIGNED.match(word.text) and not word.splits:
            assigned.append(word)
            options = False
            at += 1
            continue
        if not word.known:
            raise UnknownCommand(f"`{word.text}` may be an option of `{name}` or its command")
        text = word.text
        if options and text == "--":
            options = False
        elif options and text.startswith("--"):
            at += _long(text[2:], name, wrapper, given, values, words, at)
        elif options and wrapper.numbers and re.fullmatch(r"[-+]\d+", text):
            given.add("number")
        elif options and text == "-" and wrapper.assigns:
            given.add("i")
        elif options and text.startswith("-") and text != "-":
            at += _short(text[1:], name, wrapper, given, values, words, at)
        elif operands:
            operands -= 1
            options = False
        else:
            break
        at += 1
    return Split(frozenset(given), values, tuple(assigned), words[at:])


def _long(
    option: str,
    name: str,
    wrapper: Wrapper,
    given: set[str],
    values: dict[str, Word],
    words: tuple[Word, ...],
    at: int,
) -> int:
    """Return how many more words the option takes."""
    key, equals, value = option.partition("=")
    if key in wrapper.long_values:
        values[key] = Word(value) if equals else words[at + 1] if at + 1 < len(words) else Word("")
        return 0 if equals else 1
    if key not in wrapper.long_flags:
        raise UnknownCommand(f"`--{key}` is not a known option of `{name}`")
    given.add(key)
    return 0


def _short(
    letters: str,
    name: str,
    wrapper: Wrapper,
    given: set[str],
    values: dict[str, Word],
    words: tuple[Word, ...],
    at: int,
) -> int:
    for index, letter in enumerate(letters):
        if letter in wrapper.values:
            rest = letters[index + 1 :]
            following = words[at + 1] if at + 1 < len(words) else Word("")
            if not rest and following.splits:
                raise UnknownCommand(f"`{following.text}` may be more than the value of `-{letter}`")
            values[letter] = Word(rest) if rest else following
            return 0 if rest else 1
        if letter not in wrapper.flags:
            raise UnknownCommand(f"`-{letter}` is not a known option of `{name}`")
        given.add(letter)
    return 0
