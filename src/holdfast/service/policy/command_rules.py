"""Matches commands with rules; pure.

A word that is known only at run time might be anything. A rule that allows must match for certain; one that denies
or requires approval matches as soon as it might.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Sequence
from typing import Final

from holdfast.service.policy.command_line import ParsedCommand
from holdfast.service.policy.profiles import CommandRule, Profile
from holdfast.service.policy.runners import may_run_others

#: Directories of the standard programs. A file of the same name elsewhere may be a different program.
SYSTEM_DIRECTORIES: Final = frozenset(
    ["/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"]
)
_Match = bool | None  # None: possibly


def warnings(profile: Profile) -> list[str]:
    """Return warnings for rules that allow more than they seem to, each with its location."""
    found = []
    for index, rule in enumerate(profile.commands.rules):
        programs = [name for name in rule.program if may_run_others(posixpath.basename(name))]
        if rule.verdict == "allow" and programs and rule.matches_any_arguments:
            key = f"commands.rules.{index}"
            found.append(
                f"{profile.location(key)}: profiles.{profile.name}.{key}: "
                f"{', '.join(programs)} can run any program; rules for other programs do not hold for what it runs"
            )
    return found


def match_rule(rules: Sequence[CommandRule], command: ParsedCommand, cwd: str) -> int | None:
    """Return the index of the first rule that matches."""
    for index, rule in enumerate(rules):
        matched = _all(
            _program(rule, command, cwd),
            _arguments(rule, command),
            _pattern(rule.pattern, command),
        )
        if matched or (matched is None and rule.verdict != "allow"):
            return index
    return None


def _all(*parts: _Match) -> _Match:
    if False in parts:
        return False
    return None if None in parts else True


def _program(rule: CommandRule, command: ParsedCommand, cwd: str) -> _Match:
    if not rule.program:
        return True
    found = [_one_program(pattern, rule.verdict == "allow", command, cwd) for pattern in rule.program]
    return True if True in found else None if None in found else False


def _one_program(pattern: str, allows: bool, command: ParsedCommand, cwd: str) -> _Match:
    typed = command.program
    if "/" not in pattern:
        if not fnmatch.fnmatchcase(command.name, pattern):
            return False
        is_standard = "/" not in typed or posixpath.dirname(posixpath.normpath(typed)) in SYSTEM_DIRECTORIES
        # `./git` is not the git that a rule allows, and may be the one that a rule denies.
        return is_standard or not allows
    if "/" not in typed or typed.startswith("~"):
        # Resolved through PATH or a home directory: it may be this file.
        return None if fnmatch.fnmatchcase(command.name, posixpath.basename(pattern)) else False
    if not typed.startswith("/") and not cwd:
        return None if fnmatch.fnmatchcase(command.name, posixpath.basename(pattern)) else False
    return fnmatch.fnmatchcase(posixpath.normpath(posixpath.join(cwd or "/", typed)), pattern)


def _arguments(rule: CommandRule, command: ParsedCommand) -> _Match:
    first = _arguments_at(0, rule.arguments, command)
    if first is not False or rule.verdict == "allow" or not rule.arguments:
        return first
    # `git -C . push`, `git --no-pager push`: only the program defines which options take the next word.
    if not command.arguments[:1] or not command.arguments[0].text.startswith("-"):
        return False
    following = range(1, len(command.arguments))
    return None if any(_arguments_at(at, rule.arguments, command) is not False for at in following) else False


def _arguments_at(begin: int, wanted: tuple[str, ...], command: ParsedCommand) -> _Match:
    for index, text in enumerate(wanted, begin):
        if index >= len(command.arguments):
            return False
        word = command.arguments[index]
        if not word.exact:
            return None
        if not fnmatch.fnmatchcase(word.text, text):
            return False
    return True


def _pattern(pattern: str, command: ParsedCommand) -> _Match:
    if not pattern:
        return True
    exact = all(word.exact for word in command.arguments)
    if re.search(pattern, command.text):
        return True if exact else None
    return False if exact else None
