"""Policies of another program: their rights on paths as a `Confinement`, and whether a failure was a denial.

Reads the file system, because a mount needs a path that exists. Rights that a confinement cannot express are
`Forbidden`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from holdfast.errors import Forbidden
from holdfast.runtime.confine.paths import is_beneath
from holdfast.types import Confinement, ExitStatus

Access = Literal["read", "write", "deny"]
#: Of two rights on one path, the one further left applies.
_STRONGEST_FIRST: Final = ("deny", "write", "read")
#: A jail has its own of these unless the policy names them.
_COVERED: Final = ("/tmp",)
#: How much of the end of each stream is searched: a message of failure is among the last lines.
EVIDENCE_BYTES: Final = 64 * 1024
#: The texts of the C library for a call that the filter, a read-only mount, a mask or a rule of Landlock refused.
_REFUSED: Final = tuple(os.strerror(number) for number in (errno.EPERM, errno.EACCES, errno.EROFS))
#: And for one that found no network: by address and, where names cannot be resolved, by name.
_NO_NETWORK: Final = (
    os.strerror(errno.ENETUNREACH),
    "Temporary failure in name resolution",
    "Could not resolve host",
)


class PathRight(NamedTuple):
    """A right on all below a path; a right on a path below it takes precedence."""

    #: Absolute and normalized.
    path: str
    access: Access
    #: Without effect while the path does not exist.
    optional: bool = False


def confinement_for(rights: Iterable[PathRight] | None, *, network: bool) -> Confinement | None:
    """The confinement that enforces these rights (None: all rights on every path) and, if wanted, no network."""
    if rights is None:
        # A network namespace does not restrict Unix sockets, which are files.
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


def _by_path(rights: Iterable[PathRight]) -> dict[str, Access]:
    """The strongest right on each existing path that differs from the right above it."""
    strongest: dict[str, PathRight] = {}
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
            # A process that may write above it could have replaced it by a link to anywhere.
            raise Forbidden(f"sandbox: {path} is a symbolic link, or below one: name {real}")
        given[path] = right.access
    return given


def _leave_out(right: PathRight, outer: Access) -> None:
    """Check that a right on a missing path can be omitted without allowing more than the policy does."""
    narrows = right.access == "deny" or (right.access, outer) == ("read", "write")
    if narrows and not right.optional:
        raise Forbidden(f"sandbox: {right.path} cannot be restricted: it does not exist")


def was_denied(confinement: Confinement | None, status: ExitStatus, ends: Iterable[bytes]) -> bool:
    """Whether it failed and one of `ends`, the last bytes of its streams, has the text of a refusal.

    The kernel reports a refused call to the calling process alone: neither a read-only mount nor the filter leaves
    a trace outside. So the evidence is indirect; docs/confinement.md has the rule.
    """
    if confinement is None or status.success or status.signal is not None:
        return False
    texts = [*_REFUSED, *(() if confinement.network == "host" else _NO_NETWORK)]
    wanted = [text.lower().encode() for text in texts]
    return any(text in end.lower() for end in ends for text in wanted)
