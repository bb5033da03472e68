"""Opens the database that the settings name. Apart from `assembly`, for verbs that need no more of the service.

Touches the file with the audit's key, and the database.
"""

from __future__ import annotations

from typing import Any

from holdfast.service.clock import WallClock
from holdfast.service.settings import ServiceSettings, store_url
from holdfast.service.store import Store


async def open_store(
    settings: ServiceSettings,
    *,
    clock: WallClock | None = None,
    look_only: bool = False,
    kind: type[Store] = Store,
    **parts: Any,
) -> Store:
    """The database that the settings name, with the audit's key."""
    key = _audit_key(settings.audit_key_file)
    return await kind.open(store_url(settings.store), clock=clock, audit_key=key, look_only=look_only, **parts)


def _audit_key(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read().strip()
