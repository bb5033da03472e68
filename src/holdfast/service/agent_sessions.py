"""The sessions as the service has them: `sessions.manager` with what only the assembly knows laid over it.

Profiles that operators gave to agents (`agent add --profile`), which the store knows, and the rules are asked for
in a call that cannot wait; spans around the work in sandboxes; a count of subscribers.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import cast

import msgspec
from prometheus_client import Gauge

from holdfast.service.api import Created, CreateRequest, Event
from holdfast.service.observability.traced_live import traced
from holdfast.service.observability.tracing import Tracer
from holdfast.service.policy.engine import resolve
from holdfast.service.policy.profiles import PolicyRules
from holdfast.service.problems import NotFound
from holdfast.service.sessions.backend.terminal import Live
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.store import Store
from holdfast.service.types import Caller, EventType, Policy, SessionRecord


class AgentRulebook(Rulebook):
    """The rules in force, with profiles that single agents were given."""

    def __init__(self, rules: PolicyRules) -> None:
        super().__init__(rules)
        self._given: dict[str, str] = {}

    def give(self, agent_id: str, profile: str) -> None:
        """The agent's own profile is this one; empty is the one that the rules say."""
        if profile:
            self._given[agent_id] = profile
        else:
            self._given.pop(agent_id, None)

    def resolve(self, agent_id: str, request: CreateRequest, *, operator: bool) -> Policy:
        if agent_id not in self._given:
            return super().resolve(agent_id, request, operator=operator)
        agent = msgspec.structs.replace(self.rules.agent(agent_id), profile=self._given[agent_id])
        rules = self.rules.within(request.sandbox)
        rules = msgspec.structs.replace(rules, agents={**rules.agents, agent_id: agent})
        return resolve(rules, agent_id, request.policy, initial_cwd=request.initial_cwd, operator=operator)


class AgentSessions(SessionManager):
    """The sessions, made by the profile that their agent was given, and with spans for what is done for them."""

    agents: Store
    rulebook: AgentRulebook
    tracer: Tracer
    subscribers: Gauge

    async def events(
        self, caller: Caller, session_id: str = "", since: str = "", types: Sequence[EventType] = ()
    ) -> AsyncIterator[Event]:
        self.subscribers.inc()
        found = cast(AsyncGenerator[Event, None], super().events(caller, session_id, since, types))
        try:
            # Closed with ours, also when the subscriber leaves in the middle.
            async with contextlib.aclosing(found):
                async for event in found:
                    yield event
        finally:
            self.subscribers.dec()

    def live(self, record: SessionRecord) -> Live:
        return traced(super().live(record), self.tracer, record)

    async def create(self, caller: Caller, request: CreateRequest) -> Created:
        agent_id = request.agent_id or caller.agent_id
        profile = ""
        with contextlib.suppress(NotFound):  # an operator may name one that has no token
            profile = str((await self.agents.agent(agent_id)).limits.get("profile", ""))
        self.rulebook.give(agent_id, profile)
        return await super().create(caller, request)
