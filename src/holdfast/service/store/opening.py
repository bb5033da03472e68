"""Opens the database that the settings name. Apart from `assembly`, for verbs that need no more of the service.

Touches the file with the audit's key, and the database.
"""

from __future__ import annotations

from holdfast.service.clock import Clock
from holdfast.service.settings import ServiceSettings
from holdfast.service.state_directory import store_url
from holdfast.service.store import Store


async def open_store(
    settings: ServiceSettings,
    *,
    clock: Clock | None = None,
    look_only: bool = False,
    kind: type[Store] = Store,
) -> Store:
    """The database that the settings name, with the audit's key."""
    return await kind.open(
        store_url(settings.store), clock=clock, audit_key=_audit_key(settings.audit_key_file), look_only=look_only
    )


def _audit_key(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read().strip()
