"""Where the service keeps its database if nobody says where: the user's state directory. Looks at the environment.

Nothing is made here; a verb that only looks must not leave a directory behind.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def default_store_path(environ: Mapping[str, str] | None = None) -> str:
    """The SQLite file of this user's service, by the convention for state that should outlive a restart."""
    found = os.environ if environ is None else environ
    state = found.get("XDG_STATE_HOME", "")
    # A relative one is to be ignored, says the convention.
    if not os.path.isabs(state):
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "holdfast", "service.db")


def store_url(setting: str) -> str:
    """The URL of the setting `store`, or of the default."""
    return setting or f"sqlite:///{default_store_path()}"
