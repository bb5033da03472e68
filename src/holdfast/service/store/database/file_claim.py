"""One service for one SQLite file: whoever serves it holds a lock beside it, which ends with its process.

Verbs that look, or that make agents, use the file without it. Touches `PATH-lock`: closing a descriptor of the
database itself would take away the locks that SQLite has on it.
"""

from __future__ import annotations

import fcntl
import os
from io import FileIO

from holdfast.service.problems import NotNow, Unavailable


def claim_file(path: str) -> FileIO:
    """The lock, until it is closed. `NotNow` names the process that has it."""
    name = f"{path}-lock"
    try:
        file = FileIO(os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        raise Unavailable(f"store {name}: {error.strerror}", reason="STORE_UNAVAILABLE") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = file.read(32).decode("ascii", "replace").strip()
        file.close()
        raise NotNow(
            f"store {path}: another service has it (pid {owner or 'unknown'}); several need PostgreSQL",
            reason="STORE_TAKEN",
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    return file
