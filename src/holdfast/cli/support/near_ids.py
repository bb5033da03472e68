"""Suggests an id for one that is not known, as in "did you mean 'web'?"; pure.

Standard library only, and `difflib` is imported on failure only: `quick` uses this module.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def suggestion(wanted: Sequence[str], known: Collection[str]) -> str:
    """Return `; did you mean 'web'?` for the first id that is not known and resembles one; else an empty text."""
    from difflib import get_close_matches

    for id in wanted:
        if id in known:
            continue
        longer = [each for each in known if id and each.startswith(id)]
        near = longer if len(longer) == 1 else get_close_matches(id, known, n=1)
        if near:
            return f"; did you mean {near[0]!r}?"
    return ""
