"""The parts that the sessions of one replica share. Pure data."""

from __future__ import annotations

from holdfast.service.clock import WallClock
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.following.events import NoticeHub
from holdfast.service.sessions.ports import EmitMetric, Redact, SessionStore
from holdfast.service.settings import ServiceSettings
from holdfast.service.types import ServiceStruct


class SessionContext(ServiceStruct, frozen=True):
    """Given to every part that creates, follows or closes sessions."""

    store: SessionStore
    pool: SandboxConnections
    notices: NoticeHub
    clock: WallClock
    settings: ServiceSettings
    redact: Redact
    emit: EmitMetric
    replica: str
