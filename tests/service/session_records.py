"""Sessions and audit entries for tests, with what a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from holdfast.service.types import AuditEntry, SessionPolicy, SessionRecord

POLICY = SessionPolicy("default", idle_timeout=600.0, max_lifetime=3600.0, idle_grace=60.0)


def record(session_id: str = "s1", agent_id: str = "a", **fields: Any) -> SessionRecord:
    values: dict[str, Any] = {
        "session_id": session_id,
        "agent_id": agent_id,
        "kind": "terminal",
        "sandbox": "local",
        "policy": POLICY,
        "created_at": 1000.0,
        "last_activity_at": 1000.0,
        "initial_cwd": "/work",
    }
    return SessionRecord(**{**values, **fields})


def entry(session_id: str = "s1", kind: str = "command", at: float = 1000.5, **fields: Any) -> AuditEntry:
    return AuditEntry(session_id, at, fields.pop("agent_id", "a"), kind, fields.pop("command_id", ""), fields)
