"""The variables, the user and the working directory of a process. Reads the user database only."""

from __future__ import annotations

import fnmatch
import grp
import os
import pwd
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from holdfast.errors import CwdNotFound, InvalidParams, PermissionRefused, UnknownUser
from holdfast.secret_names import is_dropped
from holdfast.types import CORE_VARIABLES, Confinement, EnvPolicy, ProcessSpec

#: A terminal type that nearly every program supports; used if the caller sets none.
DEFAULT_TERM = "xterm-256color"


#: The next number is -1 to the kernel.
MAX_ID = 2**32 - 2
#: In a jail, the name and the home directory of a user that the machine's user database does not list.
JAIL_USER = "agent"
JAIL_HOME = "/home/agent"


class Account(NamedTuple):
    """The user of a process."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str
    #: Whether the user database lists the account.
    listed: bool = True

    def within(self, confinement: Confinement | None) -> Account:
        """Return the account as its programs see it: a jail lists every user, with a home directory in the jail."""
        if self.listed or confinement is None or confinement.mode == "none":
            return self
        if confinement.mode == "bubblewrap":
            return self._replace(name=JAIL_USER, home=JAIL_HOME)
        return self._replace(home=next(iter(confinement.writable), self.home))


def build_environment(
    spec: ProcessSpec, base: Mapping[str, str], account: Account | None = None
) -> Mapping[str, str]:
    """Return the variables of a process; `base` itself if nothing changes. `env` without a policy is exact."""
    if spec.env is not None and spec.env_policy is None:
        return spec.env
    if spec.env is None and spec.env_policy is None and account is None and not spec.tty:
        return base
    variables = apply_policy(spec.env_policy, base) if spec.env_policy else dict(base)
    if spec.tty:
        variables.setdefault("TERM", DEFAULT_TERM)
    if account is not None:
        seen = account.within(spec.confinement)
        variables.update(HOME=seen.home, USER=seen.name, LOGNAME=seen.name)
    variables.update(spec.env or {})
    return variables


def apply_policy(policy: EnvPolicy, base: Mapping[str, str]) -> dict[str, str]:
    """Inherit, drop names like those of secrets, exclude, set, and include only; in this order."""
    if policy.inherit == "none":
        variables = {}
    elif policy.inherit == "core":
        variables = {name: value for name, value in base.items() if _matches(name, CORE_VARIABLES)}
    else:
        variables = dict(base)
    if not policy.ignore_default_excludes:
        variables = {name: v for name, v in variables.items() if not is_dropped(name, v)}
    variables = {name: v for name, v in variables.items() if not _matches(name, policy.exclude)}
    variables.update(policy.set)
    if policy.include_only:
        variables = {name: v for name, v in variables.items() if _matches(name, policy.include_only)}
    return variables


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name.upper(), pattern.upper()) for pattern in patterns)


def resolve_user(user: str) -> Account:
    """Return the account for `name`, `uid`, or `uid:gid`; a uid needs no entry in the user database."""
    name, _, group = user.partition(":")
    uid = _parse_id(name)
    listed = True
    try:
        entry = pwd.getpwnam(name) if uid is None else pwd.getpwuid(uid)
    except (KeyError, ValueError):  # ValueError for a name with a NUL or without a valid encoding
        if uid is None:
            raise UnknownUser(f"unknown user {name!r}") from None
        entry, listed = pwd.struct_passwd((name, "x", uid, uid, "", "/", "/bin/sh")), False
    gid, groups = entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)
    if group:
        gid = _resolve_group(group)
        groups = [gid]
    own = os.geteuid()
    if own != 0 and (entry.pw_uid, gid) != (own, os.getegid()):
        raise PermissionRefused(f"cannot run as {user!r}: the server is not root")
    return Account(entry.pw_name, entry.pw_uid, gid, tuple(groups), entry.pw_dir or "/", entry.pw_shell, listed)


def _resolve_group(group: str) -> int:
    gid = _parse_id(group)
    if gid is not None:
        return gid
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        raise UnknownUser(f"unknown group {group!r}") from None


def _parse_id(text: str) -> int | None:
    """Return a numeric user or group id; None for a name.

    The largest 32-bit number is refused: setresuid(2) would keep the server's user for it.
    """
    if not text.isdecimal():
        return None
    if len(text) > 10 or int(text) > MAX_ID:
        raise UnknownUser(f"unknown user or group: {text[:20]} is no id, the largest is {MAX_ID}")
    return int(text)


def resolve_cwd(cwd: str | None) -> str:
    """Return the path of a path or a `file:` URI; None is the server's working directory."""
    if cwd is None:
        try:
            return os.getcwd()
        except OSError as error:
            raise CwdNotFound(f"the server's working directory is gone: {error.strerror}") from None
    if not cwd:
        raise InvalidParams("cwd is empty")
    if cwd.startswith("file:"):
        try:
            parts = urlsplit(cwd)
        except ValueError as error:
            raise InvalidParams(f"cwd {cwd!r}: {error}") from None
        if parts.netloc not in ("", "localhost"):
            raise InvalidParams(f"cwd {cwd!r}: not a file of this machine")
        cwd = unquote(parts.path)
    if "\0" in cwd:
        raise InvalidParams("cwd holds a NUL character")
    return cwd or "/"
