"""Names that have a meaning in bash and dash: variables, builtins, operators of `test`; pure data."""

from __future__ import annotations

import re
from typing import Final

#: Variables that change which program a name refers to, run something themselves, or name a program to run.
STEERING: Final = re.compile(
    r"(PATH|LD_\w+|ENV|IFS|HOME|SHELL|SHELLOPTS|PROMPT_COMMAND|PS[0-4]|BASH\w*|BASH_FUNC_.*|INPUTRC|histchars"
    r"|MAIL|MAILPATH|HIST\w+|FUNCNEST|CDPATH|GLOBIGNORE|EXECIGNORE|FCEDIT|POSIXLY_CORRECT|TEXTDOMAIN\w*"
    r"|COMP\w+|READLINE_\w+|DIRSTACK|FUNCNAME|GROUPS|PIPESTATUS|UID|EUID|PPID|XDG_CONFIG_\w+|ZDOTDIR"
    r"|GIT_(?!(?:AUTHOR|COMMITTER)_)\w+|\w*PAGER|\w*EDITOR|VISUAL|BROWSER|LESS\w*|MANOPT|EXINIT|VIMINIT"
    r"|\w+_ASKPASS|RSYNC_RSH|CVS_RSH|TAR_OPTIONS|PYTHON\w+|PERL\w+|RUBY\w+|NODE_\w+|JAVA_\w+|_JAVA_OPTIONS"
    r"|MAKEFLAGS|MAKEFILES|GCONV_PATH|LOCPATH|NLSPATH|GLIBC_TUNABLES|RIPGREP_CONFIG_PATH|FZF_\w+)"
)
#: Variables of bash with an evaluated value: only a number is harmless.
COUNTING: Final = frozenset(["RANDOM", "SRANDOM", "SECONDS", "LINENO", "OPTIND", "OPTERR", "TMOUT", "EPOCHSECONDS"])
#: Variables that the shell sets itself, so they may not hold the value assigned in the text.
SET_BY_SHELL: Final = COUNTING | {"_", "REPLY", "OPTARG", "PWD", "OLDPWD", "MAPFILE", "COPROC", "COLUMNS", "LINES"}
#: Builtins with names of variables as arguments.
ASSIGNING: Final = frozenset(
    ["export", "declare", "typeset", "local", "readonly", "read", "mapfile", "readarray", "unset", "getopts"]
)
DECLARING: Final = frozenset(["export", "declare", "typeset", "local", "readonly"])
#: Attributes that make a later assignment evaluate, write elsewhere, or fail.
ATTRIBUTES: Final = {
    "i": "evaluates later values",
    "n": "gives a variable another name",
    "r": "makes later assignments fail",
}
#: Operators of `test` with a word on each side, and before a word. Not `-v`, which evaluates an index, and not `-a`
#: and `-o`, which another operator may follow.
TWO_SIDED: Final = frozenset(
    ["=", "==", "!=", "<", ">", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef"]
)
ONE_SIDED: Final = frozenset(f"-{letter}" for letter in "bcdefghknprstuwxzGLNORS")
#: Names that a function must not redefine, since the parser relies on their behaviour.
BUILTINS: Final = frozenset(
    [
        *(
            ":",
            ".",
            "[",
            "alias",
            "bg",
            "bind",
            "break",
            "builtin",
            "caller",
            "cd",
            "command",
            "compgen",
            "complete",
        ),
        *("compopt", "continue", "declare", "dirs", "disown", "echo", "enable", "eval", "exec", "exit", "export"),
        *("false", "fc", "fg", "getopts", "hash", "help", "history", "jobs", "kill", "let", "local", "logout"),
        *("mapfile", "popd", "printf", "pushd", "pwd", "read", "readarray", "readonly", "return", "set", "shift"),
        *("shopt", "source", "suspend", "test", "times", "trap", "true", "type", "typeset", "ulimit", "umask"),
        *("unalias", "unset", "wait", "env", "sudo", "xargs", "find", "git"),
    ]
)
MOVING: Final = frozenset(["cd", "chdir", "pushd", "popd", "chroot"])
#: Options that make a builtin change which program runs, or run something itself.
RUNNING_OPTIONS: Final = {"hash": "p", "jobs": "x", "mapfile": "C", "readarray": "C"}
