"""The defaults of a connection for its calls: user, working directory and variables; and paths as text. Pure."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping

from holdfast.errors import InvalidParams

#: A path as text or as a path-like object.
StrPath = str | os.PathLike[str]
#: A path as text or bytes, because file names need not be text.
Path = StrPath | bytes | os.PathLike[bytes]


def path_text(path: Path, what: str = "path") -> str:
    """The path as `os.fsdecode` returns it, which keeps bytes that are not UTF-8."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise InvalidParams(f"{what}: a path, not {path!r}") from None
    if not text:
        raise InvalidParams(f"{what} is empty")
    return text


def optional_path(path: Path | None, what: str = "cwd") -> str | None:
    return None if path is None else path_text(path, what)


def check_env(env: Mapping[str, str] | None) -> dict[str, str] | None:
    """Check and copy variables. A number as value is a common mistake, and would fail far from the call."""
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidParams(f"env: names and values are strings, not {name!r}: {value!r}")
    return None if env is None else dict(env)


class Defaults:
    """The user, working directory and variables of calls that do not set their own."""

    def __init__(
        self, *, user: str | None = None, cwd: StrPath | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._user = user
        self._cwd = optional_path(cwd)
        self._env = check_env(env)

    def user(self, user: str | None) -> str | None:
        return self._user if user is None else user

    def cwd(self, cwd: StrPath | None) -> str | None:
        """The directory of a call: a relative one begins at the default. A `file:` URI is absolute."""
        text = optional_path(cwd)
        if text is None or self._cwd is None or text.startswith("file:"):
            return text or self._cwd
        return posixpath.join(self._cwd, text)

    def env(self, env: Mapping[str, str] | None) -> dict[str, str] | None:
        """A call's variables laid over the defaults."""
        own = check_env(env)
        return own if self._env is None else {**self._env, **(own or {})}

    def path(self, path: Path) -> str:
        """The path of a file: a relative one begins at the default directory."""
        text = path_text(path)
        return text if self._cwd is None else posixpath.join(self._cwd, text)
