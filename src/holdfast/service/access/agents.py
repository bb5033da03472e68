"""Administration of agents: adds, lists and removes agents and rotates their tokens, each with an audit row.

Uses only the store. A token is returned once; the store has its hash.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

from holdfast.service.access.tokens import hash_token, new_token
from holdfast.service.policy.profiles import valid_agent_id
from holdfast.service.problems import Exists, Invalid, NotFound
from holdfast.service.store import AgentRecord, Store
from holdfast.service.types import SERVICE_STREAM, AuditEntry, Role

#: The operator that the first start creates.
FIRST_OPERATOR: Final = "operator"


async def add(store: Store, name: str, role: Role = "agent", profile: str = "") -> str:
    """Add an agent and return its token. `Exists` if the name is taken."""
    if not valid_agent_id(name):
        raise Invalid(
            f"{name!r}: a name has letters, digits and . _ @ -, begins with none of . @ - and is at most 128 long",
            reason="AGENT_NAME",
        )
    token = new_token()
    await store.add_agent(name, hash_token(token), role=role, limits={"profile": profile} if profile else {})
    await _record(store, name, "agent_added", role=role, profile=profile)
    return token


async def rotate(store: Store, name: str) -> str:
    """Replace the token of an agent and return the new one."""
    token = new_token()
    await store.rotate_agent(name, hash_token(token))
    await _record(store, name, "agent_rotated")
    return token


async def remove(store: Store, name: str) -> None:
    """Remove an agent and its token. Its sessions stay until they are closed or expire."""
    await store.remove_agent(name)
    await _record(store, name, "agent_removed")


async def assigned_profile(store: Store, agent_id: str) -> str:
    """Return the profile that the agent was added with; empty if it has none, or no token."""
    with contextlib.suppress(NotFound):
        return str((await store.agent(agent_id)).limits.get("profile", ""))
    return ""


async def listed(store: Store) -> list[AgentRecord]:
    return await store.agents()


async def make_first_operator(store: Store) -> str:
    """Add an operator if there is none, and return its token; else return an empty string.

    Two replicas that start at once on one database add one operator: for the second, the name is taken.
    """
    if await store.has_operator():
        return ""
    taken = {agent.agent_id for agent in await store.agents()}
    name = FIRST_OPERATOR
    while name in taken:  # by a disabled operator
        name += "-"
    try:
        return await add(store, name, "operator")
    except Exists:
        return ""


async def _record(store: Store, name: str, kind: str, **body: Any) -> None:
    given = {key: value for key, value in body.items() if value}
    await store.append([AuditEntry(SERVICE_STREAM, store.database.clock.time(), name, kind, body=given)])
