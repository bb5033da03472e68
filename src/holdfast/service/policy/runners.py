"""Programs that run other programs because of an option, a file or a language of their own; pure.

`runs_by_option` finds such options in a command. Files and scripts of these programs are not parsed: docs/policy.md
lists the programs, and `check-rules` warns of a rule that allows one.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.service.policy.shell.words import Word

#: Options, or other words, that make a program run another one. Long options may be abbreviated.
_OPTIONS: Final[dict[str, re.Pattern[str]]] = {
    name: re.compile(pattern, re.S)
    for names, pattern in (
        ("tar", r"--(?:to-c|ch\w*-a|use|i\w*-s|new|rsh|rmt).*|-[A-Za-z]*[IF].*"),
        ("ssh scp sftp", r"-[FSD].*|(?i:(?:-o\s*)?(?:proxy|local|permitlocal|knownhosts)command\b.*)"),
        ("rsync", r"-[A-Za-z]*e.*|--rsh.*|--rsync-p.*"),
        ("man", r"-[A-Za-z]*[PHC].*|--(?:pag|htm|conf).*"),
        ("sort", r"--comp.*"),
        ("split", r"--filt.*"),
        ("zip", r"-[A-Za-z]*T.*|--(?:test|unzip).*"),
        ("wget", r"-[A-Za-z]*e.*|--(?:use-ask|exe|conf).*"),
        ("rg", r"--pre(?!tty).*|--hostname-bin.*"),
        ("fd fdfind", r"-[A-Za-z]*[xX].*|--exec.*"),
        ("ip", r"exec|-b.*"),
        ("apt apt-get", r"-[A-Za-z]*[oc].*|--(?:opt|conf).*"),
        ("dpkg", r"--(?:pre|post)-inv.*"),
        ("tcpdump", r"-[A-Za-z]*z.*"),
        ("install", r"--strip-p.*"),
        ("cpio", r"--rsh.*"),
    )
    for name in names.split()
}
#: Programs that run others without an option for it: languages, builders, editors, and those with hooks.
_WITHOUT_OPTION: Final = frozenset(
    [
        *("awk", "gawk", "mawk", "nawk", "sed", "perl", "python", "python3", "ruby", "node", "php", "lua", "tclsh"),
        *("make", "cmake", "ninja", "cargo", "go", "gcc", "cc", "npm", "npx", "pnpm", "yarn", "pip", "pip3", "uv"),
        *("mvn", "gradle", "docker", "podman", "kubectl", "vi", "vim", "nvim", "ex", "ed", "emacs", "nano", "less"),
        *("more", "man", "gdb", "psql", "mysql", "sqlite3", "ftp", "nmap", "source", ".", "bash", "sh", "dash"),
        *(
            "sudo",
            "doas",
            "su",
            "find",
            "env",
            "xargs",
            "strace",
            "busybox",
            "git",
            "dc",
            "m4",
            "jshell",
            "systemctl",
        ),
    ]
)
_LOADER: Final = re.compile(r"ld(?:-linux|-musl)?[\w.-]*\.so(?:\.\d+)*|ld-[\d.]+\.so")

#: Options of git before its command that take the next word.
_GIT_VALUES: Final = frozenset(["-C", "--git-dir", "--work-tree", "--namespace", "--super-prefix", "--attr-source"])
_GIT_RUNS: Final = re.compile(r"-c.*|--config-env.*|--exec-path=.*")
#: The commands of git. Any other word is an alias, which a configuration file defines.
_GIT_COMMAND_NAMES: Final = """
add am annotate apply archive bisect blame branch bugreport bundle cat-file check-attr check-ignore
check-mailmap check-ref-format checkout checkout-index cherry cherry-pick citool clean clone column
commit commit-graph commit-tree config count-objects credential credential-cache credential-store
describe diagnose diff diff-files diff-index diff-tree difftool fast-export fast-import fetch
fetch-pack filter-branch fmt-merge-msg for-each-ref for-each-repo format-patch fsck gc
get-tar-commit-id grep gui hash-object help hook http-backend http-fetch http-push imap-send
index-pack init init-db instaweb interpret-trailers log ls-files ls-remote ls-tree mailinfo
mailsplit maintenance merge merge-base merge-file merge-index merge-one-file merge-tree mergetool
mktag mktree multi-pack-index mv name-rev notes pack-objects pack-redundant pack-refs patch-id prune
prune-packed pull push quiltimport range-diff read-tree rebase receive-pack reflog refs remote
repack replace replay request-pull rerere reset restore rev-list rev-parse revert rm send-email
send-pack shell shortlog show show-branch show-index show-ref sparse-checkout stage stash status
stripspace submodule switch symbolic-ref tag unpack-file unpack-objects update-index update-ref
update-server-info upload-archive upload-pack var verify-commit verify-pack verify-tag version
whatchanged worktree write-tree
"""
_GIT_COMMANDS: Final = frozenset(_GIT_COMMAND_NAMES.split())
_GIT_RUNNING_COMMANDS: Final = frozenset(
    ["difftool", "mergetool", "filter-branch", "for-each-repo", "instaweb", "send-email", "citool", "gui", "shell"]
)
_GIT_OPTIONS: Final = re.compile(r"-x.*|--exe.*|--ext.*|--upl.*|--rec[^u].*|--open.*|-O.*|ext::.*|foreach", re.S)
#: Settings of git that name a program.
_GIT_SETTINGS: Final = re.compile(
    r"(?i)alias\..*|.*(?:command|cmd|pager|editor|helper|driver|textconv|smudge|clean|process|hookspath|fsmonitor"
    r"|askpass|program|gitproxy|external|path|uploadpack|receivepack|browser)(?:=.*)?",
    re.S,
)


def is_loader(name: str) -> bool:
    """True for the dynamic loader, which runs the file that is its argument."""
    return _LOADER.fullmatch(name) is not None


def may_run_others(pattern: str) -> bool:
    """True if a program of this name can run others because of its arguments or files."""
    return pattern in _WITHOUT_OPTION or pattern in _OPTIONS


def runs_by_option(name: str, words: tuple[Word, ...]) -> str | None:
    """Return how the arguments make a command run another one, or None."""
    if name == "git":
        return _git(words)
    pattern = _OPTIONS.get(name)
    if pattern is None:
        return None
    for index, word in enumerate(words[1:], 1):
        if word.known and pattern.fullmatch(word.text):
            return f"`{word.text[:80]}` runs another program"
        # The first word of tar may hold options without a dash.
        if name == "tar" and index == 1 and word.known and pattern.fullmatch(f"-{word.text}"):
            return f"`{word.text[:80]}` runs another program"
    return None


def _git(words: tuple[Word, ...]) -> str | None:
    at = 1
    while at < len(words) and (not words[at].known or words[at].text.startswith("-")):
        if not words[at].known:
            return f"`{words[at].text[:80]}` may be an option of it"
        if _GIT_RUNS.fullmatch(words[at].text):
            return f"`{words[at].text[:80]}` changes which programs it runs"
        at += 2 if words[at].text in _GIT_VALUES else 1
    if at >= len(words):
        return None
    command = words[at].text
    if command not in _GIT_COMMANDS:
        return f"`{command[:80]}` is not one of its commands, and may be an alias"
    if command in _GIT_RUNNING_COMMANDS:
        return f"`{command}` runs other programs"
    for word in words[at + 1 :]:
        if word.known and (
            _GIT_OPTIONS.fullmatch(word.text)
            or (command == "bisect" and word.text == "run")
            or (command == "config" and _GIT_SETTINGS.fullmatch(word.text))
            or (command == "hook" and word.text == "run")
        ):
            return f"`{command} {word.text[:80]}` may run another program"
    return None
