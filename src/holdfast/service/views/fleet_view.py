"""The engines that the rules allow, and all sandboxes: those of the engines, and those that open sessions use."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.fleet.pool import PoolStatus
from holdfast.fleet.record import SandboxRef
from holdfast.service.policy.profiles import PolicyRules
from holdfast.service.sandboxes.session_pools import PREFIX
from holdfast.service.sandboxes.session_sandboxes import SessionSandboxes
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.store import Store
from holdfast.service.view_api import EngineState, FleetState, PoolState, SandboxState

#: How long an engine may take to list its sandboxes.
LIST_SECONDS: Final = 10.0


async def list_fleet(
    rules: PolicyRules, engines: SessionSandboxes, store: Store, pool: SandboxConnections
) -> FleetState:
    """Return the state of the fleet. An engine that does not respond has a problem, and the others are listed."""
    sessions = Counter(each.sandbox for each in await store.open_sessions())
    owners = {each.sandbox: each.session_id for each in await store.owned_sandboxes()}
    named = {name for profile in rules.profiles.values() for name in profile.sandbox.engines}
    names = sorted(named | {address.partition(":")[0] for address in owners})
    listed = await asyncio.gather(*(_engine(engines, name) for name in names))
    sandboxes: dict[str, SandboxState] = {}
    for _, refs in listed:
        for ref in refs:
            # Sessions use the short form, which is no container's name.
            address = f"{ref.engine}:{ref.id}"
            sandboxes[address] = SandboxState(
                address=address,
                engine=ref.engine,
                state=ref.state,
                labels=ref.labels,
                created_at=ref.created_at,
                expires_at=ref.expires_at,
                sessions=sessions[address] + sessions[ref.address],
                connected=address in pool.addresses or ref.address in pool.addresses,
                session_id=owners.get(address, ""),
                pool=ref.record.pool.removeprefix(PREFIX),
            )
    for address in {*sessions, *pool.addresses} - {
        *sandboxes,
        *(ref.address for _, refs in listed for ref in refs),
    }:
        connected = address in pool.addresses
        state = "running" if connected else "not connected"
        sandboxes[address] = SandboxState(address, state=state, sessions=sessions[address], connected=connected)
    return FleetState(
        tuple(state for state, _ in listed),
        tuple(sandboxes[each] for each in sorted(sandboxes)),
        _pools(rules, engines),
    )


def _pools(rules: PolicyRules, engines: SessionSandboxes) -> tuple[PoolState, ...]:
    """Return the pools of the rules, with the numbers of those that are open."""
    statuses = engines.pools.statuses
    found = []
    for name, pool in sorted(rules.pools.items()):
        status = statuses.get(name, PoolStatus())
        found.append(
            PoolState(
                name=name,
                engine=pool.engine,
                warm=status.warm,
                taken=status.taken,
                creating=status.creating,
                waiting=status.waiting,
                warm_wanted=pool.warm,
                max=pool.max,
                open=name in statuses,
            )
        )
    return tuple(found)


async def _engine(engines: SessionSandboxes, name: str) -> tuple[EngineState, list[SandboxRef]]:
    try:
        async with asyncio.timeout(LIST_SECONDS):
            refs = await engines.listed(name)
    except TimeoutError:
        return EngineState(name, True, problem=f"no list within {LIST_SECONDS:g} s"), []
    except HoldfastError as error:
        return EngineState(name, True, problem=error.message), []
    return EngineState(name, refs is not None, len(refs or [])), refs or []
