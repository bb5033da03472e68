"""Those who may call, as an operator handles them: made, listed, given another token, removed; each with a row.

Works on the store alone. A token leaves this module once, as the answer; the store has its hash.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.service.access.tokens import hash_token, new_token
from holdfast.service.policy.profiles import valid_agent_id
from holdfast.service.problems import Exists, Invalid
from holdfast.service.store import AgentRecord, Store
from holdfast.service.types import SERVICE_STREAM, AuditEntry, Role

#: Who the first start makes.
FIRST_OPERATOR: Final = "operator"


async def add(store: Store, name: str, role: Role = "agent", profile: str = "") -> str:
    """Make an agent; its token. `Exists` if there is one of this name."""
    if not valid_agent_id(name):
        raise Invalid(
            f"{name!r}: a name has letters, digits and . _ @ -, begins with none of . @ - and is at most 128 long",
            reason="AGENT_NAME",
        )
    token = new_token()
    await store.add_agent(name, hash_token(token), role=role, limits={"profile": profile} if profile else {})
    await _note(store, name, "agent_added", role=role, profile=profile)
    return token


async def rotate(store: Store, name: str) -> str:
    """Give it another token."""
    token = new_token()
    await store.rotate_agent(name, hash_token(token))
    await _note(store, name, "agent_rotated")
    return token


async def remove(store: Store, name: str) -> None:
    """Its token is nobody's from now on. Its sessions stay until they are closed or their time is up."""
    await store.remove_agent(name)
    await _note(store, name, "agent_removed")


async def listed(store: Store) -> list[AgentRecord]:
    return await store.agents()


async def make_first_operator(store: Store) -> str:
    """A token, if nobody could answer approvals or see all sessions before; else nothing.

    Two replicas that start at once on one database make one: the name is taken for the second.
    """
    if await store.has_operator():
        return ""
    taken = {agent.agent_id for agent in await store.agents()}
    name = FIRST_OPERATOR
    while name in taken:  # one that was disabled
        name += "-"
    try:
        return await add(store, name, "operator")
    except Exists:
        return ""


async def _note(store: Store, name: str, kind: str, **body: Any) -> None:
    said = {key: value for key, value in body.items() if value}
    await store.append([AuditEntry(SERVICE_STREAM, store.database.clock.time(), name, kind, body=said)])
