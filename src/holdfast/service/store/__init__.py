"""The database: sessions, leases, the audit log, approvals, agents. The only package with SQL."""

from __future__ import annotations

from holdfast.service.store.store import Store, open_store
from holdfast.service.store.types import (
    MISSED,
    AgentRecord,
    Fence,
    Page,
    Removed,
    RowNotice,
    SessionFilter,
    SessionLease,
)
from holdfast.service.store.verification import Verification

__all__ = [
    "MISSED",
    "AgentRecord",
    "Fence",
    "Page",
    "Removed",
    "RowNotice",
    "SessionFilter",
    "SessionLease",
    "Store",
    "Verification",
    "open_store",
]
