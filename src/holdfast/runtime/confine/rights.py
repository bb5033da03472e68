"""From rights on paths, as another program's policy states them, to a `Confinement` that gives no more than these.

Looks at the file system, because a mount needs a path that exists. What a confinement cannot express is
`Forbidden`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from holdfast.errors import Forbidden
from holdfast.runtime.confine.paths import is_beneath
from holdfast.types import Confinement

Access = Literal["read", "write", "deny"]
#: Of two rights on one path, the one further left counts.
_STRONGEST_FIRST: Final = ("deny", "write", "read")
#: A jail has its own of these unless they are given.
_COVERED: Final = ("/tmp",)


class Right(NamedTuple):
    """What may be done below a path; a right on a path below it counts for more."""

    #: Absolute and normalized.
    path: str
    access: Access
    #: Of no consequence while there is nothing of this name.
    optional: bool = False


def confinement_for(rights: Iterable[Right] | None, *, network: bool) -> Confinement | None:
    """The confinement that enforces these rights (None: on every path) and, without `network`, keeps it out."""
    if rights is None:
        # A namespace of its own has no say over Unix sockets, which are files.
        return None if network else Confinement(mode="none", network="none", unix_sockets=False)
    given = _by_path(rights)
    if given.get("/", "deny") == "deny":
        raise Forbidden("sandbox: a policy under which not all files can be read cannot be enforced here")
    given |= {path: given["/"] for path in _COVERED if path not in given and os.path.realpath(path) == path}
    return Confinement(
        mode="bubblewrap",
        writable=_of(given, "write"),
        readable=_of(given, "read"),
        hidden=_of(given, "deny"),
        network="host" if network else "none",
        unix_sockets=network,
    )


def _of(given: Mapping[str, Access], access: Access) -> tuple[str, ...]:
    return tuple(sorted(path for path, each in given.items() if each == access))


def _by_path(rights: Iterable[Right]) -> dict[str, Access]:
    """The strongest right on each path that exists and for which it makes a difference."""
    strongest: dict[str, Right] = {}
    for right in rights:
        other = strongest.setdefault(right.path, right)
        if _STRONGEST_FIRST.index(right.access) < _STRONGEST_FIRST.index(other.access):
            strongest[right.path] = right
    given: dict[str, Access] = {}
    for path, right in sorted(strongest.items()):
        above = max((each for each in given if is_beneath(path, each)), key=len, default=None)
        outer = "deny" if above is None else given[above]
        if right.access == outer and path not in _COVERED:
            continue
        if not os.path.lexists(path):
            _leave_out(right, outer)
            continue
        real = os.path.realpath(path)
        if real != path:
            # A process that may write above it could have made a link of it, to anywhere.
            raise Forbidden(f"sandbox: {path} is a symbolic link, or below one: name {real}")
        given[path] = right.access
    return given


def _leave_out(right: Right, outer: Access) -> None:
    """Check that a right on a path that does not exist can be left out without giving more than the policy does."""
    narrows = right.access == "deny" or (right.access, outer) == ("read", "write")
    if narrows and not right.optional:
        raise Forbidden(f"sandbox: {right.path} cannot be kept back: there is nothing of this name")
